"""Does a bounded dictionary keep what was set or moved last, and no more than its maximum?"""

from headwater.bounded_dict import BoundedDict


def test_the_entry_that_was_set_longest_ago_is_removed() -> None:
    known: BoundedDict[str, int] = BoundedDict(2)
    known["a"] = 1
    known["b"] = 2
    known["a"] = 3
    known["c"] = 4
    assert dict(known) == {"a": 3, "c": 4}


def test_an_entry_that_was_moved_to_the_end_is_kept() -> None:
    known: BoundedDict[str, int] = BoundedDict(2)
    known["a"] = 1
    known["b"] = 2
    known.move_to_end("a")
    known["c"] = 3
    assert dict(known) == {"a": 1, "c": 3}


def test_changing_a_value_in_place_never_exceeds_the_maximum() -> None:
    known: BoundedDict[int, int] = BoundedDict(3)
    for key in range(10):
        known[key] = 0
        known[key] += 1
        assert len(known) <= 3
    assert dict(known) == {7: 1, 8: 1, 9: 1}
