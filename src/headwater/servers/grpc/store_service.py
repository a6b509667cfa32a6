"""The service EventStore: append one by one or in a stream, read by query, subscribe, compete."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import psycopg

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.observability.metrics import ERROR, logger
from headwater.servers.grpc import convert
from headwater.servers.grpc.backends import Backend, Store
from headwater.servers.grpc.generated import headwater_pb2 as pb
from headwater.servers.grpc.interceptor import Call

# So many appends of one stream are under way at most, and so many bytes; what comes then waits with its sender.
WINDOW_APPENDS: Final = 256
WINDOW_BYTES: Final = 16_777_216


class EventStoreService:
    """Every method is one of the protocol; its promise is there."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def create_store(self, request: pb.CreateStoreRequest, call: Call) -> pb.CreateStoreResponse:
        call.need("create", "topic", request.store)
        await self._backend.create(request.store, if_missing=request.if_missing)
        return pb.CreateStoreResponse()

    async def list_stores(self, request: pb.ListStoresRequest, call: Call) -> pb.ListStoresResponse:
        names = await self._backend.stores()
        return pb.ListStoresResponse(stores=[name for name in names if call.caller.may("describe", "topic", name)])

    async def append(self, request: pb.AppendRequest, call: Call) -> pb.AppendResponse:
        call.need("write", "topic", request.store)
        store = await self._backend.store(request.store)
        appended = await store.append(
            [convert.new_store_event(event) for event in request.events],
            convert.condition(request),
            patience_seconds=call.patience_seconds(),
        )
        return convert.append_response(appended)

    async def append_stream(
        self, requests: AsyncIterator[pb.AppendStreamRequest], call: Call
    ) -> AsyncIterator[pb.AppendStreamResponse]:
        window = Window()
        reader = asyncio.create_task(self._take(requests, call, window))
        try:
            while verdicts := await window.next_verdicts():
                yield pb.AppendStreamResponse(verdicts=verdicts)
            # Why no more are taken, if it is not that there are none.
            await reader
        finally:
            await window.give_up(reader)

    async def _take(self, requests: AsyncIterator[pb.AppendStreamRequest], call: Call, window: Window) -> None:
        """Begin every append of the stream, as far as there is room."""
        name = ""
        store: Store | None = None
        try:
            async for request in requests:
                if request.store and name and request.store != name:
                    raise InvalidRequest("a stream appends to one event store", hint="Open another stream for another.")
                name = name or request.store
                call.need_still("write", "topic", name)
                store = store or await self._backend.store(name)
                share = request.ByteSize() // max(len(request.appends), 1)
                for append in request.appends:
                    await window.room_for(share)
                    window.begin(_verdict(store, append, call), share)
        finally:
            window.begin_no_more()

    async def read_matching(self, request: pb.ReadMatchingRequest, call: Call) -> pb.ReadMatchingResponse:
        call.need("read", "topic", request.store)
        store = await self._backend.store(request.store)
        page = await store.read_page(
            convert.query(request.query),
            after=request.after,
            before=request.before if request.HasField("before") else None,
            backwards=request.backwards,
            batch_size=convert.within(request.batch_size, 100, convert.MAX_READ, "a batch"),
            max_bytes=convert.within(request.max_bytes, convert.MAX_READ_BYTES, convert.MAX_READ_BYTES, "max_bytes"),
            epoch=request.epoch or None,
        )
        return pb.ReadMatchingResponse(events=map(convert.store_event_message, page.events), epoch=page.epoch)

    async def latest(self, request: pb.LatestRequest, call: Call) -> pb.LatestResponse:
        call.need("read", "topic", request.store)
        store = await self._backend.store(request.store)
        latest = await store.latest(convert.query(request.query))
        return pb.LatestResponse(
            items=[
                pb.LatestOfItem(event=None if event is None else convert.store_event_message(event))
                for event in latest.events
            ],
            position=latest.position,
            epoch=latest.epoch,
        )

    async def count(self, request: pb.CountRequest, call: Call) -> pb.CountResponse:
        call.need("read", "topic", request.store)
        store = await self._backend.store(request.store)
        before = request.before if request.HasField("before") else None
        return pb.CountResponse(
            count=await store.count(convert.query(request.query), after=request.after, before=before)
        )

    async def head(self, request: pb.HeadRequest, call: Call) -> pb.HeadResponse:
        call.need("read", "topic", request.store)
        position, epoch = await (await self._backend.store(request.store))._end()
        return pb.HeadResponse(position=position, epoch=epoch)

    async def subscribe(self, request: pb.SubscribeRequest, call: Call) -> AsyncIterator[pb.SubscribeResponse]:
        call.need("read", "topic", request.store)
        store = await self._backend.store(request.store)
        async with self._backend.names.holding(request.store, request.subscriber_name, call):
            pages = store.subscribe_pages(
                convert.query(request.query),
                after=request.after if request.HasField("after") else None,
                epoch=request.epoch or None,
                from_end=request.from_end,
                batch_size=convert.within(request.batch_size, convert.MAX_STREAMED, convert.MAX_STREAMED, "a batch"),
                max_bytes=convert.PARCEL_BYTES,
                stop_when_caught_up=request.stop_when_caught_up,
            )
            async with aclosing(pages):  # type: ignore[type-var]
                async for page in pages:
                    call.need_still("read", "topic", request.store)
                    for parcel in convert.parcels(map(convert.store_event_message, page.events)):
                        yield pb.SubscribeResponse(events=parcel, epoch=page.epoch)

    async def compete(
        self, requests: AsyncIterator[pb.CompeteRequest], call: Call
    ) -> AsyncIterator[pb.CompeteResponse]:
        asked = aiter(requests)
        first = await anext(asked, None)
        if first is None:
            return
        _need_to_compete(first, call)
        store = await self._backend.store(first.store)
        if not await store._has_group(first.group):
            call.need("create", "group", first.group)
        batches = store.compete(
            first.group,
            convert.query(first.query),
            worker=first.worker,
            batch_size=convert.within(first.batch_size, 100, convert.MAX_STREAMED, "a batch"),
            lease_seconds=first.lease_seconds if first.HasField("lease_seconds") else None,
            stop_when_caught_up=first.stop_when_caught_up,
        )
        async with aclosing(batches):  # type: ignore[type-var]
            async for events in batches:
                for parcel in convert.parcels(map(convert.store_event_message, events)):
                    # It may have taken long until there was something to give, and as long until more is asked for.
                    _need_to_compete(first, call)
                    yield pb.CompeteResponse(events=parcel)
                    request = await anext(asked, None)
                    if request is None:
                        # Nothing is said of what was given: it is another's when its lease ends.
                        return
                    _refuse_another(first, request)
                    _need_to_compete(first, call)

    async def dead_letters(self, request: pb.DeadLettersRequest, call: Call) -> pb.DeadLettersResponse:
        call.need("read", "group", request.group)
        store = await self._backend.store(request.store)
        letters = await store.dead_letters(
            request.group,
            positions=list(request.positions) or None,
            after=request.after,
            batch_size=convert.within(request.batch_size, 100, convert.MAX_STREAMED, "a batch"),
        )
        return pb.DeadLettersResponse(letters=map(convert.dead_letter_message, letters))

    async def redrive(self, request: pb.RedriveRequest, call: Call) -> pb.RedriveResponse:
        call.need("alter", "group", request.group)
        if request.all == bool(request.positions):
            raise InvalidRequest("say which dead letters: positions, or all")
        positions = None if request.all else list(request.positions)
        count = await self._backend.redrive(request.store, request.group, positions, call.caller.account)
        return pb.RedriveResponse(count=count)

    async def open_store_cursor(self, request: pb.OpenStoreCursorRequest, call: Call) -> pb.OpenCursorResponse:
        call.need("read", "group", request.cursor)
        store = await self._backend.store(request.store)
        start_after, epoch = await store._resume(request.epoch or None, request.start_after)
        return pb.OpenCursorResponse(position=await store._open_cursor(request.cursor, start_after), epoch=epoch)

    async def advance_store_cursor(self, request: pb.AdvanceStoreCursorRequest, call: Call) -> pb.AdvanceCursorResponse:
        call.need("read", "group", request.cursor)
        store = await self._backend.store(request.store)
        await store._move_cursor(request.cursor, request.from_position, request.to_position, request.epoch or None)
        return pb.AdvanceCursorResponse()


