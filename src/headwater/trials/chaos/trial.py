"""The trial: producers and readers, disasters one after the other, calm, and then the verdict."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

import headwater
from headwater.embedded import Postgres
from headwater.embedded.stepped_clock import SteppedClock
from headwater.errors import LogUnavailable
from headwater.trials.chaos import cast as casting
from headwater.trials.chaos import evidence, journal
from headwater.trials.chaos.cast import PRODUCING_ROLES, Cast
from headwater.trials.chaos.cluster import Cluster
from headwater.trials.chaos.faults import DISASTERS, OF_THE_CLOCK, OF_THE_SERVER, Scene, publish_quiet
from headwater.trials.chaos.proxy import Proxy
from headwater.trials.chaos.stage import event_of
from headwater.trials.chaos.staging import make_stage, staged
from headwater.trials.chaos.supervisor import Crew
from headwater.trials.chaos.verdict import Verdict, judge

POISON_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.05
CALM_LOOK_SECONDS: Final = 1.0
TELL_SECONDS: Final = 0.5
# How much longer a trial may take on a slow machine, so that each kind of disaster comes at least once.
FIRST_ROUND_SECONDS: Final = 300.0
# In calm: how long no reader may get on before what is left counts as lost. Longer than the longest wait of a
# reader: another takes over the reading of SQL subscriptions after 30 seconds.
PATIENCE_SECONDS: Final = 40.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What kind of trial, and for how long."""

    seconds: float
    seed: int
    events_per_second: float = 200.0
    copy_events: int = 5000
    # Seconds between the disasters, on average.
    pause_seconds: float = 0.7
    # Which disasters; those that can be on this database.
    kinds: tuple[str, ...] = tuple(DISASTERS)
    # Which readers, by role; None: all whose extras are installed.
    roles: tuple[str, ...] | None = None
    # Python that every process runs first: tests break a build with it.
    prelude: str = ""
    patience_seconds: float = PATIENCE_SECONDS


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
    # How often positions that readers may have seen were assigned again.
    head_went_back: int
    processes_started: int
    processes_killed: int
    # Readers that could not take part, and disasters that could not be made, each with the reason.
    left_out: Mapping[str, str] = field(default_factory=dict)
    # Processes that ended by themselves though the trial did not kill them, with their last words.
    failures: list[str] = field(default_factory=list)


