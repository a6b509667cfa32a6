"""`headwater doctor`: check the database and the log, and report problems with their remedies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import psycopg
import typer
from psycopg.rows import namedtuple_row

import headwater
from headwater.calls import archives as archive_calls
from headwater.calls import overview, pipeline_runs
from headwater.calls.reading import SEGMENT_SIZE
from headwater.cli import output
from headwater.cli.connection import Session, session, translate_errors
from headwater.cli.exit_codes import ChecksFailed
from headwater.cli.options import Dsn, Json, examples
from headwater.cli.queries import read_query, run_query
from headwater.errors import HeadwaterError, NotAllowed
from headwater.log.model import LogFault
from headwater.queue.model import QueueOverview

app = typer.Typer()

MIN_SERVER_VERSION: Final = 150_000
# Since this version, membership in a role may exclude the SET option.
SET_OPTION_VERSION: Final = 160_000
MAX_PUBLISHER_AGE: Final = timedelta(seconds=60)
OVERDUE: Final = timedelta(seconds=60)
MANY_DEAD_LETTERS: Final = 100
MAX_CLOCK_DIFFERENCE: Final = timedelta(seconds=30)
CLOCK_STEPS_REPORTED: Final = timedelta(days=1)
# An idle slot may retain this much: every slot retains up to one WAL file between two reads.
MAX_IDLE_SLOT_BYTES: Final = 16 * 1024 * 1024
# The number of findings of one check that are printed one by one.
MAX_FINDINGS: Final = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check, and the remedy for a problem."""

    check: str
    outcome: Literal["ok", "warn", "fail"]
    message: str
    action: str | None = None


class Problem(NamedTuple):
    """What a check of the log found, and the remedy."""

    outcome: Literal["warn", "fail"]
    message: str
    action: str


_warn = partial(Problem, "warn")
_fail = partial(Problem, "fail")
Problems = Generator[Problem, None, str | None]
"""A check yields what it found, and returns what it reports if it found nothing."""


class _Facts(NamedTuple):
    server_version: int
    server_version_text: str
    in_recovery: bool
    wal_level: str
    isolation: str
    missing_roles: list[str]
    has_filter_role: bool
    owner_may_act: bool | None
    owner: str | None
    takes_filters: bool
    server_time: datetime
    asked_at: datetime


