"""`headwater doctor`: does everything fit and flow, and if not, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

import psycopg
import typer
from psycopg.rows import namedtuple_row

import headwater
from headwater import calls
from headwater.calls import overview
from headwater.calls.reading import SEGMENT_SIZE
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import Session, session, translated
from headwater.cli.exit_codes import ChecksFailed
from headwater.cli.queries import ask, query
from headwater.errors import HeadwaterError, NotAllowed
from headwater.model import GroupOverview, LogFault

app = typer.Typer()

OLDEST_SERVER: Final = 150_000
# From here on a member of a role may be kept from acting as it.
SET_OPTION_SERVER: Final = 160_000
OLD_PUBLISHER: Final = timedelta(seconds=60)
OVERDUE: Final = timedelta(seconds=60)
MANY_DEAD: Final = 100
CLOCKS_APART: Final = timedelta(seconds=30)
CLOCK_STEPS_TOLD: Final = timedelta(days=1)
# What an idle slot may hold: less than one file of WAL is what every slot holds between two reads.
MAX_IDLE_SLOT_BYTES: Final = 16 * 1024 * 1024
# Of findings of one kind, how many are told one by one.
MAX_ALIKE: Final = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it."""

    check: str
    outcome: Literal["ok", "warn", "fail"]
    message: str
    action: str | None = None


class _Facts(NamedTuple):
    server_version: int
    server_version_text: str
    in_recovery: bool
    wal_level: str
    isolation: str
    missing_roles: list[str]
    has_condition_role: bool
    owner_may_act: bool | None
    owner: str | None
    takes_conditions: bool
    server_time: datetime
    asked_at: datetime


