"""The producers of a trial: all methods of publishing, Kafka, event-store appends, and rolled-back transactions."""

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
from headwater.trials.chaos.config import TrialConfig, make_event
from headwater.trials.chaos.journal import Journal

RETRY_SECONDS: Final = 0.1
PAUSE_POLL_SECONDS: Final = 0.02
APPENDS_PER_SECOND: Final = 20.0
ROLLBACKS_PER_SECOND: Final = 10.0
ROLLBACK_EVENTS: Final = 10
FLUSH_SECONDS: Final = 30.0


class RollbackRequest(Exception):
    """Raised in a transaction to roll it back."""


def sleep(seconds: float) -> None:
    """Sleep, to limit the rate of a producer."""
    threading.Event().wait(seconds)


def may_continue(config: TrialConfig) -> bool:
    """Wait while producers are paused; returns False if they must stop."""
    while config.pause_file.exists() and not config.stop_file.exists():
        sleep(PAUSE_POLL_SECONDS)
    return not config.stop_file.exists()


@dataclass(slots=True)
class Producer:
    """Publishes numbered events with all methods of the library, and records the outcome of each."""

    log: headwater.Headwater
    config: TrialConfig
    name: str
    journal: Journal
    rng: random.Random
    numbers: Iterator[int]
    # The numbers being published, to be recorded again when the outcome is known.
    latest: Sequence[int] = ()

    def run(self) -> None:
        methods: Sequence[Callable[[], int]] = (self.one, self.one_with_id, self.batch, self.copy, self.transaction)
        while may_continue(self.config):
            try:
                published = self.rng.choice(methods)()
            except (LogUnavailable, TransactionAborted):
                # Unknown whether it was published: it stays recorded as tried. Two transactions that each publish to
                # several partitions may deadlock, and Postgres then aborts one of them.
                published = 1
            sleep(published / self.config.events_per_second)

    def _next(self, count: int) -> list[NewEvent]:
        chunk = list(itertools.islice(self.numbers, count))
        self.journal.record("tried", chunk)
        self.latest = chunk
        return [make_event(self.name, number) for number in chunk]

    def _topic(self) -> str:
        return self.rng.choice((self.config.open_topic, self.config.partition_topic))

    def one(self) -> int:
        (event,) = self._next(1)
        self.log.publish(self._topic(), event.payload, key=event.key, type=event.type)
        self.journal.record("acknowledged", self.latest)
        return 1

    def one_with_id(self) -> int:
        """Publish with an event id, which makes a retry idempotent."""
        (event,) = self._next(1)
        topic = self._topic()
        while True:
            try:
                self.log.publish(topic, event.payload, key=event.key, event_id=f"{self.name}/{self.latest[0]}")
                break
            except LogUnavailable:
                sleep(RETRY_SECONDS)
        self.journal.record("acknowledged", self.latest)
        return 1

    def batch(self) -> int:
        events = self._next(self.rng.randrange(2, 40))
        self.log.publish_batch(self._topic(), events)
        self.journal.record("acknowledged", self.latest)
        return len(events)

    def copy(self) -> int:
        events = self._next(self.rng.randrange(20, 100))
        self.log.publish_many(self._topic(), events, chunk_size=30)
        self.journal.record("acknowledged", self.latest)
        return len(events)

    def transaction(self) -> int:
        """Publish with several calls in one transaction, which is sometimes rolled back."""
        events = self._next(4)
        try:
            with self.log.transaction() as connection:
                for event in events:
                    self.log.publish(self._topic(), event.payload, key=event.key, connection=connection)
                if self.rng.random() < 0.3:
                    raise RollbackRequest
        except RollbackRequest:
            self.journal.record("rolled back", self.latest)
        else:
            self.journal.record("acknowledged", self.latest)
        return len(events)


def produce(config: TrialConfig, name: str, journal: Journal, rng: random.Random, numbers: Iterator[int]) -> None:
    with headwater.connect(config.dsn, pool_size=1, application_name=config.name) as log:
        Producer(log, config, name, journal, rng, numbers).run()


def roll_back(config: TrialConfig) -> None:
    """Publish and roll back repeatedly, which assigns positions that no commit makes durable."""
    with headwater.connect(config.dsn, pool_size=1, application_name=config.name) as log:
        while not config.stop_file.exists():
            try:
                publish_and_roll_back(log, config)
            except LogUnavailable:
                sleep(RETRY_SECONDS)
            sleep(1 / ROLLBACKS_PER_SECOND)


def publish_and_roll_back(log: headwater.Headwater, config: TrialConfig) -> None:
    events = [NewEvent({}) for _ in range(ROLLBACK_EVENTS)]
    try:
        with log.transaction() as connection:
            log.publish_batch(config.rollback_topic, events, connection=connection)
            raise RollbackRequest
    except RollbackRequest:
        return


def append(config: TrialConfig, name: str, journal: Journal, numbers: Iterator[int]) -> None:
    """Append to the event store with event ids, which make retries idempotent."""
    with headwater.connect(config.dsn, pool_size=1, application_name=config.name) as log:
        store = log.store(config.store_topic)
        for number in numbers:
            if not may_continue(config):
                return
            event = NewStoreEvent("Chaos", {"by": name, "n": number}, event_id=f"{name}/{number}")
            journal.record("tried", [number])
            while True:
                try:
                    store.append(event)
                    break
                except LogUnavailable:
                    sleep(RETRY_SECONDS)
            journal.record("acknowledged", [number])
            sleep(1 / APPENDS_PER_SECOND)


def produce_with_kafka(config: TrialConfig, name: str, journal: Journal, numbers: Iterator[int]) -> None:
    """Publish with an idempotent Kafka producer, and record each event when the broker has acknowledged it.

    After a failover the broker does not know the sequence numbers that were lost with the old primary. The client
    treats that as a fatal error, as with Kafka; a new client continues with the next event and sends nothing again
    under its producer id. So each event is in the log at most once, also after a failover.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka import Producer as KafkaProducer

    settings = {
        "bootstrap.servers": f"127.0.0.1:{config.kafka_port}",
        "enable.idempotence": True,
        # No timeout: after one, librdkafka raises the epoch of the producer and sends unacknowledged events again with
        # new sequence numbers, which the broker cannot recognize as duplicates.
        "message.timeout.ms": 0,
        "reconnect.backoff.max.ms": 500,
        "log_level": 0,
    }
    failed = threading.Event()

    def on_delivery_of(number: int) -> Callable[[Any, Any], None]:
        def on_delivery(error: Any, message: Any) -> None:
            if error is None:
                journal.record("acknowledged", [number])
            elif error.fatal():
                failed.set()

        return on_delivery

    while may_continue(config):
        client = KafkaProducer({**settings, "error_cb": lambda error: failed.set() if error.fatal() else None})
        failed.clear()
        while not failed.is_set() and may_continue(config):
            number = next(numbers)
            event = make_event(name, number)
            journal.record("tried", [number])
            try:
                client.produce(
                    config.partition_topic,
                    json.dumps(event.payload).encode(),
                    key=event.key,
                    on_delivery=on_delivery_of(number),
                )
                client.poll(1 / config.events_per_second)
            # SystemError: the client raises its fatal error and calls on_delivery for earlier responses.
            except (KafkaException, BufferError, SystemError):
                failed.set()
        # Each call may raise the fatal error again.
        with suppress(KafkaException, SystemError):
            client.flush(FLUSH_SECONDS)
