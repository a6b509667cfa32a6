"""The service Queue: claim, settle, extend."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final

from headwater.aio import AsyncHeadwater
from headwater.errors import InvalidRequest
from headwater.queue.model import Lease
from headwater.queue.settings import QueueSettings
from headwater.servers.grpc import convert
from headwater.servers.grpc.generated import headwater_pb2 as pb
from headwater.servers.grpc.interceptor import GrpcCall
from headwater.setting_definitions import definitions

MAX_WAIT_SECONDS: Final = 60.0
# How long a waiting claim waits at most before it claims again, whether or not it was woken.
MAX_CLAIM_WAIT_SECONDS: Final = 1.0
REAP_SECONDS: Final = 1.0


class QueueService:
    """The methods of the service; the proto file documents each."""

    def __init__(self, log: AsyncHeadwater) -> None:
        self._log = log
        # Queue -> when this process last returned the events of its expired leases.
        self._reaped: dict[str, float] = {}

    async def create_queue(self, request: pb.CreateQueueRequest, call: GrpcCall) -> pb.CreateQueueResponse:
        # All who may read the queue get the events of its topics, so the creator must be able to read those.
        call.require("create", "consumer", request.queue)
        for topic in request.topics:
            call.require("read", "topic", topic)
        await self._log.create_queue(
            request.queue,
            list(request.topics) or None,
            after=request.after if request.HasField("after") else None,
            from_end=request.from_end,
            if_missing=request.if_missing,
            **convert.settings_of(request, definitions(QueueSettings)),
        )
        return pb.CreateQueueResponse()

    async def claim(self, request: pb.ClaimRequest, call: GrpcCall) -> pb.ClaimResponse:
        call.require("read", "consumer", request.queue)
        _check_claim(request)
        deadline = time.monotonic() + request.wait_seconds
        waiter = self._log.watcher.waiter(queue=request.queue)
        await self._run_maintenance(request.queue)
        while True:
            lease = await self._log.claim(
                request.queue,
                worker=request.worker,
                batch_size=request.batch_size or 1,
                lease_seconds=request.lease_seconds if request.HasField("lease_seconds") else None,
            )
            left = deadline - time.monotonic()
            if lease is not None or left <= 0:
                return pb.ClaimResponse(lease=None if lease is None else convert.lease_message(lease))
            await waiter.wait(min(left, MAX_CLAIM_WAIT_SECONDS))

    async def settle(self, request: pb.SettleRequest, call: GrpcCall) -> pb.SettleResponse:
        call.require("read", "consumer", request.queue)
        lease = _lease(request.queue, request.token)
        outcomes = convert.outcomes(request.outcomes)
        if not request.HasField("next"):
            await self._log.settle(lease, outcomes, rest_done=request.rest_done)
            return pb.SettleResponse()
        following = request.next
        if not request.rest_done:
            raise InvalidRequest("next requires rest_done: the lease must end before the next batch is claimed")
        if following.queue not in ("", request.queue):
            raise InvalidRequest("invalid next.queue: expected the same queue")
        _check_claim(following)
        claimed = await self._log.settle_and_claim(
            lease,
            outcomes,
            worker=following.worker,
            batch_size=following.batch_size or 1,
            lease_seconds=following.lease_seconds if following.HasField("lease_seconds") else None,
        )
        return pb.SettleResponse(next=None if claimed is None else convert.lease_message(claimed))

    async def extend(self, request: pb.ExtendRequest, call: GrpcCall) -> pb.ExtendResponse:
        call.require("read", "consumer", request.queue)
        expires_at = await self._log.extend(
            _lease(request.queue, request.token),
            lease_seconds=request.lease_seconds if request.HasField("lease_seconds") else None,
        )
        return pb.ExtendResponse(expires_at=expires_at)

    async def _run_maintenance(self, queue: str) -> None:
        """Return the events of expired leases to the queue, at most once a second."""
        await self._log.run_maintenance()
        now = time.monotonic()
        if now - self._reaped.get(queue, 0.0) < REAP_SECONDS:
            return
        await self._log.reap(queue)
        self._reaped = {one: at for one, at in self._reaped.items() if now - at < REAP_SECONDS} | {queue: now}


def _check_claim(request: pb.ClaimRequest) -> None:
    convert.check_range(request.batch_size, 1, convert.MAX_READ, "batch_size")
    if not 0 <= request.wait_seconds <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"invalid wait_seconds {request.wait_seconds:g}: expected 0 to {MAX_WAIT_SECONDS:g}")


def _lease(queue: str, token: int) -> Lease:
    """A lease with only its queue and token, which is enough to settle or extend it."""
    return Lease(queue, token, datetime.fromtimestamp(0, UTC), ())
