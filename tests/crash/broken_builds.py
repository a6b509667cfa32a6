"""Steps of the log that are done wrong on purpose, in a process of a trial: what the trial has to find out.

A process runs `import broken_builds; broken_builds.NAME()` before anything else.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from headwater.calls import log as log_calls
from headwater.calls import queues as queue_calls
from headwater.calls import reading as reading_calls
from headwater.errors import CursorMoved
from headwater.log import steps
from headwater.log.model import CursorState, Event, LogState
from headwater.log.steps import (
    ApplyStep,
    DeliverStep,
    FollowStep,
    HandleResult,
    HandleStep,
    WaitForGrowthStep,
    Wake,
    WorkStep,
)
from headwater.queue import worker
from headwater.queue.model import Lease


def acknowledge_before_handling() -> None:
    """A worker says that the events of a lease are done, and only then hands them to its handlers."""
    worker.work = _work  # type: ignore[attr-defined]


def _work(
    queue: str, *, worker: str, batch_size: int, lease_seconds: float | None = None, **ignored: Any
) -> Generator[WorkStep, Any, None]:
    while True:
        lease: Lease | None = yield queue_calls.claim(
            queue, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds, relaxed=True
        )
        if lease is None:
            woken: Wake = yield WaitForGrowthStep(0.02)
            if woken.reason == "stop":
                return
            continue
        yield queue_calls.settle(lease, {}, rest_done=True, relaxed=True)
        handled: HandleResult = yield HandleStep(lease)
        if handled.stop:
            return


def move_to_stable() -> None:
    """A follower that finds nothing remembers the stable position, and goes on from it whatever happened since."""
    steps.follow = _follow


def _follow(
    topics: Sequence[str] | None,
    *,
    start_after: int | None = None,
    cursor: str | None = None,
    holds_retention: bool | None = None,
    batch_size: int = 1000,
    max_bytes: int = 16_777_216,
    in_transaction: bool = False,
    stop_when_caught_up: bool = False,
    **ignored: Any,
) -> Generator[FollowStep, Any, None]:
    after = saved = start_after or 0
    if cursor is not None:
        opened: CursorState = yield reading_calls.open_cursor(
            cursor, topics=topics, start_after=start_after, holds_retention=holds_retention
        )
        after = saved = opened.position
    while True:
        state: LogState = yield log_calls.log_state(topics)
        if state.stable <= after:
            if stop_when_caught_up:
                return
            yield WaitForGrowthStep(0.01)
            continue
        events: list[Event] = yield reading_calls.read_stable(
            topics, after=after, stable=state.stable, batch_size=batch_size, max_bytes=max_bytes, gone_to=1 << 62
        )
        if not events:
            after = state.stable
            continue
        last = events[-1].position
        if cursor is None:
            yield DeliverStep(events, state.epoch)
        else:
            move = reading_calls.advance_cursor(cursor, from_position=saved, to_position=last)
            try:
                if in_transaction:
                    yield ApplyStep(events, move)
                else:
                    yield DeliverStep(events, state.epoch)
                    yield move
            except CursorMoved:
                found: CursorState | None = yield reading_calls.find_cursor(cursor)
                assert found is not None
                after = saved = found.position
                continue
        after = saved = last
