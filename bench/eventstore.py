"""Conditional appends, compared with the Postgres recorder of the eventsourcing library and with UmaDB.

Every store is used from one client process by a number of concurrent writers; each waits for the result before its next
append. Several Headwater writers are tasks of an event loop, a single one is a plain loop; `threads` is the same work
with threads. The others have no asynchronous client: their writers are threads. The recorder of eventsourcing is its
fastest one for Postgres; it has none for SQLite.

New context: the append condition uses a tag that no event has. Existing: each writer has its own tag and knows its
last position. Contended: all writers share one tag, and read again after a conflict. Large: the store contains a
million events.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from psycopg import conninfo

import headwater
from bench import _measure as measure
from bench._measure import Act, ClientProcesses, Server, Variant
from headwater import aio
from headwater.client.eventstore.postgres import EventStore
from headwater.embedded.temporary import temporary_directory
from headwater.errors import AppendConflict
from headwater.eventstore import NewStoreEvent, NoMatchAfter, Query, SqliteEventStore, SqliteStores

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("append16_vs_eventsourcing", "append16_vs_umadb", "append1_vs_eventsourcing", "cost_1m_vs_empty")

ACT_SECONDS = 0.2
APPEND_EVENTS = 1000
FILL_EVENTS = 50_000
DATA = b"x" * 200
STORE = "bench"
LARGE = "bench-large"
UMADB_SECONDS = 30.0

Append = Callable[[str, int, int | None], int | None]
"""Append events with a tag unless the tag has events after a position; returns None on a conflict."""
Latest = Callable[[str], int]
AsyncAppend = Callable[[str, int, int | None], Awaitable[int | None]]
AsyncLatest = Callable[[str], Awaitable[int]]


# --- the stores --------------------------------------------------------------------------------------------------


def ours(store: EventStore | SqliteEventStore) -> tuple[Append, Latest]:
    def append(tag: str, events: int, after: int | None) -> int | None:
        new = [NewStoreEvent("Happened", DATA, [tag, "all"]) for _ in range(events)]
        try:
            return store.append(new, NoMatchAfter(Query.of(tags=[tag]), after or 0)).position
        except AppendConflict:
            return None

    return append, lambda tag: store.latest(Query.of(tags=[tag])).position


@cache
def by_tasks(dsn: str, target: str | None) -> tuple[asyncio.AbstractEventLoop, AsyncAppend, AsyncLatest]:
    loop = asyncio.new_event_loop()
    log = loop.run_until_complete(aio.connect(dsn, pool_size=4))
    store = log.store(target or STORE)
    # Client processes exit without running atexit handlers.
    Finalize(None, lambda: loop.run_until_complete(log.close()), exitpriority=1)

    async def append(tag: str, events: int, after: int | None) -> int | None:
        new = [NewStoreEvent("Happened", DATA, [tag, "all"]) for _ in range(events)]
        try:
            return (await store.append(new, NoMatchAfter(Query.of(tags=[tag]), after or 0))).position
        except AppendConflict:
            return None

    async def latest(tag: str) -> int:
        return (await store.latest(Query.of(tags=[tag]))).position

    return loop, append, latest


@cache
def on_postgres(dsn: str, target: str | None) -> tuple[Append, Latest]:
    return ours(headwater.connect(dsn, pool_size=4).store(target or STORE))


@cache
def on_sqlite(dsn: str, target: str | None) -> tuple[Append, Latest]:
    return ours(SqliteStores(Path(target or "")).create_store(STORE, if_missing=True))


@cache
def by_eventsourcing(dsn: str, target: str | None) -> tuple[Append, Latest]:
    from eventsourcing.dcb.api import DCBAppendCondition, DCBEvent, DCBQuery, DCBQueryItem
    from eventsourcing.dcb.postgres_tt import PostgresDCBRecorderTT
    from eventsourcing.persistence import IntegrityError
    from eventsourcing.postgres import PostgresDatastore

    parts = {name: str(value) for name, value in conninfo.conninfo_to_dict(dsn).items()}
    recorder = PostgresDCBRecorderTT(
        PostgresDatastore(
            dbname=parts["dbname"],
            host=parts["host"],
            port=parts["port"],
            user=parts["user"],
            password=parts.get("password", ""),
            pool_size=16,
            max_overflow=64,
        )
    )
    recorder.create_table()

    def append(tag: str, events: int, after: int | None) -> int | None:
        new = [DCBEvent("Happened", DATA, [tag, "all"]) for _ in range(events)]
        try:
            return recorder.append(new, DCBAppendCondition(DCBQuery([DCBQueryItem(tags=[tag])]), after))
        except IntegrityError:
            return None

    def latest(tag: str) -> int:
        found = [event.position for event in recorder.read(DCBQuery([DCBQueryItem(tags=[tag])]))]
        return found[-1] if found else 0

    return append, latest


@cache
def by_umadb(dsn: str, target: str | None) -> tuple[Append, Latest]:
    import umadb

    client = umadb.Client(f"http://{target}")

    def append(tag: str, events: int, after: int | None) -> int | None:
        new = [umadb.Event("Happened", DATA, [tag, "all"]) for _ in range(events)]
        condition = umadb.AppendCondition(umadb.Query([umadb.QueryItem(tags=[tag])]), after)
        try:
            return int(client.append(new, condition))
        except umadb.IntegrityError:
            return None

    def latest(tag: str) -> int:
        query = umadb.Query([umadb.QueryItem(tags=[tag])])
        found = [event.position for event in client.read(query, backwards=True, limit=1)]
        return int(found[0]) if found else 0

    return append, latest


STORES: dict[str, Callable[[str, str | None], tuple[Append, Latest]]] = {
    "headwater threads": on_postgres,
    "headwater sqlite": on_sqlite,
    "eventsourcing": by_eventsourcing,
    "umadb": by_umadb,
}


# --- the work ----------------------------------------------------------------------------------------------------


class Contexts:
    """The tags of the writers and their last known positions."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._run = f"{os.getpid()}-{time.time_ns()}"
        self._numbers = itertools.count()
        self.known: dict[str, int] = {}

    def next_tag(self, writer: int) -> str:
        if self._kind == "new":
            return f"{self._run}-{next(self._numbers)}"
        return f"{self._run}-{writer if self._kind == 'existing' else 'one'}"

    def note(self, tag: str, position: int) -> None:
        if self._kind != "new":
            self.known[tag] = position


