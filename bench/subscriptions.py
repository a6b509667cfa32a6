"""Matching of SQL subscriptions, compared with the method of PGMB: milliseconds per chunk of 500 events.

Each event matches one subscription. Both sides run alternately on one server with the same settings, and autovacuum is
off for their tables. Milliseconds are medians over the rounds; a ratio is the median of the ratios of the rounds.
Headwater runs `read_next` and `commit_reading`, as a subscriber does. The functions of PGMB were written for this
benchmark from its documentation: a trigger records unread events, `poll` joins them with the subscriptions of all
filters in one statement and writes a row for each match, `read_next_events` reads these rows.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

import headwater
from bench import _measure as measure
from bench._measure import Server

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("worst_vs_pgmb", "growth_10000_vs_100", "match_10000_events_4000x4_vs_pgmb", "all_match_100_rate_vs_pgmb")

TOPIC = "bench"
CHUNK = 500
QUEUE = "readers"
PAYLOAD_BYTES = 200
# Postgres plans a statement five times before it uses a generic plan: these rounds are not counted.
WARM_UP_ROUNDS = 6
MOST_MATCHES = 1_000_000

PGMB = """
create schema other;
create sequence other.event_number;
create function other.event_id() returns text language sql volatile
return 'pm' || lpad(to_hex(nextval('other.event_number')), 22, '0');
create table other.events (
    id text primary key default other.event_id(), topic text not null, payload jsonb not null,
    metadata jsonb, subscription_id bigint
);
create unlogged table other.unread_events (event_id text primary key);
create function other.note_unread() returns trigger language plpgsql as $$
begin
    insert into other.unread_events select n.id from inserted n;
    return null;
end;
$$;
create trigger note_unread after insert on other.events referencing new table as inserted
    for each statement execute function other.note_unread();
create table other.subscriptions (
    id bigint generated always as identity primary key, queue_id text not null, filters_sql text not null,
    params jsonb not null, identity bigint not null unique
) with (autovacuum_enabled = off);
create index on other.subscriptions using gin (params) with (fastupdate = off);
create index on other.subscriptions (queue_id);
create table other.subscription_events (
    id text primary key, queue_id text not null, event_id text not null, subscription_id bigint not null
) with (autovacuum_enabled = off);
create index on other.subscription_events (queue_id, id);
create table other.queues (id text primary key, cursor text not null);
create function other.read_next_events(gid text, after text, chunk integer)
returns table (id text, topic text, payload jsonb, metadata jsonb, subscription_ids bigint[], next_cursor text)
language plpgsql as $$
begin
    if not pg_try_advisory_lock(hashtext('read_next_events.' || gid)) then
        return;
    end if;
    return query
    with found as materialized (
        select r.id, r.event_id, r.subscription_id from other.subscription_events r
        where r.queue_id = gid and r.id > coalesce(after, (select g.cursor from other.queues g where g.id = gid))
        limit chunk
    ), grouped as (
        select f.event_id, array_agg(f.subscription_id) as ids, max(f.id) as last from found f group by f.event_id
    )
    select e.id, e.topic, e.payload, e.metadata, g.ids, max(g.last) over ()
    from grouped g join other.events e on e.id = g.event_id;
end;
$$;
"""

POLL = """
create or replace function other.poll(chunk integer) returns integer language plpgsql
set enable_seqscan = off set jit = off
as $poll$
declare
    moved integer;
begin
    if not pg_try_advisory_xact_lock(hashtext('other.poll')) then
        return 0;
    end if;
    with unread as materialized (
        delete from other.unread_events u
        where u.event_id in (
            select n.event_id from other.unread_events n
            where n.event_id < 'pmz' order by n.event_id limit chunk for update skip locked
        )
        returning u.event_id
    )
    insert into other.subscription_events (id, queue_id, event_id, subscription_id)
    select other.event_id(), s.queue_id, e.id, s.id
    from unread u
    join other.events e on e.id = u.event_id
    join other.subscriptions s on {filters};
    get diagnostics moved = row_count;
    return moved;
