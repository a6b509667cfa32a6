"""Does the watcher wake all who wait, and lose no wake-up? No database: a log of three numbers answers its calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest

from headwater.calls import Call
from headwater.database import log_watcher
from headwater.database.log_watcher import AsyncLogWatcher, LogWatcher
from headwater.errors import LogUnavailable
from headwater.log.model import Growth, WaitedState, WaitKey
from headwater.log.steps import MaintenanceSchedule

# Far longer than any of these tests takes.
LONG = 60.0


@dataclass
class FakeLog:
    """Answers the calls of a watcher."""

    head: int = 5
    epoch: int = 1
    bounds: tuple[int, ...] = ()
    states: dict[WaitKey, WaitedState] = field(default_factory=dict)
    # The positions of the events of each topic.
    topics: dict[str, list[int]] = field(default_factory=dict)
    away: bool = False
    # What happens between a call and its answer.
    meanwhile: Callable[[], object] = lambda: None
    asked: list[str] = field(default_factory=list)
    polled: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, call: Call[Any]) -> Any:
        self.polled.set()
        if self.away:
            raise LogUnavailable("away")
        if "states_of_waiters" in call.sql:
            self.asked.append("states")
            names = {*call.params[0], *call.params[1]}
            return {key: state for key, state in self.states.items() if key.name in names}
        assert "growth(" in call.sql
        seen_head, seen_stable, topics = call.params
        if seen_head == self.head:
            self.asked.append("head")
            return None
        self.asked.append("state")
        grown = [topic for topic in topics if max(self.topics.get(topic, (0,))) > seen_stable]
        return Growth(self.head, self.epoch, self.bounds, frozenset(grown))

    async def run(self, call: Call[Any]) -> Any:
        await asyncio.sleep(0)
        self.meanwhile()
        return self.answer(call)

    def watcher(self) -> AsyncLogWatcher:
        async def maintain() -> None: ...

        return AsyncLogWatcher(self.run, maintain, MaintenanceSchedule())

    async def polls(self, count: int = 2) -> None:
        """Let the watcher poll, from start to end."""
        for _ in range(count):
            self.polled.clear()
            await self.polled.wait()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LONG / 2))


async def settled(waiter: log_watcher.AsyncLogWaiter) -> None:
    """Wait until the watcher knows the log, and this waiter knows it as well."""
    while waiter._watcher._known is None or (waiter.key is not None and waiter._seen_state is None):
        await waiter.wait(LONG)


def test_one_poll_is_for_all_waiters() -> None:
    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        waiters = [watcher.waiter() for _ in range(200)]
        await asyncio.gather(*(settled(waiter) for waiter in waiters))
        log.asked.clear()
        waits = [asyncio.create_task(waiter.wait(LONG)) for waiter in waiters]
        await log.polls(10)
        log.head += 1
        assert {(await wait).reason for wait in waits} == {"growth"}
        # Ten polls and those that found it, and sometimes one that reads the epoch; far from one for each waiter.
        assert len(log.asked) < 30
        await watcher.stop()

    run(test())


CHANGES = {
    "head": {"head": 6},
    "a head that goes back": {"head": 3},
    "epoch": {"epoch": 2},
    "publisher done": {"bounds": ()},
    "another publisher": {"bounds": (2, 4)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("when", ["before the wait", "while it waits"])
def test_every_change_of_the_log_wakes_its_waiters(change: dict[str, Any], when: str) -> None:
    async def test() -> None:
        log = FakeLog(bounds=(2,))
        watcher = log.watcher()
        waiter = watcher.waiter()
        await settled(waiter)
        if when == "while it waits":
            wait = asyncio.create_task(waiter.wait(LONG))
            await log.polls()
            assert not wait.done()
        for name, value in change.items():
            setattr(log, name, value)
        if when == "before the wait":
            wait = asyncio.create_task(waiter.wait(LONG))
        assert (await wait).reason == "growth"
        await watcher.stop()

    run(test())


def test_what_another_waiter_was_woken_for_is_not_lost() -> None:
    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        first, second = watcher.waiter(), watcher.waiter()
        await settled(first)
        await settled(second)
        # The first waits and is woken while the second does something else.
        wait = asyncio.create_task(first.wait(LONG))
        await log.polls()
        log.head += 1
        await wait
        assert (await second.wait(LONG)).reason == "growth"
        await watcher.stop()

    run(test())


def test_open_publishers_at_the_head_hold_nothing_back_and_wake_nobody() -> None:
    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        waiter = watcher.waiter()
        await settled(waiter)
        log.bounds = (5, 5)
        # The epoch is read again, with the publishers.
        watcher._epoch_at = 0.0
        assert (await waiter.wait(0.1)).reason == "time"
        assert "state" in log.asked
        await watcher.stop()

    run(test())


def test_cancelling_one_waiter_leaves_the_others() -> None:
    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        waiters = [watcher.waiter() for _ in range(3)]
        await asyncio.gather(*(settled(waiter) for waiter in waiters))
        waits = [asyncio.create_task(waiter.wait(LONG)) for waiter in waiters]
        await log.polls()
        waits[1].cancel()
        await log.polls()
        log.head += 1
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        assert [result.reason for result in (results[0], results[2])] == ["growth", "growth"]  # type: ignore[union-attr]
        # The cancelled one can wait again.
        assert (await waiters[1].wait(LONG)).reason == "growth"
        await watcher.stop()

    run(test())


def test_nothing_is_polled_while_nothing_waits() -> None:
    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        waiter = watcher.waiter()
        await settled(waiter)
        wait = asyncio.create_task(waiter.wait(LONG))
        await log.polls()
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        assert watcher._task is not None
        await watcher._task
        log.head += 1
        # It starts again with the next waiter.
        assert (await waiter.wait(LONG)).reason == "growth"
        await watcher.stop()

    run(test())


def test_an_error_wakes_all_waiters_and_the_watcher_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_watcher, "RETRY_SECONDS", 0.001)

    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        waiter = watcher.waiter()
        await settled(waiter)
        log.away = True
        assert (await waiter.wait(LONG)).reason == "growth"
        wait = asyncio.create_task(waiter.wait(LONG))
        await asyncio.wait({wait})
        log.away = False
        # Nobody knows what happened meanwhile: the first answer is a reason to look, too.
        assert (await waiter.wait(LONG)).reason == "growth"
        wait = asyncio.create_task(waiter.wait(LONG))
        await log.polls(5)
        assert not wait.done()
        log.head += 1
        assert (await wait).reason == "growth"
        await watcher.stop()

    run(test())


def test_a_bug_in_the_watcher_does_not_end_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_watcher, "RETRY_SECONDS", 0.001)

    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        waiter = watcher.waiter()
        await settled(waiter)
        answer, log.answer = log.answer, None  # type: ignore[method-assign, assignment]
        assert (await waiter.wait(LONG)).reason == "growth"
        log.answer = answer  # type: ignore[method-assign]
        log.head += 1
        assert (await waiter.wait(LONG)).reason == "growth"
        await watcher.stop()

    run(test())


def test_a_change_of_a_queue_wakes_its_waiters_only() -> None:
    async def test() -> None:
        log = FakeLog()
        mailer, other = WaitKey("queue", "mailer"), WaitKey("cursor", "mailer")
        log.states = {mailer: WaitedState("a"), other: WaitedState("7")}
        watcher = log.watcher()
        waiters = [watcher.waiter(queue="mailer"), watcher.waiter(queue="mailer"), watcher.waiter(cursor="mailer")]
        await asyncio.gather(*(settled(waiter) for waiter in waiters))
        waits = [asyncio.create_task(waiter.wait(LONG)) for waiter in waiters]
        await log.polls()
        log.states[mailer] = WaitedState("b")
        assert [(await wait).reason for wait in waits[:2]] == ["change", "change"]
        assert not waits[2].done()
        del log.states[other]
        # A deleted one is changed.
        assert (await waits[2]).reason == "change"
        await watcher.stop()

    run(test())


def test_growth_wakes_the_waiters_of_its_topics_only() -> None:
    async def test() -> None:
        log = FakeLog(topics={"a": [1], "b": [2]})
        watcher = log.watcher()
        waiters = {name: watcher.waiter(topics=None if name == "any" else [name]) for name in ("a", "b", "any")}
        await asyncio.gather(*(settled(waiter) for waiter in waiters.values()))
        waits = {name: asyncio.create_task(waiter.wait(LONG)) for name, waiter in waiters.items()}
        await log.polls(3)
        log.topics["a"].append(6)
        log.head = 6
        assert (await waits["a"]).reason == (await waits["any"]).reason == "growth"
        await log.polls(3)
        assert not waits["b"].done()
        # One that did not wait at that moment hears of it later.
        log.topics["a"].append(7)
        log.topics["b"].append(8)
        log.head = 8
        await waits["b"]
        assert (await waiters["a"].wait(LONG)).reason == "growth"
        await watcher.stop()

    run(test())


def test_what_a_publisher_held_back_wakes_its_topic_although_others_grew_further() -> None:
    async def test() -> None:
        log = FakeLog(head=9, bounds=(4,), topics={"a": [1], "b": [9]})
        watcher = log.watcher()
        late = watcher.waiter(topics=["a"])
        await settled(late)
        wait = asyncio.create_task(late.wait(LONG))
        await log.polls(3)
        # It commits an event below the head.
        log.topics["a"].append(5)
        log.bounds = ()
        assert (await wait).reason == "growth"
        await watcher.stop()

    run(test())


def test_a_waiter_that_comes_while_the_database_answers_misses_nothing() -> None:
    async def test() -> None:
        log = FakeLog(topics={"a": [1]})
        watcher = log.watcher()
        first = watcher.waiter()
        await settled(first)
        late: list[log_watcher.AsyncLogWaiter] = []

        def come() -> None:
            # It reads the log, and then the log grows, but the question named no topics.
            late.append(watcher.waiter(topics=["a"]))
            log.topics["a"].append(6)
            log.head, log.meanwhile = 6, lambda: None

        log.meanwhile = come
        await first.wait(LONG)
        assert (await late[0].wait(LONG)).reason == "growth"
        await watcher.stop()

    run(test())


def test_growth_is_not_lost_when_the_topics_of_a_queue_become_known() -> None:
    async def test() -> None:
        mailer = WaitKey("queue", "mailer")
        log = FakeLog(states={mailer: WaitedState("a", topics=["a"])}, topics={"a": [1]})
        watcher = log.watcher()
        # The state is known from earlier waiters, which no longer exist.
        await settled(watcher.waiter(queue="mailer"))
        late, present = watcher.waiter(queue="mailer"), watcher.waiter(queue="mailer")
        # The late one looks at the log; then an event comes, and the poll does not ask for its topic.
        wait = asyncio.create_task(present.wait(LONG))
        log.topics["a"].append(6)
        log.head = 6
        await wait
        looks = watcher.looks
        wait = asyncio.create_task(present.wait(LONG))
        while watcher.looks == looks:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert late.topics == ["a"]
        assert (await late.wait(LONG)).reason == "change"
        wait.cancel()
        await watcher.stop()

    run(test())


def test_topics_that_are_no_longer_waited_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_watcher, "MAX_TOPICS", 5)

    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        for number in range(100):
            waiter = watcher.waiter(topics=[f"reply {number}"])
            await settled(waiter)
            log.head += 1
            log.topics[f"reply {number}"] = [log.head]
            assert (await waiter.wait(LONG)).reason == "growth"
        assert len(watcher.topic_versions) <= 10
        await watcher.stop()

    run(test())


def test_a_log_that_is_away_is_polled_at_intervals_whatever_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        log = FakeLog(states={WaitKey("queue", "mailer"): WaitedState("a")})
        watcher = log.watcher()
        waiter = watcher.waiter(queue="mailer")
        await settled(waiter)
        wait = asyncio.create_task(waiter.wait(LONG))
        await log.polls()
        monkeypatch.setattr(log_watcher, "RETRY_SECONDS", LONG)
        polls: list[None] = []
        log.meanwhile = lambda: polls.append(None)
        log.away = True
        # A look is overdue while the log is away.
        watcher._look_at = 0.0
        await wait
        while watcher._maintenance is not None and not watcher._maintenance.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        watcher._reap_at = time.monotonic() + LONG
        polls.clear()
        wait = asyncio.create_task(waiter.wait(LONG))
        await asyncio.wait({wait}, timeout=0.1)
        assert len(polls) == 0
        wait.cancel()
        await watcher.stop()

    run(test())


def test_waits_end_while_a_poll_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_watcher, "STALLED_SECONDS", 0.02)

    class HangingLog(FakeLog):
        answers = asyncio.Event()

        async def run(self, call: Call[Any]) -> Any:
            await self.answers.wait()
            return await super().run(call)

    async def test() -> None:
        log = HangingLog()
        log.answers.set()
        watcher = log.watcher()
        waiter = watcher.waiter()
        await settled(waiter)
        log.answers.clear()
        assert [(await waiter.wait(LONG)).reason for _ in range(3)] == ["time"] * 3
        log.answers.set()
        log.head += 1
        while (await waiter.wait(LONG)).reason == "time":
            pass
        await watcher.stop()

    run(test())


def test_the_watcher_does_not_run_in_the_context_of_its_first_waiter() -> None:
    request: ContextVar[str] = ContextVar("request")

    async def test() -> None:
        log = FakeLog()
        seen: set[str | None] = set()
        log.meanwhile = lambda: seen.add(request.get(None))
        request.set("first")
        watcher = log.watcher()
        await settled(watcher.waiter())
        assert seen == {None}
        await watcher.stop()

    run(test())


def test_what_is_due_wakes_once_for_each_look() -> None:
    async def test() -> None:
        log = FakeLog(states={WaitKey("queue", "mailer"): WaitedState("a")})
        watcher = log.watcher()
        waiter = watcher.waiter(queue="mailer")
        await settled(waiter)
        log.states = {WaitKey("queue", "mailer"): WaitedState("a", due=True)}
        assert (await waiter.wait(LONG)).reason == "change"
        looks = log.asked.count("states")
        assert (await waiter.wait(LONG)).reason == "change"
        assert log.asked.count("states") > looks, "it was woken again by the same look"
        await watcher.stop()

    run(test())


def test_the_next_due_time_brings_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_watcher, "LOOK_SECONDS", LONG)

    async def test() -> None:
        log = FakeLog(states={WaitKey("queue", "mailer"): WaitedState("a", due_seconds=0.05)})
        watcher = log.watcher()
        waiter = watcher.waiter(queue="mailer")
        await settled(waiter)
        log.states = {WaitKey("queue", "mailer"): WaitedState("a", due=True)}
        assert (await waiter.wait(LONG)).reason == "change"
        await watcher.stop()

    run(test())


def test_a_wait_ends_after_its_time_and_when_it_is_woken() -> None:
    async def test() -> None:
        watcher = FakeLog().watcher()
        waiter = watcher.waiter()
        await settled(waiter)
        assert (await waiter.wait(0.01)).reason == "time"
        # Before the wait, too.
        waiter.wake()
        assert (await waiter.wait(LONG)).reason == "change"
        await watcher.stop()

    run(test())


def test_a_log_that_does_not_grow_is_polled_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        log = FakeLog()
        watcher = log.watcher()
        waiter = watcher.waiter()
        await settled(waiter)
        wait = asyncio.create_task(waiter.wait(LONG))
        await log.polls(8)
        assert watcher._pause == log_watcher.MAX_POLL_SECONDS
        watcher._grown_at -= log_watcher.IDLE_AFTER_SECONDS
        await log.polls(8)
        assert watcher._pause == log_watcher.IDLE_POLL_SECONDS
        # One that grows is polled often again.
        log.head += 1
        await wait
        assert watcher._pause <= log_watcher.MIN_POLL_SECONDS
        await watcher.stop()

    run(test())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_blocking_waiter_sees_every_change(change: dict[str, Any]) -> None:
    log = FakeLog(bounds=(2,))
    waiter = LogWatcher(log.answer, lambda: None, MaintenanceSchedule()).waiter()
    assert waiter.wait(LONG).reason == "growth"
    assert waiter.wait(0.01).reason == "time"
    for name, value in change.items():
        setattr(log, name, value)
    assert waiter.wait(LONG).reason == "growth"
    assert waiter.wait(0.01).reason == "time"


def test_a_blocking_waiter_leaves_an_error_to_its_caller() -> None:
    log = FakeLog()
    waiter = LogWatcher(log.answer, lambda: None, MaintenanceSchedule()).waiter()
    assert waiter.wait(LONG).reason == "growth"
    log.away = True
    assert waiter.wait(LONG).reason == "growth"
    log.away = False
    assert waiter.wait(LONG).reason == "growth"
    assert waiter.wait(0.01).reason == "time"