def appending(dsn: str, store: str, target: str | None, writers: int, events: int, context: str) -> Act:
    """Run writers until the time is over; returns the number of successful appends."""
    contexts = Contexts(context)
    if store == "headwater":
        if writers > 1:
            return by_loop(*by_tasks(dsn, target), contexts, writers, events)
        store = "headwater threads"
    append, latest = STORES[store](dsn, target)
    pool = ThreadPoolExecutor(writers)

    def write(writer: int) -> int:
        done = 0
        until = time.monotonic() + ACT_SECONDS
        while time.monotonic() < until:
            tag = contexts.next_tag(writer)
            while (position := append(tag, events, contexts.known.get(tag))) is None:
                contexts.note(tag, latest(tag))
            contexts.note(tag, position)
            done += 1
        return done

    if writers == 1:
        return lambda: write(0)
    return lambda: sum(pool.map(write, range(writers)))


def by_loop(
    loop: asyncio.AbstractEventLoop,
    append: AsyncAppend,
    latest: AsyncLatest,
    contexts: Contexts,
    writers: int,
    events: int,
) -> Act:
    """Run writers as asyncio tasks."""

    async def write(writer: int) -> int:
        done = 0
        until = time.monotonic() + ACT_SECONDS
        while time.monotonic() < until:
            tag = contexts.next_tag(writer)
            while (position := await append(tag, events, contexts.known.get(tag))) is None:
                contexts.note(tag, await latest(tag))
            contexts.note(tag, position)
            done += 1
        return done

    async def write_all() -> int:
        return sum(await asyncio.gather(*(write(writer) for writer in range(writers))))

    return lambda: loop.run_until_complete(write_all())


