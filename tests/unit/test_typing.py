"""Does mypy report handlers, payloads and connections of the wrong types?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import headwater
from patience import PATIENCE_SECONDS

SOURCE = Path(headwater.__file__).parent.parent

# A line that ends with "# wrong" must be reported, and no other line.
HANDLERS = """
from typing import Any

import psycopg

from headwater import App, ClaimedEvent, Dead, Event, Retry

app = App()
batch: bool = bool(app)


@app.worker("orders", queue="one", concurrency=10, max_attempts=3)
async def one(event: ClaimedEvent) -> None: ...

@app.worker("orders", queue="blocking")
def blocking(event: ClaimedEvent) -> Retry | Dead | None:
    return Retry()

@app.worker("orders", queue="untyped", transactional=True)
def untyped(event, connection): ...  # type: ignore

@app.worker("orders", queue="many", batch=True, prefetch=100)
async def many(events: list[ClaimedEvent]) -> dict[int, Retry]:
    return {event.position: Retry() for event in events}

@app.worker("orders", queue="transactional", transactional=True)
async def transactional(event: ClaimedEvent, connection: psycopg.AsyncConnection[Any]) -> None: ...

@app.worker("orders", queue="transactional-blocking", transactional=True)
def transactional_blocking(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None: ...

@app.worker("orders", queue="transactional-batch", transactional=True, batch=True)
async def transactional_batch(events: list[ClaimedEvent], connection: psycopg.AsyncConnection[Any]) -> None: ...

@app.worker("orders", queue="either", batch=batch)
async def either(given: Any) -> None: ...

@app.subscriber("mail", "e.topic = 'orders'")
async def subscriber(event: Event) -> Retry | None: ...

@app.subscriber("mail", "e.topic = 'orders'", batch=True, batch_size=10)
def subscriber_batch(events: list[Event]) -> None: ...


@app.worker("orders", queue="no-connection", transactional=True)  # wrong
async def no_connection(event: ClaimedEvent) -> None: ...

@app.worker("orders", queue="connection")  # wrong
async def with_connection(event: ClaimedEvent, connection: psycopg.AsyncConnection[Any]) -> None: ...

@app.worker("orders", queue="blocking-connection", transactional=True)  # wrong
async def blocking_connection(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None: ...

@app.worker("orders", queue="not-a-batch", batch=True)  # wrong
async def not_a_batch(event: ClaimedEvent) -> None: ...

@app.worker("orders", queue="a-batch")  # wrong
async def a_batch(events: list[ClaimedEvent]) -> None: ...

@app.worker("orders", queue="result")  # wrong
async def result(event: ClaimedEvent) -> int: ...

@app.subscriber("mail", "e.topic = 'orders'")  # wrong
async def subscriber_of_claims(event: ClaimedEvent) -> None: ...

@app.subscriber("mail", "e.topic = 'orders'", batch=True)  # wrong
async def subscriber_without_batch(event: Event) -> None: ...

app.worker("orders", queue="option", concurency=3)  # wrong
"""

TYPED_TOPICS = """
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import assert_type

import headwater
from headwater import ClaimedEvent, TypedEvent, TypedTopic, aio

@dataclasses.dataclass
class Order:
    id: int

orders = TypedTopic("orders", Order)

def publish(log: headwater.Headwater) -> None:
    log.typed(orders).publish(Order(1), key="k")
    log.typed(orders).publish_batch([Order(1), Order(2)])
    log.typed(orders).publish({"id": 1})  # wrong
    log.typed(orders).publish_batch([{"id": 1}])  # wrong

def read(log: headwater.Headwater, claimed: ClaimedEvent) -> None:
    assert_type(log.typed(orders).follow(), Iterator[TypedEvent[Order]])
    for event in log.typed(orders).read():
        assert_type(event.data, Order)
        assert_type(event.position, int)
        print(event.data.sku)  # wrong
    assert_type(orders.load(claimed), Order)

async def read_async(log: aio.AsyncHeadwater) -> None:
    assert_type(log.typed(orders).follow(), AsyncIterator[TypedEvent[Order]])
    async for event in log.typed(orders).follow():
        assert_type(event.data.id, int)
    log.typed(orders).publish(Order(1)).id  # wrong

TypedTopic("orders", int, load=lambda payload: payload.decode())  # wrong
"""

CONNECTIONS = """
from typing import Any

import psycopg
import psycopg2
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session

import headwater
from headwater import aio

def scoped(log: headwater.Headwater, session: scoped_session[Session], engine: sqlalchemy.Engine) -> None:
    log.publish("orders", 1, connection=session)
    log.publish("orders", 1, connection=engine.raw_connection())

def blocking(log: headwater.Headwater, plain: psycopg.Connection[Any], session: Session,
             connection: sqlalchemy.Connection, other: psycopg.AsyncConnection[Any], engine: sqlalchemy.Engine) -> None:
    log.publish("orders", 1, connection=plain)
    log.publish("orders", 1, connection=session)
    log.publish("orders", 1, connection=connection)
    log.publish("orders", 1, connection=other)  # wrong
    log.publish("orders", 1, connection=engine)  # wrong
    log.publish("orders", 1, connection="postgresql://localhost/app")  # wrong

async def asynchronous(log: aio.AsyncHeadwater, plain: psycopg.AsyncConnection[Any], session: AsyncSession,
                       connection: AsyncConnection, other: psycopg.Connection[Any]) -> None:
    await log.publish("orders", 1, connection=plain)
    await log.publish("orders", 1, connection=session)
    await log.publish("orders", 1, connection=connection)
    await log.publish("orders", 1, connection=other)  # wrong
"""

TASKS = """
from collections.abc import Coroutine
from typing import Any, assert_type

from headwater.integrations.tasks import Tasks

tasks = Tasks("tasks")

@tasks.task(queue="mail", max_attempts=3)
async def send(order: int, *, copy_to: str | None = None) -> str:
    return "sent"

@tasks.task(queue="mail", name="pack it")
def pack(order: int) -> None: ...

send.defer(1, copy_to="books")
assert_type(send.configure(key="ada").defer(order=1), int | None)
called: Coroutine[Any, Any, str] = send(1)

async def defer() -> None:
    await pack.defer_async(1)
    await pack.defer_async("1")  # wrong

send.defer("1")  # wrong
send.defer(1, copy="books")  # wrong
send.configure(dely=1)  # wrong
pack.event()  # wrong
tasks.task(queue="mail", max_atempts=3)  # wrong
"""


@pytest.mark.parametrize(
    "program",
    [HANDLERS, TYPED_TOPICS, CONNECTIONS, TASKS],
    ids=["handlers", "topics", "connections", "tasks"],
)
def test_mypy_reports_what_is_wrong(program: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("mypy")
    # Kept between runs: mypy checks the package and its dependencies again only where they have changed.
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("mypy")
    file = tmp_path / "handlers.py"
    file.write_text(program)
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file=", "--strict", "--follow-imports=silent"),
            *("--disable-error-code=empty-body", "--ignore-missing-imports", f"--cache-dir={cache}"),
            str(file),
        ],
        # mypy rejects site-packages here, and does not need it: the package is typed.
        env={"MYPYPATH": str(SOURCE)} if SOURCE.name == "src" else {},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    reported = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    wrong = {number for number, line in enumerate(program.splitlines(), 1) if line.endswith("# wrong")}
    assert reported == wrong, checked.stdout + checked.stderr


def test_the_package_declares_that_it_is_typed() -> None:
    assert (SOURCE / "headwater" / "py.typed").exists()
