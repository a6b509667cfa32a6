"""Are the parts of the gRPC server right that decide without doing? The window of a stream, chunks, positions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import PATIENCE_SECONDS

pytest.importorskip("grpc")

import grpc
from grpc_health.v1 import health_pb2

from headwater.errors import HeadwaterError, LogUnavailable
from headwater.eventstore.query import Query, StoreEvent
from headwater.log.model import Event
from headwater.servers.authentication import Principal
from headwater.servers.grpc import convert, orisun_convert, server
from headwater.servers.grpc.generated import eventstore_pb2 as orisun
from headwater.servers.grpc.generated import headwater_pb2 as pb
from headwater.servers.grpc.interceptor import CallAuthenticator, GrpcCall, _streaming, _unary
from headwater.servers.grpc.orisun_store import OrisunEventStore
from headwater.servers.grpc.store_service import MAX_PENDING_APPENDS, MAX_PENDING_BYTES, AppendWindow, EventStoreService
from headwater.servers.grpc.subscriber_names import SubscriberNames

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def in_loop(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await test

    asyncio.run(bounded())


async def turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def verdict(number: int, when: asyncio.Event | None = None) -> pb.Verdict:
    if when is not None:
        await when.wait()
    return pb.Verdict(number=number)


@pytest.mark.parametrize(("count", "size"), [(MAX_PENDING_APPENDS, 1), (2, MAX_PENDING_BYTES // 2)])
def test_a_full_window_waits_until_a_verdict_is_told(count: int, size: int) -> None:
    async def test() -> None:
        window = AppendWindow()
        for number in range(count):
            await window.wait_for_room(size)
            window.begin(verdict(number), size)
        waiting = asyncio.create_task(window.wait_for_room(size))
        await turn()
        assert not waiting.done()
        assert [one.number for one in await window.next_verdicts()] == list(range(count))
        await waiting

    in_loop(test())


def test_one_append_alone_has_room_however_large() -> None:
    async def test() -> None:
        window = AppendWindow()
        await window.wait_for_room(10 * MAX_PENDING_BYTES)
        window.begin(verdict(1), 10 * MAX_PENDING_BYTES)
        waiting = asyncio.create_task(window.wait_for_room(1))
        await turn()
        assert not waiting.done()
        await window.next_verdicts()
        await waiting

    in_loop(test())


def test_verdicts_are_told_in_the_order_of_the_appends_whichever_comes_first() -> None:
    async def test() -> None:
        window = AppendWindow()
        first, third = asyncio.Event(), asyncio.Event()
        window.begin(verdict(1, first), 1)
        window.begin(verdict(2), 1)
        window.begin(verdict(3, third), 1)
        telling = asyncio.create_task(window.next_verdicts())
        await turn()
        assert not telling.done()
        first.set()
        assert [one.number for one in await telling] == [1, 2]
        window.close()
        third.set()
        assert [one.number for one in await window.next_verdicts()] == [3]
        assert await window.next_verdicts() == []

    in_loop(test())


def test_nothing_is_under_way_once_a_window_is_given_up() -> None:
    async def test() -> None:
        window = AppendWindow()
        for number in range(3):
            window.begin(verdict(number, asyncio.Event()), 1)
        reader = asyncio.create_task(asyncio.sleep(60))
        await window.cancel(reader)  # type: ignore[arg-type]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    in_loop(test())


parts = st.tuples(st.integers(0, 700_000), st.integers(0, 60_000), st.integers(0, 100))


@given(st.lists(parts, min_size=1, max_size=30), st.integers(1, 20))
def test_parcels_hold_all_events_in_order_and_fit_into_messages(sizes: list[tuple[int, int, int]], times: int) -> None:
    events = [
        convert.event_message(
            Event(n, "t", 0, None, None, None, None, {"m": "x" * metadata}, None, b"x" * payload, None, NOW)
        )
        for n, (payload, metadata, _) in enumerate(sizes * times)
    ]
    chunks = list(convert.split_into_chunks(events))
    assert [event for chunk in chunks for event in chunk] == events
    for chunk in chunks:
        assert len(chunk) == 1 or pb.FollowResponse(events=chunk).ByteSize() <= convert.MAX_CHUNK_BYTES
    stored = [
        convert.store_event_message(
            StoreEvent(n, n, "id", "A", ("t" * 250,) * tags, {"m": "x" * metadata}, None, b"x" * payload, NOW)
        )
        for n, (payload, metadata, tags) in enumerate(sizes)
    ]
    for chunk in convert.split_into_chunks(stored):
        assert len(chunk) == 1 or pb.SubscribeResponse(events=chunk).ByteSize() <= convert.MAX_CHUNK_BYTES


class Noting:
    """An event store that notes what a subscriber asks for, and has nothing."""

    def __init__(self) -> None:
        self.names = SubscriberNames()
        self.asked: dict[str, Any] = {}

    async def store(self, name: str) -> Any:
        return self

    async def subscribe_batches(self, query: Query, **options: Any) -> Any:
        self.asked = options
        for _ in ():
            yield

    subscribe_pages = subscribe_batches


def test_what_is_in_hand_for_a_subscriber_is_about_a_message() -> None:
    async def test() -> None:
        backend: Any = Noting()
        call = GrpcCall(Principal(None, None), None, None)
        async for _ in EventStoreService(backend).subscribe(pb.SubscribeRequest(store="s"), call):
            pass
        assert backend.asked.pop("max_bytes") == convert.MAX_CHUNK_BYTES
        async for _ in OrisunEventStore(backend).catch_up_subscribe_to_events(
            orisun.CatchUpSubscribeToEventStoreRequest(boundary="s"), call
        ):
            pass
        assert backend.asked.pop("max_bytes") == convert.MAX_CHUNK_BYTES

    in_loop(test())


@given(st.integers(1, 50), st.integers(-2, 52), st.integers(-2, 52))
def test_positions_are_pairs_in_their_order(of: int, commit: int, prepare: int) -> None:
    asked = orisun.Position(commit_position=commit, prepare_position=prepare)
    pair, limit = (of, of), (commit, prepare)
    assert (of > orisun_convert.first_from(asked)) == (pair >= limit)
    assert (of < orisun_convert.last_before(asked)) == (pair <= limit)
    assert (of > orisun_convert.first_after(asked)) == (pair > limit)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["eventType", "a", "{", '"', ""]) | st.text(), JSON), st.sampled_from([None, 1]))
def test_a_member_is_cut_out_of_any_object(whole: dict[str, Any], indent: int | None) -> None:
    cut = orisun_convert.without_member(json.dumps(whole, indent=indent), "eventType")
    whole.pop("eventType", None)
    assert json.loads(cut) == whole


class Context:
    """A call of gRPC, of which is noted how it ended."""

    def __init__(self, *shown: tuple[str, str]) -> None:
        self.shown = shown
        self.ended: tuple[Any, str] | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.shown

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: Any) -> None:
        pass

    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> None:
        self.ended = (code, details)
        raise grpc.aio.AbortError


@pytest.mark.parametrize("error", [KeyError(9), RuntimeError("secret"), ZeroDivisionError()])
@pytest.mark.parametrize("around", [_unary, _streaming])
def test_what_nobody_foresaw_is_a_bug_of_ours_and_told_as_one(around: Any, error: Exception) -> None:
    async def answer(request: Any, call: GrpcCall) -> Any:
        raise error

    async def answers(request: Any, call: GrpcCall) -> Any:
        yield 1
        raise error

    async def test() -> None:
        context = Context()
        with pytest.raises(grpc.aio.AbortError):
            await around(CallAuthenticator(None), answer if around is _unary else answers)(None, context)
        assert context.ended == (grpc.StatusCode.INTERNAL, "internal error; see the log of the server")

    in_loop(test())


def test_health_follows_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEALTH_SECONDS", 0.01)
    told: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    class Database:
        error: HeadwaterError | None = None

        async def ping(self) -> None:
            if self.error is not None:
                raise self.error

    class Healthy:
        async def set(self, name: str, status: Any) -> None:
            told.put_nowait((name, status))

    async def test() -> None:
        database: Any = Database()
        watch = asyncio.create_task(server._watch_health(database, Healthy(), ["a.Service"]))
        states = health_pb2.HealthCheckResponse
        for error, status in ((LogUnavailable("gone"), states.NOT_SERVING), (None, states.SERVING)):
            database.error = error
            assert [await told.get(), await told.get()] == [("", status), ("a.Service", status)]
        watch.cancel()

    in_loop(test())