@dataclass(frozen=True)
class Workload:
    """A workload and its key in the JSON line."""

    key: str
    writers: int
    events: int = 1
    context: str = "new"
    large: bool = False

    @property
    def title(self) -> str:
        contexts = {"new": "new contexts", "existing": "existing contexts", "contended": "one context"}[self.context]
        writers = f"{self.writers} writer{'s' if self.writers > 1 else ''}"
        events = f"{self.events} event{'s' if self.events > 1 else ''}"
        return f"{writers}, {events}, {contexts}{', large store' if self.large else ''}"

    def stores(self) -> list[str]:
        """The variants of this workload. One writer needs no threads; a large store is compared with an empty one."""
        names = ["headwater", *STORES]
        if self.writers == 1:
            names.remove("headwater threads")
        return names


WRITERS = (1, 4, 16, 64)
WORKLOADS = (
    *(Workload(f"append{n}", n) for n in WRITERS),
    *(Workload(f"append{n}x10", n, events=10) for n in WRITERS),
    *(Workload(f"existing{n}", n, context="existing") for n in WRITERS),
    Workload("existing16x10", 16, events=10, context="existing"),
    *(Workload(f"contended{n}", n, context="contended") for n in WRITERS[1:]),
    *(Workload(f"large{n}", n, large=True) for n in (1, 16)),
    Workload("large16x10", 16, events=10, large=True),
    Workload("large_existing16", 16, context="existing", large=True),
)


@dataclass(frozen=True)
class Turn:
    """The result of one turn of one store."""

    rate: float
    cpu_us: float
    """CPU time of client and server per append."""


def fill(server: Server, events: int) -> None:
    """Fill a large Headwater store with the function that appends use."""
    measure.say(f"filling event stores with {events:,} events each")
    with headwater.connect(server.dsn) as log:
        log.create_store(LARGE)
    server.execute("set synchronous_commit = off")
    for start in range(0, events, 10_000):
        server.execute(
            """
            select headwater_internal.insert_appended(
                (headwater_internal.find_event_store(%s)).id, min(p.n) - 1, array_agg(p.position), array_agg('fill-' ||
                p.n), array_agg('Happened'::text), array_agg('{all,fill-' || p.n / 10 || '}'), array_agg(%s::bytea),
                null, null
            )
            from (
                select n, nextval('headwater_internal.position') as position
                from generate_series(%s::bigint, %s::bigint) as n
            ) as p
            """,
            (LARGE, DATA, start + 1, min(start + 10_000, events)),
        )
    server.execute("reset synchronous_commit")
    for table in ("event_index_term", "event_identity"):
        server.execute(f"vacuum analyze headwater_internal.{table}")
    server.execute("analyze headwater_internal.event")


def filling(dsn: str, store: str, target: str | None, events: int) -> Act:
    """A variant that fills a store and is not timed."""
    append, _ = STORES[store](dsn, target)
    numbers = itertools.count()

    def act() -> int:
        for start in range(0, events, APPEND_EVENTS):
            append(f"fill-{next(numbers)}", min(APPEND_EVENTS, events - start), None)
        return events

    return act


