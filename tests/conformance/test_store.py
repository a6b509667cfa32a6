"""Is an event store the same wherever it lives? Postgres and SQLite: here, with an event loop, and by gRPC."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from blocking import Blocking, Loop
from psycopg import conninfo

import headwater
from headwater.client.eventstore.postgres import EventStore as BlockingEventStore
from headwater.errors import (
    AppendConflict,
    CursorMoved,
    EventTooLarge,
    InvalidEvent,
    InvalidRequest,
    QueueNotFound,
    SchemaMismatch,
    TopicExists,
    TopicNotFound,
)
from headwater.eventstore import (
    EVERYTHING,
    Item,
    LatestMatchIs,
    NewStoreEvent,
    NoMatchAfter,
    Query,
    SqliteEventStore,
    SqliteStores,
    StoreEvent,
)
from headwater.eventstore.query import size_of
from patience import PATIENCE_SECONDS

grpc = pytest.importorskip("grpc")
from rpc_client import RpcStore, RpcStores  # noqa: E402
from rpc_servers import rpc_server  # noqa: E402

_numbers = itertools.count()
Store = BlockingEventStore | SqliteEventStore | RpcStore
Stores = headwater.Headwater | SqliteStores | RpcStores
Until = Callable[[Callable[[], Any]], Any]


@pytest.fixture(scope="module")
def postgres_by_grpc(dsn: str) -> Iterator[RpcStores]:
    with rpc_server(dsn=dsn) as server, closing(RpcStores(server.address)) as stores:
        yield stores


@pytest.fixture(scope="module")
def sqlite_by_grpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RpcStores]:
    folder = tmp_path_factory.mktemp("stores")
    with rpc_server("--store", f"sqlite:///{folder}") as server, closing(RpcStores(server.address)) as stores:
        yield stores


HERE = ["postgres", "sqlite", "postgres async", "sqlite async"]


@pytest.fixture(params=[*HERE, "postgres by gRPC", "sqlite by gRPC"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    if request.param.endswith("gRPC"):
        yield request.getfixturevalue(request.param.replace(" ", "_").lower())
    else:
        with opened(request.param, request.getfixturevalue, tmp_path) as stores:
            yield stores


@contextmanager
def opened(kind: str, fixture: Callable[[str], Any], folder: Path) -> Iterator[Stores]:
    """Stores of this process: of the log of the module, or in files of the folder."""
    if kind == "postgres":
        with headwater.connect(fixture("dsn")) as log:
            yield log
    elif kind == "sqlite":
        with SqliteStores(folder / "stores") as stores:
            yield stores
    else:
        loop = Loop()
        address = f"sqlite:///{folder / 'stores'}" if kind == "sqlite async" else _address(fixture("dsn"))
        asked = loop.run(headwater.open_async(address))
        yield Blocking(loop, asked)  # type: ignore[misc]
        loop.run(asked.close())
        loop.close()


def _address(dsn: str) -> str:
    parts = conninfo.conninfo_to_dict(dsn)
    return f"postgresql:///{parts.pop('dbname')}?{urlencode(parts)}"


@pytest.fixture
def store(stores: Stores) -> Store:
    """A fresh event store."""
    return stores.create_store(f"store-{next(_numbers)}")


def tagged(*tags: str) -> Query:
    return Query.of(tags=tags)


def happened(type: str = "Happened", *tags: str, data: Any = None) -> NewStoreEvent:
    return NewStoreEvent(type, data, tags)


# --- append ------------------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_back_as_it_was(store: Store) -> None:
    appended = store.append(
        [
            NewStoreEvent("Opened", {"n": 1}, ["account:1", "eu"], {"by": "me"}, "id-1"),
            NewStoreEvent("Noted", b"\x00\xff", [], None, "id-2", "application/octet-stream"),
            NewStoreEvent("Closed"),
        ]
    )
    first, second, third = store.read()
    assert (first.type, first.data, first.tags, first.metadata) == (
        "Opened",
        {"n": 1},
        ("account:1", "eu"),
        {"by": "me"},
    )
    assert (second.payload, second.content_type, second.tags) == (b"\x00\xff", "application/octet-stream", ())
    assert (third.payload, third.content_type, third.metadata) == (None, None, None)
    assert (first.event_id, second.event_id) == ("id-1", "id-2")
    assert third.event_id
    assert appended.positions == (first.position, second.position, third.position)
    assert appended.position == store.head() == third.position
    assert not appended.repeated
    assert [event.topic_offset for event in store.read()] == [0, 1, 2]
    assert first.published_at.tzinfo is not None


@pytest.mark.parametrize("tag", ["{", '"', "\\", "a,b", "ä€😀", "null", " ", "%s", "'", "#x", ":x"])
def test_any_text_can_be_a_tag(store: Store, tag: str) -> None:
    store.append([happened("A", tag, "other"), happened("A", "other")])
    (found,) = store.read(tagged(tag))
    assert found.tags == (tag, "other")
    with pytest.raises(AppendConflict):
        store.append(happened(), NoMatchAfter(tagged(tag)))


def test_a_type_is_no_tag(store: Store) -> None:
    store.append([happened("x"), happened("y", "x")])
    assert [event.type for event in store.read(Query.of(types=["x"]))] == ["x"]
    assert [event.type for event in store.read(tagged("x"))] == ["y"]


def test_nothing_matched_since_lets_an_append_pass(store: Store) -> None:
    seen = store.append(happened("A", "x")).position
    store.append(happened("B", "y"))
    assert store.append(happened("C", "x"), NoMatchAfter(tagged("x"), seen)).position > seen
    assert store.append(happened("C"), NoMatchAfter(tagged("never"))).position > seen
    assert store.append(happened("C"), NoMatchAfter(Query.of(types=["Never"]))).position > seen
    assert store.count() == 5


def test_a_match_since_refuses_an_append_and_says_where_it_is(store: Store) -> None:
    seen = store.append(happened("A", "x")).position
    moved = store.append([happened("B", "x"), happened("B", "x")]).position
    store.append(happened("B", "y"))
    for query in (tagged("x"), Query.of(types=["B"], tags=["x"]), tagged("never") | tagged("x")):
        with pytest.raises(AppendConflict) as refused:
            store.append([happened("C"), happened("C")], NoMatchAfter(query, seen))
        assert refused.value.actual_position == moved
        assert refused.value.detail["expected_position"] == seen
    assert store.count() == 4
    assert store.count(Query.of(types=["C"])) == 0


def test_a_query_without_items_is_about_every_event(store: Store) -> None:
    assert store.append(happened(), NoMatchAfter(EVERYTHING)).position
    with pytest.raises(AppendConflict):
        store.append(happened(), NoMatchAfter(EVERYTHING))
    assert store.append(happened(), NoMatchAfter(EVERYTHING, store.head()))
    with pytest.raises(AppendConflict):
        store.append(happened(), NoMatchAfter(Query((Item(),))))


def test_a_rare_type_is_found_among_many_of_a_tag_and_a_rare_tag_among_many_of_a_type(store: Store) -> None:
    rare = store.append([happened("Rare", "common"), happened("Common", "common", "rare")]).positions
    store.append([happened("Common", "common") for _ in range(300)])
    for query, position in (
        (Query.of(types=["Rare"], tags=["common"]), rare[0]),
        (Query.of(types=["Common"], tags=["rare"]), rare[1]),
        (tagged("common", "rare"), rare[1]),
        (Query.of(types=["Rare", "Rarer"], tags=["common"]), rare[0]),
    ):
        assert [event.position for event in store.read(query)] == [position]
        assert store.latest(query).position == position
        with pytest.raises(AppendConflict) as refused:
            store.append(happened("Decided"), NoMatchAfter(query))
        assert refused.value.actual_position == position
        assert store.append(happened("Decided"), LatestMatchIs(query, position))
        assert store.append(happened("Decided"), NoMatchAfter(query, position))


def test_the_latest_match_must_be_exactly_where_it_was_seen(store: Store) -> None:
    first = store.append(happened("A", "x")).position
    second = store.append(happened("A", "x")).position
    other = store.append(happened("A", "y")).position
    for wrong in (None, first, other, other + 100):
        with pytest.raises(AppendConflict) as refused:
            store.append(happened("B"), LatestMatchIs(tagged("x"), wrong))
        assert refused.value.actual_position == second
    with pytest.raises(AppendConflict) as refused:
        store.append(happened("B"), LatestMatchIs(tagged("never"), first))
    assert refused.value.actual_position == 0
    assert store.append(happened("B", "x"), LatestMatchIs(tagged("x"), second))
    assert store.append(happened("B"), LatestMatchIs(tagged("never"), None))
    assert store.count() == 5


def test_an_append_is_one_run_of_events(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        appends = list(pool.map(lambda n: store.append([happened(f"{n}-{k}") for k in range(5)]), range(40)))
    events = list(store.read_all(batch_size=7))
    assert [event.topic_offset for event in events] == list(range(200))
    by_position = {event.position: event for event in events}
    for number, appended in enumerate(appends):
        run = [by_position[position] for position in appended.positions]
        assert [event.type for event in run] == [f"{number}-{k}" for k in range(5)]
        assert [event.topic_offset - run[0].topic_offset for event in run] == [0, 1, 2, 3, 4]


def test_an_append_that_is_repeated_is_not_done_twice(store: Store) -> None:
    events = [NewStoreEvent("A", tags=["x"], event_id=f"e{n}") for n in range(3)]
    first = store.append(events, NoMatchAfter(tagged("x")))
    store.append(happened("A", "x"))
    again = store.append(events, NoMatchAfter(tagged("x")))
    assert again.positions == first.positions
    assert again.repeated
    assert store.count() == 4


@pytest.mark.parametrize("ids", [["b", "c", "d"], ["new", "a"], ["b", "a", "c"], ["a", "c"]])
def test_the_id_of_another_event_is_refused(store: Store, ids: list[str]) -> None:
    store.append([NewStoreEvent("A", event_id=event_id) for event_id in "abc"])
    with pytest.raises(InvalidRequest, match="belongs to another append"):
        store.append([NewStoreEvent("A", event_id=event_id) for event_id in ids])
    assert store.count() == 3


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "an append has 1 to 1000"),
        ([NewStoreEvent("A")] * 1001, "an append has 1 to 1000"),
        ([NewStoreEvent("")], "1 to 200 characters"),
        ([NewStoreEvent(None)], "must have a type"),  # type: ignore[arg-type]
        ([NewStoreEvent("A", tags="x")], "list of strings"),
        ([NewStoreEvent("A", tags=[""])], "1 to 255 characters"),
        ([NewStoreEvent("A", tags=["x" * 256])], "1 to 255 characters"),
        ([NewStoreEvent("A", tags=[f"{n}" for n in range(101)])], "the limit is 100"),
        ([NewStoreEvent("A", tags=["\x00"])], "NUL"),
        ([NewStoreEvent("A", {"a": object()})], "cannot be encoded as JSON"),
        ([NewStoreEvent("A", event_id="")], "1 to 255 characters"),
        ([NewStoreEvent("A", event_id="e"), NewStoreEvent("A", event_id="e")], "same id"),
    ],
)
def test_what_cannot_be_appended_is_refused_with_a_reason(store: Store, events: list[NewStoreEvent], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        store.append(events)
    assert store.count() == 0


def test_what_is_too_large_is_refused_and_does_not_take_others_with_it(store: Store) -> None:
    def append(n: int) -> type[Exception] | None:
        try:
            store.append(NewStoreEvent("A", b"x" * (2_000_000 if n % 4 == 0 else 10)))
        except EventTooLarge as error:
            return type(error)
        return None

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(append, range(32)))
    assert outcomes == [EventTooLarge if n % 4 == 0 else None for n in range(32)]
    assert store.count() == 24


def test_of_many_who_want_the_same_one_gets_it(store: Store) -> None:
    def take(n: int) -> tuple[str, bool]:
        name = f"name:{n % 10}"
        try:
            store.append(happened("Taken", name), NoMatchAfter(tagged(name)))
        except AppendConflict:
            return name, False
        return name, True

    with ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(take, range(120)))
    assert Counter(name for name, taken in outcomes if taken) == {f"name:{n}": 1 for n in range(10)}
    assert Counter(event.tags[0] for event in store.read_all()) == {f"name:{n}": 1 for n in range(10)}


# --- read --------------------------------------------------------------------------------------------------------


def test_an_item_asks_for_one_of_its_types_and_all_of_its_tags(store: Store) -> None:
    store.append([happened("A", "x", "y"), happened("B", "x"), happened("C", "y", "x"), happened("C")])

    def types(query: Query) -> str:
        assert store.count(query) == len(store.read(query))
        assert store.read(query, backwards=True) == store.read(query)[::-1]
        return "".join(event.type or "" for event in store.read(query))

    assert types(EVERYTHING) == "ABCC"
    assert types(tagged("x")) == "ABC"
    assert types(tagged("x", "y")) == "AC"
    assert types(tagged("y", "x", "y")) == "AC"
    assert types(Query.of(types=["A", "B"])) == "AB"
    assert types(Query.of(types=["A", "B", "A"], tags=["y"])) == "A"
    assert types(Query.of(types=["C"], tags=["x", "y"])) == "C"
    assert types(Query.of(types=["B"]) | tagged("y")) == "ABC"
    assert types(tagged("x") | tagged("y")) == "ABC"
    assert types(tagged("nothing")) == types(Query.of(types=["nothing"])) == ""
    assert types(tagged("x") | EVERYTHING) == "ABCC"


def test_fields_are_compared_as_text(store: Store) -> None:
    for number, data in enumerate(
        [{"k": "5"}, {"k": 5}, {"k": 5.0}, {"k": True}, {"k": None}, {"k": {"k": "5"}}, {"k": ["5"]}, ["k"], {}, "k"]
    ):
        store.append(NewStoreEvent(f"{number}", data, ["x"]))
    store.append(NewStoreEvent("raw", b'{"k": "5"}', ["x"], content_type="text/plain"))
    store.append(NewStoreEvent("nobody said", b'{"k": "5"}', ["x"]))
    store.append(NewStoreEvent("no JSON", b'{"k": "5"', ["x"]))

    def types(**fields: Any) -> list[str | None]:
        found = [event.type for event in store.read(Query.of(fields=fields))]
        assert found == [event.type for event in store.read(Query.of(fields=fields, tags=["x"]))]
        return found

    assert types(k="5") == types(k=5) == ["0", "1", "nobody said"]
    assert types(k="5.0") == types(k=5.0) == ["2"]
    assert types(k="true") == types(k=True) == ["3"]
    assert types(k="null") == types(k="") == types(other="5") == []
    last = store.head()
    with pytest.raises(AppendConflict):
        store.append(happened(), NoMatchAfter(Query.of(fields={"k": 5}), 1))
    assert store.append(happened(), NoMatchAfter(Query.of(fields={"k": 5}), last))


def test_pages_follow_one_another_in_both_directions(store: Store) -> None:
    store.append([happened("A" if n % 3 else "B", f"t{n % 2}", data="x" * 10) for n in range(30)])
    query = Query.of(types=["A"]) | tagged("t1")
    everything = store.read(query)
    assert len(everything) == 25
    for batch_size in (1, 7, 25):
        assert list(store.read_all(query, batch_size=batch_size)) == everything
        assert list(store.read_all(query, backwards=True, batch_size=batch_size)) == everything[::-1]
    middle = everything[10].position
    assert store.read(query, after=middle) == everything[11:]
    assert store.read(query, before=middle) == everything[:10]
    assert store.read(query, after=middle, before=everything[20].position, batch_size=3) == everything[11:14]
    assert store.count(query, after=middle) == 14
    assert store.count(query, before=middle) == 10
    sizes = [size_of(event) for event in everything]
    assert len(store.read(query, max_bytes=sum(sizes[:3]))) == 3
    assert len(store.read(query, max_bytes=sum(sizes[:3]) + 1)) == 4
    assert len(store.read(query, max_bytes=1)) == 1


@pytest.mark.parametrize(
    "parts",
    [
        {"data": "x" * 1000},
        {"metadata": {"m": "ü" * 500}},
        {"tags": ["t" * 250 + str(n) for n in range(4)]},
        {"type": "A" * 200},
        {"content_type": "c" * 200, "data": b""},
    ],
)
def test_every_part_of_an_event_counts_when_a_batch_is_bounded(store: Store, parts: dict[str, Any]) -> None:
    store.append([NewStoreEvent(**{"type": "A", **parts}) for _ in range(5)])
    everything = store.read()
    size = size_of(everything[0])
    assert size > 200
    assert store.read(max_bytes=2 * size) == everything[:2]
    assert store.read(max_bytes=2 * size, backwards=True) == everything[:2:-1]


def test_what_has_more_metadata_than_data_comes_to_every_subscriber(store: Store) -> None:
    for _ in range(6):
        store.append([NewStoreEvent("A", metadata={"m": "x" * 60_000}) for _ in range(15)])
    # More than a client of gRPC takes in one message, if nobody says otherwise.
    assert len(list(store.subscribe(stop_when_caught_up=True))) == 90


def test_the_latest_of_each_item_is_found(store: Store) -> None:
    first, second, third = store.append([happened("A", "x"), happened("B", "x"), happened("A", "y")]).positions
    latest = store.latest(Query.of(types=["A"], tags=["x"]) | tagged("never") | tagged("x"))
    assert [event and event.position for event in latest.events] == [first, None, second]
    assert latest.position == second
    assert store.latest(Query.of(types=["A"])).position == third
    assert store.latest(tagged("never")).position == 0
    assert store.latest(tagged("never")).events == (None,)


def test_a_store_is_made_once_and_found_by_its_name(stores: Stores) -> None:
    name = f"store-{next(_numbers)}"
    stores.create_store(name).append(happened())
    with pytest.raises(TopicExists):
        stores.create_store(name)
    assert stores.create_store(name, if_missing=True).count() == 1
    assert stores.store(name).count() == 1
    with pytest.raises(TopicNotFound):
        stores.store("no-such-store").count()
    with pytest.raises(InvalidRequest):
        stores.create_store("a/b")


@pytest.mark.parametrize("content_type", [None, "application/json"])
def test_json_is_as_deep_as_all_can_read_and_found_by_all(store: Store, content_type: str | None) -> None:
    def nested(levels: int) -> NewStoreEvent:
        inner = b"[" * (levels - 1) + b"]" * (levels - 1)
        return NewStoreEvent("A", b'{"k": 1, "n": ' + inner + b"}", content_type=content_type)

    store.append(nested(200))
    query = Query.of(fields={"k": 1})
    (found,) = store.read(query)
    assert query.matches(found)
    for levels in (201, 950, 5000):
        with pytest.raises(InvalidEvent, match=r"the limit is 200|recursion"):
            store.append(nested(levels))
    # What is no JSON is not looked at.
    store.append(NewStoreEvent("A", b"[" * 500))
    store.append(NewStoreEvent("A", b"[" * 5000, content_type="text/plain"))
    assert store.count() == 3


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"content_type": "", "data": b"x"}, "content type"),
        ({"content_type": "x" * 201, "data": b"x"}, "content type"),
        ({"content_type": "a\0b", "data": b"x"}, "content type"),
        ({"metadata": [1]}, "JSON object"),
        ({"metadata": {"m": "a\0b"}}, "NUL"),
    ],
)
def test_what_is_no_event_is_refused_wherever_it_goes(store: Store, event: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        store.append(NewStoreEvent("A", **event))
    assert store.count() == 0


def test_a_backslash_is_no_nul(store: Store) -> None:
    store.append(NewStoreEvent("A", {"d": "\\u0000"}, metadata={"m": "\\u0000"}))
    (event,) = store.read()
    assert (event.data, event.metadata) == ({"d": "\\u0000"}, {"m": "\\u0000"})


@pytest.mark.parametrize("place", [1 << 63, -(1 << 64)])
def test_a_position_that_cannot_be_is_refused(store: Store, place: int) -> None:
    if isinstance(store, RpcStore):
        pytest.skip("a message cannot hold it")
    for ask in (
        lambda: store.read(after=place),
        lambda: store.read(before=place),
        lambda: store.count(after=place),
        lambda: list(store.subscribe(after=place, stop_when_caught_up=True)),
        lambda: list(store.subscribe(after=place, cursor="c", stop_when_caught_up=True)),
    ):
        with pytest.raises(InvalidRequest, match="64-bit integer"):
            ask()


def test_a_number_of_any_length_is_asked_for(store: Store) -> None:
    store.append([NewStoreEvent("A", b'{"k": 1' + b"0" * 5000 + b"}"), NewStoreEvent("A", {"k": 10**100})])
    assert store.count(Query.of(fields={"k": 10**5000})) == 1
    assert store.count(Query.of(fields={"k": 10**100})) == 1


def test_a_batch_has_one_event_however_few_bytes_are_asked_for(store: Store) -> None:
    if isinstance(store, RpcStore):
        pytest.skip("nothing is not said there")
    store.append([happened("A"), happened("B")])
    assert [event.type for event in store.read(max_bytes=0)] == ["A"]


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b"])
def test_what_is_no_name_of_a_cursor_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequest, match="cursor name"):
        list(store.subscribe(cursor=name, stop_when_caught_up=True))


def test_a_cursor_never_moves_back(store: Store) -> None:
    if isinstance(store, RpcStore):
        pytest.skip("it moves by the same function")
    cursor = f"cursor-{next(_numbers)}"
    store.open_cursor(cursor, 5)
    with pytest.raises(CursorMoved):
        store.move_cursor(cursor, 5, 4)
    assert store._find_cursor(cursor) == 5


# --- subscribe ---------------------------------------------------------------------------------------------------


def collect(store: Store, into: list[StoreEvent], stop_at: str, **options: Any) -> threading.Thread:
    """Subscribe in a thread until an event of that type comes."""

    def run() -> None:
        for event in store.subscribe(**options):
            into.append(event)
            if event.type == stop_at:
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def soon(subscription: Iterator[Any]) -> Any:
    """The next that a live subscription brings, which must come."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(next(subscription)), daemon=True)
    thread.start()
    join(thread)
    return got[0]


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "the end did not come within 30 seconds"


