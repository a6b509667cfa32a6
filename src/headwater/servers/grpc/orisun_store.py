"""Orisun's service EventStore on the event stores of the log."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.metadata import version
from typing import Final

from headwater.errors import AppendConflict, InvalidRequest
from headwater.eventstore.query import EVERYTHING, size_of
from headwater.servers.grpc import orisun_convert as messages
from headwater.servers.grpc.backends import Backend, Store
from headwater.servers.grpc.convert import MAX_CHUNK_BYTES
from headwater.servers.grpc.errors import ResourceNotFound, ResponseTooLarge
from headwater.servers.grpc.generated import eventstore_pb2 as pb
from headwater.servers.grpc.interceptor import GrpcCall

MAX_COUNT: Final = 10_000
# A shorter page would look like the last one to the client, so a larger page is an error.
MAX_PAGE_BYTES: Final = 60_000_000
MAX_STREAM_BATCH: Final = 500
BACKENDS: Final = {"postgres": pb.STORAGE_BACKEND_POSTGRES, "sqlite": pb.STORAGE_BACKEND_SQLITE}


class OrisunEventStore:
    """The methods of the service; the proto file documents each."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._version = f"headwater {version('headwater')}"
        self._node = f"{socket.gethostname()}-{os.getpid()}"

    async def save_events(self, request: pb.SaveEventsRequest, call: GrpcCall) -> pb.WriteResult:
        store = await self._boundary(request.boundary, "write", call)
        if not request.events:
            raise InvalidRequest("events are missing: expected at least one")
        events, condition = messages.new_events(request.events), messages.condition(request)
        try:
            appended = await store.append(events, condition, patience_seconds=call.patience_seconds())
        except AppendConflict as conflict:
            raise messages.conflict(request, conflict.actual_position) from None
        return pb.WriteResult(log_position=messages.position(appended.position))

    async def get_events(self, request: pb.GetEventsRequest, call: GrpcCall) -> pb.GetEventsResponse:
        store = await self._boundary(request.boundary, "read", call)
        if not 1 <= request.count <= MAX_COUNT:
            raise InvalidRequest(f"invalid count {request.count}: expected 1 to {MAX_COUNT}")
        messages.check_enum(pb.Direction, request.direction, "direction")
        query = messages.query(request.query)
        if query is None:
            return pb.GetEventsResponse()
        backwards = request.direction == pb.DESC
        after, before = 0, None
        if request.HasField("from_position"):
            if backwards:
                before = messages.last_before(request.from_position)
            else:
                after = messages.first_from(request.from_position)
        events = await store.read(
            query,
            after=after,
            before=before,
            backwards=backwards,
            batch_size=request.count,
            max_bytes=MAX_PAGE_BYTES,
        )
        page = pb.GetEventsResponse(events=map(messages.event, events))
        # Payloads that are not JSON grow by a third (base64).
        if (len(events) < request.count and sum(map(size_of, events)) >= MAX_PAGE_BYTES) or (
            len(events) > 1 and page.ByteSize() > MAX_PAGE_BYTES
        ):
            raise ResponseTooLarge(
                f"{request.count} events exceed the maximum message size",
                hint=f"Request at most {max(len(events) // 2, 1)} events.",
            )
        return page

    async def get_latest_by_criteria(
        self, request: pb.GetLatestByCriteriaRequest, call: GrpcCall
    ) -> pb.GetLatestByCriteriaResponse:
        store = await self._boundary(request.boundary, "read", call)
        query, indexes = messages.latest_query(request.criteria)
        return messages.latest_response(request.criteria, indexes, await store.latest(query))

    async def catch_up_subscribe_to_events(
        self, request: pb.CatchUpSubscribeToEventStoreRequest, call: GrpcCall
    ) -> AsyncIterator[pb.Event]:
        store = await self._boundary(request.boundary, "read", call)
        query = messages.query(request.query)
        from_end = not request.HasField("after_position")
        async with self._backend.names.hold(request.boundary, request.subscriber_name, call):
            batches = store.subscribe_batches(
                EVERYTHING if query is None else query,
                after=None if from_end else messages.first_after(request.after_position),
                from_end=from_end,
                batch_size=MAX_STREAM_BATCH,
                max_bytes=MAX_CHUNK_BYTES,
            )
            async with aclosing(batches):  # type: ignore[type-var]
                async for events in batches:
                    call.require_now("read", "topic", request.boundary)
                    if query is None:
                        continue
                    for event in events:
                        yield messages.event(event)

    async def ping(self, request: pb.PingRequest, call: GrpcCall) -> pb.PingResponse:
        await self._backend.ping()
        return pb.PingResponse()

    async def get_server_info(self, request: pb.GetServerInfoRequest, call: GrpcCall) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version=self._version,
            backend=BACKENDS[self._backend.kind],
            node_id=self._node,
            capabilities=[
                pb.SERVER_CAPABILITY_COMMAND_CONTEXT_CONSISTENCY,
                pb.SERVER_CAPABILITY_CATCH_UP_SUBSCRIPTIONS,
                pb.SERVER_CAPABILITY_INDEX_MANAGEMENT,
                pb.SERVER_CAPABILITY_BOUNDARY_CATALOG,
                pb.SERVER_CAPABILITY_GRPC_HEALTH,
            ],
        )

    async def create_index(self, request: pb.CreateIndexRequest, call: GrpcCall) -> pb.CreateIndexResponse:
        if not request.name or not request.fields or not all(field.json_key for field in request.fields):
            raise InvalidRequest("invalid index: expected a name, and at least one field with a json_key")
        store = await self._boundary(request.boundary, "alter", call)
        wanted = messages.index(request)
        await store.create_index(
            wanted.name,
            dict(zip(wanted.fields, wanted.kinds, strict=True)),
            conditions=wanted.conditions,
            combine=wanted.combine,
        )
        return pb.CreateIndexResponse()

    async def drop_index(self, request: pb.DropIndexRequest, call: GrpcCall) -> pb.DropIndexResponse:
        store = await self._boundary(request.boundary, "alter", call)
        if not await store.drop_index(request.name):
            raise _no_index(request.boundary, request.name)
        return pb.DropIndexResponse()

    async def list_indexes(self, request: pb.ListIndexesRequest, call: GrpcCall) -> pb.ListIndexesResponse:
        store = await self._boundary(request.boundary, "describe", call)
        return pb.ListIndexesResponse(indexes=map(messages.index_definition, await store.indexes()))

    async def get_index(self, request: pb.GetIndexRequest, call: GrpcCall) -> pb.GetIndexResponse:
        store = await self._boundary(request.boundary, "describe", call)
        for index in await store.indexes():
            if index.name == request.name:
                return pb.GetIndexResponse(index=messages.index_definition(index))
        raise _no_index(request.boundary, request.name)

    async def _boundary(self, name: str, action: str, call: GrpcCall) -> Store:
        if not name:
            raise InvalidRequest("boundary is missing")
        call.require(action, "topic", name)
        return await self._backend.store(name)


def _no_index(boundary: str, name: str) -> ResourceNotFound:
    return ResourceNotFound(
        f'index "{name}" of boundary "{boundary}" does not exist', hint="See ListIndexes.", detail={"index": name}
    )
