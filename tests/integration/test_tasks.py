"""Do declared tasks run in workers, with their arguments, and are those refused that cannot run?"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import psycopg
import pytest

import headwater
from headwater import App, Dead, Retry, aio, errors
from headwater.integrations.tasks import Tasks
from headwater.testing import drain
from patience import PATIENCE_SECONDS

WHEN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
NUMBER = UUID("12345678-1234-5678-1234-567812345678")


@dataclass
class Address:
    """An argument that JSON has as an object."""

    city: str


@pytest.fixture
def tasks(log: headwater.Headwater, topic: str) -> Tasks:
    return Tasks(topic, log=log)


def dead_reasons(log: headwater.Headwater, queue: str) -> list[str | None]:
    return [letter.last_error for letter in log.dead_letters(queue)]


@pytest.mark.parametrize("kind", ["async", "blocking"])
def test_a_deferred_task_runs_with_its_arguments(
    log: headwater.Headwater, dsn: str, topic: str, tasks: Tasks, kind: str
) -> None:
    seen: list[Any] = []
    if kind == "async":

        @tasks.task(queue=topic)
        async def greet(name: str, *, times: int = 1) -> str:
            seen.append((name, times))
            return "the result is ignored"

        greet.defer("Ada")
        greet.defer(name="Bo", times=2)
        assert asyncio.run(greet("Cy")) == "the result is ignored"
    else:

        @tasks.task(queue=topic, name="greet")
        def greet_blocking(name: str, *, times: int = 1) -> str:
            seen.append((name, times))
            return "the result is ignored"

        greet_blocking.defer("Ada")
        asyncio.run(greet_blocking.defer_async(name="Bo", times=2))
        assert greet_blocking("Cy") == "the result is ignored"

    assert seen.pop() == ("Cy", 1)
    assert seen == []
    assert drain(tasks.app, dsn).done == 2
    assert sorted(seen) == [("Ada", 1), ("Bo", 2)]
    assert [(event.type, event.routing_key, event.data) for event in log.read(topic)] == [
        ("greet", topic, {"name": "Ada"}),
        ("greet", topic, {"name": "Bo", "times": 2}),
    ]


def test_arguments_keep_the_types_of_the_annotations(dsn: str, topic: str, tasks: Tasks) -> None:
    seen: list[Any] = []

    @tasks.task(queue=topic)
    def ship(
        at: datetime,
        number: UUID,
        price: Decimal,
        address: Address | None,
        wait: timedelta,
        speed: Literal["slow", "fast"],
        parts: list[int],
        **more: Any,
    ) -> None:
        seen.append((at, number, price, address, wait, speed, parts, more))

    ship.defer(WHEN, NUMBER, Decimal("1.10"), Address("Bern"), timedelta(seconds=2), "fast", [1], note={"n": 1})
    assert drain(tasks.app, dsn).done == 1
    assert seen == [
        (WHEN, NUMBER, Decimal("1.10"), Address("Bern"), timedelta(seconds=2), "fast", [1], {"note": {"n": 1}})
    ]


def test_each_queue_gets_its_own_tasks(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    tasks = Tasks(topic, app=app, log=log)
    seen: list[str] = []

    @tasks.task(queue=f"{topic}-mail", max_attempts=3)
    def send() -> None:
        seen.append("send")

    @tasks.task(queue=f"{topic}-mail", concurrency=2)
    def receipt() -> None:
        seen.append("receipt")

    @tasks.task(queue=f"{topic}-reports")
    def report() -> None:
        seen.append("report")

    for one in (send, receipt, report):
        one.defer()
    assert {one.queue: (one.name, one.concurrency) for one in app.workers} == {
        f"{topic}-mail": ("send, receipt", 2),
        f"{topic}-reports": ("report", 1),
    }
    assert drain(app, dsn) == drain_result(done=3)
    assert sorted(seen) == ["receipt", "report", "send"]
    assert log.queue(f"{topic}-mail").max_attempts == 3
    # A second start finds the bindings of the first one.
    assert drain(app, dsn) == drain_result(done=0)
    assert [binding.pattern for binding in log.bindings(f"{topic}-mail")] == [f"{topic}-mail"]


def drain_result(*, done: int) -> Any:
    from headwater.queue.drain import Drained

    return Drained(done, 0, 0)


def test_a_task_is_deferred_with_the_transaction(
    log: headwater.Headwater, dsn: str, topic: str, tasks: Tasks, connection: psycopg.Connection
) -> None:
    @tasks.task(queue=topic)
    def pack(order: int) -> None: ...

    with connection.transaction():
        pack.configure(connection=connection).defer(1)
    with connection.transaction() as transaction:
        pack.configure(connection=connection).defer(2)
        raise psycopg.Rollback(transaction)

    async def defer() -> None:
        async with await aio.connect(dsn) as own:
            tasks.use(own)
            async with own.transaction() as transaction:
                await pack.configure(connection=transaction).defer_async(3)
            await pack.defer_async(4)

    asyncio.run(defer())
    assert [event.data for event in log.read(topic)] == [{"order": 1}, {"order": 3}, {"order": 4}]


def test_a_task_is_deferred_with_key_id_and_delay(log: headwater.Headwater, topic: str, tasks: Tasks) -> None:
    @tasks.task(queue=topic)
    def pack(order: int) -> None: ...

    keyed = pack.configure(key="ada", event_id=f"{topic}-1")
    assert keyed.defer(1) == keyed.defer(1)
    assert keyed.configure(event_id=None, delay=timedelta(hours=1)).defer(2) is None
    [event] = log.read(topic)
    assert (event.key, event.event_id, event.data) == (b"ada", f"{topic}-1", {"order": 1})
    [scheduled] = [one for one in log.scheduled() if one.topic == topic]
    assert (scheduled.key, scheduled.type) == (b"ada", "pack")
    assert keyed.event(3) == headwater.NewEvent(
        {"order": 3}, key="ada", type="pack", routing_key=topic, event_id=f"{topic}-1"
    )


def test_arguments_that_do_not_fit_are_refused_when_the_task_is_deferred(
    log: headwater.Headwater, topic: str, tasks: Tasks
) -> None:
    @tasks.task(queue=topic)
    def pack(order: int) -> None: ...

    with pytest.raises(errors.InvalidRequest, match=r"do not fit task pack.*\n.*pack\(order"):
        pack.defer()  # type: ignore[call-arg]
    with pytest.raises(errors.InvalidRequest, match="unexpected keyword"):
        asyncio.run(pack.defer_async(1, box=2))  # type: ignore[call-arg]
    with pytest.raises(errors.InvalidEvent, match="cannot be encoded"):
        pack.defer(object())  # type: ignore[arg-type]
    assert log.read(topic) == []


def test_an_event_that_no_task_can_run_is_a_dead_letter(
    log: headwater.Headwater, dsn: str, topic: str, tasks: Tasks
) -> None:
    seen: list[Any] = []

    @tasks.task(queue=topic, max_attempts=5)
    def pack(order: UUID) -> None:
        seen.append(order)

    @tasks.task(queue=topic)
    def ship() -> None: ...

    log.publish(topic, {}, type="renamed", routing_key=topic)
    log.publish(topic, {}, routing_key=topic)
    log.publish(topic, {"box": 1}, type="pack", routing_key=topic)
    log.publish(topic, {"order": "no number"}, type="pack", routing_key=topic)
    log.publish(topic, [1], type="pack", routing_key=topic)
    log.publish(topic, b"\xff", type="pack", routing_key=topic)
    log.publish(topic, {"order": str(NUMBER)}, type="pack", routing_key=topic)
    drained = drain(tasks.app, dsn)
    assert (drained.done, drained.dead, drained.retrying) == (1, 6, 0)
    reasons = dead_reasons(log, topic)
    for expected in (
        f'unknown task "renamed": queue "{topic}" has the tasks pack, ship',
        f'an event without a type: queue "{topic}" has the tasks pack, ship',
        "the arguments do not fit task pack: missing a required argument: 'order'",
        "the arguments do not fit task pack: the payload is not a JSON object",
    ):
        assert expected in reasons
    assert sum("valid UUID" in (reason or "") for reason in reasons) == 1
    assert seen == [NUMBER]


@pytest.mark.parametrize(
    ("outcome", "attempts"),
    [(lambda: Dead("never"), 1), (lambda: Retry(timedelta(0), "later"), 2), (lambda: 1 / 0, 2)],
    ids=["dead", "retry", "error"],
)
def test_outcomes_and_errors_of_a_task_count(
    log: headwater.Headwater, dsn: str, topic: str, tasks: Tasks, outcome: Callable[[], object], attempts: int
) -> None:
    @tasks.task(queue=topic, max_attempts=2, backoff_seconds=0)
    async def fail() -> object:
        return outcome()

    fail.defer()
    assert drain(tasks.app, dsn, with_retries=True).dead == 1
    assert [letter.attempts for letter in log.dead_letters(topic)] == [attempts]


def test_declarations_that_contradict_each_other_are_refused(topic: str, tasks: Tasks) -> None:
    @tasks.task(queue=topic, max_attempts=3)
    def pack() -> None: ...

    with pytest.raises(errors.InvalidRequest, match="task pack is declared twice"):
        tasks.task(queue=topic)(pack.function)
    with pytest.raises(errors.InvalidRequest, match="different values of max_attempts"):
        tasks.task(queue=topic, max_attempts=4, name="other")(pack.function)
    with pytest.raises(errors.InvalidRequest, match="cannot be given by name"):
        tasks.task(queue=topic)(lambda *orders: None)
    assert [one.name for one in tasks.app.workers] == ["pack"]


def test_the_command_line_works_on_tasks(
    log: headwater.Headwater, dsn: str, topic: str, tmp_path: Path, connection: psycopg.Connection
) -> None:
    """In another process, which defers one more task without being told the database."""
    (tmp_path / "shop_jobs.py").write_text(
        f"""
import asyncio, os
import psycopg
from headwater.integrations.tasks import Tasks

tasks = Tasks("{topic}")

@tasks.task(queue="{topic}")
async def first(number: int) -> None:
    await second.defer_async(number + 1)

@tasks.task(queue="{topic}")
def second(number: int) -> None:
    with psycopg.connect(os.environ["HEADWATER_DSN"]) as connection:
        connection.execute("insert into ran values (%s)", (number,))
        connection.execute("notify ran")
"""
    )
    connection.execute("create table ran (number integer)")
    connection.execute("listen ran")
    log.publish(topic, {"number": 1}, type="first", routing_key=topic)
    command = [sys.executable, "-c", "from headwater.cli import main; main()", "work", "shop_jobs:tasks.app"]
    with subprocess.Popen(command, cwd=tmp_path, env={"HEADWATER_DSN": dsn, "PATH": ""}) as process:
        try:
            assert list(connection.notifies(timeout=PATIENCE_SECONDS, stop_after=1))
        finally:
            process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert connection.execute("select number from ran").fetchall() == [(2,)]
