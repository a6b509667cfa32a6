"""Publishes one range of a table to NATS, in this process or in a Spark task."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import psycopg

from headwater.capture import snapshot
from headwater.capture.snapshot import Chunk, Plan
from headwater.errors import HeadwaterError
from headwater.nats import messages
from headwater.nats.codec import Encoding
from headwater.nats.errors import NatsUnavailable
from headwater.nats.publisher import JetStreamPublisher
from headwater.nats.snapshot_chunks import ChunkWriter
from headwater.spark.nats_bridge.snapshot_record import RangeResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class RangeTask:
    """One range of a table to publish, read at a snapshot that the driver holds open."""

    dsn: str
    nats_url: str
    plan: Plan
    part: Chunk
    snapshot: messages.SnapshotInfo
    first_chunk: int
    chunk_rows: int
    encoding: Encoding
    compressed: bool
    dictionary: bytes | None
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class RangeFailure:
    """Why a range could not be published; `final` if a retry would not help."""

    error: str
    final: bool


def publish_range(task: RangeTask) -> RangeResult | RangeFailure:
    """Read one range and publish its chunks; return when all are acknowledged. A retry sends the same message ids."""
    try:
        with JetStreamPublisher(
            task.nats_url, name="headwater snapshot", retry_seconds=task.retry_seconds
        ) as publisher:
            writer = ChunkWriter(
                task.snapshot,
                first_chunk=task.first_chunk,
                max_payload_bytes=publisher.max_payload_bytes,
                chunk_rows=task.chunk_rows,
                encoding=task.encoding,
                compressed=task.compressed,
                dictionary=task.dictionary,
            )
            for batch in snapshot.read(task.dsn, task.plan, task.part):
                for message in writer.add(batch.column("row").to_pylist()):
                    publisher.send(message)
            for message in writer.finish():
                publisher.send(message)
            publisher.flush()
    except psycopg.errors.InsufficientPrivilege as error:
        return RangeFailure(str(error), final=True)
    except (psycopg.Error, NatsUnavailable) as error:
        return RangeFailure(str(error), final=False)
    except HeadwaterError as error:
        return RangeFailure(str(error), final=True)
    return RangeResult(task.part.number, task.first_chunk, writer.chunks, writer.rows)


class RangeExecutor(Protocol):
    """Runs range tasks, up to `parallel` at a time."""

    parallel: int

    def run(self, task: RangeTask) -> RangeResult | RangeFailure:
        """Run a task and return its result. Called from several threads."""

    def cancel(self) -> None:
        """Cancel running tasks."""


class LocalRangeExecutor:
    """Runs range tasks in this process."""

    def __init__(self, parallel: int = 1) -> None:
        self.parallel = parallel

    def run(self, task: RangeTask) -> RangeResult | RangeFailure:
        return publish_range(task)

    def cancel(self) -> None:
        """Nothing to do: running ranges end soon."""


class SparkRangeExecutor:
    """Runs range tasks in Spark, each as a separate job.

    One core is left for the stream of changes, which would otherwise wait until the whole table is read.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._context: Final = spark.sparkContext
        self._job_group: Final = f"headwater snapshots {uuid.uuid4().hex}"
        self.parallel = max(1, self._context.defaultParallelism - 1)

    def run(self, task: RangeTask) -> RangeResult | RangeFailure:
        from py4j.protocol import Py4JError

        try:
            self._context.setJobGroup(self._job_group, f"snapshot of {task.snapshot.table.full_name}", True)
            done: RangeResult | RangeFailure = self._context.parallelize([task], 1).map(publish_range).collect()[0]
        except Py4JError as error:
            return RangeFailure(str(error).partition("\n")[0], final=False)
        return done

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._job_group)
