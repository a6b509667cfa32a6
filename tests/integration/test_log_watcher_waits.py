"""Does every change after which a waiter has something to do wake it, without growth and without a look of its own?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

import headwater
from headwater import NewEvent, aio
from headwater.calls import queues as queue_calls
from headwater.database import log_watcher
from headwater.log import steps as log_steps
from patience import PATIENCE_SECONDS

# Far longer than any of these tests takes.
LONG = 10_000.0


@pytest.fixture(autouse=True)
def woken_only_by_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_steps, "IDLE_SAVE_SECONDS", LONG)


async def reached(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, PATIENCE_SECONDS)

    asyncio.run(bounded())


@dataclass
class Process:
    """A process with one worker, and the handle of another process."""

    own: aio.AsyncHeadwater
    log: headwater.Headwater
    queue: str
    got: list[Any] = field(default_factory=list)

    async def work(self) -> None:
        waiter = self.own.watcher.waiter(queue=self.queue)
        while True:
            lease = await self.own.run(self.claim_call())
            if lease is None:
                await waiter.wait(LONG)
                continue
            self.got += [event.data for event in lease.events]
            await self.own.settle(lease, {}, rest_done=True)

    def claim_call(self) -> Any:
        return queue_calls.claim(self.queue, worker="own", batch_size=1, relaxed=True)

    def lease(self, **options: Any) -> headwater.Lease:
        """Another worker's lease."""
        lease = self.log.claim(self.queue, worker="other", **options)
        assert lease is not None
        return lease

    async def idle(self, waiters: int = 1) -> None:
        """Wait until the worker has found nothing, and waits."""
        quiet = 0
        while quiet < 3:
            looks = self.own.watcher.looks
            await reached(lambda looks=looks: self.own.watcher.looks > looks)  # type: ignore[misc]
            quiet = quiet + 1 if len(self.own.watcher._waiters) == waiters else 0

    async def gets(self, *events: Any) -> None:
        await reached(lambda: sorted(self.got) == sorted(events))


Scenario = Callable[[Process], Awaitable[Callable[[], Any]]]
# Each prepares the queue, and returns what should wake the worker.
SCENARIOS: dict[str, tuple[Scenario, tuple[Any, ...]]] = {}


def scenario(*expected: Any) -> Callable[[Scenario], Scenario]:
    def register(prepare: Scenario) -> Scenario:
        SCENARIOS[prepare.__name__.strip("_").replace("_", " ")] = (prepare, expected)
        return prepare

    return register


@scenario("b")
async def _a_higher_limit_of_events_in_flight(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue], max_in_flight=1)
    p.log.publish_batch(p.queue, [NewEvent("a"), NewEvent("b")])
    p.lease()
    return lambda: p.log.alter_queue(p.queue, max_in_flight=2)


@scenario("b", "a")
async def _a_limit_of_events_in_flight_freed_by_an_expired_lease(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue], max_in_flight=1)
    p.log.publish_batch(p.queue, [NewEvent("b"), NewEvent("a")])
    p.lease(lease_seconds=2)
    return lambda: None


@scenario("a")
async def _an_expired_lease(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue])
    p.log.publish(p.queue, "a")
    p.lease(lease_seconds=2)
    return lambda: None


@scenario("b")
async def _an_event_in_a_topic_that_has_just_been_bound(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue])
    other = p.log.create_topic(f"{p.queue}-other").name

    def act() -> None:
        p.log.bind(p.queue, topic=other)
        p.log.publish(other, "b")

    return act


@scenario("b")
async def _an_event_that_a_new_pattern_selects(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue])
    other = p.log.create_topic(f"{p.queue}-other").name

    def act() -> None:
        p.log.bind(p.queue, pattern=f"{p.queue}.*")
        p.log.publish(other, "b", routing_key=f"{p.queue}.b")

    return act


@scenario("b")
async def _an_ordered_key_freed_by_another_worker(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue], ordered_keys=True)
    p.log.publish_batch(p.queue, [NewEvent("a", key="k"), NewEvent("b", key="k")])
    lease = p.lease()
    return lambda: p.log.ack(lease)


@scenario("a")
async def _a_retry_in_50_ms_by_another_worker(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue])
    p.log.publish(p.queue, "a")
    lease = p.lease()
    return lambda: p.log.nack(lease, *lease.events, error="later", delay=timedelta(milliseconds=50))


@scenario("a")
async def _a_release_by_another_worker(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue])
    p.log.publish(p.queue, "a")
    lease = p.lease()
    return lambda: p.log.release(lease, *lease.events)


@scenario("a")
async def _a_scheduled_event(p: Process) -> Callable[[], Any]:
    p.log.create_queue(p.queue, [p.queue])
    return lambda: p.log.publish(p.queue, "a", delay=timedelta(milliseconds=300))


@scenario("a")
async def _a_queue_that_was_deleted_and_created_again(p: Process) -> Callable[[], Any]:
    p.log.publish(p.queue, "a")
    p.log.create_queue(p.queue, [p.queue], from_end=True)

    def act() -> None:
        p.log.delete_queue(p.queue)
        p.log.create_queue(p.queue, [p.queue])

    return act


