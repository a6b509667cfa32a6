"""Counters of this process for its metrics. Adding costs one dictionary update."""

from __future__ import annotations

import threading
from typing import Final

from headwater.observability.metrics import Metric

# The maximum number of series of a metric; further label values are counted together as OTHERS.
MAX_SERIES: Final = 1000
OTHERS: Final = "(others)"


class Counters:
    """Counts by metric and labels. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Metric, dict[tuple[str, ...], int]] = {}

    def add(self, metric: Metric, *labels: str, by: int = 1) -> None:
        with self._lock:
            try:
                # The series nearly always exists.
                self._counts[metric][labels] += by
                return
            except KeyError:
                pass
            series = self._counts.setdefault(metric, {})
            if labels not in series and len(series) >= MAX_SERIES:
                labels = (OTHERS,) * len(labels)
            series[labels] = series.get(labels, 0) + by

    def samples(self) -> list[tuple[Metric, tuple[str, ...], int]]:
        with self._lock:
            return [(metric, labels, n) for metric, series in self._counts.items() for labels, n in series.items()]


COUNTERS: Final = Counters()