@app.command(epilog=examples("headwater doctor", "headwater doctor --json"))
def doctor(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Check the database and the log. Ends with 1 if anything fails; each line says what to do."""
    findings = []
    for finding in examine(session(context), dsn):
        findings.append(finding)
        if not as_json:
            _tell(finding)
    failed = [finding.check for finding in findings if finding.outcome == "fail"]
    if as_json:
        output.emit({"ok": not failed, "findings": findings})
    if failed:
        raise ChecksFailed(f"failed: {', '.join(failed)}")


def examine(run: Session, dsn: str | None) -> Iterator[Finding]:
    """All checks in order; those that need what failed are left out."""
    try:
        with run.connection(dsn) as connection:
            facts = _facts(connection)
    except HeadwaterError as error:
        yield Finding("reachable", "fail", error.message, error.hint or "Start it, or correct the DSN.")
        return
    yield Finding("reachable", "ok", "the database answers")
    yield from _examine_server(facts)
    try:
        with run.log(dsn) as log:
            yield Finding("schema", "ok", f"the schema fits Headwater {headwater.__version__}")
            for name, check in LOG_CHECKS:
                try:
                    with translated():
                        yield from check(log, facts)
                except NotAllowed as error:
                    yield Finding(name, "warn", f"this role may not look: {error.message}", "Use headwater_admin.")
    except HeadwaterError as error:
        yield Finding("schema", "fail", error.message, error.hint)


def _examine_server(facts: _Facts) -> Iterator[Finding]:
    if facts.server_version < OLDEST_SERVER:
        yield Finding(
            "version", "fail", f"Postgres {facts.server_version_text} is too old", "Use Postgres 15 or newer."
        )
    else:
        yield Finding("version", "ok", f"Postgres {facts.server_version_text}")
    if facts.in_recovery:
        yield Finding(
            "primary", "fail", "this server is a standby, where order cannot be known", "Connect to the primary."
        )
    else:
        yield Finding("primary", "ok", "this server is a primary")
    if facts.isolation != "read committed":
        yield Finding(
            "isolation",
            "fail",
            f"transactions are {facts.isolation} by default, and the log is read at READ COMMITTED",
            "alter role ... set default_transaction_isolation = 'read committed'",
        )
    else:
        yield Finding("isolation", "ok", "transactions are READ COMMITTED by default")
    wal_note = "" if facts.wal_level == "logical" else "; only capturing changes of tables would need logical"
    yield Finding("wal_level", "ok", f"wal_level is {facts.wal_level}{wal_note}")
    if facts.missing_roles:
        statements = " ".join(f"create role {name} nologin;" for name in facts.missing_roles)
        yield Finding(
            "roles",
            "warn",
            f"missing: {', '.join(facts.missing_roles)}",
            f"Have somebody who may create roles run: {statements} Then run headwater migrate.",
        )
    else:
        yield Finding("roles", "ok", "headwater_publisher, headwater_consumer and headwater_admin exist")


def _segments(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    settings = log.settings()
    ((ahead, open_age),) = ask(log, "doctor_segments")
    if ahead == 0:
        yield Finding(
            "segments", "fail", "no segment is ready; publishing stops when the open one is full", "headwater maintain"
        )
    elif ahead < settings.segments_ahead - 1:
        yield Finding(
            "segments",
            "warn",
            f"{ahead} segments are ready, {settings.segments_ahead} are wanted",
            "Run headwater maintain; nobody seems to.",
        )
    else:
        yield Finding("segments", "ok", f"{ahead} segments are ready for the log to grow into")
    for fault in log.run(overview.log_faults()):
        if fault.kind == "segment":
            yield Finding(
                "segments",
                "fail",
                f"table headwater.{fault.name} is missing: {_missing_segment(fault)}",
                "Restore the database from a backup. Never drop or detach the tables of the log by hand: "
                "retention does it.",
            )
    if open_age is not None and open_age > settings.segment_interval * 2:
        yield Finding(
            "maintenance",
            "warn",
            f"the open segment is {output.shown(open_age)} old, and is to be closed after "
            f"{output.shown(settings.segment_interval)}",
            "Keep a follower or `headwater maintain --every 60` running, or retention takes nothing.",
        )
    else:
        yield Finding("maintenance", "ok", "segments are rotated in time")


def _missing_segment(fault: LogFault) -> str:
    if fault.position > fault.head:
        return "publishing stops when the log has come there"
    if fault.position + SEGMENT_SIZE > fault.head + 1:
        return "nothing can be published"
    return f"the events from position {fault.position} to {fault.position + SEGMENT_SIZE - 1} are gone"


def _positions(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    """Nothing stands beyond the head of the log: what does gets nothing until the log has come there."""
    faults = [fault for fault in log.run(overview.log_faults()) if fault.kind != "segment"]
    yield from _bounded("positions", [_beyond_head(fault) for fault in faults])
    if not faults:
        yield Finding("positions", "ok", "no cursor and no group is beyond the head of the log")


def _beyond_head(fault: LogFault) -> Finding:
    beyond = f"at {fault.position}, beyond the head of the log at {fault.head}"
    if fault.kind == "register":
        return Finding(
            "positions",
            "fail",
            f"the settled position is noted {beyond}: queues would skip the events in between",
            "Was the database restored? Stop all workers, then run headwater migrate, which notes it again.",
        )
    kind = "cursor" if fault.kind == "cursor" else "group"
    command = (
        f"headwater cursor set {fault.name} --position"
        if kind == "cursor"
        else f"headwater group rewind {fault.name} --position"
    )
    return Finding(
        "positions",
        "fail",
        f"{kind} {fault.name} is {beyond}: it gets none of the events until then",
        f"Set it to the last position that it is known to have handled: {command} POSITION",
    )


def _bounded(check: str, findings: Sequence[Finding]) -> Iterator[Finding]:
    """So many of one kind, then how many more there are."""
    yield from findings[:MAX_ALIKE]
    if len(findings) > MAX_ALIKE:
        worst: Literal["warn", "fail"] = "fail" if any(one.outcome == "fail" for one in findings) else "warn"
        yield Finding(check, worst, f"and {len(findings) - MAX_ALIKE} more like these", "headwater group list")


def _slots(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    """An idle slot keeps WAL until the disk is full."""
    slots = ask(log, "doctor_slots")
    found = []
    for name, held_bytes, lost in slots:
        if lost:
            found.append(
                Finding(
                    "slots",
                    "warn",
                    f"replication slot {name} has lost WAL that it needs (max_slot_wal_keep_size), and is of no use",
                    f"Drop it: select pg_drop_replication_slot('{name}'). Its pipeline has to load its tables again.",
                )
            )
        elif held_bytes > MAX_IDLE_SLOT_BYTES:
            found.append(
                Finding(
                    "slots",
                    "warn",
                    f"replication slot {name} is inactive and holds {held_bytes / 1048576:,.0f} MiB of WAL",
                    "Run its pipeline (headwater pipeline status), or drop it: "
                    f"select pg_drop_replication_slot('{name}')",
                )
            )
    for name, database in ask(log, "doctor_failover_slots"):
        # No SQL function does it, only this command of the replication protocol.
        change = f'psql "dbname={database} replication=database" -c "ALTER_REPLICATION_SLOT {name} (FAILOVER true)"'
        found.append(
            Finding(
                "slots",
                "warn",
                f"replication slot {name} is no failover slot: after a promotion it is gone, and its changes with it",
                f"Stop its pipeline, then run against the primary: {change}",
            )
        )
    yield from _bounded("slots", found)
    if not found:
        yield Finding("slots", "ok", f"{len(slots)} inactive replication slots: none holds much WAL")


def _pipelines(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    pipelines = log.run(calls.pipeline_statuses())
    found = []
    for one in pipelines:
        error = (one.last_error or "").splitlines() or [""]
        if one.state in ("failed", "failing"):
            found.append(
                Finding(
                    "pipelines",
                    "warn",
                    f"pipeline {one.name} "
                    + ("ended with an error" if one.state == "failed" else f"failed {one.failures} times in a row")
                    + f": {error[0]}",
                    f"See headwater pipeline status {one.name} --batches; mend the cause"
                    + (f", then headwater pipeline run {one.name}." if one.state == "failed" else "."),
                )
            )
        elif one.state == "lost":
            found.append(
                Finding(
                    "pipelines",
                    "warn",
                    f"the runner of pipeline {one.name}, {one.runner}, is gone without a word",
                    f"Start it again, it goes on from its place: headwater pipeline run {one.name}",
                )
            )
    yield from _bounded("pipelines", found)
    if not found:
        yield Finding("pipelines", "ok", f"{len(pipelines)} pipelines: none failed")


def _publishers(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    state = log.state()
    publishers = log.publishers_in_flight()
    for publisher in publishers:
        who = f"process {publisher.pid} of {publisher.user_name} ({publisher.application_name or 'no name'})"
        if publisher.prepared:
            yield Finding(
                "publishers",
                "warn",
                f"a prepared transaction holds readers of {_topics(publisher.topics)} at {publisher.position_bound}",
                "Commit or roll it back: select * from pg_prepared_xacts",
            )
        elif publisher.age is not None and publisher.age > OLD_PUBLISHER:
            yield Finding(
                "publishers",
                "warn",
                f"{who} published {output.shown(publisher.age)} ago and is still open ({publisher.state}); "
                f"readers of {_topics(publisher.topics)} wait at {publisher.position_bound}",
                f"Let it commit, or end it: select pg_terminate_backend({publisher.pid}). "
                "headwater settings set --max-publisher-seconds ends such by itself.",
            )
    if all(p.age is not None and p.age <= OLD_PUBLISHER for p in publishers):
        yield Finding(
            "publishers",
            "ok",
            f"{len(publishers)} in flight; the log is drawn to {state.drawn} and settled to {state.settled}",
        )


def _topics(names: Sequence[str] | None) -> str:
    if names is None:
        return "all topics"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more topics" if len(names) > 3 else "")


def _cursors(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    held = [hold for hold in ask(log, "doctor_retention") if hold[0] == "cursor"]
    for _, name, *hold in held:
        yield Finding(
            "cursors",
            "warn",
            f"cursor {name} must not lose and holds retention back: {_held(facts, *hold)}",
            f"Run its reader, or give up what it has not read: headwater cursor delete {name}",
        )
    if not held:
        yield Finding("cursors", "ok", "no cursor holds retention back")


def _held(facts: _Facts, topic: str, position: int, oldest: datetime, events: int, more: bool, size_bytes: int) -> str:
    """What a consumer holds of a topic, in words."""
    counted = f"more than {events}" if more else str(events)
    return (
        f"topic {topic} after position {position}, for {output.shown(facts.server_time - oldest)}, "
        f"{counted} events of {size_bytes} bytes that are older than its retention"
    )


def _archives(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    archives = log.run(calls.archives())
    held = [archive for archive in archives if archive.held_topics]
    for archive in held:
        yield Finding(
            "archives",
            "warn",
            f"archive {archive.name} has yet to get events of {output.shown(archive.oldest_unarchived_age)} ago: "
            f"it holds the retention of {', '.join(archive.held_topics)} back",
            f"Run its pipeline: headwater pipeline run {archive.name}. "
            f"Or give it up: headwater archive forget {archive.name}",
        )
    if not held:
        yield Finding("archives", "ok", f"{len(archives)} archives: none holds retention back")


def _groups(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    groups = log.groups()
    overdue = {name: (events, late) for name, events, late in ask(log, "doctor_leases", OVERDUE)}
    found = [finding for group in groups for finding in _group(group, overdue.get(group.name))]
    found += [
        Finding(
            "groups",
            "warn",
            f"group {name} must not lose and holds retention back: {_held(facts, *hold)}",
            f"Run its workers, or headwater group alter {name} --may-lose, or headwater group delete {name}.",
        )
        for kind, name, *hold in ask(log, "doctor_retention")
        if kind in {"queue", "group"}
    ]
    yield from _bounded("groups", found)
    if not found:
        queues = sum(group.kind == "queue" for group in groups)
        yield Finding(
            "groups",
            "ok",
            f"{queues} queues: none paused, stalled or without workers, no lease overdue, few dead letters",
        )


def _group(group: GroupOverview, overdue: tuple[int, timedelta] | None) -> Iterator[Finding]:
    """What is wrong with one group."""
    behind = output.at_least(group.lag_events, group.lag_is_more)
    age = "" if group.lag_seconds is None else f", the oldest of {_ago(group.lag_seconds)} ago"
    if group.state == "paused":
        yield Finding(
            "groups",
            "warn",
            f"group {group.name} is paused, {behind} events behind",
            f"headwater group resume {group.name}",
        )
    elif group.state == "no_workers" and (group.lag_events or group.lag_is_more):
        seen = "never had one" if group.last_claimed_at is None else f"was last worked by {group.last_worker}"
        yield Finding(
            "groups",
            "warn",
            f"group {group.name} has no workers and {behind} events that wait{age}; it {seen}",
            "Start its workers (headwater work MODULE:APP), or headwater group delete "
            f"{group.name} if it is not needed any more.",
        )
    elif group.state == "no_reader" and (group.lag_events or group.lag_is_more):
        yield Finding(
            "groups",
            "warn",
            f"group {group.name} has subscriptions, no reader and {behind} events to read{age}",
            "Start the program that reads for it (headwater work MODULE:APP, or headwater serve), or delete it: "
            f"headwater group delete {group.name}",
        )
    elif group.state == "stalled":
        yield Finding(
            "groups",
            "warn",
            f"group {group.name} is stalled: workers ask, {behind} events wait{age}, and none is handed out",
            "Look at the publishers above: an open one holds readers up. Else headwater group describe "
            f"{group.name}: is something leased for long, or max_in_flight too low?",
        )
    if group.dead >= MANY_DEAD:
        yield Finding(
            "groups",
            "warn",
            f"group {group.name} has {group.dead} dead letters",
            f"Look at why: headwater dead list {group.name}. Then headwater dead redrive, or discard.",
        )
    if overdue is not None:
        events, late = overdue
        yield Finding(
            "groups",
            "warn",
            f"group {group.name} has {events} events in leases that ran out {output.shown(late)} ago",
            "Its workers are gone, and with the next one the events go on: headwater work MODULE:APP",
        )


def _ago(seconds: float) -> str:
    return output.shown(timedelta(seconds=round(seconds)))


def _conditions(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    yield from _condition_role(facts)
    for group, expression, position, stopped_at, error, expired, subscriptions in ask(log, "doctor_conditions"):
        lost = "; retention has taken events that they have not had" if expired else ""
        yield Finding(
            "conditions",
            "warn",
            f"{subscriptions} subscriptions of group {group} are stopped after position {position} since "
            f"{output.shown(stopped_at)}: {error}: {expression}{lost}",
            "Nothing is passed over. To go on from there: subscribe to the filter again (headwater sub create), or "
            "resume it with `log.resume_filter(ID)`.",
        )
    for expression, error, errors in ask(log, "doctor_filter_errors"):
        yield Finding(
            "conditions",
            "warn",
            f"a filter failed on {errors} events, which do not match it; the last: {error}: {expression}",
            "Write it so that it fits every event, for example with a case, and subscribe to that one.",
        )


def _condition_role(facts: _Facts) -> Iterator[Finding]:
    if facts.takes_conditions and facts.owner_may_act:
        yield Finding("conditions", "ok", "SQL conditions run as role headwater_condition")
        return
    if not facts.has_condition_role:
        wrong = "there is no role headwater_condition"
    elif not facts.owner_may_act:
        wrong = f"{facts.owner} may not act as role headwater_condition"
    else:
        wrong = "there is no schema headwater_condition"
    effect = "no upgrade can renew how conditions run" if facts.takes_conditions else "no SQL conditions"
    make_role = (
        ""
        if facts.has_condition_role
        else "create role headwater_condition nologin; create role headwater_condition_owner nologin; "
    )
    may_act = " with set true" if facts.server_version >= SET_OPTION_SERVER else ""
    yield Finding(
        "conditions",
        "warn",
        f"{wrong}: {effect}",
        f"Have somebody who may create roles run: {make_role}grant headwater_condition, headwater_condition_owner "
        f'to "{facts.owner}"{may_act}; '
        f"Then run headwater migrate as {facts.owner}.",
    )


def _scheduled(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    waiting = log.scheduled(batch_size=1)
    if waiting and waiting[0].due_at < facts.server_time - OVERDUE:
        late = facts.server_time - waiting[0].due_at
        yield Finding(
            "scheduled",
            "warn",
            f"a scheduled event is {output.shown(late)} overdue",
            "Keep a follower or `headwater maintain --every 60` running.",
        )
    else:
        yield Finding("scheduled", "ok", "no scheduled event is overdue")


def _clock(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    steps = ask(log, "doctor_clock", CLOCK_STEPS_TOLD)
    for seen_at, seconds, position in steps:
        yield Finding(
            "clock",
            "warn",
            f"the database clock went back by {-seconds:.0f} seconds or more; seen at {output.shown(seen_at)}, "
            f"when the log was at position {position}",
            "Leases and retries are counted from then on. Have the clock slewed, not stepped (chrony, ntpd), and look "
            "at what reads by time: scheduled events, cron schedules, retention.",
        )
    apart = facts.server_time - facts.asked_at
    if abs(apart) > CLOCKS_APART:
        steps.append(())
        yield Finding(
            "clock",
            "warn",
            f"the database clock and that of this machine are {output.shown(abs(apart))} apart",
            "Set the one that is wrong. Events are dated, scheduled and expired by the database clock.",
        )
    if not steps:
        yield Finding("clock", "ok", "the database clock was not set back lately, and agrees with this machine's")


LOG_CHECKS: Final[tuple[tuple[str, Callable[[headwater.Headwater, _Facts], Iterator[Finding]]], ...]] = (
    ("segments", _segments),
    ("positions", _positions),
    ("publishers", _publishers),
    ("cursors", _cursors),
    ("archives", _archives),
    ("groups", _groups),
    ("pipelines", _pipelines),
    ("slots", _slots),
    ("conditions", _conditions),
    ("scheduled", _scheduled),
    ("clock", _clock),
)


def _facts(connection: psycopg.Connection[Any]) -> _Facts:
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        row = cursor.execute(query("doctor")).fetchone()
    assert row is not None
    return _Facts._make([*row, datetime.now(UTC)])


def _tell(finding: Finding) -> None:
    output.say(f"{finding.outcome:<4}  {finding.check}: {output.visible(finding.message)}")
    if finding.action and finding.outcome != "ok":
        output.say(f"      {output.visible(finding.action)}")
