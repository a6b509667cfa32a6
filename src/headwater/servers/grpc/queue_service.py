"""The service Queue: claim, settle, extend."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Final

from headwater.aio import AsyncHeadwater
from headwater.errors import InvalidRequest
from headwater.model import Lease
from headwater.servers.grpc import convert
from headwater.servers.grpc.generated import headwater_pb2 as pb
from headwater.servers.grpc.interceptor import Call

MAX_WAIT_SECONDS: Final = 60.0
SHORTEST_WAIT_SECONDS: Final = 0.005
LONGEST_WAIT_SECONDS: Final = 0.1
REAP_SECONDS: Final = 1.0


class QueueService:
    """Every method is one of the protocol; its promise is there."""

    def __init__(self, log: AsyncHeadwater) -> None:
        self._log = log
        # When the leases of a group that ran out were last given to others by this process.
        self._reaped: dict[str, float] = {}

    async def create_group(self, request: pb.CreateGroupRequest, call: Call) -> pb.CreateGroupResponse:
        # What a group is bound to, all who may read the group get.
        call.need("create", "group", request.group)
        for topic in request.topics:
            call.need("read", "topic", topic)
        await self._log.create_group(
            request.group,
            list(request.topics) or None,
            after=request.after if request.HasField("after") else None,
            from_end=request.from_end,
            lease_seconds=request.lease_seconds if request.HasField("lease_seconds") else None,
            max_attempts=request.max_attempts if request.HasField("max_attempts") else None,
            ordered_keys=request.ordered_keys if request.HasField("ordered_keys") else None,
            if_missing=request.if_missing,
        )
        return pb.CreateGroupResponse()

    async def claim(self, request: pb.ClaimRequest, call: Call) -> pb.ClaimResponse:
        call.need("read", "group", request.group)
        _refuse_bad_claim(request)
        deadline = time.monotonic() + request.wait_seconds
        wait = SHORTEST_WAIT_SECONDS
        while True:
            await self._do_upkeep(request.group)
            lease = await self._log.claim(
                request.group,
                worker=request.worker,
                batch_size=request.batch_size or 1,
                lease_seconds=request.lease_seconds if request.HasField("lease_seconds") else None,
            )
            left = deadline - time.monotonic()
            if lease is not None or left <= 0:
                return pb.ClaimResponse(lease=None if lease is None else convert.lease_message(lease))
            await asyncio.sleep(min(wait, left))
            wait = min(wait * 2, LONGEST_WAIT_SECONDS)

    async def settle(self, request: pb.SettleRequest, call: Call) -> pb.SettleResponse:
        call.need("read", "group", request.group)
        lease = _lease(request.group, request.token)
        ends = convert.outcomes(request.outcomes)
        if not request.HasField("next"):
            await self._log.settle(lease, ends, rest_done=request.rest_done)
            return pb.SettleResponse()
        following = request.next
        if not request.rest_done:
            raise InvalidRequest("the next batch can be claimed once the lease ends: say rest_done")
        if following.group not in ("", request.group):
            raise InvalidRequest("the next batch is of the same group")
        _refuse_bad_claim(following)
        claimed = await self._log.settle_and_claim(
            lease,
            ends,
            worker=following.worker,
            batch_size=following.batch_size or 1,
            lease_seconds=following.lease_seconds if following.HasField("lease_seconds") else None,
        )
        return pb.SettleResponse(next=None if claimed is None else convert.lease_message(claimed))

    async def extend(self, request: pb.ExtendRequest, call: Call) -> pb.ExtendResponse:
        call.need("read", "group", request.group)
        expires_at = await self._log.extend(
            _lease(request.group, request.token),
            lease_seconds=request.lease_seconds if request.HasField("lease_seconds") else None,
        )
        return pb.ExtendResponse(expires_at=expires_at)

    async def _do_upkeep(self, group: str) -> None:
        """What the dead have left goes to the living, once a second whoever asks."""
        await self._log.do_upkeep()
        now = time.monotonic()
        if now - self._reaped.get(group, 0.0) < REAP_SECONDS:
            return
        await self._log.reap(group)
        self._reaped = {one: at for one, at in self._reaped.items() if now - at < REAP_SECONDS} | {group: now}


def _refuse_bad_claim(request: pb.ClaimRequest) -> None:
    convert.within(request.batch_size, 1, convert.MAX_READ, "a batch")
    if not 0 <= request.wait_seconds <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"a claim waits for 0 to {MAX_WAIT_SECONDS:g} seconds, not {request.wait_seconds:g}")


def _lease(group: str, token: int) -> Lease:
    """As much of a lease as proves it."""
    return Lease(group, token, datetime.fromtimestamp(0, UTC), ())
