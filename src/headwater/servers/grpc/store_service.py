"""The service EventStore: appends (unary or streaming), queries, subscriptions and competing consumers."""

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
from headwater.servers.grpc.interceptor import GrpcCall

# Limits of pending appends of one stream. Above them the server stops reading from the stream.
MAX_PENDING_APPENDS: Final = 256
MAX_PENDING_BYTES: Final = 16_777_216


class EventStoreService:
    """The methods of the service; the proto file documents each."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def create_store(self, request: pb.CreateStoreRequest, call: GrpcCall) -> pb.CreateStoreResponse:
        call.require("create", "topic", request.store)
        await self._backend.create(request.store, if_missing=request.if_missing)
        return pb.CreateStoreResponse()

    async def list_stores(self, request: pb.ListStoresRequest, call: GrpcCall) -> pb.ListStoresResponse:
        names = await self._backend.stores()
        return pb.ListStoresResponse(stores=[name for name in names if call.principal.may("describe", "topic", name)])

    async def append(self, request: pb.AppendRequest, call: GrpcCall) -> pb.AppendResponse:
        call.require("write", "topic", request.store)
        store = await self._backend.store(request.store)
        appended = await store.append(
            [convert.new_store_event(event) for event in request.events],
            convert.condition(request),
            patience_seconds=call.patience_seconds(),
        )
        return convert.append_response(appended)

    async def append_stream(
        self, requests: AsyncIterator[pb.AppendStreamRequest], call: GrpcCall
    ) -> AsyncIterator[pb.AppendStreamResponse]:
        window = AppendWindow()
        reader = asyncio.create_task(self._start_appends(requests, call, window))
        try:
            while verdicts := await window.next_verdicts():
                yield pb.AppendStreamResponse(verdicts=verdicts)
            # Raise the error that ended the reading of the stream, if any.
            await reader
        finally:
            await window.cancel(reader)

    async def _start_appends(
        self, requests: AsyncIterator[pb.AppendStreamRequest], call: GrpcCall, window: AppendWindow
    ) -> None:
        """Start the appends of the stream, within the limits."""
        name = ""
        store: Store | None = None
        try:
            async for request in requests:
                if request.store and name and request.store != name:
                    raise InvalidRequest(
                        "all appends of a stream must be to the same event store", hint="Open another stream."
                    )
                name = name or request.store
                call.require_now("write", "topic", name)
                store = store or await self._backend.store(name)
                share = request.ByteSize() // max(len(request.appends), 1)
                for append in request.appends:
                    await window.wait_for_room(share)
                    window.begin(_verdict(store, append, call), share)
        finally:
            window.close()

    async def read_matching(self, request: pb.ReadMatchingRequest, call: GrpcCall) -> pb.ReadMatchingResponse:
        call.require("read", "topic", request.store)
        store = await self._backend.store(request.store)
        page = await store.read_page(
            convert.query(request.query),
            after=request.after,
            before=request.before if request.HasField("before") else None,
            backwards=request.backwards,
            batch_size=convert.check_range(request.batch_size, 100, convert.MAX_READ, "batch_size"),
            max_bytes=convert.check_range(
                request.max_bytes, convert.MAX_READ_BYTES, convert.MAX_READ_BYTES, "max_bytes"
            ),
            epoch=request.epoch or None,
        )
        return pb.ReadMatchingResponse(events=map(convert.store_event_message, page.events), epoch=page.epoch)

    async def latest(self, request: pb.LatestRequest, call: GrpcCall) -> pb.LatestResponse:
        call.require("read", "topic", request.store)
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

    async def count(self, request: pb.CountRequest, call: GrpcCall) -> pb.CountResponse:
        call.require("read", "topic", request.store)
        store = await self._backend.store(request.store)
        before = request.before if request.HasField("before") else None
        return pb.CountResponse(
            count=await store.count(convert.query(request.query), after=request.after, before=before)
        )

    async def head(self, request: pb.HeadRequest, call: GrpcCall) -> pb.HeadResponse:
        call.require("read", "topic", request.store)
        position, epoch = await (await self._backend.store(request.store))._end()
        return pb.HeadResponse(position=position, epoch=epoch)

    async def subscribe(self, request: pb.SubscribeRequest, call: GrpcCall) -> AsyncIterator[pb.SubscribeResponse]:
        call.require("read", "topic", request.store)
        store = await self._backend.store(request.store)
        async with self._backend.names.hold(request.store, request.subscriber_name, call):
            pages = store.subscribe_pages(
                convert.query(request.query),
                after=request.after if request.HasField("after") else None,
                epoch=request.epoch or None,
                from_end=request.from_end,
                batch_size=convert.check_range(
                    request.batch_size, convert.MAX_STREAM_BATCH, convert.MAX_STREAM_BATCH, "batch_size"
                ),
                max_bytes=convert.MAX_CHUNK_BYTES,
                stop_when_caught_up=request.stop_when_caught_up,
            )
            async with aclosing(pages):  # type: ignore[type-var]
                async for page in pages:
                    call.require_now("read", "topic", request.store)
                    for chunk in convert.split_into_chunks(map(convert.store_event_message, page.events)):
                        yield pb.SubscribeResponse(events=chunk, epoch=page.epoch)

    async def compete(
        self, requests: AsyncIterator[pb.CompeteRequest], call: GrpcCall
    ) -> AsyncIterator[pb.CompeteResponse]:
        incoming = aiter(requests)
        first = await anext(incoming, None)
        if first is None:
            return
        _require_compete(first, call)
        store = await self._backend.store(first.store)
        if not await store.has_queue(first.queue):
            call.require("create", "consumer", first.queue)
        batches = store.compete(
            first.queue,
            convert.query(first.query),
            worker=first.worker,
            batch_size=convert.check_range(first.batch_size, 100, convert.MAX_STREAM_BATCH, "batch_size"),
            lease_seconds=first.lease_seconds if first.HasField("lease_seconds") else None,
            stop_when_caught_up=first.stop_when_caught_up,
        )
        async with aclosing(batches):  # type: ignore[type-var]
            async for events in batches:
                for chunk in convert.split_into_chunks(map(convert.store_event_message, events)):
                    # Check again: permissions may have changed while the stream waited for events or for the client.
                    _require_compete(first, call)
                    yield pb.CompeteResponse(events=chunk)
                    request = await anext(incoming, None)
                    if request is None:
                        # The events were not acknowledged: they are redelivered when the lease expires.
                        return
                    _check_same_queue(first, request)
                    _require_compete(first, call)

    async def dead_letters(self, request: pb.DeadLettersRequest, call: GrpcCall) -> pb.DeadLettersResponse:
        call.require("read", "consumer", request.queue)
        store = await self._backend.store(request.store)
        letters = await store.dead_letters(
            request.queue,
            positions=list(request.positions) or None,
            after=request.after,
            batch_size=convert.check_range(request.batch_size, 100, convert.MAX_STREAM_BATCH, "batch_size"),
        )
        return pb.DeadLettersResponse(letters=map(convert.dead_letter_message, letters))

    async def redrive(self, request: pb.RedriveRequest, call: GrpcCall) -> pb.RedriveResponse:
        call.require("alter", "consumer", request.queue)
        if request.all == bool(request.positions):
            raise InvalidRequest("give exactly one of positions and all")
        positions = None if request.all else list(request.positions)
        count = await self._backend.redrive(request.store, request.queue, positions, call.principal.account)
        return pb.RedriveResponse(count=count)

    async def open_store_cursor(self, request: pb.OpenStoreCursorRequest, call: GrpcCall) -> pb.OpenCursorResponse:
        call.require("read", "consumer", request.cursor)
        store = await self._backend.store(request.store)
        start_after, epoch = await store.resumed_position(request.epoch or None, request.start_after)
        return pb.OpenCursorResponse(position=await store.open_cursor(request.cursor, start_after), epoch=epoch)

    async def advance_store_cursor(
        self, request: pb.AdvanceStoreCursorRequest, call: GrpcCall
    ) -> pb.AdvanceCursorResponse:
        call.require("read", "consumer", request.cursor)
        store = await self._backend.store(request.store)
        await store.move_cursor(request.cursor, request.from_position, request.to_position, request.epoch or None)
        return pb.AdvanceCursorResponse()


def _require_compete(request: pb.CompeteRequest, call: GrpcCall) -> None:
    call.require_now("read", "topic", request.store)
    call.require_now("read", "consumer", request.queue)


def _check_same_queue(first: pb.CompeteRequest, request: pb.CompeteRequest) -> None:
    if request.store not in ("", first.store) or request.queue not in ("", first.queue):
        raise InvalidRequest(
            "all messages of a stream must name the same event store and queue", hint="Open another stream."
        )


async def _verdict(store: Store, append: pb.NumberedAppend, call: GrpcCall) -> pb.Verdict:
    try:
        appended = await store.append(
            [convert.new_store_event(event) for event in append.events],
            convert.condition(append),
            patience_seconds=call.patience_seconds(),
        )
    except HeadwaterError as error:
        return pb.Verdict(number=append.number, refused=convert.refusal(error))
    except psycopg.Error as error:
        logger.error("append failed", extra={ERROR: str(error)}, exc_info=error)
        return pb.Verdict(
            number=append.number, refused=convert.refusal(HeadwaterError("internal error; see the log of the server"))
        )
    return pb.Verdict(number=append.number, appended=convert.append_response(appended))


class AppendWindow:
    """The pending appends of one stream, in the order of arrival."""

    def __init__(self) -> None:
        self._pending: deque[tuple[asyncio.Task[pb.Verdict], int]] = deque()
        self._bytes = 0
        self._closed = False
        self._added = asyncio.Event()
        self._removed = asyncio.Event()

    async def wait_for_room(self, size: int) -> None:
        """Wait until an append of this size may start. A single one may always start, however large."""
        while self._pending and (len(self._pending) >= MAX_PENDING_APPENDS or self._bytes + size > MAX_PENDING_BYTES):
            self._removed.clear()
            await self._removed.wait()

    def begin(self, append: Any, size: int) -> None:
        self._pending.append((asyncio.create_task(append), size))
        self._bytes += size
        self._added.set()

    def close(self) -> None:
        self._closed = True
        self._added.set()

    async def next_verdicts(self) -> list[pb.Verdict]:
        """Wait for the next verdicts and return all that are complete; none: the stream has ended."""
        while not self._pending:
            if self._closed:
                return []
            self._added.clear()
            await self._added.wait()
        await asyncio.wait([self._pending[0][0]])
        verdicts = []
        while self._pending and self._pending[0][0].done():
            task, size = self._pending.popleft()
            self._bytes -= size
            verdicts.append(task.result())
        self._removed.set()
        return verdicts

    async def cancel(self, reader: asyncio.Task[None]) -> None:
        """Cancel all pending appends and the reader."""
        tasks = [reader, *(task for task, _ in self._pending)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
