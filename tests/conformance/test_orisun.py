"""Do clients of Orisun find what they know? Numbers on the wire, positions, criteria, conflicts, status codes."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from raw_messages import fields, message

import headwater
from headwater.eventstore import NewStoreEvent
from patience import PATIENCE_SECONDS

grpc = pytest.importorskip("grpc")
from rpc_servers import rpc_server  # noqa: E402

from headwater.servers.grpc import orisun_convert  # noqa: E402
from headwater.servers.grpc.client import service  # noqa: E402
from headwater.servers.grpc.generated import eventstore_pb2 as pb  # noqa: E402

_numbers = itertools.count()
Until = Callable[[Callable[[], Any]], Any]
START = pb.Position(commit_position=0, prepare_position=0)
EMPTY = pb.Position(commit_position=-1, prepare_position=-1)


@pytest.fixture(scope="module", params=["postgres", "sqlite"])
def channel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = {} if request.param == "sqlite" else {"dsn": request.getfixturevalue("dsn")}
    arguments = () if options else ("--store", f"sqlite:///{tmp_path_factory.mktemp('stores')}")
    with rpc_server(*arguments, **options) as server, grpc.insecure_channel(server.address) as channel:
        channel.backend = request.param
        yield channel


@pytest.fixture
def store(channel: Any) -> Any:
    return service(channel, "orisun.EventStore")


@pytest.fixture
def admin(channel: Any) -> Any:
    return service(channel, "orisun.Admin")


@pytest.fixture
def boundary(channel: Any, admin: Any) -> str:
    """A fresh boundary."""
    name = f"boundary_{next(_numbers)}"
    placement = pb.BoundaryPlacementInput(backend=channel.backend, namespace=name)
    made = admin.CreateBoundary(
        pb.CreateBoundaryRequest(name=name, placement=placement), timeout=PATIENCE_SECONDS
    ).boundary
    assert made.status == pb.BOUNDARY_LIFECYCLE_STATUS_ACTIVE
    return name


def criteria(*queues: dict[str, str]) -> list[pb.Criterion]:
    return [pb.Criterion(tags=[pb.Tag(key=key, value=value) for key, value in queue.items()]) for queue in queues]


def happened(kind: str, data: Any, **parts: str) -> pb.EventToSave:
    return pb.EventToSave(event_id=f"id-{next(_numbers)}", event_type=kind, data=json.dumps(data), **parts)


def save(store: Any, boundary: str, *events: pb.EventToSave, query: pb.SaveQuery | None = None) -> pb.Position:
    request = pb.SaveEventsRequest(boundary=boundary, query=query, events=events)
    return store.SaveEvents(request, timeout=PATIENCE_SECONDS).log_position


def get(store: Any, boundary: str, *queues: dict[str, str], count: int = 100, **parts: Any) -> list[Any]:
    request = pb.GetEventsRequest(boundary=boundary, query=pb.Query(criteria=criteria(*queues)), count=count, **parts)
    return list(store.GetEvents(request, timeout=PATIENCE_SECONDS).events)


def refused(code: Any) -> Any:
    return pytest.raises(grpc.RpcError, match=f"StatusCode.{code.name}\\b")


# --- on the wire -------------------------------------------------------------------------------------------------


def call(channel: Any, method: str, request: bytes) -> dict[int, list[Any]]:
    """A call by numbers alone."""
    return fields(channel.unary_unary(f"/orisun.{method}")(request, timeout=PATIENCE_SECONDS))


def test_events_are_saved_and_read_by_the_numbers_that_orisun_has(channel: Any, boundary: str) -> None:
    def position(commit: int, prepare: int) -> bytes:
        return message((1, commit), (2, prepare))

    def tagged(key: str, value: str) -> bytes:
        return message((1, message((1, key), (2, value))))

    event = message((1, "7f1e"), (2, "Placed"), (3, '{"customer": "c-1"}'), (4, '{"by": "me"}'))
    nothing_yet = message((1, position(-1, -1)), (2, message((1, tagged("customer", "c-1")))))
    saved = call(channel, "EventStore/SaveEvents", message((2, boundary), (3, nothing_yet), (4, event)))
    ((commit,), (prepare,)) = fields(saved[1][0])[1], fields(saved[1][0])[2]
    assert (commit, prepare) > (0, 0)

    query = message((1, tagged("eventType", "Placed")))
    asked = message((1, query), (2, position(commit, prepare)), (3, 10), (4, 1), (5, boundary))
    (read,) = call(channel, "EventStore/GetEvents", asked)[1]
    found = fields(read)
    assert [found[number] for number in (1, 2)] == [[b"7f1e"], [b"Placed"]]
    assert json.loads(found[3][0]) == {"customer": "c-1"}
    assert json.loads(found[4][0]) == {"by": "me"}
    assert fields(found[6][0]) == {1: [commit], 2: [prepare]}
    assert fields(found[7][0])[1][0] > 1_700_000_000
    assert set(found) == {1, 2, 3, 4, 6, 7}

    latest = call(
        channel,
        "EventStore/GetLatestByCriteria",
        message((1, boundary), (2, tagged("customer", "c-1")), (2, tagged("customer", "nobody"))),
    )
    of_customer, of_nobody = map(fields, latest[1])
    assert fields(of_customer[2][0])[1] == [b"7f1e"]
    assert of_customer[1] == [tagged("customer", "c-1")]
    assert 2 not in of_nobody
    assert fields(latest[2][0]) == {1: [commit], 2: [prepare]}
    none = call(channel, "EventStore/GetLatestByCriteria", message((1, boundary), (2, tagged("customer", "nobody"))))
    assert fields(none[2][0]) == {1: [-1], 2: [-1]}


def test_a_subscription_is_asked_for_by_the_numbers_that_orisun_has(channel: Any, store: Any, boundary: str) -> None:
    save(store, boundary, happened("A", {"k": 1}), happened("B", {"k": 2}))
    query = message((1, message((1, message((1, "k"), (2, "2"))))))
    asked = message((1, message((1, 0), (2, 0))), (2, query), (3, "me"), (4, boundary))
    events = channel.unary_stream("/orisun.EventStore/CatchUpSubscribeToEvents")(asked, timeout=PATIENCE_SECONDS)
    assert fields(next(events))[2] == [b"B"]
    events.cancel()


def test_the_server_tells_what_it_is_by_the_numbers_that_orisun_has(channel: Any, boundary: str) -> None:
    told = call(channel, "EventStore/GetServerInfo", b"")
    assert told[1][0].startswith(b"headwater ")
    assert told[4] == [{"postgres": 1, "sqlite": 2}[channel.backend]]
    assert list(told[6][0]) == [1, 2, 3, 4, 5]
    assert call(channel, "EventStore/Ping", b"") == {}
    info = fields(call(channel, "Admin/GetBoundary", message((1, boundary)))[1][0])
    assert (info[1], info[4]) == ([boundary.encode()], [2])
    assert fields(info[3][0])[1] == [channel.backend.encode()]
    listed = [fields(one)[1][0].decode() for one in call(channel, "Admin/ListBoundaries", b"")[1]]
    assert boundary in listed
    assert call(channel, "Admin/GetEventCount", message((1, boundary))) == {}


# --- saving ------------------------------------------------------------------------------------------------------


def test_a_context_that_moved_refuses_and_tells_both_places(store: Any, boundary: str) -> None:
    about = pb.Query(criteria=criteria({"k": "1"}))
    first = save(store, boundary, happened("A", {"k": 1}), query=pb.SaveQuery(subsetQuery=about))
    other = save(store, boundary, happened("A", {"k": 2}))
    # Equal, not at most: the end of the boundary is not where the context is.
    for expected in (None, EMPTY, other, START, pb.Position(commit_position=1 << 40, prepare_position=1 << 40)):
        with refused(grpc.StatusCode.ALREADY_EXISTS) as conflict:
            save(store, boundary, happened("B", {}), query=pb.SaveQuery(subsetQuery=about, expected_position=expected))
        told = EMPTY if expected is None else expected
        actual = first.commit_position
        assert conflict.value.details() == (
            "OptimisticConcurrencyException:StreamVersionConflict: "
            f"Expected ({told.commit_position}, {told.prepare_position}), Actual ({actual}, {actual}) "
            f"[Expected {max(told.commit_position, 0)}, Actual {actual}]"
        )
    moved = pb.SaveQuery(subsetQuery=about, expected_position=first)
    second = save(store, boundary, happened("B", {"k": "1"}), query=moved)
    assert second.commit_position > other.commit_position
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        save(store, boundary, happened("B", {"k": "1"}), query=moved)
    assert [event.event_type for event in get(store, boundary)] == ["A", "A", "B"]


def test_an_empty_context_is_expected_or_it_is_a_conflict(store: Any, boundary: str) -> None:
    never = pb.Query(criteria=criteria({"never": "x"}))
    save(store, boundary, happened("A", {}), query=pb.SaveQuery(subsetQuery=never, expected_position=EMPTY))
    with refused(grpc.StatusCode.ALREADY_EXISTS) as conflict:
        save(store, boundary, happened("A", {}), query=pb.SaveQuery(subsetQuery=never, expected_position=START))
    assert conflict.value.details().endswith("Expected (0, 0), Actual (-1, -1) [Expected 0, Actual 0]")
    everything = pb.SaveQuery(subsetQuery=pb.Query(), expected_position=EMPTY)
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        save(store, boundary, happened("A", {}), query=everything)


def test_without_a_query_the_expected_position_is_ignored(store: Any, boundary: str) -> None:
    save(store, boundary, happened("A", {}))
    for expected in (EMPTY, START, pb.Position(commit_position=77, prepare_position=3)):
        save(store, boundary, happened("A", {}), query=pb.SaveQuery(expected_position=expected))
    assert len(get(store, boundary)) == 4


def test_a_criterion_that_contradicts_itself_matches_nothing(store: Any, boundary: str) -> None:
    save(store, boundary, happened("A", {"k": "1"}))
    never = pb.Criterion(tags=[pb.Tag(key="k", value="1"), pb.Tag(key="k", value="2")])
    kinds = pb.Criterion(tags=[pb.Tag(key="eventType", value="A"), pb.Tag(key="eventType", value="B")])
    nothing = pb.Criterion(tags=[pb.Tag(key="eventType", value="")])
    for query in (pb.Query(criteria=[never]), pb.Query(criteria=[kinds, never, nothing])):
        request = pb.GetEventsRequest(boundary=boundary, query=query, count=10)
        assert list(store.GetEvents(request, timeout=PATIENCE_SECONDS).events) == []
        save(store, boundary, happened("B", {}), query=pb.SaveQuery(subsetQuery=query, expected_position=EMPTY))
        with refused(grpc.StatusCode.ALREADY_EXISTS):
            save(store, boundary, happened("B", {}), query=pb.SaveQuery(subsetQuery=query, expected_position=START))
    asked = pb.GetLatestByCriteriaRequest(boundary=boundary, criteria=[never, *criteria({"k": "1"}), kinds])
    latest = store.GetLatestByCriteria(asked, timeout=PATIENCE_SECONDS)
    assert [result.HasField("event") for result in latest.results] == [False, True, False]


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "events are missing"),
        ([pb.EventToSave(event_id="x", event_type="A", data="{", metadata="{}")], "invalid JSON"),
        ([pb.EventToSave(event_id="x", event_type="A", data="[1]", metadata="{}")], "JSON object"),
        ([pb.EventToSave(event_id="x", event_type="A", data="", metadata="{}")], "invalid JSON"),
        ([pb.EventToSave(event_id="x", event_type="A", data="{}", metadata="7")], "JSON object"),
        ([pb.EventToSave(event_id="x", event_type="A", data="{}", metadata="no")], "invalid JSON"),
        ([pb.EventToSave(event_id="x", event_type="A", data='{"a": "\\u0000"}')], "NUL"),
        ([pb.EventToSave(event_id="x", event_type="A", data='{"a": "\\ud800"}')], "invalid JSON"),
        ([pb.EventToSave(event_id="x", event_type="A", data='{"a": NaN}')], "invalid JSON"),
        ([pb.EventToSave(event_id="x", event_type="A", data='{"a":' * 5000 + "1" + "}" * 5000)], "invalid JSON"),
        ([pb.EventToSave(event_id="x", data="{}")], "event_type"),
    ],
)
def test_what_cannot_be_saved_is_an_invalid_argument(store: Any, boundary: str, events: Any, says: str) -> None:
    good = happened("A", {})
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as error:
        save(store, boundary, *([good, *events] if events else []))
    assert says in error.value.details()
    assert get(store, boundary) == []


def test_the_type_is_no_part_of_the_data_and_found_as_if_it_were(store: Any, boundary: str) -> None:
    data = '{ "a" : 1.50 , "eventType" : {"x": [","]}, "b": 12345678901234567890, "event\\u0054ype":1}'
    save(store, boundary, pb.EventToSave(event_id="x", event_type="Real", data=data))
    (event,) = get(store, boundary, {"eventType": "Real", "a": "1.50"})
    assert event.event_type == "Real"
    assert event.data == '{"a" : 1.50,"b": 12345678901234567890}'
    assert event.metadata == "{}"
    assert get(store, boundary, {"eventType": "x"}) == []


@pytest.mark.parametrize("data", ['{"eventType":1}', '{"eventType" : 1 , "b":{}}', '{"b":"}","eventType":"\\""}'])
def test_a_member_is_cut_out_of_an_object_wherever_it_is(data: str) -> None:
    whole = json.loads(data)
    del whole["eventType"]
    assert json.loads(orisun_convert.without_member(data, "eventType")) == whole


# --- reading -----------------------------------------------------------------------------------------------------


def test_criteria_are_any_of_and_tags_are_all_of(store: Any, boundary: str) -> None:
    save(
        store,
        boundary,
        happened("A", {"x": 1, "y": True}),
        happened("B", {"x": "1"}),
        happened("C", {"x": {"x": "1"}, "y": "true"}),
    )

    def types(*queues: dict[str, str]) -> str:
        return "".join(event.event_type for event in get(store, boundary, *queues))

    assert types() == types({}) == "ABC"
    assert types({"x": "1"}) == "AB"
    assert types({"x": "1", "y": "true"}) == "A"
    assert types({"y": "true"}, {"eventType": "B"}) == "ABC"
    assert types({"eventType": "C", "y": "true"}) == "C"


def test_a_page_begins_with_the_position_asked_for_in_both_directions(store: Any, boundary: str) -> None:
    save(store, boundary, *(happened(str(n), {}) for n in range(4)))
    save(store, boundary, *(happened(str(n), {}) for n in range(4, 7)))
    events = get(store, boundary, from_position=START)
    assert [event.event_type for event in events] == list("0123456")
    assert [event.event_type for event in get(store, boundary, direction=pb.DESC)] == list("6543210")
    places = [(event.position.commit_position, event.position.prepare_position) for event in events]
    assert places == sorted(places)
    assert min(places) > (0, 0)
    at = events[3].position
    assert [event.event_type for event in get(store, boundary, from_position=at, count=2)] == ["3", "4"]
    assert [event.event_type for event in get(store, boundary, from_position=at, count=2, direction=pb.DESC)] == [
        "3",
        "2",
    ]
    # As readers go on: behind, or before, what they have.
    nearby = pb.Position(commit_position=at.commit_position, prepare_position=at.prepare_position + 1)
    assert [event.event_type for event in get(store, boundary, from_position=nearby, count=2)] == ["4", "5"]
    nearby = pb.Position(commit_position=at.commit_position, prepare_position=at.prepare_position - 1)
    assert [e.event_type for e in get(store, boundary, from_position=nearby, count=2, direction=pb.DESC)] == ["2", "1"]
    assert [event.event_type for event in get(store, boundary, from_position=EMPTY, count=1)] == ["0"]
    far = pb.Position(commit_position=(1 << 63) - 1, prepare_position=(1 << 63) - 1)
    assert get(store, boundary, from_position=far) == get(store, boundary, from_position=START, direction=pb.DESC) == []
    assert get(store, boundary, from_position=far, direction=pb.DESC) == events[::-1]


@pytest.mark.parametrize("count", [0, 10_001])
def test_a_count_that_cannot_be_is_an_invalid_argument(store: Any, boundary: str, count: int) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        get(store, boundary, count=count)


def test_the_latest_of_nothing_cannot_be_asked_for(store: Any, boundary: str) -> None:
    for asked in ([], [pb.Criterion()]):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            store.GetLatestByCriteria(
                pb.GetLatestByCriteriaRequest(boundary=boundary, criteria=asked), timeout=PATIENCE_SECONDS
            )


def test_a_page_that_fits_into_no_message_is_refused_and_not_cut(dsn: str, log: headwater.Headwater) -> None:
    kept = log.create_store("large")
    for _ in range(7):
        kept.append([NewStoreEvent("A", {"large": "x" * 950_000}) for _ in range(10)])
    options = [("grpc.max_receive_message_length", -1)]
    with rpc_server(dsn=dsn) as server, grpc.insecure_channel(server.address, options) as channel:
        store = service(channel, "orisun.EventStore")
        assert len(get(store, "large", count=60)) == 60
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as error:
            get(store, "large", count=70)
    assert "Request at most" in error.value.details()


# --- subscribing -------------------------------------------------------------------------------------------------


def subscription(store: Any, boundary: str, name: str, after: Any = START, *queues: dict[str, str]) -> Any:
    request = pb.CatchUpSubscribeToEventStoreRequest(
        boundary=boundary, subscriber_name=name, after_position=after, query=pb.Query(criteria=criteria(*queues))
    )
    return store.CatchUpSubscribeToEvents(request)


def test_a_subscriber_catches_up_and_stays_live_with_one_matcher(store: Any, boundary: str) -> None:
    save(store, boundary, happened("A", {"k": 1}), happened("A", {"k": 2}), happened("A", {"k": "1"}))
    first, _, third = get(store, boundary)
    events = subscription(store, boundary, "one", START, {"k": "1"})
    assert [next(events), next(events)] == [first, third]
    save(store, boundary, happened("B", {"k": 1.0}), happened("B", {"k": 1}))
    assert next(events) == get(store, boundary)[-1]
    events.cancel()
    # Not included.
    behind = subscription(store, boundary, "two", third.position)
    assert next(behind).event_type == "B"
    behind.cancel()


def test_without_a_position_a_subscriber_gets_what_comes(store: Any, boundary: str, until: Until) -> None:
    save(store, boundary, happened("Old", {}))
    got: list[Any] = []
    events = subscription(store, boundary, "", None)
    thread = threading.Thread(target=lambda: got.append(next(events)), daemon=True)
    thread.start()

    # When it is there cannot be seen from here, so events come until it sees one.
    def seen() -> bool:
        save(store, boundary, happened("New", {}))
        return bool(got)

    until(seen)
    assert got[0].event_type == "New"
    events.cancel()


def test_one_subscriber_at_a_time_has_a_name(store: Any, boundary: str, until: Until) -> None:
    save(store, boundary, happened("A", {}))
    first = subscription(store, boundary, "me")
    assert next(first).event_type == "A"
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        next(subscription(store, boundary, "me"))
    other = subscription(store, boundary, "you")
    assert next(other).event_type == "A"
    other.cancel()
    first.cancel()

    def taken_over() -> bool:
        again = subscription(store, boundary, "me")
        try:
            return bool(next(again).event_type == "A")
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            return False
        finally:
            again.cancel()

    until(taken_over)


# --- boundaries and indexes --------------------------------------------------------------------------------------


def test_a_boundary_that_is_not_there_is_not_found(store: Any, admin: Any) -> None:
    with refused(grpc.StatusCode.NOT_FOUND):
        save(store, "nowhere", happened("A", {}))
    with refused(grpc.StatusCode.NOT_FOUND):
        get(store, "nowhere")
    with refused(grpc.StatusCode.NOT_FOUND):
        next(subscription(store, "nowhere", "me"))
    with refused(grpc.StatusCode.NOT_FOUND):
        admin.GetBoundary(pb.GetBoundaryRequest(name="nowhere"), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        get(store, "")


def test_a_number_that_the_protocol_does_not_know_is_an_invalid_argument(store: Any, boundary: str) -> None:
    field = pb.IndexField(json_key="k")
    strange: Any = 9
    for call, request in (
        (store.GetEvents, pb.GetEventsRequest(boundary=boundary, count=1, direction=strange)),
        (
            store.CreateIndex,
            pb.CreateIndexRequest(
                boundary=boundary, name="i", fields=[pb.IndexField(json_key="k", value_type=strange)]
            ),
        ),
        (
            store.CreateIndex,
            pb.CreateIndexRequest(boundary=boundary, name="i", fields=[field], condition_combinator=strange),
        ),
    ):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            call(request, timeout=PATIENCE_SECONDS)


def test_a_boundary_is_made_once_and_can_be_adopted(channel: Any, admin: Any, boundary: str) -> None:
    placement = pb.BoundaryPlacementInput(backend=channel.backend, namespace="public")
    again = pb.CreateBoundaryRequest(name=boundary, placement=placement)
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        admin.CreateBoundary(again, timeout=PATIENCE_SECONDS)
    again.existed_before_catalog = True
    assert admin.CreateBoundary(again, timeout=PATIENCE_SECONDS).boundary.existed_before_catalog
    for wrong in (
        pb.CreateBoundaryRequest(name="no_place"),
        pb.CreateBoundaryRequest(name="7", placement=placement),
        pb.CreateBoundaryRequest(name="a-b", placement=placement),
        pb.CreateBoundaryRequest(name="x" * 64, placement=placement),
    ):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            admin.CreateBoundary(wrong, timeout=PATIENCE_SECONDS)


def test_indexes_are_made_listed_and_dropped(store: Any, boundary: str) -> None:
    save(store, boundary, *(happened("A", {"customer": f"c-{n}"}) for n in range(10)))
    by_customer = pb.CreateIndexRequest(
        boundary=boundary, name="by_customer", fields=[pb.IndexField(json_key="customer")]
    )
    store.CreateIndex(by_customer, timeout=PATIENCE_SECONDS)
    (listed,) = store.ListIndexes(pb.ListIndexesRequest(boundary=boundary), timeout=PATIENCE_SECONDS).indexes
    assert (listed.name, listed.fields[0].json_key, listed.state) == ("by_customer", "customer", pb.INDEX_STATE_READY)
    one = pb.GetIndexRequest(boundary=boundary, name="by_customer")
    assert store.GetIndex(one, timeout=PATIENCE_SECONDS).index == listed
    assert len(get(store, boundary, {"customer": "c-3"})) == 1
    store.DropIndex(pb.DropIndexRequest(boundary=boundary, name="by_customer"), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.NOT_FOUND):
        store.GetIndex(one, timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.NOT_FOUND):
        store.DropIndex(pb.DropIndexRequest(boundary=boundary, name="by_customer"), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        store.CreateIndex(pb.CreateIndexRequest(boundary=boundary, name="without_fields"), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        wrong = pb.IndexCondition(key="x", operator="~", value="1")
        fields = [pb.IndexField(json_key="x")]
        store.CreateIndex(
            pb.CreateIndexRequest(boundary=boundary, name="odd", fields=fields, conditions=[wrong]),
            timeout=PATIENCE_SECONDS,
        )


def test_an_index_of_any_kind_is_kept_as_it_was_asked_for_but_for_the_type(store: Any, boundary: str) -> None:
    save(store, boundary, happened("A", {"amount": 5, "big": True}), happened("A", {"amount": "none", "big": False}))
    big = pb.IndexCondition(key="big", operator="=", value="true")
    of_type = pb.IndexCondition(key="eventType", operator="=", value="A")
    asked = pb.CreateIndexRequest(
        boundary=boundary,
        name="amounts",
        fields=[
            pb.IndexField(json_key="amount", value_type=pb.NUMERIC),
            pb.IndexField(json_key="eventType"),
            pb.IndexField(json_key="at", value_type=pb.TIMESTAMPTZ),
            pb.IndexField(json_key="ok", value_type=pb.BOOLEAN),
        ],
        conditions=[big, of_type],
    )
    store.CreateIndex(asked, timeout=PATIENCE_SECONDS)
    either = pb.CreateIndexRequest(
        boundary=boundary,
        name="either",
        fields=[pb.IndexField(json_key="eventType")],
        conditions=[big, pb.IndexCondition(key="amount", operator=">", value="3")],
        condition_combinator=pb.OR,
    )
    store.CreateIndex(either, timeout=PATIENCE_SECONDS)
    amounts, other = store.ListIndexes(pb.ListIndexesRequest(boundary=boundary), timeout=PATIENCE_SECONDS).indexes
    assert list(amounts.fields) == [asked.fields[0], *asked.fields[2:]]
    assert (list(amounts.conditions), amounts.condition_combinator) == ([big], pb.AND)
    assert (list(other.fields), list(other.conditions)) == (list(either.fields), list(either.conditions))
    assert (other.condition_combinator, other.state) == (pb.OR, pb.INDEX_STATE_READY)
    # What is found does not depend on it.
    assert [len(get(store, boundary, {"amount": amount})) for amount in ("5", "none", "7")] == [1, 1, 0]
    save(store, boundary, happened("A", {"amount": "5"}))
    assert len(get(store, boundary, {"amount": "5", "eventType": "A"})) == 2


def test_what_others_append_is_shown_as_json(dsn: str, log: headwater.Headwater) -> None:
    kept = log.create_store("from_elsewhere")
    kept.append(
        [
            NewStoreEvent("Tagged", {"a": 1}, ["t"]),
            NewStoreEvent("Nothing"),
            NewStoreEvent("Bytes", b"\x00\xff", content_type="application/octet-stream"),
            NewStoreEvent("Unsaid", b"{}"),
            NewStoreEvent("Neither", b"\xff"),
        ]
    )
    with rpc_server(dsn=dsn) as server, grpc.insecure_channel(server.address) as channel:
        events = get(service(channel, "orisun.EventStore"), "from_elsewhere")
    assert [event.data for event in events] == [
        '{"a":1}',
        "{}",
        '{"payload_base64": "AP8="}',
        "{}",
        '{"payload_base64": "/w=="}',
    ]
