"""Does the lake keep its rows and its notes while it is tidied, by several at once?"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from headwater.cli import app, exit_codes
from headwater.errors import InvalidRequest, LakeBusy
from headwater.lake import (
    Location,
    all_files,
    commit_files,
    current,
    files_between,
    open_or_create,
    open_table,
    version_of,
    written_files,
)
from headwater.lake.current import CurrentTables
from headwater.lake.files import attempt_directory, remove_leftovers
from headwater.lake.maintenance import Maintenance, checkpoint, compact, state_of, vacuum
from patience import PATIENCE_SECONDS

DAY = date(2026, 3, 1)
SCHEMA = pa.schema([("position", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("date", pa.date32())])


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location.parse("lake", directory=tmp_path)


@pytest.fixture
def table(location: Location) -> DeltaTable:
    return open_or_create(location, SCHEMA, partition_by=["date"])


def written(table: DeltaTable, positions: range, *, app: str = "archive", day: date = DAY) -> list[Any]:
    """A file with these positions, as a job of Spark leaves it."""
    root = Path(table.table_uri.removeprefix("file://"))
    directory = attempt_directory(app, positions[-1])
    (root / directory / f"date={day}").mkdir(parents=True)
    at = [datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(milliseconds=n) for n in positions]
    rows = pa.table({"position": pa.array(positions), "at": pa.array(at, SCHEMA.field("at").type)})
    pq.write_table(rows, root / directory / f"date={day}" / "part-0.parquet")
    (root / directory / "_SUCCESS").touch()
    return written_files(table, directory)


def append(table: DeltaTable, positions: range, *, app: str = "archive", day: date = DAY) -> bool:
    return commit_files(table, written(table, positions, app=app, day=day), app=app, version=positions[-1])


def positions_in(table: DeltaTable) -> list[int]:
    return sorted(n for path in all_files(table) for n in pq.read_table(path)["position"].to_pylist())


def test_files_are_found_by_the_positions_in_them(table: DeltaTable) -> None:
    for first in (1, 11, 21):
        append(table, range(first, first + 10))
    assert len(files_between(table, "position", after=0, up_to=30)) == 3
    assert len(files_between(table, "position", after=10, up_to=20)) == 1
    assert len(files_between(table, "position", after=9, up_to=11)) == 2
    assert files_between(table, "position", after=30, up_to=99) == []
    # One that says nothing about its values may hold any.
    (file,) = written(table, range(31, 41))
    silent = type(file)(file.path, file.size, file.rows, file.partition, json.dumps({"numRecords": 10}))
    commit_files(table, [silent], app="archive", version=40)
    assert len(files_between(table, "position", after=0, up_to=10)) == 2
    with pytest.raises(InvalidRequest, match="no column 'place'"):
        files_between(table, "place", after=0, up_to=1)


def test_a_version_is_committed_once_and_only_after_the_one_it_was_made_for(table: DeltaTable) -> None:
    files = written(table, range(1, 11))
    assert commit_files(table, files, app="archive", version=10, expected=None)
    assert not commit_files(table, files, app="archive", version=10, expected=None)
    assert not commit_files(table, files, app="archive", version=9)
    with pytest.raises(LakeBusy, match="recorded version is 10, expected None"):
        commit_files(table, written(table, range(5, 21)), app="archive", version=20, expected=None)
    assert positions_in(table) == list(range(1, 11))
    assert version_of(table, "archive") == 10
    assert version_of(table, "another") is None


def test_leftovers_are_those_between_two_notes_of_the_same_writer(table: DeltaTable, location: Location) -> None:
    append(table, range(1, 11))
    written(table, range(11, 16))
    written(table, range(11, 21))
    written(table, range(11, 16), app="another")
    kept = written(table, range(11, 21))
    later = written(table, range(11, 31))
    commit_files(table, kept, app="archive", version=20)
    directory = kept[0].path.split("/date=")[0]
    assert remove_leftovers(table, "archive", after=10, up_to=20, keep=directory) == 2
    assert positions_in(table) == list(range(1, 21))
    assert Path(location.uri, later[0].path).exists()
    assert len(list(Path(location.uri, "batches", "another").iterdir())) == 1


def test_what_no_job_has_finished_is_not_taken_for_nothing(table: DeltaTable) -> None:
    with pytest.raises(InvalidRequest, match="no completed Spark job"):
        written_files(table, attempt_directory("archive", 1))


def test_small_files_become_one_and_rows_and_notes_stay(table: DeltaTable) -> None:
    for number in range(6):
        append(table, range(number * 10 + 1, number * 10 + 11), day=DAY + timedelta(days=number % 2))
    done = compact(table, today=DAY + timedelta(days=1))
    # The other day still grows, and has too few files.
    assert (done.partitions, done.files_removed, done.files_added) == (1, 3, 1)
    assert compact(table, today=DAY + timedelta(days=1)).partitions == 0
    assert compact(table, today=DAY + timedelta(days=1), files_of_today=3).partitions == 1
    assert state_of(table).files == 2
    assert state_of(table).rows == 60
    assert positions_in(table) == list(range(1, 61))
    assert version_of(table, "archive") == 60
    assert not append(table, range(51, 61))


def test_compacted_files_still_tell_their_positions_apart(table: DeltaTable) -> None:
    for number in range(12):
        append(table, range(number * 100 + 1, number * 100 + 101))
    compact(table, today=DAY + timedelta(days=1), target_bytes=state_of(table).bytes // 4)
    files = all_files(table)
    assert 2 < len(files) < 12
    # Within a file the order is lost; from file to file it is not, or no file could be ruled out.
    found = sorted(sorted(pq.read_table(path)["position"].to_pylist()) for path in files)
    assert [n for positions in found for n in positions] == list(range(1, 1201))
    assert len(files_between(table, "position", after=found[0][-1], up_to=found[1][-1])) == 1


def test_files_that_nobody_needs_go_after_their_time(table: DeltaTable, location: Location) -> None:
    for number in range(3):
        append(table, range(number * 10 + 1, number * 10 + 11))
    running = written(table, range(31, 41))
    old = written(table, range(1, 31), app="gone")
    os.utime(Path(location.uri, old[0].path), (time.time() - 90_000, time.time() - 90_000))
    compact(table, today=DAY + timedelta(days=1))
    assert vacuum(table, keep=timedelta(days=1), dry_run=True) == [old[0].path]
    assert vacuum(table, keep=timedelta(days=1)) == [old[0].path]
    with pytest.raises(InvalidRequest, match="running batch"):
        vacuum(table, keep=timedelta(0))
    # The files that were merged are needed by readers of the past only; the running batch is none of them.
    assert len(vacuum(table, keep=timedelta(0), leftovers=False)) == 3
    assert positions_in(table) == list(range(1, 31))
    assert commit_files(table, running, app="archive", version=40)
    assert positions_in(table) == list(range(1, 41))


def test_notes_outlive_the_entries_of_the_log(table: DeltaTable, location: Location) -> None:
    append(table, range(1, 11))
    checkpoint(table)
    for entry in Path(location.uri, "_delta_log").glob("*0.json"):
        entry.unlink()
    fresh = open_table(location)
    assert fresh is not None
    assert version_of(fresh, "archive") == 10
    assert positions_in(fresh) == list(range(1, 11))


def test_maintenance_comes_round_every_so_many_commits(table: DeltaTable) -> None:
    maintenance = Maintenance(commits_between=4)
    done = []
    for number in range(8):
        append(table, range(number * 10 + 1, number * 10 + 11))
        done.append(maintenance.after_commit(table, today=DAY + timedelta(days=1)))
    # The fourth commit, and then the fourth after it, the maintenance's own counted.
    assert [number for number, found in enumerate(done) if found] == [3, 6]
    assert positions_in(table) == list(range(1, 81))


def together(*loops: Callable[[], None]) -> None:
    """Run these side by side to their ends."""
    failures: list[BaseException] = []

    def run(loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert failures == []


def test_appends_and_compaction_side_by_side_lose_and_repeat_nothing(location: Location, table: DeltaTable) -> None:
    appending = threading.Event()

    def appender(app: str, first: int) -> Callable[[], None]:
        def run() -> None:
            own = open_table(location)
            assert own is not None
            for number in range(12):
                append(own, range(first + number * 10, first + number * 10 + 10), app=app)

        return run

    def compactor() -> None:
        own = open_table(location)
        assert own is not None
        while not appending.is_set():
            compact(own, today=DAY + timedelta(days=1))

    def appenders() -> None:
        try:
            together(appender("one", 1), appender("two", 1001))
        finally:
            appending.set()

    together(appenders, compactor)
    assert positions_in(table) == [*range(1, 121), *range(1001, 1121)]
    assert (version_of(table, "one"), version_of(table, "two")) == (120, 1120)
    assert "OPTIMIZE" in {entry["operation"] for entry in table.history()}


def change(lsn: int, number: int) -> dict[str, Any]:
    """An upsert of the row `number`, in the transaction `lsn`."""
    columns = [
        {"name": "id", "type": "int4", "modifier": -1, "key": True},
        {"name": "n", "type": "int4", "modifier": -1, "key": False},
    ]
    text = json.dumps({"id": number, "n": lsn}, separators=(",", ":"))
    return {
        "commit_lsn": lsn, "sequence": number, "schema": "public", "table": "t", "operation": "insert",
        "key": f'{{"id":{number}}}', "before": None, "after": text, "unchanged": [], "columns_hash": "h",
        "columns": json.dumps(columns),
    }  # fmt: skip


def numbers_in(location: Location) -> dict[int, int]:
    table = open_table(location.child("public.t"))
    assert table is not None
    rows = [row for path in all_files(table) for row in pq.read_table(path).to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["n"] for row in rows}


def test_a_merge_looks_again_when_compaction_was_faster(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = CurrentTables(location, app="copy")
    for lsn in (1, 2):
        tables.apply([pa.RecordBatch.from_pylist([change(lsn, 10 * lsn + n) for n in range(3)])])
    merging, compacted = current._merge, []

    def overtaken(*arguments: Any) -> None:
        if not compacted:
            other = open_table(location.child("public.t"))
            assert other is not None
            compacted.append(compact(other, today=DAY, files_of_today=2))
        merging(*arguments)

    monkeypatch.setattr(current, "_merge", overtaken)
    tables.apply([pa.RecordBatch.from_pylist([change(3, 11), change(3, 21)])])
    assert compacted[0].files_removed == 2
    assert numbers_in(location) == {10: 1, 11: 3, 12: 1, 20: 2, 21: 3, 22: 2}


def test_of_two_processes_that_merge_for_one_pipeline_one_is_refused(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, quick = (CurrentTables(location, app="copy") for _ in range(2))
    late.apply([pa.RecordBatch.from_pylist([change(1, 1)])])
    merging = current._merge

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(current, "_merge", merging)
        quick.apply([pa.RecordBatch.from_pylist([change(2, 1), change(2, 2)])])
        merging(*arguments)

    monkeypatch.setattr(current, "_merge", overtaken)
    batch = [pa.RecordBatch.from_pylist([change(2, 1), change(2, 2), change(3, 1)])]
    with pytest.raises(LakeBusy, match="another process"):
        late.apply(batch)
    assert late.apply(batch) == {"public.t": 1}
    assert numbers_in(location) == {1: 3, 2: 2}


def test_merges_and_compaction_side_by_side_lose_and_repeat_nothing(location: Location) -> None:
    done = threading.Event()

    def merger() -> None:
        try:
            tables = CurrentTables(location, app="copy")
            for lsn in range(1, 16):
                # Each time other rows, so that files get small, and some again.
                rows = [change(lsn, number) for number in range(lsn % 4, 40, 1 + lsn % 3)]
                tables.apply([pa.RecordBatch.from_pylist(rows)])
        finally:
            done.set()

    def compactor() -> None:
        while not done.is_set():
            own = open_table(location.child("public.t"))
            if own is not None:
                compact(own, today=DAY, files_of_today=2)

    together(merger, compactor)
    expected: dict[int, int] = {}
    for lsn in range(1, 16):
        expected |= dict.fromkeys(range(lsn % 4, 40, 1 + lsn % 3), lsn)
    assert numbers_in(location) == expected


def test_a_lake_is_shown_and_tidied_from_the_command_line(location: Location, table: DeltaTable) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["lake", *arguments, "--json"])

    for number in range(3):
        append(table, range(number * 10 + 1, number * 10 + 11))
    below = str(Path(location.uri).parent)
    (shown,) = json.loads(run("list", below).stdout)
    assert (shown["table"], shown["files"], shown["rows"], shown["small_files"]) == (location.uri, 3, 30, 3)
    assert json.loads(run("files", location.uri, "--after", "20").stdout) == all_files(table)[2:]
    assert json.loads(run("compact", below).stdout)["files_added"] == 1
    assert len(json.loads(run("vacuum", below, "--keep", "0s", "--no-leftovers", "--dry-run").stdout)["found"]) == 3
    assert len(json.loads(run("vacuum", below, "--keep", "0s", "--no-leftovers").stdout)["deleted"]) == 3
    assert positions_in(table) == list(range(1, 31))

    assert run("list", f"{below}/nowhere").exit_code == exit_codes.NOT_FOUND
    assert run("vacuum", below, "--keep", "1m").exit_code == exit_codes.REFUSED
    assert run("list", below, "--storage", "x").exit_code == exit_codes.USAGE


MERGES = """
import sys, pyarrow.parquet as pq
from headwater.lake import Location
from headwater.lake import current
current.CHANGES_PER_MERGE = 50
print("ready", flush=True)
current.CurrentTables(Location(sys.argv[1]), app="copy").apply(pq.ParquetFile(sys.argv[2]).iter_batches(batch_size=50))
print("done", flush=True)
"""


def test_killed_at_any_moment_a_merge_goes_on_where_it_was(location: Location, tmp_path: Path) -> None:
    chance = random.Random(7)
    changes = [change(lsn, chance.randint(1, 300)) for lsn in range(1, 1501)]
    source = tmp_path / "changes.parquet"
    pq.write_table(pa.Table.from_pylist(changes), source)
    Path(location.uri).mkdir()
    kills = 0
    while True:
        merging = subprocess.Popen(
            [sys.executable, "-c", MERGES, location.uri, str(source)], stdout=subprocess.PIPE, text=True
        )
        assert merging.stdout is not None
        with merging, merging.stdout as said:
            assert said.readline() == "ready\n"
            if kills == 4:
                assert said.readline() == "done\n"
                break
            before = len(list(Path(location.uri).glob("public.t/_delta_log/*.json")))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(list(Path(location.uri).glob("public.t/_delta_log/*.json"))) < before + 3:
                assert time.monotonic() < deadline
            time.sleep(chance.random() / 50)
            merging.kill()
            kills += 1
    assert numbers_in(location) == {json.loads(c["key"])["id"]: c["commit_lsn"] for c in changes}
