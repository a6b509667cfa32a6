"""Has a consumer group one coordinator at a time, and is one that was taken for dead kept from writing?"""

from __future__ import annotations

import itertools
from datetime import timedelta

import psycopg
import pytest

import headwater
from headwater.calls import kafka as calls
from headwater.calls.kafka import OffsetToCommit, TopicPartition

_ports = itertools.count(20_000)


@pytest.fixture
def brokers(log: headwater.Headwater) -> list[int]:
    """The incarnations of two brokers that are alive."""
    return [log.run(calls.kafka_register("h", next(_ports), lease_seconds=60))[1] for _ in range(2)]


@pytest.fixture
def topic_partition(log: headwater.Headwater) -> TopicPartition:
    return TopicPartition(log.run(calls.kafka_create_topic(f"t-{next(_ports)}", 1)), 0)


def test_a_group_is_its_coordinators_until_that_one_is_gone(
    log: headwater.Headwater, brokers: list[int], topic_partition: TopicPartition
) -> None:
    first, second = brokers
    group = f"g-{next(_ports)}"
    assert log.run(calls.kafka_take_up(group, first)) == 0
    assert log.run(calls.kafka_take_up(group, second)) is None
    assert log.run(calls.kafka_note_generation(group, first, generation=7, protocol_type="consumer"))
    assert log.run(calls.kafka_commit_offsets(group, first, [OffsetToCommit(topic_partition, 5, 0, "m")]))
    log.run(calls.kafka_renew(first, lease_seconds=0))
    # It counts on from where the other was, and has what that one had committed.
    assert log.run(calls.kafka_take_up(group, second)) == 7
    (kept,) = log.run(calls.kafka_committed(group))
    assert (kept.offset, kept.metadata) == (5, "m")
    # Whoever was taken for dead and is not, can do no harm.
    assert not log.run(calls.kafka_commit_offsets(group, first, [OffsetToCommit(topic_partition, 1, 0, "")]))
    assert not log.run(calls.kafka_note_generation(group, first, generation=8, protocol_type="consumer"))
    assert not log.run(calls.kafka_forget_offsets(group, first, [topic_partition]))
    assert not log.run(calls.kafka_delete_group(group, first))
    assert log.run(calls.kafka_take_up(group, first)) is None
    assert [one.offset for one in log.run(calls.kafka_committed(group))] == [5]


def test_all_brokers_name_the_same_coordinator_and_groups_are_spread(
    log: headwater.Headwater, brokers: list[int]
) -> None:
    living = {broker.node_id for broker in log.run(calls.kafka_brokers())}
    named = {f"s-{number}": log.run(calls.kafka_coordinator(f"s-{number}")) for number in range(40)}
    assert set(named.values()) <= living
    assert len(set(named.values())) > 1
    assert all(log.run(calls.kafka_coordinator(name)) == node for name, node in named.items())


def test_a_broker_that_comes_back_to_its_address_keeps_its_number_and_fences_its_former_self(
    log: headwater.Headwater,
) -> None:
    port = next(_ports)
    node, before = log.run(calls.kafka_register("h", port, lease_seconds=60))
    again, after = log.run(calls.kafka_register("h", port, lease_seconds=60))
    other, _ = log.run(calls.kafka_register("h", next(_ports), lease_seconds=60))
    assert (again, other != node, after > before) == (node, True, True)
    assert not log.run(calls.kafka_renew(before, lease_seconds=60))
    assert log.run(calls.kafka_renew(after, lease_seconds=60))


def test_offsets_go_with_their_topic_and_another_of_its_name_has_none(
    log: headwater.Headwater, brokers: list[int]
) -> None:
    name = f"t-{next(_ports)}"
    group = f"g-{next(_ports)}"
    log.run(calls.kafka_take_up(group, brokers[0]))
    topic_partition = TopicPartition(log.run(calls.kafka_create_topic(name, 1)), 0)
    assert log.run(calls.kafka_commit_offsets(group, brokers[0], [OffsetToCommit(topic_partition, 5, 0, "")]))
    log.delete_topic(name)
    log.run(calls.kafka_create_topic(name, 1))
    assert log.run(calls.kafka_committed(group)) == []
    # Somebody who has not heard of it commits for the topic that was.
    assert log.run(calls.kafka_commit_offsets(group, brokers[0], [OffsetToCommit(topic_partition, 6, 0, "")]))
    assert log.run(calls.kafka_committed(group)) == []


