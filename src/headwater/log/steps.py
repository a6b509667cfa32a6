"""The loops of consumers as pure generators of steps. No I/O, no clock.

`follow` reads the log for a follower or a cursor, `work` claims and settles leases for a worker. Each yields the next
step: a call to run, a wait, events to deliver, a lease to handle. The driver (`log/follow.py`, `queue/worker.py`)
carries the step out and sends the result back; it throws the error of a call into the generator.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from headwater.calls import Call, publishing
from headwater.calls import log as log_calls
from headwater.calls import queues as queue_calls
from headwater.calls import reading as reading_calls
from headwater.errors import CursorMoved, EpochChanged, LeaseLost, epoch_changed_error, never_issued_error
from headwater.log.cron import next_time
from headwater.log.model import CursorState, Event, LogState, MaintenanceResult, ReleaseResult
from headwater.queue.model import Lease

WakeReason = Literal["growth", "change", "time", "stop"]
"""Why a wait ended.

growth: the log has grown, or more of it is stable. change: the queue or cursor was changed, or the queue has something
to hand out again. time: the time has passed. stop: the process is stopping.
"""


@dataclass(frozen=True, slots=True)
class Wake:
    """The end of a wait: why it ended, and how long it took."""

    reason: WakeReason
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitForGrowthStep:
    """Wait until the log has grown since the last such step ended, or the consumer's queue or cursor has changed; at
    most this long. The result is a Wake."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DeliverStep:
    """Deliver these events to the consumer, and continue when it asks for more. `epoch` is the epoch of their
    positions."""

    events: Sequence[Event]
    epoch: int


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Run the handler on these events and move the cursor, in one transaction."""

    events: Sequence[Event]
    move: Call[None]


@dataclass(frozen=True, slots=True)
class RewindStep:
    """Report that the epoch changed: positions after `position` may have been reassigned, so reading continues from
    there."""

    epoch: int
    read_to: int
    position: int


@dataclass(frozen=True, slots=True)
class HandleStep:
    """Run the handlers on the events of this lease; the result is a HandleResult."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class HandleResult:
    """The outcomes of a lease's events that are not done; `stop`: the worker is stopping, and this was the last
    batch."""

    outcomes: queue_calls.Outcomes
    stop: bool


FollowStep = Call[Any] | WaitForGrowthStep | DeliverStep | ApplyStep | RewindStep
WorkStep = Call[Any] | WaitForGrowthStep | HandleStep

OnEpochChange = Literal["rewind", "error"]
"""What a reader does when positions may have been reassigned: continue from the last common position, or raise."""

# Retention removes at most this many events per maintenance call; if a call reaches it, a process repeats the call for
# SWEEP_SECONDS and resumes after FURTHER_SWEEPS_AFTER_SECONDS.
FULL_SWEEP = 50_000
SWEEP_SECONDS = 2.0
FURTHER_SWEEPS_AFTER_SECONDS = 5.0
# A cursor whose topics are silent is still moved after this time, since it would otherwise hold up retention.
IDLE_SAVE_SECONDS = 30.0
# How often a follower checks whether its cursor was set, while it is woken only by events that are not its own.
IDLE_LOOK_SECONDS = 0.5
# A worker whose claim found nothing claims again after this time, and then after four times as long each time, even if
# it is not woken: the queue may have been locked by other claims.
MIN_RECLAIM_SECONDS = 0.2
MAX_RECLAIM_SECONDS = 60.0
# Above every position: treat all missing events as expected.
NO_LIMIT = 1 << 62


