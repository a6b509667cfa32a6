"""Consumer groups with the classic protocol (JoinGroup, SyncGroup, Heartbeat, LeaveGroup), and the APIs about groups.

The state machine is `coordinator.ClassicGroup`; this module calls it under one lock per group, stores each new
generation in Postgres and then delivers the replies. A broker takes up a group if Postgres says that it is the
coordinator. When its lease expires or its incarnation changes, it drops all groups: their members then find the new
coordinator. Members live in memory only; the generation and the committed offsets are rows in Postgres.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg

from headwater.calls import kafka as calls
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, GROUP, logger
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.consumer_protocol import ConsumerGroupApis
from headwater.servers.kafka.coordinator import (
    ClassicGroup,
    GroupState,
    JoinRequest,
    JoinResult,
    Reply,
    SyncRequest,
    SyncResult,
)
from headwater.servers.kafka.wire import ErrorCode, Request
from headwater.supervisor import FailureGuard

MIN_SESSION_SECONDS: Final = 0.1
MAX_SESSION_SECONDS: Final = 1800.0
MAX_TICK_SECONDS: Final = 0.5
NOTE_ALIVE_SECONDS: Final = 60.0
"""How often groups are marked as alive; far less than the retention of offsets."""
GROUP_KEY, TRANSACTION_KEY = 0, 1


class GroupError(Exception):
    """This broker cannot serve the group: another broker coordinates it, or its name is invalid."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class ClassicGroupApis:
    """The APIs about consumer groups, for the groups that this broker coordinates."""

    def __init__(self, broker: Broker, consumer_groups: ConsumerGroupApis) -> None:
        self._broker = broker
        # Groups of the other protocol (KIP-848). A group uses one protocol at a time.
        self._consumer_groups = consumer_groups
        self._groups: dict[str, ClassicGroup] = {}
        # One operation per group at a time, since some wait for Postgres.
        self._locks: dict[str, asyncio.Lock] = {}
        self._stored_generations: dict[str, int] = {}
        self._incarnation = 0
        self._ticking = asyncio.Event()

    async def run(self) -> None:
        """Expire sessions and rebalances of all groups. Runs until it is cancelled."""
        noted_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now - noted_at > NOTE_ALIVE_SECONDS:
                noted_at = now
                try:
                    await self.note_alive()
                except (HeadwaterError, psycopg.Error) as error:
                    logger.warning("groups not marked as alive", extra={ERROR: str(error)})
            due = [self._next_tick(name, group) for name, group in list(self._groups.items())]
            soonest = min((at for at in due if at is not None), default=now + MAX_TICK_SECONDS)
            self._ticking.clear()
            try:
                async with asyncio.timeout(min(max(soonest - now, 0.005), MAX_TICK_SECONDS)):
                    await self._ticking.wait()
            except TimeoutError:
                pass
            if not self._broker.holds_lease or self._incarnation != self._broker.incarnation:
                self._dissolve_all()
            now = time.monotonic()
            for name, group in list(self._groups.items()):
                at = self._next_tick(name, group)
                if at is not None and at <= now:
                    with suppress(GroupError):
                        async with self._lock(name):
                            with self._contain_errors(name):
                                replies = group.tick(time.monotonic())
                            await self._deliver(group, replies)
                if not group.members and not group.pending and self._groups.get(name) is group:
                    # Its generation and offsets are in Postgres.
                    self._forget(name)
            # Also the locks of groups that another broker coordinates.
            for name, lock in list(self._locks.items()):
                if name not in self._groups and not lock.locked():
                    del self._locks[name]

    def _next_tick(self, name: str, group: ClassicGroup) -> float | None:
        with suppress(GroupError), self._contain_errors(name):
            return group.next_tick()
        return None

    @contextmanager
    def _contain_errors(self, name: str) -> Iterator[None]:
        """Contain a bug in the state machine of a group: drop its members from memory. Its row in Postgres stays, the
        members get an error and rejoin, and other groups are not affected."""
        with FailureGuard("kafka group", **{GROUP: name}) as scope:
            yield
        if scope.failed:
            group = self._groups.pop(name, None)
            self._stored_generations.pop(name, None)
            if group is not None:
                _deliver_replies(group.dissolve(ErrorCode.coordinator_not_available))
            raise GroupError(ErrorCode.coordinator_not_available)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _forget(self, name: str) -> None:
        if not self._lock(name).locked():
            del self._groups[name]
            self._stored_generations.pop(name, None)

    def _dissolve_all(self) -> None:
        for name in list(self._groups):
            self._dissolve(name)
        self._incarnation = self._broker.incarnation

    def _dissolve(self, name: str) -> None:
        group = self._groups.pop(name, None)
        self._stored_generations.pop(name, None)
        if group is not None:
            _deliver_replies(group.dissolve(ErrorCode.not_coordinator))

    async def _group(self, name: str) -> ClassicGroup:
        """Return the group, and take it up if this broker is its coordinator. The caller holds its lock."""
        if not name or "\x00" in name:
            raise GroupError(ErrorCode.invalid_group_id)
        if not self._broker.holds_lease:
            raise GroupError(ErrorCode.not_coordinator)
        if self._incarnation != self._broker.incarnation:
            self._dissolve_all()
        known = self._groups.get(name)
        if known is not None:
            return known
        generation = await self._broker.log.run(calls.kafka_take_up(name, self._broker.incarnation))
        if generation is None:
            raise GroupError(ErrorCode.not_coordinator)
        group = ClassicGroup(name, generation, self._broker.settings.rebalance_delay_seconds)
        self._groups[name] = group
        self._stored_generations[name] = generation
        return group

    async def _group_with_lock(self, name: str) -> ClassicGroup:
        async with self._lock(name):
            return await self._group(name)

    async def _deliver(self, group: ClassicGroup, replies: list[Reply]) -> None:
        """Deliver replies, after their generation is stored in Postgres."""
        if group.generation != self._stored_generations.get(group.name):
            try:
                stored = await self._broker.log.run(
                    calls.kafka_note_generation(
                        group.name,
                        self._broker.incarnation,
                        generation=group.generation,
                        protocol_type=group.protocol_type,
                    ),
                )
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("generation not stored", extra={GROUP: group.name, ERROR: str(error)})
                stored = False
            if not stored:
                for reply in replies:
                    _deliver_replies([Reply(reply.waiter, _not_coordinator(reply.answer))])
                self._dissolve(group.name)
                return
            self._stored_generations[group.name] = group.generation
        _deliver_replies(replies)
        self._ticking.set()

    # Finding the coordinator

    async def find_coordinator(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        key_type = getattr(fields, "key_type", GROUP_KEY)
        group = key_type == GROUP_KEY
        denied = ErrorCode.group_authorization_failed if group else ErrorCode.transactional_id_authorization_failed
        answers = []
        for key in (fields.coordinator_keys or ()) if request.version >= 4 else (fields.key,):
            allowed = request.allowed("describe", "consumer" if group else "transaction", key)
            answers.append(await self._find_one(key, key_type) if allowed else _coordinator_response(key, denied))
        return {"coordinators": answers} if request.version >= 4 else answers[0]

    async def _find_one(self, key: str, key_type: int) -> dict[str, Any]:
        answer = _coordinator_response(key, ErrorCode.none)
        if key_type == TRANSACTION_KEY:
            # Transactions are entirely in Postgres: any broker can serve them.
            node: int | None = self._broker.node_id
        elif key_type != GROUP_KEY or not key or "\x00" in key:
            return {**answer, "error_code": ErrorCode.invalid_request}
        else:
            node = await self._broker.log.run(calls.kafka_coordinator(key))
            await self._broker.refresh_brokers()
        for one in self._broker.brokers:
            if one.node_id == node:
                return {**answer, "node_id": one.node_id, "host": one.host, "port": one.port}
        # A broker that is not in our list yet.
        return {**answer, "error_code": ErrorCode.coordinator_not_available}

    # Membership

    async def join(self, request: Request, client_host: str) -> dict[str, Any]:
        fields = request.fields
        session = fields.session_timeout / 1000
        if not fields.group_id:
            return _join_response(JoinResult(ErrorCode.invalid_group_id, fields.member_id), request.version)
        if self._consumer_groups.group_named(fields.group_id) is not None:
            return _join_response(JoinResult(ErrorCode.inconsistent_group_protocol, fields.member_id), request.version)
        if not MIN_SESSION_SECONDS <= session <= MAX_SESSION_SECONDS:
            return _join_response(JoinResult(ErrorCode.invalid_session_timeout, fields.member_id), request.version)
        rebalance = getattr(fields, "rebalance_timeout", None)
        instance = getattr(fields, "group_instance_id", None)
        client = request.client_id or ""
        join_request = JoinRequest(
            fields.member_id,
            instance,
            client,
            client_host,
            session,
            session if rebalance is None or rebalance < 0 else rebalance / 1000,
            fields.protocol_type,
            tuple((protocol.name, bytes(protocol.metadata)) for protocol in fields.protocols or ()),
            id_first=request.version >= 4,
            new_id=f"{instance or client}-{uuid.uuid4()}",
            knows_skip=request.version >= 9,
        )
        answer = await self._wait_for(
            fields.group_id, lambda group, waiter: group.join(time.monotonic(), waiter, join_request)
        )
        if isinstance(answer, ErrorCode):
            answer = JoinResult(answer, fields.member_id)
        assert isinstance(answer, JoinResult)
        return _join_response(answer, request.version)

    async def sync(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        sync_request = SyncRequest(
            fields.member_id,
            getattr(fields, "group_instance_id", None),
            fields.generation_id,
            getattr(fields, "protocol_type", None),
            getattr(fields, "protocol_name", None),
            tuple((one.member_id, bytes(one.assignment)) for one in fields.assignments or ()),
        )
        answer = await self._wait_for(
            fields.group_id, lambda group, waiter: group.sync(time.monotonic(), waiter, sync_request)
        )
        if isinstance(answer, ErrorCode):
            return {"error_code": answer}
        assert isinstance(answer, SyncResult)
        return {
            "error_code": answer.code,
            "protocol_type": answer.protocol_type,
            "protocol_name": answer.protocol,
            "assignment": answer.assignment,
        }

    async def _wait_for(self, name: str, decide: Any) -> JoinResult | SyncResult | ErrorCode:
        """Run an operation whose reply may have to wait, and wait for the reply; or return an error."""
        waiter: asyncio.Future[JoinResult | SyncResult] = asyncio.get_running_loop().create_future()
        async with self._lock(name):
            try:
                group = await self._group(name)
                with self._contain_errors(name):
                    replies = decide(group, waiter)
            except GroupError as error:
                return error.code
            await self._deliver(group, replies)
        self._ticking.set()
        try:
            return await waiter
        except asyncio.CancelledError:
            group.abandon(time.monotonic(), waiter)
            raise

    async def heartbeat(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        instance = getattr(fields, "group_instance_id", None)
        async with self._lock(fields.group_id):
            try:
                group = await self._group(fields.group_id)
                with self._contain_errors(fields.group_id):
                    code = group.heartbeat(time.monotonic(), fields.member_id, instance, fields.generation_id)
            except GroupError as error:
                return {"error_code": error.code}
        return {"error_code": code}

    async def leave(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        several = request.version >= 3
        leaving = (
            [(one.member_id, one.group_instance_id) for one in fields.members or ()]
            if several
            else [(fields.member_id, None)]
        )
        answers = []
        async with self._lock(fields.group_id):
            try:
                group = await self._group(fields.group_id)
                for member_id, instance in leaving:
                    with self._contain_errors(fields.group_id):
                        code, replies = group.leave(time.monotonic(), member_id, instance)
                    await self._deliver(group, replies)
                    answers.append({"member_id": member_id, "group_instance_id": instance, "error_code": code})
            except GroupError as error:
                return {"error_code": error.code, "members": ()}
        return {"error_code": ErrorCode.none if several else answers[0]["error_code"], "members": answers}

    async def commit_error(
        self, name: str, member_id: str, instance_id: str | None, generation: int, *, transactional: bool = False
    ) -> ErrorCode | None:
        """The error if this member may not commit offsets of the group now."""
        assigned = self._consumer_groups.group_named(name)
        if assigned is not None:
            return assigned.commit_error(member_id, generation, instance_id=instance_id, transactional=transactional)
        async with self._lock(name):
            try:
                group = await self._group(name)
                with self._contain_errors(name):
                    return group.commit_error(
                        time.monotonic(), member_id, instance_id, generation, transactional=transactional
                    )
            except GroupError as error:
                return error.code

    def has_members(self, name: str) -> bool:
        """Whether the group has members with the classic protocol on this broker."""
        group = self._groups.get(name)
        return group is not None and bool(group.members or group.pending)

    async def note_alive(self) -> None:
        """Mark the groups with members as alive in Postgres, so that their offsets do not expire."""
        names = [name for name, group in self._groups.items() if group.members]
        names += self._consumer_groups.names()
        if names:
            await self._broker.log.run(calls.kafka_note_alive(names, self._broker.incarnation))

    async def is_empty(self, name: str) -> bool:
        """Whether the group has no members. Raises GroupError if another broker coordinates it."""
        if self._consumer_groups.group_named(name) is not None:
            return False
        if await self._protocol_type(name) is None:
            raise GroupError(ErrorCode.group_id_not_found)
        return (await self._group_with_lock(name)).state is GroupState.EMPTY

    # Describing and deleting groups

    async def describe(self, request: Request) -> dict[str, Any]:
        groups = []
        for name in request.fields.groups or ():
            try:
                if not request.allowed("describe", "consumer", name):
                    raise GroupError(ErrorCode.group_authorization_failed)
                known = await self._protocol_type(name)
                # An unknown group is not taken up, since that would create it.
                group = ClassicGroup(name, 0, 0.0) if known is None else await self._group_with_lock(name)
            except GroupError as error:
                groups.append({"error_code": error.code, "group_id": name, "group_state": ""})
                continue
            assigned = self._consumer_groups.group_named(name) is not None
            dead = not group.members and (known is None or assigned)
            if dead and request.version >= 6:
                groups.append(
                    {
                        "error_code": ErrorCode.group_id_not_found,
                        "error_message": f"group {name} does not exist",
                        "group_id": name,
                        "group_state": "Dead",
                    }
                )
                continue
            groups.append(
                {
                    "error_code": ErrorCode.none,
                    "group_id": name,
                    "group_state": "Dead" if dead else group.state.value,
                    "protocol_type": group.protocol_type or known or "",
                    "protocol_data": group.protocol or "",
                    "members": [
                        {
                            "member_id": member.id,
                            "group_instance_id": member.instance_id,
                            "client_id": member.client_id,
                            "client_host": member.client_host,
                            "member_metadata": member.metadata(group.protocol or ""),
                            "member_assignment": member.assignment,
                        }
                        for member in group.list_members()
                    ],
                    "authorized_operations": -(2**31),
                }
            )
        return {"groups": groups}

    async def _protocol_type(self, name: str) -> str | None:
        """The protocol type that the group has, or had last; None: the group does not exist."""
        if not name or "\x00" in name:
            raise GroupError(ErrorCode.invalid_group_id)
        if self.has_members(name):
            return self._groups[name].protocol_type
        return await self._broker.log.run(calls.kafka_group_protocol(name))

    async def list(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        states = {state.lower() for state in getattr(fields, "states_filter", None) or ()}
        kinds = {kind.lower() for kind in getattr(fields, "types_filter", None) or ()}
        groups = []
        for name, protocol_type in await self._broker.log.run(calls.kafka_groups(self._broker.incarnation)):
            if not request.allowed("describe", "consumer", name):
                continue
            group = self._groups.get(name)
            assigned = self._consumer_groups.group_named(name)
            state = (
                (group.state if group is not None else GroupState.EMPTY).value if assigned is None else assigned.state
            )
            kind = "classic" if assigned is None else "consumer"
            if (not states or state.lower() in states) and (not kinds or kind in kinds):
                groups.append(
                    {
                        "group_id": name,
                        "protocol_type": (group.protocol_type if group is not None else "") or protocol_type,
                        "group_state": state,
                        "group_type": kind,
                    }
                )
        return {"error_code": ErrorCode.none, "groups": groups}

    async def delete(self, request: Request) -> dict[str, Any]:
        results = []
        for name in request.fields.groups_names or ():
            try:
                if not request.allowed("delete", "consumer", name):
                    raise GroupError(ErrorCode.group_authorization_failed)
                if await self._protocol_type(name) is None:
                    raise GroupError(ErrorCode.group_id_not_found)
                async with self._lock(name):
                    group = await self._group(name)
                    if group.members or self._consumer_groups.group_named(name) is not None:
                        code = ErrorCode.non_empty_group
                    else:
                        call = calls.kafka_delete_group(name, self._broker.incarnation)
                        deleted = await self._broker.log.run(call)
                        code = ErrorCode.none if deleted else ErrorCode.not_coordinator
                        self._dissolve(name)
            except GroupError as error:
                code = error.code
            results.append({"group_id": name, "error_code": code})
        return {"results": results}


def _coordinator_response(key: str, code: ErrorCode) -> dict[str, Any]:
    return {"key": key, "node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": None}


def _deliver_replies(replies: list[Reply]) -> None:
    for reply in replies:
        if not reply.waiter.done():
            reply.waiter.set_result(reply.answer)


def _not_coordinator(answer: JoinResult | SyncResult) -> JoinResult | SyncResult:
    if isinstance(answer, JoinResult):
        return JoinResult(ErrorCode.not_coordinator, answer.member_id)
    return SyncResult(ErrorCode.not_coordinator)


def _join_response(answer: JoinResult, version: int) -> dict[str, Any]:
    return {
        "error_code": answer.code,
        "generation_id": answer.generation,
        "protocol_type": answer.protocol_type,
        # Nullable since version 7.
        "protocol_name": answer.protocol if answer.protocol is not None or version >= 7 else "",
        "leader": answer.leader,
        "skip_assignment": answer.skip_assignment,
        "member_id": answer.member_id,
        "members": [
            {"member_id": member_id, "group_instance_id": instance, "metadata": metadata}
            for member_id, instance, metadata in answer.members
        ],
    }
