"""What no well-behaved client sends: repetitions, gaps, lies, old versions; and what they must get for it."""

from __future__ import annotations

import itertools
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from select import select
from typing import Any

import psycopg
import pytest
from brokers import BrokerProcess
from raw_client import Raw, batch_of, batches

import headwater
from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.dispatch import SUPPORTED_VERSIONS
from headwater.servers.kafka.records import Columns, build_batch
from headwater.servers.kafka.wire import ErrorCode, _shapes
from patience import PATIENCE_SECONDS

_numbers = itertools.count(1)


@pytest.fixture
def raw(broker: BrokerProcess) -> Iterator[Raw]:
    connection = Raw(broker)
    yield connection
    connection.socket.close()


@pytest.fixture
def partition(log: headwater.Headwater) -> str:
    """A fresh sequenced topic of one partition."""
    return log.create_topic(f"partition-{next(_numbers)}", kind="sequenced").name


# Producers


def test_a_batch_that_comes_again_gets_its_first_offset_and_is_not_written_again(raw: Raw, partition: str) -> None:
    producer = raw.ask(ApiKey.INIT_PRODUCER_ID, 4, {"transaction_timeout": 1000}).producer_id
    sent = [batch_of(b"a%d" % n, b"b%d" % n, producer=producer, epoch=0, sequence=2 * n) for n in range(7)]
    for number, batch in enumerate(sent):
        answer = raw.produce(partition, batch)
        assert (answer.error_code, answer.base_offset) == (ErrorCode.none, 2 * number)
    for number in range(2, 7):
        answer = raw.produce(partition, sent[number])
        assert (answer.error_code, answer.base_offset) == (ErrorCode.none, 2 * number)
    # Only the last five are remembered, as in Kafka.
    assert raw.produce(partition, sent[1]).error_code == ErrorCode.out_of_order_sequence_number
    assert len(raw.values(partition)) == 14


def test_a_gap_in_the_sequence_is_refused_and_an_old_epoch_is_fenced(raw: Raw, partition: str) -> None:
    producer = raw.ask(ApiKey.INIT_PRODUCER_ID, 4, {"transaction_timeout": 1000}).producer_id

    def send(sequence: int, epoch: int = 0) -> ErrorCode:
        return raw.produce(partition, batch_of(b"x", producer=producer, epoch=epoch, sequence=sequence)).error_code

    assert send(0) == ErrorCode.none
    assert send(2) == ErrorCode.out_of_order_sequence_number
    assert send(1) == ErrorCode.none
    assert send(5, epoch=1) == ErrorCode.out_of_order_sequence_number
    assert send(0, epoch=1) == ErrorCode.none
    assert send(2) == ErrorCode.invalid_producer_epoch
    assert len(raw.values(partition)) == 3


def test_a_sequence_starts_again_after_its_last_number(raw: Raw, partition: str) -> None:
    producer = raw.ask(ApiKey.INIT_PRODUCER_ID, 4, {"transaction_timeout": 1000}).producer_id
    last = 2**31 - 2
    for number, (sequence, values) in enumerate(((last, (b"a", b"b", b"c")), (1, (b"d",)))):
        answer = raw.produce(partition, batch_of(*values, producer=producer, epoch=0, sequence=sequence))
        assert (answer.error_code, answer.base_offset) == (ErrorCode.none, 3 * number)


def test_many_producers_at_once_get_offsets_without_gap_or_repetition(
    broker: BrokerProcess, partition: str, log: headwater.Headwater
) -> None:
    offsets: list[int] = []

    def run(number: int) -> None:
        raw = Raw(broker)
        for count in range(20):
            raw.send_produce(partition, batch_of(b"%d-%d" % (number, count)), correlation=count)
        for count in range(20):
            answer = raw.receive(ApiKey.PRODUCE, 9, correlation=count).responses[0].partition_responses[0]
            assert answer.error_code == ErrorCode.none
            offsets.append(answer.base_offset)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    # Another publisher at the same partition, who is no client of Kafka.
    for _ in range(10):
        log.publish(partition, b"sql")
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    events = list(log.read(partition, batch_size=1000))
    assert [event.topic_offset for event in events] == list(range(170))
    assert sorted(offsets) == [event.topic_offset for event in events if event.payload != b"sql"]
    for number in range(8):
        mine = [event.payload for event in events if (event.payload or b"").startswith(b"%d-" % number)]
        assert mine == [b"%d-%d" % (number, count) for count in range(20)]


