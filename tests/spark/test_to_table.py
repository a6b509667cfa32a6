"""Does a table that a pipeline keeps have each batch once and whole, and is it rebuilt without anybody noticing?"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import conninfo, sql
from pyspark.sql import types as t

import headwater
from headwater.calls import pipeline_runs, projections
from headwater.calls import projections as projections_calls
from headwater.calls.projections import Projection
from headwater.errors import HeadwaterError, InvalidRequest, LeaseLost, NotAllowed, ProjectionRebuilt, StagedEventsLost
from headwater.spark.sinks import table as sinks_table
from headwater.spark.sinks.table import TableColumns, TableOptions, stage
from patience import PATIENCE_SECONDS

_numbers = itertools.count()
Rows = Sequence[tuple[Any, ...]]
LEASE = timedelta(seconds=60)

ORDER = t.StructType().add("id", "long").add("amount", "long").add("gone", "boolean")
POSITIONED = t.StructType().add("position", "long").add("id", "long").add("amount", "long")


class Keeper:
    """Writes a table as the sink does, without Spark."""

    def __init__(self, dsn: str, frame: t.StructType = ORDER, /, *, name: str = "", **options: Any) -> None:
        self.name = name or f"kept {next(_numbers)}"
        self.dsn = dsn
        self.frame = frame
        self.options = TableOptions.parse({"name": ["public", self.name], "key": ["id"]} | options)
        if "deletes" not in options and "gone" in frame.names and self.options.mode == "upsert":
            self.options = replace(self.options, deletes="gone")
        self.projection = Projection(f"pipeline {self.name}", "public", self.name)
        self.numbers = itertools.count()
        self.log = headwater.connect(dsn, pool_size=1)

    def shadow(self, checkpoint_epoch: int) -> Keeper:
        made = Keeper(self.dsn, self.frame, name=self.name)
        made.options = self.options
        made.projection = replace(self.projection, checkpoint_epoch=checkpoint_epoch, rebuild=True)
        return made

    def prepare(self) -> projections_calls.ProjectionState:
        shape = TableColumns.of(self.frame, self.options)
        return self.log.run(
            projections.prepare_projection(
                self.projection, columns=shape.columns, staged=shape.staged, key=self.options.key
            )
        )

    def stage(self, *parts: Rows) -> tuple[list[str], int]:
        staging = self.prepare().staging
        attempts, count = [], 0
        for part, rows in enumerate(parts):
            columns = [list(values) for values in zip(*rows, strict=True)] or [[] for _ in self.frame.names]
            types = {"bigint": pa.int64(), "boolean": pa.bool_(), "string": pa.string()}
            batch = pa.RecordBatch.from_arrays(
                [
                    pa.array(values, types[field.dataType.simpleString()])
                    for values, field in zip(columns, self.frame.fields, strict=True)
                ],
                names=self.frame.names,
            )
            (said,) = stage([batch], dsn=self.dsn, schema="public", table=staging, part=part)
            (answer,) = said.to_pylist()
            assert answer["kind"] is None, answer
            attempts.append(answer["attempt"])
            count += answer["rows"]
        return attempts, count

    def merge(self, attempts: list[str], count: int, *, end: int, number: int | None = None, **more: Any) -> Any:
        return self.log.run(
            projections.merge_projection(
                self.projection,
                attempts=attempts,
                expected_rows=count,
                end=end,
                number=next(self.numbers) if number is None else number,
                mode=self.options.mode,
                gone=self.options.deletes,
                **more,
            )
        )

    def write(self, *parts: Rows, end: int, **more: Any) -> Any:
        return self.merge(*self.stage(*parts), end=end, **more)

    def rows(self, columns: str = "id, amount") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(
                sql.SQL("select {} from {} order by 1, 2").format(sql.SQL(columns), self.table)  # type: ignore[arg-type]
            ).fetchall()

    @property
    def table(self) -> sql.Identifier:
        return sql.Identifier("public", self.name)

    def execute(self, text: str) -> None:
        """Something that a user does; {} is the table."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL(text).format(self.table))  # type: ignore[arg-type]