def _need_to_compete(request: pb.CompeteRequest, call: Call) -> None:
    call.need_still("read", "topic", request.store)
    call.need_still("read", "group", request.group)


def _refuse_another(first: pb.CompeteRequest, request: pb.CompeteRequest) -> None:
    if request.store not in ("", first.store) or request.group not in ("", first.group):
        raise InvalidRequest("a stream competes in one group of one event store", hint="Open another stream.")


async def _verdict(store: Store, append: pb.NumberedAppend, call: Call) -> pb.Verdict:
    try:
        appended = await store.append(
            [convert.new_store_event(event) for event in append.events],
            convert.condition(append),
            patience_seconds=call.patience_seconds(),
        )
    except HeadwaterError as error:
        return pb.Verdict(number=append.number, refused=convert.refusal(error))
    except psycopg.Error as error:
        logger.error("an append failed", extra={ERROR: str(error)}, exc_info=error)
        return pb.Verdict(number=append.number, refused=convert.refusal(HeadwaterError("something unexpected")))
    return pb.Verdict(number=append.number, appended=convert.append_response(appended))


class Window:
    """The appends of one stream that are under way, in the order in which they came."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[asyncio.Task[pb.Verdict], int]] = deque()
        self._bytes = 0
        self._complete = False
        self._came = asyncio.Event()
        self._went = asyncio.Event()

    async def room_for(self, size: int) -> None:
        """Wait until one more may be under way. One alone always may, however large."""
        while self._under_way and (len(self._under_way) >= WINDOW_APPENDS or self._bytes + size > WINDOW_BYTES):
            self._went.clear()
            await self._went.wait()

    def begin(self, append: Any, size: int) -> None:
        self._under_way.append((asyncio.create_task(append), size))
        self._bytes += size
        self._came.set()

    def begin_no_more(self) -> None:
        self._complete = True
        self._came.set()

    async def next_verdicts(self) -> list[pb.Verdict]:
        """The next verdicts, as many as there are; none: all were told."""
        while not self._under_way:
            if self._complete:
                return []
            self._came.clear()
            await self._came.wait()
        await asyncio.wait([self._under_way[0][0]])
        verdicts = []
        while self._under_way and self._under_way[0][0].done():
            task, size = self._under_way.popleft()
            self._bytes -= size
            verdicts.append(task.result())
        self._went.set()
        return verdicts

    async def give_up(self, reader: asyncio.Task[None]) -> None:
        """Nobody waits for verdicts any more."""
        tasks = [reader, *(task for task, _ in self._under_way)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
