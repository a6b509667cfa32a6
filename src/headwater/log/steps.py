"""What a consumer does next, decided without doing it: pure generators of steps. No I/O, no clock.

A shell (`aio`, `client`) carries each step out and sends its outcome back. An error of a call is thrown in.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from headwater import calls
from headwater.errors import CursorMoved, EpochChanged, LeaseLost, epoch_changed, never_issued
from headwater.log.cron import next_time
from headwater.model import Event, Lease, LogState, OpenedCursor, Released, Upkeep


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand these events to the consumer; go on when it asks for more. Their positions are of this epoch."""

    events: Sequence[Event]
    epoch: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Run the handler on these events and move the cursor, in one transaction."""

    events: Sequence[Event]
    move: calls.Call[None]


@dataclass(frozen=True, slots=True)
class Rewound:
    """The log is in another epoch: what was after `position` may have been issued again, so it is read from there."""

    epoch: int
    read_to: int
    position: int


@dataclass(frozen=True, slots=True)
class Handle:
    """Run the handlers on the events of this lease; the outcome is a Handled."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Handled:
    """How the events of a lease ended, where it was not well; `stop`: this was the last batch."""

    outcomes: calls.Outcomes
    stop: bool


FollowStep = calls.Call[Any] | Wait | Deliver | Apply | Rewound
WorkStep = calls.Call[Any] | Wait | Handle

OnEpochChange = Literal["rewind", "error"]
"""What a reader does when positions may have been issued again: go back to the last common one, or raise."""

SHORTEST_WAIT_SECONDS = 0.001
# As many events as maintain sweeps at most, for how long a process goes on with it, and when again.
FULL_SWEEP = 50_000
SWEEP_SECONDS = 2.0
FURTHER_SWEEPS_AFTER_SECONDS = 5.0
# A cursor that sees no event of its topics still moves on, or it would hold up retention.
IDLE_SAVE_SECONDS = 30.0
# How often an idle follower looks whether its cursor was set or the epoch has changed.
IDLE_LOOK_SECONDS = 0.5
# Above every position: whatever is gone is known to be.
EVERYTHING = 1 << 62


def follow(
    topics: Sequence[str] | None,
    *,
    start_after: int | None = None,
    epoch: int | None = None,
    cursor: str | None = None,
    must_not_lose: bool | None = None,
    batch_size: int = 1000,
    max_bytes: int = 16_777_216,
    skip_expired: bool = False,
    poll_seconds: float = 0.01,
    stop_when_caught_up: bool = False,
    in_transaction: bool = False,
    rewind_on_epoch_change: bool = True,
) -> Generator[FollowStep, Any, None]:
    """Catch up, then stay live. A named cursor decides where to start and is moved behind each batch.

    What it remembers between two calls (`after`, `saved`) is a position of `epoch`. Every read and every move of the
    cursor names that epoch and is refused in another one: then it goes back to the cursor, which lives in the same
    database as the events, or without a cursor to the last position that both epochs share. So it never skips an event
    whose position was issued again after a crash, a failover or a restore.
    """
    if cursor is not None:
        opened: OpenedCursor = yield calls.open_cursor(
            cursor, topics=topics, start_after=start_after, must_not_lose=must_not_lose
        )
        # What a cursor says is of the present, whatever the caller remembered.
        epoch = None
    elif start_after is not None:
        opened = OpenedCursor(start_after, 0)
    else:
        opened = OpenedCursor(0, (yield calls.expired_to(topics)))
    gone_to = EVERYTHING if skip_expired else opened.gone_to
    # How far it has read, and what of that is saved: they differ where the topics were silent.
    after = saved = opened.position
    wait = SHORTEST_WAIT_SECONDS
    idle_seconds, look_at = 0.0, IDLE_LOOK_SECONDS
    refused: EpochChanged | None = None
    while True:
        state: LogState = yield calls.log_state(topics)
        if epoch is None and after > state.drawn:
            raise never_issued(after, None, state.epoch, state.drawn)
        if epoch is not None and epoch != state.epoch:
            if cursor is not None:
                opened = yield from _look_at(cursor)
                gone_to = EVERYTHING if skip_expired else opened.gone_to
                common = opened.position
            else:
                common = yield calls.common_position(epoch, after)
            if not rewind_on_epoch_change:
                raise epoch_changed(epoch, after, state.epoch, common)
            yield Rewound(state.epoch, after, common)
            after = saved = common
            refused = None
        elif refused is not None:
            # Refused, and yet in the same epoch: it would be refused for ever.
            raise refused
        epoch = state.epoch
        try:
            while state.settled > after:
                events: list[Event] = yield calls.read_settled(
                    topics,
                    after=after,
                    settled=state.settled,
                    batch_size=batch_size,
                    max_bytes=max_bytes,
                    gone_to=gone_to,
                    epoch=epoch,
                )
                if not events:
                    # Nothing of these topics in what has settled: read on from there.
                    after = state.settled
                    break
                wait = SHORTEST_WAIT_SECONDS
                idle_seconds, look_at = 0.0, IDLE_LOOK_SECONDS
                last = events[-1].position
                if cursor is None:
                    yield Deliver(events, epoch)
                    after = last
                    continue
                move = calls.advance_cursor(cursor, from_position=saved, to_position=last, epoch=epoch)
                try:
                    if in_transaction:
                        yield Apply(events, move)
                    else:
                        yield Deliver(events, epoch)
                        yield move
                    after = saved = last
                except CursorMoved:
                    # It was rewound, or our own move was done and its answer lost.
                    opened = yield from _look_at(cursor)
                    after = saved = opened.position
                    gone_to = EVERYTHING if skip_expired else opened.gone_to
            if cursor is not None and (stop_when_caught_up or idle_seconds >= look_at):
                if after > saved and (stop_when_caught_up or idle_seconds >= IDLE_SAVE_SECONDS):
                    idle_seconds = 0.0
                    with suppress(CursorMoved):
                        yield calls.advance_cursor(cursor, from_position=saved, to_position=after, epoch=epoch)
                        saved = after
                look_at = idle_seconds + IDLE_LOOK_SECONDS
                # It may have been rewound while there was nothing to read.
                opened = yield from _look_at(cursor)
                if opened.position != saved:
                    after = saved = opened.position
                    gone_to = EVERYTHING if skip_expired else opened.gone_to
                    continue
        except EpochChanged as error:
            refused = error
            continue
        if stop_when_caught_up:
            return
        look_at = max(look_at, idle_seconds + IDLE_LOOK_SECONDS) if cursor is None else look_at
        # While a publisher is in flight the log may settle without growing, so only a settled log is
        # watched by its head alone.
        quiet = state.settled >= state.drawn
        while True:
            yield Wait(wait)
            idle_seconds += wait
            wait = min(wait * 2, poll_seconds)
            if not quiet or idle_seconds >= look_at:
                break
            # Not "above": a crash may take the head back.
            if (yield calls.head()) != state.drawn:
                break


