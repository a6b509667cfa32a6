"""What a pipeline hands to its sinks: rows, and which part of the source they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Source = Literal["log", "changes"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one pipeline. Repeated, it has the same rows and the same `end`."""

    pipeline: str
    number: int
    """Spark's number of the micro-batch: starts again at 0 with a new checkpoint."""
    end: int
    """Where the source stands after it: the settled position of the log, or the LSN before which all is read.

    Never goes back in the life of a pipeline, so it is what a sink notes to know a batch that it has already."""


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