@scenario("b")
async def _an_event_after_many_that_are_not_selected(p: Process) -> Callable[[], Any]:
    """More than one claim scans. No event follows."""
    p.log.create_queue(p.queue)
    p.log.bind(p.queue, topic=p.queue, type="wanted")

    def act() -> None:
        events = [NewEvent("x", type="other")] * 50_000
        p.log.publish_many(p.queue, [*events, NewEvent("b", type="wanted")])

    return act


@pytest.mark.parametrize("change", SCENARIOS)
def test_a_worker_is_woken_by(log: headwater.Headwater, dsn: str, topic: str, change: str) -> None:
    prepare, expected = SCENARIOS[change]

    async def test() -> None:
        async with await aio.connect(dsn) as own:
            process = Process(own, log, topic)
            act = await prepare(process)
            worker = asyncio.create_task(process.work())
            await process.idle()
            assert process.got == []
            act()
            started = time.monotonic()
            gets = asyncio.create_task(process.gets(*expected))
            await asyncio.wait({worker, gets}, return_when=asyncio.FIRST_COMPLETED)
            assert not worker.done(), worker.exception()
            print(f"\n{change}: {time.monotonic() - started:.2f} s")
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    run(test())


def test_expired_leases_are_returned_while_other_loops_do_all_of_the_maintenance(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    log.create_queue(topic, [topic])
    log.publish(topic, "a")

    async def test() -> None:
        async with await aio.connect(dsn) as own:
            process = Process(own, log, topic)
            process.lease(lease_seconds=2)
            # As if another loop had always been faster.
            own.shared.maintenance.maintain_at = LONG + time.monotonic()
            own.shared.maintenance.release_at = own.shared.maintenance.cron_schedule_at = LONG + time.monotonic()
            worker = asyncio.create_task(process.work())
            await process.gets("a")
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    run(test())


def test_a_follower_sees_its_cursor_set_back_to_where_it_was_at_the_last_look(
    log: headwater.Headwater, dsn: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = log.publish(topic, "x")
    assert first is not None
    seen: list[Any] = []

    async def test() -> None:
        async with await aio.connect(dsn) as other:

            async def follow() -> None:
                async for event in other.follow(topic, cursor=topic):
                    seen.append(event.data)  # noqa: PERF401

            follower = asyncio.create_task(follow())
            await reached(lambda: seen == ["x"])
            looks = other.watcher.looks
            await reached(lambda: other.watcher.looks > looks + 2)
            # The cursor moves on and is set back, all between two looks.
            monkeypatch.setattr(log_watcher, "LOOK_SECONDS", LONG)
            other.watcher._look_at = time.monotonic() + LONG
            looks = other.watcher.looks
            log.publish(topic, "y")
            await reached(lambda: seen == ["x", "y"])
            await reached(lambda: log.cursors()[0].position > first)
            await reached(lambda: len(other.watcher._waiters) == 1)
            log.set_cursor(topic, position=first)
            assert other.watcher.looks == looks
            monkeypatch.undo()
            other.watcher._look_at = 0.0
            await reached(lambda: seen == ["x", "y", "y"])
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    monkeypatch.setattr(log_steps, "IDLE_SAVE_SECONDS", LONG)
    run(test())


def test_a_worker_waits_out_a_pool_without_a_free_connection(log: headwater.Headwater, dsn: str, topic: str) -> None:
    log.create_queue(topic, [topic])

    async def test() -> None:
        async with await aio.connect(dsn, pool_size=2, connect_timeout_seconds=1) as own:
            process = Process(own, log, topic)
            worker = asyncio.create_task(process.work())
            await process.idle()
            async with AsyncExitStack() as stack:
                for _ in range(2):
                    await stack.enter_async_context(own.connection())
                log.publish(topic, "a")
                # The pool does not give a connection in time.
                await reached(lambda: own.watcher._failing)
            await process.gets("a")
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    run(test())


def test_the_watcher_outlives_the_task_that_started_it(log: headwater.Headwater, dsn: str, topic: str) -> None:
    log.create_queue(topic, [topic])

    async def test() -> None:
        async with await aio.connect(dsn) as own:
            process = Process(own, log, topic)
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(own.watcher.waiter().wait(LONG))
                    group.create_task(own.watcher.waiter().wait(LONG))
                    await reached(lambda: own.watcher.version > 0)
                    raise RuntimeError("the end of the first waiters")
            worker = asyncio.create_task(process.work())
            await process.idle()
            log.publish(topic, "a")
            await process.gets("a")
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    run(test())


def test_closing_a_handle_ends_its_waits(dsn: str, topic: str) -> None:
    async def test() -> None:
        other = await aio.connect(dsn)
        waiters = [other.watcher.waiter(queue=topic), other.watcher.waiter(topics=[topic]), other.watcher.waiter()]
        for waiter in waiters:
            await waiter.wait(LONG)
        waits = [asyncio.create_task(waiter.wait(LONG)) for waiter in waiters]
        await reached(lambda: len(other.watcher._waiters) == len(waiters))
        await other.close()
        assert [wake.reason for wake in await asyncio.gather(*waits)] == ["change"] * len(waiters)
        # A wait that begins now ends, too, and starts nothing.
        await waiters[0].wait(LONG)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("log ")]

    run(test())