def _look_at(cursor: str) -> Generator[FollowStep, Any, OpenedCursor]:
    """Where the cursor stands. One that was deleted ends its follower, which must not make it anew."""
    found: OpenedCursor | None = yield calls.find_cursor(cursor)
    if found is None:
        raise CursorMoved(f'cursor "{cursor}" was deleted', detail={"cursor": cursor, "actual_position": None})
    return found


def work(
    group: str,
    *,
    worker: str,
    batch_size: int,
    lease_seconds: float | None = None,
    handler_acks: bool = False,
    poll_seconds: float = 0.01,
    look_seconds: float = 0.2,
) -> Generator[WorkStep, Any, None]:
    """Claim, handle, settle and claim again. A Wait is answered by whether to stop.

    `handler_acks`: what was done is acknowledged already, in the handler's own transaction.
    """
    lease: Lease | None = None
    outcomes: calls.Outcomes = {}
    known = -1
    wait = SHORTEST_WAIT_SECONDS
    while True:
        try:
            if lease is None:
                lease = yield calls.claim(
                    group, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds, relaxed=True
                )
            elif handler_acks:
                ended, lease = lease, None
                if outcomes:
                    yield calls.settle(ended, outcomes, rest_done=False, relaxed=True)
                continue
            else:
                lease = yield calls.settle_and_claim(
                    lease, outcomes, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds
                )
        except LeaseLost:
            # The events are somebody else's now, or will be handed out again.
            lease = None
            continue
        if lease is not None:
            wait = SHORTEST_WAIT_SECONDS
            handled: Handled = yield Handle(lease)
            outcomes = handled.outcomes
            if handled.stop:
                if outcomes or not handler_acks:
                    with suppress(LeaseLost):
                        yield calls.settle(lease, outcomes, rest_done=not handler_acks, relaxed=True)
                return
            continue
        # Rest only if nothing has settled since before the last claim.
        state: LogState = yield calls.log_state()
        if state.settled != known:
            known = state.settled
            if (yield Wait(0)):
                return
            continue
        waited = 0.0
        while True:
            if (yield Wait(wait)):
                return
            waited += wait
            wait = min(wait * 2, poll_seconds)
            # A publisher in flight may settle without the log growing; retries come due by time alone.
            if state.settled < state.drawn or waited >= look_seconds:
                break
            # Not "above": a crash may take the head back.
            if (yield calls.head()) != state.drawn:
                break


@dataclass(slots=True)
class UpkeepTimes:
    """When a long-running process does its share of the upkeep. Times are the shell's clock, in seconds."""

    release_at: float = 0.0
    periodic_at: float = 0.0
    maintain_at: float = 0.0
    sweep_until: float = 0.0

    def next_call(self, now: float) -> calls.Call[Any] | None:
        if now >= self.maintain_at:
            self.maintain_at = now + 60.0
            self.sweep_until = now + SWEEP_SECONDS
            return calls.maintain()
        if now >= self.release_at:
            # Until the answer is here.
            self.release_at = now + 1.0
            return calls.release_due()
        if now >= self.periodic_at:
            self.periodic_at = now + 1.0
            return calls.due_periodics()
        return None

    def heard(self, answer: object, now: float, time: datetime) -> list[calls.Call[Any]]:
        """Take in an answer; returns what is to be called because of it. `time` is what the wall clock says."""
        if isinstance(answer, Released) and answer.next_due_seconds is not None:
            self.release_at = now + min(max(answer.next_due_seconds, 0.005), 1.0)
        if isinstance(answer, Upkeep) and answer.events_swept >= FULL_SWEEP:
            # There is more than goes in one transaction, and it must not come faster than it goes.
            self.maintain_at = now + FURTHER_SWEEPS_AFTER_SECONDS
            return [calls.maintain()] if now < self.sweep_until else []
        if not isinstance(answer, list):
            return []
        return [
            calls.fire_periodic(
                due.name, due_at=due.due_at, next_at=next_time(due.cron, due.time_zone, max(time, due.due_at))
            )
            for due in answer
        ]
