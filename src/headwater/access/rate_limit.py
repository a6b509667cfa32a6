"""How many of something each may have: so many at once, and then so many a second."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_BUCKETS: Final = 10_000


class Buckets:
    """How many each may still have. Of this process; those not heard of for longest are forgotten."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        # Whose -> how many are left, as of when.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def left(self, whose: str, now: float) -> float:
        """How many there are for them now."""
        left, at = self._left.get(whose, (self._burst, now))
        return min(self._burst, left + (now - at) * self._per_second)

    def take(self, whose: str, now: float) -> bool:
        """One of them; False: it is one too many."""
        left = self.left(whose, now)
        taken = left >= 1
        self._left[whose] = (left - 1 if taken else left, now)
        self._left.move_to_end(whose)
        if len(self._left) > MAX_BUCKETS:
            self._left.popitem(last=False)
        return taken

    def give_back(self, whose: str, now: float) -> None:
        """It was not used after all."""
        self._left[whose] = (min(self._burst, self.left(whose, now) + 1), now)
