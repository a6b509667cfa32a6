"""The interface between a pipeline and its sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.capture.timeline import WalHistory

Source = Literal["log", "changes"]
OnEpochChange = Literal["stop", "rewind"]
ON_EPOCH_CHANGE: Final[tuple[OnEpochChange, ...]] = ("stop", "rewind")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one pipeline. A retry has the same rows and the same `end`."""

    pipeline: str
    number: int
    """Spark's number of the micro-batch; it restarts at 0 with a new checkpoint."""
    end: int
    """The offset after the batch: the position of its last event, or the LSN up to which everything is read.

    It never decreases within an epoch, so a sink records it, with the epoch, to detect a repeated batch."""
    epoch: int | None = None
    """The epoch of `end` if it is a log position; None for an LSN."""
    history: WalHistory | None = None
    """The cluster and timeline on which the batch was planned, if `end` is an LSN."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink gets besides its options."""

    spark: SparkSession
    pipeline: str
    source: Source
    source_options: Mapping[str, Any]
    dsn: str
    nats_url: str | None
    directory: Path
    """The base of relative paths in the pipeline file."""
    sink_number: int = 0
    """The index of the sink in its pipeline; it separates the records of two sinks of one kind."""
    on_epoch_change: OnEpochChange = "stop"
    """What a sink outside of the database does if it holds events that the log has lost."""
    rewound_in: int | None = None
    """The epoch in which the pipeline was last rewound because the log had lost events."""
    ask_to_stop: Callable[[], None] = field(default=lambda: None)
    """Asks the runner to end this pipeline after the current batch."""


class Sink(Protocol):
    """A sink of a pipeline. Created as `Kind(options, context)` and used in the driver.

    The constructor raises InvalidRequest for invalid options, without side effects.
    """

    def prepare(self) -> None:
        """Create missing resources; raise if the sink cannot work. Called once, before the first batch."""

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        """Store the rows durably, exactly once even if the batch is repeated; return counters by name."""

    def close(self) -> None:
        """Close connections."""
