"""Do readers get from a broker's memory the very records that Postgres has, whatever happens to the log meanwhile?"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import google_crc32c
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwater
from effort import effort
from headwater import aio
from headwater.calls import kafka as calls
from headwater.calls.kafka import AppendBatch, ProduceResult
from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.broker import Broker, BrokerSettings
from headwater.servers.kafka.compression import codecs_for
from headwater.servers.kafka.fetch import FetchApi
from headwater.servers.kafka.produce import ProduceApi
from headwater.servers.kafka.records import (
    LOG_APPEND_TIME,
    Columns,
    build_batch,
    read_header,
    read_records,
    stamp_batch,
    write_headers,
)
from headwater.servers.kafka.wire import ErrorCode, Request
from patience import PATIENCE_SECONDS

EXAMPLES = effort(40)
_numbers = itertools.count()
Record = tuple[int, int, bytes | None, bytes | None, bytes | None]


class Server:
    """A broker without its sockets."""

    def __init__(self, log: headwater.AsyncHeadwater, cache_bytes: int) -> None:
        self.broker = Broker(log, BrokerSettings("127.0.0.1", 9092, cache_bytes=cache_bytes))
        self.producing = ProduceApi(self.broker)
        self.fetching = FetchApi(self.broker)
        self.tasks = self.producing.tasks()

    async def produce(self, topic: str, batch: bytes, transactional_id: str | None = None) -> Any:
        part = SimpleNamespace(index=0, records=memoryview(batch))
        data = SimpleNamespace(name=topic, partition_data=[part])
        fields = SimpleNamespace(acks=-1, transactional_id=transactional_id, topic_data=[data])
        answer = await (await self.producing.begin(Request(ApiKey.PRODUCE, 9, 1, None, fields), self._stage))
        assert answer is not None
        return answer["responses"][0]["partition_responses"][0]

    async def _stage(self, transactional_id: str, batch: AppendBatch) -> ProduceResult:
        return ProduceResult(
            await self.broker.log.run(calls.kafka_stage(transactional_id, batch, may_begin=False)), -1, -1
        )

    async def fetch(self, topic: str, offset: int, max_bytes: int, version: int) -> Any:
        part = SimpleNamespace(partition=0, fetch_offset=offset, partition_max_bytes=max_bytes)
        fields = SimpleNamespace(
            max_wait=0, min_bytes=1, max_bytes=max_bytes, topics=[SimpleNamespace(topic=topic, partitions=[part])]
        )
        answer = await self.fetching.fetch(Request(ApiKey.FETCH, version, 1, None, fields))
        return answer["responses"][0]["partitions"][0]

    async def read(self, topic: str, offset: int, max_bytes: int, version: int) -> tuple[Any, list[Record]]:
        """The bounds or the error, and all records from an offset on, as a client reads on."""
        found: list[Record] = []
        while True:
            part = await self.fetch(topic, offset, max_bytes, version)
            await self._check_codecs(topic, part["records"], version)
            told = (part["error_code"], part["high_watermark"], part["log_start_offset"])
            came = [record for record in records_of(part["records"]) if record[0] >= offset]
            if not came:
                return told, found
            found += came
            offset = came[-1][0] + 1

    async def _check_codecs(self, topic: str, answer: bytes, version: int) -> None:
        known = await self.broker.topic_named(topic)
        assert known is not None
        while answer:
            assert answer[22] & 7 in codecs_for(known.compression_type, zstd=version >= 10)
            answer = answer[12 + struct.unpack_from(">i", answer, 8)[0] :]


def records_of(answer: bytes) -> list[Record]:
    """What a client makes of an answer."""
    found: list[Record] = []
    while answer:
        base, length = struct.unpack_from(">qi", answer)
        one = memoryview(answer)[: 12 + length]
        header = read_header(one)
        columns = read_records(one, header, limit_bytes=10_000_000)
        times = columns.times_ms
        if header.attributes & LOG_APPEND_TIME:
            times = [header.max_time_ms] * header.record_count
        for place, (time_ms, key, value, section) in enumerate(
            zip(times, columns.keys, columns.values, columns.headers, strict=True)
        ):
            found.append((base + place, time_ms, key, value, section))
        answer = answer[12 + length :]
    return found


class Servers(NamedTuple):
    """Two brokers of one log: one remembers, one reads everything from Postgres."""

    runner: asyncio.Runner
    remembers: Server
    forgets: Server
    log: headwater.Headwater
    connection: psycopg.Connection

    def run(self, act: Any) -> Any:
        return self.runner.run(act)

    def topics_changed(self) -> None:
        for server in (self.remembers, self.forgets):
            self.run(server.broker.refresh_topics())

    def new_topic(self) -> str:
        name = f"partition-{next(_numbers)}"
        self.log.create_topic(name, kind="sequenced")
        self.topics_changed()
        return name

    def topic_id(self, name: str) -> int:
        row = self.connection.execute(
            "select id from headwater_internal.topic where name = %s and deleted_at is null", (name,)
        ).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture(scope="module")
def servers(dsn: str) -> Iterator[Servers]:
    with (
        asyncio.Runner() as runner,
        headwater.connect(dsn) as log,
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        logs = [runner.run(aio.connect(dsn, pool_size=6)) for _ in range(2)]

        async def open_servers() -> list[Server]:
            return [Server(one, kept) for one, kept in zip(logs, (300_000, 0), strict=True)]

        remembers, forgets = runner.run(open_servers())
        yield Servers(runner, remembers, forgets, log, connection)

        async def close() -> None:
            for task in (*remembers.tasks, *forgets.tasks):
                task.cancel()
            for one in logs:
                await one.close()

        runner.run(close())


def batch(
    *values: bytes | None, first_ms: int = 1000, codec: int = 0, headers: bytes | None = None, producer: int = -1,
    epoch: int = -1, sequence: int = -1, transactional: bool = False
) -> bytes:  # fmt: skip
    count = len(values)
    columns = Columns(
        [first_ms + place * 7 for place in range(count)],
        [None if place % 3 == 2 else b"key%d" % place for place in range(count)],
        list(values),
        [headers if place % 2 else None for place in range(count)],
    )
    made = bytearray(build_batch(list(range(count)), columns, codec=codec))
    struct.pack_into(">qhi", made, 43, producer, epoch, sequence)
    if transactional:
        made[22] |= 0x10
    struct.pack_into(">I", made, 17, google_crc32c.value(bytes(made[21:])))
    return bytes(made)


values = st.lists(st.none() | st.binary(max_size=60), min_size=1, max_size=12)
sections = st.none() | st.lists(
    st.tuples(st.sampled_from([b"a", b"bb", b"headwater-type"]), st.none() | st.binary(max_size=6)),
    min_size=1,
    max_size=3,
).map(write_headers)
produced = st.tuples(st.just("produce"), st.booleans(), values, st.integers(0, 4), st.integers(-50, 10**12), sections)
altered = st.tuples(
    st.just("alter"),
    st.sampled_from(["CreateTime", "LogAppendTime"]),
    st.sampled_from(["producer", "uncompressed", "gzip", "zstd"]),
)
steps = st.lists(
    st.one_of(
        produced,
        produced.map(lambda step: (step[0], True, *step[2:])),
        st.tuples(st.just("publish"), values),
        st.tuples(st.just("roll back"), values),
        st.tuples(st.just("transaction"), values, st.booleans()),
        st.tuples(st.just("twice"), values),
        st.tuples(st.just("expire"), st.integers(1, 15)),
        st.tuples(st.just("lose"), st.integers(1, 15)),
        st.tuples(st.just("make again")),
        altered,
        st.tuples(st.just("read"), st.integers(0, 30), st.sampled_from([1, 150, 1000, 100_000]),
                  st.sampled_from([9, 12])),
    ),
    min_size=3,
    max_size=14,
)  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(altered, steps, st.sampled_from([9, 12]))
def test_memory_gives_the_very_records_that_postgres_has(
    servers: Servers, first: tuple[Any, ...], steps: list[tuple[Any, ...]], version: int
) -> None:
    topic = servers.new_topic()
    steps = [first, *steps]
    for kind, *arguments in steps:
        topic = step(servers, topic, kind, arguments)
        compare(servers, topic, 0, 100_000, version)
    compare(servers, topic, 3, 200, version)


def compare(servers: Servers, topic: str, offset: int, max_bytes: int, version: int) -> None:
    mine = servers.run(servers.remembers.read(topic, offset, max_bytes, version))
    truth = servers.run(servers.forgets.read(topic, offset, max_bytes, version))
    assert mine == truth


def step(servers: Servers, topic: str, kind: str, arguments: list[Any]) -> str:
    if kind == "produce":
        here, values, codec, first_ms, section = arguments
        server = servers.remembers if here else servers.forgets
        answer = servers.run(server.produce(topic, batch(*values, codec=codec, first_ms=first_ms, headers=section)))
        assert answer["error_code"] in (ErrorCode.none, ErrorCode.invalid_record)
    elif kind == "publish":
        servers.log.publish_batch(topic, [headwater.NewEvent(value, type="told") for value in arguments[0]])
    elif kind == "roll back":
        with psycopg.connect(servers.connection.info.dsn) as connection:
            servers.log.publish_batch(
                topic, [headwater.NewEvent(value) for value in arguments[0]], connection=connection
            )
            connection.rollback()
    elif kind == "transaction":
        write_in_transaction(servers, topic, *arguments)
    elif kind == "twice":
        producer = servers.run(servers.remembers.broker.log.run(calls.kafka_new_producer()))
        sent = batch(*arguments[0], producer=producer, epoch=0, sequence=0)
        answers = [servers.run(servers.remembers.produce(topic, sent)) for _ in range(2)]
        assert answers[0]["base_offset"] == answers[1]["base_offset"] >= 0
    elif kind == "expire":
        expire(servers, topic, arguments[0])
    elif kind == "lose":
        lose(servers, topic, arguments[0])
    elif kind == "make again":
        servers.log.delete_topic(topic)
        servers.log.create_topic(topic, kind="sequenced")
        servers.topics_changed()
    elif kind == "alter":
        servers.run(
            servers.forgets.broker.log.run(
                calls.kafka_alter_topic(topic, timestamp_type=arguments[0], compression_type=arguments[1])
            )
        )
        servers.topics_changed()
    else:
        compare(servers, topic, *arguments)
    return topic


def write_in_transaction(servers: Servers, topic: str, values: list[bytes | None], committed: bool) -> None:
    name = f"transaction-{next(_numbers)}"
    log = servers.remembers.broker.log
    _, producer, epoch = servers.run(
        log.run(calls.kafka_init_transactions(name, timeout_ms=60_000, known_id=-1, known_epoch=-1))
    )
    assert servers.run(log.run(calls.kafka_begin(name, producer, epoch))) == "ok"
    sent = batch(*values, producer=producer, epoch=epoch, sequence=0, transactional=True)
    assert servers.run(servers.remembers.produce(topic, sent, name))["error_code"] == ErrorCode.none
    compare(servers, topic, 0, 100_000, 12)
    ended = calls.kafka_end_transaction(name, producer, epoch, committed=committed, next_epoch=False)
    assert servers.run(log.run(ended))[0] == "ok"


def expire(servers: Servers, topic: str, count: int) -> None:
    """What retention does: events at the beginning of the partition go, but not the last."""
    topic_id = servers.topic_id(topic)
    positions = [
        position
        for (position,) in servers.connection.execute(
            "select position from headwater_internal.event where topic_id = %s order by position", (topic_id,)
        )
    ]
    if len(positions) > count:
        servers.connection.execute(
            "with topic as (update headwater_internal.topic set expired_to = %(position)s where id = %(id)s), gone as ("
            "delete from headwater_internal.event where topic_id = %(id)s and position <= %(position)s returning "
            "topic_offset) "
            "insert into headwater_internal.kafka_partition as l (topic_id, partition, start_offset) "
            "select %(id)s, 0, max(topic_offset) + 1 from gone having count(*) > 0 "
            "on conflict (topic_id, partition) do update set start_offset = excluded.start_offset",
            {"id": topic_id, "position": positions[count - 1]},
        )


def lose(servers: Servers, topic: str, kept: int) -> None:
    """What a crash without synchronous commits does: the end of the partition is gone, and its offsets come again."""
    servers.connection.execute(
        "delete from headwater_internal.event where topic_id = %s and topic_offset >= %s",
        (servers.topic_id(topic), kept),
    )
    # No crash is over within the millisecond in which the lost events were published.
    servers.connection.execute("select pg_sleep(0.002)")


def test_what_was_just_written_or_read_is_not_read_again(servers: Servers) -> None:
    topic = servers.new_topic()
    topic_partition = calls.TopicPartition(servers.topic_id(topic), 0)
    servers.run(servers.remembers.produce(topic, batch(b"here", b"too")))
    servers.run(servers.forgets.produce(topic, batch(b"there")))
    kept = servers.remembers.broker.batch_cache
    anything = {"max_bytes": 10_000, "codecs": range(5), "by_log_time": False}
    assert [(one.first, one.end) for one in kept.batches(topic_partition, 0, **anything)] == [(0, 2)]
    _, records = servers.run(servers.remembers.read(topic, 0, 10_000, 12))
    assert [value for _, _, _, value, _ in records] == [b"here", b"too", b"there"]
    assert [(one.first, one.end) for one in kept.batches(topic_partition, 1, **anything)] == [(0, 2), (2, 3)]
    # That it is memory that answers: records that Postgres would never give, under the time that it does.
    (first, second) = kept.batches(topic_partition, 0, **anything)
    kept.add(
        topic_partition,
        first._replace(records=stamp_batch(batch(b"from", b"memory"), 0, log_append_ms=None)),
        epoch=kept.epoch,
    )
    _, records = servers.run(servers.remembers.read(topic, 0, 10_000, 12))
    assert [value for _, _, _, value, _ in records] == [b"from", b"memory", b"there"]
    # And one that Postgres does not confirm ends all memory of the partition.
    kept.add(topic_partition, second._replace(published_ms=second.published_ms - 1), epoch=kept.epoch)
    compare(servers, topic, 0, 10_000, 12)


def test_of_a_compacted_topic_nothing_is_remembered(servers: Servers) -> None:
    topic = servers.new_topic()
    servers.run(servers.remembers.produce(topic, batch(b"old", b"kept")))
    alter = calls.kafka_alter_topic(topic, compacted=True)
    servers.run(servers.forgets.broker.log.run(alter))
    servers.topics_changed()
    sent = build_batch([0, 1], Columns([1, 2], [b"key0", b"x"], [b"new", b"last"], [None, None]))
    servers.run(servers.remembers.produce(topic, sent))
    servers.run(servers.forgets.broker.log.run(calls.kafka_compact()))
    part = servers.run(servers.remembers.fetch(topic, 0, 10_000, 12))
    truth = servers.run(servers.forgets.fetch(topic, 0, 10_000, 12))
    assert part["records"] == truth["records"]
    assert b"old" not in part["records"]
    assert b"new" in part["records"]


def test_what_a_crash_lost_is_not_told_even_if_what_follows_is_true(servers: Servers) -> None:
    topic = servers.new_topic()
    servers.run(servers.remembers.produce(topic, batch(b"stays")))
    servers.run(servers.remembers.produce(topic, batch(b"lost", b"lost too")))
    lose(servers, topic, 1)
    servers.run(servers.forgets.produce(topic, batch(b"new", b"new too")))
    # Its offset follows that of what was lost.
    servers.run(servers.remembers.produce(topic, batch(b"last")))
    compare(servers, topic, 0, 10_000, 12)


def test_as_it_came_a_batch_goes_only_to_those_who_can_read_it_and_only_while_the_topic_says_so(
    servers: Servers,
) -> None:
    topic = servers.new_topic()
    servers.run(servers.remembers.produce(topic, batch(b"packed by its producer", codec=4)))
    for version, codec in ((12, 4), (9, 0)):
        part = servers.run(servers.remembers.fetch(topic, 0, 10_000, version))
        assert part["records"][22] & 7 == codec
    servers.run(servers.forgets.broker.log.run(calls.kafka_alter_topic(topic, compression_type="gzip")))
    servers.topics_changed()
    part = servers.run(servers.remembers.fetch(topic, 0, 10_000, 12))
    assert part["records"][22] & 7 == 1
    compare(servers, topic, 0, 10_000, 12)


def test_records_of_all_sizes_and_kinds_come_whole_and_in_order(servers: Servers) -> None:
    topic = servers.new_topic()
    values = [b"small %d" % number for number in range(300)]
    values[150] = b"large" * 30_000
    values[250] = b""
    told = write_headers([(b"name", b"text")])
    for start in range(0, 300, 50):
        section = told if start == 200 else None
        servers.run(servers.forgets.produce(topic, batch(*values[start : start + 50], headers=section)))
    for server in servers.remembers, servers.forgets:
        for max_bytes in (100, 5_000, 1_000_000):
            part = servers.run(server.fetch(topic, 0, max_bytes, 12))
            assert len(part["records"]) <= max_bytes
            _, records = servers.run(server.read(topic, 0, max_bytes, 12))
            assert [(offset, value) for offset, _, _, value, _ in records] == list(enumerate(values))
            assert {offset for offset, *_, section in records if section == told} == set(range(201, 250, 2))


def test_who_reads_on_is_read_ahead_of_and_nobody_else(servers: Servers) -> None:
    topic = servers.new_topic()
    for _ in range(4):
        servers.run(servers.forgets.produce(topic, batch(*[b"x" * 1000] * 50)))
    kept, ahead = servers.remembers.broker.batch_cache, servers.remembers.fetching._reader._read_ahead_tasks
    topic_partition = calls.TopicPartition(servers.topic_id(topic), 0)

    async def fetch_and_wait(offset: int) -> int:
        part = await servers.remembers.fetch(topic, offset, 30_000, 12)
        if ahead:
            await asyncio.wait(list(ahead.values()), timeout=PATIENCE_SECONDS)
        return records_of(part["records"])[-1][0] + 1

    reached = servers.run(fetch_and_wait(0))
    found = kept.batches(topic_partition, reached, max_bytes=1, codecs=(0,), by_log_time=False)
    assert [one.first for one in found] == [reached]
    # What is at the end of the partition has nothing after it to be read.
    assert servers.run(fetch_and_wait(190)) == 200
    assert not ahead
    assert not kept.batches(topic_partition, 200, max_bytes=1, codecs=(0,), by_log_time=False)
