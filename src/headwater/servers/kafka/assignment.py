"""What the coordinator of a group decides when it assigns partitions itself (KIP-848): targets and steps. Pure.

Members only send heartbeats. Whenever members, subscriptions or topics change, the group gets a new epoch and a target
for each member. A member first gives up what is not its own any more, then gets what nobody else has; so no partition
is ever with two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from typing import Final, NamedTuple

from headwater.calls.kafka import Lane
from headwater.servers.kafka.wire import ErrorCode

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
    _wishes: dict[str, tuple[frozenset[str], str | None]] = field(default_factory=dict)

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
        wishes = {member.id: (member.wants, member.assignor) for member in self.members.values()}
        if seen == self._topics and wishes == self._wishes:
            # Nothing of what decides is other than before, as with most heartbeats.
            return
        target = assigned(self.members.values(), seen, self.target)
        if target != self.target or seen != self._topics:
            self.epoch += 1
        self.target, self._topics, self._wishes = target, seen, wishes

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
    """Who should get which partitions: each topic is shared evenly by those who want it, to one partition; so is the
    whole, where all want the same; and what need not change for that stays where it was."""
    everybody = sorted(members, key=lambda member: member.id)
    if everybody and all(member.assignor == "range" for member in everybody):
        return _by_range(everybody, topics)
    shares = [share for name in topics if (share := _share(everybody, name, topics[name], before)) is not None]
    loads = {member.id: 0 for member in everybody}
    for share in shares:
        for reader in share.readers:
            loads[reader] += share.least + (reader in share.more)
    for share in shares:
        _deal(share, loads)
    # Each step makes the whole more even, or as even with less that moves: so there is an end.
    steps = -1
    while steps:
        steps = sum(_evened(share, loads) for share in shares)
    target: dict[str, set[Lane]] = {member.id: set() for member in everybody}
    for share in shares:
        free = set(share.lanes)
        sizes = {reader: share.least + (reader in share.more) for reader in share.readers}
        for reader in share.readers:
            keeps = sorted(share.had[reader])[: sizes[reader]]
            target[reader].update(keeps)
            sizes[reader] -= len(keeps)
            free.difference_update(keeps)
        left = iter(sorted(free))
        for reader in share.readers:
            target[reader].update(islice(left, sizes[reader]))
    return {member_id: frozenset(lanes) for member_id, lanes in target.items()}


@dataclass(slots=True)
class _Share:
    """How one topic is shared: everybody who wants it gets `least`, as many as are over get one more."""

    readers: list[str]
    lanes: list[Lane]
    had: dict[str, frozenset[Lane]]
    least: int
    over: int
    more: set[str]

    def moves(self, reader: str) -> bool:
        """Whether one more for this reader would have to come from another."""
        return len(self.had[reader]) <= self.least


def _share(
    everybody: list[Assigned], name: str, topic: tuple[int, int], before: Mapping[str, frozenset[Lane]]
) -> _Share | None:
    readers = [member.id for member in everybody if name in member.wants]
    if not readers:
        return None
    lanes = [Lane(topic[0], partition) for partition in range(topic[1])]
    least, over = divmod(len(lanes), len(readers))
    there = frozenset(lanes)
    had = {reader: before.get(reader, frozenset()) & there for reader in readers}
    kept = sorted((one for one in readers if len(had[one]) > least), key=lambda one: -len(had[one]))
    return _Share(readers, lanes, had, least, over, set(kept[:over]))


def _deal(share: _Share, loads: dict[str, int]) -> None:
    """What is over and nobody had goes to those who have the fewest of all topics."""
    others = (reader for reader in share.readers if reader not in share.more)
    for reader in nsmallest(share.over - len(share.more), others, key=lambda one: (loads[one], one)):
        share.more.add(reader)
        loads[reader] += 1


def _evened(share: _Share, loads: dict[str, int]) -> int:
    """Hand on what some have more of a topic, as long as that helps. How often it did."""
    steps = 0
    if not share.over:
        return steps
    while True:
        others = [one for one in share.readers if one not in share.more]
        # First what then moves less. That may also change places with one that has one fewer.
        givers = [one for one in share.more if share.moves(one)]
        takers = [one for one in others if not share.moves(one)]
        pair = _apart(givers, takers, loads, by=1) or _apart(share.more, others, loads, by=2)
        if pair is None:
            return steps
        giver, taker = pair
        share.more.remove(giver)
        share.more.add(taker)
        loads[giver] -= 1
        loads[taker] += 1
        steps += 1


def _apart(
    givers: Collection[str], takers: Collection[str], loads: Mapping[str, int], *, by: int
) -> tuple[str, str] | None:
    """Who has most, and who has fewest, if they are that far apart."""
    if not givers or not takers:
        return None
    giver = min(givers, key=lambda one: (-loads[one], one))
    taker = min(takers, key=lambda one: (loads[one], one))
    return (giver, taker) if loads[giver] - loads[taker] >= by else None


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
