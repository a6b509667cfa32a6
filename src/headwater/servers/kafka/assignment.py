"""Partition assignment of consumer groups with the server-side protocol (KIP-848). Pure: no I/O, time is a parameter.

Members only send heartbeats. When members, subscriptions or topics change, the group gets a new epoch and each member a
new target assignment. Each heartbeat then moves its member one step towards its target:
1. The member revokes the partitions that are not in its target.
2. Once it has confirmed that, it enters the group's epoch and gets the partitions of its target that are free.
Invariant: a partition is never assigned to two members at the same time.
Called by `consumer_protocol.py`, which stores each epoch in Postgres before a member sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from typing import Final, NamedTuple

from headwater.calls.kafka import TopicPartition
from headwater.servers.kafka.wire import ErrorCode

ASSIGNORS: Final = ("uniform", "range")
LEAVING, LEAVING_TEMPORARILY = -1, -2
MAX_MEMBERS: Final = 1_000

Topics = Mapping[str, tuple[int, int]]
"""The id and the number of partitions of each topic, by name."""


class Heartbeat(NamedTuple):
    """A heartbeat of a member. None: unchanged since its last heartbeat."""

    member_id: str
    epoch: int
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_seconds: float
    topics: frozenset[str] | None
    assignor: str | None
    owned: frozenset[TopicPartition] | None
    # A regular expression for topic names (empty: unsubscribe from it), and the topics that match it now.
    pattern: str | None = None
    matched: frozenset[str] = frozenset()


class HeartbeatResult(NamedTuple):
    """The response to a heartbeat. No assignment: unchanged since the last response."""

    code: ErrorCode
    member_id: str = ""
    epoch: int = -1
    assignment: frozenset[TopicPartition] | None = None


@dataclass(slots=True)
class ConsumerMember:
    """One member, and how far it has moved towards its target."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_seconds: float
    topics: frozenset[str]
    assignor: str | None
    expires_at: float
    epoch: int = 0
    previous_epoch: int = 0
    # The partitions it may use, those it still has to revoke, and the deadline for that.
    topic_partitions: frozenset[TopicPartition] = frozenset()
    revoking: frozenset[TopicPartition] = frozenset()
    revoke_by: float | None = None
    # A static member that left temporarily: its partitions stay assigned to it.
    away: bool = False
    pattern: str = ""
    matched: frozenset[str] = frozenset()

    @property
    def subscription(self) -> frozenset[str]:
        return self.topics | self.matched


