"""What this process has counted by itself, for its metrics. Adding costs a dictionary's update."""

from __future__ import annotations

import threading
from typing import Final

from headwater.observability.metrics import Metric

# A metric has at most so many series; what comes after them is counted together.
MOST_SERIES: Final = 1000
OTHERS: Final = "(others)"


class Counters:
    """Counts by metric and labels. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Metric, dict[tuple[str, ...], int]] = {}

    def add(self, metric: Metric, *labels: str, by: int = 1) -> None:
        with self._lock:
            try:
                # Nearly always it is there.
                self._counts[metric][labels] += by
                return
            except KeyError:
                pass
            series = self._counts.setdefault(metric, {})
            if labels not in series and len(series) >= MOST_SERIES:
                labels = (OTHERS,) * len(labels)
            series[labels] = series.get(labels, 0) + by

    def samples(self) -> list[tuple[Metric, tuple[str, ...], int]]:
        with self._lock:
            return [(metric, labels, n) for metric, series in self._counts.items() for labels, n in series.items()]


COUNTERS: Final = Counters()
