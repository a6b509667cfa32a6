"""The trial: a cast of producers and consumers, disasters one after the other, calm, and then the verdict."""

from __future__ import annotations

import json
import random
import secrets
import socket
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg

import headwater
from headwater.chaos import journal
from headwater.chaos.crew import Crew
from headwater.chaos.disasters import DISASTERS, Scene
from headwater.chaos.parts import EXACT, FOLLOWER, ORDERED, PLAIN, PROCESSOR, Stage, event_of
from headwater.chaos.proxy import Proxy
from headwater.chaos.verdict import Consumer, Found, Verdict, judge
from headwater.embedded import Postgres
from headwater.errors import LogUnavailable

GROUPS: Final = (PLAIN, EXACT, ORDERED)
CURSORS: Final = (FOLLOWER, PROCESSOR)
LEASE_SECONDS: Final = 1.0
MAX_ATTEMPTS: Final = 3
LANES: Final = 4
POISON_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.05
CALM_LOOK_SECONDS: Final = 0.25
TELL_SECONDS: Final = 0.5
# In calm: how long nothing may move before what is left counts as lost.
PATIENCE_SECONDS: Final = 30.0

MAKE_TABLES: Final = """
create schema if not exists headwater_chaos;
create table if not exists headwater_chaos.effect (consumer text not null, position bigint not null);
"""
REMOVE_TABLES: Final = "drop schema if exists headwater_chaos cascade"


@dataclass(frozen=True, slots=True)
class Plan:
    """What kind of trial, and for how long."""

    seconds: float
    seed: int
    events_per_second: float = 400.0
    copy_events: int = 5000
    # Seconds between the disasters, on average.
    pause_seconds: float = 0.7
    kafka: bool = False
    # Which disasters; those that can be on this database.
    kinds: tuple[str, ...] = tuple(DISASTERS)