def run(
    plan: Plan,
    dsn: str,
    *,
    server: Postgres | None,
    clock: SteppedClock | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Put the log at `dsn` on trial. `server`: the embedded Postgres that it is on, which may be killed for good: a
    standby of it may have taken over at the end. `clock`: the clock that this server was started under."""
    cast = casting.choose(plan.roles)
    impossible = _impossible(plan, server, clock)
    with tempfile.TemporaryDirectory(prefix="headwater-chaos-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with _cluster(server, dsn, directory) as cluster, closing(Proxy(dsn, directory)) as proxy:
            stage = make_stage(cast, directory, dsn=proxy.dsn, events_per_second=plan.events_per_second)
            crew = Crew(stage, directory, plan.seed, cast.processes(), plan.prelude)
            scene = Scene(stage, crew, proxy, cluster, dsn, plan.copy_events, random.Random(plan.seed), clock)
            kinds = [name for name in plan.kinds if name not in impossible]
            started = time.monotonic()
            with staged(cast, stage, lambda: scene.direct_dsn):
                try:
                    _get_going(plan, cast, scene, tell)
                    happened = _storm(plan, kinds, scene, tell)
                    _calm(plan, cast, scene, sum(happened.values()), tell)
                finally:
                    scene.end(plan.patience_seconds)
                    crew.stop()
                verdict = _judged(cast, scene)
            return Outcome(
                verdict=verdict,
                seed=plan.seed,
                seconds=round(time.monotonic() - started, 1),
                disasters=dict(happened),
                head_went_back=scene.head_went_back,
                processes_started=crew.started,
                processes_killed=crew.killed,
                left_out={**cast.left_out, **impossible},
                failures=crew.failures,
            )


def _impossible(plan: Plan, server: Postgres | None, clock: SteppedClock | None) -> dict[str, str]:
    """The disasters of the plan that cannot be made here, each with the reason."""
    reasons = {}
    for name in plan.kinds:
        if server is None and name in OF_THE_SERVER | OF_THE_CLOCK:
            reasons[name] = "the database was given"
        elif clock is None and name in OF_THE_CLOCK:
            reasons[name] = "libfaketime is not installed"
    return reasons


@contextmanager
def _cluster(server: Postgres | None, dsn: str, directory: Path) -> Iterator[Cluster | None]:
    if server is None:
        yield None
        return
    with closing(Cluster(server, dsn, directory)) as cluster:
        yield cluster


def _get_going(plan: Plan, cast: Cast, scene: Scene, tell: Callable[[Progress], None]) -> None:
    """Every reader has got something before the first disaster: one that has not begun yet remembers no position."""
    until = time.monotonic() + 2 * plan.patience_seconds
    waiting = list(cast.readers)
    publish_quiet(scene, "first", 3)
    with headwater.connect(scene.direct_dsn, pool_size=1) as log:
        tell(Progress(0.0, "processes start", 0, log.state().drawn))
        while waiting and time.monotonic() < until:
            scene.crew.keep_up()
            waiting = [reader for reader in waiting if not evidence.has_begun(log, scene.stage, reader)]
            time.sleep(LOOK_SECONDS)


def _storm(plan: Plan, kinds: Sequence[str], scene: Scene, tell: Callable[[Progress], None]) -> Counter[str]:
    """Disasters, each kind once before any comes again, until the time is over and each has been."""
    happened: Counter[str] = Counter()
    begun = time.monotonic()
    deck: list[str] = []
    next_at = begun + plan.pause_seconds
    poison_at = begun + plan.pause_seconds
    tell_at = begun
    while (now := time.monotonic()) < begun + plan.seconds or (
        len(happened) < len(kinds) and now < begun + plan.seconds + FIRST_ROUND_SECONDS
    ):
        scene.crew.keep_up()
        if now >= poison_at and _publish_poison(scene):
            poison_at = now + POISON_SECONDS
        if kinds and now >= next_at:
            deck = deck or scene.chance.sample(kinds, len(kinds))
            name = deck.pop()
            try:
                DISASTERS[name](scene)
                happened[name] += 1
            except (LogUnavailable, psycopg.OperationalError):
                # Another disaster, which goes on beside it, was in its way.
                deck.insert(0, name)
            next_at = time.monotonic() + plan.pause_seconds * scene.chance.uniform(0.5, 1.5)
        if now >= tell_at:
            tell_at = now + TELL_SECONDS
            share = min((now - begun) / plan.seconds, 1.0)
            tell(Progress(share, "disasters", sum(happened.values()), _drawn(scene)))
        time.sleep(LOOK_SECONDS)
    return happened


def _publish_poison(scene: Scene) -> bool:
    """An event that kills the worker that handles it. False: not now."""
    name = scene.next_name("poison")
    noted = journal.Journal(scene.directory, name)
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


def _calm(plan: Plan, cast: Cast, scene: Scene, disasters: int, tell: Callable[[Progress], None]) -> None:
    """No more disasters and no more events; readers get to the end, as long as any of them gets on."""
    scene.stage.stop_file.touch()
    scene.end(plan.patience_seconds)
    scene.crew.dismiss(*PRODUCING_ROLES)
    scene.crew.wait_for(*PRODUCING_ROLES, seconds=2 * plan.patience_seconds)
    # The last: behind it a reader that waits for the log to grow gets everything before it.
    publish_quiet(scene, "last", 1)
    tell_at = 0.0
    with headwater.connect(scene.direct_dsn, pool_size=2) as log:
        outstanding = evidence.Outstanding(cast, scene.stage, list(evidence.found(log, scene.stage)))
        before: object = None
        moved_at = time.monotonic()
        while time.monotonic() < moved_at + plan.patience_seconds:
            scene.crew.keep_up()
            left = outstanding.counts(log)
            if not any(left.values()):
                return
            now = (left, evidence.attempts(log))
            if now != before:
                before, moved_at = now, time.monotonic()
            if time.monotonic() > tell_at:
                tell_at = time.monotonic() + TELL_SECONDS
                tell(Progress(1.0, f"calm: {sum(left.values())} deliveries to go", disasters, 0))
            # Counting costs what readers could use.
            time.sleep(CALM_LOOK_SECONDS)


def _judged(cast: Cast, scene: Scene) -> Verdict:
    with headwater.connect(scene.direct_dsn, pool_size=2) as log:
        events = list(evidence.found(log, scene.stage))
        ids = {event.position: event.id for event in events}
        return judge(
            journal.read_all(scene.directory),
            events,
            # One after the other: each is as large as the log.
            (evidence.reader_of(log, scene.stage, kind, ids) for kind in cast.readers),
            scene.cluster.divergences if scene.cluster is not None else (),
        )
