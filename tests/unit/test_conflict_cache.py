"""Does the window of recent events ever say more than is true? And do groups of tasks stay together?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.calls import store as store_calls
from headwater.eventstore import leader_lock
from headwater.eventstore.conflict_cache import (
    AppendedEvent,
    ConflictCache,
    LastKnownEvent,
    PossibleConflict,
    Precheck,
    RequiredTerm,
    index_terms_of,
    precheck_for,
)
from headwater.eventstore.group_commit import GroupCommit
from headwater.eventstore.query import (
    AppendResult,
    Condition,
    Item,
    LatestMatchIs,
    NewStoreEvent,
    NoMatchAfter,
    Query,
    StoreEvent,
)
from patience import PATIENCE_SECONDS

TAGS = ("a", "b", "c")
items = st.builds(Item, st.lists(st.sampled_from("AB"), max_size=2), st.lists(st.sampled_from(TAGS), max_size=2))
queries = st.builds(Query, st.lists(items, max_size=2))
conditions = st.builds(
    lambda kind, query, position: kind(query, position),
    st.sampled_from((NoMatchAfter, LatestMatchIs)),
    queries,
    st.integers(0, 12),
)


@dataclass
class Log:
    """A store as a list, with the window of one who appends to it among others."""

    events: list[AppendedEvent] = field(default_factory=list)
    window: ConflictCache = field(default_factory=lambda: ConflictCache(max_index_terms=3))

    def has(self, index_terms: tuple[str, ...], above: int) -> bool:
        return any(set(index_terms) <= set(event.index_terms) for event in self.events if event.position > above)

    def matches(self, query: Query) -> list[int]:
        return [
            event.position
            for event in self.events
            if query.matches(
                StoreEvent(
                    event.position, 0, "", event.index_terms[0][1:], tuple(term[1:] for term in event.index_terms[1:]),
                    None, None, None, None,  # type: ignore[arg-type]
                )
            )
        ]  # fmt: skip

    def holds(self, condition: Condition) -> bool:
        latest = max(self.matches(condition.query), default=0)
        seen = condition.position or 0
        return latest == seen if isinstance(condition, LatestMatchIs) else latest <= seen


@given(
    st.lists(
        st.tuples(st.booleans(), conditions, st.sampled_from("AB"), st.sets(st.sampled_from(TAGS), max_size=2)),
        max_size=12,
    )
)
def test_what_is_accepted_ahead_is_right_whoever_else_appends(
    steps: list[tuple[bool, Condition, str, set[str]]],
) -> None:
    log = Log()
    for mine, condition, type_, tags in steps:
        question = precheck_for(condition)
        tail = log.events[-1].position if log.events else 0
        event = AppendedEvent(tail + 1, f"{tail + 1}", index_terms_of(type_, sorted(tags)))
        left = log.window.accept([(question, event.index_terms, {event.event_id})])
        known = log.window.known
        fenced = known is not None and known.position == tail
        conflicts = [doubt for _, asked in left for doubt in asked.conflicts]
        seen = [s for _, asked in left for s in asked.required]
        # What the log does with it: nothing has to be looked for above its last event.
        accepted = bool(left) and not any(
            doubt.above < tail and all(log.has((index_term,), doubt.above) for index_term in doubt.index_terms)
            for doubt in conflicts
        )
        accepted = accepted and all(
            any(e.position == s.position and s.index_term in e.index_terms for e in log.events) for s in seen
        )
        if accepted:
            assert log.holds(condition), (condition, log.events, fenced)
        if question is not None and log.window.needs_full_check(question):
            assert any(all(log.has((index_term,), d.above) for index_term in d.index_terms) for d in question.conflicts)
        log.events.append(event)
        if mine:
            log.window.record(tail, [event])


@pytest.mark.parametrize(
    ("condition", "question"),
    [
        (None, Precheck()),
        (NoMatchAfter(Query(), 7), Precheck((PossibleConflict((), 7),))),
        (
            NoMatchAfter(Query.of(types=["A", "B"]), 7),
            Precheck((PossibleConflict((":A",), 7), PossibleConflict((":B",), 7))),
        ),
        (NoMatchAfter(Query.of(types=["A"], tags=["a", "b"])), Precheck((PossibleConflict(("#a", "#b"), 0),))),
        (NoMatchAfter(Query.of(fields={"k": 1}), 7), Precheck((PossibleConflict((), 7),))),
        (LatestMatchIs(Query.of(tags=["a"]), None), Precheck((PossibleConflict(("#a",), 0),))),
        (LatestMatchIs(Query.of(tags=["a"]), 7), Precheck((PossibleConflict(("#a",), 7),), (RequiredTerm("#a", 7),))),
        (LatestMatchIs(Query.of(types=["A", "B"]), 7), None),
        (LatestMatchIs(Query.of(fields={"k": 1}), 7), None),
        (LatestMatchIs(Query.of(tags=["a"]) | Query.of(tags=["b"]), 7), None),
    ],
)
def test_a_condition_comes_down_to_doubts(condition: Condition | None, question: Precheck | None) -> None:
    assert precheck_for(condition) == question


def test_what_is_known_is_not_asked_and_what_is_forgotten_is() -> None:
    window = ConflictCache(max_index_terms=3)
    window.record(10, [AppendedEvent(11, "e", (":A", "#a")), AppendedEvent(12, "f", (":A", "#b"))])
    assert window.known == LastKnownEvent(12, "f")
    about = Precheck((PossibleConflict(("#a",), 11),))
    assert window.accept([(about, (), ())]) == [(0, Precheck((PossibleConflict(("#a",), 12),)))]
    before = Precheck((PossibleConflict(("#a",), 9),))
    assert window.needs_full_check(before)
    assert window.accept([(Precheck((PossibleConflict(("#c",), 9),)), (), ())]) == [
        (0, Precheck((PossibleConflict(("#c",), 9),)))
    ]
    # Of two that are about each other, the first; who is about neither goes past, unless the other waits for that.
    second, third = (Precheck((PossibleConflict((index_term,), 12),)) for index_term in ("#c", "#d"))
    assert [n for n, _ in window.accept([(about, {"#c"}, ()), (second, {"#e"}, ()), (third, {"#f"}, ())])] == [0, 2]
    assert [n for n, _ in window.accept([(about, {"#d"}, ()), (third, {"#e"}, ()), (second, {"#d"}, ())])] == [0]
    assert [n for n, _ in window.accept([(None, {"#c"}, ()), (third, {"#f"}, ())])] == []
    same = (third, {"#f"}, {"1"})
    assert [n for n, _ in window.accept([(before, (), {"1"}), same, (third, {"#f"}, {"2"})])] == [2]
    window.record(12, [AppendedEvent(13, "g", ("#x", "#y"))])
    window.record(13, [AppendedEvent(14, "h", ("#r", "#s", "#t", "#u"))])
    assert window.accept([(about, (), ())]) == [(0, Precheck((PossibleConflict(("#a",), 11),)))]
    # Somebody else has appended 15.
    window.record(15, [])
    assert window.known is None


@pytest.mark.parametrize(("in_halves", "least", "most"), [(True, 6, 10), (False, 15, 16)])
def test_tasks_go_out_together_or_in_two_halves_and_one_alone_at_once(
    in_halves: bool, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    async def send(group: object) -> list[AppendResult]:
        sizes.append(len(group))  # type: ignore[arg-type]
        await asyncio.sleep(0.001)
        return [AppendResult((1,), False, None, None)] * sizes[-1]

    monkeypatch.setattr(leader_lock, "KEEP_GROUPS", 1000)
    commits = GroupCommit(send)
    commits._pace.in_halves = in_halves
    append = store_calls.encode_append([NewStoreEvent("A")], None, ["x"])

    async def writer(count: int) -> None:
        for _ in range(count):
            await commits.append(append, timeout_seconds=PATIENCE_SECONDS)

    async def writers(count: int) -> None:
        await asyncio.gather(*(writer(12) for _ in range(count)))

    asyncio.run(writers(16))
    assert sum(sizes) == 192
    assert commits._under_way == commits._leader._taken == 0
    # After a few that tell how many there are, and before the last ones end.
    assert all(least <= size <= most for size in sizes[3:10]), sizes
    sizes.clear()
    asyncio.run(writers(1))
    assert sizes == [1] * 12


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_second_half_goes_out_before_the_first_is_answered(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = most = 0
    sent: list[str] = []

    async def send(group: Any) -> list[AppendResult]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        sent.extend(event_id for append in group for event_id in append.ids)
        await asyncio.sleep(0.001)
        under_way -= 1
        return [AppendResult((1,), False, None, None)] * len(group)

    monkeypatch.setattr(leader_lock, "KEEP_GROUPS", 1000)
    commits = GroupCommit(send, overlaps=overlaps)
    commits._pace.in_halves = True

    async def writer(name: int) -> None:
        for n in range(20):
            await commits.append(
                store_calls.encode_append([NewStoreEvent("A")], None, [f"{name}-{n}"]), timeout_seconds=PATIENCE_SECONDS
            )

    async def writers() -> None:
        await asyncio.gather(*map(writer, range(16)))

    asyncio.run(writers())
    assert most == (2 if overlaps else 1)
    assert sorted(sent) == sorted(f"{name}-{n}" for name in range(16) for n in range(20))
    assert commits._under_way == commits._leader._taken == 0


def test_whoever_is_stopped_with_a_group_under_way_leaves_the_others_their_place() -> None:
    sent: list[tuple[str, ...]] = []
    held = asyncio.Event()

    async def send(group: Any) -> list[AppendResult]:
        sent.append(tuple(event_id for append in group for event_id in append.ids))
        await held.wait()
        return [AppendResult((1,), False, None, None)] * len(group)

    async def groups(number: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(sent) < number:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def run() -> None:
        commits = GroupCommit(send, overlaps=True)
        commits._pace.in_halves = True
        commits._busy = 4

        def append(name: str) -> asyncio.Task[AppendResult]:
            encoded = store_calls.encode_append([NewStoreEvent("A")], None, [name])
            return asyncio.create_task(commits.append(encoded, timeout_seconds=PATIENCE_SECONDS))

        tasks = {name: append(name) for name in ("a", "b", "c", "d")}
        await groups(2)
        assert sent == [("a", "b"), ("c", "d")]
        # It is who brought enough that sends. Those who were with it are sent again.
        tasks["b"].cancel()
        await groups(3)
        assert sent[2] == ("a",)
        held.set()
        done = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), PATIENCE_SECONDS)
        assert [isinstance(answer, AppendResult) for answer in done] == [True, False, True, True]
        assert commits._under_way == commits._leader._taken == 0

    asyncio.run(run())
