"""A query whose batches go to sinks: starting it, what it reports, and what is behind its failure."""

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

    from headwater.spark.pipelines.transform import Transformed

POLL_SECONDS: Final = 0.1
_OURS: Final = re.compile(r"headwater\.(?:\w+\.)*(?P<kind>[A-Z]\w+): (?P<message>[^\n]+(?:\n  [^\n]+)?)")


@dataclass(frozen=True, slots=True)
class Done:
    """A batch that is in all sinks."""

    batch: int
    rows: int
    seconds: float
    place: int
    milliseconds: Mapping[str, int]
    epoch: int | None = None
    """The epoch of the place, where that is a position of the log."""


class Batches:
    """Hands the batches of one pipeline's query to its sinks, and keeps what went wrong with one."""

    def __init__(self, pipeline: str, checkpoint: Checkpoint, sinks: Sequence[Sink]) -> None:
        self._pipeline: Final = pipeline
        self._checkpoint: Final = checkpoint
        self._sinks: Final = sinks
        self._failure: BaseException | None = None

    def start(
        self,
        stream: Transformed,
        *,
        name: str,
        trigger: Mapping[str, Any],
        around: Callable[[Callable[[], None]], None] = lambda write: write(),
    ) -> StreamingQuery:
        """Start the query. `around` is called for each batch with what writes it."""

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
            # Spark hands on only the text of it.
            self._failure = error
            raise

    def explained(self, error: Exception) -> Exception:
        """The error of ours that is behind what Spark says, or the first line of what it says."""
        inner = self._failure
        if isinstance(inner, HeadwaterError):
            return inner
        if isinstance(error, StreamingQueryException):
            return explained(str(inner) if inner is not None else str(error))
        return error


def write_to_all(sinks: Sequence[Sink], rows: DataFrame, batch: Batch) -> None:
    """Hand a batch to each sink, in their order. The source is read once, and so is what a query keeps of it."""
    if len(sinks) == 1:
        sinks[0].write(rows, batch)
        return
    kept = rows.persist()
    try:
        for sink in sinks:
            sink.write(kept, batch)
    finally:
        kept.unpersist()


def watched(query: StreamingQuery, *, place: int | None) -> Iterator[Done | None]:
    """Each batch that moves the source on from `place`, or has rows; None while there is none.

    Ends with the query, and raises what ended it.
    """
    last = -1
    while True:
        ended = query.awaitTermination(POLL_SECONDS)  # type: ignore[arg-type]
        for progress in query.recentProgress:
            reached = place_in(progress)
            if progress["batchId"] <= last or not (
                progress["numInputRows"] or reached is None or reached.position != place
            ):
                continue
            last = progress["batchId"]
            if reached is not None:
                place = reached.position
                milliseconds = dict(progress["durationMs"])
                seconds = milliseconds.get("triggerExecution", 0) / 1000
                yield Done(last, progress["numInputRows"], seconds, place, milliseconds, reached.epoch)
        if ended:
            failure = query.exception()
            if failure is not None:
                raise failure
            return
        yield None


def place_in(progress: Mapping[str, Any]) -> Offset | None:
    """Where the source stands after a batch."""
    sources = progress.get("sources") or []
    offset = sources[0].get("endOffset") if sources else None
    if isinstance(offset, str):
        with suppress(ValueError):
            offset = json.loads(offset)
    if not isinstance(offset, Mapping):
        return None
    value, epoch = offset.get("position", offset.get("lsn")), offset.get("epoch")
    return Offset(value, epoch if isinstance(epoch, int) else None) if isinstance(value, int) else None


def explained(text: str) -> HeadwaterError:
    """What went wrong, out of a text that holds tracebacks of Java and Python: the last error of ours in it."""
    found = list(_OURS.finditer(text))
    if found:
        kind = getattr(errors, found[-1]["kind"], HeadwaterError)
        message, _, hint = found[-1]["message"].partition("\n  ")
        return kind(message, hint=hint or None) if issubclass(kind, HeadwaterError) else HeadwaterError(message)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), None)
    return HeadwaterError(said or (lines[0] if lines else "the query ended without a reason"))
