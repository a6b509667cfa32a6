"""Does the coordinator of a consumer group decide as Kafka's does? No broker, no clock."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.servers.kafka.coordinator import (
    ClassicGroup,
    GroupState,
    JoinRequest,
    JoinResult,
    Reply,
    SyncRequest,
    SyncResult,
)
from headwater.servers.kafka.wire import ErrorCode

RANGE = (("range", b"r"), ("sticky", b"s"))
_numbers = itertools.count()


def asks(member_id: str = "", **changes: Any) -> JoinRequest:
    ask = JoinRequest(
        member_id=member_id,
        instance_id=None,
        client_id="c",
        client_host="/127.0.0.1",
        session_seconds=10.0,
        rebalance_seconds=30.0,
        protocol_type="consumer",
        protocols=RANGE,
        id_first=True,
        new_id=f"m{next(_numbers)}",
    )
    return ask._replace(**changes)


def only(replies: list[Reply]) -> Any:
    (reply,) = replies
    return reply.answer


def answers(replies: list[Reply]) -> dict[Any, Any]:
    found = {reply.waiter: reply.answer for reply in replies}
    assert len(found) == len(replies), "somebody was answered twice"
    return found


def new_id(group: ClassicGroup, now: float = 0.0, **changes: Any) -> str:
    answer = only(group.join(now, "who", asks(**changes)))
    assert answer.code is ErrorCode.member_id_required
    return str(answer.member_id)


def group_of(count: int, *, delay: float = 0.0, **changes: Any) -> tuple[ClassicGroup, list[str]]:
    """A stable group; its first member leads."""
    group = ClassicGroup("g", 0, delay)
    ids = [new_id(group, **changes) for _ in range(count)]
    joined: list[Reply] = []
    for member_id in ids:
        joined += group.join(0.0, member_id, asks(member_id, **changes))
    generation = answers(joined)[ids[0]].generation
    synced: list[Reply] = []
    for member_id in reversed(ids):
        brought = tuple((one, one.encode()) for one in ids) if member_id == ids[0] else ()
        synced += group.sync(0.0, member_id, SyncRequest(member_id, None, generation, None, None, brought))
    assert {waiter: answer.assignment for waiter, answer in answers(synced).items()} == {i: i.encode() for i in ids}
    assert group.state is GroupState.STABLE
    return group, ids


def test_a_newcomer_is_told_its_id_first_and_leads_alone() -> None:
    group = ClassicGroup("g", 4, 0.0)
    member_id = new_id(group)
    assert not group.members
    answer = only(group.join(0.0, 1, asks(member_id)))
    assert answer == JoinResult(
        ErrorCode.none, member_id, 5, "consumer", "range", member_id, ((member_id, None, b"r"),)
    )


def test_an_old_client_joins_without_an_id() -> None:
    group = ClassicGroup("g", 0, 0.0)
    answer = only(group.join(0.0, 1, asks(id_first=False, new_id="x")))
    assert (answer.code, answer.member_id, answer.generation) == (ErrorCode.none, "x", 1)


def test_the_first_member_waits_a_little_for_others() -> None:
    group = ClassicGroup("g", 0, 3.0)
    assert group.join(0.0, 1, asks(id_first=False)) == []
    assert group.next_tick() == 3.0
    assert group.join(2.0, 2, asks(id_first=False)) == []
    assert group.tick(3.0) == []
    replies = answers(group.tick(5.0))
    assert {answer.generation for answer in replies.values()} == {1}
    assert len(replies[1].members) == 2
    assert replies[2].members == ()


def test_everybody_gets_the_part_that_the_leader_brought() -> None:
    group_of(3)


def test_a_newcomer_makes_the_others_join_again() -> None:
    group, (leader, other) = group_of(2)
    newcomer = new_id(group)
    assert group.join(1.0, 3, asks(newcomer)) == []
    assert group.heartbeat(1.0, leader, None, 1) is ErrorCode.rebalance_in_progress
    assert group.join(1.0, 1, asks(leader)) == []
    replies = answers(group.join(1.0, 2, asks(other)))
    assert {answer.generation for answer in replies.values()} == {2}
    assert replies[1].leader == leader


def test_who_does_not_join_again_in_time_is_out() -> None:
    group, (leader, other) = group_of(2)
    newcomer = new_id(group)
    assert group.join(1.0, 3, asks(newcomer)) == []
    assert group.heartbeat(9.0, leader, None, 1) is ErrorCode.rebalance_in_progress
    assert group.heartbeat(9.0, other, None, 1) is ErrorCode.rebalance_in_progress
    assert group.join(9.0, 1, asks(leader)) == []
    for now in (18.0, 27.0):
        assert group.heartbeat(now, other, None, 1) is ErrorCode.rebalance_in_progress
        assert group.tick(now) == []
    replies = answers(group.tick(31.0))
    assert set(replies) == {1, 3}
    assert group.heartbeat(31.0, other, None, 1) is ErrorCode.unknown_member_id


def test_a_session_that_ends_makes_the_others_join_again() -> None:
    group, (leader, other) = group_of(2)
    assert group.heartbeat(9.0, leader, None, 1) is ErrorCode.none
    assert group.next_tick() == 10.0
    assert group.tick(10.0) == []
    assert other not in group.members
    assert group.heartbeat(10.0, leader, None, 1) is ErrorCode.rebalance_in_progress
    assert only(group.join(10.0, 1, asks(leader))).generation == 2


def test_a_member_that_leaves_is_not_waited_for() -> None:
    group, (leader, other) = group_of(2)
    code, replies = group.leave(1.0, leader, None)
    assert (code, replies) == (ErrorCode.none, [])
    answer = only(group.join(1.0, 2, asks(other)))
    assert (answer.generation, answer.leader) == (2, other)
    assert group.leave(1.0, leader, None)[0] is ErrorCode.unknown_member_id
    group.leave(2.0, other, None)
    assert group.state is GroupState.EMPTY


def test_a_member_that_repeats_its_join_is_not_a_reason_to_rebalance_unless_it_leads() -> None:
    group, (leader, other) = group_of(2)
    answer = only(group.join(1.0, 9, asks(other)))
    assert (answer.code, answer.generation, group.state) == (ErrorCode.none, 1, GroupState.STABLE)
    assert group.join(1.0, 9, asks(leader)) == []
    assert group.state is GroupState.PREPARING


def test_other_topics_are_a_reason_to_rebalance() -> None:
    group, (_, other) = group_of(2)
    assert group.join(1.0, 9, asks(other, protocols=(("range", b"other"),))) == []
    assert group.state is GroupState.PREPARING


def test_a_sync_that_waits_is_sent_back_when_somebody_joins() -> None:
    group = ClassicGroup("g", 0, 0.0)
    first, second = new_id(group), new_id(group)
    group.join(0.0, 1, asks(first))
    group.join(0.0, 2, asks(second))
    assert group.sync(0.0, "waits", SyncRequest(second, None, 1, None, None, ())) == []
    newcomer = new_id(group)
    replies = answers(group.join(1.0, 3, asks(newcomer)))
    assert replies == {"waits": SyncResult(ErrorCode.rebalance_in_progress)}


def test_what_does_not_fit_is_refused() -> None:
    group, (leader, _) = group_of(2)
    for ask, code in (
        (asks(protocol_type="connect"), ErrorCode.inconsistent_group_protocol),
        (asks(protocols=(("mine", b""),)), ErrorCode.inconsistent_group_protocol),
        (asks(protocols=()), ErrorCode.inconsistent_group_protocol),
        (asks("stranger"), ErrorCode.unknown_member_id),
    ):
        assert only(group.join(1.0, 1, ask)).code is code
    for sync, code in (
        (SyncRequest("stranger", None, 1, None, None, ()), ErrorCode.unknown_member_id),
        (SyncRequest(leader, None, 0, None, None, ()), ErrorCode.illegal_generation),
        (SyncRequest(leader, None, 1, None, "sticky", ()), ErrorCode.inconsistent_group_protocol),
    ):
        assert only(group.sync(1.0, 1, sync)).code is code
    assert group.heartbeat(1.0, leader, None, 7) is ErrorCode.illegal_generation
    assert group.commit_error(1.0, leader, None, 1) is None
    assert group.commit_error(1.0, leader, None, 0) is ErrorCode.illegal_generation
    assert group.commit_error(1.0, "", None, -1) is ErrorCode.unknown_member_id
    assert ClassicGroup("g", 0, 0.0).commit_error(1.0, "", None, -1) is None


def test_in_a_transaction_a_client_need_not_say_for_which_member_it_commits() -> None:
    group, (leader, _) = group_of(2)
    assert group.commit_error(1.0, "", None, -1, transactional=True) is None
    # What it does say must be true.
    for asked, code in (
        ((leader, None, 0), ErrorCode.illegal_generation),
        (("stranger", None, 1), ErrorCode.unknown_member_id),
        (("", "stranger", -1), ErrorCode.unknown_member_id),
    ):
        assert group.commit_error(1.0, *asked, transactional=True) is code
    group.leave(1.0, leader, None)
    (other,) = group.members
    assert only(group.join(1.0, 1, asks(other))).generation == 2
    # The assignment is on its way; what was read before it is committed with the transaction, or not at all.
    assert group.state is GroupState.COMPLETING
    assert group.commit_error(1.0, other, None, 2) is ErrorCode.rebalance_in_progress
    assert group.commit_error(1.0, other, None, 2, transactional=True) is None


def test_the_protocol_is_one_that_all_know_and_most_like() -> None:
    group = ClassicGroup("g", 0, 0.0)
    likes = [(("a", b""), ("b", b"")), (("b", b""), ("a", b"")), (("c", b""), ("b", b""), ("a", b""))]
    ids = [new_id(group, protocols=one) for one in likes]
    replies = [r for i, one in zip(ids, likes, strict=True) for r in group.join(0.0, i, asks(i, protocols=one))]
    assert {reply.answer.protocol for reply in replies} == {"b"}  # type: ignore[union-attr]


def static(group: ClassicGroup, now: float, waiter: Any, instance: str, **changes: Any) -> list[Reply]:
    return group.join(now, waiter, asks(instance_id=instance, **changes))


def stable_static() -> tuple[ClassicGroup, str, str]:
    group = ClassicGroup("g", 0, 0.0)
    replies = static(group, 0.0, 1, "one")
    replies = [*replies, *static(group, 0.0, 2, "two")]
    ids = {member.instance_id: member.id for member in group.members.values()}
    if group.state is not GroupState.COMPLETING:
        replies = group.join(0.0, 1, asks(ids["one"], instance_id="one"))
    assert group.state is GroupState.COMPLETING
    leader = group.leader
    assert leader is not None
    generation = group.generation
    brought = tuple((one, b"part") for one in ids.values())
    for name, member_id in ids.items():
        group.sync(0.0, name, SyncRequest(member_id, name, generation, None, None, brought))
    assert group.state is GroupState.STABLE
    return group, ids["one"], ids["two"]  # type: ignore[index]


def test_a_static_member_that_restarts_keeps_its_part_and_bothers_nobody() -> None:
    group, first, second = stable_static()
    generation = group.generation
    follower, name = (second, "two") if group.leader == first else (first, "one")
    answer = only(static(group, 5.0, 9, name))
    assert (answer.code, answer.generation, group.state) == (ErrorCode.none, generation, GroupState.STABLE)
    assert answer.member_id != follower
    synced = only(group.sync(5.0, 9, SyncRequest(answer.member_id, name, generation, None, None, ())))
    assert synced.assignment == b"part"
    assert group.heartbeat(5.0, follower, name, generation) is ErrorCode.fenced_instance_id


def test_a_static_leader_that_restarts_is_told_not_to_assign_anew() -> None:
    for knows_skip in (True, False):
        group, first, _ = stable_static()
        leader = group.leader
        name = "one" if leader == first else "two"
        answer = only(static(group, 5.0, 9, name, knows_skip=knows_skip))
        assert group.state is GroupState.STABLE
        assert answer.skip_assignment is knows_skip
        assert (answer.leader == answer.member_id) is knows_skip


def test_a_static_member_that_goes_away_keeps_its_place_until_its_session_ends() -> None:
    group, first, second = stable_static()
    group.heartbeat(9.0, first, "one", group.generation)
    group.tick(10.0)
    assert set(group.members) == {first}
    assert group.leave(11.0, "", "one")[0] is ErrorCode.none
    assert group.state is GroupState.EMPTY
    assert second not in group.members


def test_a_rebalance_does_not_take_the_place_of_a_static_member_that_is_away() -> None:
    group, first, second = stable_static()
    generation = group.generation
    assert group.join(1.0, "new", asks(id_first=False)) == []
    assert group.join(1.0, "one", asks(first, instance_id="one")) == []
    for now in (10.0, 20.0, 25.0):
        assert group.heartbeat(now, second, "two", generation) is ErrorCode.rebalance_in_progress
        assert group.tick(now) == []
    replies = answers(group.tick(31.0))
    assert set(replies) == {"new", "one"}
    assert second in group.members


def test_only_the_first_rebalance_of_an_empty_group_waits_for_others() -> None:
    group = ClassicGroup("g", 0, 3.0)
    first = new_id(group)
    group.join(0.0, 1, asks(first))
    assert only(group.tick(3.0)).generation == 1
    group.sync(3.0, 1, SyncRequest(first, None, 1, None, None, ()))
    second = new_id(group, 3.0)
    assert group.join(3.0, 2, asks(second)) == []
    assert {answer.generation for answer in answers(group.join(3.0, 1, asks(first))).values()} == {2}


def test_when_another_broker_takes_over_whoever_waits_is_sent_there() -> None:
    group, (leader, other) = group_of(2)
    group.join(1.0, "waits", asks(leader))
    assert answers(group.dissolve(ErrorCode.not_coordinator)) == {
        "waits": JoinResult(ErrorCode.not_coordinator, leader)
    }
    assert group.heartbeat(1.0, other, None, 1) is ErrorCode.unknown_member_id


actions = st.lists(
    st.tuples(st.sampled_from(["new", "join", "sync", "beat", "leave", "gone", "static"]), st.integers(0, 5),
              st.floats(0.1, 12.0)),
    max_size=60,
)  # fmt: skip


@given(actions, st.sampled_from([0.0, 2.0]))
def test_whatever_happens_everybody_is_answered_once_and_in_one_generation(
    steps: list[tuple[str, int, float]], delay: float
) -> None:
    group = ClassicGroup("g", 0, delay)
    now = 0.0
    waiting: dict[int, str] = {}
    known: list[str] = []
    generations: dict[str, int] = {}
    numbers = itertools.count()

    def hear(replies: list[Reply]) -> None:
        for reply in replies:
            member_id = waiting.pop(reply.waiter)
            answer = reply.answer
            if isinstance(answer, JoinResult):
                if answer.member_id and answer.member_id not in known:
                    known.append(answer.member_id)
                if answer.code is ErrorCode.none:
                    assert answer.generation >= generations.get(answer.member_id, 0)
                    generations[answer.member_id] = answer.generation
                    assert answer.generation == group.generation
            elif answer.code is ErrorCode.none:
                assert generations[member_id] == group.generation

    for action, which, wait in steps:
        member_id = known[which % len(known)] if known else "nobody"
        waiter = next(numbers)
        if action in ("new", "static"):
            waiting[waiter] = ""
            hear(group.join(now, waiter, asks(instance_id=f"i{which}" if action == "static" else None)))
        elif action == "join":
            member = group.members.get(member_id)
            waiting[waiter] = member_id
            hear(group.join(now, waiter, asks(member_id, instance_id=member.instance_id if member else None)))
        elif action == "sync":
            member = group.members.get(member_id)
            waiting[waiter] = member_id
            ask = SyncRequest(member_id, member and member.instance_id, generations.get(member_id, 0), None, None, ())
            hear(group.sync(now, waiter, ask))
        elif action == "beat":
            group.heartbeat(now, member_id, None, generations.get(member_id, 0))
        elif action == "leave":
            hear(group.leave(now, member_id, None)[1])
        elif action == "gone" and waiting:
            gone = next(iter(waiting))
            del waiting[gone]
            group.abandon(now, gone)
        now += wait
        hear(group.tick(now))
        if group.state is GroupState.STABLE:
            assert group.leader in group.members
    # Time alone brings every answer and empties the group.
    for _ in range(100):
        due = group.next_tick()
        if due is None:
            break
        now = max(now, due)
        hear(group.tick(now))
    assert waiting == {}
    assert (group.state, group.members) == (GroupState.EMPTY, {})