def test_requests_that_come_at_once_share_a_transaction(
    broker: BrokerProcess, partition: str, connection: psycopg.Connection, until: Callable[[Callable[[], Any]], Any]
) -> None:
    clients = [Raw(broker) for _ in range(5)]
    with psycopg.connect(connection.info.dsn, autocommit=True) as watcher, connection.transaction():
        # While the partition is held, the first of them waits for it, and the others for the first.
        connection.execute("select headwater.publish(%s, '1')", (partition,))
        for number in range(8):
            for client in clients:
                client.send_produce(partition, batch_of(b"v"), correlation=number)
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        until(lambda: watcher.execute(waiting).fetchone() != (0,))
    for client in clients:
        for number in range(8):
            answer = client.receive(ApiKey.PRODUCE, 9, correlation=number).responses[0].partition_responses[0]
            assert answer.error_code == ErrorCode.none
    query = (
        "select count(distinct e.xmin::text), count(*) from headwater_internal.event e "
        "join headwater_internal.topic t on t.id = e.topic_id where t.name = %s and e.payload = 'v'"
    )
    transactions, records = connection.execute(query, (partition,)).fetchone() or (0, 0)
    assert records == 40
    assert transactions < 40


def test_what_cannot_be_taken_is_refused_and_the_connection_goes_on(raw: Raw, partition: str) -> None:
    good = batch_of(b"v")
    for batch, code in (
        (good[:-1] + b"\xff", ErrorCode.corrupt_message),
        (good + good, ErrorCode.invalid_record),
        (b"", ErrorCode.corrupt_message),
        (batch_of(b"x" * 1_048_576), ErrorCode.message_too_large),
    ):
        assert raw.produce(partition, batch).error_code == code
    assert raw.produce("no-such-topic", good).error_code == ErrorCode.unknown_topic_or_partition
    assert raw.produce(partition, good, partition=5).error_code == ErrorCode.unknown_topic_or_partition
    assert raw.produce(partition, good, acks=7).error_code == ErrorCode.invalid_required_acks
    zstd = bytearray(build_batch([0], Columns([1], [None], [b"v"], [None]), codec=4))
    assert raw.produce(partition, bytes(zstd), version=3).error_code == ErrorCode.unsupported_compression_type
    # Without acknowledgement nothing is said; the next answer is that of the next request.
    raw.send_produce(partition, good, acks=0)
    assert raw.produce(partition, good).base_offset == 1


def test_records_of_a_client_that_waits_for_no_answer_and_goes_are_written(
    broker: BrokerProcess, partition: str, log: headwater.Headwater, until: Callable[[Callable[[], Any]], Any]
) -> None:
    raw = Raw(broker)
    # A fetch that waits is in front of them, so they are still waiting when the client is gone.
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 100}
    raw.send(
        ApiKey.FETCH, 12, {"max_wait": 60_000, "min_bytes": 1, "topics": [{"topic": partition, "partitions": [part]}]}
    )
    for number in range(20):
        raw.send_produce(partition, batch_of(b"%d" % number), acks=0)
    raw.socket.close()

    def written() -> list[bytes | None]:
        return [event.payload for event in log.read(partition, batch_size=1000)]

    until(lambda: len(written()) == 20)
    assert written() == [b"%d" % number for number in range(20)]


