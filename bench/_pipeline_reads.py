"""Reads in bulk: the log beside Spark's JDBC source, the snapshot of a table beside COPY."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg
from psycopg import conninfo

from bench import _measure as measure
from bench._pipeline_place import COPIED, JDBC_JARS, TOPIC, Place, Turn, Turns, Work, taking_turns, used
from headwater.spark.formats.table import opened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LOG, JDBC, SNAPSHOT, COPY = "log", "jdbc", "snapshot", "copy"

# What the format "headwater" reads, without domains, of which Spark's source does not know what they are.
JDBC_QUERY = """
select
    e.position, t.name as topic, e.partition::int as partition, e.topic_offset::bigint as topic_offset,
    e.key::bytea as key, e.type::text as type, e.routing_key::text as routing_key, e.headers::text as headers,
    e.content_type::text as content_type, e.payload::bytea as payload, e.event_id::text as event_id, e.published_at
from headwater.event e join headwater.topic t on t.id = e.topic_id
where t.name = 'orders'
"""


def into_nothing(place: Place, rows: Callable[[], DataFrame], count: int) -> Work:
    """Read rows in full, as Spark does for any sink, and drop them there."""

    def work(_: int) -> Turn:
        with used(place) as cpu:
            began = time.monotonic()
            rows().write.format("noop").mode("overwrite").save()
            seconds = time.monotonic() - began
        return Turn(count, seconds, cpu)

    return work


def log_rows(place: Place) -> DataFrame:
    return place.spark.read.format("headwater").options(dsn=place.server.dsn, topics=TOPIC).load()


def jdbc_rows(place: Place, *, partitions: int) -> DataFrame:
    """The same events by Spark's own source, in as many parts as ours, by position."""
    given = conninfo.conninfo_to_dict(place.server.dsn)
    first, last = place.server.execute("select min(position), max(position) from headwater.event")[0]
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
        # Without it, the driver would hold a whole part in memory.
        "fetchsize": 10_000,
    }
    return place.spark.read.format("jdbc").options(**options).load()


def measure_reads(place: Place, *, rows: int, rounds: int) -> Turns:
    works: dict[str, Work] = {LOG: into_nothing(place, lambda: log_rows(place), rows)}
    # What is dropped is not counted, so it is counted here.
    found = [log_rows(place)]
    if place.jdbc is None:
        measure.say(f"without JDBC: no driver in {JDBC_JARS} (apt-get install libpostgresql-jdbc-java)")
    else:
        partitions = log_rows(place).rdd.getNumPartitions()
        works[JDBC] = into_nothing(place, lambda: jdbc_rows(place, partitions=partitions), rows)
        found.append(jdbc_rows(place, partitions=partitions))
    for one in found:
        if one.count() != rows:
            raise RuntimeError(f"{one.count()} of {rows} events were read: this measures nothing")
    return taking_turns(place, works, rounds=rounds, before=lambda: rows)


def snapshotted(place: Place) -> Work:
    """A table at one point in time, read in ranges side by side."""

    def work(count: int) -> Turn:
        with used(place) as cpu:
            began = time.monotonic()
            with opened(place.server.dsn, [COPIED]) as options:
                rows = place.spark.read.format("headwater.table").options(**options).load()
                rows.write.format("noop").mode("overwrite").save()
            seconds = time.monotonic() - began
        return Turn(count, seconds, cpu)

    return work


def copied(place: Place) -> Work:
    def work(_: int) -> Turn:
        with used(place) as cpu:
            rows, seconds = place.crew.begin(copy_out, client=1, table=COPIED)()
        return Turn(rows, seconds, {"postgres": cpu["postgres"]})

    return work


def copy_out(dsn: str, table: str) -> tuple[int, float]:
    """The floor: how fast the server hands out a table at all. Nothing is made of what it sends."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        began = time.monotonic()
        # Below psycopg's own loop, which costs more than the server.
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


def measure_snapshots(place: Place, *, rows: int, rounds: int) -> Turns:
    with opened(place.server.dsn, [COPIED]) as options:
        found = place.spark.read.format("headwater.table").options(**options).load().count()
    if found != rows:
        raise RuntimeError(f"{found} of {rows} rows are in the snapshot: this measures nothing")
    works = {SNAPSHOT: snapshotted(place), COPY: copied(place)}
    return taking_turns(place, works, rounds=rounds, before=lambda: rows)