@pytest.fixture
def keep(dsn: str) -> Iterator[Any]:
    made: list[Keeper] = []

    def make(*args: Any, **options: Any) -> Keeper:
        made.append(Keeper(dsn, *args, **options))
        return made[-1]

    yield make
    for keeper in made:
        keeper.log.close()


def refused(keeper: Keeper) -> HeadwaterError:
    with pytest.raises(InvalidRequest) as refusal:
        keeper.prepare()
    assert refusal.value.hint
    return refusal.value


# A batch.


def test_the_last_row_of_a_key_wins_and_rows_that_are_gone_go(keep: Any) -> None:
    kept = keep()
    # The parts of a batch follow each other in the source's order, whichever was staged first.
    assert kept.write([(1, 10, None), (2, 20, False)], [(1, 11, False), (3, 30, False), (3, 0, True)], end=5) == (2, 0)
    assert kept.rows() == [(1, 11), (2, 20)]
    assert kept.write([(2, None, True), (4, 40, False), (1, 11, False)], end=9) == (1, 1)
    assert kept.rows() == [(1, 11), (4, 40)]


def test_where_rows_carry_their_position_that_decides_which_is_last(keep: Any) -> None:
    kept = keep(POSITIONED)
    kept.write([(7, 1, 70), (5, 1, 50)], [(6, 1, 60)], end=9, offset_column="position")
    assert kept.rows() == [(1, 70)]


def test_a_row_that_does_not_change_is_not_written(keep: Any) -> None:
    kept = keep()
    kept.write([(1, 10, False), (2, None, False)], end=1)
    before = kept.rows("id, amount, xmin::text, ctid::text, xmax::text")
    assert kept.write([(1, 10, False), (2, None, False)], end=2) == (0, 0)
    assert kept.rows("id, amount, xmin::text, ctid::text, xmax::text") == before


def test_a_repeated_batch_adds_nothing(keep: Any) -> None:
    kept = keep(POSITIONED, mode="append", key=[])
    assert kept.write([(1, 1, 10)], end=1, number=0) == (1, 0)
    assert kept.write([(2, 1, 10)], end=2, number=1) == (1, 0)
    for number, end in ((1, 2), (0, 1)):
        assert kept.write([(end, 1, 10)], end=end, number=number) is None
    assert kept.rows() == [(1, 10), (1, 10)]


def test_after_a_lost_checkpoint_what_the_table_has_is_left_out(keep: Any) -> None:
    kept = keep(POSITIONED, mode="append", key=[])
    kept.write([(1, 1, 10), (2, 2, 20)], end=2, number=7)
    # Numbers begin again, and so do other boundaries.
    assert kept.write([(2, 2, 20), (3, 3, 30)], end=3, number=0, offset_column="position") == (1, 0)
    assert kept.rows() == [(1, 10), (2, 20), (3, 30)]


def test_a_transaction_that_commits_at_the_end_of_a_batch_is_of_the_next(keep: Any) -> None:
    kept = keep(POSITIONED, mode="append", key=[])
    kept.write([(1, 1, 10)], end=5, number=0, offset_column="position", offset_inclusive=True)
    kept.write([(1, 1, 10), (5, 2, 20)], end=9, number=0, offset_column="position", offset_inclusive=True)
    assert kept.rows() == [(1, 10), (2, 20)]


def test_with_a_new_checkpoint_a_doubtful_batch_is_refused_rather_than_doubled(keep: Any) -> None:
    appended = keep(POSITIONED, mode="append", key=[])
    appended.write([(1, 1, 10)], end=1, number=0)
    with pytest.raises(InvalidRequest, match="cannot detect which rows the table already has") as refusal:
        appended.write([(1, 1, 10), (2, 2, 20)], end=2, number=0)
    assert f"headwater pipeline rebuild {appended.projection.pipeline}" in str(refusal.value)
    assert appended.rows() == [(1, 10)]
    counted = keep()
    counted.write([(1, 10, False)], end=1, number=3, stateful=True)
    with pytest.raises(InvalidRequest, match="the state of pipeline"):
        counted.write([(1, 1, False)], end=2, number=0, stateful=True)
    assert counted.rows() == [(1, 10)]


