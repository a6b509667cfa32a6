"""How long tests wait: one deadline for every wait, scaled by one environment variable.

A wait ends when its signal comes; the deadline only bounds a test that is broken. It is therefore generous, the same
everywhere, and never part of what a test checks. On a machine that is busier still, or for a soak test, set
HEADWATER_TEST_PATIENCE to a factor above 1; to see a broken test fail soon, set it below 1.
"""

from __future__ import annotations

import os

_FACTOR = float(os.environ.get("HEADWATER_TEST_PATIENCE", "1"))


def _scaled(seconds: int) -> int:
    return max(1, round(seconds * _FACTOR))


# For one signal: an event, an answer, the end of a process.
PATIENCE_SECONDS = _scaled(240)
# For a whole test with its fixtures, or a program that is a whole test by itself.
TEST_SECONDS = _scaled(1200)
# For the process of the tests to end, once all tests have.
EXIT_SECONDS = _scaled(120)
