"""What the coordinator of a group decides when it assigns partitions itself (KIP-848): targets and steps. Pure.

Members only send heartbeats. Whenever members, subscriptions or topics change, the group gets a new epoch and a target
for each member. A member first gives up what is not its own any more, then gets what nobody else has; so no partition
is ever with two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from headwater.calls.kafka import Lane
from headwater.kafka.wire import ErrorCode

ASSIGNORS: Final = ("uniform", "range")
LEAVES, LEAVES_FOR_NOW = -1, -2
MAX_MEMBERS: Final = 1_000

Topics = Mapping[str, tuple[int, int]]
"""The id and the number of partitions of each topic, by name."""


class Heartbeat(NamedTuple):
    """What a member says. None: it is as it was said last."""

    member_id: str
    epoch: int
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_seconds: float
    topics: frozenset[str] | None
    assignor: str | None
    owned: frozenset[Lane] | None
    # A regular expression for the names of topics, empty for none any more; and which topics it fits now.
    pattern: str | None = None
    matched: frozenset[str] = frozenset()


class Beaten(NamedTuple):
    """The answer. No assignment: it is as it was told last."""

    code: ErrorCode
    member_id: str = ""
    epoch: int = -1
    assignment: frozenset[Lane] | None = None


@dataclass(slots=True)
class Assigned:
    """One member, and how far it has come."""

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
    # What it was told is its own; what it has yet to give up; until when.
    lanes: frozenset[Lane] = frozenset()
    revoking: frozenset[Lane] = frozenset()
    revoke_by: float | None = None
    # A static member that left for now: its place is kept.
    away: bool = False
    pattern: str = ""
    matched: frozenset[str] = frozenset()

    @property
    def wants(self) -> frozenset[str]:
        return self.topics | self.matched


@dataclass(slots=True)
class AssignedGroup:
    """A group of the server-side protocol, from the epoch that was counted last."""

    name: str
    epoch: int
    session_seconds: float
    members: dict[str, Assigned] = field(default_factory=dict)
    target: dict[str, frozenset[Lane]] = field(default_factory=dict)
    _topics: Topics = field(default_factory=dict)

    def heartbeat(self, now: float, beat: Heartbeat, topics: Topics) -> Beaten:
        """A member joins, lives, or leaves."""
        if beat.assignor is not None and beat.assignor not in ASSIGNORS:
            return Beaten(ErrorCode.unsupported_assignor)
        if beat.epoch in (LEAVES, LEAVES_FOR_NOW):
            return self._leave(now, beat, topics)
        member = self.members.get(beat.member_id)
        if beat.epoch == 0:
            joined = self._join(now, beat, member)
            if isinstance(joined, ErrorCode):
                return Beaten(joined)
            member = joined
        elif member is None:
            replaced = beat.instance_id is not None and self._of_instance(beat.instance_id) is not None
            return Beaten(ErrorCode.fenced_instance_id if replaced else ErrorCode.unknown_member_id)
        elif beat.epoch != member.epoch and not self._did_not_hear(member, beat):
            return Beaten(ErrorCode.fenced_member_epoch)
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
        before = (member.lanes, member.epoch)
        self._reconcile(now, member, beat.owned)
        told = member.lanes if beat.epoch == 0 or before != (member.lanes, member.epoch) else None
        if beat.owned is not None and beat.owned != member.lanes:
            # It says what it has, and that is not what it was told.
            told = member.lanes
        return Beaten(ErrorCode.none, member.id, member.epoch, told)

    def _join(self, now: float, beat: Heartbeat, known: Assigned | None) -> Assigned | ErrorCode:
        if (beat.topics is None and not beat.pattern) or beat.rebalance_seconds <= 0:
            return ErrorCode.invalid_request
        if known is None and len(self.members) >= MAX_MEMBERS:
            return ErrorCode.group_max_size_reached
        lanes: frozenset[Lane] = frozenset()
        if beat.instance_id is not None:
            same = self._of_instance(beat.instance_id)
            if same is not None and same.id != beat.member_id:
                if not same.away:
                    return ErrorCode.unreleased_instance_id
                # It is back under another name, and goes on with what it had.
                del self.members[same.id]
                lanes = same.lanes
                if same.id in self.target:
                    self.target[beat.member_id] = self.target.pop(same.id)
        member = Assigned(
            beat.member_id, beat.instance_id, beat.client_id, beat.client_host, beat.rebalance_seconds,
            beat.topics or frozenset(), beat.assignor, now + self.session_seconds,
        )  # fmt: skip
        # One that begins anew under its own name owns nothing; what it had may go to others.
        member.lanes = lanes
        self.members[beat.member_id] = member
        return member

    def _of_instance(self, instance_id: str) -> Assigned | None:
        return next((one for one in self.members.values() if one.instance_id == instance_id), None)

    def _did_not_hear(self, member: Assigned, beat: Heartbeat) -> bool:
        """Whether the last answer got lost: the member is one step behind, and owns nothing but what it was told."""
        return beat.epoch == member.previous_epoch and beat.owned is not None and beat.owned <= member.lanes

    def _leave(self, now: float, beat: Heartbeat, topics: Topics) -> Beaten:
        member = self.members.get(beat.member_id)
        if member is None:
            return Beaten(ErrorCode.unknown_member_id)
        if beat.epoch == LEAVES_FOR_NOW and member.instance_id is not None:
            member.away = True
            member.expires_at = now + self.session_seconds
        else:
            del self.members[beat.member_id]
            self.refresh(topics)
        return Beaten(ErrorCode.none, beat.member_id, beat.epoch)

    def commit_refused(
        self, member_id: str, epoch: int, *, instance_id: str | None = None, transactional: bool = False
    ) -> ErrorCode | None:
        """Why this member may not commit offsets, or be told them, at this epoch, if so."""
        if transactional and epoch < 0 and not member_id and instance_id is None:
            # Older clients do not say for whom they commit: their producer's epoch is what fences them.
            return None
        member = self.members.get(member_id)
        if member is None:
            return ErrorCode.unknown_member_id
        return None if epoch == member.epoch else ErrorCode.stale_member_epoch

    def tick(self, now: float) -> None:
        """Put out whoever was not heard of in time, or does not give up what it must."""
        late = [
            member.id
            for member in self.members.values()
            if member.expires_at <= now or (member.revoke_by is not None and member.revoke_by <= now)
        ]
        for member_id in late:
            del self.members[member_id]
        if late:
            self.refresh(self._topics)

    @property
    def state(self) -> str:
        """By the name that Kafka gives it."""
        if not self.members:
            return "Empty"
        settled = all(
            member.epoch == self.epoch and not member.revoking and member.lanes == self.target.get(member.id)
            for member in self.members.values()
        )
        return "Stable" if settled else "Reconciling"

    # Targets

    def refresh(self, topics: Topics) -> None:
        """A new epoch with new targets, if members, what they want, or the topics are other than before."""
        wanted = {name for member in self.members.values() for name in member.wants}
        seen = {name: topics[name] for name in sorted(wanted) if name in topics}
        target = assigned(self.members.values(), seen, self.target)
        if target != self.target or seen != self._topics:
            self.target = target
            self._topics = seen
            self.epoch += 1

    # Steps

    def _reconcile(self, now: float, member: Assigned, owned: frozenset[Lane] | None) -> None:
        target = self.target.get(member.id, frozenset())
        if member.revoking and owned is not None and not owned & member.revoking:
            member.revoking = frozenset()
            member.revoke_by = None
        surplus = member.lanes - target
        if surplus:
            member.lanes &= target
            # One that has just begun owns nothing that it could give up.
            if member.epoch > 0:
                member.revoking |= surplus
                member.revoke_by = now + member.rebalance_seconds
        if member.revoking:
            return
        if member.epoch != self.epoch:
            member.previous_epoch, member.epoch = member.epoch, self.epoch
        taken = {
            lane for other in self.members.values() if other.id != member.id for lane in (*other.lanes, *other.revoking)
        }
        member.lanes |= target - taken


def assigned(
    members: Iterable[Assigned], topics: Topics, before: Mapping[str, frozenset[Lane]]
) -> dict[str, frozenset[Lane]]:
    """Who should get which partitions: as even as the subscriptions allow, and as before where that is even."""
    everybody = sorted(members, key=lambda member: member.id)
    if everybody and all(member.assignor == "range" for member in everybody):
        return _by_range(everybody, topics)
    target: dict[str, set[Lane]] = {member.id: set() for member in everybody}
    for name, (topic_id, partitions) in topics.items():
        readers = [member.id for member in everybody if name in member.wants]
        if not readers:
            continue
        lanes = [Lane(topic_id, partition) for partition in range(partitions)]
        least, over = divmod(len(lanes), len(readers))
        free = set(lanes)
        # Who has more than its share gives up the rest; as many as there are over may keep one more.
        for reader in sorted(readers, key=lambda one: -len(before.get(one, frozenset()) & free)):
            had = sorted(before.get(reader, frozenset()) & free)
            keeps = least + (over > 0 and len(had) > least)
            over -= len(had) > least and over > 0
            target[reader].update(had[:keeps])
            free.difference_update(had[:keeps])
        for lane in sorted(free):
            of_topic = {reader: sum(one.topic_id == topic_id for one in target[reader]) for reader in readers}
            # The fewest of the topic first, then the fewest of all.
            target[min(readers, key=lambda one: (of_topic[one], len(target[one]), one))].add(lane)
    return {member_id: frozenset(lanes) for member_id, lanes in target.items()}


def _by_range(everybody: list[Assigned], topics: Topics) -> dict[str, frozenset[Lane]]:
    """Adjacent partitions together, so that members get the same numbers of every topic."""
    target: dict[str, set[Lane]] = {member.id: set() for member in everybody}
    for name, (topic_id, partitions) in topics.items():
        readers = [member.id for member in everybody if name in member.wants]
        begin = 0
        for place, reader in enumerate(readers):
            size = partitions // len(readers) + (place < partitions % len(readers))
            target[reader].update(Lane(topic_id, number) for number in range(begin, begin + size))
            begin += size
    return {member_id: frozenset(lanes) for member_id, lanes in target.items()}
