"""`headwater demo --pipeline`: one change of a table, followed through pipelines on Spark to five destinations."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg

import headwater
from headwater.cli import installation
from headwater.cli.connection import prepare_database
from headwater.cli.exit_codes import NotFound
from headwater.cli.optional_packages import require_extras
from headwater.embedded import Postgres
from headwater.embedded.nats import Nats
from headwater.embedded.temporary import temporary_directory
from headwater.errors import HeadwaterError

# A bound for a very busy machine; an idle one takes seconds.
WAIT_SECONDS: Final = 240.0

PIPELINES: Final = """\
pipelines:
  to-nats:                                       # every change, as a JetStream message
    from: {changes: {tables: [public.orders]}}
    to: {nats: {}}
    every_seconds: 0
  to-topic:                                      # every change, as an event
    from: {changes: {tables: [public.orders]}}
    to: {topic: {name: order-changes}}
    every_seconds: 0
  to-lake:                                       # the current rows, as a Delta table
    from: {changes: {tables: [public.orders], snapshot: true}}
    to: {lake: {path: lake, keep: current}}
    every_seconds: 0
  totals:                                        # a table computed from events by SQL
    from: {log: {topics: [order-changes]}}
    transform:
      sql: >
        select data:after:customer::string as customer, count(*) as changes, max(data:after:cents::bigint) as most
        from events where data:after:customer is not null group by 1
    to: {table: {name: public.order_totals, key: [customer]}}
    every_seconds: 0