@dataclass(slots=True)
class ConsumerGroup:
    """A group of the server-side protocol. It starts from the last epoch stored in Postgres."""

    name: str
    epoch: int
    session_seconds: float
    members: dict[str, ConsumerMember] = field(default_factory=dict)
    target: dict[str, frozenset[TopicPartition]] = field(default_factory=dict)
    _topics: Topics = field(default_factory=dict)
    _subscriptions: dict[str, tuple[frozenset[str], str | None]] = field(default_factory=dict)

    def heartbeat(self, now: float, beat: Heartbeat, topics: Topics) -> HeartbeatResult:
        """Process a heartbeat, by which a member joins, stays alive or leaves."""
        if beat.assignor is not None and beat.assignor not in ASSIGNORS:
            return HeartbeatResult(ErrorCode.unsupported_assignor)
        if beat.epoch in (LEAVING, LEAVING_TEMPORARILY):
            return self._leave(now, beat, topics)
        member = self.members.get(beat.member_id)
        if beat.epoch == 0:
            joined = self._join(now, beat, member)
            if isinstance(joined, ErrorCode):
                return HeartbeatResult(joined)
            member = joined
        elif member is None:
            replaced = beat.instance_id is not None and self._of_instance(beat.instance_id) is not None
            return HeartbeatResult(ErrorCode.fenced_instance_id if replaced else ErrorCode.unknown_member_id)
        elif beat.epoch != member.epoch and not self._missed_last_response(member, beat):
            return HeartbeatResult(ErrorCode.fenced_member_epoch)
        member.expires_at = now + self.session_seconds
        if beat.topics is not None:
            member.topics = beat.topics
        if beat.pattern is not None:
            member.pattern = beat.pattern
        member.matched = beat.matched
        if beat.assignor is not None:
            member.assignor = beat.assignor
        if beat.rebalance_seconds > 0:
            member.rebalance_seconds = beat.rebalance_seconds
        self.refresh(topics)
        before = (member.topic_partitions, member.epoch)
        self._reconcile(now, member, beat.owned)
        assignment = (
            member.topic_partitions if beat.epoch == 0 or before != (member.topic_partitions, member.epoch) else None
        )
        if beat.owned is not None and beat.owned != member.topic_partitions:
            # The member reports other partitions than it was assigned: send the assignment again.
            assignment = member.topic_partitions
        return HeartbeatResult(ErrorCode.none, member.id, member.epoch, assignment)

    def _join(self, now: float, beat: Heartbeat, known: ConsumerMember | None) -> ConsumerMember | ErrorCode:
        if (beat.topics is None and not beat.pattern) or beat.rebalance_seconds <= 0:
            return ErrorCode.invalid_request
        if known is None and len(self.members) >= MAX_MEMBERS:
            return ErrorCode.group_max_size_reached
        topic_partitions: frozenset[TopicPartition] = frozenset()
        if beat.instance_id is not None:
            previous = self._of_instance(beat.instance_id)
            if previous is not None and previous.id != beat.member_id:
                if not previous.away:
                    return ErrorCode.unreleased_instance_id
                # A static member restarted under a new id: it takes over the old assignment.
                del self.members[previous.id]
                topic_partitions = previous.topic_partitions
                if previous.id in self.target:
                    self.target[beat.member_id] = self.target.pop(previous.id)
        member = ConsumerMember(
            beat.member_id, beat.instance_id, beat.client_id, beat.client_host, beat.rebalance_seconds,
            beat.topics or frozenset(), beat.assignor, now + self.session_seconds,
        )  # fmt: skip
        # A member that rejoins under its own id owns nothing; its old partitions may go to others.
        member.topic_partitions = topic_partitions
        self.members[beat.member_id] = member
        return member

    def _of_instance(self, instance_id: str) -> ConsumerMember | None:
        return next((one for one in self.members.values() if one.instance_id == instance_id), None)

    def _missed_last_response(self, member: ConsumerMember, beat: Heartbeat) -> bool:
        """Whether the last response was lost: the member is one epoch behind, and owns only what it was assigned."""
        return beat.epoch == member.previous_epoch and beat.owned is not None and beat.owned <= member.topic_partitions

    def _leave(self, now: float, beat: Heartbeat, topics: Topics) -> HeartbeatResult:
        member = self.members.get(beat.member_id)
        if member is None:
            return HeartbeatResult(ErrorCode.unknown_member_id)
        if beat.epoch == LEAVING_TEMPORARILY and member.instance_id is not None:
            member.away = True
            member.expires_at = now + self.session_seconds
        else:
            del self.members[beat.member_id]
            self.refresh(topics)
        return HeartbeatResult(ErrorCode.none, beat.member_id, beat.epoch)

    def commit_error(
        self, member_id: str, epoch: int, *, instance_id: str | None = None, transactional: bool = False
    ) -> ErrorCode | None:
        """The error if this member may not commit or fetch offsets at this epoch."""
        if transactional and epoch < 0 and not member_id and instance_id is None:
            # Older clients do not send the member; the epoch of their producer fences them.
            return None
        member = self.members.get(member_id)
        if member is None:
            return ErrorCode.unknown_member_id
        return None if epoch == member.epoch else ErrorCode.stale_member_epoch

    def tick(self, now: float) -> None:
        """Remove members whose session expired or who did not revoke partitions in time."""
        expired = [
            member.id
            for member in self.members.values()
            if member.expires_at <= now or (member.revoke_by is not None and member.revoke_by <= now)
        ]
        for member_id in expired:
            del self.members[member_id]
        if expired:
            self.refresh(self._topics)

    @property
    def state(self) -> str:
        """The state under its name in Kafka."""
        if not self.members:
            return "Empty"
        stable = all(
            member.epoch == self.epoch and not member.revoking and member.topic_partitions == self.target.get(member.id)
            for member in self.members.values()
        )
        return "Stable" if stable else "Reconciling"

    # Targets

    def refresh(self, topics: Topics) -> None:
        """Begin a new epoch with new targets if members, subscriptions or topics have changed."""
        wanted = {name for member in self.members.values() for name in member.subscription}
        known_topics = {name: topics[name] for name in sorted(wanted) if name in topics}
        subscriptions = {member.id: (member.subscription, member.assignor) for member in self.members.values()}
        if known_topics == self._topics and subscriptions == self._subscriptions:
            # Nothing has changed, as with most heartbeats.
            return
        target = assign_partitions(self.members.values(), known_topics, self.target)
        if target != self.target or known_topics != self._topics:
            self.epoch += 1
        self.target, self._topics, self._subscriptions = target, known_topics, subscriptions

    # Steps

    def _reconcile(self, now: float, member: ConsumerMember, owned: frozenset[TopicPartition] | None) -> None:
        target = self.target.get(member.id, frozenset())
        if member.revoking and owned is not None and not owned & member.revoking:
            member.revoking = frozenset()
            member.revoke_by = None
        surplus = member.topic_partitions - target
        if surplus:
            member.topic_partitions &= target
            # A member that has just joined owns nothing to revoke.
            if member.epoch > 0:
                member.revoking |= surplus
                member.revoke_by = now + member.rebalance_seconds
        if member.revoking:
            return
        if member.epoch != self.epoch:
            member.previous_epoch, member.epoch = member.epoch, self.epoch
        taken = {
            topic_partition
            for other in self.members.values()
            if other.id != member.id
            for topic_partition in (*other.topic_partitions, *other.revoking)
        }
        member.topic_partitions |= target - taken