@dataclass(frozen=True, slots=True)
class Progress:
    """How a trial stands; `share` of its time is over."""

    share: float
    act: str
    disasters: int
    drawn: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict, and what it was reached under."""

    verdict: Verdict
    seed: int
    seconds: float
    disasters: dict[str, int]
    processes_started: int
    processes_killed: int
    # Processes that ended by themselves though nobody killed them, with their last words.
    failures: list[str] = field(default_factory=list)


def run(
    plan: Plan,
    dsn: str,
    *,
    server: Postgres | None,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Put the log at `dsn` on trial. `server`: the embedded Postgres that it is on, which may be killed."""
    with tempfile.TemporaryDirectory(prefix="headwater-chaos-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with _proxy(dsn, directory) as proxy, staged(plan, dsn, directory, through=proxy.dsn) as stage:
            wanted = {"producer": 2, "worker": 2, FOLLOWER: 1, PROCESSOR: 1}
            if plan.kafka:
                wanted |= {"broker": 1, "kafka-producer": 1}
            crew = Crew(stage, directory, plan.seed, wanted)
            scene = Scene(stage, dsn, crew, proxy, server, plan.copy_events, random.Random(plan.seed))
            started = time.monotonic()
            try:
                _get_going(scene, tell)
                happened = _storm(plan, scene, tell)
                _calm(scene, sum(happened.values()), tell)
            finally:
                scene.end(PATIENCE_SECONDS)
                crew.stop()
            verdict = judged(stage, dsn, directory)
            return Outcome(
                verdict=verdict,
                seed=plan.seed,
                seconds=round(time.monotonic() - started, 1),
                disasters=dict(happened),
                processes_started=crew.started,
                processes_killed=crew.killed,
                failures=crew.failures,
            )


@contextmanager
def _proxy(dsn: str, directory: Path) -> Iterator[Proxy]:
    proxy = Proxy(dsn, directory)
    try:
        yield proxy
    finally:
        proxy.close()


@contextmanager
def staged(plan: Plan, dsn: str, directory: Path, *, through: str) -> Iterator[Stage]:
    """Topics, groups, cursors and a table of the trial's own, taken away at its end.

    `through`: what its parts connect to.
    """
    stage = Stage(
        dsn=through,
        name=f"chaos-{secrets.token_hex(3)}",
        directory=str(directory),
        events_per_second=plan.events_per_second / 2,
        lease_seconds=LEASE_SECONDS,
        max_attempts=MAX_ATTEMPTS,
        kafka_port=_free_port() if plan.kafka else 0,
    )
    with headwater.connect(dsn, pool_size=2) as log:
        with log.connection() as connection:
            connection.execute(MAKE_TABLES)
        log.create_topic(stage.open_topic)
        log.create_topic(stage.lane_topic, kind="sequenced", partitions=LANES)
        for role in GROUPS:
            log.create_group(stage.consumer(role), stage.topics_of(role), ordered_keys=role == ORDERED)
        for role in CURSORS:
            log.open_cursor(stage.consumer(role), topics=stage.topics_of(role), must_not_lose=True)
    try:
        yield stage
    finally:
        with headwater.connect(dsn, pool_size=2) as log:
            for role in GROUPS:
                log.delete_group(stage.consumer(role))
            for role in CURSORS:
                log.delete_cursor(stage.consumer(role))
            for topic in (stage.open_topic, stage.lane_topic):
                log.delete_topic(topic)
            with log.connection() as connection:
                connection.execute(REMOVE_TABLES)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get_going(scene: Scene, tell: Callable[[Progress], None]) -> None:
    """Every consumer is at work before the first disaster: one that is not there yet cannot miss anything."""
    until = time.monotonic() + PATIENCE_SECONDS
    with headwater.connect(scene.direct_dsn, pool_size=1) as log:
        before = _progress(log, scene.stage)
        tell(Progress(0.0, "processes start", 0, log.state().drawn))
        while time.monotonic() < until:
            scene.crew.keep_up()
            now = _progress(log, scene.stage)
            if all(now[role] != before[role] for role in before):
                return
            time.sleep(LOOK_SECONDS)


def _progress(log: headwater.Headwater, stage: Stage) -> dict[str, int]:
    """How far each consumer is: what of its group is done, where its cursor stands."""
    groups = {one.name: one.done for one in log.groups()}
    cursors = {one.name: one.position for one in log.cursors()}
    known = groups | cursors
    return {role: known[stage.consumer(role)] for role in (*GROUPS, *CURSORS)}


def _storm(plan: Plan, scene: Scene, tell: Callable[[Progress], None]) -> Counter[str]:
    """Disasters, each kind once before any comes again, until the time is over."""
    happened: Counter[str] = Counter()
    kinds = [name for name in plan.kinds if scene.server is not None or name != "Postgres killed"]
    begun = time.monotonic()
    deck: list[str] = []
    next_at = begun + plan.pause_seconds
    poison_at = begun + plan.pause_seconds
    tell_at = begun
    while (now := time.monotonic()) < begun + plan.seconds:
        scene.crew.keep_up()
        if now >= poison_at and _publish_poison(scene, len(happened) + int(now - begun)):
            poison_at = now + POISON_SECONDS
        if now >= next_at:
            deck = deck or scene.chance.sample(kinds, len(kinds))
            name = deck.pop()
            DISASTERS[name](scene)
            happened[name] += 1
            next_at = time.monotonic() + plan.pause_seconds * scene.chance.uniform(0.5, 1.5)
        if now >= tell_at:
            tell_at = now + TELL_SECONDS
            share = min((now - begun) / plan.seconds, 1.0)
            tell(Progress(share, "disasters", sum(happened.values()), _drawn(scene)))
        time.sleep(LOOK_SECONDS)
    return happened


def _publish_poison(scene: Scene, number: int) -> bool:
    """An event that kills whoever works on it. False: not now."""
    name = f"poison-{number}"
    noted = journal.Journal(scene.crew.directory, name)
    noted.note("tried", [1])
    try:
        with headwater.connect(scene.direct_dsn, pool_size=1, connect_timeout_seconds=5) as log:
            event = event_of(name, 1, poison=True)
            log.publish(scene.stage.open_topic, event.payload, type=event.type)
    except (LogUnavailable, psycopg.OperationalError):
        return False
    noted.note("acknowledged", [1])
    noted.close()
    return True


def _drawn(scene: Scene) -> int:
    try:
        with headwater.connect(scene.direct_dsn, pool_size=1, connect_timeout_seconds=2) as log:
            return log.state().drawn
    except (LogUnavailable, psycopg.OperationalError):
        return 0


def _calm(scene: Scene, disasters: int, tell: Callable[[Progress], None]) -> None:
    """No more disasters and no more events; consumers get to the end, as long as they get on at all."""
    scene.stage.stop_file.touch()
    scene.end(PATIENCE_SECONDS)
    scene.crew.dismiss("producer", "kafka-producer")
    scene.crew.wait_for("producer", "kafka-producer", seconds=2 * PATIENCE_SECONDS)
    moved_at = time.monotonic()
    before: object = None
    tell_at = 0.0
    with headwater.connect(scene.direct_dsn, pool_size=2) as log:
        while time.monotonic() < moved_at + PATIENCE_SECONDS:
            scene.crew.keep_up()
            left = remaining(log, scene.stage)
            if not any(left.values()):
                return
            if left != before:
                before, moved_at = left, time.monotonic()
            if time.monotonic() > tell_at:
                tell_at = time.monotonic() + TELL_SECONDS
                tell(Progress(1.0, f"calm: {sum(left.values())} to go", disasters, 0))
            # Counting costs what consumers could use.
            time.sleep(CALM_LOOK_SECONDS)


def remaining(log: headwater.Headwater, stage: Stage) -> dict[str, int]:
    """What each consumer has yet to do: events of a group, positions of a cursor."""
    groups = {one.name: one for one in log.groups()}
    cursors = {one.name: one.position for one in log.cursors()}
    left = {}
    for role in GROUPS:
        one = groups[stage.consumer(role)]
        left[role] = one.ready + one.processing + one.retrying
    last = _last_position(log, stage)
    return left | {role: max(0, last - cursors[stage.consumer(role)]) for role in CURSORS}


def _last_position(log: headwater.Headwater, stage: Stage) -> int:
    events = log.read_backwards([stage.open_topic, stage.lane_topic], batch_size=1)
    return events[0].position if events else 0


def judged(stage: Stage, dsn: str, directory: Path) -> Verdict:
    lines = list(journal.read_all(directory))
    seen: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for line in lines:
        if line.kind == "done":
            seen[line.who.partition(".")[0]].update(line.numbers)
    with headwater.connect(dsn, pool_size=2) as log:
        with log.connection() as connection:
            rows = connection.execute(
                "select consumer, position, count(*) from headwater_chaos.effect group by consumer, position"
            ).fetchall()
        for consumer, position, times in rows:
            seen[consumer][position] = times
        found = list(_found(log, stage))
        consumers = [
            Consumer(
                name=role,
                times=seen[role],
                dead=frozenset(_dead(log, stage.consumer(role)) if role in GROUPS else ()),
                topics=frozenset(stage.topics_of(role)),
                exactly_once=role in (EXACT, PROCESSOR),
            )
            for role in (*GROUPS, *CURSORS)
        ]
    return judge(lines, found, consumers)


def _found(log: headwater.Headwater, stage: Stage) -> Iterator[Found]:
    """Every event of the trial that the log has, read anew from the beginning."""
    for event in log.follow([stage.open_topic, stage.lane_topic], stop_when_caught_up=True):
        made: Any = json.loads(event.payload or b"{}")
        offset = event.topic_offset if event.topic == stage.lane_topic else None
        yield Found(event.position, made["by"], made["n"], (event.topic, event.partition), offset)


def _dead(log: headwater.Headwater, group: str) -> Iterable[int]:
    after = 0
    while letters := log.dead_letters(group, after=after, batch_size=1000):
        yield from (letter.position for letter in letters)
        after = letters[-1].position
