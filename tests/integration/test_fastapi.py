"""Does a FastAPI application publish, commit and stream as the integration promises, on a real server?"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psycopg
import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

import headwater
from headwater import NewEvent
from headwater.integrations.fastapi import Log, Transaction, event_stream, lifespan
from patience import PATIENCE_SECONDS


class Server(uvicorn.Server):
    """Says when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    assert server.ready.wait(PATIENCE_SECONDS)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        listening.close()
        assert not thread.is_alive()


def application(dsn: str, topic: str, **options: object) -> FastAPI:
    app = FastAPI(lifespan=lifespan(dsn))

    @app.get("/log")
    async def which(log: Log) -> int:
        return id(log)

    @app.post("/orders/{number}")
    async def place(number: int, log: Log, transaction: Transaction) -> dict[str, int]:
        await transaction.execute("insert into orders values (%s)", (number,))
        await log.publish(topic, {"id": number}, connection=transaction)
        if number < 0:
            raise HTTPException(409, "no such order")
        return {"id": number}

    @app.get("/orders")
    async def stream(request: Request, log: Log) -> Response:
        return await event_stream(request, log, topic, **options)  # type: ignore[arg-type]

    return app


@pytest.fixture
def orders(connection: psycopg.Connection) -> psycopg.Connection:
    connection.execute("drop table if exists orders")
    connection.execute("create table orders (id integer, unique (id) deferrable initially deferred)")
    return connection


@pytest.fixture
def client(dsn: str, topic: str) -> Iterator[httpx.Client]:
    with served(application(dsn, topic)) as address, httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
        yield client


@dataclass
class Frame:
    """One event of a stream, or a comment."""

    id: str | None = None
    event: str | None = None
    data: str | None = None


@contextmanager
def stream(client: httpx.Client, last_event_id: str | None = None) -> Iterator[Callable[[], Frame]]:
    """A function that returns the next frame."""
    headers = {} if last_event_id is None else {"last-event-id": last_event_id}
    with client.stream("GET", "/orders", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()

        def next_frame() -> Frame:
            frame = Frame()
            for line in lines:
                if not line:
                    return frame
                name, _, value = line.partition(": ")
                if name in ("id", "event", "data"):
                    setattr(frame, name, value)
            raise AssertionError("the stream ended")

        yield next_frame


def test_all_requests_share_one_log_which_the_lifespan_closes(
    dsn: str, topic: str, connection: psycopg.Connection
) -> None:
    sessions = "select count(*) from pg_stat_activity where application_name = 'headwater fastapi'"
    with served(application(dsn, topic)) as address:
        assert len({httpx.get(f"{address}/log").text for _ in range(3)}) == 1
        assert connection.execute(sessions).fetchone() != (0,)
    # A closed session ends in its own time.
    for _ in range(int(PATIENCE_SECONDS * 20)):
        if connection.execute(sessions).fetchone() == (0,):
            return
        connection.execute("select pg_sleep(0.05)")
    raise AssertionError("the log was not closed")


def test_rows_and_events_of_a_path_operation_commit_together(
    log: headwater.Headwater, topic: str, orders: psycopg.Connection, client: httpx.Client
) -> None:
    assert client.post("/orders/1").json() == {"id": 1}
    assert client.post("/orders/-2").status_code == 409
    assert orders.execute("select id from orders").fetchall() == [(1,)]
    assert [event.data for event in log.read(topic)] == [{"id": 1}]


def test_a_commit_that_fails_is_an_error_of_the_request(
    log: headwater.Headwater, topic: str, orders: psycopg.Connection, client: httpx.Client
) -> None:
    """The constraint is checked by the commit, after the path operation has returned."""
    assert client.post("/orders/1").status_code == 200
    assert client.post("/orders/1").status_code == 500
    assert [event.data for event in log.read(topic)] == [{"id": 1}]


def test_a_stream_sends_new_events_and_goes_on_after_the_last_one(
    log: headwater.Headwater, topic: str, client: httpx.Client
) -> None:
    log.publish(topic, {"id": 0})
    with stream(client) as next_frame:
        opening = next_frame()
        assert opening.id is not None
        log.publish(topic, {"id": 1}, type="placed")
        first = next_frame()
    assert first.data is not None
    assert (first.event, json.loads(first.data)["data"], json.loads(first.data)["topic"]) == (
        "placed",
        {"id": 1},
        topic,
    )
    log.publish_batch(topic, [NewEvent({"id": 2}), NewEvent({"id": 3})])
    for resumed, expected in ((opening, [1, 2, 3]), (first, [2, 3])):
        with stream(client, resumed.id) as next_frame:
            assert next_frame().id == resumed.id
            frames = [next_frame() for _ in expected]
        assert [json.loads(frame.data or "")["data"]["id"] for frame in frames] == expected


def test_a_stream_from_a_position_sends_only_what_is_selected(log: headwater.Headwater, dsn: str, topic: str) -> None:
    log.publish_batch(topic, [NewEvent({"id": n}, type="placed") for n in range(5)])
    app = application(
        dsn, topic, after=0, named=False, heartbeat_seconds=0.05, where=lambda event: event.data["id"] in (1, 3)
    )
    last = log.read(topic)[-1].position
    with served(app) as address, httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
        with stream(client) as next_frame:
            assert next_frame().id == "0"
            frames: list[Frame] = []
            # Heartbeats may come first; one after the events moves the id past those that are not selected.
            while not frames or frames[-1].data is not None or frames[-1].id is None:
                frames.append(next_frame())
        assert [json.loads(frame.data)["data"]["id"] for frame in frames if frame.data is not None] == [1, 3]
        assert {frame.event for frame in frames} == {None}
        assert (frames[-1].id or "").startswith(f"{last}.")


def test_a_stream_that_cannot_begin_says_why(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection, client: httpx.Client
) -> None:
    first, second = log.publish_batch(topic, [NewEvent(1), NewEvent(2)])
    assert client.get("/orders", headers={"last-event-id": "soon"}).status_code == 400
    connection.execute("update headwater_internal.topic set expired_to = %s where name = %s", (second, topic))
    assert client.get("/orders", headers={"last-event-id": str(first)}).status_code == 410


def test_an_application_without_the_lifespan_is_told_so() -> None:
    app = FastAPI()

    @app.get("/log")
    async def which(log: Log) -> None: ...

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop.example") as client:
            await client.get("/log")

    with pytest.raises(headwater.InvalidRequest, match=r"lifespan=headwater\.integrations"):
        asyncio.run(ask())