def test_rows_with_a_key_are_added_once(keep: Any) -> None:
    kept = keep(POSITIONED, mode="append", key=["position"])
    kept.write([(1, 1, 10), (1, 1, 11)], end=1, number=0)
    kept.write([(1, 1, 12), (2, 2, 20)], end=2, number=0)
    assert kept.rows() == [(1, 10), (2, 20)]


@pytest.mark.parametrize("key", [["id"], []])
def test_with_replace_the_table_is_what_the_batch_is(keep: Any, key: list[str]) -> None:
    kept = keep(POSITIONED, mode="replace", key=key)
    kept.write([(1, 1, 10), (1, 2, 20)], end=1)
    kept.write([(1, 2, 21)], [(1, 3, 30)], end=2)
    assert kept.rows() == [(2, 21), (3, 30)]
    kept.write([], end=3)
    assert kept.rows() == []


def test_attempts_that_nobody_names_are_never_in_the_table(keep: Any) -> None:
    kept = keep()
    attempts, count = kept.stage([(1, 10, False)], [(2, 20, False)])
    assert kept.merge(attempts[1:], count - 1, end=1) == (1, 0)
    assert kept.rows() == [(2, 20)]


def test_rows_that_the_server_lost_are_not_taken_for_an_empty_batch(keep: Any, dsn: str) -> None:
    kept = keep()
    staged = kept.stage([(1, 10, False)])
    with psycopg.connect(dsn, autocommit=True) as connection:
        # What a crash does to an unlogged table.
        connection.execute(sql.SQL("truncate {}").format(sql.Identifier(f"{kept.name}__staged")))
    with pytest.raises(StagedEventsLost):
        kept.merge(*staged, end=1)
    assert kept.rows() == []
    assert kept.write([(1, 10, False)], end=1) == (1, 0)


def test_readers_see_a_batch_whole_or_not_at_all(keep: Any, dsn: str) -> None:
    kept = keep()
    kept.write([(1, 10, False)], end=1)
    attempts, count = kept.stage([(1, None, True), (2, 20, False)])
    call = projections.merge_projection(
        kept.projection, attempts=attempts, expected_rows=count, end=2, number=9, mode="upsert", gone="gone"
    )
    with psycopg.connect(dsn) as writer:
        writer.execute(call.sql, call.params)
        assert kept.rows() == [(1, 10)]
    assert kept.rows() == [(2, 20)]


def test_a_row_without_its_key_is_refused(keep: Any) -> None:
    kept = keep()
    with pytest.raises(InvalidRequest, match="has a null in the key"):
        kept.write([(None, 10, False)], end=1)
    assert kept.write([(1, 10, False)], end=1, number=0) == (1, 0)


def test_text_that_postgres_cannot_hold_is_told_by_the_task(keep: Any, dsn: str) -> None:
    kept = keep(t.StructType().add("id", "long").add("name", "string"))
    batch = pa.RecordBatch.from_pydict({"id": [1], "name": ["a\0b"]})
    (said,) = stage([batch], dsn=dsn, schema="public", table=kept.prepare().staging, part=0)
    (answer,) = said.to_pylist()
    assert answer["kind"] == "InvalidEvent"
    assert "0x00" in answer["message"]


# The table.


