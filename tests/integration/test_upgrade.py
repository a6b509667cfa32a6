"""Does an upgrade leave those alone who work meanwhile, and do they find out when they no longer fit?"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import conninfo

import headwater
from databases import database
from headwater import App, NewEvent
from headwater.calls import Call
from headwater.database import connection as database_connection
from headwater.database import schema
from headwater.database.schema import Migration
from patience import PATIENCE_SECONDS

_numbers = itertools.count()

LEFT_BEHIND = (
    "insert into headwater_internal.migration (number, name, checksum, oldest_program) values (9000, 'new', 'x', 9000)"
)
FITS_AGAIN = "delete from headwater_internal.migration where number = 9000"
NEXT_FUNCTION = "create or replace function headwater.was_there() returns integer language sql return 1;\n"


@pytest.fixture
def own_dsn(admin_dsn: str, template: str) -> Iterator[str]:
    """A log for one test alone."""
    with database(admin_dsn, template) as dsn:
        yield dsn


def upgrade(dsn: str, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        schema.upgrade(connection, patience_seconds=patience_seconds)


def has_function(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("select to_regprocedure('headwater.was_there()') is not null").fetchone()
    assert row is not None
    return bool(row[0])


@pytest.mark.parametrize("within", ["its own transaction", "a larger one"])
def test_a_function_that_a_version_gave_up_stays_until_the_next(
    own_dsn: str, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    def install(version: str, functions: str) -> None:
        monkeypatch.setattr(schema, "VERSION", version)
        monkeypatch.setattr(schema, "functions", lambda: functions)
        with psycopg.connect(own_dsn, autocommit=within == "its own transaction") as connection:
            connection.execute("select pg_current_xact_id()")
            schema.upgrade(connection)

    present = schema.functions()
    install("1.0.0", NEXT_FUNCTION + present)
    assert has_function(own_dsn)
    install("1.1.0", present)
    install("1.1.0", present)
    # Programs of 1.0.0 may still run.
    assert has_function(own_dsn)
    install("1.2.0", present)
    assert not has_function(own_dsn)
    with psycopg.connect(own_dsn) as connection:
        assert connection.execute("select * from headwater_internal.retired_function").fetchall() == []


def test_a_function_that_comes_back_is_not_dropped(own_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    present = schema.functions()
    for version, functions in (("1.0.0", NEXT_FUNCTION), ("1.1.0", ""), ("1.2.0", NEXT_FUNCTION), ("1.3.0", "")):
        monkeypatch.setattr(schema, "VERSION", version)
        monkeypatch.setattr(schema, "functions", lambda functions=functions: functions + present)
        upgrade(own_dsn)
    assert has_function(own_dsn)


def test_nothing_is_retired_where_nothing_changed(own_dsn: str) -> None:
    upgrade(own_dsn)
    with psycopg.connect(own_dsn) as connection:
        assert connection.execute("select * from headwater_internal.retired_function").fetchall() == []


def test_a_table_that_somebody_keeps_locked_stops_the_upgrade_and_nobody_else(
    own_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Migration(9000, "next", "alter table headwater_internal.event add column shade text;", 1)
    known = [*schema.migrations(), step]
    monkeypatch.setattr(schema, "migrations", lambda: known)
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0.1)
    with psycopg.connect(own_dsn) as reader:
        reader.execute("select count(*) from headwater_internal.event")
        with pytest.raises(headwater.LogUnavailable, match=r"(?s)was locked.*Nothing was changed"):
            upgrade(own_dsn, patience_seconds=0.5)
        with psycopg.connect(own_dsn) as other:
            other.execute(f"set lock_timeout = '{PATIENCE_SECONDS}s'")
            other.execute("select headwater.create_topic('t')")
            other.execute("select headwater.publish('t', '1')")
        reader.rollback()
    upgrade(own_dsn)
    with psycopg.connect(own_dsn) as connection:
        assert connection.execute("select shade from headwater_internal.event").fetchall() == [(None,)]


def test_a_program_that_runs_finds_out_that_it_was_left_behind(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.publish(topic, 1)
    connection.execute(LEFT_BEHIND)
    try:
        # Not at every call: it looks now and then.
        log.publish(topic, 2)
        monkeypatch.setattr(log.shared, "look_at", 0.0)
        for _ in range(2):
            with pytest.raises(headwater.SchemaMismatch, match="pip install --upgrade headwater"):
                log.publish(topic, 3)
        with pytest.raises(headwater.SchemaMismatch), log.transaction() as own:
            log.publish(topic, 4, connection=own)
    finally:
        connection.execute(FITS_AGAIN)
    log.publish(topic, 5)
    assert [event.data for event in log.read(topic)] == [1, 2, 5]


def test_other_functions_under_a_program_that_runs_do_not_end_it(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.execute(
        "update headwater_internal.installed set version = '99.0.0', functions_checksum = 'x' || functions_checksum"
    )
    try:
        monkeypatch.setattr(log.shared, "look_at", 0.0)
        assert log.publish(topic, 1)
    finally:
        connection.execute(
            "update headwater_internal.installed set version = %s, functions_checksum = substr(functions_checksum, 2)",
            (schema.VERSION,),
        )


def test_workers_that_were_left_behind_end_and_leave_their_events_to_others(
    log: headwater.Headwater, dsn: str, connection: psycopg.Connection, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.publish_many(topic, (NewEvent(n) for n in range(200)))
    seen: set[int] = set()
    upgraded = False
    app = App()

    @app.worker(topic, queue=topic, lease_seconds=0.5)
    async def handle(event: headwater.ClaimedEvent) -> None:
        nonlocal upgraded
        if event.data == 3 and not upgraded:
            upgraded = True
            await asyncio.to_thread(connection.execute, LEFT_BEHIND)
        seen.add(event.data)
        if len(seen) == 200:
            finished.set()

    finished: asyncio.Event

    async def run() -> None:
        nonlocal finished
        finished = asyncio.Event()
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                with pytest.raises(ExceptionGroup) as ended:
                    await app.run(dsn, stop=asyncio.Event())
            finally:
                connection.execute(FITS_AGAIN)
            assert ended.value.subgroup(headwater.SchemaMismatch) is not None
            assert len(seen) < 200
            await app.run(dsn, stop=finished)

    monkeypatch.setattr(database_connection, "LOOK_SECONDS", 0.0)
    asyncio.run(run())
    assert seen == set(range(200))


def test_a_call_that_is_aborted_to_untangle_it_is_made_again(dsn: str, connection: psycopg.Connection) -> None:
    connection.execute(
        "create sequence calls; create function entangled() returns bigint language plpgsql as $$ begin "
        "perform nextval('calls'), pg_advisory_xact_lock(1); perform pg_advisory_xact_lock(2); "
        "return currval('calls'); end $$"
    )
    call: Call[int] = Call("select entangled()", (), lambda rows: rows[0][0])
    # The one that looks for deadlocks first is the one that is aborted.
    quick = conninfo.make_conninfo(dsn, options="-c deadlock_timeout=20ms")
    slow = conninfo.make_conninfo(dsn, options=f"-c deadlock_timeout={PATIENCE_SECONDS}s")
    with headwater.connect(quick) as log, psycopg.connect(slow) as other, ThreadPoolExecutor(1) as pool:
        other.execute("select pg_advisory_xact_lock(2)")
        running = pool.submit(log._run, call)
        other.execute(f"set statement_timeout = '{PATIENCE_SECONDS}s'")
        while not connection.execute("select 1 from pg_locks where locktype = 'advisory' and not granted").fetchone():
            assert not running.done()
        other.execute("select pg_advisory_xact_lock(1)")
        other.commit()
        assert running.result(timeout=PATIENCE_SECONDS) == 2
