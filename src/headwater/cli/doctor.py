"""`headwater doctor`: does everything fit and flow, and if not, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

import psycopg
import typer
from psycopg.rows import namedtuple_row

import headwater
from headwater import calls
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import Session, session, translated
from headwater.cli.exit_codes import ChecksFailed
from headwater.cli.queries import ask, query
from headwater.cli.reading_group import reading_groups
from headwater.errors import HeadwaterError, NotAllowed

app = typer.Typer()

OLDEST_SERVER: Final = 150_000
# From here on a member of a role may be kept from acting as it.
SET_OPTION_SERVER: Final = 160_000
OLD_PUBLISHER: Final = timedelta(seconds=60)
OVERDUE: Final = timedelta(seconds=60)
MANY_DEAD: Final = 100


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


def _publishers(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    state = log.state()
    publishers = log.publishers_in_flight()
    for publisher in publishers:
        who = f"process {publisher.pid} of {publisher.user_name} ({publisher.application_name or 'no name'})"
        if publisher.prepared:
            yield Finding(
                "publishers",
                "warn",
                f"a prepared transaction holds readers at {publisher.position_bound}",
                "Commit or roll it back: select * from pg_prepared_xacts",
            )
        elif publisher.age is not None and publisher.age > OLD_PUBLISHER:
            yield Finding(
                "publishers",
                "warn",
                f"{who} published {output.shown(publisher.age)} ago and is still open ({publisher.state}); "
                f"readers wait at {publisher.position_bound}",
                f"Let it commit, or end it: select pg_terminate_backend({publisher.pid})",
            )
    if all(p.age is not None and p.age <= OLD_PUBLISHER for p in publishers):
        yield Finding(
            "publishers",
            "ok",
            f"{len(publishers)} in flight; the log is drawn to {state.drawn} and settled to {state.settled}",
        )


def _cursors(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    retentions = [topic.retention for topic in log.topics() if topic.retention is not None]
    shortest = min(retentions, default=None)
    held = [
        cursor
        for cursor in log.cursors()
        if cursor.must_not_lose
        and shortest is not None
        and cursor.oldest_unread_age is not None
        and cursor.oldest_unread_age > shortest
    ]
    for cursor in held:
        yield Finding(
            "cursors",
            "warn",
            f"cursor {cursor.name} must not lose and has not read for {output.shown(cursor.oldest_unread_age)}: "
            "it holds retention back",
            f"Run its reader, or give up what it has not read: headwater cursor delete {cursor.name}",
        )
    if not held:
        yield Finding("cursors", "ok", "no cursor holds retention back")


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
    reading = reading_groups(log)
    queues = [group for group in log.groups() if group.name not in reading]
    worrying = False
    for group in queues:
        if group.paused:
            worrying = True
            yield Finding(
                "groups",
                "warn",
                f"group {group.name} is paused, {group.positions_behind} positions behind",
                f"headwater group resume {group.name}",
            )
        if group.dead >= MANY_DEAD:
            worrying = True
            yield Finding(
                "groups",
                "warn",
                f"group {group.name} has {group.dead} dead letters",
                f"Look at why: headwater dead list {group.name}. Then headwater dead redrive, or discard.",
            )
    for name, events, overdue in ask(log, "doctor_leases", OVERDUE):
        worrying = True
        yield Finding(
            "groups",
            "warn",
            f"group {name} has {events} events in leases that ran out {output.shown(overdue)} ago",
            "Its workers are gone, and with the next one the events go on: headwater work MODULE:APP",
        )
    retentions = [topic.retention for topic in log.topics() if topic.retention is not None]
    for name, oldest in ask(log, "doctor_unworked") if retentions else []:
        if oldest > min(retentions):
            worrying = True
            yield Finding(
                "groups",
                "warn",
                f"group {name} must not lose and has not finished an event of {output.shown(oldest)} ago: "
                "it holds retention back",
                f"Run its workers, or headwater group alter {name} --may-lose, or headwater group delete {name}.",
            )
    if not worrying:
        yield Finding("groups", "ok", f"{len(queues)} queues: none paused, no lease overdue, few dead letters")


def _conditions(log: headwater.Headwater, facts: _Facts) -> Iterator[Finding]:
    yield from _condition_role(facts)
    for expression, error, groups in ask(log, "doctor_conditions"):
        yield Finding(
            "conditions",
            "warn",
            f"a condition of {', '.join(groups)} is set aside, and matches nothing: {error}: {expression}",
            "Subscribe to it again for another chance (headwater sub create), or to one that takes less time.",
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
    make_role = "" if facts.has_condition_role else "create role headwater_condition nologin; "
    may_act = " with set true" if facts.server_version >= SET_OPTION_SERVER else ""
    yield Finding(
        "conditions",
        "warn",
        f"{wrong}: {effect}",
        f'Have somebody who may create roles run: {make_role}grant headwater_condition to "{facts.owner}"{may_act}; '
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


LOG_CHECKS: Final[tuple[tuple[str, Callable[[headwater.Headwater, _Facts], Iterator[Finding]]], ...]] = (
    ("segments", _segments),
    ("publishers", _publishers),
    ("cursors", _cursors),
    ("archives", _archives),
    ("groups", _groups),
    ("conditions", _conditions),
    ("scheduled", _scheduled),
)


def _facts(connection: psycopg.Connection[Any]) -> _Facts:
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        row = cursor.execute(query("doctor")).fetchone()
    assert row is not None
    return _Facts(*row)


def _tell(finding: Finding) -> None:
    output.say(f"{finding.outcome:<4}  {finding.check}: {output.visible(finding.message)}")
    if finding.action and finding.outcome != "ok":
        output.say(f"      {output.visible(finding.action)}")
