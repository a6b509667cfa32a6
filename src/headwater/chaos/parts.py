"""The processes of a trial: producers, workers, followers, brokers. Each is killed at any moment, and started again.

`python -m headwater.chaos.parts ROLE NAME SEED` with a `Stage` as JSON in its environment.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

import headwater
from headwater import App, ClaimedEvent, Dead, Event, NewEvent, Retry
from headwater.chaos.journal import Journal
from headwater.errors import LogUnavailable, TransactionAborted
from headwater.model import Outcome

STAGE_VARIABLE: Final = "HEADWATER_CHAOS_STAGE"
KEYS: Final = 60
POISON_EVERY_SECONDS: Final = 20.0
AGAIN_SECONDS: Final = 0.1

PLAIN, EXACT, ORDERED = "plain", "exact", "ordered"
FOLLOWER, PROCESSOR = "follower", "processor"

INSERT_EFFECT: Final = "insert into headwater_chaos.effect (consumer, position) values (%s, %s)"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a trial plays. All names of its own, so that it disturbs nobody and can be taken away again."""

    dsn: str
    name: str
    directory: str
    events_per_second: float
    lease_seconds: float
    max_attempts: int
    kafka_port: int

    @property
    def open_topic(self) -> str:
        return f"{self.name}-open"

    @property
    def lane_topic(self) -> str:
        return f"{self.name}-lanes"

    @property
    def stop_file(self) -> Path:
        return Path(self.directory, "stop")

    def consumer(self, role: str) -> str:
        """The name of a group or a cursor."""
        return f"{self.name}-{role}"

    def topics_of(self, role: str) -> tuple[str, ...]:
        """What a consumer reads. Huge transactions come to the open topic, and ordered keys take their time."""
        return (self.lane_topic,) if role == ORDERED else (self.open_topic, self.lane_topic)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def event_of(producer: str, number: int, *, poison: bool = False) -> NewEvent:
    """An event that says who made it, and as which of its own."""
    payload = {"by": producer, "n": number, **({"poison": True} if poison else {})}
    return NewEvent(payload, key=f"k{number % KEYS}", type="Poison" if poison else "Chaos")


# --- producers -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Producer:
    """Publishes numbered events in every way there is, and notes what it was told about each."""

    log: headwater.Headwater
    stage: Stage
    name: str
    journal: Journal
    chance: random.Random
    numbers: Iterator[int]
    # What it is at, to be noted again when it is known how that went.
    latest: Sequence[int] = ()

    def run(self) -> None:
        ways: Sequence[Callable[[], int]] = (self.one, self.one_by_id, self.batch, self.copy, self.transaction)
        while not self.stage.stop_file.exists():
            try:
                made = self.chance.choice(ways)()
            except (LogUnavailable, TransactionAborted):
                # Whether it was published, nobody knows: it stays as tried. Two that publish to lanes in several calls
                # of one transaction may stand in each other's way, and Postgres then ends one of them.
                made = 1
            # Not a wait for something: this is how fast it is to go.
            threading.Event().wait(made / self.stage.events_per_second)

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
                threading.Event().wait(AGAIN_SECONDS)
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
                    raise _ChangedItsMind
        except _ChangedItsMind:
            self.journal.note("rolled back", self.latest)
        else:
            self.journal.note("acknowledged", self.latest)
        return len(events)


class _ChangedItsMind(Exception):
    """Rolls back."""


def produce(stage: Stage, name: str, journal: Journal, chance: random.Random, numbers: Iterator[int]) -> None:
    with headwater.connect(stage.dsn, pool_size=1, application_name=stage.name) as log:
        Producer(log, stage, name, journal, chance, numbers).run()