def test_a_table_that_is_there_is_taken_if_it_fits_and_keeps_its_types(keep: Any) -> None:
    kept = keep(t.StructType().add("id", "string").add("amount", "long"))
    kept.execute("create table {} (amount numeric(10, 2) not null, id uuid unique, check (amount > 0))")
    one = "6f7d1b1e-0000-4000-8000-000000000001"
    kept.write([(one, 3), (one, 4)], end=1)
    assert kept.rows("id::text, amount::text") == [(one, "4.00")]
    assert kept.write([(one, 4)], end=2) == (0, 0)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("create table {} (id bigint primary key, amount bigint, note text)", "has the columns (id, amount, note)"),
        ("create table {} (id bigint primary key)", "has the columns (id)"),
        ("create table {} (id bigint, amount bigint)", "no primary key or unique index on (id)"),
        ("create table {} (id bigint unique, amount json)", "the rows cannot be written"),
        ("create table {} (id bigint unique, amount int[])", "the rows cannot be written"),
        ("create view {} as select 1 as id, 2 as amount", "is not a table"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_and_left_alone(keep: Any, made: str, said: str) -> None:
    kept = keep()
    kept.execute(made)
    assert said in refused(kept).message
    assert kept.log.run(projections.projection_epoch(kept.projection.pipeline)) == 0
    with psycopg.connect(kept.dsn) as connection:
        assert connection.execute("select to_regclass(%s)", (f'"{kept.name}__staged"',)).fetchone() == (None,)


def test_what_stands_in_the_way_is_told(keep: Any, dsn: str) -> None:
    kept = keep()
    kept.write([(1, 10, False)], end=1)
    other = keep(name=kept.name)
    other.projection = replace(other.projection, pipeline="another")
    assert f'belongs to the pipeline "{kept.projection.pipeline}"' in refused(other).message

    nowhere = keep()
    nowhere.projection = replace(nowhere.projection, schema="no such")
    assert refused(nowhere).message == 'schema "no such" does not exist'

    taken = keep()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("create table {} ()").format(sql.Identifier(f"{taken.name}__staged")))
    assert "but no pipeline created it" in refused(taken).message

    other_shape = keep(t.StructType().add("id", "long").add("total", "long"), name=kept.name)
    assert "the rows have the columns (id bigint, total bigint)" in refused(other_shape).message
    kept.execute("alter table {} drop column amount")
    assert "does not have the columns amount any more" in refused(kept).message
    kept.execute("drop table {}")
    assert "does not exist any more" in refused(kept).message


def test_columns_that_somebody_adds_stay_out_of_the_way(keep: Any) -> None:
    kept = keep()
    kept.write([(1, 10, False)], end=1)
    kept.execute("alter table {} add column note text, add column doubled bigint generated always as (amount*2) stored")
    kept.execute("update {} set note = 'mine'")
    kept.write([(1, 11, False), (2, 20, False)], end=2)
    assert kept.rows("id, amount, note, doubled") == [(1, 11, "mine", 22), (2, 20, None, 40)]


def test_a_very_long_name_has_room_for_what_stands_beside_it(keep: Any) -> None:
    kept = keep(name="n" * 63)
    kept.write([(1, 10, False)], end=1)
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)
    kept.shadow(checkpoint_epoch).write([(1, 11, False)], end=1)
    sinks_table.switch(kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=1)
    assert kept.rows() == [(1, 11)]


def test_a_role_without_the_right_is_told_which(keep: Any, dsn: str, admin_dsn: str) -> None:
    user = f"keeper_{os.getpid()}"
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(
            sql.SQL("create role {} login password 'secret' in role headwater_consumer").format(sql.Identifier(user))
        )
        try:
            kept = Keeper(conninfo.make_conninfo(dsn, user=user, password="secret"))
            with kept.log, psycopg.connect(dsn, autocommit=True) as owner:
                with pytest.raises(NotAllowed) as refusal:
                    kept.prepare()
                assert f"grant usage, create on schema public to {user}" in str(refusal.value)
                owner.execute(sql.SQL("grant usage, create on schema public to {}").format(sql.Identifier(user)))
                assert kept.write([(1, 10, False)], end=1) == (1, 0)
                checkpoint_epoch = sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)
                kept.shadow(checkpoint_epoch).write([(2, 20, False)], end=1)
                sinks_table.switch(
                    kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=1
                )
                assert kept.rows() == [(2, 20)]
                owner.execute(sql.SQL("drop owned by {}").format(sql.Identifier(user)))
        finally:
            admin.execute(sql.SQL("drop role if exists {}").format(sql.Identifier(user)))


# A rebuild.


def tables_beside(kept: Keeper) -> list[str]:
    with psycopg.connect(kept.dsn) as connection:
        found = connection.execute(
            "select relname from pg_class where starts_with(relname, %s) and relkind = 'r' order by 1", (kept.name,)
        )
        return [name.removeprefix(kept.name) for (name,) in found.fetchall()]