end;
$poll$;
"""


@dataclass(frozen=True)
class Cell:
    """Subscriptions, distributed over filters; events match each of them in turn. With `own_keys` each filter reads
    another key of params. If there are more filters than subscriptions, each other filter has one subscription that
    no event matches.
    """

    subscriptions: int
    filters: int
    own_keys: bool = False

    @property
    def name(self) -> str:
        return f"{self.subscriptions} x {self.filters}{', own keys' if self.own_keys else ''}"

    def key(self, number: int) -> str:
        return f"user{number}" if self.own_keys else "user"

    def filter(self, number: int, data: str, type_column: str) -> str:
        return (
            f"s.params @> jsonb_build_object('{self.key(number)}', e.{data} ->> 'user') "
            f"and {type_column} is distinct from 'never {number}'"
        )


@dataclass(frozen=True)
class Times:
    """Milliseconds of both sides in each round."""

    headwater: list[float]
    pgmb: list[float]

    @property
    def headwater_ms(self) -> float:
        return statistics.median(self.headwater)

    @property
    def pgmb_ms(self) -> float:
        return statistics.median(self.pgmb)

    @property
    def ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.headwater, self.pgmb, strict=True))


class Ours:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.log = headwater.connect(server.dsn, pool_size=1)
        self.log.create_topic(TOPIC)
        server.execute("alter table headwater_internal.subscription set (autovacuum_enabled = off)")

    def prepare(self, filters: list[str], params: str, count: int) -> None:
        """Create subscriptions; number i has filter n = i % filters, and params from an SQL expression over i and n."""
        self.server.execute("truncate headwater_internal.subscription cascade")
        self.server.execute("delete from headwater_internal.queue where name = %s", (QUEUE,))
        for text in filters:
            self.log.subscribe(QUEUE, text, {"none": True}, topics=TOPIC)
        self.server.execute("delete from headwater_internal.subscription")
        self.server.execute(
            "insert into headwater_internal.subscription (queue_id, filter_id, params, params_hash, from_position) "
            f"select g.id, c.id, p.params, sha256(p.params::text::bytea), 0 "
            "from generate_series(0, %s - 1) as i "
            "cross join lateral (select i %% %s as n) as f "
            f"cross join lateral (select {params} as params) as p "
            "join headwater_internal.filter c on c.expression = (%s::text[])[f.n + 1] "
            "join headwater_internal.queue g on g.name = %s",
            (count, len(filters), filters, QUEUE),
        )

    def publish(self, payloads: list[str]) -> None:
        self.log.publish_batch(TOPIC, [headwater.NewEvent(p.encode()) for p in payloads])

    def read(self, chunk: int) -> list[tuple[int, ...]]:
        reading = self.log.read_next(QUEUE, reader="bench", batch_size=chunk, timeout_seconds=600)
        self.log.commit_reading(QUEUE, reading.next_position, reader="bench")
        return [one.subscription_ids for one in reading.events]


class Pgmb:
    def __init__(self, server: Server) -> None:
        self.server = server
        server.execute(PGMB)
        self.connection = psycopg.connect(server.dsn, autocommit=True)
        self.cursor = ""

    def prepare(self, filters: list[str], params: str, count: int) -> None:
        self.server.execute(
            "truncate other.subscriptions, other.subscription_events, other.queues, other.events, other.unread_events"
        )
        literal = [f"({text}) and s.filters_sql = {_quoted(text)}" for text in filters]
        self.server.execute(POLL.replace("{filters}", "\n or ".join(f"({one})" for one in literal)).encode())
        self.server.execute(
            "insert into other.subscriptions (queue_id, filters_sql, params, identity) "
            f"select %s, (%s::text[])[f.n + 1], p.params, i from generate_series(0, %s - 1) as i "
            "cross join lateral (select i %% %s as n) as f "
            f"cross join lateral (select {params} as params) as p",
            (QUEUE, filters, count, len(filters)),
        )
        self.cursor = ""
        self.server.execute("insert into other.queues values (%s, '')", (QUEUE,))

    def publish(self, payloads: list[str]) -> None:
        self.server.execute(
            "insert into other.events (topic, payload) select %s, p::jsonb from unnest(%s::text[]) as p",
            (TOPIC, payloads),
        )

    def read(self, chunk: int) -> list[tuple[int, ...]]:
        self.connection.execute("select other.poll(%s)", (chunk,), prepare=True)
        # All matches at once: a limit could separate the matches of one event.
        rows = self.connection.execute(
            "select * from other.read_next_events(%s, %s, %s)", (QUEUE, self.cursor, MOST_MATCHES), prepare=True
        ).fetchall()
        if rows:
            self.cursor = rows[0][5]
            self.connection.execute(
                "update other.queues set cursor = %s where id = %s", (self.cursor, QUEUE), prepare=True
            )
        return [tuple(row[4]) for row in rows]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def payloads(count: int, subscriptions: int, start: int) -> list[str]:
    rest = "x" * PAYLOAD_BYTES
    return [json.dumps({"user": str((start + 7919 * i) % subscriptions), "rest": rest}) for i in range(count)]


def measured(ours: Ours, pgmb: Pgmb, cell: Cell, *, rounds: int, events: int = CHUNK, chunk: int = CHUNK) -> Times:
    """Measure both sides with `events` events, in interleaved rounds."""
    params = "jsonb_build_object('user' || f.n, i::text)" if cell.own_keys else "jsonb_build_object('user', i::text)"
    count = max(cell.subscriptions, cell.filters)
    ours.prepare([cell.filter(n, "data", "e.type") for n in range(cell.filters)], params, count)
    pgmb.prepare([cell.filter(n, "payload", "e.topic") for n in range(cell.filters)], params, count)
    return compared(
        ours,
        pgmb,
        lambda number: payloads(events, cell.subscriptions, number * events),
        rounds=rounds,
        chunk=chunk,
        expected=1,
    )


def compared(
    ours: Ours, pgmb: Pgmb, make: Callable[[int], list[str]], *, rounds: int, chunk: int, expected: int
) -> Times:
    # A round with many matches takes seconds; the time for planning is negligible.
    warm_up = min(WARM_UP_ROUNDS, rounds)
    times = Times([], [])
    order: list[tuple[Ours | Pgmb, list[float]]] = [(ours, times.headwater), (pgmb, times.pgmb)]
    for number in range(warm_up + rounds):
        for side, noted in order:
            events = make(number)
            side.publish(events)
            found: list[tuple[int, ...]] = []
            began = time.perf_counter()
            while len(found) < len(events):
                got = side.read(chunk)
                if not got:
                    break
                found += got
            elapsed = (time.perf_counter() - began) * 1000
            if len(found) != len(events) or any(len(ids) != expected for ids in found):
                raise RuntimeError(f"{type(side).__name__}: {len(found)} of {len(events)} events matched")
            if number >= warm_up:
                noted.append(elapsed)
        order.reverse()
    return times


def main() -> None:
    options = measure.arguments(__doc__ or "")
    rounds, large_rounds, match_rounds = options.sized((21, 3, 9), (7, 1, 3), (1, 1, 1))
    shown = [Cell(1000, 1), Cell(10_000, 1), Cell(10_000, 100)]
    shown += options.sized([Cell(100_000, 1)], [Cell(100_000, 1)], [])
    cells = options.sized(
        [
            *(Cell(count, filters) for count in (1, 100, 1000, 10_000, 100_000) for filters in (1, 10, 100)),
            *(Cell(10_000, filters, own_keys=True) for filters in (10, 100)),
        ],
        [Cell(1, 1), Cell(100, 1), Cell(100, 100), *shown],
        [Cell(100, 1), *shown],
    )
    with measure.measured_server(options.dsn) as server:
        ours, pgmb = Ours(server), Pgmb(server)
        found: dict[str, Times] = {}
        for cell in cells:
            measure.say(cell.name)
            found[cell.name] = measured(ours, pgmb, cell, rounds=rounds)
        measure.say("10,000 events, 4,000 subscriptions, 4 filters")
        large = measured(ours, pgmb, Cell(4000, 4), rounds=large_rounds, events=10_000, chunk=10_000)
        measure.say("100 subscriptions that match every event")
        every = "e.topic = 'bench' and s.params ->> 'n' is not null"
        for side in (ours, pgmb):
            side.prepare([every], "jsonb_build_object('n', i)", 100)
        all_match = compared(
            ours,
            pgmb,
            lambda number: payloads(CHUNK, 1, 0),
            rounds=match_rounds,
            chunk=CHUNK,
            expected=100,
        )
        rows = [
            (
                name,
                measure.number(times.headwater_ms, 1),
                measure.number(times.pgmb_ms, 1),
                measure.number(times.ratio, 2),
            )
            for name, times in {**found, "4000 x 4, 10,000 events": large, "100 x 1, all match": all_match}.items()
        ]
        measure.table(
            "ms to match and read 500 events, each matches one subscription", ("", "headwater", "pgmb", "ratio"), rows
        )
        measure.finish(
            server,
            options,
            "subscriptions",
            {
                **{f"match_{c.subscriptions}x{c.filters}": round(found[c.name].headwater_ms, 1) for c in shown},
                "growth_10000_vs_100": round(
                    found[Cell(10_000, 1).name].headwater_ms / found[Cell(100, 1).name].headwater_ms, 2
                ),
                "worst_vs_pgmb": round(max(times.ratio for times in found.values()), 2),
                "match_10000_events_4000x4_ms": round(large.headwater_ms),
                "match_10000_events_4000x4_vs_pgmb": round(large.ratio, 2),
                "all_match_100_events_per_second": round(CHUNK / all_match.headwater_ms * 1000),
                "all_match_100_rate_vs_pgmb": round(1 / all_match.ratio, 2),
                "load_1_minute": round(os.getloadavg()[0], 1),
            },
        )


if __name__ == "__main__":
    main()