def test_a_subscriber_catches_up_and_stays_live(store: Store, until: Until) -> None:
    store.append([happened("A", "x"), happened("A"), happened("A", "x")])
    got: list[StoreEvent] = []
    thread = collect(store, got, "End", query=tagged("x"))
    until(lambda: len(got) == 2)
    store.append([happened("A"), happened("A", "x")])
    until(lambda: len(got) == 3)
    store.append(happened("End", "x"))
    join(thread)
    assert got == store.read(tagged("x"))


def test_many_subscribers_get_every_event_once_in_order_while_many_append(store: Store) -> None:
    wanted = [EVERYTHING, tagged("t1"), Query.of(types=["W2", "End"]), tagged("t0", "w1")]
    received: list[list[StoreEvent]] = [[] for _ in range(12)]
    threads = [
        collect(store, got, "End", query=wanted[n % 4] | Query.of(types=["End"]) if wanted[n % 4].items else EVERYTHING)
        for n, got in enumerate(received)
    ]

    def write(writer: int) -> None:
        for n in range(25):
            store.append(NewStoreEvent(f"W{writer}", {"n": n}, [f"t{n % 2}", f"w{writer}"]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    store.append(happened("End"))
    join(*threads)
    for n, got in enumerate(received):
        query = wanted[n % 4]
        assert got == list(store.read_all(query | Query.of(types=["End"]) if query.items else EVERYTHING))


def test_a_slow_subscriber_is_served_from_the_log_again(
    store: Store, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(store, RpcStore):
        pytest.skip("what a server keeps is not seen from here")
    monkeypatch.setattr(
        "headwater.eventstore.recent_events.RecentEvents.extended.__kwdefaults__",
        {"max_events": 5, "max_bytes": 1 << 20},
    )
    slow = store.subscribe(batch_size=2)
    store.append(happened("A"))
    got = [soon(slow)]
    fast: list[StoreEvent] = []
    thread = collect(store, fast, "End")
    until(lambda: fast and store._live_reader._tail)
    for n in range(10):
        store.append([happened("A"), happened("A"), happened("A")])
        # One by one, so that all of it goes by the tail.
        until(lambda n=n: len(fast) == 4 + 3 * n)
    store.append(happened("End"))
    join(thread)
    tail = store._live_reader._tail
    assert tail is not None
    assert len(tail.events) == 5
    assert not store._live_reader.holds(got[-1].position)
    while got[-1].type != "End":
        got.append(soon(slow))
    assert got == fast == list(store.read_all())


def test_one_reads_for_all_who_follow(store: Store, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(store, RpcStore):
        pytest.skip("what a server keeps is not seen from here")
    readers: set[int] = set()
    at_once: list[int] = []
    read_after = store._live_reader._read_after

    def watched(position: int, batch_size: int, epoch: int) -> Any:
        readers.add(threading.get_ident())
        at_once.append(len(readers))
        try:
            return read_after(position, batch_size, epoch)
        finally:
            readers.discard(threading.get_ident())

    monkeypatch.setattr(store._live_reader, "_read_after", watched)
    received: list[list[StoreEvent]] = [[] for _ in range(40)]
    threads = [collect(store, got, "End") for got in received]
    store.append(happened("A"))
    until(lambda: all(received))
    store.append(happened("End"))
    join(*threads)
    assert max(at_once) == 1
    assert all([event.type for event in got] == ["A", "End"] for got in received)


def test_a_cursor_goes_on_where_the_last_subscriber_was(store: Store) -> None:
    store.append([happened("A", "x" if n % 2 else "y") for n in range(10)])
    cursor = f"cursor-{next(_numbers)}"
    batches = store.subscribe_batches(tagged("x"), cursor=cursor, batch_size=2)
    first = soon(batches)
    second = soon(batches)
    batches.close()
    # The batch in hand was not acknowledged by asking for another, so it comes again.
    rest = list(store.subscribe(tagged("x"), cursor=cursor, batch_size=1, stop_when_caught_up=True))
    assert [*first, *rest] == store.read(tagged("x"))
    assert rest[:2] == list(second)
    assert list(store.subscribe(tagged("x"), cursor=cursor, stop_when_caught_up=True)) == []
    store.append([happened("A"), happened("A", "x")])
    assert len(list(store.subscribe(tagged("x"), cursor=cursor, stop_when_caught_up=True))) == 1


def test_a_subscriber_can_start_anywhere(store: Store) -> None:
    positions = store.append([happened("A") for _ in range(5)]).positions
    assert [e.position for e in store.subscribe(after=positions[2], stop_when_caught_up=True)] == list(positions[3:])
    assert list(store.subscribe(from_end=True, stop_when_caught_up=True)) == []
    with pytest.raises(InvalidRequest, match="give only one of"):
        next(store.subscribe(after=1, from_end=True))


# --- compete -----------------------------------------------------------------------------------------------------


# So short a lease is lost by whoever does not ask on at once. Those who are to keep theirs have 30 seconds.
SHORT = 0.05


@pytest.fixture
def queue() -> str:
    return f"queue-{next(_numbers)}"


def places(*batches: Any) -> list[int]:
    return [event.position for batch in batches for event in batch]


def rest(store: Store, queue: str, query: Query = EVERYTHING, batch_size: int = 10) -> list[int]:
    """What one more competitor gets now; all of it is done."""
    batches = store.compete(queue, query, worker="rest", batch_size=batch_size, stop_when_caught_up=True)
    return places(*batches)


def abandoned(store: Store, queue: str, query: Query = EVERYTHING, batch_size: int = 10) -> list[int]:
    """The batch of a competitor that dies with it."""
    doomed = store.compete(
        queue, query, worker="doomed", batch_size=batch_size, lease_seconds=SHORT, stop_when_caught_up=True
    )
    with closing(doomed):
        return places(next(doomed, ()))


def test_those_who_compete_share_all_matches_with_none_twice_and_none_missing(store: Store, queue: str) -> None:
    expected = 60
    got: list[int] = []
    deadline = time.monotonic() + PATIENCE_SECONDS

    def work(number: int) -> None:
        while len(got) < expected:
            assert time.monotonic() < deadline, "some are missing"
            for batch in store.compete(
                queue, tagged("x"), worker=f"worker-{number}", batch_size=3, stop_when_caught_up=True
            ):
                got.extend(places(batch))

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work, number) for number in range(3)]
        for _ in range(expected // 6):
            store.append([happened("A", "x" if n % 2 else "y") for n in range(12)])
        for one in working:
            one.result(PATIENCE_SECONDS)
    assert sorted(got) == places(store.read(tagged("x")))
    assert rest(store, queue, tagged("x")) == []


def test_one_that_dies_leaves_its_batch_to_others_one_by_one(store: Store, queue: str, until: Until) -> None:
    lost = list(store.append([happened("A", "x") for _ in range(4)]).positions)
    assert abandoned(store, queue, tagged("x")) == lost

    def another() -> Any:
        competing = store.compete(queue, tagged("x"), worker="another", batch_size=5, stop_when_caught_up=True)
        first = next(competing, None)
        return first and (first, competing)

    first, competing = until(another)
    new = list(store.append([happened("A", "x") for _ in range(2)]).positions)
    batches = [first, *competing]
    # What may have killed its worker is given with nothing beside it; what is new is not.
    assert [places(batch) for batch in batches] == [*([position] for position in lost), new]


def test_one_that_is_late_takes_nothing_from_those_who_have_its_events_now(
    store: Store, queue: str, until: Until
) -> None:
    first, second = store.append([happened("A"), happened("A")]).positions
    late = store.compete(queue, worker="late", lease_seconds=SHORT, stop_when_caught_up=True)
    assert places(next(late)) == [first, second]
    until(lambda: abandoned(store, queue) == [first])
    # It asks on, which settles nothing: the one was another's by then, and the other one is to be given again.
    assert places(next(late)) == [second]
    late.close()
    got: list[int] = []
    until(lambda: got.extend(rest(store, queue)) or len(got) >= 2)
    assert sorted(got) == [first, second]


def test_what_is_no_match_is_passed_over_and_done(store: Store, queue: str) -> None:
    store.append([happened("A") for _ in range(30)])
    (wanted,) = store.append(happened("A", "x")).positions
    store.append([happened("A") for _ in range(5)])
    assert rest(store, queue, tagged("x"), 4) == [wanted]
    # Whoever asks the queue for everything now comes too late for what was before.
    assert rest(store, queue) == []
    (new,) = store.append(happened("A")).positions
    assert rest(store, queue) == [new]


def test_two_queues_do_not_compete_with_each_other(store: Store, queue: str) -> None:
    store.append([happened("A") for _ in range(3)])
    assert rest(store, queue) == rest(store, f"{queue}-other") == places(store.read())


def test_a_batch_is_as_large_as_was_asked_for_and_in_order(store: Store, queue: str) -> None:
    store.append([happened("A", data="x" * 1000) for _ in range(10)])
    batches = list(store.compete(queue, worker="w", batch_size=4, stop_when_caught_up=True))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert [event for batch in batches for event in batch] == store.read()


def test_a_competitor_waits_for_what_comes(store: Store, queue: str) -> None:
    with closing(store.compete(queue, tagged("x"), worker="w")) as waiting:
        for _ in range(3):
            store.append([happened("A"), happened("A", "x")])
            assert places(soon(waiting)) == [store.head()]


@pytest.mark.parametrize("kind", HERE)
def test_a_queue_goes_on_where_it_was_when_its_store_is_opened_again(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, queue: str, until: Until
) -> None:
    name = f"store-{next(_numbers)}"
    with opened(kind, request.getfixturevalue, tmp_path) as stores:
        store = stores.create_store(name)
        done = list(store.append([happened("A") for _ in range(3)]).positions)
        assert rest(store, queue) == done
        open_ = list(store.append([happened("A") for _ in range(4)]).positions)
        assert abandoned(store, queue, batch_size=2) == open_[:2]
    # Not only in somebody's hands, which would not be seen before their lease ends.
    if kind.startswith("postgres"):
        deliveries = request.getfixturevalue("log").deliveries(queue, status="done")
        assert [one.position for one in deliveries] == done
    else:
        with closing(sqlite3.connect(tmp_path / "stores" / f"{name}.sqlite")) as connection:
            assert connection.execute("select position from claimed_event").fetchall() == [(p,) for p in open_[:2]]
    with opened(kind, request.getfixturevalue, tmp_path) as stores:
        store = stores.store(name)
        got: list[int] = []
        until(lambda: got.extend(rest(store, queue)) or len(got) >= 4)
        assert sorted(got) == open_


def test_what_kills_every_worker_is_given_up_after_five_tries_while_others_go_on(
    store: Store, queue: str, until: Until
) -> None:
    deadly, *others = store.append([happened("Deadly"), *[happened("A") for _ in range(3)]]).positions
    tries: list[int] = []
    done: set[int] = set()

    def work() -> Any:
        with closing(
            store.compete(queue, worker="doomed", batch_size=1, lease_seconds=SHORT, stop_when_caught_up=True)
        ) as competing:
            for (event,) in competing:
                if event.type == "Deadly":
                    tries.append(event.position)
                    break
                done.add(event.position)

    until(lambda: work() or len(tries) == 5)
    others.append(store.append(happened("A")).position)
    until(lambda: work() or done == set(others))
    assert tries == [deadly] * 5
    (letter,) = until(lambda: work() or store.dead_letters(queue))
    assert tries == [deadly] * 5
    assert (letter.position, letter.topic, letter.key, letter.type) == (deadly, store.topic, None, "Deadly")
    assert (letter.attempts, letter.last_error) == (5, "lease expired")
    assert [(one["attempt"], one["worker"], one["error"]) for one in letter.history] == [
        (number, "doomed", "lease expired") for number in range(1, 6)
    ]
    assert letter.died_at > store.read()[0].published_at
    assert store.dead_letters(queue, positions=[others[0]]) == store.dead_letters(queue, after=deadly) == []
    assert store.dead_letters(queue, positions=[deadly]) == [letter]


def test_a_dead_letter_that_is_redriven_is_given_again_with_a_new_set_of_tries(
    store: Store, queue: str, until: Until
) -> None:
    first, second = store.append([happened("A"), happened("A")]).positions
    until(lambda: abandoned(store, queue, batch_size=1) is None or len(store.dead_letters(queue)) == 2)
    assert store.redrive(queue, positions=[second + 1]) == 0
    assert store.redrive(queue, positions=[second]) == 1
    assert [letter.position for letter in store.dead_letters(queue)] == [first]
    until(lambda: abandoned(store, queue) is None or len(store.dead_letters(queue)) == 2)
    assert [(letter.attempts, len(letter.history)) for letter in store.dead_letters(queue)] == [(5, 5), (5, 10)]
    assert store.redrive(queue) == 2
    assert store.dead_letters(queue) == []
    assert sorted(rest(store, queue)) == [first, second]
    assert rest(store, queue) == []


def test_a_queue_that_is_not_there_has_no_dead_letters(store: Store) -> None:
    with pytest.raises(QueueNotFound):
        store.dead_letters("no-such-queue")
    with pytest.raises(QueueNotFound):
        store.redrive("no-such-queue")


def test_the_tries_of_several_together_are_no_tries_of_each(store: Store, queue: str, until: Until) -> None:
    positions = list(store.append([happened("A") for _ in range(2)]).positions)
    assert abandoned(store, queue) == positions
    tries: Counter[int] = Counter()
    until(lambda: tries.update(abandoned(store, queue)) or tries.total() == 10)
    assert tries == dict.fromkeys(positions, 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "invalid batch_size"),
        ({"batch_size": -1}, "invalid batch_size"),
        ({"lease_seconds": 0.0}, "invalid lease_seconds"),
        ({"lease_seconds": -1.0}, "invalid lease_seconds"),
        ({"lease_seconds": 86_401.0}, "invalid lease_seconds"),
        ({"lease_seconds": float("inf")}, "invalid lease_seconds"),
        ({"lease_seconds": float("nan")}, "invalid lease_seconds"),
        ({"worker": ""}, "worker name"),
        ({"worker": "x" * 201}, "worker name"),
        ({"worker": "a\0b"}, "worker name"),
        ({"queue": ""}, "queue name"),
        ({"queue": "x" * 201}, "queue name"),
        ({"queue": "a\0b"}, "queue name"),
    ],
    ids=str,
)
def test_what_nobody_can_compete_with_is_refused(store: Store, options: dict[str, Any], says: str) -> None:
    if isinstance(store, RpcStore) and options == {"batch_size": 0}:
        pytest.skip("nothing is not said there")
    store.append(happened())
    with pytest.raises(InvalidRequest, match=says):
        next(store.compete(**{"queue": f"queue-{next(_numbers)}", "worker": "w", **options}))


def test_names_of_any_letters_and_the_longest_lease_will_do(store: Store) -> None:
    store.append(happened())
    competing = store.compete(f"{next(_numbers)}".rjust(200, "ü"), worker="ü" * 200, lease_seconds=86_400.0)
    with closing(competing):
        assert len(next(competing)) == 1


# --- in files alone ----------------------------------------------------------------------------------------------


def test_a_competitor_that_finds_nothing_leaves_the_one_writer_alone(
    tmp_path: Path, queue: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.client.eventstore.subscribe.REAP_SECONDS", 0.0)
    looks: list[Any] = []
    writes: list[Any] = []
    with SqliteStores(tmp_path) as stores:
        store = stores.create_store("s")
        store.append([happened("A", "x"), happened("A")])
        assert len(rest(store, queue, tagged("x"))) == 1
        file = store._access.file
        look, write = store._look, file.transaction
        monkeypatch.setattr(store, "_look", lambda *asked: looks.append(1) or look(*asked))
        monkeypatch.setattr(file, "transaction", lambda: writes.append(1) or write())
        competing = store.compete(queue, tagged("x"), worker="w")
        waiting = threading.Thread(target=next, args=(competing,), daemon=True)
        waiting.start()
        until(lambda: len(looks) > 20)
        assert writes == []
        store.append(happened("A", "x"))
        join(waiting)


def test_a_batch_from_a_file_is_bounded_in_bytes(tmp_path: Path, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with SqliteStores(tmp_path) as stores:
        store = stores.create_store("s")
        store.append([happened("A", data="x" * 1000) for _ in range(5)])
        monkeypatch.setattr("headwater.eventstore.sqlite_queues.MAX_BYTES", 2 * size_of(store.read()[0]))
        batches = list(store.compete(queue, worker="w", stop_when_caught_up=True))
        assert [len(batch) for batch in batches] == [2, 2, 1]
        assert places(*batches) == [1, 2, 3, 4, 5]


def test_what_another_took_since_it_was_found_is_not_taken_again(tmp_path: Path, queue: str) -> None:
    with SqliteStores(tmp_path) as stores:
        store = stores.create_store("s")
        store.append([happened("A") for _ in range(2)])
        store._open_queue(queue)
        found = store._look(queue, EVERYTHING, 1)
        assert found is not None
        first = store._take(found, "first", 0.0)
        assert first is not None
        assert store._take(found, "second", 30.0) is None
        # And the same of what is to be given again.
        store._reap(queue)
        again = store._look(queue, EVERYTHING, 1)
        assert again is not None
        assert again.again
        assert store._take(again, "first", 30.0)
        assert store._take(again, "second", 30.0) is None
        assert rest(store, queue) == [2]


def test_a_file_of_an_earlier_form_is_refused(tmp_path: Path) -> None:
    with SqliteStores(tmp_path) as stores:
        stores.create_store("s")
    with closing(sqlite3.connect(tmp_path / "s.sqlite")) as connection:
        connection.execute("pragma user_version = 2")
    with SqliteStores(tmp_path) as stores, pytest.raises(SchemaMismatch, match="pre-release format 2"):
        stores.store("s")
