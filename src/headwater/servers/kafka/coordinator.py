"""The state machine of a consumer group with the classic protocol: members, generations, rebalances. Pure: no I/O.

States: EMPTY -> PREPARING (a member joined or left; the others are expected to rejoin) -> COMPLETING (a new generation
has begun; the leader is expected to sync with the assignments) -> STABLE -> PREPARING ...
A request that has to wait (join, sync) is identified by an opaque `waiter`. Every method returns the replies that are
due now, also to waiters of earlier calls. Time is passed in as seconds.
Called by `classic_protocol.py`, which stores each new generation in Postgres before it delivers the replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from headwater.servers.kafka.wire import ErrorCode

MAX_MEMBERS: Final = 1_000
"""Maximum members of a group, including those that were given an id and have not rejoined with it yet."""


class GroupState(Enum):
    """The states under their names in Kafka."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


Protocols = tuple[tuple[str, bytes], ...]


class JoinRequest(NamedTuple):
    """A request to join the next generation. An empty member id: the member has none yet."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_seconds: float
    rebalance_seconds: float
    protocol_type: str
    protocols: Protocols
    # Whether a new member first gets an id and rejoins with it, so that abandoned requests leave no member behind.
    id_first: bool
    # The id for a new member.
    new_id: str
    # Whether the client supports skip_assignment in the response.
    knows_skip: bool = False


class JoinResult(NamedTuple):
    """The response to a join request."""

    code: ErrorCode
    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skip_assignment: bool = False


class SyncRequest(NamedTuple):
    """A request for the assignment of a member; the leader sends the assignments of all members."""

    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol: str | None
    assignments: tuple[tuple[str, bytes], ...]


class SyncResult(NamedTuple):
    """The response to a sync request."""

    code: ErrorCode
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Reply(NamedTuple):
    """A response that is due to a waiter."""

    waiter: Any
    answer: JoinResult | SyncResult


@dataclass(slots=True)
class ClassicMember:
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
class ClassicGroup:
    """A group of the classic protocol. It starts from the last generation stored in Postgres."""

    name: str
    generation: int
    delay_seconds: float
    state: GroupState = GroupState.EMPTY
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, ClassicMember] = field(default_factory=dict)
    # Members that were given an id and have not rejoined with it -> their deadline.
    pending: dict[str, float] = field(default_factory=dict)
    _rebalance_ends: float = 0.0
    _first_wait_ends: float | None = None

    # Joining

    def join(self, now: float, waiter: Any, request: JoinRequest) -> list[Reply]:
        """A member joins. The reply is due at once, or when all members have joined."""
        error = self._join_error(request)
        if error is not None:
            return [Reply(waiter, JoinResult(error, request.member_id))]
        if not request.member_id:
            return self._join_new(now, waiter, request)
        if request.member_id in self.pending:
            del self.pending[request.member_id]
            return self._add(now, waiter, request, request.member_id)
        member = self.members[request.member_id]
        member.expires_at = now + request.session_seconds
        same = member.protocols == request.protocols
        if self.state is GroupState.COMPLETING and same:
            # The last response was lost: send it again.
            return [Reply(waiter, self._join_result(member))]
        if self.state is GroupState.STABLE and same and member.id != self.leader:
            return [Reply(waiter, self._join_result(member))]
        return self._rejoin(now, waiter, request, member)

    def _join_error(self, request: JoinRequest) -> ErrorCode | None:
        if not request.protocols or not request.protocol_type or "\x00" in request.protocol_type:
            return ErrorCode.inconsistent_group_protocol
        others = [member for member in self.members.values() if member.id != request.member_id]
        if others:
            if request.protocol_type != self.protocol_type:
                return ErrorCode.inconsistent_group_protocol
            common = set.intersection(*({name for name, _ in member.protocols} for member in others))
            if not common & {name for name, _ in request.protocols}:
                return ErrorCode.inconsistent_group_protocol
        if not request.member_id:
            if len(self.members) + len(self.pending) >= MAX_MEMBERS:
                return ErrorCode.group_max_size_reached
            return None
        return self._member_error(request.member_id, request.instance_id, may_be_pending=True)

    def _member_error(
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

    def _of_instance(self, instance_id: str) -> ClassicMember | None:
        return next((member for member in self.members.values() if member.instance_id == instance_id), None)

    def _join_new(self, now: float, waiter: Any, request: JoinRequest) -> list[Reply]:
        if request.instance_id is not None:
            before = self._of_instance(request.instance_id)
            if before is not None:
                return self._replace(now, waiter, request, before)
        elif request.id_first:
            self.pending[request.new_id] = now + request.session_seconds
            return [Reply(waiter, JoinResult(ErrorCode.member_id_required, request.new_id))]
        return self._add(now, waiter, request, request.new_id)

    def _replace(self, now: float, waiter: Any, request: JoinRequest, before: ClassicMember) -> list[Reply]:
        """A static member restarted under a new id: it replaces the old member, which is fenced."""
        replies = self._fail_waiters(before, ErrorCode.fenced_instance_id)
        member = _new_member(now, request, request.new_id)
        member.assignment = before.assignment
        # At the same index: assignors depend on the order of members.
        self.members = {
            member.id if known.id == before.id else known.id: member if known.id == before.id else known
            for known in self.members.values()
        }
        was_leader = self.leader == before.id
        if was_leader:
            self.leader = member.id
        if self.state is GroupState.STABLE and member.protocols == before.protocols:
            # No rebalance: nothing has changed for the others. A leader whose client does not support skip_assignment
            # gets the old id as the leader, so that it only fetches its own assignment.
            answer = self._join_result(member)
            if was_leader and not request.knows_skip:
                answer = answer._replace(leader=before.id, members=())
            elif was_leader:
                answer = answer._replace(skip_assignment=True)
            return [*replies, Reply(waiter, answer)]
        return [*replies, *self._rejoin(now, waiter, request, member)]

    def _add(self, now: float, waiter: Any, request: JoinRequest, member_id: str) -> list[Reply]:
        if not self.members:
            self.protocol_type = request.protocol_type
        member = _new_member(now, request, member_id)
        self.members[member_id] = member
        if self.leader is None:
            self.leader = member_id
        if self._first_wait_ends is not None:
            # Members often start together: extend the initial delay for each, up to the rebalance timeout.
            self._rebalance_ends = min(now + self.delay_seconds, self._first_wait_ends)
        return self._rejoin(now, waiter, request, member)

    def _rejoin(self, now: float, waiter: Any, request: JoinRequest, member: ClassicMember) -> list[Reply]:
        replies = []
        if member.join_waiter is not None:
            # The member joined again on another connection: fail its older request.
            replies.append(Reply(member.join_waiter, JoinResult(ErrorCode.unknown_member_id, member.id)))
        member.protocols = request.protocols
        member.session_seconds = request.session_seconds
        member.rebalance_seconds = request.rebalance_seconds
        member.join_waiter = waiter
        replies += self._prepare(now)
        return [*replies, *self._complete_if_all(now)]

    # Rebalancing

    def _prepare(self, now: float) -> list[Reply]:
        if self.state is GroupState.PREPARING:
            return []
        replies = []
        for member in self.members.values():
            if member.sync_waiter is not None:
                replies.append(Reply(member.sync_waiter, SyncResult(ErrorCode.rebalance_in_progress)))
                member.sync_waiter = None
                member.expires_at = now + member.session_seconds
        longest = max((member.rebalance_seconds for member in self.members.values()), default=0.0)
        if self.state is GroupState.EMPTY and self.delay_seconds > 0:
            self._rebalance_ends = now + self.delay_seconds
            self._first_wait_ends = now + longest
        else:
            self._rebalance_ends = now + longest
            self._first_wait_ends = None
        self.state = GroupState.PREPARING
        return replies

    def _complete_if_all(self, now: float) -> list[Reply]:
        if self.state is not GroupState.PREPARING or self._first_wait_ends is not None or self.pending:
            return []
        if all(member.join_waiter is not None for member in self.members.values()):
            return self._complete(now)
        return []

    def _complete(self, now: float) -> list[Reply]:
        """Begin the next generation with the members that have joined."""
        for member in list(self.members.values()):
            # A static member may be restarting: it stays a member until its session expires.
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
                # Only static members that are away: keep waiting for them.
                self._rebalance_ends = now + max(member.rebalance_seconds for member in self.members.values())
                self.generation -= 1
                return []
            self.leader = joined[0]
        self.protocol = self._vote()
        self.state = GroupState.COMPLETING
        replies = []
        for member in self.members.values():
            member.assignment = b""
            if member.join_waiter is not None:
                replies.append(Reply(member.join_waiter, self._join_result(member)))
                member.join_waiter = None
            member.expires_at = max(member.expires_at, now + member.session_seconds)
        return replies

    def _vote(self) -> str:
        """Choose the protocol that most members prefer among those that all support."""
        members = list(self.members.values())
        common = set.intersection(*({name for name, _ in member.protocols} for member in members))
        votes: dict[str, int] = {}
        for member in members:
            favourite = next(name for name, _ in member.protocols if name in common)
            votes[favourite] = votes.get(favourite, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def _join_result(self, member: ClassicMember) -> JoinResult:
        assert self.protocol is not None
        listed: tuple[tuple[str, str | None, bytes], ...] = ()
        if member.id == self.leader:
            listed = tuple((m.id, m.instance_id, m.metadata(self.protocol)) for m in self.members.values())
        return JoinResult(
            ErrorCode.none, member.id, self.generation, self.protocol_type, self.protocol, self.leader or "", listed
        )

    def _become_empty(self) -> None:
        self.state = GroupState.EMPTY
        self.leader = None
        self.protocol = None
        self._first_wait_ends = None

    # Sync, heartbeat, leave

    def sync(self, now: float, waiter: Any, request: SyncRequest) -> list[Reply]:
        """A member requests its assignment; it waits until the leader has sent the assignments."""
        error = self._member_error(request.member_id, request.instance_id)
        if error is None and request.generation != self.generation:
            error = ErrorCode.illegal_generation
        if error is None and (
            (request.protocol_type is not None and request.protocol_type != self.protocol_type)
            or (request.protocol is not None and request.protocol != self.protocol)
        ):
            error = ErrorCode.inconsistent_group_protocol
        if error is None and self.state is GroupState.PREPARING:
            error = ErrorCode.rebalance_in_progress
        if error is not None:
            return [Reply(waiter, SyncResult(error))]
        member = self.members[request.member_id]
        member.expires_at = now + member.session_seconds
        if self.state is GroupState.STABLE:
            return [Reply(waiter, self._sync_result(member))]
        replies = []
        if member.sync_waiter is not None:
            replies.append(Reply(member.sync_waiter, SyncResult(ErrorCode.unknown_member_id)))
        member.sync_waiter = waiter
        if member.id == self.leader:
            assignments = dict(request.assignments)
            self.state = GroupState.STABLE
            for one in self.members.values():
                one.assignment = assignments.get(one.id, b"")
                if one.sync_waiter is not None:
                    replies.append(Reply(one.sync_waiter, self._sync_result(one)))
                    one.sync_waiter = None
                    one.expires_at = now + one.session_seconds
        return replies

    def _sync_result(self, member: ClassicMember) -> SyncResult:
        return SyncResult(ErrorCode.none, self.protocol_type, self.protocol, member.assignment)

    def heartbeat(self, now: float, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """Extend the session of a member; the result may tell it to rejoin."""
        error = self._member_error(member_id, instance_id)
        if error is not None:
            return error
        if generation != self.generation:
            return ErrorCode.illegal_generation
        self.members[member_id].expires_at = now + self.members[member_id].session_seconds
        return ErrorCode.rebalance_in_progress if self.state is GroupState.PREPARING else ErrorCode.none

    def leave(self, now: float, member_id: str, instance_id: str | None) -> tuple[ErrorCode, list[Reply]]:
        """Remove a member by its id or, if it is static, by its instance id."""
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

    def commit_error(
        self, now: float, member_id: str, instance_id: str | None, generation: int, *, transactional: bool = False
    ) -> ErrorCode | None:
        """The error if this member may not commit offsets in this generation."""
        if generation < 0 and not member_id and (not self.members or (transactional and instance_id is None)):
            # A consumer with manually assigned partitions is not a member of the group. And older transactional
            # clients do not send the member; the epoch of their producer fences them.
            return None
        error = self._member_error(member_id, instance_id)
        if error is not None:
            return error
        if generation != self.generation:
            return ErrorCode.illegal_generation
        self.members[member_id].expires_at = now + self.members[member_id].session_seconds
        completing = self.state is GroupState.COMPLETING and not transactional
        return ErrorCode.rebalance_in_progress if completing else None

    def abandon(self, now: float, waiter: Any) -> None:
        """The client of a waiting request disconnected. Its member has until the end of its session to return."""
        for member in self.members.values():
            if member.join_waiter is waiter:
                member.join_waiter = None
                member.expires_at = now + member.session_seconds
            if member.sync_waiter is waiter:
                member.sync_waiter = None
                member.expires_at = now + member.session_seconds

    # Time

    def tick(self, now: float) -> list[Reply]:
        """Expire sessions, pending members and rebalances."""
        for member_id, until in list(self.pending.items()):
            if until <= now:
                del self.pending[member_id]
        replies = []
        for member in list(self.members.values()):
            waits = member.join_waiter is not None or member.sync_waiter is not None
            if not waits and member.expires_at <= now:
                replies += self._remove(now, member, ErrorCode.unknown_member_id)
        if self.state is GroupState.PREPARING and self._rebalance_ends <= now:
            replies += self._complete(now)
        else:
            replies += self._complete_if_all(now)
        return replies

    def next_tick(self) -> float | None:
        """When `tick` must be called next, if no other call comes first."""
        times = list(self.pending.values())
        times += [
            member.expires_at
            for member in self.members.values()
            if member.join_waiter is None and member.sync_waiter is None
        ]
        if self.state is GroupState.PREPARING:
            times.append(self._rebalance_ends)
        return min(times, default=None)

    def _remove(self, now: float, member: ClassicMember, code: ErrorCode) -> list[Reply]:
        replies = self._fail_waiters(member, code)
        del self.members[member.id]
        if self.leader == member.id:
            self.leader = next(iter(self.members), None)
        if not self.members:
            if self.state is not GroupState.EMPTY:
                self.generation += 1
                self._become_empty()
            return replies
        replies += self._prepare(now)
        return [*replies, *self._complete_if_all(now)]

    def _fail_waiters(self, member: ClassicMember, code: ErrorCode) -> list[Reply]:
        replies = []
        if member.join_waiter is not None:
            replies.append(Reply(member.join_waiter, JoinResult(code, member.id)))
            member.join_waiter = None
        if member.sync_waiter is not None:
            replies.append(Reply(member.sync_waiter, SyncResult(code)))
            member.sync_waiter = None
        return replies

    def dissolve(self, code: ErrorCode) -> list[Reply]:
        """Drop all members and fail all waiting requests with this error."""
        replies: list[Reply] = []
        for member in self.members.values():
            replies += self._fail_waiters(member, code)
        self.members.clear()
        self.pending.clear()
        self._become_empty()
        return replies

    def list_members(self) -> Sequence[ClassicMember]:
        return list(self.members.values())


def _new_member(now: float, request: JoinRequest, member_id: str) -> ClassicMember:
    return ClassicMember(
        member_id,
        request.instance_id,
        request.client_id,
        request.client_host,
        request.session_seconds,
        request.rebalance_seconds,
        request.protocols,
        now + request.session_seconds,
    )
