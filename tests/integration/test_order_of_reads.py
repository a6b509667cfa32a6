"""Does a reader look at the sequence before it looks at the publishers' locks? It is stopped between the two.

Whoever looks at the locks first misses a publisher that begins in between, and takes its position for stable. The
window is microseconds; here it is held open: in the reader's session another `pg_sequence_last_value` comes first,
which waits for an advisory lock before it reads the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import headwater
from patience import PATIENCE_SECONDS

GATE = 4242
SEQUENCE_READ = "    head := coalesce(pg_sequence_last_value('headwater_internal.position'), 0);\n"
AFTER_LOCKS = "    log_stable := least(head, lowest_bound);\n"
MAKE_GATE = f"""
create schema gate;
create function gate.pg_sequence_last_value(sequence regclass) returns bigint language plpgsql volatile as $$
begin
    if sequence = 'headwater_internal.position'::regclass then
        perform pg_advisory_lock({GATE});
        perform pg_advisory_unlock({GATE});
    end if;
    return pg_catalog.pg_sequence_last_value(sequence);
end;
$$;
"""
Until = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def gate(connection: psycopg.Connection) -> Iterator[None]:
    connection.execute(MAKE_GATE)
    yield
    connection.execute("drop schema gate cascade")


def stable_position_with_a_publisher_in_between(
    dsn: str, log: headwater.Headwater, topic: str, until: Until
) -> tuple[int, int]:
    """The stable position that a reader got, and the position of a publisher that began while it was in the middle."""

    def read() -> int:
        with psycopg.connect(dsn, autocommit=True) as reader:
            reader.execute(f"set search_path = gate, pg_catalog; set statement_timeout = '{PATIENCE_SECONDS}s'")
            row = reader.execute("select headwater.stable_position(array[%s])", (topic,)).fetchone()
            assert row is not None
            return int(row[0])

    with psycopg.connect(dsn, autocommit=True) as keeper, ThreadPoolExecutor(1) as pool:
        keeper.execute("select pg_advisory_lock(%s)", (GATE,))
        reading = pool.submit(read)
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and objid = %s and not granted"
        try:
            until(lambda: keeper.execute(waiting, (GATE,)).fetchone() == (1,))
            with log.transaction() as publisher:
                position = log.publish(topic, {}, connection=publisher)
                keeper.execute("select pg_advisory_unlock(%s)", (GATE,))
                return reading.result(PATIENCE_SECONDS), position
        finally:
            # The reader must not wait for ever if the test fails.
            keeper.execute("select pg_advisory_unlock_all()")


def test_a_publisher_that_begins_while_a_reader_looks_is_not_passed_over(
    dsn: str, log: headwater.Headwater, topic: str, until: Until, gate: None
) -> None:
    stable, position = stable_position_with_a_publisher_in_between(dsn, log, topic, until)
    assert stable < position


def test_a_build_that_looks_at_the_locks_first_is_found_out(
    dsn: str, log: headwater.Headwater, topic: str, until: Until, gate: None, connection: psycopg.Connection
) -> None:
    row = connection.execute(
        "select pg_get_functiondef(oid) from pg_proc where proname = 'stable_positions' "
        "and pronamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace)"
    ).fetchone()
    assert row is not None
    right: str = row[0]
    assert right.count(SEQUENCE_READ) == right.count(AFTER_LOCKS) == 1
    connection.execute(right.replace(SEQUENCE_READ, "").replace(AFTER_LOCKS, SEQUENCE_READ + AFTER_LOCKS))
    try:
        stable, position = stable_position_with_a_publisher_in_between(dsn, log, topic, until)
    finally:
        connection.execute(right)
    assert stable >= position
