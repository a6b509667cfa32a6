"""Does the verdict of a trial see everything that can be wrong?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.chaos.journal import Line
from headwater.chaos.verdict import Consumer, Found, Verdict, judge

# Two transactions of p that were acknowledged, one that was rolled back, and one of which nobody knows.
LINES = [
    Line("p", "tried", [1, 2]),
    Line("p", "acknowledged", [1, 2]),
    Line("p", "tried", range(3, 5)),
    Line("p", "acknowledged", range(3, 5)),
    Line("p", "tried", [5]),
    Line("p", "rolled back", [5]),
    Line("p", "tried", [6, 7]),
]
FOUND = [Found(10 + n, "p", n, ("lanes", 0), n - 1) for n in (1, 2, 3, 4)]
ONCE = {11: 1, 12: 1, 13: 1, 14: 1}
EXACT = Consumer("exact", ONCE, frozenset(), frozenset({"lanes"}), exactly_once=True)
PLAIN = Consumer("plain", ONCE, frozenset(), frozenset({"lanes"}), exactly_once=False)


def wrong(verdict: Verdict) -> dict[str, int]:
    names = ("lost", "duplicates", "torn", "invented", "gaps")
    return {name: getattr(verdict, name) for name in names if getattr(verdict, name)}


def test_a_trial_in_which_nothing_went_wrong_says_so() -> None:
    verdict = judge(LINES, FOUND, [EXACT, PLAIN])
    assert verdict.ok
    assert (verdict.produced, verdict.acknowledged, verdict.processed, verdict.dead) == (4, 4, 8, 0)


def test_a_transaction_without_an_answer_may_be_there_in_full() -> None:
    both = [*FOUND, *(Found(10 + n, "p", n, ("open", 0), None) for n in (6, 7))]
    assert judge(LINES, both, [EXACT, PLAIN]).ok


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(FOUND[:-2], {"lost": 2}, id="an acknowledged transaction is gone"),
        pytest.param(FOUND[:-1], {"lost": 1, "torn": 1}, id="a part of it is gone"),
        pytest.param([*FOUND, FOUND[3]], {"duplicates": 1, "gaps": 1}, id="it is there twice"),
        pytest.param([*FOUND, Found(20, "p", 6, ("open", 0), None)], {"torn": 1}, id="half of an unknown one"),
        pytest.param([*FOUND, Found(20, "p", 5, ("open", 0), None)], {"invented": 1}, id="it was rolled back"),
        pytest.param([*FOUND, Found(20, "q", 1, ("open", 0), None)], {"invented": 1}, id="nobody made it"),
        pytest.param([*FOUND[:3], FOUND[3]._replace(offset=4)], {"gaps": 1}, id="an offset is left out"),
    ],
)
def test_what_is_wrong_with_the_log_is_counted(found: list[Found], expected: dict[str, int]) -> None:
    assert wrong(judge(LINES, found, [EXACT])) == expected


def test_an_event_that_a_consumer_never_got_is_lost_unless_it_is_dead() -> None:
    missing = {position: 1 for position in ONCE if position != 13}
    assert wrong(judge(LINES, FOUND, [EXACT, replace(PLAIN, times=missing)])) == {"lost": 1}
    verdict = judge(LINES, FOUND, [replace(PLAIN, times=missing, dead=frozenset({13}))])
    assert verdict.ok
    assert verdict.dead == 1


def test_a_second_time_is_a_duplicate_only_where_once_is_promised() -> None:
    twice = {**ONCE, 12: 2}
    assert wrong(judge(LINES, FOUND, [replace(EXACT, times=twice)])) == {"duplicates": 1}
    repeated = judge(LINES, FOUND, [replace(PLAIN, times=twice)])
    assert repeated.ok
    assert repeated.repeated == 1


def test_a_dead_event_with_an_effect_is_a_duplicate() -> None:
    assert wrong(judge(LINES, FOUND, [replace(EXACT, dead=frozenset({12}))])) == {"duplicates": 1}


def test_events_of_topics_that_a_consumer_does_not_read_are_not_missed() -> None:
    elsewhere = replace(PLAIN, times={}, topics=frozenset({"other"}))
    assert judge(LINES, FOUND, [elsewhere]).ok
