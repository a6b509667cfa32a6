"""Reads the end offsets of batches from a Spark checkpoint, on any file system that Spark supports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwater.capture.timeline import WalPosition
from headwater.errors import HeadwaterError
from headwater.spark.epochs import Offset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint directory of one query."""

    spark: SparkSession
    directory: str

    def end_of(self, batch: int) -> Offset:
        """The end offset of a planned batch: Spark writes it before it runs the batch."""
        end = end_in(self._text(f"offsets/{batch}"))
        if end is None:
            raise HeadwaterError(f"the checkpoint {self.directory} has no end offset of batch {batch}")
        return end

    def last_end(self) -> Offset | None:
        """The end offset of the last planned batch; None if there is none."""
        number = self._last_number("offsets")
        return None if number is None else self.end_of(number)

    def last_done(self) -> Offset | None:
        """The end offset of the last committed batch, which all sinks have stored; None if there is none."""
        number = self._last_number("commits")
        return None if number is None else self.end_of(number)

    def _last_number(self, directory: str) -> int | None:
        path = self._path(directory)
        files = path.getFileSystem(self._configuration())
        if not files.exists(path):
            return None
        names = [status.getPath().getName() for status in files.listStatus(path)]
        numbers = [int(name) for name in names if name.isdecimal()]
        return max(numbers, default=None)

    def delete(self) -> None:
        """Delete this checkpoint: files of a lost history that used the same checkpoint epoch."""
        own = self._path()
        own.getFileSystem(self._configuration()).delete(own, True)

    def delete_older(self) -> None:
        """Delete the checkpoints of earlier checkpoint epochs, in sibling directories."""
        own = self._path()
        parent = own.getParent()
        files = parent.getFileSystem(self._configuration())
        if files.exists(parent):
            for status in files.listStatus(parent):
                name = status.getPath().getName()
                if name.isdecimal() and int(name) < int(own.getName()):
                    files.delete(status.getPath(), True)

    def _text(self, name: str) -> str:
        path = self._path(name)
        stream = path.getFileSystem(self._configuration()).open(path)
        try:
            return str(self._jvm().org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def _path(self, name: str = "") -> Any:
        return self._hadoop().fs.Path(f"{self.directory}/{name}".rstrip("/"))

    def _jvm(self) -> Any:
        return self.spark.sparkContext._jvm

    def _hadoop(self) -> Any:
        return self._jvm().org.apache.hadoop

    def _configuration(self) -> Any:
        return self.spark.sparkContext._jsc.hadoopConfiguration()


def end_in(text: str) -> Offset | None:
    """The offset in an offsets file of Spark: its last line is the source's offset."""
    for line in reversed(text.strip().splitlines()):
        try:
            offset = json.loads(line)
        except ValueError:
            continue
        if isinstance(offset, dict):
            if isinstance(offset.get("position"), int):
                epoch = offset.get("epoch")
                return Offset(offset["position"], epoch if isinstance(epoch, int) else None)
            if isinstance(offset.get("lsn"), int):
                wal_position = WalPosition.parse(offset)
                return Offset(wal_position.lsn, history=wal_position.history)
    return None
