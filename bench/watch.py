"""Watched tables: the cost of publishing the rows of one statement, compared with the statement trigger of PGMB."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import psycopg

from bench import _measure as measure
from bench._measure import Server

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("insert_vs_pgmb", "update_vs_pgmb", "delete_vs_pgmb", "single_insert_vs_pgmb")

ROWS = 10_000
SINGLE_ROWS = 100
COLUMNS = "id bigint primary key, name text, tier text, cents integer, tags jsonb, seen_at timestamptz"
STATEMENTS = {
    "insert": "insert into {table} select i, 'customer ' || i, 'gold', i, '{{\"a\": [1, 2]}}', now() "
    "from generate_series(1, {rows}) as i",
    "update": "update {table} set tier = 'silver', cents = cents + 1",
    "delete": "delete from {table}",
}
SINGLE = "insert into {table} values (%s, 'customer', 'gold', 1, '{{\"a\": [1, 2]}}', now())"
TABLES = ("bare", "ours", "pgmb")

# The trigger of PGMB, written for this benchmark from its documentation: an event for each row with topic
# <schema>.<table>.<op>; for an update, the changed columns and the whole old row in the metadata; ids sorted by time;
# and the id of each event in a table of unread events.
OTHER = """
create schema other;
create table other.events (
    id text collate "C" not null,
    topic varchar(255) not null,
    payload jsonb not null,
    metadata jsonb,
    subscription_id text,
    primary key (id)
) partition by range (id);
create table other.events_now partition of other.events default with (autovacuum_enabled = false);
create unlogged table other.unread_events (event_id text collate "C" primary key);

create function other.event_id(at timestamptz, number bigint) returns text
language sql immutable strict parallel safe
return 'pm' || lpad(to_hex((extract(epoch from at) * 1000000)::bigint), 13, '0') || lpad(to_hex(number), 9, '0');

create function other.mark_unread() returns trigger language plpgsql as $$
begin
    insert into other.unread_events (event_id) select e.id from inserted e;
    return null;
end;
$$;
create trigger mark_unread after insert on other.events
    referencing new table as inserted for each statement execute function other.mark_unread();

create function other.serialise(relation oid, op text, record jsonb, out serialised jsonb, out emit boolean)
language plpgsql immutable as $$
begin
    serialised := record;
    emit := true;
end;
$$;

create function other.difference(old jsonb, new jsonb) returns jsonb
language sql immutable strict parallel safe
return (select jsonb_object_agg(n.key, n.value) from jsonb_each(new) as n where n.value is distinct from old -> n.key);

create function other.push_table_event() returns trigger language plpgsql as $$
declare
    topic constant text := lower(tg_table_schema || '.' || tg_table_name || '.' || tg_op);
    started constant timestamptz := clock_timestamp();
    first constant bigint := (random() * 4294967295)::bigint;
begin
    if tg_op = 'INSERT' then
        insert into other.events (id, topic, payload)
        select other.event_id(started, first + row_number() over ()), topic, s.serialised
        from new_rows n cross join lateral other.serialise(tg_relid, tg_op, to_jsonb(n)) as s
        where s.emit;
    elsif tg_op = 'DELETE' then
        insert into other.events (id, topic, payload)
        select other.event_id(started, first + row_number() over ()), topic, s.serialised
        from old_rows o cross join lateral other.serialise(tg_relid, tg_op, to_jsonb(o)) as s
        where s.emit;
    else
        insert into other.events (id, topic, payload, metadata)
        select
            other.event_id(started, first + n.ordinal), topic, other.difference(so.serialised, sn.serialised),
            jsonb_build_object('old', so.serialised)
        from (select to_jsonb(r) as row, row_number() over () as ordinal from new_rows r) as n
        join (select to_jsonb(r) as row, row_number() over () as ordinal from old_rows r) as o on o.ordinal = n.ordinal
        cross join lateral other.serialise(tg_relid, tg_op, n.row) as sn
        cross join lateral other.serialise(tg_relid, tg_op, o.row) as so
        where sn.emit and so.serialised is distinct from sn.serialised;
    end if;
    return null;
end;
$$;

create trigger pushed_insert after insert on pgmb referencing new table as new_rows
    for each statement execute function other.push_table_event();
create trigger pushed_update after update on pgmb referencing old table as old_rows new table as new_rows
    for each statement execute function other.push_table_event();
create trigger pushed_delete after delete on pgmb referencing old table as old_rows
    for each statement execute function other.push_table_event();
"""

Times = dict[str, dict[str, list[float]]]
"""Seconds by operation and table for each round."""


def prepare(server: Server) -> None:
    for table in TABLES:
        server.execute(f"create table {table} ({COLUMNS})")
    server.execute(OTHER)
    server.execute("select headwater.watch_table('ours')")


def timed(connection: psycopg.Connection, statement: str) -> float:
    began = time.perf_counter()
    connection.execute(statement.encode())
    return time.perf_counter() - began


def single(connection: psycopg.Connection, table: str) -> float:
    """One row per statement and transaction."""
    statement = SINGLE.format(table=table)
    began = time.perf_counter()
    for number in range(SINGLE_ROWS):
        connection.execute(statement.encode(), (number,), prepare=True)
    return time.perf_counter() - began


def run(server: Server, *, rounds: int, rows: int) -> Times:
    times: Times = {op: {table: [] for table in TABLES} for op in (*STATEMENTS, "single")}
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for number in range(-1, rounds):
            shift = number % len(TABLES)
            order = [*TABLES[shift:], *TABLES[:shift]]
            for op, statement in STATEMENTS.items():
                for table in order:
                    seconds = timed(connection, statement.format(table=table, rows=rows))
                    if number >= 0:
                        times[op][table].append(seconds)
            for table in order:
                seconds = single(connection, table)
                connection.execute(f"truncate {table}".encode())
                if number >= 0:
                    times["single"][table].append(seconds)
            measure.say(f"round {number + 1} of {rounds}")
    return times


def versus(times: Mapping[str, list[float]]) -> float:
    """The time of Headwater relative to PGMB: the median over the rounds."""
    return statistics.median(ours / pgmb for ours, pgmb in zip(times["ours"], times["pgmb"], strict=True))


def main() -> None:
    options = measure.arguments(__doc__ or "")
    rounds, row_count = options.sized((15, ROWS), (3, ROWS), (1, 100))
    with measure.measured_server(options.dsn) as server:
        prepare(server)
        times = run(server, rounds=rounds, rows=row_count)
        measure.table(
            f"{measure.number(row_count)} rows in one statement ({SINGLE_ROWS} statements for single), milliseconds",
            ("operation", "bare table", "watched", "PGMB's trigger", "watched / PGMB's"),
            [
                (
                    op,
                    *(measure.number(statistics.median(times[op][table]) * 1000) for table in TABLES),
                    f"{versus(times[op]):.2f}",
                )
                for op in times
            ],
        )
        result = {f"{op}_vs_pgmb": round(versus(times[op]), 3) for op in STATEMENTS}
        result["single_insert_vs_pgmb"] = round(versus(times["single"]), 3)
        for op in STATEMENTS:
            result[f"{op}_ms"] = round(statistics.median(times[op]["ours"]) * 1000, 1)
        measure.finish(server, options, "watch", result)


if __name__ == "__main__":
    main()
