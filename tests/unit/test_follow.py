"""Are the decisions of a follower right? No database, no clock: a log of plain lists answers its calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.calls import Call
from headwater.errors import CursorMoved, EpochChanged, PositionExpired
from headwater.log import steps as log_steps
from headwater.log.model import CursorState, Event, LogState, MaintenanceResult, ReleaseResult
from headwater.log.steps import (
    ApplyStep,
    DeliverStep,
    FollowStep,
    MaintenanceSchedule,
    RewindStep,
    WaitForGrowthStep,
    Wake,
    WakeReason,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Crash(Exception):
    """The process ends here."""


def event(position: int, topic: str = "t") -> Event:
    return Event(position, topic, 0, None, None, None, None, None, None, b"", None, NOW)


@dataclass
class FakeLog:
    """Answers the calls of a follower of topic `t` from lists."""

    events: list[Event] = field(default_factory=list)
    head: int = 0
    stable: int = 0
    epoch: int = 1
    # Where each epoch began.
    began_after: dict[int, int] = field(default_factory=dict)
    expired_to: int = 0
    cursors: dict[str, CursorState] = field(default_factory=dict)
    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    # The cursor that the watcher reads; None: each wait ends after half a second, as in the blocking client.
    watched: str | None = None
    shared_watcher: bool = True
    # What the watcher knew when the last wait ended.
    known: tuple[int, int, int] = (0, 0, 1)
    known_cursor: CursorState | None = None
    asked: list[str] = field(default_factory=list)
    rewinds: list[RewindStep] = field(default_factory=list)
    # What happens before a step is carried out, by its number.
    surprises: dict[int, Callable[[FakeLog], None]] = field(default_factory=dict)
    # The moves, by their number, that are done but whose answer is lost, so that they are tried again.
    lost_answers: set[int] = field(default_factory=set)
    steps: int = 0
    moves: int = 0

    def publish(self, *positions: int, topic: str = "t", settle: bool = True) -> None:
        self.events += [event(position, topic) for position in positions]
        self.events.sort()
        self.head = max(self.head, *positions)
        if settle:
            self.stable = self.head

    def answer(self, call: Call[Any]) -> Any:
        name = re.split(r"headwater(?:_internal)?\.", call.sql)[1].split("(")[0].split(" ")[0]
        self.asked.append(name)
        match name, call.params:
            case "open_cursor", (cursor, _, start_after, _):
                gone_to = 0 if start_after else self.expired_to
                return self.cursors.setdefault(cursor, CursorState(start_after or 0, gone_to))
            case "cursor", (cursor,):
                return self.cursors.get(cursor)
            case "expired_to", _:
                return self.expired_to
            case "head", _:
                return self.head
            case "log_state", _:
                return LogState(self.head, self.stable, self.epoch)
            case "common_position", (epoch, position):
                return min([position, *(at for number, at in self.began_after.items() if number > epoch)])
            case "read_stable" | "read_topic", (_, after, stable, batch_size, _, gone_to, epoch):
                self.refuse_other(epoch)
                if self.expired_to > max(after, gone_to):
                    raise PositionExpired("gone", detail={"earliest_position": self.expired_to + 1})
                assert stable <= self.stable, "read beyond what is stable"
                return [e for e in self.events if e.topic == "t" and after < e.position <= stable][:batch_size]
            case "advance_cursor", (cursor, from_position, to_position, epoch):
                self.refuse_other(epoch)
                self.moves += 1
                self.move(cursor, from_position, to_position)
                if self.moves in self.lost_answers:
                    self.move(cursor, from_position, to_position)
                return None
        raise AssertionError(f"the fake log knows no {name} {call.params}")

    def refuse_other(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise EpochChanged("another epoch", detail={"epoch": self.epoch, "common_position": 0})

    def crash(self, head: int, *new: int) -> None:
        """The head goes back, what was above it is gone, and new events get those positions."""
        self.events = [e for e in self.events if e.position <= head]
        self.head = self.stable = head
        self.epoch += 1
        self.began_after[self.epoch] = head
        self.cursors = {name: c for name, c in self.cursors.items() if c.position <= head}
        if new:
            self.events += [event(position)._replace(key=b"new") for position in new]
            self.head = self.stable = max(new)

    def move(self, cursor: str, from_position: int, to_position: int) -> None:
        stored = self.cursors.get(cursor)
        if stored is None or stored.position != from_position:
            raise CursorMoved("moved", detail={"actual_position": stored and stored.position})
        self.cursors[cursor] = stored._replace(position=to_position)

    def wait(self, seconds: float) -> Wake:
        """What the watcher does, in steps of 10 ms."""
        self.waits.append(seconds)
        waited = 0.0
        reason: WakeReason = "time"
        while reason == "time" and waited < (seconds if self.shared_watcher else min(seconds, 0.5)):
            if (self.head, self.stable, self.epoch) != self.known:
                reason = "growth"
            if self.shared_watcher and self.watched and self.cursors.get(self.watched) != self.known_cursor:
                reason = "change"
            if reason == "time":
                waited += 0.01
                self.seconds += 0.01
                self.steps += 1
                self.surprises.get(self.steps, lambda log: None)(self)
        self.known = self.head, self.stable, self.epoch
        self.known_cursor = self.cursors.get(self.watched or "")
        return Wake(reason, waited)

    def drive(self, steps: Generator[FollowStep, Any, None]) -> Iterator[Event]:
        """What a shell does, with time that passes only where the follower waits."""
        outcome: Any = None
        failure: Exception | None = None
        while True:
            try:
                step = steps.send(outcome) if failure is None else steps.throw(failure)
            except StopIteration:
                return
            outcome = failure = None
            self.steps += 1
            assert self.steps < 100_000, "it runs without end"
            self.surprises.get(self.steps, lambda log: None)(self)
            try:
                match step:
                    case WaitForGrowthStep(seconds):
                        outcome = self.wait(seconds)
                    case DeliverStep(events, _):
                        yield from events
                    case ApplyStep(events, move):
                        self.answer(move)
                        yield from events
                    case RewindStep():
                        self.rewinds.append(step)
                    case Call():
                        outcome = self.answer(step)
            except (CursorMoved, PositionExpired, EpochChanged) as error:
                failure = error

    def follow(self, **options: Any) -> Iterator[Event]:
        self.watched = options.get("cursor")
        return self.drive(log_steps.follow(["t"], **options))

    def idle(self, follower: Iterator[Event], *, until: Callable[[], bool]) -> None:
        """Let a follower that has nothing to deliver run until something has happened."""

        def stop(log: FakeLog) -> None:
            if until():
                raise Crash
            self.surprises[self.steps + 1] = stop

        self.surprises[self.steps + 1] = stop
        with pytest.raises(Crash):
            next(follower)


def positions(events: Iterator[Event]) -> list[int]:
    return [e.position for e in events]


logs = st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=40)
batch_sizes = st.integers(1, 7)


def log_of(gaps: list[tuple[int, bool]]) -> FakeLog:
    """Events with gaps between them, some of another topic."""
    log, position = FakeLog(), 0
    for gap, ours in gaps:
        position += gap
        log.publish(position, topic="t" if ours else "other")
    return log


def ours(log: FakeLog) -> list[int]:
    return [e.position for e in log.events if e.topic == "t"]


@given(logs, batch_sizes, st.booleans(), st.booleans())
def test_every_event_is_delivered_once_in_order(
    gaps: list[tuple[int, bool]], batch_size: int, named: bool, in_transaction: bool
) -> None:
    log = log_of(gaps)
    options = {"cursor": "c", "in_transaction": in_transaction} if named else {}
    assert positions(log.follow(batch_size=batch_size, stop_when_caught_up=True, **options)) == ours(log)
    if named:
        # What came after the last event was read as well: nobody needs to keep it for this cursor.
        assert log.cursors["c"].position == log.stable
        assert positions(log.follow(cursor="c", stop_when_caught_up=True)) == []


@given(logs, batch_sizes, st.integers(0, 40))
def test_a_crash_repeats_at_most_the_batch_in_hand(
    gaps: list[tuple[int, bool]], batch_size: int, crash_after: int
) -> None:
    log = log_of(gaps)
    before = []
    for delivered in log.follow(cursor="c", batch_size=batch_size, stop_when_caught_up=True):
        if len(before) == crash_after:
            break
        before.append(delivered.position)
    after = positions(log.follow(cursor="c", batch_size=batch_size, stop_when_caught_up=True))
    assert sorted(set(before) | set(after)) == ours(log)
    assert len(before) + len(after) - len(ours(log)) <= batch_size


@given(logs, batch_sizes, st.sets(st.integers(1, 20)))
def test_a_lost_answer_to_a_move_changes_nothing(
    gaps: list[tuple[int, bool]], batch_size: int, lost_answers: set[int]
) -> None:
    log = log_of(gaps)
    log.lost_answers = lost_answers
    assert positions(log.follow(cursor="c", batch_size=batch_size, stop_when_caught_up=True)) == ours(log)


@given(logs, batch_sizes, st.integers(1, 60), st.integers(0, 120))
def test_a_rewind_while_busy_repeats_from_there(
    gaps: list[tuple[int, bool]], batch_size: int, at_step: int, to: int
) -> None:
    log = log_of(gaps)
    rewound: list[int] = []

    def rewind(log: FakeLog) -> None:
        if "c" in log.cursors and to < log.cursors["c"].position:
            log.cursors["c"] = CursorState(to, 0)
            rewound.append(to)

    log.surprises[at_step] = rewind
    seen = positions(log.follow(cursor="c", batch_size=batch_size, stop_when_caught_up=True))
    once = ours(log)
    assert sorted(set(seen)) == once
    if rewound and log.cursors["c"].position == log.stable:
        again = [position for position in once if position > to]
        # Noticed at the next move, or at the next start if there was none.
        assert seen[-len(again) :] == again or seen == once
    drops = sum(later <= earlier for earlier, later in pairwise(seen))
    assert drops <= len(rewound)


@pytest.mark.parametrize("shared_watcher", [True, False])
def test_a_rewind_while_idle_is_noticed_within_half_a_second(shared_watcher: bool) -> None:
    log = FakeLog(shared_watcher=shared_watcher)
    log.publish(1, 2, 3)
    follower = log.follow(cursor="c")
    assert [next(follower).position for _ in range(3)] == [1, 2, 3]
    log.surprises[log.steps + 20] = lambda log: log.cursors.update(c=CursorState(1, 0))
    before = log.seconds
    assert [next(follower).position for _ in range(2)] == [2, 3]
    assert log.seconds - before <= log_steps.IDLE_LOOK_SECONDS + 0.1


@pytest.mark.parametrize("busy", [True, False])
def test_a_rewind_to_the_beginning_forgives_what_is_gone(busy: bool) -> None:
    log = FakeLog()
    log.publish(5, 6, 7)
    log.cursors["c"] = CursorState(5, 0)
    follower = log.follow(cursor="c")
    assert next(follower).position == 6
    if not busy:
        assert next(follower).position == 7
        log.idle(follower, until=lambda: log.seconds > 0.1)
        follower = log.follow(cursor="c")
        log.idle(follower, until=lambda: log.seconds > 0.3)
        follower = log.follow(cursor="c")
    log.expired_to = 4
    log.surprises[log.steps + 3] = lambda log: log.cursors.update(c=CursorState(0, 4))
    assert 5 in [next(follower).position for _ in range(2)]


@pytest.mark.parametrize("busy", [True, False])
def test_a_deleted_cursor_ends_its_follower(busy: bool) -> None:
    log = FakeLog()
    log.publish(1, 2)
    follower = log.follow(cursor="c", batch_size=1)
    assert next(follower).position == 1
    if not busy:
        assert next(follower).position == 2
        log.surprises[log.steps + 10] = lambda log: log.cursors.clear()
    else:
        log.cursors.clear()
    with pytest.raises(CursorMoved):
        next(follower)
    assert log.cursors == {}


def test_a_publisher_in_flight_is_waited_for_even_if_the_log_does_not_grow() -> None:
    log = FakeLog()
    log.publish(1)
    log.publish(3, settle=False)
    follower = log.follow()
    assert next(follower).position == 1

    def commit(log: FakeLog) -> None:
        log.publish(2)

    log.surprises[log.steps + 10] = commit
    assert [next(follower).position for _ in range(2)] == [2, 3]


def test_what_settles_after_a_silent_stretch_is_not_passed_over() -> None:
    log = FakeLog()
    log.publish(1, 2, 3, topic="other")
    log.publish(9, settle=False)
    log.stable = 5
    follower = log.follow(cursor="c")

    def commit(log: FakeLog) -> None:
        log.publish(7)

    log.surprises[20] = commit
    assert [next(follower).position for _ in range(2)] == [7, 9]


@pytest.mark.parametrize("cursor", [None, "c"])
def test_an_idle_follower_leaves_the_polling_to_the_watcher(cursor: str | None) -> None:
    log = FakeLog()
    log.publish(1)
    follower = log.follow(cursor=cursor)
    assert next(follower).position == 1
    log.idle(follower, until=lambda: log.seconds > 5)
    log.asked.clear()
    follower = log.follow(start_after=1, cursor=cursor)
    log.idle(follower, until=lambda: log.seconds > 305)
    assert set(log.asked) <= {"log_state", "cursor", "open_cursor"}
    # Once at first, once when the watcher has read the cursor, and then now and then.
    assert log.asked.count("log_state") <= 3 + 300 / log_steps.IDLE_SAVE_SECONDS


def test_an_idle_cursor_is_moved_on_after_30_seconds_of_silence() -> None:
    log = FakeLog()
    log.publish(1)
    log.publish(50, topic="other")
    follower = log.follow(cursor="c")
    assert next(follower).position == 1
    log.idle(follower, until=lambda: log.cursors["c"].position > 1)
    assert log.cursors["c"].position == 50
    assert 30 <= log.seconds <= 31


def test_a_cursor_that_was_rewound_is_not_moved_on_by_its_idle_follower() -> None:
    log = FakeLog()
    log.publish(1)
    log.publish(50, topic="other")
    follower = log.follow(cursor="c")
    assert next(follower).position == 1

    def rewind_before_the_move(log: FakeLog) -> None:
        if log.seconds > 30 and log.asked[-1] == "cursor":
            log.cursors["c"] = CursorState(0, 0)
        else:
            log.surprises[log.steps + 1] = rewind_before_the_move

    log.surprises[log.steps + 1] = rewind_before_the_move
    assert next(follower).position == 1


def test_without_a_cursor_nothing_is_saved() -> None:
    log = FakeLog()
    log.publish(1, 2)
    assert positions(log.follow(stop_when_caught_up=True, start_after=1)) == [2]
    assert log.cursors == {}


def test_expired_events_are_an_error_unless_skipped_or_never_asked_for() -> None:
    log = FakeLog(expired_to=5)
    log.publish(6, 7)
    with pytest.raises(PositionExpired) as caught:
        list(log.follow(start_after=2, stop_when_caught_up=True))
    assert caught.value.earliest_position == 6
    assert positions(log.follow(start_after=2, skip_expired=True, stop_when_caught_up=True)) == [6, 7]
    assert positions(log.follow(stop_when_caught_up=True)) == [6, 7]
    assert positions(log.follow(cursor="c", stop_when_caught_up=True)) == [6, 7]


def asked(call: Call[Any] | None) -> str | None:
    return call and re.split(r"headwater(?:_internal)?\.", call.sql)[1].split("(")[0]


def test_maintenance_is_due_at_once_then_every_minute_and_looks_for_due_events_every_second() -> None:
    times = MaintenanceSchedule()
    assert asked(times.next_call(100.0)) == "maintain"
    assert {asked(times.next_call(100.0)), asked(times.next_call(100.0))} == {"release_due", "due_cron_schedules"}
    assert times.next_call(100.9) is None
    assert {asked(times.next_call(101.0)), asked(times.next_call(101.0))} == {"release_due", "due_cron_schedules"}
    assert times.next_call(101.0) is None
    assert asked(times.next_call(160.0)) == "maintain"


def test_what_retention_could_not_take_in_one_go_it_goes_on_with_but_not_for_ever() -> None:
    times = MaintenanceSchedule()
    full = MaintenanceResult(False, 0, 0, 0, 50_000)
    times.next_call(100.0)
    assert [asked(call) for call in times.handle_result(full, 101.0, NOW)] == ["maintain"]
    assert times.handle_result(full, 102.5, NOW) == []
    # Others have their turn before it goes on.
    assert {asked(times.next_call(102.5)), asked(times.next_call(102.5))} == {"release_due", "due_cron_schedules"}
    assert asked(times.next_call(107.5)) == "maintain"
    assert times.handle_result(MaintenanceResult(False, 0, 0, 0, 49_999), 108.0, NOW) == []
    assert asked(times.next_call(160.0)) != "maintain"
    assert asked(times.next_call(167.5)) == "maintain"


@given(st.floats(-10, 10))
def test_the_next_due_event_is_released_in_time_but_never_in_a_spin(next_due_seconds: float) -> None:
    times = MaintenanceSchedule(maintain_at=1e9, cron_schedule_at=1e9)
    assert asked(times.next_call(50.0)) == "release_due"
    assert times.handle_result(ReleaseResult(1, next_due_seconds), 50.0, NOW) == []
    wanted = 50.0 + min(max(next_due_seconds, 0.005), 1.0)
    assert times.next_call(wanted - 0.001) is None
    assert asked(times.next_call(wanted)) == "release_due"


def test_maintenance_without_anything_scheduled_looks_again_in_a_second() -> None:
    times = MaintenanceSchedule(maintain_at=1e9, cron_schedule_at=1e9)
    times.next_call(50.0)
    assert times.handle_result(ReleaseResult(0, None), 50.2, NOW) == []
    assert times.next_call(50.9) is None
    assert asked(times.next_call(51.0)) == "release_due"


def test_an_idle_follower_goes_back_when_a_crash_takes_positions_back() -> None:
    log = FakeLog()
    log.publish(1)
    # Positions up to 600 were assigned by others and rolled back: it has read over them.
    log.head = log.stable = 600
    log.surprises[30] = lambda log: log.crash(33, 34, 35)
    reading = log.follow()
    assert [next(reading).position for _ in range(3)] == [1, 34, 35]
    assert [(step.epoch, step.read_to, step.position) for step in log.rewinds] == [(2, 600, 33)]


@given(crash_at=st.integers(1, 12), batch_size=st.integers(1, 4), cursor=st.sampled_from([None, "c"]))
def test_whenever_the_epoch_changes_no_event_is_skipped(crash_at: int, batch_size: int, cursor: str | None) -> None:
    log = FakeLog()
    log.publish(*range(1, 9))
    log.head = log.stable = 20
    kept = {} if cursor is None else {cursor: CursorState(0, 0)}

    def crash(log: FakeLog) -> None:
        before = dict(log.cursors)
        log.crash(4, *range(5, 15))
        # A cursor is in the same database: what it says has survived with the events, or is as it was before.
        log.cursors = {name: c._replace(position=min(c.position, 4)) for name, c in before.items()}

    log.surprises[crash_at] = crash
    log.cursors |= kept
    got: list[Event] = []
    for one in log.follow(cursor=cursor, batch_size=batch_size):
        got.append(one)
        if one.position == 14:
            break
    new = [e.position for e in got if e.key == b"new"]
    assert sorted(set(new)) == list(range(5, 15))
    assert {e.position for e in got} >= set(range(1, 15))


def test_a_follower_may_be_told_to_raise_when_the_epoch_changes() -> None:
    log = FakeLog()
    log.publish(1, 2)
    log.surprises[20] = lambda log: log.crash(1, 2)
    reading = log.follow(rewind_on_epoch_change=False)
    assert [next(reading).position, next(reading).position] == [1, 2]
    with pytest.raises(EpochChanged) as raised:
        next(reading)
    assert (raised.value.epoch, raised.value.common_position) == (2, 1)


def test_a_position_of_an_older_epoch_starts_at_the_last_common_one() -> None:
    log = FakeLog()
    log.publish(*range(1, 6))
    log.crash(3, 4, 5)
    assert [e.position for e in log.follow(start_after=5, epoch=1, stop_when_caught_up=True)] == [4, 5]


def test_a_position_that_was_never_issued_is_refused() -> None:
    log = FakeLog()
    log.publish(1)
    with pytest.raises(EpochChanged):
        next(log.follow(start_after=7))
