"""Appending under a condition, against the eventsourcing library's Postgres recorder and UmaDB, in one run.

Every store is used by threads of one client process, as a server would use it. New context: a tag that no event has
yet, asked for in the condition. Existing: each writer has a tag of its own and knows its last position. Contended: all
writers have one tag, and read again when others were faster.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from psycopg import conninfo

import headwater
from bench import _measure as measure
from bench._measure import Act, Crew, Server, Variant
from headwater.client.store import EventStore
from headwater.errors import AppendConflict
from headwater.store import NewStoreEvent, NoMatchAfter, Query, SqliteEventStore, SqliteStores

BURST = 8
DATA = b"x" * 200
STORE = "bench"
LARGE = "bench-large"
UMADB_SECONDS = 30.0

Append = Callable[[str, int, int | None], int | None]
"""Append so many events about a tag if nothing about it came after a position; None: something did."""
Latest = Callable[[str], int]


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
def on_postgres(dsn: str, place: str | None) -> tuple[Append, Latest]:
    return ours(headwater.connect(dsn, pool_size=4).store(place or STORE))


@cache
def on_sqlite(dsn: str, place: str | None) -> tuple[Append, Latest]:
    directory = Path(place or "") / f"{os.getpid()}"
    return ours(SqliteStores(directory).create_store(STORE, if_missing=True))


@cache
def by_eventsourcing(dsn: str, place: str | None) -> tuple[Append, Latest]:
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
def by_umadb(dsn: str, place: str | None) -> tuple[Append, Latest]:
    import umadb

    client = umadb.Client(f"http://{place}")

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
    "headwater": on_postgres,
    "headwater sqlite": on_sqlite,
    "eventsourcing": by_eventsourcing,
    "umadb": by_umadb,
}


# --- the work ----------------------------------------------------------------------------------------------------


def appending(dsn: str, store: str, place: str | None, writers: int, events: int, context: str) -> Act:
    """Threads that append in bursts; counts the appends that went through."""
    append, latest = STORES[store](dsn, place)
    pool = ThreadPoolExecutor(writers)
    numbers = itertools.count()
    run = f"{os.getpid()}-{time.time_ns()}"
    known: dict[str, int] = {}

    def burst(writer: int) -> None:
        for _ in range(BURST):
            if context == "new":
                assert append(f"{run}-{next(numbers)}", events, None) is not None
                continue
            tag = f"{run}-{writer if context == 'existing' else 'one'}"
            while (position := append(tag, events, known.get(tag))) is None:
                known[tag] = latest(tag)
            known[tag] = position

    def act() -> int:
        list(pool.map(burst, range(writers)))
        return writers * BURST

    return act


@dataclass(frozen=True)
class Workload:
    """A key of the JSON line, and what is done."""

    key: str
    title: str
    writers: int
    events: int = 1
    context: str = "new"
    large: bool = False

    def stores(self) -> list[str]:
        return ["headwater", "headwater large"] if self.large else list(STORES)


WORKLOADS = (
    *(Workload(f"append{n}", f"{n} writers, 1 event, new contexts", n) for n in (1, 4, 16, 64)),
    Workload("append16x10", "16 writers, 10 events, new contexts", 16, events=10),
    Workload("existing16", "16 writers, 1 event, existing contexts", 16, context="existing"),
    Workload("contended16", "16 writers, 1 event, one context", 16, context="contended"),
    Workload("large16", "16 writers, 1 event, new contexts, empty and large store", 16, large=True),
)


@dataclass(frozen=True)
class Turn:
    """One turn of one store."""

    rate: float
    cpu_us: float
    """Of client and server together, for one append."""


def fill(server: Server, events: int) -> None:
    """A large event store, written as appends write it."""
    measure.say(f"filling an event store with {events:,} events")
    log = headwater.connect(server.dsn)
    log.create_store(LARGE)
    server.execute("set synchronous_commit = off")
    for start in range(0, events, 10_000):
        server.execute(
            """
            select headwater.insert_appended(
                (headwater.find_event_store(%s)).id, array_agg(p.place), array_agg(p.n - 1), array_agg('fill-' || p.n),
                array_agg('Happened'::text), array_agg('{all,fill-' || p.n / 10 || '}'), array_agg(%s::bytea),
                null, null
            )
            from (
                select n, nextval('headwater.position') as place
                from generate_series(%s::bigint, %s::bigint) as n
            ) as p
            """,
            (LARGE, DATA, start + 1, min(start + 10_000, events)),
        )
    server.execute("reset synchronous_commit")
    server.execute("vacuum analyze headwater.event_mark")
    server.execute("vacuum analyze headwater.event_identity")
    server.execute("analyze headwater.event")
    log.close()


@contextmanager
def umadb_server() -> Iterator[tuple[str, int]]:
    """UmaDB's own server, as its wheel has it: address and process."""
    directory = tempfile.mkdtemp(prefix="headwater-bench-umadb-")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "umadb"), "--listen", address, "--db-path", directory],
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
        shutil.rmtree(directory, ignore_errors=True)