def test_a_partition_that_a_transaction_holds_does_not_hold_up_others(
    broker: BrokerProcess, partition: str, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topics = [partition, *(log.create_topic(f"partition-{next(_numbers)}", kind="sequenced").name for _ in range(4))]
    raw = Raw(broker)
    # In one request, so that some of them are in the transaction that cannot have the partition.
    data = [{"name": name, "partition_data": [{"records": batch_of(b"v")}]} for name in topics]
    with connection.transaction():
        connection.execute("select headwater.publish(%s, '1')", (partition,))
        answer = raw.ask(ApiKey.PRODUCE, 9, {"acks": -1, "timeout": 1000, "topic_data": data})
        codes = [one.partition_responses[0].error_code for one in answer.responses]
        assert codes == [ErrorCode.request_timed_out, *[ErrorCode.none] * 4]
    assert raw.produce(partition, batch_of(b"again")).base_offset == 1


def test_a_batch_of_which_nobody_knows_whether_it_is_there_ends_the_connection(
    broker: BrokerProcess, partition: str, dsn: str, connection: psycopg.Connection
) -> None:
    # Told by a code, a client begins a new epoch at the gap that the next batch meets, and sends again under other
    # numbers what may be in the log already.
    end_waiting = (
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and wait_event_type = 'Lock' and query like '%kafka_append%'"
    )
    with psycopg.connect(dsn) as holder:
        holder.execute("select headwater.publish(%s, '1')", (partition,))
        # The broker waits for the partition for a second, which a busy machine may let pass.
        for _ in range(20):
            raw = Raw(broker)
            raw.send_produce(partition, batch_of(b"v", producer=7, epoch=0, sequence=0))
            while (
                not (ended := connection.execute(end_waiting).fetchone()) and not select([raw.socket], [], [], 0.01)[0]
            ):
                pass
            if ended:
                with pytest.raises(ConnectionError):
                    raw.receive(ApiKey.PRODUCE, 9)
                break
        else:
            pytest.fail("the broker was never found waiting")
        holder.rollback()
    assert Raw(broker).produce(partition, batch_of(b"v", producer=7, epoch=0, sequence=0)).base_offset == 0


# Fetching


def test_a_record_larger_than_the_limit_comes_all_the_same(raw: Raw, partition: str) -> None:
    for size in (300_000, 10, 10):
        raw.produce(partition, batch_of(b"x" * size))
    part = raw.fetch(partition, 0, max_bytes=1000, partition_bytes=1000).responses[0].partitions[0]
    assert [len(value or b"") for batch in batches(part.records) for value in batch.values] == [300_000]
    part = raw.fetch(partition, 1, max_bytes=1000, partition_bytes=1000).responses[0].partitions[0]
    assert [len(value or b"") for batch in batches(part.records) for value in batch.values] == [10, 10]
    assert (part.high_watermark, part.last_stable_offset, part.log_start_offset) == (3, 3, 0)


def test_offsets_below_and_above_the_log_are_out_of_range(raw: Raw, partition: str) -> None:
    raw.produce(partition, batch_of(b"a", b"b"))
    for offset, code in ((2, ErrorCode.none), (3, ErrorCode.offset_out_of_range), (-1, ErrorCode.offset_out_of_range)):
        part = raw.fetch(partition, offset).responses[0].partitions[0]
        assert (part.error_code, part.records or b"") == (code, b"")


def test_what_retention_took_is_out_of_range_and_the_partition_counts_on(
    raw: Raw, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = log.create_topic(f"kept-{next(_numbers)}", kind="sequenced", retention=timedelta(days=1)).name
    raw.produce(topic, batch_of(b"a", b"b", b"c"))

    def pass_days(days: int) -> None:
        connection.execute(
            "update headwater_internal.segment set opened_at = opened_at - %s, closed_at = closed_at - %s",
            (timedelta(days=days),) * 2,
        )
        log.maintain()

    # The log leaves the segment, and a day later the topic does not want it any more.
    pass_days(2)
    raw.produce(topic, batch_of(b"d"))
    pass_days(2)
    part = raw.fetch(topic, 0).responses[0].partitions[0]
    assert (part.error_code, part.log_start_offset, part.high_watermark) == (ErrorCode.offset_out_of_range, 3, 4)
    assert raw.values(topic, 3) == [b"d"]
    pass_days(2)
    pass_days(2)
    part = raw.fetch(topic, 4).responses[0].partitions[0]
    assert (part.error_code, part.log_start_offset, part.high_watermark) == (ErrorCode.none, 4, 4)
    assert raw.produce(topic, batch_of(b"e")).base_offset == 4
    assert raw.values(topic, 4) == [b"e"]


def test_sessions_are_refused_and_topics_are_found_by_their_id_until_they_are_gone(
    raw: Raw, partition: str, log: headwater.Headwater
) -> None:
    raw.produce(partition, batch_of(b"a"))
    assert raw.fetch(partition, 0, session=77).error_code == ErrorCode.fetch_session_id_not_found
    (topic,) = raw.ask(ApiKey.METADATA, 12, {"topics": [{"name": partition}]}).topics
    found = raw.fetch("", 0, version=16, topic_id=topic.topic_id).responses[0]
    assert (found.topic_id, found.partitions[0].error_code) == (topic.topic_id, ErrorCode.none)
    strange = raw.fetch("", 0, version=16, topic_id=uuid.uuid4()).responses[0].partitions[0]
    assert strange.error_code == ErrorCode.unknown_topic_id
    raw.ask(ApiKey.DELETE_TOPICS, 5, {"topic_names": [partition], "timeout": 1000})
    log.create_topic(partition, kind="sequenced")
    gone = raw.fetch("", 0, version=16, topic_id=topic.topic_id).responses[0].partitions[0]
    assert gone.error_code == ErrorCode.unknown_topic_id
    (again,) = raw.ask(ApiKey.METADATA, 12, {"topics": [{"name": partition}]}).topics
    assert again.topic_id not in (None, topic.topic_id)


def test_the_position_of_an_open_topic_that_no_event_has_leads_to_the_next_event(
    raw: Raw, log: headwater.Headwater, partition: str
) -> None:
    topic = log.create_topic(f"open-{next(_numbers)}").name
    first = log.publish(topic, b"one")
    log.publish(partition, b"between")
    second = log.publish(topic, b"two")
    assert first is not None
    assert second is not None
    assert raw.values(topic, first + 1) == [b"two"]
    assert raw.values(topic, second + 1) == []


# Frames


def test_a_frame_of_lies_ends_its_connection_and_no_other(broker: BrokerProcess, raw: Raw) -> None:
    for frame in (
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", -5),
        struct.pack(">i", 3) + b"abc",
        struct.pack(">ihhih", 15, 3, 12, 1, -1) + b"\x00\xff\xff\xff\xff\x0f"[:5],
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        liar = Raw(broker)
        liar.socket.sendall(frame)
        with pytest.raises(ConnectionResetError):
            liar.exactly(1)
    assert (
        raw.ask(ApiKey.API_VERSIONS, 3, {"client_software_name": "x", "client_software_version": "1"}).error_code
        == ErrorCode.none
    )


NUL = "a\x00b"
OF_TRANSACTION = {"transactional_id": NUL, "producer_id": 1, "producer_epoch": 0, "group_id": "g", "member_id": ""}


@pytest.mark.parametrize(
    ("api", "version", "fields", "code"),
    [
        (3, 12, {"topics": [{"name": NUL}]}, ErrorCode.invalid_topic_exception),
        (9, 7, {"group_id": NUL, "topics": None}, ErrorCode.invalid_group_id),
        (10, 3, {"key": NUL, "key_type": 0}, ErrorCode.invalid_request),
        (11, 3, {"group_id": "g", "session_timeout": 10_000, "rebalance_timeout": 10_000, "member_id": "",
                 "protocol_type": NUL, "protocols": [{"name": NUL, "metadata": b""}]},
         ErrorCode.inconsistent_group_protocol),
        (12, 3, {"group_id": NUL, "generation_id": 1, "member_id": "m"}, ErrorCode.invalid_group_id),
        (22, 4, {"transactional_id": NUL, "transaction_timeout": 1000, "producer_id": -1, "producer_epoch": -1},
         ErrorCode.invalid_request),
        (24, 3, {f"v3_and_below_{name}": value for name, value in OF_TRANSACTION.items()}
         | {"v3_and_below_topics": [{"name": "orders", "partitions": [0]}]}, ErrorCode.invalid_producer_id_mapping),
        (25, 3, OF_TRANSACTION, ErrorCode.invalid_producer_id_mapping),
        (26, 3, OF_TRANSACTION | {"committed": True}, ErrorCode.invalid_producer_id_mapping),
        (28, 3, OF_TRANSACTION | {"generation_id": -1, "topics": [
            {"name": "orders", "partitions": [{"partition_index": 0, "committed_offset": 1}]}]},
         ErrorCode.invalid_producer_id_mapping),
    ],
)  # fmt: skip
def test_a_name_that_postgres_cannot_hold_is_answered_with_a_code(
    raw: Raw, log: headwater.Headwater, api: int, version: int, fields: dict[str, Any], code: ErrorCode
) -> None:
    if api == 24:
        log.create_topic("orders", kind="sequenced")
    answer = raw.ask(api, version, fields)
    # Where the code is differs from one answer to the other.
    assert f"<ErrorCode.{code.name}: {code.value}>" in repr(answer)
    assert raw.ask(ApiKey.API_VERSIONS, 0, {}).error_code == ErrorCode.none


def test_an_unknown_version_of_api_versions_is_told_the_known_ones_in_the_oldest_form(raw: Raw) -> None:
    raw.socket.sendall(struct.pack(">ihhih", 10, 18, 99, 6, -1))
    answer = raw.receive(ApiKey.API_VERSIONS, 0, correlation=6)
    assert answer.error_code == ErrorCode.unsupported_version
    assert {one.api_key: (one.min_version, one.max_version) for one in answer.api_keys} == dict(SUPPORTED_VERSIONS)


def test_an_api_that_is_not_offered_ends_the_connection(broker: BrokerProcess) -> None:
    for api, version in ((71, 0), (3, 99), (0, 2)):
        raw = Raw(broker)
        raw.socket.sendall(struct.pack(">ihhih", 10, api, version, 6, -1))
        with pytest.raises(ConnectionResetError):
            raw.exactly(1)


def test_every_offered_version_of_every_api_answers(broker: BrokerProcess, partition: str) -> None:
    """With a request that has nothing much in it: what counts is that the answer is one."""
    samples: dict[int, dict[str, Any]] = {
        0: {"acks": 1, "timeout": 1000,
            "topic_data": [{"name": partition, "partition_data": [{"records": batch_of(b"v")}]}]},
        1: {"max_wait": 0, "topics": [{"topic": partition, "partitions": [{"partition_max_bytes": 100}]}]},
        2: {"topics": [{"name": partition, "partitions": [{"timestamp": -1}]}]},
        3: {"topics": None},
        8: {"group_id": "v", "member_id": "", "generation_id_or_member_epoch": -1,
            "topics": [{"name": partition, "partitions": [{"committed_offset": 1}]}]},
        9: {"group_id": "v", "topics": [{"name": partition, "partition_indexes": [0]}],
            "groups": [{"group_id": "v", "topics": None}]},
        10: {"key": "v", "coordinator_keys": ["v"]},
        11: {"group_id": "j", "session_timeout": 10_000, "rebalance_timeout": 10_000, "protocol_type": "consumer",
             "member_id": "nobody", "protocols": [{"name": "range", "metadata": b""}]},
        19: {"topics": [{"name": "v-", "num_partitions": 1, "replication_factor": 1}], "validate_only": True},
        20: {"timeout": 1000, "topic_names": ["nothing"], "topics": [{"name": "nothing"}]},
        23: {"topics": [{"topic": partition, "partitions": [{"leader_epoch": 0}]}]},
        32: {"resources": [{"resource_type": 2, "resource_name": partition, "configuration_keys": None}]},
        33: {"resources": [{"resource_type": 2, "resource_name": partition, "configs": []}]},
        37: {"topics": [{"name": partition, "count": 2, "assignments": None}], "validate_only": True},
        44: {"resources": [{"resource_type": 2, "resource_name": partition, "configs": []}]},
        17: {"mechanism": "none"},
        30: {"creations": []},
        60: {"endpoint_type": 1},
        75: {"topics": [{"name": partition}], "response_partition_limit": 10, "cursor": None},
    }  # fmt: skip
    raw = Raw(broker)
    topic_id = raw.ask(ApiKey.METADATA, 12, {"topics": [{"name": partition}]}).topics[0].topic_id
    for api, (oldest, newest) in SUPPORTED_VERSIONS.items():
        for version in range(max(oldest, 3 if api == 0 else 0), newest + 1):
            fields = samples.get(api, {})
            if (api, version) in ((0, 13),) or (api == 1 and version >= 13) or (api in (8, 9) and version >= 10):
                fields = _by_id(fields, topic_id)
            # One who was not asked for a password and gives it is put out afterwards.
            answer = (Raw(broker) if api == 36 else raw).ask(api, version, fields)
            assert "unknown_server_error" not in repr(answer), (api, version, answer)
            if api in (0, 1, 2, 8, 9, 19, 23, 32, 33, 37, 44, 75):
                assert set(_codes(answer)) == {ErrorCode.none}, (api, version, answer)


def _by_id(fields: Any, topic_id: uuid.UUID) -> Any:
    if isinstance(fields, dict):
        return {"topic_id": topic_id, **{name: _by_id(value, topic_id) for name, value in fields.items()}}
    return [_by_id(one, topic_id) for one in fields] if isinstance(fields, list) else fields


def _codes(answer: Any) -> Iterator[ErrorCode]:
    for shape in _shapes(type(answer)):
        value = getattr(answer, shape.name)
        if shape.kind == "error_code":
            yield value
        elif shape.nested is not None and value is not None:
            for one in value if shape.array else [value]:
                yield from _codes(one)


# Groups whose partitions the coordinator assigns


def test_a_member_that_names_its_topics_by_a_pattern_gets_those_that_fit_and_come_to_fit(
    raw: Raw, log: headwater.Headwater
) -> None:
    stem = f"pattern-{next(_numbers)}"
    log.create_topic(f"{stem}-a", kind="sequenced")
    log.create_topic(f"not-{stem}-a", kind="sequenced")

    def beat(**fields: Any) -> Any:
        unchanged = {"group_id": stem, "member_id": "m", "rebalance_timeout": -1, "subscribed_topic_names": None,
                     "topic_partitions": None}  # fmt: skip
        return raw.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, {**unchanged, **fields})

    def names(answer: Any) -> list[str]:
        ids = [one.topic_id for one in answer.assignment.topic_partitions]
        found = raw.ask(ApiKey.METADATA, 12, {"topics": [{"topic_id": one, "name": ""} for one in ids]}).topics
        return sorted(str(one.name) for one in found)

    first = {"member_epoch": 0, "rebalance_timeout": 10_000, "topic_partitions": []}
    for bad in ("(", "a{9999}", r"(a)\1", "(?=a)", "x" * 1001):
        refused = beat(**first, subscribed_topic_names=[], subscribed_topic_regex=bad)
        assert refused.error_code == ErrorCode.invalid_regular_expression
        assert refused.error_message
    answer = beat(**first, subscribed_topic_names=[], subscribed_topic_regex=f"{stem}-[ab]")
    deadline = time.monotonic() + PATIENCE_SECONDS
    for suffixes in ("a", "ab"):
        log.create_topic(f"{stem}-{suffixes[-1]}", kind="sequenced", if_missing=True)
        while answer.assignment is None or names(answer) != [f"{stem}-{suffix}" for suffix in suffixes]:
            assert time.monotonic() < deadline
            answer = beat(member_epoch=answer.member_epoch)
            assert answer.error_code == ErrorCode.none
    (described,) = raw.ask(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, {"group_ids": [stem]}).groups
    assert [one.subscribed_topic_regex for one in described.members] == [f"{stem}-[ab]"]
    assert beat(member_epoch=-1).error_code == ErrorCode.none