def produce_by_kafka(stage: Stage, name: str, journal: Journal, chance: random.Random) -> None:
    """The same as a client of Kafka: each event is noted when the broker has acknowledged it."""
    from confluent_kafka import Producer as KafkaProducer

    client = KafkaProducer(
        {
            "bootstrap.servers": f"127.0.0.1:{stage.kafka_port}",
            "enable.idempotence": True,
            "message.timeout.ms": 120_000,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
    )

    def told(number: int) -> Callable[[Any, Any], None]:
        return lambda error, message: None if error else journal.note("acknowledged", [number])

    for number in itertools.count(1):
        if stage.stop_file.exists():
            break
        event = event_of(name, number)
        journal.note("tried", [number])
        client.produce(stage.lane_topic, json.dumps(event.payload).encode(), key=event.key, on_delivery=told(number))
        client.poll(1 / stage.events_per_second)
    client.flush(60)


# --- consumers -----------------------------------------------------------------------------------------------


def work(stage: Stage, name: str, journals: Path, chance: random.Random) -> None:
    """Handlers of three groups, which fail now and then, and die of a poisonous event."""
    noted = {role: Journal(journals, f"{role}.{name}") for role in (PLAIN, ORDERED)}
    app = App()
    settings: dict[str, Any] = {
        "lease_seconds": stage.lease_seconds,
        "max_attempts": stage.max_attempts,
        "backoff_seconds": 0.05,
        "backoff_max_seconds": 0.5,
    }

    def handle(role: str, event: ClaimedEvent) -> Outcome:
        _die_of(event)
        roll = chance.randrange(500)
        if roll == 0:
            return Dead("a handler gave up on it")
        if roll < 10:
            return Retry(reason="a handler failed")
        noted[role].note("done", [event.position])
        return None

    @app.worker(*stage.topics_of(PLAIN), group=stage.consumer(PLAIN), concurrency=4, prefetch=50, **settings)
    async def plain(event: ClaimedEvent) -> Outcome:
        return handle(PLAIN, event)

    @app.worker(*stage.topics_of(ORDERED), group=stage.consumer(ORDERED), ordered_keys=True, prefetch=20, **settings)
    async def ordered(event: ClaimedEvent) -> Outcome:
        return handle(ORDERED, event)

    @app.worker(
        *stage.topics_of(EXACT), group=stage.consumer(EXACT), batch=True, transactional=True, prefetch=50, **settings
    )
    async def exact(events: Sequence[ClaimedEvent], connection: psycopg.AsyncConnection[Any]) -> Outcome:
        for event in events:
            _die_of(event)
        async with connection.cursor() as cursor:
            await cursor.executemany(INSERT_EFFECT, [(EXACT, event.position) for event in events])
        if chance.randrange(30) == 0:
            raise RuntimeError("a handler failed after it had written")
        return None

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await app.run(stage.dsn, stop=stop, grace_seconds=5.0, worker_name=name, application_name=stage.name)

    asyncio.run(run())


def _die_of(event: ClaimedEvent) -> None:
    if event.type == "Poison":
        os.kill(os.getpid(), signal.SIGKILL)


def follow(stage: Stage, name: str, journal: Journal) -> None:
    with headwater.connect(stage.dsn, pool_size=1, application_name=stage.name) as log:
        for batch in log.follow_batches(
            stage.topics_of(FOLLOWER), cursor=stage.consumer(FOLLOWER), batch_size=200, must_not_lose=True
        ):
            journal.note("done", [event.position for event in batch])


def process(stage: Stage) -> None:
    def handle(connection: psycopg.Connection[Any], events: Sequence[Event]) -> None:
        with connection.cursor() as cursor:
            cursor.executemany(INSERT_EFFECT, [(PROCESSOR, event.position) for event in events])

    with headwater.connect(stage.dsn, pool_size=1, application_name=stage.name) as log:
        log.process(
            stage.topics_of(PROCESSOR), handle, cursor=stage.consumer(PROCESSOR), batch_size=200, must_not_lose=True
        )


def serve(stage: Stage) -> None:
    """A broker of the Kafka door, on the port that its clients know."""
    from headwater import aio
    from headwater.kafka.server import serving

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with (
            await aio.connect(stage.dsn, pool_size=4, application_name=stage.name) as log,
            serving(
                log,
                listen_host="127.0.0.1",
                port=stage.kafka_port,
                advertised_host="127.0.0.1",
                context=None,
                default_partitions=1,
                rebalance_delay_seconds=0.2,
                authenticate=False,
                loopback=True,
            ),
        ):
            await stop.wait()

    asyncio.run(run())


# --- a process of its own ------------------------------------------------------------------------------------


def _end_with_the_trial() -> None:
    """Nothing is ever said on standard input: that it ends means that the trial is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    role, name, seed = sys.argv[1:4]
    stage = Stage(**json.loads(os.environ[STAGE_VARIABLE]))
    threading.Thread(target=_end_with_the_trial, daemon=True).start()
    journals = Path(stage.directory)
    chance = random.Random(f"{seed} {name}")
    numbers = itertools.count(1)
    acts: dict[str, Callable[[], None]] = {
        "producer": lambda: produce(stage, name, Journal(journals, name), chance, numbers),
        "kafka-producer": lambda: produce_by_kafka(stage, name, Journal(journals, name), chance),
        "worker": lambda: work(stage, name, journals, chance),
        FOLLOWER: lambda: follow(stage, name, Journal(journals, f"{FOLLOWER}.{name}")),
        PROCESSOR: lambda: process(stage),
        "broker": lambda: serve(stage),
    }
    while True:
        try:
            return acts[role]()
        except* LogUnavailable:
            # As a supervisor would: again, from the start.
            threading.Event().wait(AGAIN_SECONDS)


if __name__ == "__main__":
    main()