def measured(
    server: Server, umadb: int, crew: Crew, variants: dict[str, Variant], *, rounds: int, seconds: float
) -> dict[str, list[Turn]]:
    """Every store in turn, the order going round."""
    turns: dict[str, list[Turn]] = {name: [] for name in variants}
    for variant in variants.values():
        crew.ready(variant)
    names = list(variants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = _server_cpu(server, umadb)
            appends, elapsed, client_cpu = crew.run(variants[name], seconds)
            cpu = _server_cpu(server, umadb) - before + client_cpu
            turns[name].append(Turn(appends / elapsed, cpu / appends * 1e6))
    return turns


def _server_cpu(server: Server, umadb: int) -> float:
    return (server.cpu_seconds() or 0.0) + measure._family_cpu_seconds(umadb)


def _ratio(ours: Sequence[Turn], theirs: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    return round(statistics.median(of(a) / of(b) for a, b in zip(ours, theirs, strict=True)), 3)


def main() -> None:
    options = measure.arguments(__doc__ or "")
    started = time.monotonic()
    rounds, seconds, large = (2, 0.4, 20_000) if options.quick else (7, 2.0, 1_000_000)
    chosen = [workload for workload in WORKLOADS if not options.only or workload.key in options.only]
    files = tempfile.mkdtemp(prefix="headwater-bench-sqlite-")
    result: dict[str, Any] = {"bench": "eventstore"}
    rows: list[Sequence[str] | None] = []
    try:
        with measure.measured_server(options.dsn) as server, umadb_server() as (address, umadb):
            with headwater.connect(server.dsn) as log:
                log.create_store(STORE)
            if any(workload.large for workload in chosen):
                fill(server, large)
            places = {"headwater": None, "headwater sqlite": files, "eventsourcing": None, "umadb": address}
            with Crew(server.dsn, 1) as crew:
                for workload in chosen:
                    measure.say(workload.title)
                    variants = {}
                    for name in workload.stores():
                        what: dict[str, Any] = {
                            "store": "headwater" if workload.large else name,
                            "place": LARGE if name == "headwater large" else places.get(name),
                            "writers": workload.writers,
                            "events": workload.events,
                            "context": workload.context,
                        }
                        variants[name] = Variant(f"{workload.key} {name}", appending, what)
                    turns = measured(server, umadb, crew, variants, rounds=rounds, seconds=seconds)
                    rows += [None, (f"[bold]{workload.title}[/bold]", "", "", "")]
                    for name, got in turns.items():
                        rate = statistics.median(turn.rate for turn in got)
                        cpu = statistics.median(turn.cpu_us for turn in got)
                        times = _ratio(turns["headwater"], got, lambda turn: turn.rate)
                        rows.append((f"  {name}", measure.number(rate), measure.number(cpu), measure.number(times, 2)))
                        key = f"{workload.key}_{name.replace(' ', '_')}"
                        result |= {f"{key}_per_second": round(rate), f"{key}_cpu_us": round(cpu, 1)}
                        if name != "headwater":
                            result[f"{workload.key}_vs_{name.replace(' ', '_')}"] = times
                    if workload.large:
                        result["cost_1m_vs_empty"] = _ratio(
                            turns["headwater large"], turns["headwater"], lambda turn: turn.cpu_us
                        )
                        result["large_events"] = large
            measure.table(
                "appends; CPU of client and server together",
                ("", "appends/s", "CPU us", "headwater is"),
                rows,
            )
            result |= {"quick": options.quick, "seconds": round(time.monotonic() - started, 1)}
            measure.finish(server, result)
    finally:
        shutil.rmtree(files, ignore_errors=True)


if __name__ == "__main__":
    main()
