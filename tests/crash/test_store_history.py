"""Is every verdict of an event store right? Concurrent appends, killed backends and processes; the log is the witness.

The checker itself is tested too: each of several broken event stores must be caught by it.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from store_history import Asked, Violation, ask, check

import headwater
from effort import effort
from headwater import aio
from headwater.calls import store as store_calls
from headwater.client.eventstore.postgres import EventStore
from headwater.database import schema
from headwater.embedded import Postgres
from headwater.errors import LogUnavailable, StoreBusy, TransactionAborted
from headwater.eventstore import (
    Condition,
    Item,
    LatestMatchIs,
    NewStoreEvent,
    NoMatchAfter,
    Query,
    SqliteStores,
    StoreEvent,
)
from headwater.eventstore.conflict_cache import AppendedEvent, ConflictCache
from headwater.eventstore.pipelined_connection import _Pipeline
from patience import PATIENCE_SECONDS

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "conformance"))
from blocking import Blocking, Loop

pytestmark = pytest.mark.crash

_numbers = itertools.count()
Until = Callable[[Callable[[], Any]], Any]
ROUNDS = effort(3)
TAGS = ("a", "b", "c", "d")
TYPES = ("A", "B")
KEYS = (1, 2, "three")
# What says that an append has no answer, by whatever way it was sent.
NO_ANSWER: tuple[type[Exception], ...] = (LogUnavailable, TransactionAborted, psycopg.Error)


def random_query(chance: random.Random) -> Query:
    """Of every shape: by tags, by types, by fields, by some of them or by nothing at all; one item, two, or none."""
    return Query([random_item(chance) for _ in range(chance.choice((0, 1, 1, 1, 1, 1, 1, 2, 2)))])


def random_item(chance: random.Random) -> Item:
    shape = chance.choice(("tags", "tags", "tags", "typed", "types", "fields", "tagged fields"))
    return Item(
        chance.sample(TYPES, 1) if shape in ("typed", "types") else (),
        chance.sample(TAGS, chance.choice((1, 1, 2))) if shape in ("tags", "typed", "tagged fields") else (),
        {"k": chance.choice(KEYS)} if "fields" in shape else {},
    )


def random_events(chance: random.Random) -> list[NewStoreEvent]:
    return [
        NewStoreEvent(
            chance.choice(TYPES),
            chance.choice((None, {"k": chance.choice(KEYS)})),
            chance.sample(TAGS, chance.choice((0, 1, 2))),
            event_id=f"{chance.random()}",
        )
        for _ in range(chance.choice((1, 1, 1, 3)))
    ]


def random_appends(store: Any, count: int, seed: int, *, lost: tuple[type[Exception], ...] = NO_ANSWER) -> list[Asked]:
    """Read a context, decide, append: as users do, and as fast as they can."""
    chance = random.Random(seed)
    history: list[Asked] = []
    for _ in range(count):
        events, condition = random_events(chance), None
        try:
            if chance.random() < 0.9:
                query = random_query(chance)
                seen = store.latest(query).position
                condition = chance.choice((NoMatchAfter, LatestMatchIs))(query, seen)
            history.append(ask(store, events, condition))
        except lost:
            history.append(Asked(tuple(event.event_id or "" for event in events), condition))
    return history


@contextmanager
def killing(dsn: str) -> Iterator[None]:
    """Meanwhile, backends of logs that are called doomed are killed at random."""
    over = threading.Event()

    def kill() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not over.wait(0.05):
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'doomed' "
                    "and datname = current_database() order by random() limit 1"
                )

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


def test_every_verdict_is_right_while_backends_are_killed(dsn: str, log: headwater.Headwater) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    # Logs of their own stand for processes: they share neither pool nor group commit.
    with (
        headwater.connect(dsn, application_name="doomed") as one,
        headwater.connect(dsn, application_name="doomed") as two,
        killing(dsn),
        ThreadPoolExecutor(8) as pool,
    ):
        runs = [
            pool.submit(random_appends, (one, two)[n % 2].store(store.topic), 10 * ROUNDS, seed=n) for n in range(8)
        ]
        history = [asked for run in runs for asked in run.result(PATIENCE_SECONDS)]
    check(history, list(store.read_all()))
    assert sum(asked.positions is not None for asked in history) > 20
    assert sum(asked.moved_to is not None for asked in history) > 5


def test_every_verdict_is_right_while_groups_overlap_and_backends_are_killed(
    dsn: str, log: headwater.Headwater
) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    loop = Loop()
    doomed = [loop.run(aio.connect(dsn, application_name="doomed", pool_size=2)) for _ in range(2)]
    for opened in doomed:
        opened.store(store.topic)._group_commit._pace.in_halves = True
    under_way: list[int] = []

    def tell(sent: Callable[..., Any]) -> Callable[..., Any]:
        def send(line: Any, call: Any) -> Any:
            under_way.append(len(line._under_way))
            return sent(line, call)

        return send

    with pytest.MonkeyPatch.context() as patched, killing(dsn), ThreadPoolExecutor(16) as pool:
        patched.setattr(_Pipeline, "send", tell(_Pipeline.send))
        runs = [
            pool.submit(random_appends, Blocking(loop, doomed[n % 2].store(store.topic)), 5 * ROUNDS, seed=n)
            for n in range(16)
        ]
        history = [asked for run in runs for asked in run.result(PATIENCE_SECONDS)]
    for opened in doomed:
        loop.run(opened.close())
    loop.close()
    check(history, list(store.read_all()))
    assert sum(asked.positions is not None for asked in history) > 20
    assert sum(asked.moved_to is not None for asked in history) > 5
    # Or it would not be what it is about.
    assert 1 in under_way


@contextmanager
def slow_commits(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Meanwhile, whoever appends takes some milliseconds to commit, now more and now less."""
    connection.execute(
        """
        create function public.slow_commit() returns trigger language plpgsql as $$
        begin
            perform pg_sleep(random() * 0.01);
            return null;
        end;
        $$;
        create constraint trigger slow_commit after insert on headwater_internal.event_identity
        deferrable initially deferred for each row execute function public.slow_commit();
        """
    )
    try:
        yield
    finally:
        connection.execute("drop function public.slow_commit cascade")


