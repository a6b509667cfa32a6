"""Does a coordinator that assigns partitions itself come to an even end, with no partition ever at two members?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.calls.kafka import TopicPartition
from headwater.servers.kafka.assignment import (
    LEAVING,
    LEAVING_TEMPORARILY,
    ConsumerGroup,
    ConsumerMember,
    Heartbeat,
    HeartbeatResult,
    assign_partitions,
)
from headwater.servers.kafka.wire import ErrorCode

TOPICS = {"a": (1, 6), "b": (2, 3)}


class Client:
    """A member that does as it is told: gives up what is not its own before it says so."""

    def __init__(self, name: str, topics: set[str], instance: str | None = None) -> None:
        self.name = name
        self.topics = frozenset(topics)
        self.instance = instance
        self.epoch = 0
        self.owned: frozenset[TopicPartition] = frozenset()

    def beat(self, group: ConsumerGroup, now: float = 0.0, topics: Any = TOPICS, **changes: Any) -> HeartbeatResult:
        joins = self.epoch == 0
        if joins:
            self.owned = frozenset()
        beat = Heartbeat(
            self.name, self.epoch, self.instance, "c", "/h", 30.0, self.topics if joins else None, None, self.owned
        )._replace(**changes)
        answer = group.heartbeat(now, beat, topics)
        if answer.code is ErrorCode.none and answer.epoch >= 0:
            self.epoch = answer.epoch
            if answer.assignment is not None:
                self.owned = answer.assignment
        elif answer.code in (ErrorCode.unknown_member_id, ErrorCode.fenced_member_epoch):
            self.epoch = 0
        return answer


def settle(group: ConsumerGroup, clients: list[Client], topics: Any = TOPICS) -> None:
    for _ in range(20):
        for client in clients:
            client.beat(group, topics=topics)
            alone(clients)
        if group.state == "Stable" and all(client.epoch == group.epoch for client in clients):
            return
    raise AssertionError(f"no end: {group}")


def alone(clients: list[Client]) -> None:
    """No partition is with two: what a client has not been told to give up yet, it has."""
    owned = [topic_partition for client in clients for topic_partition in client.owned]
    assert len(owned) == len(set(owned))


def group() -> ConsumerGroup:
    return ConsumerGroup("g", 4, 45.0)


def test_one_member_gets_everything_and_shares_it_with_those_who_come() -> None:
    found = group()
    one, two, three = (Client(name, {"a", "b"}) for name in "xyz")
    answer = one.beat(found)
    assert (answer.code, answer.epoch) == (ErrorCode.none, 5)
    assert len(one.owned) == 9
    assert one.beat(found).assignment is None
    settle(found, [one, two])
    assert sorted(map(len, (one.owned, two.owned))) in ([4, 5], [3, 6])
    settle(found, [one, two, three])
    assert [len(client.owned) for client in (one, two, three)] == [3, 3, 3]


def test_a_newcomer_gets_a_partition_only_after_the_other_gave_it_up() -> None:
    found = group()
    one, two = Client("x", {"a"}), Client("y", {"a"})
    one.beat(found)
    assert two.beat(found).assignment == frozenset()
    told = found.heartbeat(0.0, Heartbeat("x", one.epoch, None, "c", "/h", 30.0, None, None, one.owned), TOPICS)
    assert told.assignment is not None
    assert len(told.assignment) == 3
    # What it gives up it may still commit, so it stays in its epoch until it has.
    assert told.epoch == one.epoch < found.epoch
    # It was told, and has not said that it did.
    assert two.beat(found).assignment is None
    one.owned = told.assignment
    assert one.beat(found).epoch == found.epoch
    assert len(two.beat(found).assignment or ()) == 3


def test_who_does_not_give_up_in_time_is_put_out() -> None:
    found = group()
    one, two = Client("x", {"a"}), Client("y", {"a"})
    one.beat(found)
    two.beat(found)
    keeps = Heartbeat("x", one.epoch, None, "c", "/h", 30.0, None, None, one.owned)
    found.heartbeat(1.0, keeps, TOPICS)
    for now in (10.0, 20.0, 30.0):
        found.tick(now)
        found.heartbeat(now, keeps, TOPICS)
        two.beat(found, now)
    assert "x" in found.members
    found.tick(31.0)
    assert "x" not in found.members
    two.beat(found, 31.0)
    assert len(two.owned) == 6
    assert found.heartbeat(32.0, keeps, TOPICS).code is ErrorCode.unknown_member_id


def test_a_member_that_is_silent_loses_its_partitions_to_others() -> None:
    found = group()
    one, two = Client("x", {"a"}), Client("y", {"a"})
    settle(found, [one, two])
    two.beat(found, 40.0)
    found.tick(45.0)
    assert set(found.members) == {"y"}
    two.beat(found, 46.0)
    assert len(two.owned) == 6


def test_who_leaves_gives_way_at_once_and_a_static_member_keeps_its_place() -> None:
    found = group()
    one, two = Client("x", {"a"}), Client("y", {"a"}, instance="i")
    settle(found, [one, two])
    had, epoch = two.owned, found.epoch
    assert two.beat(found, epoch=LEAVING_TEMPORARILY).code is ErrorCode.none
    one.beat(found)
    assert (found.epoch, len(one.owned)) == (epoch, 3)
    back = Client("z", {"a"}, instance="i")
    back.beat(found)
    assert (back.owned, found.epoch) == (had, epoch)
    assert Client("w", {"a"}, instance="i").beat(found).code is ErrorCode.unreleased_instance_id
    # Who it was before is told that another has its place.
    assert two.beat(found).code is ErrorCode.fenced_instance_id
    assert back.beat(found, epoch=LEAVING).code is ErrorCode.none
    one.beat(found)
    assert len(one.owned) == 6


def test_old_and_strange_epochs_are_refused_and_a_lost_answer_is_not() -> None:
    found = group()
    one, two = Client("x", {"a"}), Client("y", {"a"})
    one.beat(found)
    first = one.epoch
    two.beat(found)
    assert one.beat(found, epoch=first + 9).code is ErrorCode.fenced_member_epoch
    one.epoch = first
    settle(found, [one, two])
    current = one.epoch
    # The answer that told the new epoch got lost: the member says the one before, and owns no more than it was told.
    assert one.beat(found, epoch=first).code is ErrorCode.none
    assert one.epoch == current
    assert one.beat(found, epoch=first, owned=frozenset({TopicPartition(9, 9)})).code is ErrorCode.fenced_member_epoch
    assert found.commit_error("x", current) is None
    assert found.commit_error("x", first) is ErrorCode.stale_member_epoch
    assert found.commit_error("nobody", current) is ErrorCode.unknown_member_id


def test_in_a_transaction_a_client_need_not_say_for_which_member_it_commits() -> None:
    found = group()
    one = Client("x", {"a"})
    one.beat(found)
    assert found.commit_error("", -1) is ErrorCode.unknown_member_id
    assert found.commit_error("", -1, transactional=True) is None
    assert found.commit_error("x", one.epoch, transactional=True) is None
    assert found.commit_error("x", one.epoch + 1, transactional=True) is ErrorCode.stale_member_epoch
    assert found.commit_error("", -1, instance_id="i", transactional=True) is ErrorCode.unknown_member_id


def test_new_partitions_and_subscriptions_are_assigned() -> None:
    found = group()
    one, two = Client("x", {"a"}), Client("y", {"a", "later"})
    settle(found, [one, two])
    more = {**TOPICS, "a": (1, 8), "later": (3, 2)}
    settle(found, [one, two], more)
    assert sorted(topic_partition for client in (one, two) for topic_partition in client.owned) == [
        *(TopicPartition(1, number) for number in range(8)), TopicPartition(3, 0), TopicPartition(3, 1)
    ]  # fmt: skip
    assert two.beat(found, topics=more, assignor="mine").code is ErrorCode.unsupported_assignor


def test_by_range_members_get_the_same_numbers_of_every_topic() -> None:
    found = group()
    one, two = Client("x", {"a", "c"}), Client("y", {"a", "c"})
    topics = {"a": (1, 5), "c": (3, 5)}
    for _ in range(6):
        for client in (one, two):
            client.beat(found, topics=topics, assignor="range")
    assert {topic_partition.partition for topic_partition in one.owned if topic_partition.topic_id == 1} == {0, 1, 2}
    assert {topic_partition.partition for topic_partition in one.owned if topic_partition.topic_id == 3} == {0, 1, 2}
    assert {topic_partition.partition for topic_partition in two.owned} == {3, 4}


steps = st.lists(
    st.tuples(st.sampled_from(["beat", "beat", "lost", "leave", "restart", "grow"]), st.integers(0, 4)), max_size=60
)


@given(steps, st.lists(st.sampled_from([{"a"}, {"b"}, {"a", "b"}]), min_size=2, max_size=5))
def test_whatever_happens_no_partition_is_with_two_and_all_ends_even(
    happenings: list[tuple[str, int]], wants: list[set[str]]
) -> None:
    found = group()
    topics = dict(TOPICS)
    clients = [Client(f"m{number}", topics) for number, topics in enumerate(wants)]
    for what, which in happenings:
        client = clients[which % len(clients)]
        if what == "beat":
            client.beat(found, topics=topics)
        elif what == "lost" and client.epoch > 0:
            # The coordinator hears it, the client does not hear the answer.
            beat = Heartbeat(client.name, client.epoch, None, "c", "/h", 30.0, None, None, client.owned)
            found.heartbeat(0.0, beat, topics)
        elif what == "leave" and client.epoch > 0:
            client.beat(found, topics=topics, epoch=LEAVING)
            client.epoch, client.owned = 0, frozenset()
        elif what == "restart":
            client.epoch, client.owned = 0, frozenset()
        elif what == "grow":
            topics["a"] = (1, topics["a"][1] + 1)
        alone(clients)
    settle(found, clients, topics)
    for name, (topic_id, partitions) in topics.items():
        readers = [client for client in clients if name in client.topics]
        owned = [sum(topic_partition.topic_id == topic_id for topic_partition in client.owned) for client in readers]
        if readers:
            assert sum(owned) == partitions
            assert max(owned) - min(owned) <= 1


def member(name: str, wants: frozenset[str]) -> ConsumerMember:
    return ConsumerMember(name, None, "c", "/h", 30.0, wants, None, 0.0)


@pytest.mark.parametrize(("topics", "partitions"), [(6, 1), (10, 1), (4, 3), (1, 7)])
def test_who_comes_late_gets_its_share_of_many_small_topics(topics: int, partitions: int) -> None:
    found = group()
    known = {f"t{number}": (number, partitions) for number in range(1, topics + 1)}
    one, two = (Client(name, set(known)) for name in "xy")
    settle(found, [one], known)
    settle(found, [one, two], known)
    assert abs(len(one.owned) - len(two.owned)) <= 1


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=8)
comings_and_goings = st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6)


def shared(
    who: set[int], wants: dict[int, frozenset[str]], topics: Any, before: Any
) -> dict[str, frozenset[TopicPartition]]:
    """The next target: every partition that somebody wants is there once, each topic evenly, and none moved in vain."""
    target = assign_partitions([member(f"m{one}", wants[one]) for one in who], topics, before)
    readers = {name: [f"m{one}" for one in sorted(who) if name in wants[one]] for name in topics}
    topic_partitions = [topic_partition for owned in target.values() for topic_partition in owned]
    wanted = [topics[name] for name in topics if readers[name]]
    assert sorted(topic_partitions) == [
        TopicPartition(topic_id, number) for topic_id, size in sorted(wanted) for number in range(size)
    ]
    for name, (topic_id, _) in topics.items():
        counts = {
            one: sum(topic_partition.topic_id == topic_id for topic_partition in target[one]) for one in readers[name]
        }
        assert not counts or max(counts.values()) - min(counts.values()) <= 1
        for loser in readers[name]:
            for topic_partition in before.get(loser, frozenset()) - target[loser]:
                if topic_partition.topic_id == topic_id and topic_partition in topic_partitions:
                    winner = next(one for one in readers[name] if topic_partition in target[one])
                    # Had it stayed, the loser had two more than the winner: of the topic, or of all.
                    of_topic = counts[loser] - counts[winner]
                    of_all = len(target[loser]) - len(target[winner])
                    assert max(of_topic, of_all) >= 0
    assert assign_partitions([member(f"m{one}", wants[one]) for one in who], topics, target) == target
    return target


@given(sizes, comings_and_goings)
def test_members_who_want_the_same_have_as_many_partitions_to_one_whoever_comes_and_goes(
    partitions: list[int], present: list[set[int]]
) -> None:
    topics = {f"t{number}": (number, size) for number, size in enumerate(partitions)}
    wants = dict.fromkeys(range(6), frozenset(topics))
    target: dict[str, frozenset[TopicPartition]] = {}
    for who in present:
        target = shared(who, wants, topics, target)
        loads = [len(owned) for owned in target.values()]
        assert max(loads) - min(loads) <= 1


@given(sizes, comings_and_goings, st.data())
def test_members_who_want_different_topics_share_each_evenly(
    partitions: list[int], present: list[set[int]], data: st.DataObject
) -> None:
    topics = {f"t{number}": (number, size) for number, size in enumerate(partitions)}
    target: dict[str, frozenset[TopicPartition]] = {}
    for who in present:
        wants = {one: frozenset(data.draw(st.sets(st.sampled_from(sorted(topics))))) for one in sorted(who)}
        target = shared(who, wants, topics, target)