def follow(
    topics: Sequence[str] | None,
    *,
    start_after: int | None = None,
    epoch: int | None = None,
    cursor: str | None = None,
    holds_retention: bool | None = None,
    batch_size: int = 1000,
    max_bytes: int = 16_777_216,
    skip_expired: bool = False,
    stop_when_caught_up: bool = False,
    in_transaction: bool = False,
    rewind_on_epoch_change: bool = True,
) -> Generator[FollowStep, Any, None]:
    """Read all events, then wait for new ones. A named cursor determines the start and is moved after each batch.

    The state between two calls (`after`, `saved`) is a pair of positions of `epoch`. Every read and every move of the
    cursor passes that epoch, and the database rejects it if the log is in another one. Reading then continues from the
    cursor, which is in the same database as the events, or without a cursor from the last position that both epochs
    share. So no event is skipped whose position was reassigned after a crash, failover or restore.
    """
    if cursor is not None:
        opened: CursorState = yield reading_calls.open_cursor(
            cursor, topics=topics, start_after=start_after, holds_retention=holds_retention
        )
        # The position of a cursor belongs to the current epoch, whatever epoch the caller remembers.
        epoch = None
    elif start_after is not None:
        opened = CursorState(start_after, 0)
    else:
        opened = CursorState(0, (yield reading_calls.expired_to(topics)))
    gone_to = NO_LIMIT if skip_expired else opened.gone_to
    # The position read so far, and the position saved in the cursor. They differ if the topics had no events.
    after = saved = opened.position
    idle_seconds, look_at = 0.0, IDLE_LOOK_SECONDS
    may_be_set = False
    refused: EpochChanged | None = None
    while True:
        state: LogState = yield log_calls.log_state(topics)
        if epoch is None and after > state.head:
            raise never_issued_error(after, None, state.epoch, state.head)
        if epoch is not None and epoch != state.epoch:
            if cursor is not None:
                opened = yield from _find_cursor(cursor)
                gone_to = NO_LIMIT if skip_expired else opened.gone_to
                common = opened.position
            else:
                common = yield log_calls.common_position(epoch, after)
            if not rewind_on_epoch_change:
                raise epoch_changed_error(epoch, after, state.epoch, common)
            yield RewindStep(state.epoch, after, common)
            after = saved = common
            refused = None
        elif refused is not None:
            # The call was rejected although the epoch is the same: repeating it would fail forever.
            raise refused
        epoch = state.epoch
        try:
            while state.stable > after:
                events: list[Event] = yield reading_calls.read_stable(
                    topics,
                    after=after,
                    stable=state.stable,
                    batch_size=batch_size,
                    max_bytes=max_bytes,
                    gone_to=gone_to,
                    epoch=epoch,
                )
                if not events:
                    # There are no events of these topics up to the stable position: continue from there.
                    after = state.stable
                    break
                idle_seconds, look_at = 0.0, IDLE_LOOK_SECONDS
                last = events[-1].position
                if cursor is None:
                    yield DeliverStep(events, epoch)
                    after = last
                    continue
                move = reading_calls.advance_cursor(cursor, from_position=saved, to_position=last, epoch=epoch)
                try:
                    if in_transaction:
                        yield ApplyStep(events, move)
                    else:
                        yield DeliverStep(events, epoch)
                        yield move
                    after = saved = last
                except CursorMoved:
                    # The cursor was set, or an earlier move succeeded and its response was lost.
                    opened = yield from _find_cursor(cursor)
                    after = saved = opened.position
                    gone_to = NO_LIMIT if skip_expired else opened.gone_to
            if cursor is not None and (stop_when_caught_up or may_be_set or idle_seconds >= look_at):
                if after > saved and (stop_when_caught_up or idle_seconds >= IDLE_SAVE_SECONDS):
                    idle_seconds = 0.0
                    with suppress(CursorMoved):
                        yield reading_calls.advance_cursor(cursor, from_position=saved, to_position=after, epoch=epoch)
                        saved = after
                look_at = idle_seconds + IDLE_LOOK_SECONDS
                # The cursor may have been set while there was nothing to read.
                opened = yield from _find_cursor(cursor)
                if opened.position != saved:
                    after = saved = opened.position
                    gone_to = NO_LIMIT if skip_expired else opened.gone_to
                    continue
        except EpochChanged as error:
            refused = error
            continue
        if stop_when_caught_up:
            return
        to_save = cursor is not None and after > saved
        longest = IDLE_SAVE_SECONDS - idle_seconds if to_save else IDLE_SAVE_SECONDS
        woken: Wake = yield WaitForGrowthStep(max(longest, IDLE_LOOK_SECONDS))
        idle_seconds += woken.seconds
        may_be_set = woken.reason != "growth"