def test_offsets_of_groups_without_members_are_kept_for_as_long_as_the_log_says(
    log: headwater.Headwater, brokers: list[int], topic_partition: TopicPartition, connection: psycopg.Connection
) -> None:
    names = {kind: f"{kind}-{next(_ports)}" for kind in ("gone", "has-members", "commits-without")}
    for name in names.values():
        log.run(calls.kafka_take_up(name, brokers[0]))
        log.run(calls.kafka_note_generation(name, brokers[0], generation=1, protocol_type="consumer"))
        assert log.run(calls.kafka_commit_offsets(name, brokers[0], [OffsetToCommit(topic_partition, 5, 0, "")]))

    def left(days: int) -> set[str]:
        connection.execute(
            "update headwater_internal.kafka_group set updated_at = updated_at - %s", (timedelta(days=days),)
        )
        connection.execute(
            "update headwater_internal.kafka_offset set committed_at = committed_at - %s", (timedelta(days),)
        )
        log.run(calls.kafka_note_alive([names["has-members"]], brokers[0]))
        log.run(
            calls.kafka_commit_offsets(
                names["commits-without"], brokers[0], [OffsetToCommit(topic_partition, 6, 0, "")]
            )
        )
        log.maintain()
        known = {name for name, _ in log.run(calls.kafka_groups(brokers[0]))}
        return {kind for kind, name in names.items() if name in known and log.run(calls.kafka_committed(name))}

    assert left(6) == set(names)
    log.change_settings(kafka_offsets_kept=timedelta(days=30))
    assert left(2) == set(names)
    log.change_settings(kafka_offsets_kept=timedelta(days=7))
    assert left(0) == {"has-members", "commits-without"}


def test_a_group_that_is_only_looked_for_is_not_made(log: headwater.Headwater, brokers: list[int]) -> None:
    group = f"sought-{next(_ports)}"
    node = log.run(calls.kafka_coordinator(group))
    assert node is not None
    assert log.run(calls.kafka_group_protocol(group)) is None
    with log.transaction() as connection:
        found = connection.execute("select from headwater_internal.kafka_group where name = %s", (group,)).fetchone()
    assert found is None


def test_a_group_whose_coordinator_is_gone_is_told_of_by_one_broker(
    log: headwater.Headwater, brokers: list[int], topic_partition: TopicPartition
) -> None:
    group = f"orphan-{next(_ports)}"
    gone = log.run(calls.kafka_register("h", next(_ports), lease_seconds=60))[1]
    log.run(calls.kafka_take_up(group, gone))
    log.run(calls.kafka_note_generation(group, gone, generation=3, protocol_type="consumer"))

    def tellers() -> list[int]:
        living = log.run(calls.kafka_brokers())
        return [
            one.incarnation for one in living if (group, "consumer") in log.run(calls.kafka_groups(one.incarnation))
        ]

    assert tellers() == [gone]
    log.run(calls.kafka_renew(gone, lease_seconds=0))
    assert tellers() == [log.run(calls.kafka_brokers())[0].incarnation]
    # Whoever takes it up tells of it from then on.
    assert log.run(calls.kafka_take_up(group, brokers[1])) == 3
    assert tellers() == [brokers[1]]
    assert log.run(calls.kafka_group_protocol(group)) == "consumer"


def test_a_transactional_producer_that_was_silent_for_a_week_is_forgotten(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    names = {kind: f"{kind}-{next(_ports)}" for kind in ("silent", "heard", "open")}
    producers = {
        kind: log.run(calls.kafka_init_transactions(name, timeout_ms=60_000, known_id=-1, known_epoch=-1))[1:]
        for kind, name in names.items()
    }
    assert log.run(calls.kafka_begin(names["open"], *producers["open"])) == "ok"
    connection.execute(
        "update headwater_internal.kafka_transactional_producer set updated_at = updated_at - interval '8 days'"
    )
    assert log.run(calls.kafka_begin(names["heard"], *producers["heard"])) == "ok"
    ended = calls.kafka_end_transaction(names["heard"], *producers["heard"], committed=True, next_epoch=False)
    assert log.run(ended)[0] == "ok"
    log.run(calls.kafka_maintenance())
    known = {one.transactional_id for one in log.run(calls.kafka_transactions())}
    assert {kind for kind, name in names.items() if name in known} == {"heard", "open"}
    # It may come back, as somebody new.
    again = log.run(calls.kafka_init_transactions(names["silent"], timeout_ms=60_000, known_id=-1, known_epoch=-1))
    assert again[1] != producers["silent"][0]
