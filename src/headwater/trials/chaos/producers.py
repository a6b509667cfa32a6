"""What publishes in a trial: in every way there is, by Kafka, by appending to an event store, and only to roll back."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import headwater
from headwater import NewEvent
from headwater.errors import LogUnavailable, TransactionAborted
from headwater.eventstore import NewStoreEvent
from headwater.trials.chaos.journal import Journal
from headwater.trials.chaos.stage import Stage, event_of

AGAIN_SECONDS: Final = 0.1
PAUSE_LOOK_SECONDS: Final = 0.02
APPENDS_PER_SECOND: Final = 20.0
ROLLBACKS_PER_SECOND: Final = 10.0
ROLLED_BACK_EVENTS: Final = 10
FLUSH_SECONDS: Final = 30.0


class RolledBack(Exception):
    """Raised in a transaction to roll it back."""


def sleep(seconds: float) -> None:
    """Not a wait for something: how fast a producer is to go."""
    threading.Event().wait(seconds)


def on_stage(stage: Stage) -> bool:
    """Wait while producers are to pause; False if they are to end."""
    while stage.pause_file.exists() and not stage.stop_file.exists():
        sleep(PAUSE_LOOK_SECONDS)
    return not stage.stop_file.exists()


@dataclass(slots=True)
class Producer:
    """Publishes numbered events in every way there is, and notes what was answered to each."""

    log: headwater.Headwater
    stage: Stage
    name: str
    journal: Journal
    chance: random.Random
    numbers: Iterator[int]
    # What it is publishing, to be noted again when the answer is known.
    latest: Sequence[int] = ()

    def run(self) -> None:
        ways: Sequence[Callable[[], int]] = (self.one, self.one_by_id, self.batch, self.copy, self.transaction)
        while on_stage(self.stage):
            try:
                made = self.chance.choice(ways)()
            except (LogUnavailable, TransactionAborted):
                # Whether it was published is unknown: it stays as tried. Two that publish to lanes in several calls
                # of one transaction may stand in each other's way, and Postgres then ends one of them.
                made = 1
            sleep(made / self.stage.events_per_second)

    def _next(self, count: int) -> list[NewEvent]:
        chunk = list(itertools.islice(self.numbers, count))
        self.journal.note("tried", chunk)
        self.latest = chunk
        return [event_of(self.name, number) for number in chunk]

    def _topic(self) -> str:
        return self.chance.choice((self.stage.open_topic, self.stage.lane_topic))

    def one(self) -> int:
        (event,) = self._next(1)
        self.log.publish(self._topic(), event.payload, key=event.key, type=event.type)
        self.journal.note("acknowledged", self.latest)
        return 1

    def one_by_id(self) -> int:
        """The one way that may be tried again without an answer."""
        (event,) = self._next(1)
        topic = self._topic()
        while True:
            try:
                self.log.publish(topic, event.payload, key=event.key, event_id=f"{self.name}/{self.latest[0]}")
                break
            except LogUnavailable:
                sleep(AGAIN_SECONDS)
        self.journal.note("acknowledged", self.latest)
        return 1

    def batch(self) -> int:
        events = self._next(self.chance.randrange(2, 40))
        self.log.publish_batch(self._topic(), events)
        self.journal.note("acknowledged", self.latest)
        return len(events)

    def copy(self) -> int:
        events = self._next(self.chance.randrange(20, 100))
        self.log.publish_many(self._topic(), events, chunk_size=30)
        self.journal.note("acknowledged", self.latest)
        return len(events)

    def transaction(self) -> int:
        """Several calls in one transaction, which is rolled back now and then."""
        events = self._next(4)
        try:
            with self.log.transaction() as connection:
                for event in events:
                    self.log.publish(self._topic(), event.payload, key=event.key, connection=connection)
                if self.chance.random() < 0.3:
                    raise RolledBack
        except RolledBack:
            self.journal.note("rolled back", self.latest)
        else:
            self.journal.note("acknowledged", self.latest)
        return len(events)


def produce(stage: Stage, name: str, journal: Journal, chance: random.Random, numbers: Iterator[int]) -> None:
    with headwater.connect(stage.dsn, pool_size=1, application_name=stage.name) as log:
        Producer(log, stage, name, journal, chance, numbers).run()


def roll_back(stage: Stage) -> None:
    """Publish and roll back, again and again: positions are assigned that no commit makes durable."""
    with headwater.connect(stage.dsn, pool_size=1, application_name=stage.name) as log:
        while not stage.stop_file.exists():
            try:
                publish_and_roll_back(log, stage)
            except LogUnavailable:
                sleep(AGAIN_SECONDS)
            sleep(1 / ROLLBACKS_PER_SECOND)


def publish_and_roll_back(log: headwater.Headwater, stage: Stage) -> None:
    events = [NewEvent({}) for _ in range(ROLLED_BACK_EVENTS)]
    try:
        with log.transaction() as connection:
            log.publish_batch(stage.rollback_topic, events, connection=connection)
            raise RolledBack
    except RolledBack:
        return


def append(stage: Stage, name: str, journal: Journal, numbers: Iterator[int]) -> None:
    """Append to the event store, each event under an id, so that it may be tried again without an answer."""
    with headwater.connect(stage.dsn, pool_size=1, application_name=stage.name) as log:
        store = log.store(stage.store_topic)
        for number in numbers:
            if not on_stage(stage):
                return
            event = NewStoreEvent("Chaos", {"by": name, "n": number}, event_id=f"{name}/{number}")
            journal.note("tried", [number])
            while True:
                try:
                    store.append(event)
                    break
                except LogUnavailable:
                    sleep(AGAIN_SECONDS)
            journal.note("acknowledged", [number])
            sleep(1 / APPENDS_PER_SECOND)


def produce_by_kafka(stage: Stage, name: str, journal: Journal, numbers: Iterator[int]) -> None:
    """A client of Kafka: each event is noted when the broker has acknowledged it.

    An idempotent producer promises each event once for as long as it lives. After a failover the broker does not know
    the sequence numbers that were lost with the old primary. The client takes that for a fatal error, as with Kafka;
    another one goes on with the next event, and nothing is sent again under another producer id. So each event is in
    the log at most once, also after a failover.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka import Producer as KafkaProducer

    settings = {
        "bootstrap.servers": f"127.0.0.1:{stage.kafka_port}",
        "enable.idempotence": True,
        # Without end: when an event times out, librdkafka raises the producer's epoch and sends others again that had
        # no answer, under new sequence numbers, by which the broker cannot know them.
        "message.timeout.ms": 0,
        "reconnect.backoff.max.ms": 500,
        "log_level": 0,
    }
    failed = threading.Event()

    def note(number: int) -> Callable[[Any, Any], None]:
        def answered(error: Any, message: Any) -> None:
            if error is None:
                journal.note("acknowledged", [number])
            elif error.fatal():
                failed.set()

        return answered

    while on_stage(stage):
        client = KafkaProducer({**settings, "error_cb": lambda error: failed.set() if error.fatal() else None})
        failed.clear()
        while not failed.is_set() and on_stage(stage):
            number = next(numbers)
            event = event_of(name, number)
            journal.note("tried", [number])
            try:
                client.produce(
                    stage.lane_topic, json.dumps(event.payload).encode(), key=event.key, on_delivery=note(number)
                )
                client.poll(1 / stage.events_per_second)
            # SystemError: the client raises its fatal error and still calls on_delivery for what was answered before.
            except (KafkaException, BufferError, SystemError):
                failed.set()
        # Each call may raise the fatal error again.
        with suppress(KafkaException, SystemError):
            client.flush(FLUSH_SECONDS)
