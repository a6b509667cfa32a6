"""How much tests repeat: one factor for examples, rounds, kills and mutated frames.

`./dev test --all` repeats in full; the default does less of the same, with other random examples in each run. For a
soak test set HEADWATER_TEST_EFFORT to a factor above 1, with HEADWATER_TEST_PATIENCE.
"""

from __future__ import annotations

import os

EFFORT = float(os.environ.get("HEADWATER_TEST_EFFORT", "0.3"))


def effort(full: int, *, least: int = 1) -> int:
    """How many of `full` repetitions this run makes, at least `least`."""
    return max(least, round(full * EFFORT))