def test_a_rebuild_changes_rows_that_differ_and_nothing_around_them(keep: Any, dsn: str) -> None:
    kept = keep()
    kept.write([(1, 10, False), (2, 20, False), (3, 30, False)], end=5)
    kept.execute("create index on {} (amount)")
    kept.execute("alter table {} add column note text default 'kept'")
    kept.execute("create view seen_by_rebuild as select * from {}")
    kept.execute("grant select on {} to headwater_consumer")
    before = kept.rows("id, xmin::text")
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)
    shadow = kept.shadow(checkpoint_epoch)
    shadow.write([(1, 10, False), (2, 22, False)], end=3)
    shadow.write([(4, 40, False)], end=6)
    assert kept.rows() == [(1, 10), (2, 20), (3, 30)]
    done = sinks_table.switch(kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=6)
    assert done == {"written": 2, "removed": 1}
    # Asked again by somebody who did not hear the answer.
    again = sinks_table.switch(kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=6)
    assert again == {"written": 0, "removed": 0}
    assert kept.rows() == [(1, 10), (2, 22), (4, 40)]
    assert kept.rows("id, xmin::text")[0] == before[0]
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select count(*), min(note) from seen_by_rebuild").fetchone() == (3, "kept")
        rights = "select has_table_privilege('headwater_consumer', %s, 'select')"
        assert connection.execute(rights, (f'"{kept.name}"',)).fetchone() == (True,)
        indexes = connection.execute("select count(*) from pg_indexes where tablename = %s", (kept.name,))
        assert indexes.fetchone() == (2,)
    assert tables_beside(kept) == ["", "__staged"]


def test_readers_never_wait_for_a_switch_nor_see_half_of_it(keep: Any, dsn: str) -> None:
    kept = keep()
    kept.write([(n, 1, False) for n in range(100)], end=5)
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)
    kept.shadow(checkpoint_epoch).write([(n, 2, False) for n in range(50, 250)], end=5)
    count = sql.SQL("select count(*), sum(amount) from {}").format(kept.table)
    call = projections.switch_rebuilt(kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=5)
    with psycopg.connect(dsn) as switching, psycopg.connect(dsn, autocommit=True) as reading:
        reading.execute(f"set statement_timeout = '{PATIENCE_SECONDS}s'")
        with psycopg.connect(dsn) as earlier:
            earlier.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            earlier.execute("select 1")
            switching.execute(call.sql, call.params)
            assert reading.execute(count).fetchone() == (100, 100)
            switching.commit()
            assert reading.execute(count).fetchone() == (200, 400)
            # Even one that began before and looks only now.
            assert earlier.execute(count).fetchone() == (100, 100)


def test_a_rebuild_that_was_killed_leaves_the_table_and_the_next_begins_again(keep: Any) -> None:
    kept = keep()
    pipeline = kept.projection.pipeline
    kept.write([(1, 10, False)], end=5)
    first = sinks_table.begin_rebuild(kept.log, pipeline)
    killed = kept.shadow(first)
    killed.write([(9, 90, False)], end=3)
    assert sinks_table.begin_rebuild(kept.log, pipeline, resume=True) == first
    staged = killed.stage([(8, 80, False)])
    second = sinks_table.begin_rebuild(kept.log, pipeline)
    assert second > first
    # It was only thought to be dead.
    with pytest.raises(ProjectionRebuilt):
        killed.merge(*staged, end=4)
    with pytest.raises(ProjectionRebuilt):
        killed.prepare()
    with pytest.raises(ProjectionRebuilt):
        sinks_table.switch(kept.log, pipeline, checkpoint_epoch=first, caught_up_to=9)
    assert kept.rows() == [(1, 10)]
    # The table goes on being kept meanwhile.
    kept.write([(1, 11, False)], end=6)
    again = kept.shadow(second)
    again.write([(1, 12, False)], end=6)
    late = kept.stage([(1, 13, False)])
    sinks_table.switch(kept.log, pipeline, checkpoint_epoch=second, caught_up_to=6)
    assert kept.rows() == [(1, 12)]
    assert sinks_table.checkpoint_epoch(kept.log, pipeline) == second
    assert tables_beside(kept) == ["", "__staged"]
    # Whoever kept it before does so no longer.
    with pytest.raises(ProjectionRebuilt):
        kept.merge(*late, end=7)
    with pytest.raises(ProjectionRebuilt):
        kept.write([(1, 13, False)], end=7)
    kept.projection = replace(kept.projection, checkpoint_epoch=second)
    assert kept.write([(1, 13, False)], end=6, number=1) is None
    assert kept.write([(1, 13, False)], end=7, number=1) == (1, 0)


