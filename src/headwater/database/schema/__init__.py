"""The database schema: installing it, upgrading it, and checking that it matches this program.

Tables change by numbered migrations, each run once and never edited after release. Functions, views and grants are
replaced as a whole at every upgrade. Running programs are not interrupted: a migration declares the oldest program that
still works after it, and functions that a version drops remain until the version after it.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import psycopg

from headwater.errors import LogUnavailable, SchemaMismatch
from headwater.version import VERSION

# Order matters where one file's definitions need another's.
FUNCTION_FILES = (
    "locks.sql",
    "epoch.sql",
    "stable_position.sql",
    "clock.sql",
    "segment.sql",
    "topic.sql",
    "publish.sql",
    "schedule.sql",
    "cron_schedule.sql",
    "read.sql",
    "lag.sql",
    "queue.sql",
    "queue_steps.sql",
    "claim.sql",
    "lease.sql",
    "dead_letter.sql",
    "delivery.sql",
    "webhook.sql",
    "filter.sql",
    "subscription.sql",
    "subscription_retry.sql",
    "waiting.sql",
    "watch.sql",
    "pipeline.sql",
    "pipeline_run.sql",
    "projection.sql",
    "rebuild.sql",
    "archive.sql",
    "event_store.sql",
    "store_query.sql",
    "field_index.sql",
    "store_snapshot.sql",
    "subscriber_name.sql",
    "storage.sql",
    "access.sql",
    "api_key.sql",
    "idempotency.sql",
    "schema_registry.sql",
    "kafka_topic.sql",
    "kafka_produce.sql",
    "kafka_fetch.sql",
    "retention_hold.sql",
    "kafka_retention.sql",
    "kafka_compaction.sql",
    "kafka_group.sql",
    "kafka_transaction.sql",
    "retention.sql",
    "cursor.sql",
    "audit.sql",
    "overview.sql",
    "metrics.sql",
    "retire.sql",
    "grants.sql",
)

BOOKKEEPING = """\
create schema if not exists headwater;
create schema if not exists headwater_internal;
create table if not exists headwater_internal.migration (
    number         integer     primary key check (number >= 1),
    name           text        not null,
    checksum       text        not null,
    oldest_program integer     not null check (oldest_program between 1 and number),
    applied_at     timestamptz not null default clock_timestamp()
);
create table if not exists headwater_internal.installed (
    only_row           boolean     primary key default true check (only_row),
    version            text        not null,
    functions_checksum text        not null,
    installed_at       timestamptz not null default clock_timestamp()
);
"""

# Determine the stable position again: in a database that was restored from a dump, the stored one may be too high,
# since a dump reads sequences one after the other.
FIRST_MAINTENANCE = "select setval('headwater_internal.stable_register', 0);\nselect headwater.maintain();\n"

# A step that waits for a table lock blocks everyone behind it. So it gives up soon and tries again: before Postgres
# checks for deadlocks (deadlock_timeout, 1 second), which might abort another transaction instead.
LOCK_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step. Programs that know at least the step `oldest_program` still work after it."""

    number: int
    name: str
    sql: str
    oldest_program: int

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@cache
def migrations() -> tuple[Migration, ...]:
    """All steps that this program knows, in order."""
    found = []
    for file in sorted((resources.files(__name__) / "migrations").iterdir(), key=lambda f: f.name):
        number, name = re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name).groups()  # type: ignore[union-attr]
        sql = file.read_text()
        declared = re.search(r"^-- oldest program: (\d+)$", sql, re.MULTILINE)
        oldest = int(declared.group(1)) if declared else int(number)
        found.append(Migration(int(number), name, sql, oldest))
    return tuple(found)


@cache
def functions() -> str:
    """Everything that an upgrade replaces as a whole."""
    folder = resources.files(__name__) / "functions"
    return "\n".join((folder / name).read_text() for name in FUNCTION_FILES)


@cache
def functions_checksum() -> str:
    return hashlib.sha256(functions().encode()).hexdigest()


def script(*, after: int = 0) -> str:
    """The whole schema as one script for `psql -f`: for an empty database, or one at migration `after`."""
    parts = ["begin;\n", f"set local lock_timeout = '{LOCK_SECONDS:g}s';\n", BOOKKEEPING]
    for step in migrations():
        if step.number > after:
            parts += [
                step.sql,
                f"insert into headwater_internal.migration (number, name, checksum, oldest_program) "
                f"values ({step.number}, '{step.name}', '{step.checksum}', {step.oldest_program});\n",
            ]
    parts += [
        f"set local headwater.installing = '{VERSION}';\n",
        functions(),
        "insert into headwater_internal.installed (version, functions_checksum) "
        f"values ('{VERSION}', '{functions_checksum()}') on conflict (only_row) do update "
        "set version = excluded.version, functions_checksum = excluded.functions_checksum, "
        "installed_at = clock_timestamp();\n",
        FIRST_MAINTENANCE,
        "commit;\n",
    ]
    return "\n".join(parts)


