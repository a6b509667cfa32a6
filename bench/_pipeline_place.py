"""Where the pipeline is measured: servers, a warm session, filled tables; turns, and what they cost."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headwater
from bench import _measure as measure
from bench._measure import Crew, Server
from headwater.embedded import Postgres
from headwater.embedded.nats import Nats
from headwater.nats import streams
from headwater.spark import local_session
from headwater.spark.pipelines.runner import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "orders"
CAPTURED, SLOW, COPIED = "bench.orders", "bench.slow", "bench.copied"
JDBC_JARS = "/usr/share/java"
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

-- One transaction of so many changes: of ten rows, six are inserted, three updated and one deleted.
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
insert into headwater.event (topic_id, key, type, content_type, payload)
select
    t.id, convert_to('customer-' || mod(i, 10000), 'UTF8'), 'order.placed', 'application/json',
    convert_to(json_build_object('id', i, 'amount', i / 7.0, 'note', md5(i::text), 'paid', true)::text, 'UTF8')
from headwater.topic t, generate_series(1, %s) as i
where t.name = %s
"""


# --- where it is measured ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The servers, the warm session, the processes beside them, and a directory for what they leave."""

    server: Server
    nats: Nats
    spark: SparkSession
    crew: Crew
    directory: Path
    jdbc: Path | None

    def settings(self, *, once: bool) -> Settings:
        return Settings(
            dsn=self.server.dsn,
            nats_url=self.nats.url,
            directory=self.directory,
            checkpoints=str(self.directory / "checkpoints"),
            once=once,
        )


@contextmanager
def prepared(dsn: str | None, *, rows: int) -> Iterator[Place]:
    """Everything started, tables and log filled; stopped and gone afterwards."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-")))
        if dsn is None:
            # Java's drivers need an address: they cannot use the socket.
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
        crew = stack.enter_context(Crew(server.dsn, 2))
        measure.say("filling the log and a table")
        server.execute(TABLES)
        server.execute("select nextval('bench.next_id')")
        server.execute(FILL_COPIED, (rows,))
        with headwater.connect(server.dsn, pool_size=1) as log:
            log.create_topic(TOPIC)
        server.execute(FILL_LOG, (rows, TOPIC))
        server.execute("vacuum (analyze)")
        measure.say("starting Spark")
        jdbc = next(iter(sorted(Path(JDBC_JARS).glob("postgresql-4*.jar"))), None)
        spark = local_session(
            "headwater bench", extra_settings={"spark.driver.extraClassPath": str(jdbc)} if jdbc else None
        )
        stack.callback(spark.stop)
        yield Place(server, nats, spark, crew, directory, jdbc)


async def _make_streams(url: str) -> None:
    async with streams.connected(url) as client:
        await streams.ensure_streams(client.jetstream())


# --- CPU time ------------------------------------------------------------------------------------------------

GROUPS = ("java", "python", "postgres", "nats")


def cpu_seconds(place: Place) -> dict[str, float]:
    """CPU time so far: Spark's Java, its Python processes and this one, all of Postgres, NATS."""
    gateway: Any = place.spark.sparkContext._gateway
    own, below = _tree(gateway.proc.pid)
    return {
        "java": own,
        "python": below + time.process_time(),
        "postgres": place.server.cpu_seconds() or 0.0,
        "nats": sum(_tree(place.nats.pid or 0)),
    }


def _tree(root: int) -> tuple[float, float]:
    """CPU seconds of a process, and of all below it, those that ended included."""
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
def used(place: Place) -> Iterator[dict[str, float]]:
    """CPU seconds of the block by group, there when it has ended."""
    before = cpu_seconds(place)
    taken: dict[str, float] = {}
    yield taken
    taken |= {group: seconds - before[group] for group, seconds in cpu_seconds(place).items()}


@dataclass(frozen=True)
class Turn:
    """One turn of one variant: so many changes or rows, in so many seconds, with so much CPU time."""

    count: int
    seconds: float
    cpu: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.count / self.seconds


Turns = dict[str, list[Turn]]
Work = Callable[[int], Turn]
"""Handles what there is, so many changes or rows, and says how long that took."""


def taking_turns(place: Place, works: Mapping[str, Work], *, rounds: int, before: Callable[[], int]) -> Turns:
    """Every work once in each round, the order going round; the first round is warming up and does not count."""
    turns: Turns = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + 1):
        count = before()
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            turn = works[name](count)
            if turn.count != count:
                raise RuntimeError(f"{name} handled {turn.count} of {count}: this measures nothing")
            if number:
                turns[name].append(turn)
        measure.say("warmed up" if number == 0 else f"round {number} of {rounds}")
    return turns


def rate(turns: Turns, name: str) -> float | None:
    return statistics.median(turn.rate for turn in turns[name]) if turns.get(name) else None


def ratio(turns: Turns, ours: str, other: str) -> float | None:
    """How fast ours is as a part of the other: the median over the rounds."""
    if not turns.get(ours) or not turns.get(other):
        return None
    return statistics.median(a.rate / b.rate for a, b in zip(turns[ours], turns[other], strict=True))


def cpu_us(turns: Sequence[Turn], group: str) -> float | None:
    """CPU microseconds for one change or row: sums, since the clock ticks of one turn are coarse."""
    if any(group not in turn.cpu for turn in turns):
        return None
    return sum(turn.cpu[group] for turn in turns) / sum(turn.count for turn in turns) * 1e6
