"""Does the verdict of a trial see everything that can be wrong?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.trials.chaos.cluster import Divergence
from headwater.trials.chaos.journal import JournalEntry
from headwater.trials.chaos.verdict import LoggedEvent, ReaderDeliveries, Verdict, judge

# Two transactions of p that were acknowledged, one that was rolled back, and one without an answer.
LINES = [
    JournalEntry("p", "tried", [1, 2], 1.0),
    JournalEntry("p", "acknowledged", [1, 2], 2.0),
    JournalEntry("p", "tried", range(3, 5), 3.0),
    JournalEntry("p", "acknowledged", range(3, 5), 4.0),
    JournalEntry("p", "tried", [5], 5.0),
    JournalEntry("p", "rolled back", [5], 6.0),
    JournalEntry("p", "tried", [6, 7], 7.0),
]
FOUND = [LoggedEvent(10 + n, "p", n, ("partitions", 0), n - 1) for n in (1, 2, 3, 4)]
ALL = ["p/1", "p/2", "p/3", "p/4"]
EXACT = ReaderDeliveries("exact", frozenset({"partitions"}), ALL, exactly_once=True)
PLAIN = ReaderDeliveries("plain", frozenset({"partitions"}), ALL)


def wrong(verdict: Verdict) -> dict[str, int]:
    names = ("lost", "duplicates", "torn", "invented", "gaps", "out_of_order")
    return {name: getattr(verdict, name) for name in names if getattr(verdict, name)}


def test_a_trial_in_which_nothing_went_wrong_says_so() -> None:
    verdict = judge(LINES, FOUND, [EXACT, PLAIN])
    assert verdict.ok
    assert (verdict.produced, verdict.acknowledged, verdict.processed, verdict.dead) == (4, 4, 8, 0)


def test_a_transaction_without_an_answer_may_be_there_in_full() -> None:
    both = [*FOUND, *(LoggedEvent(10 + n, "p", n, ("open", 0), None) for n in (6, 7))]
    assert judge(LINES, both, [EXACT, PLAIN]).ok


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(FOUND[:-2], {"lost": 2}, id="an acknowledged transaction is gone"),
        pytest.param(FOUND[:-1], {"lost": 1, "torn": 1}, id="a part of it is gone"),
        pytest.param([*FOUND, FOUND[3]], {"duplicates": 1, "gaps": 1}, id="it is there twice"),
        pytest.param([*FOUND, LoggedEvent(20, "p", 6, ("open", 0), None)], {"torn": 1}, id="half of an unknown one"),
        pytest.param([*FOUND, LoggedEvent(20, "p", 5, ("open", 0), None)], {"invented": 1}, id="it was rolled back"),
        pytest.param([*FOUND, LoggedEvent(20, "q", 1, ("open", 0), None)], {"invented": 1}, id="no producer made it"),
        pytest.param([*FOUND[:3], FOUND[3]._replace(offset=4)], {"gaps": 1}, id="an offset is left out"),
    ],
)
def test_what_is_wrong_with_the_log_is_counted(found: list[LoggedEvent], expected: dict[str, int]) -> None:
    assert wrong(judge(LINES, found, [EXACT])) == expected


def test_an_event_that_a_reader_never_got_is_lost_unless_it_is_dead() -> None:
    missing = ["p/1", "p/2", "p/4"]
    verdict = judge(LINES, FOUND, [EXACT, replace(PLAIN, delivered=missing)])
    assert wrong(verdict) == {"lost": 1}
    assert {one.name: one.lost for one in verdict.readers} == {"exact": 0, "plain": 1}
    verdict = judge(LINES, FOUND, [replace(PLAIN, delivered=missing, dead=frozenset({"p/3"}))])
    assert verdict.ok
    assert verdict.dead == 1


def test_a_second_time_is_a_duplicate_only_where_once_is_promised() -> None:
    twice = [*ALL, "p/2"]
    assert wrong(judge(LINES, FOUND, [replace(EXACT, delivered=twice)])) == {"duplicates": 1}
    repeated = judge(LINES, FOUND, [replace(PLAIN, delivered=twice)])
    assert repeated.ok
    assert repeated.repeated == 1


def test_a_dead_event_with_an_effect_is_a_duplicate() -> None:
    assert wrong(judge(LINES, FOUND, [replace(EXACT, dead=frozenset({"p/2"}))])) == {"duplicates": 1}


def test_events_of_topics_that_a_reader_does_not_read_are_not_missed() -> None:
    elsewhere = replace(PLAIN, delivered=[], topics=frozenset({"other"}))
    assert judge(LINES, FOUND, [elsewhere]).ok


def test_a_reader_of_the_log_in_order_may_repeat_and_may_not_go_back() -> None:
    ordered = replace(PLAIN, order="log")
    assert judge(LINES, FOUND, [replace(ordered, delivered=["p/1", "p/2", "p/1", "p/2", "p/3", "p/4"])]).ok
    late = judge(LINES, FOUND, [replace(ordered, delivered=["p/1", "p/3", "p/2", "p/4"])])
    assert wrong(late) == {"out_of_order": 1}


def test_an_event_that_is_in_the_log_twice_makes_no_other_one_late() -> None:
    again = [*FOUND, FOUND[0]._replace(position=FOUND[-1].position + 1, offset=None)]
    verdict = judge(LINES, again, [replace(PLAIN, order="log", delivered=["p/1", "p/2", "p/3", "p/4", "p/1"])])
    assert wrong(verdict) == {"duplicates": 1}


def test_partitions_are_in_order_each_by_itself() -> None:
    found = [event._replace(partition=("partitions", event.number % 2), offset=None) for event in FOUND]
    crossed = replace(PLAIN, delivered=["p/2", "p/4", "p/1", "p/3"])
    assert judge(LINES, found, [replace(crossed, order="partition")]).ok
    assert wrong(judge(LINES, found, [replace(crossed, order="log")])) == {"out_of_order": 2}


@pytest.mark.parametrize(
    ("divergence", "excused"),
    [
        pytest.param(Divergence(3.5, 9.0), 2, id="acknowledged while the standby was cut off"),
        pytest.param(Divergence(2.5, 3.5), 2, id="noted after the old primary had ended"),
        pytest.param(Divergence(4.5, 9.0), 0, id="acknowledged before the standby was cut off"),
        pytest.param(Divergence(0.5, 2.5), 0, id="tried after the old primary had ended"),
    ],
)
def test_only_what_an_old_primary_acknowledged_alone_is_lost_with_it(divergence: Divergence, excused: int) -> None:
    verdict = judge(LINES, FOUND[:2], [], [divergence])
    assert (verdict.lost, verdict.lost_with_old_primary) == (2 - excused, excused)


def test_what_came_to_a_reader_and_went_with_the_old_primary_is_no_fault_of_the_reader() -> None:
    reader = replace(PLAIN, order="log", delivered=["p/1", "p/2", "p/3", "p/4", "p/6", "p/7"])
    # Positions of p/3 and p/4 were assigned again to p/6 and p/7.
    found = [*FOUND[:2], *(LoggedEvent(7 + n, "p", n, ("partitions", 0), n - 4) for n in (6, 7))]
    verdict = judge(LINES, found, [reader], [Divergence(2.5, 9.0)])
    assert verdict.ok
    assert verdict.lost_with_old_primary == 2
