"""The trial: the steps of one run of `headwater chaos`.

1. Setup: create topics, queues and cursors, and start the processes of producers, readers and servers.
2. Warm-up: wait until every reader has received an event.
3. Faults: inject faults in random order, each kind once before any repeats, until the time is over.
4. Drain: stop producers and faults, and wait until every reader has received all events or makes no progress.
5. Verdict: compare the journals of producers and readers with the log.
"""

from __future__ import annotations

import random
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
from headwater.embedded.temporary import temporary_directory
from headwater.errors import LogUnavailable
from headwater.trials.chaos import evidence, journal
from headwater.trials.chaos.cluster import Cluster
from headwater.trials.chaos.config import make_event
from headwater.trials.chaos.faults import CLOCK_FAULTS, FAULTS, SERVER_FAULTS, FaultContext, publish_quiet
from headwater.trials.chaos.participants import PRODUCING_ROLES, Participants, choose
from headwater.trials.chaos.processes import ProcessSupervisor
from headwater.trials.chaos.proxy import Proxy
from headwater.trials.chaos.setup import make_config, set_up
from headwater.trials.chaos.verdict import Verdict, judge

POISON_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.05
DRAIN_POLL_SECONDS: Final = 1.0
REPORT_SECONDS: Final = 0.5
# How much longer a trial may take on a slow machine, so that each kind of fault is injected at least once.
FIRST_ROUND_SECONDS: Final = 300.0
# In the drain step, events count as lost if no reader makes progress for this long. It exceeds the longest wait of a
# reader: the lease of a reader of SQL subscriptions lasts 30 seconds.
PATIENCE_SECONDS: Final = 40.0


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The options of a trial."""

    seconds: float
    seed: int
    events_per_second: float = 200.0
    copy_events: int = 5000
    # Average seconds between faults.
    pause_seconds: float = 0.7
    # The kinds of faults; those that this database does not support are skipped.
    kinds: tuple[str, ...] = tuple(FAULTS)
    # The roles of readers; None: all whose extras are installed.
    roles: tuple[str, ...] | None = None
    # Python code that every process runs first; tests use it to inject bugs.
    prelude: str = ""
    patience_seconds: float = PATIENCE_SECONDS


@dataclass(frozen=True, slots=True)
class TrialProgress:
    """The progress of a trial; `share` is the elapsed part of its time."""

    share: float
    step: str
    faults: int
    head: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The verdict, and the circumstances of the trial."""

    verdict: Verdict
    seed: int
    seconds: float
    faults: dict[str, int]
    # How often the head moved back, so that positions were assigned again.
    head_went_back: int
    processes_started: int
    processes_killed: int
    # Readers and faults that are not available here, each with the reason.
    skipped: Mapping[str, str] = field(default_factory=dict)
    # Processes that failed without being killed by the trial, with the last line of their output.
    failures: list[str] = field(default_factory=list)


def run(
    plan: TrialPlan,
    dsn: str,
    *,
    server: Postgres | None,
    clock: SteppedClock | None = None,
    report: Callable[[TrialProgress], None] = lambda progress: None,
) -> TrialResult:
    """Run a trial of the log at `dsn`.

    `server` is the embedded Postgres of that database, if it may be killed; at the end a standby may have replaced it.
    `clock` is the adjustable clock of that server.
    """
    participants = choose(plan.roles)
    impossible = _impossible(plan, server, clock)
    with (
        temporary_directory("headwater-chaos-") as directory,
        _cluster(server, dsn, directory) as cluster,
        closing(Proxy(dsn, directory)) as proxy,
    ):
        config = make_config(participants, directory, dsn=proxy.dsn, events_per_second=plan.events_per_second)
        processes = ProcessSupervisor(config, directory, plan.seed, participants.processes(), plan.prelude)
        context = FaultContext(
            config, processes, proxy, cluster, dsn, plan.copy_events, random.Random(plan.seed), clock
        )
        kinds = [name for name in plan.kinds if name not in impossible]
        started = time.monotonic()
        with set_up(participants, config, lambda: context.direct_dsn):
            try:
                _warm_up(plan, participants, context, report)
                injected = _inject_faults(plan, kinds, context, report)
                _drain(plan, participants, context, sum(injected.values()), report)
            finally:
                context.end(plan.patience_seconds)
                processes.stop()
            verdict = _judge(participants, context)
        return TrialResult(
            verdict=verdict,
            seed=plan.seed,
            seconds=round(time.monotonic() - started, 1),
            faults=dict(injected),
            head_went_back=context.head_went_back,
            processes_started=processes.started,
            processes_killed=processes.killed,
            skipped={**participants.skipped, **impossible},
            failures=processes.failures,
        )


def _impossible(plan: TrialPlan, server: Postgres | None, clock: SteppedClock | None) -> dict[str, str]:
    """The faults of the plan that are not available here, each with the reason."""
    reasons = {}
    for name in plan.kinds:
        if server is None and name in SERVER_FAULTS | CLOCK_FAULTS:
            reasons[name] = "not available with --dsn"
        elif clock is None and name in CLOCK_FAULTS:
            reasons[name] = "libfaketime is not installed"
    return reasons