def _find_cursor(cursor: str) -> Generator[FollowStep, Any, CursorState]:
    """The cursor's state. If the cursor was deleted, the follower ends with an error rather than creating it again."""
    found: CursorState | None = yield reading_calls.find_cursor(cursor)
    if found is None:
        raise CursorMoved(f'cursor "{cursor}" was deleted', detail={"cursor": cursor, "actual_position": None})
    return found


def work(
    queue: str,
    *,
    worker: str,
    batch_size: int,
    lease_seconds: float | None = None,
    handler_acks: bool = False,
) -> Generator[WorkStep, Any, None]:
    """The loop of a worker: claim, handle, settle and claim again.

    `handler_acks`: done events are already acknowledged, in the handler's own transaction.
    """
    lease: Lease | None = None
    outcomes: queue_calls.Outcomes = {}
    reclaim_seconds = MIN_RECLAIM_SECONDS
    while True:
        try:
            if lease is None:
                lease = yield queue_calls.claim(
                    queue, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds, relaxed=True
                )
            elif handler_acks:
                ended, lease = lease, None
                if outcomes:
                    yield queue_calls.settle(ended, outcomes, rest_done=False, relaxed=True)
                continue
            else:
                lease = yield queue_calls.settle_and_claim(
                    lease, outcomes, worker=worker, batch_size=batch_size, lease_seconds=lease_seconds
                )
        except LeaseLost:
            # The events belong to another worker now, or will be handed out again.
            lease = None
            continue
        if lease is not None:
            reclaim_seconds = MIN_RECLAIM_SECONDS
            handled: HandleResult = yield HandleStep(lease)
            outcomes = handled.outcomes
            if handled.stop:
                if outcomes or not handler_acks:
                    with suppress(LeaseLost):
                        yield queue_calls.settle(lease, outcomes, rest_done=not handler_acks, relaxed=True)
                return
            continue
        # It ends at once if the log has grown since before the claim.
        woken: Wake = yield WaitForGrowthStep(reclaim_seconds)
        if woken.reason == "stop":
            return
        waited_in_vain = woken.reason == "time"
        reclaim_seconds = min(reclaim_seconds * 4, MAX_RECLAIM_SECONDS) if waited_in_vain else MIN_RECLAIM_SECONDS


@dataclass(slots=True)
class MaintenanceSchedule:
    """When a long-running process runs maintenance. Times are seconds of the driver's monotonic clock."""

    release_at: float = 0.0
    cron_schedule_at: float = 0.0
    maintain_at: float = 0.0
    sweep_until: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether next_call() has a call."""
        return now >= min(self.maintain_at, self.release_at, self.cron_schedule_at)

    def next_call(self, now: float) -> Call[Any] | None:
        if now >= self.maintain_at:
            self.maintain_at = now + 60.0
            self.sweep_until = now + SWEEP_SECONDS
            return log_calls.maintain()
        if now >= self.release_at:
            # Until the result of this call sets the next time.
            self.release_at = now + 1.0
            return publishing.release_due()
        if now >= self.cron_schedule_at:
            self.cron_schedule_at = now + 1.0
            return publishing.due_cron_schedules()
        return None

    def handle_result(self, answer: object, now: float, time: datetime) -> list[Call[Any]]:
        """Process the result of a call; returns the calls that follow from it. `time` is the wall-clock time."""
        if isinstance(answer, ReleaseResult) and answer.next_due_seconds is not None:
            self.release_at = now + min(max(answer.next_due_seconds, 0.005), 1.0)
        if isinstance(answer, MaintenanceResult) and answer.events_swept >= FULL_SWEEP:
            # One transaction did not remove all expired events. Continue soon, since removal must keep up with expiry.
            self.maintain_at = now + FURTHER_SWEEPS_AFTER_SECONDS
            return [log_calls.maintain()] if now < self.sweep_until else []
        if not isinstance(answer, list):
            return []
        return [
            publishing.fire_cron_schedule(
                due.name, due_at=due.due_at, next_at=next_time(due.cron, due.time_zone, max(time, due.due_at))
            )
            for due in answer
        ]
