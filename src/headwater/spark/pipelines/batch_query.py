"""A streaming query that writes its batches to sinks: start, progress, and the cause of a failure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import StreamingQueryException

from headwater import errors
from headwater.errors import HeadwaterError
from headwater.spark.epochs import Offset
from headwater.spark.pipelines.batch import Batch, Sink
from headwater.spark.pipelines.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from headwater.spark.pipelines.transform import TransformResult

POLL_SECONDS: Final = 0.1
_OURS: Final = re.compile(r"headwater\.(?:\w+\.)*(?P<kind>[A-Z]\w+): (?P<message>[^\n]+(?:\n  [^\n]+)?)")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """A batch that all sinks have stored."""

    batch: int
    rows: int
    seconds: float
    offset: int
    milliseconds: Mapping[str, int]
    epoch: int | None = None
    """The epoch of the offset, if that is a log position."""

    def document(self) -> dict[str, Any]:
        """The batch as it is recorded and reported. Its offset is the checkpoint."""
        return {
            "batch": self.batch,
            "rows": self.rows,
            "seconds": self.seconds,
            "checkpoint": self.offset,
            "milliseconds": self.milliseconds,
            "epoch": self.epoch,
        }


class BatchWriter:
    """Writes the batches of one pipeline's query to its sinks, and remembers the error of a failed one."""

    def __init__(self, pipeline: str, checkpoint: Checkpoint, sinks: Sequence[Sink]) -> None:
        self._pipeline: Final = pipeline
        self._checkpoint: Final = checkpoint
        self._sinks: Final = sinks
        self._failure: BaseException | None = None

    def start(
        self,
        stream: TransformResult,
        *,
        name: str,
        trigger: Mapping[str, Any],
        around: Callable[[Callable[[], None]], None] = lambda write: write(),
    ) -> StreamingQuery:
        """Start the query. For each batch, `around` is called with a function that writes it."""

        def on_batch(rows: DataFrame, number: int) -> None:
            around(lambda: self._write(rows, number))

        writer = (
            stream.rows.writeStream.foreachBatch(on_batch)
            .queryName(name)
            .outputMode(stream.mode)
            .option("checkpointLocation", self._checkpoint.directory)
        )
        return writer.trigger(**trigger).start()

    def _write(self, rows: DataFrame, number: int) -> None:
        try:
            end = self._checkpoint.end_of(number)
            write_to_all(self._sinks, rows, Batch(self._pipeline, number, *end))
        except BaseException as error:
            # Spark passes on only the text of the error.
            self._failure = error
            raise

    def explain(self, error: Exception) -> Exception:
        """Headwater's error behind a Spark error, or an error with Spark's message."""
        inner = self._failure
        if isinstance(inner, HeadwaterError):
            return inner
        if isinstance(error, StreamingQueryException):
            return explain(str(inner) if inner is not None else str(error))
        return error


def write_to_all(sinks: Sequence[Sink], rows: DataFrame, batch: Batch) -> None:
    """Write a batch to each sink, in order. The rows are cached, so that the source is read only once."""
    if len(sinks) == 1:
        sinks[0].write(rows, batch)
        return
    kept = rows.persist()
    try:
        for sink in sinks:
            sink.write(kept, batch)
    finally:
        kept.unpersist()


def watch_batches(query: StreamingQuery, *, offset: int | None) -> Iterator[BatchResult | None]:
    """Yield each batch that has rows or advances the source from `offset`; None while there is none.

    Ends with the query, and raises its error.
    """
    last = -1
    while True:
        ended = query.awaitTermination(POLL_SECONDS)  # type: ignore[arg-type]
        for progress in query.recentProgress:
            reached = offset_in(progress)
            if progress["batchId"] <= last or not (
                progress["numInputRows"] or reached is None or reached.position != offset
            ):
                continue
            last = progress["batchId"]
            if reached is not None:
                offset = reached.position
                milliseconds = dict(progress["durationMs"])
                seconds = milliseconds.get("triggerExecution", 0) / 1000
                yield BatchResult(last, progress["numInputRows"], seconds, offset, milliseconds, reached.epoch)
        if ended:
            failure = query.exception()
            if failure is not None:
                raise failure
            return
        yield None


def offset_in(progress: Mapping[str, Any]) -> Offset | None:
    """The source's end offset in a query progress; None if there is none."""
    sources = progress.get("sources") or []
    offset = sources[0].get("endOffset") if sources else None
    if isinstance(offset, str):
        with suppress(ValueError):
            offset = json.loads(offset)
    if not isinstance(offset, Mapping):
        return None
    value, epoch = offset.get("position", offset.get("lsn")), offset.get("epoch")
    return Offset(value, epoch if isinstance(epoch, int) else None) if isinstance(value, int) else None


def explain(text: str) -> HeadwaterError:
    """The error in a text with Java and Python tracebacks: the last one of Headwater, or the last line of an error."""
    found = list(_OURS.finditer(text))
    if found:
        kind = getattr(errors, found[-1]["kind"], HeadwaterError)
        message, _, hint = found[-1]["message"].partition("\n  ")
        return kind(message, hint=hint or None) if issubclass(kind, HeadwaterError) else HeadwaterError(message)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), None)
    return HeadwaterError(last or (lines[0] if lines else "the query ended without an error message"))