@contextmanager
def _cluster(server: Postgres | None, dsn: str, directory: Path) -> Iterator[Cluster | None]:
    if server is None:
        yield None
        return
    with closing(Cluster(server, dsn, directory)) as cluster:
        yield cluster


def _warm_up(
    plan: TrialPlan, participants: Participants, context: FaultContext, report: Callable[[TrialProgress], None]
) -> None:
    """Wait until every reader has received an event, so that it has a position before the first fault."""
    until = time.monotonic() + 2 * plan.patience_seconds
    waiting = list(participants.readers)
    publish_quiet(context, "first", 3)
    with headwater.connect(context.direct_dsn, pool_size=1) as log:
        report(TrialProgress(0.0, "starting processes", 0, log.state().head))
        while waiting and time.monotonic() < until:
            context.processes.restart_ended()
            waiting = [reader for reader in waiting if not evidence.has_received(log, context.config, reader)]
            time.sleep(POLL_SECONDS)


def _inject_faults(
    plan: TrialPlan, kinds: Sequence[str], context: FaultContext, report: Callable[[TrialProgress], None]
) -> Counter[str]:
    """Inject faults, each kind once before any repeats, until the time is over and each kind was injected."""
    injected: Counter[str] = Counter()
    started = time.monotonic()
    remaining: list[str] = []
    next_at = started + plan.pause_seconds
    poison_at = started + plan.pause_seconds
    report_at = started
    while (now := time.monotonic()) < started + plan.seconds or (
        len(injected) < len(kinds) and now < started + plan.seconds + FIRST_ROUND_SECONDS
    ):
        context.processes.restart_ended()
        if now >= poison_at and _publish_poison(context):
            poison_at = now + POISON_SECONDS
        if kinds and now >= next_at:
            remaining = remaining or context.rng.sample(kinds, len(kinds))
            name = remaining.pop()
            try:
                FAULTS[name](context)
                injected[name] += 1
            except (LogUnavailable, psycopg.OperationalError):
                # A concurrent fault prevented this one; try it again later.
                remaining.insert(0, name)
            next_at = time.monotonic() + plan.pause_seconds * context.rng.uniform(0.5, 1.5)
        if now >= report_at:
            report_at = now + REPORT_SECONDS
            share = min((now - started) / plan.seconds, 1.0)
            report(TrialProgress(share, "injecting faults", sum(injected.values()), _head(context)))
        time.sleep(POLL_SECONDS)
    return injected


def _publish_poison(context: FaultContext) -> bool:
    """Publish an event that kills the worker that handles it. Returns False if the database is unavailable."""
    name = context.next_name("poison")
    entries = journal.Journal(context.directory, name)
    entries.record("tried", [1])
    try:
        with headwater.connect(context.direct_dsn, pool_size=1, connect_timeout_seconds=5) as log:
            event = make_event(name, 1, poison=True)
            log.publish(context.config.open_topic, event.payload, type=event.type)
    except (LogUnavailable, psycopg.OperationalError):
        return False
    entries.record("acknowledged", [1])
    entries.close()
    return True


def _head(context: FaultContext) -> int:
    try:
        with headwater.connect(context.direct_dsn, pool_size=1, connect_timeout_seconds=2) as log:
            return log.state().head
    except (LogUnavailable, psycopg.OperationalError):
        return 0


def _drain(
    plan: TrialPlan,
    participants: Participants,
    context: FaultContext,
    faults: int,
    report: Callable[[TrialProgress], None],
) -> None:
    """Stop faults and producers, and wait until all readers have caught up or none makes progress."""
    context.config.stop_file.touch()
    context.end(plan.patience_seconds)
    context.processes.release(*PRODUCING_ROLES)
    context.processes.wait_for(*PRODUCING_ROLES, seconds=2 * plan.patience_seconds)
    # The last event: a reader that waits for the log to grow then reads everything before it.
    publish_quiet(context, "last", 1)
    report_at = 0.0
    with headwater.connect(context.direct_dsn, pool_size=2) as log:
        pending = evidence.PendingDeliveries(
            participants, context.config, list(evidence.read_events(log, context.config))
        )
        before: object = None
        moved_at = time.monotonic()
        while time.monotonic() < moved_at + plan.patience_seconds:
            context.processes.restart_ended()
            left = pending.counts(log)
            if not any(left.values()):
                return
            now = (left, evidence.attempts(log))
            if now != before:
                before, moved_at = now, time.monotonic()
            if time.monotonic() > report_at:
                report_at = time.monotonic() + REPORT_SECONDS
                report(TrialProgress(1.0, f"waiting for {sum(left.values())} deliveries", faults, 0))
            # Counting competes with the readers for the CPU.
            time.sleep(DRAIN_POLL_SECONDS)


def _judge(participants: Participants, context: FaultContext) -> Verdict:
    with headwater.connect(context.direct_dsn, pool_size=2) as log:
        events = list(evidence.read_events(log, context.config))
        ids = {event.position: event.id for event in events}
        return judge(
            journal.read_all(context.directory),
            events,
            # Read one at a time, since each is as large as the log.
            (evidence.read_deliveries(log, context.config, kind, ids) for kind in participants.readers),
            context.cluster.divergences if context.cluster is not None else (),
        )