def test_every_verdict_is_right_while_commits_are_slow(
    dsn: str, log: headwater.Headwater, connection: psycopg.Connection[Any]
) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    # What is appended is assigned and asked about long before others can see it.
    with (
        slow_commits(connection),
        headwater.connect(dsn) as one,
        headwater.connect(dsn) as two,
        ThreadPoolExecutor(8) as pool,
    ):
        runs = [
            pool.submit(random_appends, (one, two)[n % 2].store(store.topic), max(15, 5 * ROUNDS), seed=n)
            for n in range(8)
        ]
        history = [asked for run in runs for asked in run.result(PATIENCE_SECONDS)]
    check(history, list(store.read_all()))
    assert sum(asked.positions is not None for asked in history) > 20
    assert sum(asked.moved_to is not None for asked in history) > 5


def test_subscribers_get_the_committed_sequence_while_backends_are_killed(dsn: str, log: headwater.Headwater) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    end = Query.of(types=["End"])
    wanted = [Query(), Query.of(tags=["a"]) | end, Query.of(types=["A", "End"])]
    slow = threading.Event()

    def subscribe(reading: EventStore, query: Query, pause: bool) -> list[StoreEvent]:
        got: list[StoreEvent] = []
        for events in reading.subscribe_batches(query, batch_size=5):
            got += events
            if pause:
                # A reader that falls behind, and is served from the log again.
                slow.wait(0.02)
            if got[-1].type == "End":
                return got
        raise AssertionError("a live subscription does not end")

    with (
        headwater.connect(dsn, application_name="doomed") as one,
        headwater.connect(dsn, application_name="doomed") as two,
        killing(dsn),
        ThreadPoolExecutor(16) as pool,
    ):
        readers = [
            (query, pool.submit(subscribe, reading.store(store.topic), query, pause))
            for query in wanted
            for reading, pause in ((one, False), (two, False), (one, True))
        ]
        writers = [pool.submit(random_appends, (one, two)[n % 2].store(store.topic), 15, seed=n) for n in range(4)]
        for writer in writers:
            writer.result(PATIENCE_SECONDS)
        store.append(NewStoreEvent("End"))
        for query, reader in readers:
            assert reader.result(PATIENCE_SECONDS) == list(store.read_all(query))


