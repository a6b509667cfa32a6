"""What a consumer does next, decided without doing it: pure generators of steps. No I/O, no clock.

A shell (`aio`, `client`) carries each step out and sends its outcome back. An error of a call is thrown in.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from headwater import calls
from headwater.errors import CursorMoved
from headwater.model import Event, LogState, OpenedCursor, Released


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand these events to the consumer; go on when it asks for more."""

    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class Apply:
    """Run the handler on these events and move the cursor, in one transaction."""

    events: Sequence[Event]
    move: calls.Call[None]


Step = calls.Call[Any] | Wait | Deliver | Apply

SHORTEST_WAIT_SECONDS = 0.001
# A cursor that sees no event of its topics still moves on, or it would hold up retention.
IDLE_SAVE_SECONDS = 30.0
# How often an idle follower looks whether somebody set its cursor.
IDLE_LOOK_SECONDS = 0.5
# Above every position: whatever is gone is known to be.
EVERYTHING = 1 << 62


def follow(
    topics: Sequence[str] | None,
    *,
    start_after: int | None = None,
    cursor: str | None = None,
    must_not_lose: bool | None = None,
    batch_size: int = 1000,
    max_bytes: int = 16_777_216,
    skip_expired: bool = False,
    poll_seconds: float = 0.01,
    stop_when_caught_up: bool = False,
    in_transaction: bool = False,
) -> Generator[Step, Any, None]:
    """Catch up, then stay live. A named cursor decides where to start and is moved behind each batch."""
    if cursor is not None:
        opened: OpenedCursor = yield calls.open_cursor(
            cursor, topics=topics, start_after=start_after, must_not_lose=must_not_lose
        )
    elif start_after is not None:
        opened = OpenedCursor(start_after, 0)
    else:
        opened = OpenedCursor(0, (yield calls.expired_to(topics)))
    gone_to = EVERYTHING if skip_expired else opened.gone_to
    # How far it has read, and what of that is saved: they differ where the topics were silent.
    after = saved = opened.position
    wait = SHORTEST_WAIT_SECONDS
    idle_seconds, look_at = 0.0, IDLE_LOOK_SECONDS
    while True:
        state: LogState = yield calls.log_state()
        while state.settled > after:
            events: list[Event] = yield calls.read_settled(
                topics,
                after=after,
                settled=state.settled,
                batch_size=batch_size,
                max_bytes=max_bytes,
                gone_to=gone_to,
            )
            if not events:
                # Nothing of these topics in what has settled: read on from there.
                after = state.settled
                break
            wait = SHORTEST_WAIT_SECONDS
            idle_seconds, look_at = 0.0, IDLE_LOOK_SECONDS
            last = events[-1].position
            if cursor is None:
                yield Deliver(events)
                after = last
                continue
            move = calls.advance_cursor(cursor, from_position=saved, to_position=last)
            try:
                if in_transaction:
                    yield Apply(events, move)
                else:
                    yield Deliver(events)
                    yield move
                after = saved = last
            except CursorMoved as moved:
                after = saved = _moved_to(moved)
        if stop_when_caught_up:
            return
        if cursor is not None and idle_seconds >= look_at:
            # Somebody may have rewound the cursor while there was nothing to read.
            look_at = idle_seconds + IDLE_LOOK_SECONDS
            opened = yield calls.open_cursor(cursor, topics=topics, start_after=saved, must_not_lose=must_not_lose)
            if opened.position != saved:
                after = saved = opened.position
                continue
            if idle_seconds >= IDLE_SAVE_SECONDS and after > saved:
                idle_seconds, look_at = 0.0, IDLE_LOOK_SECONDS
                try:
                    yield calls.advance_cursor(cursor, from_position=saved, to_position=after)
                    saved = after
                except CursorMoved as moved:
                    after = saved = _moved_to(moved)
                    continue
        # While a publisher is in flight the log may settle without growing, so only a settled log is
        # watched by its head alone.
        quiet = state.settled >= state.drawn
        while True:
            yield Wait(wait)
            idle_seconds += wait
            wait = min(wait * 2, poll_seconds)
            if not quiet or (cursor is not None and idle_seconds >= look_at):
                break
            if (yield calls.head()) > state.drawn:
                break


def _moved_to(moved: CursorMoved) -> int:
    """Somebody rewound the cursor, or our own move was done and its answer lost: go on from where it is."""
    if moved.actual_position is None:
        raise moved
    return moved.actual_position


@dataclass(slots=True)
class UpkeepTimes:
    """When a long-running process does its share of the upkeep. Times are the shell's clock, in seconds."""

    release_at: float = 0.0
    maintain_at: float = 0.0

    def next_call(self, now: float) -> calls.Call[Any] | None:
        if now >= self.maintain_at:
            self.maintain_at = now + 60.0
            return calls.maintain()
        if now >= self.release_at:
            # Until the answer is here.
            self.release_at = now + 1.0
            return calls.release_due()
        return None

    def heard(self, answer: object, now: float) -> None:
        if isinstance(answer, Released) and answer.next_due_seconds is not None:
            self.release_at = now + min(max(answer.next_due_seconds, 0.005), 1.0)