@contextmanager
def umadb_server() -> Iterator[tuple[str, int]]:
    """Run the UmaDB server of its wheel; yields its address and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with temporary_directory("headwater-bench-umadb-") as directory:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "umadb"), "--listen", address, "--db-path", str(directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + UMADB_SECONDS
            host, port = address.split(":")
            while True:
                try:
                    socket.create_connection((host, int(port)), 1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise RuntimeError("the server of UmaDB did not start") from None
                    time.sleep(0.05)
            yield address, process.pid
        finally:
            process.terminate()
            process.wait(20)


def measured(
    server: Server, umadb: int, clients: ClientProcesses, variants: dict[str, Variant], *, rounds: int, seconds: float
) -> dict[str, list[Turn]]:
    """Run every store once per round, in rotating order."""
    turns: dict[str, list[Turn]] = {name: [] for name in variants}
    for variant in variants.values():
        clients.ready(variant)
    names = list(variants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = _server_cpu(server, umadb)
            appends, elapsed, client_cpu = clients.run(variants[name], seconds)
            cpu = _server_cpu(server, umadb) - before + client_cpu
            turns[name].append(Turn(appends / elapsed, cpu / appends * 1e6))
    return turns


def _server_cpu(server: Server, umadb: int) -> float:
    return (server.cpu_seconds() or 0.0) + measure._family_cpu_seconds(umadb)


def _ratio(ours: Sequence[Turn], theirs: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    return round(statistics.median(of(a) / of(b) for a, b in zip(ours, theirs, strict=True)), 3)


def main() -> None:
    options = measure.arguments(__doc__ or "")
    rounds, seconds, large = options.sized((5, 1.0, 1_000_000), (1, 0.3, 20_000), (1, 0.05, 1_000))
    chosen = [workload for workload in WORKLOADS if not options.only or workload.key in options.only]
    result: dict[str, Any] = {}
    rows: list[Sequence[str] | None] = []
    turns: dict[str, dict[str, list[Turn]]] = {}
    with (
        measure.measured_server(options.dsn) as server,
        umadb_server() as (address, umadb),
        temporary_directory("headwater-bench-sqlite-") as files,
    ):
        targets: dict[str, str | None] = {"headwater sqlite": str(files / "small"), "umadb": address}
        with headwater.connect(server.dsn) as log:
            log.create_store(STORE)
        with ClientProcesses(server.dsn, 1) as clients:
            for workload in sorted(chosen, key=lambda workload: workload.large):
                if workload.large and targets.get("headwater") is None:
                    # A store that was filled is no longer empty, so the large ones come last.
                    fill(server, large)
                    targets |= {"headwater": LARGE, "headwater threads": LARGE}
                    targets["headwater sqlite"] = str(files / "large")
                    for name in ("headwater sqlite", "eventsourcing", "umadb"):
                        what = {"store": name, "target": targets.get(name), "events": min(large, FILL_EVENTS)}
                        for _ in range(0, large, FILL_EVENTS):
                            clients.ready(Variant(f"fill {name}", filling, what))
                measure.say(workload.title)
                variants = {
                    name: Variant(
                        f"{workload.key} {name}",
                        appending,
                        {
                            "store": name,
                            "target": targets.get(name),
                            "writers": workload.writers,
                            "events": workload.events,
                            "context": workload.context,
                        },
                    )
                    for name in workload.stores()
                }
                if workload.large:
                    what = {**variants["headwater"].options, "target": STORE}
                    variants["headwater empty"] = Variant(f"{workload.key} headwater empty", appending, what)
                turns[workload.key] = measured(server, umadb, clients, variants, rounds=rounds, seconds=seconds)
                rows += [None, (f"[bold]{workload.title}[/bold]", "", "", "")]
                for name, got in turns[workload.key].items():
                    rate = statistics.median(turn.rate for turn in got)
                    cpu = statistics.median(turn.cpu_us for turn in got)
                    times = _ratio(turns[workload.key]["headwater"], got, lambda turn: turn.rate)
                    rows.append((f"  {name}", measure.number(rate), measure.number(cpu), measure.number(times, 2)))
                    key = f"{workload.key}_{name.replace(' ', '_')}"
                    result |= {f"{key}_per_second": round(rate), f"{key}_cpu_us": round(cpu, 1)}
                    if name != "headwater":
                        result[f"{workload.key}_vs_{name.replace(' ', '_')}"] = times
        if "large16" in turns:
            result["cost_1m_vs_empty"] = _ratio(
                turns["large16"]["headwater"], turns["large16"]["headwater empty"], lambda turn: turn.cpu_us
            )
            result["large_events"] = large
        measure.table(
            "appends; CPU of client and server together",
            ("", "appends/s", "CPU us", "headwater is"),
            rows,
        )
        measure.finish(server, options, "eventstore", result)


if __name__ == "__main__":
    main()