def test_every_verdict_is_right_while_the_server_crashes(tmp_path: Path, until: Until) -> None:
    server = Postgres(tmp_path / "pg")
    server.start()
    try:
        dsn = server.dsn("postgres")
        with psycopg.connect(dsn, autocommit=True) as connection:
            schema.upgrade(connection)
        with headwater.connect(dsn) as log, ThreadPoolExecutor(5) as pool:
            store = log.create_store("s")
            runs = [pool.submit(random_appends, store, 10 * ROUNDS, seed=n) for n in range(4)]
            for _ in range(2):
                # Not before something was appended since the last crash.
                start = store.head()
                until(lambda start=start: store.head() > start or all(run.done() for run in runs))
                server.kill()
                server.start()
            history = [asked for run in runs for asked in run.result(PATIENCE_SECONDS)]
            check(history, list(store.read_all()))
            assert sum(asked.positions is not None for asked in history) > 20
    finally:
        server.stop(mode="immediate")


def test_every_verdict_is_right_on_sqlite(tmp_path: Path) -> None:
    with SqliteStores(tmp_path) as stores, ThreadPoolExecutor(6) as pool:
        store = stores.create_store("s")
        runs = [pool.submit(random_appends, store, 10 * ROUNDS, seed=n) for n in range(6)]
        history = [asked for run in runs for asked in run.result(PATIENCE_SECONDS)]
        check(history, list(store.read_all()))
    assert sum(asked.moved_to is not None for asked in history) > 5


# --- a process that is killed ------------------------------------------------------------------------------------

WRITER = """
import os, sys
from pathlib import Path
from headwater.eventstore import NewStoreEvent, NoMatchAfter, Query, SqliteStores

with SqliteStores(Path(sys.argv[1])) as stores:
    store = stores.create_store("s", if_missing=True)
    n = store.count()
    while True:
        tag = Query.of(tags=[f"n{n}"])
        store.append([NewStoreEvent("A", {"n": n}, [f"n{n}"]), NewStoreEvent("B", {"n": n})], NoMatchAfter(tag))
        os.write(1, f"{n}\\n".encode())
        n = store.count()
"""


