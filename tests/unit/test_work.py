"""Are the decisions of a worker right? No database, no clock: a queue of plain lists answers its calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.calls import Call
from headwater.errors import LeaseLost
from headwater.log import steps as log_steps
from headwater.log.steps import HandleResult, HandleStep, WaitForGrowthStep, Wake, WorkStep
from headwater.queue.model import ClaimedEvent, Dead, Lease, Outcome, Retry, Snooze

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def claimed(token: int, position: int) -> ClaimedEvent:
    return ClaimedEvent(token, 1, False, NOW, position, "t", 0, None, None, None, None, None, None, b"", None, NOW)


@dataclass
class FakeQueue:
    """Answers the calls of one worker of queue `g` from lists."""

    ready: list[int] = field(default_factory=list)
    head: int = 0
    stable: int = 0
    leased: dict[int, list[int]] = field(default_factory=dict)
    # What was said of each event at the end: done, retry, dead or release.
    said: dict[int, str] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    # Claims, by their number, whose lease runs out before it is settled.
    lost: set[int] = field(default_factory=set)
    # What the watcher knew when the last wait ended, and whether a retry is due.
    known: tuple[int, int] = (0, 0)
    due: bool = False
    # Called at each wait; true: stop.
    on_wait: Callable[[FakeQueue], bool] = lambda queue: True
    tokens: count[int] = field(default_factory=lambda: count(1))

    def publish(self, *positions: int, settle: bool = True) -> None:
        self.head = max(self.head, *positions)
        if settle:
            self.ready += positions
            self.stable = self.head

    def claim(self, batch_size: int) -> Lease | None:
        if not self.ready:
            return None
        token = next(self.tokens)
        taken, self.ready = self.ready[:batch_size], self.ready[batch_size:]
        self.leased[token] = taken
        return Lease("g", token, NOW, tuple(claimed(token, position) for position in taken))

    def settle(self, token: int, positions: Any, verdicts: Any, *, rest_done: bool) -> None:
        if token in self.lost:
            self.ready += self.leased.pop(token, [])
            raise LeaseLost("lost")
        held = self.leased[token]
        for position, verdict in zip(positions or (), verdicts or (), strict=True):
            held.remove(position)
            self.said[position] = verdict
        if rest_done:
            self.said.update(dict.fromkeys(self.leased.pop(token), "done"))

    def answer(self, call: Call[Any]) -> Any:
        name = re.split(r"headwater(?:_internal)?\.", call.sql)[1].split("(")[0]
        self.asked.append(name)
        match name, call.params:
            case "claim", ("g", "w", batch_size, _, relaxed):
                assert relaxed, "a claim need not wait for the disk"
                return self.claim(batch_size)
            case "settle", ("g", token, positions, verdicts, _, _, rest_done, _):
                return self.settle(token, positions, verdicts, rest_done=rest_done)
            case "settle_and_claim", ("g", "w", batch_size, _, token, positions, verdicts, _, _, _):
                self.settle(token, positions, verdicts, rest_done=True)
                return self.claim(batch_size)
        raise AssertionError(f"the fake queue knows no {name} {call.params}")

    def wait(self, seconds: float) -> Wake:
        """What the watcher does: the wait ends at once if the log has grown since the last one ended."""
        if self.known != (self.head, self.stable):
            self.known = self.head, self.stable
            return Wake("growth", 0.0)
        self.waits.append(seconds)
        if self.on_wait(self):
            return Wake("stop", 0.0)
        grown, due = self.known != (self.head, self.stable), self.due
        self.known, self.due = (self.head, self.stable), False
        return Wake("change", 0.0) if due else Wake("growth", 0.0) if grown else Wake("time", seconds)

    def drive(self, steps: Generator[WorkStep, Any, None], handle: Callable[[Lease], HandleResult]) -> None:
        """What a shell does, with time that passes only where the worker waits."""
        outcome: Any = None
        failure: LeaseLost | None = None
        for _ in range(100_000):
            try:
                step = steps.send(outcome) if failure is None else steps.throw(failure)
            except StopIteration:
                return
            outcome = failure = None
            try:
                match step:
                    case WaitForGrowthStep(seconds):
                        outcome = self.wait(seconds)
                    case HandleStep(lease):
                        outcome = handle(lease)
                    case Call():
                        outcome = self.answer(step)
            except LeaseLost as error:
                failure = error
        raise AssertionError("it runs without end")

    def work(
        self,
        outcomes: dict[int, Outcome] | None = None,
        *,
        batch_size: int = 2,
        stop_after: int | None = None,
        **options: Any,
    ) -> list[list[int]]:
        """Work until told to stop: when it waits, or after so many leases. Returns what was handled, by lease."""
        handled: list[list[int]] = []

        def handle(lease: Lease) -> HandleResult:
            positions = [event.position for event in lease.events]
            handled.append(positions)
            ended = {position: (outcomes or {})[position] for position in positions if position in (outcomes or {})}
            if options.get("handler_acks"):
                # What is done is acknowledged by the handler itself.
                for position in positions:
                    if position not in ended:
                        self.leased[lease.token].remove(position)
                        self.said[position] = "done"
            return HandleResult(ended, stop=len(handled) == stop_after)

        self.drive(log_steps.work("g", worker="w", batch_size=batch_size, **options), handle)
        return handled


def waiting(*actions: Callable[[FakeQueue], object]) -> Callable[[FakeQueue], bool]:
    """What happens at each wait, one after the other; then the worker is told to stop."""
    left = list(actions)

    def on_wait(queue: FakeQueue) -> bool:
        if not left:
            return True
        left.pop(0)(queue)
        return False

    return on_wait


def nothing(queue: FakeQueue) -> None:
    """A wait in which nothing happens."""


# --- settling ------------------------------------------------------------------------------------------------


def test_each_batch_is_settled_in_the_trip_that_claims_the_next() -> None:
    queue = FakeQueue()
    queue.publish(1, 2, 3, 4, 5)
    assert queue.work() == [[1, 2], [3, 4], [5]]
    assert queue.said == dict.fromkeys(range(1, 6), "done")
    assert queue.asked[:4] == ["claim", "settle_and_claim", "settle_and_claim", "settle_and_claim"]
    assert "settle" not in queue.asked


def test_events_are_settled_with_their_outcomes_and_the_rest_is_done() -> None:
    queue = FakeQueue()
    queue.publish(1, 2, 3, 4)
    queue.work({1: Retry(), 2: Dead("no"), 4: Snooze(timedelta(1))}, batch_size=3)
    assert queue.said == {1: "retry", 2: "dead", 3: "done", 4: "release"}


def test_outcomes_of_one_lease_are_not_said_of_the_next() -> None:
    queue = FakeQueue()
    queue.publish(1, 2)
    queue.work({1: Dead("no")}, batch_size=1)
    assert queue.said == {1: "dead", 2: "done"}


def test_a_lost_lease_is_left_to_others_and_work_goes_on() -> None:
    queue = FakeQueue(lost={1})
    queue.publish(1, 2, 3)
    assert queue.work(batch_size=1) == [[1], [2], [3], [1]]
    assert queue.said == dict.fromkeys((1, 2, 3), "done")
    # What was lost is not settled again: the next call is a claim.
    assert queue.asked[:3] == ["claim", "settle_and_claim", "claim"]


@given(st.integers(1, 30), st.integers(1, 7), st.sets(st.integers(1, 12)))
def test_every_event_is_handled_and_said_to_be_done_whatever_leases_are_lost(
    events: int, batch_size: int, lost: set[int]
) -> None:
    queue = FakeQueue(lost=lost)
    queue.publish(*range(1, events + 1))
    queue.on_wait = lambda queue: not queue.ready and not queue.leased
    handled = queue.work(batch_size=batch_size)
    assert {position for lease in handled for position in lease} == set(range(1, events + 1))
    assert queue.said == dict.fromkeys(range(1, events + 1), "done")
    assert all(len(lease) <= batch_size for lease in handled)


# --- stopping ------------------------------------------------------------------------------------------------


def test_a_stop_settles_the_last_lease_and_claims_no_more() -> None:
    queue = FakeQueue()
    queue.publish(1, 2, 3)
    assert queue.work({2: Snooze()}, stop_after=1) == [[1, 2]]
    assert queue.said == {1: "done", 2: "release"}
    assert queue.asked == ["claim", "settle"]
    assert queue.leased == {}


def test_a_stop_with_a_lost_lease_ends_quietly() -> None:
    queue = FakeQueue(lost={1})
    queue.publish(1)
    queue.work(stop_after=1)
    assert queue.asked == ["claim", "settle"]
    assert queue.said == {}


def test_a_stop_while_idle_ends_at_once() -> None:
    queue = FakeQueue()
    assert queue.work() == []
    assert queue.asked == ["claim"]


# --- waiting -------------------------------------------------------------------------------------------------


def test_a_worker_that_is_not_woken_claims_again_less_and_less_often() -> None:
    queue = FakeQueue(on_wait=waiting(*[nothing] * 12))
    queue.work()
    assert queue.waits[0] == log_steps.MIN_RECLAIM_SECONDS
    assert all(later == min(4 * earlier, log_steps.MAX_RECLAIM_SECONDS) for earlier, later in pairwise(queue.waits))
    assert queue.waits[-1] == log_steps.MAX_RECLAIM_SECONDS
    # One call for each wait.
    assert queue.asked == ["claim"] * len(queue.waits)


def test_an_idle_worker_is_woken_for_retries_that_came_due_by_time_alone() -> None:
    def retry(queue: FakeQueue) -> None:
        queue.ready.append(3)
        queue.due = True

    queue = FakeQueue(on_wait=waiting(nothing, nothing, retry))
    assert queue.work() == [[3]]


def test_a_growing_log_wakes_an_idle_worker() -> None:
    queue = FakeQueue(on_wait=waiting(nothing, nothing, nothing, lambda queue: queue.publish(7)))
    assert queue.work() == [[7]]
    assert queue.said == {7: "done"}


def test_what_settled_between_the_claim_and_the_wait_is_not_slept_through() -> None:
    queue = FakeQueue()
    steps = log_steps.work("g", worker="w", batch_size=1)
    assert queue.answer(next(steps)) is None  # type: ignore[arg-type]
    queue.publish(1)
    step = steps.send(None)
    assert isinstance(step, WaitForGrowthStep)
    # The wait ends at once, and the worker claims again.
    woken = queue.wait(step.seconds)
    assert woken.reason == "growth"
    assert queue.waits == []
    lease = queue.answer(steps.send(woken))  # type: ignore[arg-type]
    assert [event.position for event in lease.events] == [1]


def test_what_a_publisher_in_flight_held_back_wakes_it_although_the_head_is_the_same() -> None:
    def settle(queue: FakeQueue) -> None:
        queue.ready.append(1)
        queue.stable = 1

    queue = FakeQueue(on_wait=waiting(nothing, nothing, nothing, nothing, settle))
    queue.publish(1, settle=False)
    assert queue.work() == [[1]]
    # Two for the head, which was seen to grow once, and one for each wait.
    assert queue.asked[: queue.asked.index("settle_and_claim")].count("claim") == 7


def test_waits_are_short_again_after_work() -> None:
    queue = FakeQueue(on_wait=waiting(*[nothing] * 8, lambda queue: queue.publish(1), *[nothing] * 3))
    queue.work()
    least = log_steps.MIN_RECLAIM_SECONDS
    assert queue.waits[9:] == [least, 4 * least, 16 * least, 64 * least]


# --- handlers that acknowledge by themselves -----------------------------------------------------------------


def test_a_handler_that_acknowledges_by_itself_is_not_settled_for() -> None:
    queue = FakeQueue()
    queue.publish(1, 2, 3)
    assert queue.work(handler_acks=True) == [[1, 2], [3]]
    assert queue.said == dict.fromkeys((1, 2, 3), "done")
    assert {"settle", "settle_and_claim"}.isdisjoint(queue.asked)


def test_of_a_handler_that_acknowledges_by_itself_only_failures_are_settled() -> None:
    queue = FakeQueue()
    queue.publish(1, 2, 3)
    queue.work({2: Retry()}, handler_acks=True)
    assert queue.said == {1: "done", 2: "retry", 3: "done"}
    assert queue.asked[:4] == ["claim", "settle", "claim", "claim"]


def test_a_failure_said_too_late_does_not_stop_a_handler_that_acknowledges_by_itself() -> None:
    queue = FakeQueue(lost={1})
    queue.publish(1, 2)
    queue.work({1: Retry()}, batch_size=1, handler_acks=True, stop_after=2)
    assert queue.said == {2: "done"}
    assert queue.ready == [1]


def test_a_stop_settles_only_the_failures_of_a_handler_that_acknowledges_by_itself() -> None:
    for outcomes, asked in (({}, ["claim"]), ({1: Snooze()}, ["claim", "settle"])):
        queue = FakeQueue()
        queue.publish(1, 2)
        queue.work(dict(outcomes), handler_acks=True, stop_after=1)
        assert queue.asked == asked
        assert queue.said == {1: "release" if outcomes else "done", 2: "done"}