def assign_partitions(
    members: Iterable[ConsumerMember], topics: Topics, before: Mapping[str, frozenset[TopicPartition]]
) -> dict[str, frozenset[TopicPartition]]:
    """The target assignment: each topic is balanced among its subscribers to within one partition, and so is the total
    if all members subscribe to the same topics. Assignments change only where the balance requires it (sticky)."""
    ordered = sorted(members, key=lambda member: member.id)
    if ordered and all(member.assignor == "range" for member in ordered):
        return _assign_ranges(ordered, topics)
    shares = [share for name in topics if (share := _share_topic(ordered, name, topics[name], before)) is not None]
    loads = {member.id: 0 for member in ordered}
    for share in shares:
        for reader in share.readers:
            loads[reader] += share.base + (reader in share.with_extra)
    for share in shares:
        _distribute_extra(share, loads)
    # Terminates: each step improves the balance, or keeps it and moves fewer partitions.
    steps = -1
    while steps:
        steps = sum(_balance(share, loads) for share in shares)
    target: dict[str, set[TopicPartition]] = {member.id: set() for member in ordered}
    for share in shares:
        free = set(share.topic_partitions)
        sizes = {reader: share.base + (reader in share.with_extra) for reader in share.readers}
        for reader in share.readers:
            keeps = sorted(share.had[reader])[: sizes[reader]]
            target[reader].update(keeps)
            sizes[reader] -= len(keeps)
            free.difference_update(keeps)
        left = iter(sorted(free))
        for reader in share.readers:
            target[reader].update(islice(left, sizes[reader]))
    return {member_id: frozenset(topic_partitions) for member_id, topic_partitions in target.items()}


@dataclass(slots=True)
class _TopicShare:
    """How one topic is shared: each subscriber gets `base` partitions, and `extra` of them get one more."""

    readers: list[str]
    topic_partitions: list[TopicPartition]
    had: dict[str, frozenset[TopicPartition]]
    base: int
    extra: int
    with_extra: set[str]

    def moves(self, reader: str) -> bool:
        """Whether an extra partition for this reader would have to move from another reader."""
        return len(self.had[reader]) <= self.base


def _share_topic(
    members: list[ConsumerMember], name: str, topic: tuple[int, int], before: Mapping[str, frozenset[TopicPartition]]
) -> _TopicShare | None:
    readers = [member.id for member in members if name in member.subscription]
    if not readers:
        return None
    topic_partitions = [TopicPartition(topic[0], partition) for partition in range(topic[1])]
    base, extra = divmod(len(topic_partitions), len(readers))
    existing = frozenset(topic_partitions)
    had = {reader: before.get(reader, frozenset()) & existing for reader in readers}
    kept = sorted((one for one in readers if len(had[one]) > base), key=lambda one: -len(had[one]))
    return _TopicShare(readers, topic_partitions, had, base, extra, set(kept[:extra]))


def _distribute_extra(share: _TopicShare, loads: dict[str, int]) -> None:
    """Give the extra partitions that no reader had before to the readers with the lowest total load."""
    others = (reader for reader in share.readers if reader not in share.with_extra)
    for reader in nsmallest(share.extra - len(share.with_extra), others, key=lambda one: (loads[one], one)):
        share.with_extra.add(reader)
        loads[reader] += 1


def _balance(share: _TopicShare, loads: dict[str, int]) -> int:
    """Move extra partitions of a topic while that improves the balance; return the number of moves."""
    steps = 0
    if not share.extra:
        return steps
    while True:
        others = [one for one in share.readers if one not in share.with_extra]
        # Prefer swaps that reduce the number of moved partitions; for those a load difference of 1 suffices.
        givers = [one for one in share.with_extra if share.moves(one)]
        takers = [one for one in others if not share.moves(one)]
        pair = _pick_pair(givers, takers, loads, by=1) or _pick_pair(share.with_extra, others, loads, by=2)
        if pair is None:
            return steps
        giver, taker = pair
        share.with_extra.remove(giver)
        share.with_extra.add(taker)
        loads[giver] -= 1
        loads[taker] += 1
        steps += 1


def _pick_pair(
    givers: Collection[str], takers: Collection[str], loads: Mapping[str, int], *, by: int
) -> tuple[str, str] | None:
    """The giver with the highest and the taker with the lowest load, if their loads differ by at least `by`."""
    if not givers or not takers:
        return None
    giver = min(givers, key=lambda one: (-loads[one], one))
    taker = min(takers, key=lambda one: (loads[one], one))
    return (giver, taker) if loads[giver] - loads[taker] >= by else None


def _assign_ranges(members: list[ConsumerMember], topics: Topics) -> dict[str, frozenset[TopicPartition]]:
    """The range assignor: consecutive partitions, so that members get the same partition numbers of every topic."""
    target: dict[str, set[TopicPartition]] = {member.id: set() for member in members}
    for name, (topic_id, partitions) in topics.items():
        readers = [member.id for member in members if name in member.subscription]
        begin = 0
        for index, reader in enumerate(readers):
            size = partitions // len(readers) + (index < partitions % len(readers))
            target[reader].update(TopicPartition(topic_id, number) for number in range(begin, begin + size))
            begin += size
    return {member_id: frozenset(topic_partitions) for member_id, topic_partitions in target.items()}