def test_a_killed_process_leaves_every_answered_append_and_no_half_of_one(tmp_path: Path) -> None:
    answered: list[int] = []
    for _ in range(ROUNDS):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            answered += [int(process.stdout.readline()) for _ in range(10)]
            with pytest.raises(StoreBusy, match=str(process.pid)):
                SqliteStores(tmp_path)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_SECONDS)
        answered += [int(line) for line in process.stdout if line.endswith(b"\n")]
        process.stdout.close()
    with SqliteStores(tmp_path) as stores:
        events = list(stores.store("s").read_all())
    assert [event.topic_offset for event in events] == list(range(len(events)))
    assert [event.type for event in events] == ["A", "B"] * (len(events) // 2)
    assert set(answered) <= {json.loads(event.payload or b"")["n"] for event in events}


# --- the checker is checked --------------------------------------------------------------------------------------


def held(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """One appends in a transaction that stays open while another, which must know of it, asks."""
    events = [[NewStoreEvent("A", tags=["a"], event_id=f"{store.topic}-{n}")] for n in range(2)]
    with log.connection() as watch, ThreadPoolExecutor(1) as pool:
        with log.transaction() as own:
            first = ask(store, events[0], None, connection=own)
            second = pool.submit(ask, store, events[1], NoMatchAfter(Query.of(tags=["a"])))

            def waits_or_is_done() -> bool:
                row = watch.execute("select from pg_locks where locktype = 'advisory' and not granted").fetchone()
                return row is not None or second.done()

            until(waits_or_is_done)
        return [first, second.result(PATIENCE_SECONDS)]


def grouped(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """Appends of one group of which each must know of those before it."""
    wishes: list[tuple[NewStoreEvent, Condition | None]] = [
        (NewStoreEvent("A", tags=["a", "b"]), None),
        (NewStoreEvent("A", tags=["c"]), NoMatchAfter(Query.of(tags=["b"]))),
        (NewStoreEvent("B", tags=["d"]), LatestMatchIs(Query.of(tags=["never"]), None)),
        (NewStoreEvent("B"), NoMatchAfter(Query.of(types=["B"], tags=["d"]))),
    ]
    ids = [f"{store.topic}-g{n}" for n in range(len(wishes))]
    appends = [store_calls.encode_append([event], condition, [ids[n]]) for n, (event, condition) in enumerate(wishes)]
    return [
        Asked((event_id,), condition, verdict.positions, verdict.conflict_position)
        for event_id, (_, condition), verdict in zip(ids, wishes, store._send(appends), strict=True)
    ]


def alone(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """Conditions of every shape, one after the other."""
    history: list[Asked] = []

    def append(tags: Sequence[str], condition: Condition | None) -> int:
        event = NewStoreEvent("A", tags=tags, event_id=f"{store.topic}-a{len(history)}")
        history.append(ask(store, [event], condition))
        return max(history[-1].positions or (0,))

    first = append(["a", "b"], None)
    second = append(["c"], NoMatchAfter(Query.of(tags=["a"]), first))
    append(["d"], NoMatchAfter(Query.of(tags=["never"]) | Query.of(tags=["b"])))
    append(["d"], NoMatchAfter(Query.of(types=["A"], tags=["b"])))
    append(["d"], NoMatchAfter(Query.of(tags=["b"]), first))
    append(["d"], LatestMatchIs(Query.of(tags=["a"]), second))
    append(["d"], LatestMatchIs(Query.of(tags=["a"]), first))
    append(["d"], NoMatchAfter(Query.of(tags=["b", "a"])))
    return history


def lost_answer(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """The answer to an append is lost, and it is sent again."""
    event = NewStoreEvent("A", event_id=f"{store.topic}-l")
    append = store_calls.encode_append([event], None, [""])
    store._send([append])
    (verdict,) = store._send([append])
    return [Asked((f"{store.topic}-l",), None, verdict.positions, verdict.conflict_position)]


def common(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """A tag that so many events have that those of a type among them are not looked for one by one."""
    history = [ask(store, [NewStoreEvent("Rare", tags=["a"], event_id=f"{store.topic}-c")], None)]
    many = [NewStoreEvent("Common", tags=["a"], event_id=f"{store.topic}-c{n}") for n in range(100)]
    history.append(ask(store, many, None))
    for after, number in ((0, 1), (max(history[0].positions or ()), 2)):
        event = NewStoreEvent("Decided", event_id=f"{store.topic}-d{number}")
        history.append(ask(store, [event], NoMatchAfter(Query.of(types=["Rare"], tags=["a"]), after)))
    return history


def doubtful(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """Conditions that only a check in full can tell to be true."""
    history: list[Asked] = []
    _ask_all(history, store, [("A", "a", None), ("B", "a", None)])
    first, second = (max(asked.positions or ()) for asked in history)
    _ask_all(history, store, [("C", "b", NoMatchAfter(Query.of(types=["A"], tags=["a"]), first))])
    _ask_all(history, store, [("C", "b", LatestMatchIs(Query.of(types=["A", "B"], tags=["a"]), second))])
    return history


def others(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """Two who append in turns, each of which knows what it has appended itself."""
    history: list[Asked] = []
    other = EventStore(log, store.topic)
    about_x = Query.of(tags=["x"])
    _ask_all(history, store, [("A", "x", None)])
    first = max(history[0].positions or ())
    _ask_all(history, other, [("A", "x", NoMatchAfter(about_x, first))])
    # What is known is not all there is; then all that came is known but for what the other one appended.
    _ask_all(history, store, [("B", "y", NoMatchAfter(about_x, first)), ("B", "y", None)])
    _ask_all(history, store, [("B", "y", NoMatchAfter(about_x, first)), ("B", "z", LatestMatchIs(about_x, first))])
    # Each condition by somebody who knows nothing, so that the log is asked.
    for condition in (NoMatchAfter(about_x | Query.of(tags=["never"])), LatestMatchIs(about_x, first)):
        _ask_all(history, EventStore(log, store.topic), [("C", "z", condition)])
    # One in doubt between others that are not.
    wishes = [("C", "u", None), ("C", "v", NoMatchAfter(Query.of(tags=["x", "y"]), first)), ("C", "w", None)]
    _ask_all(history, EventStore(log, store.topic), wishes)
    return history


def known(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """Events that this process has just appended itself, and so many that it forgets the first."""
    history: list[Asked] = []
    store._conflicts = ConflictCache(max_index_terms=4)
    events = [NewStoreEvent("A", tags=[tag], event_id=f"{store.topic}-{tag}") for tag in ("a", "b")]
    history.append(ask(store, events, None))
    for tag in ("a", "b"):
        _ask_all(history, store, [("B", "c", NoMatchAfter(Query.of(tags=[tag])))])
    for number in range(6):
        _ask_all(history, store, [("C", f"n{number}", NoMatchAfter(Query.of(tags=[f"n{number}"])))])
    for tag in ("a", "b", "n0", "n3", "n5"):
        _ask_all(history, store, [("B", "c", NoMatchAfter(Query.of(tags=[tag])))])
    return history


def lost_event(store: EventStore, log: headwater.Headwater, until: Until) -> list[Asked]:
    """A server that commits asynchronously has crashed and lost an event; another one takes its place."""
    history: list[Asked] = []
    _ask_all(history, store, [("A", "a", None)])
    first = max(history[0].positions or ())
    (lost,) = store.append(NewStoreEvent("A", tags=["gone"])).positions
    with log.transaction() as own:
        for table in ("event", "event_index_term", "event_identity"):
            own.execute(SQL("delete from headwater_internal.{} where position = %s").format(Identifier(table)), (lost,))
        own.execute("select setval('headwater_internal.position', %s)", (first,))
    _ask_all(history, EventStore(log, store.topic), [("A", "a", None)])
    assert history[-1].positions == (lost,)
    _ask_all(history, store, [("B", "b", NoMatchAfter(Query.of(tags=["a"]), first))])
    return history


def _ask_all(history: list[Asked], store: EventStore, wishes: Sequence[tuple[str, str, Condition | None]]) -> None:
    """Each wish is a type, a tag and a condition; all go out as one group."""
    ids = [f"{store.topic}-{len(history) + n}" for n in range(len(wishes))]
    appends = [
        store_calls.encode_append([NewStoreEvent(type_, tags=[tag])], condition, [event_id])
        for event_id, (type_, tag, condition) in zip(ids, wishes, strict=True)
    ]
    history += [
        Asked((event_id,), condition, verdict.positions, verdict.conflict_position)
        for event_id, (_, _, condition), verdict in zip(ids, wishes, store._send(appends), strict=True)
    ]


SCENARIOS = (held, grouped, alone, lost_answer, common, doubtful, others, known, lost_event)


def run_all(log: headwater.Headwater, until: Until) -> None:
    for scenario in SCENARIOS:
        store = log.create_store(f"scenario-{next(_numbers)}")
        history = scenario(store, log, until)
        check(history, list(store.read_all()))


LOCK = "    nothing := headwater_internal.hold_store(store);\n"
LOCK_OF_GROUP = "    perform headwater_internal.hold_store(store);\n"
BEFORE = "    before := headwater_internal.store_tail(store.id);\n"
DRAW = "    nothing := headwater_internal.advertise_publisher(store.name);\n"
LATEST = "        latest := greatest(latest, found_position);\n"
ASKED = "        if condition -> 'query' is not null then\n            verdict"
ABOVE = "and n.position > greatest(above, latest)"
MARKED = "m.index_term = d.index_term and m.position > d.above"
FENCE = "    if tail <> any (above) then\n"
LOST = "    if known_id is not null and known_id is distinct from before.event_id and not exists (\n"
MUTANTS = {
    "check before the lock": [(LOCK, ""), (DRAW, LOCK + BEFORE + DRAW)],
    "no lock at all": [(LOCK, ""), (LOCK_OF_GROUP, "")],
    "one item is ignored": [(LATEST, LATEST + "        exit;\n")],
    "one tag is not marked": [("unnest(r.tags::text[]) as t (tag)\n", "unnest((r.tags::text[])[:1]) as t (tag)\n")],
    "a repeat is not known": [("        if found_positions is not null then", "        if false then")],
    "only the last of many are looked at": [("searched := found_position", "searched := true or found_position")],
    "after means from": [(ABOVE, ABOVE.replace(">", ">="))],
    "exactly there means there or later": [
        ("exact constant boolean := condition ? 'latest';", "exact constant boolean := false;")
    ],
    "the condition is not asked": [(ASKED, ASKED.replace("condition -> 'query' is not null", "false"))],
    "offsets start anew": [("before.next_offset", "0")],
    "doubts are not asked": [(FENCE, "    if false then\n")],
    "a doubt leaves out the next event": [(MARKED, MARKED.replace("d.above", "d.above + 1"))],
    "all doubts of an append must be true": [("group by d.owner, d.doubt", "group by d.owner")],
    "what was seen need not be there": [("    if seen_by is not null then\n", "    if false then\n")],
    "those behind one in doubt are accepted": [
        ("case when o.owner < in_doubt or in_doubt is null", "case when o.owner is distinct from in_doubt")
    ],
    "the fence is lost": [(FENCE, "    if known_id is null and tail <> any (above) then\n")],
    "the fence lets pass who is one event behind": [
        (FENCE, FENCE.replace("tail", "tail - 1")),
        ("d.above < append_ahead.tail", "d.above < append_ahead.tail - 1"),
    ],
    "the fence looks at the place alone": [(LOST, LOST.replace("known_id is distinct from before.event_id", "false"))],
}


def stale(window: ConflictCache, tail: int, appended: Iterable[AppendedEvent]) -> None:
    """Takes what it knows for all there is."""
    if window._head < 0:
        NOTE(window, tail, ())
    NOTE(window, window._head, appended)


def forgetful(window: ConflictCache, tail: int, appended: Iterable[AppendedEvent]) -> None:
    """Knows of the first event of an append what it is found by, and nothing of the others."""
    NOTE(
        window,
        tail,
        [event._replace(index_terms=event.index_terms[: 0 if n else None]) for n, event in enumerate(appended)],
    )


def careless(window: ConflictCache, tail: int, appended: Iterable[AppendedEvent]) -> None:
    """Does not know of the tags of an event."""
    NOTE(window, tail, [event._replace(index_terms=event.index_terms[:1]) for event in appended])


def boundless(window: ConflictCache, tail: int, appended: Iterable[AppendedEvent]) -> None:
    """Forgets events and says to know them."""
    NOTE(window, tail, appended)
    window._floor = 0


NOTE = ConflictCache.record
WINDOWS = (stale, forgetful, careless, boundless)


@pytest.fixture
def source() -> str:
    folder = Path(schema.__file__).parent / "functions"
    return "\n".join((folder / name).read_text() for name in ("event_store.sql", "store_query.sql"))


@pytest.fixture
def mutable(
    log: headwater.Headwater, connection: psycopg.Connection[Any], source: str
) -> Iterator[headwater.Headwater]:
    """The log of this module, whose functions are put right again afterwards."""
    yield log
    connection.execute(source.encode())


def test_the_event_store_as_it_is_passes(log: headwater.Headwater, until: Until) -> None:
    run_all(log, until)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_event_store_is_caught(
    name: str, mutable: None, dsn: str, connection: psycopg.Connection[Any], source: str, until: Until
) -> None:
    for old, new in MUTANTS[name]:
        assert old in source, f"the code has changed, and so must the mutant: {old!r}"
        source = source.replace(old, new)
    connection.execute(source.encode())
    # Where a key of a table stops it, it is caught as well.
    with headwater.connect(dsn) as fresh, pytest.raises((Violation, psycopg.IntegrityError)):
        run_all(fresh, until)


@pytest.mark.parametrize("note", WINDOWS)
def test_a_broken_window_is_caught(
    note: Callable[[ConflictCache, int, Iterable[AppendedEvent]], None],
    log: headwater.Headwater,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ConflictCache, "record", note)
    with pytest.raises(Violation):
        run_all(log, until)
