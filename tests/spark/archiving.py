"""A log whose days pass, and an archive of it that is written batch by batch, for tests."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

import headwater
from headwater import NewEvent
from headwater.lake import Location, commit_files, open_or_create, version_of, written_files
from headwater.spark.arrow import EVENT
from headwater.spark.formats.log import LogReader, LogSource
from headwater.spark.sinks import archive

DAY = timedelta(days=1)


class ArchivedLog:
    """Publishes, archives and lets days pass; remembers what was published."""

    def __init__(self, dsn: str, directory: Path) -> None:
        self.dsn, self.directory = dsn, directory
        self.log = headwater.connect(dsn)
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.published: list[tuple[int, str]] = []

    def close(self) -> None:
        self.connection.close()
        self.log.close()

    def publish(self, topic: str, count: int = 1) -> list[int]:
        events = [NewEvent({"n": n}, key=f"k{n % 3}", type=f"t{n % 2}", headers={"h": n}) for n in range(count)]
        positions = [position for position in self.log.publish_batch(topic, events) if position is not None]
        self.published += [(position, topic) for position in positions]
        return positions

    def positions(self, *topics: str) -> list[int]:
        return sorted(position for position, topic in self.published if topic in topics or not topics)

    def pass_days(self, days: int) -> None:
        self.connection.execute(
            "update headwater_internal.segment set opened_at = opened_at - %s, closed_at = closed_at - %s",
            (days * DAY, days * DAY),
        )
        self.log.maintain()

    def register(self, name: str = "archive", *, topics: tuple[str, ...] | None = None) -> None:
        archive.register(
            self.dsn,
            name,
            location=str(self.directory / name),
            source="log",
            options={} if topics is None else {"topics": ",".join(topics)},
            written_to=None,
        )

    def archive(self, name: str = "archive", *, topics: tuple[str, ...] | None = None, note: bool = True) -> int:
        """One batch, in files of small row groups, of which a row may be in any."""
        table = open_or_create(Location(str(self.directory / name)), self._schema(), partition_by=["date"])
        written = version_of(table, name) or 0
        end = self.log.state().stable
        options = {"dsn": self.dsn, "after": str(written), "upTo": str(end), "skipExpired": "true", "archive": "false"}
        one = LogSource(options | ({} if topics is None else {"topics": ",".join(topics)})).reader(EVENT)
        rows = table_of(one)
        batch = self.directory / name / "batches" / str(end)
        for number, part in enumerate(_shuffled_parts(rows)):
            folder = batch / f"date=2026-01-0{number + 1}"
            folder.mkdir(parents=True)
            pq.write_table(part, folder / "part.parquet", row_group_size=4)
        batch.mkdir(parents=True, exist_ok=True)
        batch.joinpath("_SUCCESS").touch()
        commit_files(table, written_files(table, f"batches/{end}"), app=name, version=end)
        if note:
            archive.on_committed(self.dsn, name, end)
        return end

    def compact(self, name: str = "archive") -> None:
        table = open_or_create(Location(str(self.directory / name)), self._schema(), partition_by=["date"])
        table.optimize.compact()

    def kept_in_log(self, topic: str) -> list[int]:
        return [event.position for event in self.log.read(topic, batch_size=10_000)]

    def _schema(self) -> Any:
        from pyspark.sql.pandas.types import to_arrow_schema

        return to_arrow_schema(EVENT, timezone="UTC").append(pa.field("date", pa.date32()))


def _shuffled_parts(rows: pa.Table) -> list[pa.Table]:
    """Rows dealt out to two files, in order within each."""
    if rows.num_rows == 0:
        return []
    dealt = pa.array([random.random() < 0.5 for _ in range(rows.num_rows)])
    parts = [rows.filter(dealt), rows.filter(pa.compute.invert(dealt))]
    return [part for part in parts if part.num_rows]


def table_of(one: LogReader) -> pa.Table:
    """All that the tasks of a read bring, in the order of the tasks."""
    from pyspark.sql.pandas.types import to_arrow_schema

    batches = [batch for part in one.partitions() for batch in one.read(part)]
    return pa.Table.from_batches(batches, schema=to_arrow_schema(EVENT, timezone="UTC"))
