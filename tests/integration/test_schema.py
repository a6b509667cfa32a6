"""Is the schema installed, upgraded and refused as it should be?"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import headwater
from headwater.database import schema
from headwater.database.schema import Installed, Migration
from headwater.embedded import EmbeddedError, find_binaries
from patience import PATIENCE_SECONDS

_numbers = itertools.count()
ROLES = ("headwater_publisher", "headwater_consumer", "headwater_admin")


@pytest.fixture
def make_database(admin_dsn: str) -> Iterator[Callable[..., str]]:
    """Makes databases without a schema, or with that of another one."""
    made: list[str] = []

    def make(*, template: str = "template0", owner: str | None = None) -> str:
        name = f"headwater_schema_{os.getpid()}_{next(_numbers)}"
        with psycopg.connect(admin_dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("create database {} template {} owner {}").format(
                    sql.Identifier(name), sql.Identifier(template), sql.Identifier(owner or connection.info.user)
                )
            )
        made.append(name)
        return conninfo.make_conninfo(admin_dsn, dbname=name)

    yield make
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        for name in made:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def empty_dsn(make_database: Callable[..., str]) -> str:
    return make_database()


@pytest.fixture
def installed_dsn(make_database: Callable[..., str], template: str) -> str:
    return make_database(template=template)


def upgrade(dsn: str) -> list[int]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return [step.number for step in schema.upgrade(connection)]


def execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())


def fingerprint(dsn: str) -> dict[str, list[tuple[Any, ...]]]:
    """All that defines the schema, as text; but for the segments, which come and go."""
    queries = {
        "columns": "select table_name, column_name, ordinal_position, data_type, is_nullable, column_default "
        "from information_schema.columns where table_schema in ('headwater', 'headwater_internal') order by 1, 3",
        "constraints": "select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint "
        "where connamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace) order by 1, 2",
        "indexes": "select tablename, indexname, indexdef from pg_indexes "
        "where schemaname in ('headwater', 'headwater_internal') order by 1, 2",
        "views": "select viewname, definition from pg_views "
        "where schemaname in ('headwater', 'headwater_internal') order by 1",
        "functions": "select oid::regprocedure::text, pg_get_functiondef(oid), proacl::text from pg_proc "
        "where pronamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace) order by 1",
        "triggers": "select tgrelid::regclass::text, pg_get_triggerdef(oid) from pg_trigger where not tgisinternal "
        "order by 1, 2",
        "relations": "select relname, relkind, relpersistence, relacl::text, reloptions from pg_class "
        "where relnamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace) order by 1",
        "migrations": "select number, name, checksum, oldest_program from headwater_internal.migration order by 1",
        "installed": "select version, functions_checksum from headwater_internal.installed",
        "settings": "select * from headwater_internal.setting",
    }
    with psycopg.connect(dsn) as connection:
        found = {name: connection.execute(query.encode()).fetchall() for name, query in queries.items()}
    return {
        name: [row for row in rows if not re.match(r"(headwater_internal\.)?event_\d", str(row[0]))]
        for name, rows in found.items()
    }


def test_an_upgrade_runs_each_step_once(empty_dsn: str) -> None:
    assert upgrade(empty_dsn) == [step.number for step in schema.migrations()]
    first = fingerprint(empty_dsn)
    with headwater.connect(empty_dsn) as log:
        log.create_topic("kept")
        log.publish("kept", 1)
    assert upgrade(empty_dsn) == []
    assert fingerprint(empty_dsn) == first
    with headwater.connect(empty_dsn) as log:
        assert [event.data for event in log.read("kept")] == [1]


def test_upgrades_at_the_same_time_are_one(empty_dsn: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        ran = list(pool.map(upgrade, [empty_dsn] * 6))
    assert sorted(map(len, ran)) == [0, 0, 0, 0, 0, len(schema.migrations())]
    with headwater.connect(empty_dsn) as log:
        log.create_topic("t")


def test_an_upgrade_under_load_loses_and_delays_nothing(installed_dsn: str) -> None:
    with headwater.connect(installed_dsn) as log, ThreadPoolExecutor(2) as pool:
        topic = log.create_topic("busy").name

        def publish() -> None:
            for n in range(300):
                log.publish(topic, n)

        publishing = pool.submit(publish)
        while not publishing.done():
            upgrade(installed_dsn)
        publishing.result(timeout=PATIENCE_SECONDS)
        assert [event.data for event in log.follow(topic, stop_when_caught_up=True)] == list(range(300))


def test_a_failed_upgrade_changes_nothing(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [*schema.migrations(), Migration(9999, "broken", "create table headwater.x (); select 1 / 0;", 9999)]
    with monkeypatch.context() as patch:
        patch.setattr(schema, "migrations", lambda: broken)
        with pytest.raises(psycopg.errors.DivisionByZero):
            upgrade(empty_dsn)
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("select to_regnamespace('headwater')").fetchone() == (None,)
    assert upgrade(empty_dsn) == [step.number for step in schema.migrations()]


@pytest.mark.parametrize("by", ["psql", "psycopg"])
def test_the_printed_script_makes_the_same_database(
    empty_dsn: str, make_database: Callable[..., str], tmp_path: Path, by: str
) -> None:
    upgrade(empty_dsn)
    printed = make_database()
    if by == "psql":
        try:
            psql = find_binaries().program("psql")
        except EmbeddedError:
            pytest.skip("no Postgres programs here")
        script = tmp_path / "headwater.sql"
        script.write_text(schema.script())
        command = [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", printed, "-f", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        # Roles are the server's, so an earlier installation may have granted some already.
        assert (done.returncode, [line for line in done.stderr.splitlines() if "NOTICE" not in line]) == (0, [])
    else:
        execute(printed, schema.script())
    assert fingerprint(printed) == fingerprint(empty_dsn)
    assert upgrade(printed) == []
    with headwater.connect(printed) as log:
        log.create_topic("t")
        log.publish("t", 1)
        assert [event.data for event in log.read("t")] == [1]


def test_the_printed_script_goes_on_from_a_step(
    empty_dsn: str, make_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(empty_dsn)
    before = fingerprint(empty_dsn)
    execute(empty_dsn, schema.script(after=schema.migrations()[-1].number))
    assert fingerprint(empty_dsn) == before


@pytest.fixture
def owner(admin_dsn: str) -> Iterator[str]:
    """A role that owns its database and may do nothing beyond it."""
    name = f"owner_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("create role {} login nosuperuser nocreaterole nocreatedb password 'secret'").format(
                sql.Identifier(name)
            )
        )
        yield name
        connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(name)))
        connection.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def hide_roles(admin_dsn: str) -> Iterator[Callable[[], None]]:
    """Makes our roles disappear from the server until the test ends."""
    if os.environ.get("HEADWATER_DSN"):
        pytest.skip("roles are not taken away from a server that others use")
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        hidden: list[str] = []

        def hide() -> None:
            for role in ROLES:
                connection.execute(f"alter role {role} rename to hidden_{role}".encode())
                hidden.append(role)

        yield hide
        for role in hidden:
            connection.execute(f"alter role hidden_{role} rename to {role}".encode())


@pytest.mark.parametrize("roles", ["there", "missing"])
def test_an_owner_without_further_rights_installs_and_uses_it(
    owner: str,
    make_database: Callable[..., str],
    template: str,
    request: pytest.FixtureRequest,
    roles: str,
) -> None:
    dsn = conninfo.make_conninfo(make_database(owner=owner), user=owner, password="secret")
    if roles == "missing":
        request.getfixturevalue("hide_roles")()
    assert upgrade(dsn) == [step.number for step in schema.migrations()]
    assert upgrade(dsn) == []
    with headwater.connect(dsn) as log:
        topic = log.create_topic("t", kind="sequenced", partitions=2).name
        log.publish(topic, 1, event_id="one")
        assert [event.data for event in log.follow(topic, cursor="c", stop_when_caught_up=True)] == [1]
        execute(dsn, "update headwater_internal.segment set opened_at = opened_at - interval '2 days'")
        assert not log.maintain().busy
        log.publish(topic, 2)
        assert len(list(log.follow(topic, stop_when_caught_up=True))) == 2
        with log.transaction() as connection:
            log.publish(topic, 3, connection=connection)
            assert len(log.publishers_in_flight()) == 1


def test_a_database_without_the_schema_names_the_command(empty_dsn: str) -> None:
    with pytest.raises(headwater.SchemaMismatch, match="headwater migrate"):
        headwater.connect(empty_dsn)


def test_an_older_schema_names_the_command(installed_dsn: str) -> None:
    execute(installed_dsn, "update headwater_internal.installed set version = '0.0.9'")
    with pytest.raises(headwater.SchemaMismatch, match="headwater migrate"):
        headwater.connect(installed_dsn)
    upgrade(installed_dsn)
    headwater.connect(installed_dsn).close()
    execute(
        installed_dsn,
        "delete from headwater_internal.migration where number = (select max(number) from "
        "headwater_internal.migration)",
    )
    with pytest.raises(headwater.SchemaMismatch, match="headwater migrate"):
        headwater.connect(installed_dsn)


def test_functions_of_another_build_of_the_same_version_are_noticed(installed_dsn: str) -> None:
    execute(installed_dsn, "update headwater_internal.installed set functions_checksum = 'other'")
    with pytest.raises(headwater.SchemaMismatch, match="headwater migrate"):
        headwater.connect(installed_dsn)
    upgrade(installed_dsn)
    headwater.connect(installed_dsn).close()


def test_an_edited_step_is_refused(installed_dsn: str) -> None:
    before = fingerprint(installed_dsn)
    execute(installed_dsn, "update headwater_internal.migration set checksum = 'other' where number = 1")
    with pytest.raises(headwater.SchemaMismatch, match=r"0001.*another form"):
        upgrade(installed_dsn)
    assert fingerprint(installed_dsn)["functions"] == before["functions"]


def test_a_newer_database_is_refused_with_the_command(installed_dsn: str) -> None:
    execute(
        installed_dsn,
        "insert into headwater_internal.migration (number, name, checksum, oldest_program) values (9000, 'new', "
        "'x', 9000)",
    )
    for act in (lambda: upgrade(installed_dsn), lambda: headwater.connect(installed_dsn)):
        with pytest.raises(headwater.SchemaMismatch, match="pip install --upgrade headwater"):
            act()


def test_a_newer_database_that_still_fits_is_used_but_not_upgraded(installed_dsn: str) -> None:
    execute(
        installed_dsn,
        "insert into headwater_internal.migration (number, name, checksum, oldest_program) values (9000, 'new', "
        "'x', 1)",
    )
    execute(installed_dsn, "update headwater_internal.installed set version = '99.0.0', functions_checksum = 'newer'")
    headwater.connect(installed_dsn).close()
    with pytest.raises(headwater.SchemaMismatch, match="pip install --upgrade headwater"):
        upgrade(installed_dsn)


def test_an_older_program_does_not_replace_newer_functions(installed_dsn: str) -> None:
    execute(installed_dsn, "update headwater_internal.installed set version = '99.0.0', functions_checksum = 'newer'")
    with pytest.raises(headwater.SchemaMismatch, match="pip install --upgrade headwater"):
        upgrade(installed_dsn)


@pytest.mark.parametrize(
    ("installed", "fits"),
    [
        (None, False),
        (Installed(1, 1, "0.0.1", "x"), False),
        (Installed(9000, 1, "99.0.0", "x"), True),
        (Installed(9000, 9000, "99.0.0", "x"), False),
    ],
)
def test_what_fits_is_decided_by_what_the_database_says(installed: Installed | None, fits: bool) -> None:
    if fits:
        schema.refuse_misfit(installed)
    else:
        with pytest.raises(headwater.SchemaMismatch, match=r"headwater migrate|pip install"):
            schema.refuse_misfit(installed)


def test_a_step_says_which_programs_still_work_after_it() -> None:
    for step in schema.migrations():
        assert 1 <= step.oldest_program <= step.number
    assert [step.number for step in schema.migrations()] == list(range(1, len(schema.migrations()) + 1))


def test_no_server_is_an_error_that_says_what_to_check() -> None:
    with pytest.raises(headwater.LogUnavailable, match="HEADWATER_DSN"):
        headwater.connect("host=/nonexistent dbname=none", connect_timeout_seconds=0.2)
