"""Token-bucket rate limiting: each key may use a burst at once, and then a fixed rate per second."""

from __future__ import annotations

from typing import Final

from headwater.bounded_dict import BoundedDict

MAX_BUCKETS: Final = 10_000


class TokenBuckets:
    """One token bucket per key, in this process. The least recently used buckets are dropped above MAX_BUCKETS."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        # Key -> (tokens left, time of that count).
        self._buckets: BoundedDict[str, tuple[float, float]] = BoundedDict(MAX_BUCKETS)

    def tokens(self, key: str, now: float) -> float:
        """How many tokens the key has now."""
        left, at = self._buckets.get(key, (self._burst, now))
        return min(self._burst, left + (now - at) * self._per_second)

    def take(self, key: str, now: float) -> bool:
        """Take one token; False if none is left."""
        left = self.tokens(key, now)
        taken = left >= 1
        self._buckets[key] = (left - 1 if taken else left, now)
        return taken

    def give_back(self, key: str, now: float) -> None:
        """Return a token that was not used."""
        self._buckets[key] = (min(self._burst, self.tokens(key, now) + 1), now)
