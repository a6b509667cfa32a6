"""What a pipeline hands to its sinks: rows, and which part of the source they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.capture.timeline import History

Source = Literal["log", "changes"]
OnEpochChange = Literal["stop", "rewind"]
ON_EPOCH_CHANGE: Final[tuple[OnEpochChange, ...]] = ("stop", "rewind")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one pipeline. Repeated, it has the same rows and the same `end`."""

    pipeline: str
    number: int
    """Spark's number of the micro-batch: starts again at 0 with a new checkpoint."""
    end: int
    """Where the source stands after it: the position of its last event, or the LSN before which all is read.

    Never goes back within an epoch, so it is what a sink notes, with the epoch, to know a batch that it has already."""
    epoch: int | None = None
    """The epoch in which `end` is a position of the log; None for an LSN."""
    history: History | None = None
    """The history of the server's log in which the batch was planned, if `end` is an LSN."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a sink is made with, besides its own options."""

    spark: SparkSession
    pipeline: str
    source: Source
    source_options: Mapping[str, Any]
    dsn: str
    nats_url: str | None
    directory: Path
    """Relative paths in the pipeline's file are meant from here."""
    sink_number: int = 0
    """Which of the pipeline's sinks it is: two of one kind keep apart by it what they note."""
    on_epoch_change: OnEpochChange = "stop"
    """What a sink outside of the database does that holds events which the log has lost."""
    rewound_in: int | None = None
    """The epoch in which the pipeline was last set back from a history that the log lost."""
    ask_to_stop: Callable[[], None] = field(default=lambda: None)
    """Asks the runner to end this pipeline after the current batch."""


class Sink(Protocol):
    """Where the rows of a pipeline go. Made as `Kind(options, context)`, used in the driver.

    Options that make no sense are InvalidRequest when it is made, before anything is touched.
    """

    def prepare(self) -> None:
        """Make what is missing, refuse what cannot work. Called once, before the first batch."""

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        """Make the rows durable, once, however often the batch is repeated; says what it counted, by name."""

    def close(self) -> None:
        """Let go of connections."""
