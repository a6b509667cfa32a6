"""What the coordinator of a consumer group decides: who is a member, when to rebalance, who gets which answer. Pure.

A request that has to wait is known by its `waiter`, which means nothing here. Whatever happens next, in a later call or
in `tick`, returns the answers that are due. Time comes in as seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from headwater.servers.kafka.wire import ErrorCode

MAX_MEMBERS: Final = 1_000
"""Of one group, those that were told an id and did not come back yet included."""


class State(Enum):
    """By the names that Kafka gives them."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


Protocols = tuple[tuple[str, bytes], ...]


class Join(NamedTuple):
    """A member that wants to be in the next generation. An empty id: it has none yet."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_seconds: float
    rebalance_seconds: float
    protocol_type: str
    protocols: Protocols
    # Whether a newcomer is told its id first and joins with it, so that one that goes away leaves no member behind.
    id_first: bool
    # What the member's id will be, if it gets one.
    new_id: str
    # Whether the answer can say that the leader need not assign anything.
    knows_skip: bool = False


class Joined(NamedTuple):
    """The answer to a join."""

    code: ErrorCode
    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skip_assignment: bool = False


class Sync(NamedTuple):
    """A member that wants its assignment; the leader brings everybody's."""

    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol: str | None
    assignments: tuple[tuple[str, bytes], ...]


class Synced(NamedTuple):
    """The answer to a sync."""

    code: ErrorCode
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Reply(NamedTuple):
    """An answer that is due to a waiter."""

    waiter: Any
    answer: Joined | Synced


