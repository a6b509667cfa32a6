"""The data lake: Delta tables of the log and of captured tables, as Parquet files. Does not need Spark.

table = open_or_create(Location.parse("./lake/log"), schema, partition_by=["date"])
version_of(table, "archive")                                   # the version recorded last: a position or an LSN
commit_files(table, written_files(table, "batches/archive/7"), app="archive", version=7)
files_between(table, "position", after=3, up_to=7)             # the files that may hold these positions
"""

from __future__ import annotations

from headwater.lake.files import DataFile, written_files
from headwater.lake.table import (
    Location,
    all_files,
    commit_files,
    files_between,
    open_or_create,
    open_table,
    version_of,
)

__all__ = [
    "DataFile",
    "Location",
    "all_files",
    "commit_files",
    "files_between",
    "open_or_create",
    "open_table",
    "version_of",
    "written_files",
]