"""
CREATE_TABLE: Final = """
create table orders (id integer primary key, customer text not null, cents integer not null);
insert into orders values (1, 'ada', 1200), (2, 'bob', 550);
"""


def show(explain: Callable[[str], None]) -> list[Mapping[str, Any]]:
    """Start all servers in a temporary directory, change a row, and show the change at each destination."""
    with temporary_directory() as directory:
        explain("Starting Postgres, NATS and Spark in a temporary directory ...")
        with _servers(directory) as (dsn, nats_url):
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(CREATE_TABLE)
            with headwater.connect(dsn) as log:
                log.create_topic("order-changes")
                with _broker(dsn) as kafka, _running(directory, dsn, nats_url, explain):
                    return _follow_change(directory, dsn, nats_url, kafka, log, explain)


def _follow_change(
    directory: Path, dsn: str, nats_url: str, kafka: str, log: headwater.Headwater, explain: Callable[[str], None]
) -> list[Mapping[str, Any]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        # The first batch takes longest, since Spark starts its workers; it is not measured.
        connection.execute("insert into orders values (3, 'cleo', 100)")
        _wait_for(lambda: _total_rows(dsn, customer="cleo"))
        _wait_for(lambda: _lake_rows(directory / "lake" / "public.orders", cents=100))
        explain("\n1. A row changes in Postgres")
        connection.execute("update orders set cents = 9900 where id = 2")
    changed = time.monotonic()
    explain("   update orders set cents = 9900 where id = 2")

    def took() -> float:
        return round(time.monotonic() - changed, 2)

    message = _wait_for(lambda: asyncio.run(_message(nats_url)))
    explain(f"\n2. In NATS, after {took()} s, on subject cdc.orders.update")
    explain(f"   {message['data']}")
    results: list[Mapping[str, Any]] = [{"destination": "nats", "seconds": took(), "found": message["data"]}]

    _, event = _wait_for(lambda: _both(log.read("order-changes")))
    explain(f"\n3. In the log, after {took()} s, available to queues, followers and all servers")
    explain(f"   position {event.position}  {event.type}  after {event.data['after']}")
    results.append({"destination": "log", "seconds": took(), "found": event.data["after"]})

    offset, value = _wait_for(lambda: _record(kafka, after=event.position - 1))
    explain(f"\n4. In a Kafka consumer, after {took()} s: the same event, from `headwater serve --kafka`")
    explain(f"   offset {offset}  {value}")
    results.append({"destination": "kafka", "seconds": took(), "found": value["after"]})

    rows = _wait_for(lambda: _lake_rows(directory / "lake" / "public.orders", cents=9900))
    explain(f"\n5. In the lake, after {took()} s: a Delta table with the current rows")
    for row in rows:
        explain(f"   {row}")
    results.append({"destination": "lake", "seconds": took(), "found": rows})

    totals = _wait_for(lambda: _total_rows(dsn, customer="bob"))
    explain(f"\n6. In a projection, after {took()} s: a table computed from the events by SQL")
    for row in totals:
        explain(f"   {row}")
    results.append({"destination": "projection", "seconds": took(), "found": totals})
    explain("\nThe four pipelines are declared in this file, which `headwater pipeline run` runs:\n")
    for line in PIPELINES.splitlines():
        explain(f"   {line}")
    name = installation.program()
    explain(f"\nNext: {name} docs pipelines, {name} docs lake, {name} docs projections")
    return results


@contextmanager
def _servers(directory: Path) -> Iterator[tuple[str, str]]:
    server, broker = Postgres(directory / "postgres"), Nats(directory / "nats")
    try:
        server.start()
        broker.start()
        yield prepare_database(server), broker.url
    finally:
        broker.kill()
        server.stop(mode="immediate")


@contextmanager
def _broker(dsn: str) -> Iterator[str]:
    """Run a Kafka broker in a child process; yields its address."""
    command = [sys.executable, "-c", "from headwater.cli import main; main()", "serve", "--kafka", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--dsn", dsn, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        # A broker that does not become ready is killed; the line is then empty.
        timeout = threading.Timer(WAIT_SECONDS, process.kill)
        timeout.start()
        try:
            line = process.stdout.readline()
        finally:
            timeout.cancel()
        if not line:
            raise NotFound("the Kafka server did not start", hint="Run: pip install 'headwater[kafka]'")
        yield str(json.loads(line)["kafka"][0])
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def _record(address: str, *, after: int) -> tuple[int, dict[str, Any]] | None:
    """Return the first record after an offset, read by a Kafka client."""
    try:
        import kafka
    except ModuleNotFoundError as error:
        raise NotFound("no Kafka client is installed", hint="Run: pip install kafka-python") from error
    consumer = kafka.KafkaConsumer(bootstrap_servers=address, consumer_timeout_ms=5_000)
    try:
        partition = kafka.TopicPartition("order-changes", 0)
        consumer.assign([partition])
        consumer.seek(partition, after + 1)
        for record in consumer:
            return record.offset, json.loads(record.value)
    finally:
        consumer.close()
    return None


@contextmanager
def _running(directory: Path, dsn: str, nats_url: str, explain: Callable[[str], None]) -> Iterator[None]:
    """Run the pipelines during the block."""
    with require_extras("spark,nats"):
        from headwater.spark import local_session
        from headwater.spark.pipelines.file import parse
        from headwater.spark.pipelines.runner import Report, Runner, RunnerSettings
    started: set[str] = set()
    failed: list[str] = []

    def on_report(report: Report) -> None:
        if report.what == "started":
            started.add(report.pipeline)
        elif report.what in ("failed", "ended"):
            failed.append(f"{report.pipeline}: {report.details['error']}")

    spark = local_session("headwater demo", fast_start=True)
    spark.sparkContext.setLogLevel("OFF")
    try:
        specs = parse(PIPELINES, {}).pipelines
        settings = RunnerSettings(dsn=dsn, nats_url=nats_url, directory=directory, checkpoints="checkpoints")
        runner = Runner(spark, specs, settings, report=on_report)
        thread = threading.Thread(target=_run_until_stopped, args=(runner,), daemon=True)
        thread.start()
        _wait_for(lambda: len(started) == len(specs) or failed)
        if failed:
            raise HeadwaterError(failed[0])
        explain(f"{len(specs)} pipelines are running.")
        yield
        runner.stop()
        thread.join(WAIT_SECONDS)
    finally:
        spark.stop()


def _run_until_stopped(runner: Any) -> None:
    # Errors were already reported.
    with suppress(HeadwaterError):
        runner.run()


def _wait_for(check: Callable[[], Any]) -> Any:
    """Call `check` until its result is true, and return the result."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := check()):
        if time.monotonic() > deadline:
            raise HeadwaterError(
                f"the change did not arrive within {WAIT_SECONDS:g} seconds",
                hint="The machine may be overloaded: try again later.",
            )
        time.sleep(0.02)
    return found


async def _message(url: str) -> dict[str, Any] | None:
    from nats.js.errors import NotFoundError

    from headwater.nats import codec, streams

    async with streams.connect(url) as client:
        try:
            message = await client.jetstream().get_last_msg("CDC", "cdc.orders.update")
        except NotFoundError:
            return None
    found = codec.decode(message.data or b"")
    assert isinstance(found, dict)
    return found


def _lake_rows(path: Path, *, cents: int) -> list[dict[str, Any]]:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        rows: list[dict[str, Any]] = DeltaTable(path).to_pyarrow_table(columns=["id", "customer", "cents"]).to_pylist()
    except TableNotFoundError:
        return []
    return sorted(rows, key=lambda row: row["id"]) if any(row["cents"] == cents for row in rows) else []


def _total_rows(dsn: str, *, customer: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        try:
            rows = connection.execute("select customer, changes, most from order_totals order by 1").fetchall()
        except psycopg.errors.UndefinedTable:
            return []
    return rows if any(row[0] == customer for row in rows) else []


def _both(events: list[headwater.Event]) -> list[headwater.Event]:
    return events if len(events) == 2 else []
