"""The log in FastAPI: opened with the application, given to path operations, followed as an SSE stream.

`lifespan` opens one log for the application. The dependencies `Log` and `Transaction` give it, or a connection in a
transaction, to path operations. `event_stream` answers with the events of topics as server-sent events.
Invariant: the transaction of a path operation is committed before its response is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, Final, TypedDict, cast

from fastapi import Depends, FastAPI, HTTPException
from psycopg import AsyncConnection
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse

from headwater import aio
from headwater.aio import AsyncHeadwater
from headwater.database.connection import Topics
from headwater.errors import EpochChanged, InvalidRequest, PositionExpired
from headwater.log.model import Event
from headwater.log.payload_hooks import Dumps, Loads
from headwater.log.sse_frames import FrameStyle, ResumePoint, frame, heartbeat_frame, opening_frame
from headwater.log.steps import DeliverStep

RETRY_MS: Final = 1000
MAX_POSITION: Final = 2**63 - 1


class LifespanState(TypedDict):
    """What the lifespan adds to the state of each request."""

    headwater: AsyncHeadwater


def lifespan(
    dsn: str | None = None,
    *,
    pool_size: int = 10,
    application_name: str = "headwater fastapi",
    dumps: Dumps | None = None,
    loads: Loads | None = None,
) -> Callable[[FastAPI], AbstractAsyncContextManager[LifespanState]]:
    """The lifespan of an application: it opens the log at the start and closes it at the end.

    The arguments are those of `headwater.aio.connect`. An application with a lifespan of its own enters this one in it
    and yields its state.
    """

    @asynccontextmanager
    async def open_log(app: FastAPI) -> AsyncIterator[LifespanState]:
        log = await aio.connect(dsn, pool_size=pool_size, application_name=application_name, dumps=dumps, loads=loads)
        async with log:
            yield {"headwater": log}

    return open_log


async def get_log(connection: HTTPConnection) -> AsyncHeadwater:
    """The log that the lifespan opened. A dependency; see `Log`."""
    log = getattr(connection.state, "headwater", None)
    if not isinstance(log, AsyncHeadwater):
        raise InvalidRequest(
            "the application has no log",
            hint="Pass lifespan=headwater.integrations.fastapi.lifespan() to FastAPI, or yield its state from yours.",
        )
    return log


Log = Annotated[AsyncHeadwater, Depends(get_log)]
"""A parameter of a path operation: the log."""


async def get_transaction(log: Log) -> AsyncIterator[AsyncConnection[Any]]:
    """A connection in a transaction, which an exception of the path operation rolls back. A dependency; see
    `Transaction`."""
    async with log.transaction() as connection:
        yield connection


# Not the scope of the request: its transaction would be committed after the response is sent.
Transaction = Annotated[AsyncConnection[Any], Depends(get_transaction, scope="function")]
"""A parameter of a path operation: a connection in a transaction that ends with the path operation."""


async def event_stream(
    connection: HTTPConnection,
    log: AsyncHeadwater,
    topics: Topics,
    *,
    after: int | None = None,
    where: Callable[[Event], bool] | None = None,
    named: bool = True,
    skip_expired: bool = False,
    heartbeat_seconds: float = 15.0,
) -> StreamingResponse:
    """A response with the events of these topics as server-sent events: those after a position, or new ones.

    A client that reconnects with Last-Event-ID, as browsers do, continues after that event. `where` selects events, for
    example those that the user may see. `named`: each event has its type as its event name. Status 410 if retention has
    removed events that the client has not seen, unless `skip_expired`; 400 for an invalid Last-Event-ID.
    """
    point = _resume_point(connection.headers.get("last-event-id"))
    if point is None and after is not None:
        point = ResumePoint(after)
    if point is None:
        state = await log.state(topics)
        point = ResumePoint(state.stable, epoch=state.epoch)
    try:
        # Errors become statuses here: later, the response has begun.
        await log.read(topics, after=point.position, epoch=point.epoch, batch_size=1, skip_expired=skip_expired)
    except PositionExpired as expired:
        raise HTTPException(410, expired.message) from None
    except EpochChanged:
        # The follower goes back to the last position that both epochs share.
        pass
    deliveries = log.follow_deliveries(
        topics, after=point.position, epoch=point.epoch, batch_size=100, skip_expired=skip_expired
    )
    return StreamingResponse(
        _frames(deliveries, point, where, FrameStyle(named), heartbeat_seconds),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


def _resume_point(last_event_id: str | None) -> ResumePoint | None:
    if not last_event_id:
        return None
    point = ResumePoint.parse(last_event_id)
    if point is None or point.position > MAX_POSITION:
        raise HTTPException(400, "invalid Last-Event-ID: expected an id of the stream")
    return point


async def _frames(
    deliveries: AsyncIterator[DeliverStep],
    point: ResumePoint,
    where: Callable[[Event], bool] | None,
    style: FrameStyle,
    heartbeat_seconds: float,
) -> AsyncIterator[bytes]:
    """The frames of a stream. A heartbeat also shows that a client is gone, and moves its Last-Event-ID past events
    that `where` did not select."""
    yield opening_frame(point, retry_ms=RETRY_MS)
    reported = point
    # Not wait_for: a timeout must not cancel the follower.
    next_delivery = asyncio.ensure_future(anext(deliveries))
    try:
        while True:
            done, _ = await asyncio.wait({next_delivery}, timeout=heartbeat_seconds)
            if not done:
                yield heartbeat_frame(point if point != reported else None)
                reported = point
                continue
            delivery = next_delivery.result()
            for event in delivery.events:
                point = ResumePoint(event.position, epoch=delivery.epoch)
                if where is None or where(event):
                    yield frame(event, style=style, epoch=delivery.epoch)
                    reported = point
            next_delivery = asyncio.ensure_future(anext(deliveries))
    finally:
        next_delivery.cancel()
        await asyncio.wait({next_delivery})
        await cast("AsyncGenerator[DeliverStep, None]", deliveries).aclose()
