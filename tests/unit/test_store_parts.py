"""Are the parts of the event store right by themselves? Queries, the tail, turns, and the forming of groups."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.calls import store as store_calls
from headwater.client.eventstore import group_commit, subscribe
from headwater.client.eventstore.group_commit import GroupCommit, new_event_ids
from headwater.client.eventstore.live_reader import LiveReader
from headwater.client.eventstore.subscribe import StoreSubscriptions
from headwater.errors import (
    EpochChanged,
    InvalidEvent,
    InvalidRequest,
    LogUnavailable,
    OrderBroken,
    epoch_changed_error,
)
from headwater.eventstore import SqliteStores, leader_lock
from headwater.eventstore import open as open_stores
from headwater.eventstore.leader_lock import AsyncLeaderLock, LeaderLock, SplitTuner
from headwater.eventstore.query import (
    EVERYTHING,
    AppendResult,
    Item,
    LatestMatchIs,
    NewStoreEvent,
    NoMatchAfter,
    Query,
    StoreEvent,
    size_of,
)
from headwater.eventstore.recent_events import RecentEvents
from patience import PATIENCE_SECONDS

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def event(offset: int, *, position: int | None = None, payload: bytes = b"") -> StoreEvent:
    return StoreEvent(offset * 10 if position is None else position, offset, "", "A", (), None, None, payload, NOW)


# --- queries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Query.of(tags="x"), r'tags=\["x"\]'),
        (lambda: Query.of(types="x"), r'types=\["x"\]'),
        (lambda: Query.of(tags=[1]), "1 to 255 characters"),
        (lambda: Query.of(types=["x" * 201]), "1 to 200 characters"),
        (lambda: Query.of(fields={"k": None}), "a string, a number or a boolean"),
        (lambda: Query.of(fields={"k": {}}), "a string, a number or a boolean"),
        (lambda: Query.of(fields={1: "x"}), "invalid field name"),
        (lambda: Query.of(tags=["\ud800"]), "UTF-8"),
        (lambda: Query([{"tags": ["x"]}]), "consist of Item"),
        (lambda: Query([Item()] * 101), "at most 100 items"),
        (lambda: NoMatchAfter(Query(), -1), "invalid position"),
        (lambda: LatestMatchIs(Query(), -1), "invalid position"),
        (lambda: NoMatchAfter(Query(), True), "invalid position"),
    ],
)
def test_what_is_no_query_is_refused_with_what_to_write_instead(make: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        make()


@pytest.mark.parametrize("folder", ["a#b", "a?mode=memory", "100%", "%41", "ä ö", "a&b;c"])
def test_a_directory_of_any_name_holds_its_files_and_nothing_is_elsewhere(folder: str, tmp_path: Path) -> None:
    with SqliteStores(tmp_path / folder) as stores:
        stores.create_store("s").append(NewStoreEvent("A"))
        assert stores.store("s").count() == 1
    assert [path.name for path in tmp_path.iterdir()] == [folder]
    assert (tmp_path / folder / "s.sqlite").stat().st_size > 0
    with SqliteStores(tmp_path / folder) as stores:
        assert stores.store("s").count() == 1


def test_queries_are_joined_and_everything_stays_everything() -> None:
    one, two = Query.of(tags=["x"]), Query.of(types=["A"])
    assert (one | two).items == (*one.items, *two.items)
    assert (one | Query()) == (Query() | one) == Query()
    assert Query.of(tags=["x", "x"]) == one


@pytest.mark.parametrize("address", ["sqlite://", "sqlite:///", "mysql://x", "", "dir", "sqlite:dir"])
def test_what_is_no_address_is_refused_with_what_to_write_instead(address: str) -> None:
    with pytest.raises(InvalidRequest, match="sqlite:///directory"):
        open_stores(address)


def test_ids_are_their_own_and_in_the_order_of_time() -> None:
    ids = new_event_ids(1000)
    assert len(set(ids)) == 1000
    assert all(len(value) == 36 and value[14] == "7" and value[19] in "89ab" for value in ids)
    assert [value[:8] for value in ids] == sorted(value[:8] for value in ids)


# --- the tail ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), max_size=10), st.integers(1, 12), st.data())
def test_whoever_is_within_the_tail_gets_every_event_once(sizes: list[int], limit: int, data: Any) -> None:
    tail, everything = RecentEvents(0, 0), []
    offsets = itertools.count(1)
    for size in sizes:
        batch = [event(next(offsets)) for _ in range(size)]
        everything += batch
        tail = tail.extended(batch, max_events=limit)
        assert len(tail.events) <= limit
        assert tail.ceiling == everything[-1].position
        assert [e for e in everything if e.position > tail.floor] == list(tail.events)
    place, got = tail.floor, []
    while batch := tail.after(place, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 100))):
        got += batch
        place = batch[-1].position
    assert got == list(tail.events)


def test_the_tail_is_bounded_in_bytes_and_keeps_at_least_the_last() -> None:
    tail = RecentEvents(0, 0).extended([event(n, payload=b"x" * 10) for n in range(1, 6)], max_bytes=25)
    assert [e.topic_offset for e in tail.events] == [3, 4, 5]
    assert tail.floor == 20
    tail = tail.extended([event(6, payload=b"x" * 100)], max_bytes=25)
    assert [e.topic_offset for e in tail.events] == [6]


def test_every_part_of_an_event_counts_in_the_tail_and_in_what_is_taken_from_it() -> None:
    large = event(1)._replace(metadata={"m": "x" * 10})
    assert size_of(large) == len('A{"m": "xxxxxxxxxx"}')
    events = [large._replace(position=n, topic_offset=n) for n in range(1, 8)]
    tail = RecentEvents(0, 0).extended(events, max_bytes=61)
    assert [e.topic_offset for e in tail.events] == [4, 5, 6, 7]
    for max_bytes, taken in ((0, 1), (20, 1), (21, 2), (60, 3), (1000, 4)):
        assert list(tail.after(3, 10, max_bytes)) == events[3 : 3 + taken]
    assert list(tail.after(5, 10, 20)) == [events[5]]
    # What is counted goes on from tail to tail.
    more = [large._replace(position=n, topic_offset=n) for n in (8, 9)]
    assert list(tail.extended(more).after(6, 10, 40)) == [events[6], more[0]]


@pytest.mark.parametrize("offsets", [[2, 4], [2, 2], [3], [1]])
def test_a_gap_or_a_repeat_is_never_passed_on(offsets: list[int]) -> None:
    tail = RecentEvents(0, 0).extended([event(1)])
    with pytest.raises(OrderBroken, match="no gaps"):
        tail.extended([event(n, position=100 + place) for place, n in enumerate(offsets)])
    with pytest.raises(OrderBroken):
        tail.extended([event(2, position=10)])


# --- turns -------------------------------------------------------------------------------------------------------


def test_one_thread_has_the_turn_and_the_next_gets_it() -> None:
    turn = LeaderLock()
    assert turn.acquire_unless(lambda: False, 1)
    assert not turn.acquire_unless(lambda: False, 0.001)
    assert not turn.acquire_unless(lambda: True, 1)
    taken = threading.Event()
    other = threading.Thread(target=lambda: turn.acquire_unless(lambda: False, 20) and taken.set())
    other.start()
    turn.release()
    assert taken.wait(PATIENCE_SECONDS)
    other.join()
    turn.release()
    assert not turn.acquire_unless(lambda: True, 1)


def test_a_thread_that_is_stopped_while_it_waits_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = LeaderLock()
    assert turn.acquire_unless(lambda: False, 1)

    class Interrupted:
        """A sleep in which the turn comes, and Ctrl-C with it."""

        def acquire(self, timeout: float = -1) -> bool:
            if timeout < 0:
                return True
            turn.release()
            raise KeyboardInterrupt

        def release(self) -> None:
            """Nobody sleeps here."""

    monkeypatch.setattr("headwater.eventstore.leader_lock.threading.Lock", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        turn.acquire_unless(lambda: False, 1)
    monkeypatch.undo()
    assert turn.acquire_unless(lambda: False, 0)


def test_one_task_has_the_turn_and_the_next_gets_it() -> None:
    async def run() -> None:
        turn = AsyncLeaderLock()
        assert await turn.acquire_unless(lambda: False, 1)
        assert not await turn.acquire_unless(lambda: False, 0.001)
        assert not await turn.acquire_unless(lambda: True, 1)
        waiting = [asyncio.create_task(turn.acquire_unless(lambda: False, 20)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        turn.release()
        done, _ = await asyncio.wait(waiting[1:], return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_SECONDS)
        assert len(done) == 1
        turn.release()
        assert await asyncio.wait_for(asyncio.gather(*waiting[1:]), PATIENCE_SECONDS) == [True, True]
        assert not turn._waiters
        turn.release()
        assert not turn._taken

    asyncio.run(run())


def test_two_tasks_have_the_turn_where_there_are_two_and_who_does_not_want_it_is_passed_over() -> None:
    async def run() -> None:
        most = 2
        turn = AsyncLeaderLock(most=lambda: most)
        assert await turn.acquire_unless(lambda: False, 1)
        assert await turn.acquire_unless(lambda: False, 1)
        wants = False
        unwilling = asyncio.create_task(turn.acquire_unless(lambda: False, 20, lambda: wants))
        willing = asyncio.create_task(turn.acquire_unless(lambda: False, 20))
        await asyncio.sleep(0)
        turn.release()
        assert await asyncio.wait_for(willing, PATIENCE_SECONDS)
        assert not unwilling.done()
        # As many as there may be now, and no more.
        wants, most = True, 1
        turn.release()
        await asyncio.sleep(0)
        assert not unwilling.done()
        turn.release()
        assert await asyncio.wait_for(unwilling, PATIENCE_SECONDS)
        turn.release()
        assert turn._taken == 0

    asyncio.run(run())


def test_each_task_waits_as_long_as_it_said_and_leaves_no_timer() -> None:
    async def run() -> None:
        turn = AsyncLeaderLock()
        loop = asyncio.get_running_loop()
        assert await turn.acquire_unless(lambda: False, 1)
        started = loop.time()

        async def waited(seconds: float) -> float:
            assert not await turn.acquire_unless(lambda: False, seconds)
            return loop.time() - started

        times = [0.2, 0.05, 20, 0.1]
        tasks = [asyncio.create_task(waited(seconds)) for seconds in times]
        done, _ = await asyncio.wait(tasks, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        assert tasks[1] in done
        assert (await tasks[3], await tasks[0]) >= (0.1, 0.2)
        assert not tasks[2].done()
        tasks[2].cancel()
        await asyncio.wait(tasks)
        assert not turn._waiters
        assert turn._timer is None

    asyncio.run(run())


@pytest.mark.parametrize("halves_take", [0.8, 0.95, 1.3])
def test_the_faster_of_two_paces_is_kept_to_and_the_other_one_tried_again(halves_take: float) -> None:
    pace = SplitTuner()
    now = 0.0

    def groups(number: int, halves_take: float) -> int:
        """How many of them went in halves."""
        nonlocal now
        in_halves = 0
        for _ in range(number):
            in_halves += pace.in_halves
            now += 0.001 * (halves_take if pace.in_halves else 1.0)
            pace.note(16, now)
        return in_halves

    assert groups(leader_lock.KEEP_GROUPS, halves_take) == 0
    assert groups(leader_lock.TRY_GROUPS, halves_take) == leader_lock.TRY_GROUPS
    assert pace.in_halves is (halves_take < leader_lock.WORTH_IT)
    # Hours without anybody, and one alone, say nothing.
    now += 10_000
    pace.note(16, now)
    pace.note(1, now + 0.05, alone=True)
    assert pace.in_halves is (halves_take < leader_lock.WORTH_IT)
    # Things change, and it is noticed.
    groups(3 * (leader_lock.KEEP_GROUPS + leader_lock.TRY_GROUPS), 2 - halves_take)
    later = groups(1000, 2 - halves_take)
    assert later > 900 if halves_take > 1 else later < 100


# --- groups ------------------------------------------------------------------------------------------------------


def encoded(size: int = 1, payload: bytes = b"") -> store_calls.EncodedAppend:
    return store_calls.encode_append([NewStoreEvent("A", payload)] * size, None, new_event_ids(size))


def done(appends: Sequence[store_calls.EncodedAppend]) -> list[AppendResult]:
    return [AppendResult((1,), False, None, None) for _ in appends]


def test_a_group_is_bounded_in_appends_events_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "MAX_GROUP_APPENDS", 3)
    monkeypatch.setattr(group_commit, "MAX_GROUP_EVENTS", 5)
    monkeypatch.setattr(group_commit, "MAX_GROUP_BYTES", 100)
    commits = GroupCommit(done)
    for append in [*(encoded() for _ in range(4)), encoded(4), encoded(9), encoded(1, b"x" * 200), encoded()]:
        commits._waiting.append(group_commit.PendingAppend(append))
    groups = []
    while group := commits._next_group():
        groups.append([len(ticket.append.events) for ticket in group])
    assert groups == [[1, 1, 1], [1, 4], [9], [1], [1]]


def test_an_append_alone_is_sent_at_once_and_alone() -> None:
    sent: list[int] = []
    commits = GroupCommit(lambda appends: sent.append(len(appends)) or done(appends))
    assert commits.append(encoded(), timeout_seconds=0.0).positions == (1,)
    assert sent == [1]


def test_what_is_refused_fails_alone_and_what_is_lost_fails_together() -> None:
    good, bad = encoded(), encoded()
    sent: list[int] = []

    def send(appends: Sequence[store_calls.EncodedAppend]) -> list[AppendResult]:
        sent.append(len(appends))
        if bad in appends:
            raise InvalidEvent("too strange")
        return done(appends)

    commits = GroupCommit(send)
    others = [group_commit.PendingAppend(good), group_commit.PendingAppend(bad), group_commit.PendingAppend(good)]
    commits._waiting.extend(others)
    assert commits.append(encoded(), timeout_seconds=PATIENCE_SECONDS).positions
    assert sent == [4, 1, 1, 1, 1]
    assert [ticket.result is not None for ticket in others] == [True, False, True]
    assert isinstance(others[1].error, InvalidEvent)

    def fail(appends: Sequence[store_calls.EncodedAppend]) -> list[AppendResult]:
        raise LogUnavailable("gone")

    commits = GroupCommit(fail)
    others = [group_commit.PendingAppend(good), group_commit.PendingAppend(good)]
    commits._waiting.extend(others)
    with pytest.raises(LogUnavailable):
        commits.append(encoded(), timeout_seconds=PATIENCE_SECONDS)
    assert all(isinstance(ticket.error, LogUnavailable) for ticket in others)
    assert others[0].error is not others[1].error


def test_who_is_stopped_in_the_middle_leaves_the_others_their_place() -> None:
    def interrupted(appends: Sequence[store_calls.EncodedAppend]) -> list[AppendResult]:
        raise KeyboardInterrupt

    commits = GroupCommit(interrupted)
    others = [group_commit.PendingAppend(encoded()), group_commit.PendingAppend(encoded())]
    commits._waiting.extend(others)
    with pytest.raises(KeyboardInterrupt):
        commits.append(encoded(), timeout_seconds=PATIENCE_SECONDS)
    assert list(commits._waiting) == others
    commits._send = done
    assert commits.append(encoded(), timeout_seconds=PATIENCE_SECONDS).positions
    assert all(ticket.is_done() for ticket in others)


def test_waiting_has_an_end_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = GroupCommit(done)
    assert commits._leader.acquire_unless(lambda: False, 1)
    with pytest.raises(LogUnavailable, match="same event ids"):
        commits.append(encoded(), timeout_seconds=0.01)
    assert not commits._waiting
    monkeypatch.setattr(group_commit, "MAX_WAITING", 0)
    with pytest.raises(LogUnavailable, match="appends are waiting"):
        commits.append(encoded(), timeout_seconds=0.01)


# --- the feed ----------------------------------------------------------------------------------------------------


class Log:
    """A log in memory that notes from where it was read."""

    def __init__(self, *offsets: int) -> None:
        self.events = [event(n) for n in offsets]
        self.reads: list[int] = []
        self.epoch = 0

    def read_after(self, position: int, batch_size: int, epoch: int) -> list[StoreEvent]:
        self.reads.append(position)
        if epoch != self.epoch:
            raise epoch_changed_error(epoch, position, self.epoch, position)
        return [e for e in self.events if e.position > position][:batch_size]


def test_who_is_below_what_is_kept_is_told_so_and_never_gets_a_gap() -> None:
    feed = LiveReader(Log().read_after)
    feed._tail = RecentEvents(50, 50).extended([event(6), event(7)])
    assert feed.after(49, limit=10, seconds=1) is None
    assert feed.after(50, limit=10, seconds=1) == [event(6), event(7)]
    assert feed.after(60, limit=10, seconds=1) == [event(7)]
    assert feed.after(70, limit=10, seconds=0) == ()
    assert not feed.holds(49)
    assert feed.holds(50)
    assert not feed.holds(71)


def test_who_comes_first_after_a_pause_does_not_read_for_those_behind() -> None:
    log = Log(6, 7, 8, 9)
    feed = LiveReader(log.read_after)
    feed._tail = RecentEvents(50, 50)
    assert feed.after(80, limit=10, seconds=1) == [event(9)]
    assert log.reads == [80]
    assert feed.after(50, limit=10, seconds=1) is None


def test_a_reader_that_fails_leaves_its_turn_to_the_next() -> None:
    log = Log(1)
    feed = LiveReader(log.read_after)

    def fail(position: int, batch_size: int, epoch: int) -> list[StoreEvent]:
        raise LogUnavailable("gone")

    feed._read_after = fail
    with pytest.raises(LogUnavailable):
        feed.after(0, limit=10, seconds=1)
    feed._read_after = log.read_after
    assert feed.after(0, limit=10, seconds=1) == [event(1)]


def test_a_reader_that_finds_a_gap_keeps_nothing_of_before() -> None:
    log = Log(1, 2)
    feed = LiveReader(log.read_after)
    assert feed.after(0, limit=10, seconds=1) == [event(1), event(2)]
    # Of a store of the same name that was made anew.
    log.events = [event(0, position=90)]
    with pytest.raises(OrderBroken):
        feed.after(20, limit=10, seconds=1)
    assert feed.after(20, limit=10, seconds=1) == [event(0, position=90)]


class Following(StoreSubscriptions):
    """An event store in memory, of which only following works, and that notes how."""

    def __init__(self, *offsets: int) -> None:
        super().__init__("store")
        self.log = Log(*offsets)
        self.looks = 0
        self.epoch = 0
        self.answers: list[Sequence[StoreEvent] | None] = []

    def _read_after(self, position: int, batch_size: int, epoch: int) -> list[StoreEvent]:
        return self.log.read_after(position, batch_size, epoch)

    def read(self, query: Query = EVERYTHING, *, after: int = 0, **_: Any) -> list[StoreEvent]:
        return [event for event in self.log.events if event.position > after]

    def _end(self) -> tuple[int, int]:
        self.looks += 1
        return (self.log.events[-1].position if self.log.events else 0), self.log.epoch

    def _live(self, *place: Any) -> Sequence[StoreEvent] | None:
        self.answers.append(super()._live(*place))
        return self.answers[-1]

    def _patiently(self, act: Any, patience_seconds: float | None) -> Any:
        return act()

    def next(self, place: int) -> tuple[int, list[StoreEvent]]:
        to, events = self._next(EVERYTHING, place, self.epoch, 10, False, None)
        return to, list(events)

    def _unused(self, *_: Any) -> Any:
        raise AssertionError("following asks for no more")

    _send = open_cursor = _find_cursor = move_cursor = _apply = _run_maintenance = _unused
    resumed_position = has_queue = _open_queue = _reap = _claim = _settle = _unused


def test_one_who_is_ahead_of_the_log_keeps_nobody_else_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "LIVE_SECONDS", 0.01)
    store = Following(1, 2)
    for _ in range(3):
        assert store.next(1000) == (1000, [])
        assert store.next(20) == (20, [])
    # Each of them waited: none was sent back to the log at once.
    assert store.answers == [()] * 6
    assert max(store.log.reads) == 20
    store.log.events.append(event(3))
    assert store.next(20) == (30, [event(3)])
    assert store.next(1000) == (1000, [])
    store.log.events.append(event(4, position=1001))
    assert store.next(1000) == (1001, [event(4, position=1001)])


def test_who_follows_a_store_that_was_made_anew_waits_and_gets_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "LIVE_SECONDS", 0.01)
    store = Following(1, 2)
    assert store.next(20) == (20, [])
    store.log.events = []
    assert store.next(0) == (0, [])
    assert store.next(20) == (20, [])
    assert store.answers == [()] * 3
    store.log.events.append(event(0, position=30))
    assert store.next(0) == (30, [event(0, position=30)])
    assert store.next(20) == (30, [event(0, position=30)])


def test_nobody_gets_past_an_event_that_their_reader_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "LIVE_SECONDS", 0.01)
    store = Following(1, 2)
    assert store.next(20) == (20, [])
    store.log.events.append(event(3))
    assert store.next(20) == (30, [event(3)])
    store.log.events.append(event(5))
    with pytest.raises(OrderBroken, match="no gaps"):
        store.next(30)


def test_what_is_kept_is_not_given_to_a_reader_of_another_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "LIVE_SECONDS", 0.01)
    store = Following(1, 2)
    assert store.next(20) == (20, [])
    # The log lost event 2, and issued its position and the one after it again.
    store.log.epoch = 1
    store.log.events = [event(1), event(2), event(3)]
    with pytest.raises(EpochChanged):
        store.next(20)
    assert not store._live_reader.holds(20)
    # Another subscriber has gone back, and follows what is there now.
    store.epoch = 1
    assert store.next(10) == (30, [event(2), event(3)])
    assert store.next(30) == (30, [])
    assert store._live_reader.after(20, epoch=0, limit=10, seconds=1) is None
    store.epoch = 0
    with pytest.raises(EpochChanged):
        store.next(20)