@app.command(epilog=examples("headwater doctor", "headwater doctor --json"))
def doctor(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Check the database and the log, and print a remedy for each problem. Exits with 1 if a check fails."""
    findings = []
    for finding in examine(session(context), dsn):
        findings.append(finding)
        if not as_json:
            _print(finding)
    failed = [finding.check for finding in findings if finding.outcome == "fail"]
    if as_json:
        output.emit({"ok": not failed, "findings": findings})
    if failed:
        raise ChecksFailed(f"failed: {', '.join(failed)}")


def examine(run: Session, dsn: str | None) -> Iterator[Finding]:
    """Run all checks in order. If the database or the schema is unusable, the checks that need it are skipped."""
    try:
        with run.connection(dsn) as connection:
            facts = _facts(connection)
    except HeadwaterError as error:
        yield Finding("reachable", "fail", error.message, error.hint or "Start Postgres, or correct the DSN.")
        return
    yield Finding("reachable", "ok", "the database answers")
    yield from _examine_server(facts)
    try:
        with run.log(dsn) as log:
            yield Finding("schema", "ok", f"the schema matches Headwater {headwater.__version__}")
            for name, check in LOG_CHECKS:
                try:
                    with translate_errors():
                        yield from _bounded(name, check(log, facts))
                except NotAllowed as error:
                    yield Finding(
                        name,
                        "warn",
                        f"this role lacks the permission: {error.message}",
                        "Use the role headwater_admin.",
                    )
    except HeadwaterError as error:
        yield Finding("schema", "fail", error.message, error.hint)


def _bounded(check: str, problems: Problems) -> Iterator[Finding]:
    """Yield the first MAX_FINDINGS findings of a check, then the number of the others."""
    count = 0
    worst: Literal["warn", "fail"] = "warn"
    while True:
        try:
            problem = next(problems)
        except StopIteration as end:
            ok: str | None = end.value
            break
        count += 1
        worst = "fail" if problem.outcome == "fail" else worst
        if count <= MAX_FINDINGS:
            yield Finding(check, *problem)
    if count > MAX_FINDINGS:
        yield Finding(check, worst, f"and {count - MAX_FINDINGS} more", "See headwater queue list.")
    if count == 0 and ok is not None:
        yield Finding(check, "ok", ok)


def _examine_server(facts: _Facts) -> Iterator[Finding]:
    if facts.server_version < MIN_SERVER_VERSION:
        yield Finding(
            "version", "fail", f"Postgres {facts.server_version_text} is not supported", "Use Postgres 15 or newer."
        )
    else:
        yield Finding("version", "ok", f"Postgres {facts.server_version_text}")
    if facts.in_recovery:
        yield Finding(
            "primary",
            "fail",
            "this server is a standby; the log can only be read on the primary",
            "Connect to the primary.",
        )
    else:
        yield Finding("primary", "ok", "this server is a primary")
    if facts.isolation != "read committed":
        yield Finding(
            "isolation",
            "fail",
            f"the default isolation level is {facts.isolation}; the log requires READ COMMITTED",
            "alter role ... set default_transaction_isolation = 'read committed'",
        )
    else:
        yield Finding("isolation", "ok", "the default isolation level is READ COMMITTED")
    wal_note = "" if facts.wal_level == "logical" else "; change capture requires logical"
    yield Finding("wal_level", "ok", f"wal_level is {facts.wal_level}{wal_note}")
    if facts.missing_roles:
        statements = " ".join(f"create role {name} nologin;" for name in facts.missing_roles)
        yield Finding(
            "roles",
            "warn",
            f"missing: {', '.join(facts.missing_roles)}",
            f"As a role that may create roles, run: {statements} Then run headwater migrate.",
        )
    else:
        yield Finding("roles", "ok", "headwater_publisher, headwater_consumer and headwater_admin exist")


def _segments(log: headwater.Headwater, facts: _Facts) -> Problems:
    wanted = log.settings().segments_ahead
    ((ahead, _),) = run_query(log, "commands/doctor_segments")
    if ahead == 0:
        yield _fail("no segment is ready; publishing stops when the open one is full", "Run headwater maintain.")
    elif ahead < wanted - 1:
        yield _warn(
            f"{ahead} segments are ready, fewer than segments_ahead ({wanted})",
            "Run headwater maintain; no process seems to run maintenance.",
        )
    return f"{ahead} segments are ready for new events"


def _missing_segments(log: headwater.Headwater, facts: _Facts) -> Problems:
    for fault in log.run(overview.log_faults()):
        if fault.kind == "segment":
            yield _fail(
                f"table headwater_internal.{fault.name} is missing: {_missing_segment(fault)}",
                "Restore the database from a backup. Never drop or detach the tables of the log manually: "
                "retention does that.",
            )
    return None


def _maintenance(log: headwater.Headwater, facts: _Facts) -> Problems:
    interval = log.settings().segment_interval
    ((_, open_age),) = run_query(log, "commands/doctor_segments")
    if open_age is not None and open_age > interval * 2:
        yield _warn(
            f"the open segment is {output.format_value(open_age)} old; maintenance should close it after "
            f"{output.format_value(interval)}",
            "Keep a follower or `headwater maintain --every 60s` running; otherwise retention removes no events.",
        )
    return "segments are closed on time"


def _missing_segment(fault: LogFault) -> str:
    if fault.position > fault.head:
        return "publishing stops when the log reaches it"
    if fault.position + SEGMENT_SIZE > fault.head + 1:
        return "no event can be published"
    return f"the events from position {fault.position} to {fault.position + SEGMENT_SIZE - 1} are lost"


def _positions(log: headwater.Headwater, facts: _Facts) -> Problems:
    """Check that no cursor or queue is beyond the head: it would receive no events until the log reaches it."""
    for fault in log.run(overview.log_faults()):
        if fault.kind != "segment":
            yield _beyond_head(fault)
    return "no cursor and no queue is beyond the head of the log"


def _beyond_head(fault: LogFault) -> Problem:
    beyond = f"at {fault.position}, beyond the head of the log at {fault.head}"
    if fault.kind == "register":
        return _fail(
            f"the recorded stable position is {beyond}: queues would skip the events in between",
            "Was the database restored? Stop all workers, then run headwater migrate, which records it again.",
        )
    kind = "cursor" if fault.kind == "cursor" else "queue"
    command = (
        f"headwater cursor set {fault.name} --after"
        if kind == "cursor"
        else f"headwater queue rewind {fault.name} --after"
    )
    return _fail(
        f"{kind} {fault.name} is {beyond}: it receives no events until the log reaches it",
        f"Set it to the last position that it has processed: {command} POSITION",
    )


def _slots(log: headwater.Headwater, facts: _Facts) -> Problems:
    """Check replication slots: an idle slot retains WAL until the disk is full."""
    slots = run_query(log, "commands/doctor_slots")
    for name, held_bytes, lost in slots:
        if lost:
            yield _warn(
                f"replication slot {name} is unusable: WAL that it needs was removed (max_slot_wal_keep_size)",
                f"Drop it: select pg_drop_replication_slot('{name}'). Its pipeline then loads its tables again.",
            )
        elif held_bytes > MAX_IDLE_SLOT_BYTES:
            yield _warn(
                f"replication slot {name} is inactive and retains {held_bytes / 1048576:,.0f} MiB of WAL",
                f"Run its pipeline (headwater pipeline status), or drop it: select pg_drop_replication_slot('{name}')",
            )
    for name, database in run_query(log, "commands/doctor_failover_slots"):
        # Only this command of the replication protocol changes it, no SQL function.
        change = f'psql "dbname={database} replication=database" -c "ALTER_REPLICATION_SLOT {name} (FAILOVER true)"'
        yield _warn(
            f"replication slot {name} is not a failover slot: a promotion loses it and its changes",
            f"Stop its pipeline, then run against the primary: {change}",
        )
    return f"{len(slots)} inactive replication slots: none retains much WAL"


def _pipelines(log: headwater.Headwater, facts: _Facts) -> Problems:
    pipelines = log.run(pipeline_runs.pipeline_statuses())
    for one in pipelines:
        error = (one.last_error or "").splitlines() or [""]
        if one.state in ("failed", "failing"):
            yield _warn(
                f"pipeline {one.name} "
                + ("ended with an error" if one.state == "failed" else f"failed {one.failures} times in a row")
                + f": {error[0]}",
                f"See headwater pipeline status {one.name} --batches; fix the cause"
                + (f", then run headwater pipeline run {one.name}." if one.state == "failed" else "."),
            )
        elif one.state == "lost":
            yield _warn(
                f"the runner {one.runner} of pipeline {one.name} stopped sending heartbeats",
                f"Start it again; it continues from its checkpoint: headwater pipeline run {one.name}",
            )
    return f"{len(pipelines)} pipelines: none failed"


def _publishers(log: headwater.Headwater, facts: _Facts) -> Problems:
    state = log.state()
    publishers = log.publishers_in_flight()
    for publisher in publishers:
        process = f"process {publisher.pid} of {publisher.user_name} ({publisher.application_name or 'no name'})"
        if publisher.prepared:
            yield _warn(
                f"a prepared transaction blocks readers of {_topics(publisher.topics)} at "
                f"position {publisher.position_bound}",
                "Commit it or roll it back; find it with: select * from pg_prepared_xacts",
            )
        elif publisher.age is not None and publisher.age > MAX_PUBLISHER_AGE:
            yield _warn(
                f"{process} published {output.format_value(publisher.age)} ago and its transaction is still open "
                f"({publisher.state}); "
                f"readers of {_topics(publisher.topics)} wait at position {publisher.position_bound}",
                f"Let it commit, or end it: select pg_terminate_backend({publisher.pid}). "
                "headwater settings set --max-publisher-seconds terminates such transactions automatically.",
            )
    if any(publisher.age is None for publisher in publishers):
        return None
    return f"{len(publishers)} open publishing transactions; head {state.head}, stable position {state.stable}"


def _topics(names: Sequence[str] | None) -> str:
    if names is None:
        return "all topics"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more topics" if len(names) > 3 else "")


def _cursors(log: headwater.Headwater, facts: _Facts) -> Problems:
    held = [hold for hold in run_query(log, "commands/doctor_retention") if hold[0] == "cursor"]
    for _, name, *hold in held:
        yield _warn(
            f"cursor {name} blocks retention: {_held(facts, *hold)}",
            f"Run its reader, or give up the unread events: headwater cursor delete {name}",
        )
    return "no cursor blocks retention"


def _held(facts: _Facts, topic: str, position: int, oldest: datetime, events: int, more: bool, size_bytes: int) -> str:
    """Describe the events of a topic that a consumer keeps from retention."""
    counted = f"more than {events}" if more else str(events)
    return (
        f"topic {topic} after position {position}, {counted} events ({size_bytes} bytes) older than its retention, "
        f"the oldest from {output.format_value(facts.server_time - oldest)} ago"
    )


def _archives(log: headwater.Headwater, facts: _Facts) -> Problems:
    archives = log.run(archive_calls.archives())
    held = [archive for archive in archives if archive.held_topics]
    for archive in held:
        yield _warn(
            f"archive {archive.name} blocks retention of {', '.join(archive.held_topics)}: "
            f"its oldest unarchived event is from {output.format_value(archive.oldest_unarchived_age)} ago",
            f"Run its pipeline: headwater pipeline run {archive.name}. "
            f"Or forget it: headwater archive forget {archive.name}",
        )
    return f"{len(archives)} archives: none blocks retention"


def _queues(log: headwater.Headwater, facts: _Facts) -> Problems:
    queues = log.queues()
    overdue = {name: (events, late) for name, events, late in run_query(log, "commands/doctor_leases", OVERDUE)}
    for queue in queues:
        yield from _queue(queue, overdue.get(queue.name))
    yield from (
        _warn(
            f"queue {name} blocks retention: {_held(facts, *hold)}",
            f"Run its workers, or headwater queue alter {name} --no-holds-retention, or headwater queue delete {name}.",
        )
        for kind, name, *hold in run_query(log, "commands/doctor_retention")
        if kind in {"queue", "subscription queue"}
    )
    bound = sum(queue.kind == "bindings" for queue in queues)
    return f"{bound} queues: none is paused, stalled or without workers; no overdue leases; few dead letters"


def _queue(queue: QueueOverview, overdue: tuple[int, timedelta] | None) -> Iterator[Problem]:
    """Check one queue."""
    behind = output.format_count(queue.lag_events, queue.lag_is_more)
    age = "" if queue.lag_seconds is None else f", the oldest from {_ago(queue.lag_seconds)} ago"
    if queue.state == "paused":
        yield _warn(
            f"queue {queue.name} is paused, {behind} events behind",
            f"Run headwater queue resume {queue.name}.",
        )
    elif queue.state == "no_workers" and (queue.lag_events or queue.lag_is_more):
        last = "it never had one" if queue.last_claimed_at is None else f"the last worker was {queue.last_worker}"
        yield _warn(
            f"queue {queue.name} has no workers and {behind} waiting events{age}; {last}",
            f"Start its workers (headwater work MODULE:APP), or delete it: headwater queue delete {queue.name}",
        )
    elif queue.state == "no_reader" and (queue.lag_events or queue.lag_is_more):
        yield _warn(
            f"queue {queue.name} has SQL subscriptions, no reader and {behind} unread events{age}",
            "Start its reader (headwater work MODULE:APP, or headwater serve), or delete it: "
            f"headwater queue delete {queue.name}",
        )
    elif queue.state == "stalled":
        yield _warn(
            f"queue {queue.name} is stalled: {behind} events wait{age}, but workers that claim get none",
            "Check the publishers above: an open transaction blocks readers. Otherwise check leases and max_in_flight: "
            f"headwater queue describe {queue.name}",
        )
    if queue.dead >= MANY_DEAD_LETTERS:
        yield _warn(
            f"queue {queue.name} has {queue.dead} dead letters",
            f"See the errors: headwater dead list {queue.name}. Then redrive or discard them.",
        )
    if overdue is not None:
        events, late = overdue
        yield _warn(
            f"queue {queue.name} has {events} events in leases that expired {output.format_value(late)} ago",
            "No worker is running; the next one receives these events: headwater work MODULE:APP",
        )


def _ago(seconds: float) -> str:
    return output.format_value(timedelta(seconds=round(seconds)))


def _filters(log: headwater.Headwater, facts: _Facts) -> Problems:
    for queue, expression, position, stopped_at, error, expired, subscriptions in run_query(
        log, "commands/doctor_filters"
    ):
        lost = "; retention has removed events that they have not received" if expired else ""
        yield _warn(
            f"a filter of queue {queue} ({subscriptions} subscriptions) was stopped after position {position} at "
            f"{output.format_value(stopped_at)}: {error}: {expression}{lost}",
            "No event is skipped. To continue from there, create a subscription with the filter again "
            "(headwater sub create), or call `log.resume_filter(ID)`.",
        )
    for expression, error, errors in run_query(log, "commands/doctor_filter_errors"):
        yield _warn(
            f"a filter raised an error on {errors} events, which do not match it; the last: {error}: {expression}",
            "Subscribe with a filter that handles every event, for example with a case expression.",
        )
    return None


def _filter_role(log: headwater.Headwater, facts: _Facts) -> Problems:
    if facts.takes_filters and facts.owner_may_act:
        return "SQL filters run as role headwater_filter"
    if not facts.has_filter_role:
        problem = "role headwater_filter does not exist"
    elif not facts.owner_may_act:
        problem = f"{facts.owner} may not SET ROLE headwater_filter"
    else:
        problem = "schema headwater_filter does not exist"
    effect = "migrations cannot update SQL filters" if facts.takes_filters else "SQL filters are not available"
    create_roles = (
        ""
        if facts.has_filter_role
        else "create role headwater_filter nologin; create role headwater_filter_owner nologin; "
    )
    may_act = " with set true" if facts.server_version >= SET_OPTION_VERSION else ""
    yield _warn(
        f"{problem}: {effect}",
        f"As a role that may create roles, run: {create_roles}grant headwater_filter, headwater_filter_owner "
        f'to "{facts.owner}"{may_act}; '
        f"Then run headwater migrate as {facts.owner}.",
    )
    return None


def _scheduled(log: headwater.Headwater, facts: _Facts) -> Problems:
    waiting = log.scheduled(batch_size=1)
    if waiting and waiting[0].due_at < facts.server_time - OVERDUE:
        late = facts.server_time - waiting[0].due_at
        yield _warn(
            f"a scheduled event is {output.format_value(late)} overdue",
            "Keep a follower or `headwater maintain --every 60s` running.",
        )
    return "no scheduled event is overdue"


def _clock(log: headwater.Headwater, facts: _Facts) -> Problems:
    steps = run_query(log, "commands/doctor_clock", CLOCK_STEPS_REPORTED)
    for seen_at, seconds, position in steps:
        yield _warn(
            f"the database clock was set back by at least {-seconds:.0f} seconds, noticed at "
            f"{output.format_value(seen_at)} when the head was at position {position}",
            "Leases and retries were adjusted. Let chrony or ntpd slew the clock instead of stepping it, and check "
            "scheduled events, cron schedules and retention.",
        )
    difference = facts.server_time - facts.asked_at
    if abs(difference) > MAX_CLOCK_DIFFERENCE:
        yield _warn(
            f"the clocks of the database and of this machine differ by {output.format_value(abs(difference))}",
            "Correct the wrong one. Publishing times, schedules and retention use the database clock.",
        )
    return "the database clock was not set back recently and agrees with the clock of this machine"


LOG_CHECKS: Final[tuple[tuple[str, Callable[[headwater.Headwater, _Facts], Problems]], ...]] = (
    ("segments", _segments),
    ("segments", _missing_segments),
    ("maintenance", _maintenance),
    ("positions", _positions),
    ("publishers", _publishers),
    ("cursors", _cursors),
    ("archives", _archives),
    ("queues", _queues),
    ("pipelines", _pipelines),
    ("slots", _slots),
    ("filters", _filter_role),
    ("filters", _filters),
    ("scheduled", _scheduled),
    ("clock", _clock),
)


def _facts(connection: psycopg.Connection[Any]) -> _Facts:
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        row = cursor.execute(read_query("commands/doctor")).fetchone()
    assert row is not None
    return _Facts._make([*row, datetime.now(UTC)])


def _print(finding: Finding) -> None:
    output.print_line(f"{finding.outcome:<4}  {finding.check}: {output.escape_control(finding.message)}")
    if finding.action and finding.outcome != "ok":
        output.print_line(f"      {output.escape_control(finding.action)}")
