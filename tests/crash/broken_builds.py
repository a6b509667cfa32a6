"""Steps of the log that are done wrong on purpose, in a process of a trial: what the trial has to find out.

A process runs `import broken_builds; broken_builds.NAME()` before anything else.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from headwater import calls
from headwater.errors import CursorMoved
from headwater.log import steps
from headwater.log.steps import Apply, Deliver, FollowStep, Handle, Handled, Wait, WorkStep
from headwater.model import Event, Lease, LogState, OpenedCursor
from headwater.queue import worker


def acknowledge_before_handling() -> None:
    """A worker says that the events of a lease are done, and only then hands them to its handlers."""
    worker.work = _work  # type: ignore[attr-defined]


def _work(
    group: str, *, worker: str, batch_size: int, lease_seconds: float | None = None, **ignored: Any
) -> Generator[WorkStep, Any, None]:
    while True:
        lease: Lease | None = yield calls.claim(
            group, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds, relaxed=True
        )
        if lease is None:
            if (yield Wait(0.02)):
                return
            continue
        yield calls.settle(lease, {}, rest_done=True, relaxed=True)
        handled: Handled = yield Handle(lease)
        if handled.stop:
            return


def move_to_settled() -> None:
    """A follower that finds nothing remembers the settled position, and goes on from it whatever happened since."""
    steps.follow = _follow


def _follow(
    topics: Sequence[str] | None,
    *,
    start_after: int | None = None,
    cursor: str | None = None,
    must_not_lose: bool | None = None,
    batch_size: int = 1000,
    max_bytes: int = 16_777_216,
    in_transaction: bool = False,
    stop_when_caught_up: bool = False,
    **ignored: Any,
) -> Generator[FollowStep, Any, None]:
    after = saved = start_after or 0
    if cursor is not None:
        opened: OpenedCursor = yield calls.open_cursor(
            cursor, topics=topics, start_after=start_after, must_not_lose=must_not_lose
        )
        after = saved = opened.position
    while True:
        state: LogState = yield calls.log_state(topics)
        if state.settled <= after:
            if stop_when_caught_up:
                return
            yield Wait(0.01)
            continue
        events: list[Event] = yield calls.read_settled(
            topics, after=after, settled=state.settled, batch_size=batch_size, max_bytes=max_bytes, gone_to=1 << 62
        )
        if not events:
            after = state.settled
            continue
        last = events[-1].position
        if cursor is None:
            yield Deliver(events, state.epoch)
        else:
            move = calls.advance_cursor(cursor, from_position=saved, to_position=last)
            try:
                if in_transaction:
                    yield Apply(events, move)
                else:
                    yield Deliver(events, state.epoch)
                    yield move
            except CursorMoved:
                found: OpenedCursor | None = yield calls.find_cursor(cursor)
                assert found is not None
                after = saved = found.position
                continue
        after = saved = last