def upgrade(connection: psycopg.Connection[Any], *, patience_seconds: float = 60.0) -> list[Migration]:
    """Upgrade a database to this program's schema, in one transaction; returns the steps that ran.

    Safe to call from many processes at once: one upgrades, the others find nothing to do. Publishers and consumers
    continue meanwhile. A locked table is retried, without blocking others for long.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return _upgrade(connection)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            if time.monotonic() > deadline:
                raise LogUnavailable(
                    f"a table that the upgrade changes was locked for {patience_seconds:g} s: {error}".strip(),
                    hint="Nothing was changed. See pg_stat_activity for long transactions; then run it again.",
                ) from error
            time.sleep(LOCK_SECONDS)


def _upgrade(connection: psycopg.Connection[Any]) -> list[Migration]:
    with connection.transaction(), connection.cursor() as cursor:
        cursor.execute("select set_config('lock_timeout', %s, true)", (f"{LOCK_SECONDS:g}s",))
        cursor.execute("select pg_advisory_xact_lock(29289::bigint << 48)")  # Lock tag: see functions/locks.sql.
        _execute(cursor, BOOKKEEPING)
        cursor.execute("select number, checksum from headwater_internal.migration order by number")
        applied = dict(cursor.fetchall())
        known = migrations()
        for step in known:
            if step.number in applied and applied[step.number] != step.checksum:
                raise SchemaMismatch(
                    f"migration {step.number:04} ({step.name}) was run on this database in another form",
                    hint="This database was set up by another build of Headwater. Use that build, or a new database.",
                )
        if applied and max(applied) > known[-1].number:
            raise _newer_database(max(applied), known[-1].number)
        cursor.execute("select version from headwater_internal.installed")
        for (version,) in cursor.fetchall():
            if _version(version) > _version(VERSION):
                raise SchemaMismatch(
                    f"this database was upgraded by Headwater {version}, but this program is {VERSION}",
                    hint="Upgrade the program: pip install --upgrade headwater.",
                )
        pending = [step for step in known if step.number not in applied]
        for step in pending:
            _execute(cursor, step.sql)
            cursor.execute(
                "insert into headwater_internal.migration (number, name, checksum, oldest_program) values (%s, %s, "
                "%s, %s)",
                (step.number, step.name, step.checksum, step.oldest_program),
            )
        cursor.execute("select set_config('headwater.installing', %s, true)", (VERSION,))
        _execute(cursor, functions())
        cursor.execute(
            "insert into headwater_internal.installed (version, functions_checksum) values (%s, %s) "
            "on conflict (only_row) do update set version = excluded.version, "
            "functions_checksum = excluded.functions_checksum, installed_at = clock_timestamp()",
            (VERSION, functions_checksum()),
        )
        _execute(cursor, FIRST_MAINTENANCE)
    return pending


@dataclass(frozen=True, slots=True)
class Installed:
    """The versions that are installed in a database."""

    number: int
    oldest_program: int
    version: str
    functions_checksum: str


def refuse_newer(installed: Installed | None) -> None:
    """Raise SchemaMismatch if a newer program has upgraded the database so that this one no longer works with it.

    Running programs check this periodically. Newer functions alone are not an error, since they remain compatible.
    """
    latest = migrations()[-1].number
    if installed is not None and installed.oldest_program > latest:
        raise _newer_database(installed.number, latest)


def refuse_misfit(installed: Installed | None) -> None:
    """Raise SchemaMismatch, naming the command to run, unless this program works with the installed schema."""
    latest = migrations()[-1].number
    if installed is None:
        raise SchemaMismatch("this database has no Headwater schema", hint="Run `headwater migrate`.")
    refuse_newer(installed)
    older = installed.number < latest or _version(installed.version) < _version(VERSION)
    changed = installed.version == VERSION and installed.functions_checksum != functions_checksum()
    if older or changed:
        raise SchemaMismatch(
            f"the database has schema {installed.number} of Headwater {installed.version}, "
            f"but this program needs schema {latest} of {VERSION}",
            hint="Run `headwater migrate`.",
        )


def _newer_database(number: int, latest: int) -> SchemaMismatch:
    return SchemaMismatch(
        f"the database has schema {number}, but this program supports schemas up to {latest}",
        hint="Upgrade the program: pip install --upgrade headwater.",
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _execute(cursor: psycopg.Cursor[Any], sql: str) -> None:
    # SQL from our own files, not from users.
    cursor.execute(sql.encode())