def test_a_rebuild_that_is_given_up_leaves_nothing(keep: Any) -> None:
    kept = keep()
    kept.write([(1, 10, False)], end=5)
    kept.shadow(sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)).write([(9, 90, False)], end=3)
    assert sinks_table.abandon_rebuild(kept.log, kept.projection.pipeline)
    assert not sinks_table.abandon_rebuild(kept.log, kept.projection.pipeline)
    assert tables_beside(kept) == ["", "__staged"]
    assert kept.write([(1, 11, False)], end=6) == (1, 0)


def test_a_rebuild_must_have_caught_up_and_have_something_to_show(keep: Any) -> None:
    kept = keep()
    pipeline = kept.projection.pipeline
    with pytest.raises(InvalidRequest, match="has no table yet"):
        sinks_table.begin_rebuild(kept.log, pipeline)
    kept.write([(1, 10, False)], end=5)
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, pipeline)
    with pytest.raises(InvalidRequest, match="has written no batch"):
        sinks_table.switch(kept.log, pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=9)
    kept.shadow(checkpoint_epoch).write([(1, 11, False)], end=3)
    with pytest.raises(InvalidRequest, match=r"the rebuild is at 4, but the table .* is at 5"):
        sinks_table.switch(kept.log, pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=4)
    assert kept.rows() == [(1, 10)]
    # BatchWriter end elsewhere; what counts is that there was nothing more to read.
    sinks_table.switch(kept.log, pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=4, read_to=5)
    assert kept.rows() == [(1, 11)]


def test_a_rebuild_can_change_columns_and_key(keep: Any) -> None:
    kept = keep(t.StructType().add("id", "long").add("amount", "long").add("old", "string"))
    kept.write([(1, 10, "a"), (2, 20, "b")], end=5)
    kept.execute("alter table {} add column note text default 'kept'")
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)
    changed = keep(t.StructType().add("customer", "string").add("amount", "string"), name=kept.name, key=["customer"])
    changed.projection = replace(kept.projection, checkpoint_epoch=checkpoint_epoch, rebuild=True)
    changed.write([("ada", "x"), ("bob", None)], end=5)
    sinks_table.switch(kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=5)
    assert kept.rows("customer, amount, note") == [("ada", "x", "kept"), ("bob", None, "kept")]
    changed.projection = replace(changed.projection, rebuild=False)
    assert changed.write([("ada", "y")], end=6) == (1, 0)
    assert kept.rows("customer, amount") == [("ada", "y"), ("bob", None)]


def test_a_view_that_needs_a_column_that_would_go_is_named_and_the_rebuild_kept(keep: Any) -> None:
    kept = keep()
    kept.write([(1, 10, False)], end=5)
    kept.execute("create view needs_amount as select id, amount from {}")
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)
    changed = keep(t.StructType().add("id", "long").add("total", "long"), name=kept.name)
    changed.projection = replace(kept.projection, checkpoint_epoch=checkpoint_epoch, rebuild=True)
    changed.write([(1, 11)], end=5)
    with pytest.raises(InvalidRequest, match="cannot be changed") as refusal:
        sinks_table.switch(kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=5)
    assert "Drop the views" in str(refusal.value)
    assert kept.rows() == [(1, 10)]
    kept.execute("drop view needs_amount")
    sinks_table.switch(kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=5)
    assert kept.rows("id, total") == [(1, 11)]


def test_a_table_that_was_dropped_comes_back_with_a_rebuild(keep: Any) -> None:
    kept = keep()
    kept.write([(1, 10, False)], end=5)
    kept.execute("drop table {}")
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)
    kept.shadow(checkpoint_epoch).write([(1, 10, False)], end=5)
    sinks_table.switch(kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=5)
    assert kept.rows() == [(1, 10)]