@dataclass(slots=True)
class Member:
    """One consumer of the group."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_seconds: float
    rebalance_seconds: float
    protocols: Protocols
    expires_at: float
    assignment: bytes = b""
    join_waiter: Any = None
    sync_waiter: Any = None

    def metadata(self, protocol: str) -> bytes:
        return dict(self.protocols).get(protocol, b"")


@dataclass(slots=True)
class Group:
    """A group of the classic protocol, from the generation that was counted last."""

    name: str
    generation: int
    delay_seconds: float
    state: State = State.EMPTY
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    # Those that were told an id and have not come back with it, and until when they may.
    pending: dict[str, float] = field(default_factory=dict)
    _rebalance_ends: float = 0.0
    _first_wait_ends: float | None = None

    # Joining

    def join(self, now: float, waiter: Any, ask: Join) -> list[Reply]:
        """A member joins. The answer may come at once, or when everybody has joined."""
        refused = self._refused_join(ask)
        if refused is not None:
            return [Reply(waiter, Joined(refused, ask.member_id))]
        if not ask.member_id:
            return self._join_new(now, waiter, ask)
        if ask.member_id in self.pending:
            del self.pending[ask.member_id]
            return self._add(now, waiter, ask, ask.member_id)
        member = self.members[ask.member_id]
        member.expires_at = now + ask.session_seconds
        same = member.protocols == ask.protocols
        if self.state is State.COMPLETING and same:
            # It did not hear the answer: it gets it again.
            return [Reply(waiter, self._joined(member))]
        if self.state is State.STABLE and same and member.id != self.leader:
            return [Reply(waiter, self._joined(member))]
        return self._rejoin(now, waiter, ask, member)

    def _refused_join(self, ask: Join) -> ErrorCode | None:
        if not ask.protocols or not ask.protocol_type or "\x00" in ask.protocol_type:
            return ErrorCode.inconsistent_group_protocol
        others = [member for member in self.members.values() if member.id != ask.member_id]
        if others:
            if ask.protocol_type != self.protocol_type:
                return ErrorCode.inconsistent_group_protocol
            common = set.intersection(*({name for name, _ in member.protocols} for member in others))
            if not common & {name for name, _ in ask.protocols}:
                return ErrorCode.inconsistent_group_protocol
        if not ask.member_id:
            if len(self.members) + len(self.pending) >= MAX_MEMBERS:
                return ErrorCode.group_max_size_reached
            return None
        return self._refused_member(ask.member_id, ask.instance_id, may_be_pending=True)

    def _refused_member(
        self, member_id: str, instance_id: str | None, *, may_be_pending: bool = False
    ) -> ErrorCode | None:
        if instance_id is not None:
            known = self._of_instance(instance_id)
            if known is None:
                return ErrorCode.unknown_member_id
            return None if known.id == member_id else ErrorCode.fenced_instance_id
        if member_id in self.members or (may_be_pending and member_id in self.pending):
            return None
        return ErrorCode.unknown_member_id

    def _of_instance(self, instance_id: str) -> Member | None:
        return next((member for member in self.members.values() if member.instance_id == instance_id), None)

    def _join_new(self, now: float, waiter: Any, ask: Join) -> list[Reply]:
        if ask.instance_id is not None:
            before = self._of_instance(ask.instance_id)
            if before is not None:
                return self._replace(now, waiter, ask, before)
        elif ask.id_first:
            self.pending[ask.new_id] = now + ask.session_seconds
            return [Reply(waiter, Joined(ErrorCode.member_id_required, ask.new_id))]
        return self._add(now, waiter, ask, ask.new_id)

    def _replace(self, now: float, waiter: Any, ask: Join, before: Member) -> list[Reply]:
        """A static member came back under a new id: it takes the place of the old, which is fenced."""
        replies = self._dismiss(before, ErrorCode.fenced_instance_id)
        member = Member(
            ask.new_id, ask.instance_id, ask.client_id, ask.client_host, ask.session_seconds, ask.rebalance_seconds,
            ask.protocols, now + ask.session_seconds, before.assignment,
        )  # fmt: skip
        # In its place, so that the order of members, which assignors go by, stays as it is.
        self.members = {
            member.id if known.id == before.id else known.id: member if known.id == before.id else known
            for known in self.members.values()
        }
        led = self.leader == before.id
        if led:
            self.leader = member.id
        if self.state is State.STABLE and member.protocols == before.protocols:
            # Nothing changed for the others, so nobody is bothered. A leader that cannot be told to leave the
            # assignment alone is told that another leads; it then asks for its own part only.
            answer = self._joined(member)
            if led and not ask.knows_skip:
                answer = answer._replace(leader=before.id, members=())
            elif led:
                answer = answer._replace(skip_assignment=True)
            return [*replies, Reply(waiter, answer)]
        return [*replies, *self._rejoin(now, waiter, ask, member)]

    def _add(self, now: float, waiter: Any, ask: Join, member_id: str) -> list[Reply]:
        if not self.members:
            self.protocol_type = ask.protocol_type
        member = Member(
            member_id, ask.instance_id, ask.client_id, ask.client_host, ask.session_seconds, ask.rebalance_seconds,
            ask.protocols, now + ask.session_seconds,
        )  # fmt: skip
        self.members[member_id] = member
        if self.leader is None:
            self.leader = member_id
        if self._first_wait_ends is not None:
            # Others are likely to come with the first: wait a little for each, though not for ever.
            self._rebalance_ends = min(now + self.delay_seconds, self._first_wait_ends)
        return self._rejoin(now, waiter, ask, member)

    def _rejoin(self, now: float, waiter: Any, ask: Join, member: Member) -> list[Reply]:
        replies = []
        if member.join_waiter is not None:
            # The same member on another connection: the older request will not be listened to.
            replies.append(Reply(member.join_waiter, Joined(ErrorCode.unknown_member_id, member.id)))
        member.protocols = ask.protocols
        member.session_seconds = ask.session_seconds
        member.rebalance_seconds = ask.rebalance_seconds
        member.join_waiter = waiter
        replies += self._prepare(now)
        return [*replies, *self._complete_if_all(now)]

    # Rebalancing

    def _prepare(self, now: float) -> list[Reply]:
        if self.state is State.PREPARING:
            return []
        replies = []
        for member in self.members.values():
            if member.sync_waiter is not None:
                replies.append(Reply(member.sync_waiter, Synced(ErrorCode.rebalance_in_progress)))
                member.sync_waiter = None
                member.expires_at = now + member.session_seconds
        longest = max((member.rebalance_seconds for member in self.members.values()), default=0.0)
        if self.state is State.EMPTY and self.delay_seconds > 0:
            self._rebalance_ends = now + self.delay_seconds
            self._first_wait_ends = now + longest
        else:
            self._rebalance_ends = now + longest
            self._first_wait_ends = None
        self.state = State.PREPARING
        return replies

    def _complete_if_all(self, now: float) -> list[Reply]:
        if self.state is not State.PREPARING or self._first_wait_ends is not None or self.pending:
            return []
        if all(member.join_waiter is not None for member in self.members.values()):
            return self._complete(now)
        return []

    def _complete(self, now: float) -> list[Reply]:
        """Begin the next generation with whoever has joined."""
        for member in list(self.members.values()):
            # A static member may be restarting: it keeps its place until its session ends.
            if member.join_waiter is None and member.instance_id is None:
                del self.members[member.id]
        self._first_wait_ends = None
        self.generation += 1
        if not self.members:
            self._become_empty()
            return []
        if self.leader not in self.members or self.members[self.leader].join_waiter is None:
            joined = [member.id for member in self.members.values() if member.join_waiter is not None]
            if not joined:
                # Only static members that are away: wait on for them.
                self._rebalance_ends = now + max(member.rebalance_seconds for member in self.members.values())
                self.generation -= 1
                return []
            self.leader = joined[0]
        self.protocol = self._vote()
        self.state = State.COMPLETING
        replies = []
        for member in self.members.values():
            member.assignment = b""
            if member.join_waiter is not None:
                replies.append(Reply(member.join_waiter, self._joined(member)))
                member.join_waiter = None
            member.expires_at = max(member.expires_at, now + member.session_seconds)
        return replies

    def _vote(self) -> str:
        """The protocol that most members like best of those that all know."""
        members = list(self.members.values())
        common = set.intersection(*({name for name, _ in member.protocols} for member in members))
        votes: dict[str, int] = {}
        for member in members:
            favourite = next(name for name, _ in member.protocols if name in common)
            votes[favourite] = votes.get(favourite, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def _joined(self, member: Member) -> Joined:
        assert self.protocol is not None
        listed: tuple[tuple[str, str | None, bytes], ...] = ()
        if member.id == self.leader:
            listed = tuple((m.id, m.instance_id, m.metadata(self.protocol)) for m in self.members.values())
        return Joined(
            ErrorCode.none, member.id, self.generation, self.protocol_type, self.protocol, self.leader or "", listed
        )

    def _become_empty(self) -> None:
        self.state = State.EMPTY
        self.leader = None
        self.protocol = None
        self._first_wait_ends = None

    # Syncing, heartbeats, leaving

    def sync(self, now: float, waiter: Any, ask: Sync) -> list[Reply]:
        """A member asks for its part; it waits until the leader has brought everybody's."""
        refused = self._refused_member(ask.member_id, ask.instance_id)
        if refused is None and ask.generation != self.generation:
            refused = ErrorCode.illegal_generation
        if refused is None and (
            (ask.protocol_type is not None and ask.protocol_type != self.protocol_type)
            or (ask.protocol is not None and ask.protocol != self.protocol)
        ):
            refused = ErrorCode.inconsistent_group_protocol
        if refused is None and self.state is State.PREPARING:
            refused = ErrorCode.rebalance_in_progress
        if refused is not None:
            return [Reply(waiter, Synced(refused))]
        member = self.members[ask.member_id]
        member.expires_at = now + member.session_seconds
        if self.state is State.STABLE:
            return [Reply(waiter, self._synced(member))]
        replies = []
        if member.sync_waiter is not None:
            replies.append(Reply(member.sync_waiter, Synced(ErrorCode.unknown_member_id)))
        member.sync_waiter = waiter
        if member.id == self.leader:
            brought = dict(ask.assignments)
            self.state = State.STABLE
            for one in self.members.values():
                one.assignment = brought.get(one.id, b"")
                if one.sync_waiter is not None:
                    replies.append(Reply(one.sync_waiter, self._synced(one)))
                    one.sync_waiter = None
                    one.expires_at = now + one.session_seconds
        return replies

    def _synced(self, member: Member) -> Synced:
        return Synced(ErrorCode.none, self.protocol_type, self.protocol, member.assignment)

    def heartbeat(self, now: float, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """A member says that it lives; the answer may tell it to join again."""
        refused = self._refused_member(member_id, instance_id)
        if refused is not None:
            return refused
        if generation != self.generation:
            return ErrorCode.illegal_generation
        self.members[member_id].expires_at = now + self.members[member_id].session_seconds
        return ErrorCode.rebalance_in_progress if self.state is State.PREPARING else ErrorCode.none

    def leave(self, now: float, member_id: str, instance_id: str | None) -> tuple[ErrorCode, list[Reply]]:
        """A member goes, by its id or, for a static one, by its instance."""
        if member_id in self.pending:
            del self.pending[member_id]
            return ErrorCode.none, self._complete_if_all(now)
        if instance_id is not None:
            member = self._of_instance(instance_id)
            if member is not None and member_id and member.id != member_id:
                return ErrorCode.fenced_instance_id, []
        else:
            member = self.members.get(member_id)
        if member is None:
            return ErrorCode.unknown_member_id, []
        return ErrorCode.none, self._remove(now, member, ErrorCode.unknown_member_id)

    def commit_refused(
        self, now: float, member_id: str, instance_id: str | None, generation: int, *, transactional: bool = False
    ) -> ErrorCode | None:
        """Why offsets may not be committed by this member in this generation, if so."""
        if generation < 0 and not member_id and (not self.members or (transactional and instance_id is None)):
            # A consumer that chose its partitions itself is no member of anything; and in a transaction older clients
            # do not say for whom they commit: their producer's epoch is what fences them.
            return None
        refused = self._refused_member(member_id, instance_id)
        if refused is not None:
            return refused
        if generation != self.generation:
            return ErrorCode.illegal_generation
        self.members[member_id].expires_at = now + self.members[member_id].session_seconds
        completing = self.state is State.COMPLETING and not transactional
        return ErrorCode.rebalance_in_progress if completing else None

    def abandon(self, now: float, waiter: Any) -> None:
        """Whoever waited for an answer is gone. Its member has its session to come back."""
        for member in self.members.values():
            if member.join_waiter is waiter:
                member.join_waiter = None
                member.expires_at = now + member.session_seconds
            if member.sync_waiter is waiter:
                member.sync_waiter = None
                member.expires_at = now + member.session_seconds

    # Time

    def tick(self, now: float) -> list[Reply]:
        """What time alone brings: sessions and rebalances that end."""
        for member_id, until in list(self.pending.items()):
            if until <= now:
                del self.pending[member_id]
        replies = []
        for member in list(self.members.values()):
            waits = member.join_waiter is not None or member.sync_waiter is not None
            if not waits and member.expires_at <= now:
                replies += self._remove(now, member, ErrorCode.unknown_member_id)
        if self.state is State.PREPARING and self._rebalance_ends <= now:
            replies += self._complete(now)
        else:
            replies += self._complete_if_all(now)
        return replies

    def next_tick(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        times = list(self.pending.values())
        times += [
            member.expires_at
            for member in self.members.values()
            if member.join_waiter is None and member.sync_waiter is None
        ]
        if self.state is State.PREPARING:
            times.append(self._rebalance_ends)
        return min(times, default=None)

    def _remove(self, now: float, member: Member, code: ErrorCode) -> list[Reply]:
        replies = self._dismiss(member, code)
        del self.members[member.id]
        if self.leader == member.id:
            self.leader = next(iter(self.members), None)
        if not self.members:
            if self.state is not State.EMPTY:
                self.generation += 1
                self._become_empty()
            return replies
        replies += self._prepare(now)
        return [*replies, *self._complete_if_all(now)]

    def _dismiss(self, member: Member, code: ErrorCode) -> list[Reply]:
        replies = []
        if member.join_waiter is not None:
            replies.append(Reply(member.join_waiter, Joined(code, member.id)))
            member.join_waiter = None
        if member.sync_waiter is not None:
            replies.append(Reply(member.sync_waiter, Synced(code)))
            member.sync_waiter = None
        return replies

    def dissolve(self, code: ErrorCode) -> list[Reply]:
        """Another broker coordinates the group now: everybody who waits is sent away."""
        replies: list[Reply] = []
        for member in self.members.values():
            replies += self._dismiss(member, code)
        self.members.clear()
        self.pending.clear()
        self._become_empty()
        return replies

    def described(self) -> Sequence[Member]:
        return list(self.members.values())