def test_all_tables_of_a_pipeline_are_switched_together(keep: Any, dsn: str) -> None:
    one, other = keep(), keep(POSITIONED, mode="append", key=[])
    other.projection = replace(other.projection, pipeline=one.projection.pipeline)
    one.write([(1, 10, False)], end=5)
    other.write([(1, 1, 10)], end=5)
    checkpoint_epoch = sinks_table.begin_rebuild(one.log, one.projection.pipeline)
    one.shadow(checkpoint_epoch).write([(1, 11, False)], end=5)
    with pytest.raises(InvalidRequest, match="has written no batch"):
        sinks_table.switch(one.log, one.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=5)
    assert one.rows() == [(1, 10)]
    other.shadow(checkpoint_epoch).write([(1, 1, 11), (2, 1, 12)], end=5)
    sinks_table.switch(one.log, one.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=5)
    assert (one.rows(), other.rows()) == ([(1, 11)], [(1, 11), (1, 12)])


def test_a_switch_that_needs_the_table_to_itself_waits_its_turn(keep: Any, dsn: str, until: Any) -> None:
    kept = keep()
    kept.write([(1, 10, False)], end=5)
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)
    changed = keep(t.StructType().add("id", "long").add("total", "long"), name=kept.name)
    changed.projection = replace(kept.projection, checkpoint_epoch=checkpoint_epoch, rebuild=True)
    changed.write([(1, 11)], end=5)
    done: list[Any] = []
    with psycopg.connect(dsn) as reader, psycopg.connect(dsn, autocommit=True) as watching:
        reader.execute(sql.SQL("select * from {}").format(kept.table))
        switching = threading.Thread(
            target=lambda: done.append(
                sinks_table.switch(
                    kept.log, kept.projection.pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=5
                )
            )
        )
        switching.start()
        waits = "select count(*) from pg_locks l where not l.granted and l.relation = to_regclass(%s)"
        until(lambda: watching.execute(waits, (f'"{kept.name}"',)).fetchone() == (1,))
        reader.rollback()
    switching.join(PATIENCE_SECONDS)
    assert done == [{"written": 1, "removed": 0}]
    assert kept.rows("id, total") == [(1, 11)]


def test_a_pipeline_goes_on_with_the_checkpoint_and_from_where_its_rebuild_ended(keep: Any) -> None:
    kept = keep()
    pipeline = kept.projection.pipeline

    def claimed(runner: str) -> Any:
        return kept.log.run(
            pipeline_runs.claim_pipeline(pipeline, runner, lease=LEASE, source="log", definition={}, start=True)
        )

    before = claimed("before")
    kept.write([(1, 10, False)], end=5)
    checkpoint_epoch = sinks_table.begin_rebuild(kept.log, pipeline)
    kept.shadow(checkpoint_epoch).write([(1, 11, False)], end=7)
    assert claimed("another").held_by == "before"
    sinks_table.switch(kept.log, pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=7)
    with pytest.raises(LeaseLost):
        kept.log.run(pipeline_runs.renew_pipeline(pipeline, before.token, lease=LEASE))
    after = claimed("after")
    assert (after.checkpoint_epoch, after.checkpoint) == (checkpoint_epoch, 7)
    assert after.token > before.token
    assert before.checkpoint_epoch < checkpoint_epoch


def test_a_pipeline_that_is_no_more_lets_go_of_its_tables(keep: Any) -> None:
    kept = keep()
    kept.write([(1, 10, False)], end=5)
    kept.shadow(sinks_table.begin_rebuild(kept.log, kept.projection.pipeline)).prepare()
    with kept.log.transaction() as connection:
        connection.execute("select headwater_internal.forget_projections(%s)", (kept.projection.pipeline,))
    assert tables_beside(kept) == [""]
    assert kept.rows() == [(1, 10)]
    other = keep(name=kept.name)
    other.projection = replace(other.projection, pipeline="its heir")
    assert other.write([(1, 11, False)], end=1) == (1, 0)
