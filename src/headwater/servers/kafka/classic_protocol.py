"""Consumer groups of the classic protocol: requests go to the coordinator's decisions, offsets to Postgres."""

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
from headwater.servers.kafka.consumer_protocol import Heartbeats
from headwater.servers.kafka.coordinator import Group, Join, Joined, Reply, State, Sync, Synced
from headwater.servers.kafka.wire import ErrorCode, Request
from headwater.supervisor import Contained

SHORTEST_SESSION_SECONDS: Final = 0.1
LONGEST_SESSION_SECONDS: Final = 1800.0
LONGEST_TICK_SECONDS: Final = 0.5
NOTE_ALIVE_SECONDS: Final = 60.0
"""Far less than offsets are kept."""
GROUP_KEY, TRANSACTION_KEY = 0, 1


class Refused(Exception):
    """This broker does not answer for the group: another coordinates it, or there cannot be one of that name."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class Groups:
    """The APIs about consumer groups, for those that this broker coordinates."""

    def __init__(self, broker: Broker, heartbeats: Heartbeats) -> None:
        self._broker = broker
        # Groups of the other protocol: a name is of one at a time.
        self._heartbeats = heartbeats
        self._groups: dict[str, Group] = {}
        # Decisions about one group are made one after the other, since some wait for Postgres.
        self._locks: dict[str, asyncio.Lock] = {}
        self._noted: dict[str, int] = {}
        self._incarnation = 0
        self._ticking = asyncio.Event()

    async def run(self) -> None:
        """Let time pass for the groups, for ever."""
        noted_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now - noted_at > NOTE_ALIVE_SECONDS:
                noted_at = now
                try:
                    await self.note_alive()
                except (HeadwaterError, psycopg.Error) as error:
                    logger.warning("groups not noted as alive", extra={ERROR: str(error)})
            due = [self._next_tick(name, group) for name, group in list(self._groups.items())]
            soonest = min((at for at in due if at is not None), default=now + LONGEST_TICK_SECONDS)
            self._ticking.clear()
            try:
                async with asyncio.timeout(min(max(soonest - now, 0.005), LONGEST_TICK_SECONDS)):
                    await self._ticking.wait()
            except TimeoutError:
                pass
            if not self._broker.holds_lease or self._incarnation != self._broker.incarnation:
                self._dissolve_all()
            now = time.monotonic()
            for name, group in list(self._groups.items()):
                at = self._next_tick(name, group)
                if at is not None and at <= now:
                    with suppress(Refused):
                        async with self._lock(name):
                            with self._deciding(name):
                                replies = group.tick(time.monotonic())
                            await self._deliver(group, replies)
                if not group.members and not group.pending and self._groups.get(name) is group:
                    # What matters of it is in Postgres.
                    self._forget(name)
            # Also those of groups that were only asked for here.
            for name, lock in list(self._locks.items()):
                if name not in self._groups and not lock.locked():
                    del self._locks[name]

    def _next_tick(self, name: str, group: Group) -> float | None:
        with suppress(Refused), self._deciding(name):
            return group.next_tick()
        return None

    @contextmanager
    def _deciding(self, name: str) -> Iterator[None]:
        """Around a decision of a group. One that fails drops what is in memory of the group: its row stays, its
        members get an error and join again, and the other groups go on."""
        with Contained("kafka group", **{GROUP: name}) as decision:
            yield
        if decision.failed:
            group = self._groups.pop(name, None)
            self._noted.pop(name, None)
            if group is not None:
                _answer(group.dissolve(ErrorCode.coordinator_not_available))
            raise Refused(ErrorCode.coordinator_not_available)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _forget(self, name: str) -> None:
        if not self._lock(name).locked():
            del self._groups[name]
            self._noted.pop(name, None)

    def _dissolve_all(self) -> None:
        for name in list(self._groups):
            self._dissolve(name)
        self._incarnation = self._broker.incarnation

    def _dissolve(self, name: str) -> None:
        group = self._groups.pop(name, None)
        self._noted.pop(name, None)
        if group is not None:
            _answer(group.dissolve(ErrorCode.not_coordinator))

    async def _group(self, name: str) -> Group:
        """The group, taken up if this broker may. Its lock is held."""
        if not name or "\x00" in name:
            raise Refused(ErrorCode.invalid_group_id)
        if not self._broker.holds_lease:
            raise Refused(ErrorCode.not_coordinator)
        if self._incarnation != self._broker.incarnation:
            self._dissolve_all()
        known = self._groups.get(name)
        if known is not None:
            return known
        generation = await self._broker.log.run(calls.kafka_take_up(name, self._broker.incarnation), patience_seconds=2)
        if generation is None:
            raise Refused(ErrorCode.not_coordinator)
        group = Group(name, generation, self._broker.settings.rebalance_delay_seconds)
        self._groups[name] = group
        self._noted[name] = generation
        return group

    async def _taken_up(self, name: str) -> Group:
        async with self._lock(name):
            return await self._group(name)

    async def _deliver(self, group: Group, replies: list[Reply]) -> None:
        """Give answers, once Postgres knows of the generation that they are of."""
        if group.generation != self._noted.get(group.name):
            try:
                noted = await self._broker.log.run(
                    calls.kafka_note_generation(
                        group.name,
                        self._broker.incarnation,
                        generation=group.generation,
                        protocol_type=group.protocol_type,
                    ),
                    patience_seconds=2,
                )
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("generation not noted", extra={GROUP: group.name, ERROR: str(error)})
                noted = False
            if not noted:
                for reply in replies:
                    _answer([Reply(reply.waiter, _sent_away(reply.answer))])
                self._dissolve(group.name)
                return
            self._noted[group.name] = group.generation
        _answer(replies)
        self._ticking.set()

    # Finding

    async def find_coordinator(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        key_type = getattr(fields, "key_type", GROUP_KEY)
        group = key_type == GROUP_KEY
        denied = ErrorCode.group_authorization_failed if group else ErrorCode.transactional_id_authorization_failed
        answers = []
        for key in (fields.coordinator_keys or ()) if request.version >= 4 else (fields.key,):
            allowed = request.allowed("describe", "group" if group else "transaction", key)
            answers.append(await self._found(key, key_type) if allowed else _nowhere(key, denied))
        return {"coordinators": answers} if request.version >= 4 else answers[0]

    async def _found(self, key: str, key_type: int) -> dict[str, Any]:
        answer = _nowhere(key, ErrorCode.none)
        if key_type == TRANSACTION_KEY:
            # Transactions are in Postgres as a whole: any broker will do.
            node: int | None = self._broker.node_id
        elif key_type != GROUP_KEY or not key or "\x00" in key:
            return {**answer, "error_code": ErrorCode.invalid_request}
        else:
            node = await self._broker.log.run(calls.kafka_coordinator(key), patience_seconds=5)
            await self._broker.refresh_brokers()
        for one in self._broker.brokers:
            if one.node_id == node:
                return {**answer, "node_id": one.node_id, "host": one.host, "port": one.port}
        # Another broker that this one has not heard of yet.
        return {**answer, "error_code": ErrorCode.coordinator_not_available}

    # Membership

    async def join(self, request: Request, client_host: str) -> dict[str, Any]:
        fields = request.fields
        session = fields.session_timeout / 1000
        if not fields.group_id:
            return _joined(Joined(ErrorCode.invalid_group_id, fields.member_id), request.version)
        if self._heartbeats.group_named(fields.group_id) is not None:
            return _joined(Joined(ErrorCode.inconsistent_group_protocol, fields.member_id), request.version)
        if not SHORTEST_SESSION_SECONDS <= session <= LONGEST_SESSION_SECONDS:
            return _joined(Joined(ErrorCode.invalid_session_timeout, fields.member_id), request.version)
        rebalance = getattr(fields, "rebalance_timeout", None)
        instance = getattr(fields, "group_instance_id", None)
        client = request.client_id or ""
        ask = Join(
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
        answer = await self._waited(fields.group_id, lambda group, waiter: group.join(time.monotonic(), waiter, ask))
        if isinstance(answer, ErrorCode):
            answer = Joined(answer, fields.member_id)
        assert isinstance(answer, Joined)
        return _joined(answer, request.version)

    async def sync(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        ask = Sync(
            fields.member_id,
            getattr(fields, "group_instance_id", None),
            fields.generation_id,
            getattr(fields, "protocol_type", None),
            getattr(fields, "protocol_name", None),
            tuple((one.member_id, bytes(one.assignment)) for one in fields.assignments or ()),
        )
        answer = await self._waited(fields.group_id, lambda group, waiter: group.sync(time.monotonic(), waiter, ask))
        if isinstance(answer, ErrorCode):
            return {"error_code": answer}
        assert isinstance(answer, Synced)
        return {
            "error_code": answer.code,
            "protocol_type": answer.protocol_type,
            "protocol_name": answer.protocol,
            "assignment": answer.assignment,
        }

    async def _waited(self, name: str, decide: Any) -> Joined | Synced | ErrorCode:
        """The answer to what may have to wait, or why there is none."""
        waiter: asyncio.Future[Joined | Synced] = asyncio.get_running_loop().create_future()
        async with self._lock(name):
            try:
                group = await self._group(name)
                with self._deciding(name):
                    replies = decide(group, waiter)
            except Refused as refused:
                return refused.code
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
                with self._deciding(fields.group_id):
                    code = group.heartbeat(time.monotonic(), fields.member_id, instance, fields.generation_id)
            except Refused as refused:
                return {"error_code": refused.code}
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
                    with self._deciding(fields.group_id):
                        code, replies = group.leave(time.monotonic(), member_id, instance)
                    await self._deliver(group, replies)
                    answers.append({"member_id": member_id, "group_instance_id": instance, "error_code": code})
            except Refused as refused:
                return {"error_code": refused.code, "members": ()}
        return {"error_code": ErrorCode.none if several else answers[0]["error_code"], "members": answers}

    async def commit_refused(
        self, name: str, member_id: str, instance_id: str | None, generation: int, *, transactional: bool = False
    ) -> ErrorCode | None:
        """Why this member may not commit offsets of the group now, if so."""
        assigned = self._heartbeats.group_named(name)
        if assigned is not None:
            return assigned.commit_refused(member_id, generation, instance_id=instance_id, transactional=transactional)
        async with self._lock(name):
            try:
                group = await self._group(name)
                with self._deciding(name):
                    return group.commit_refused(
                        time.monotonic(), member_id, instance_id, generation, transactional=transactional
                    )
            except Refused as refused:
                return refused.code

    def has_members(self, name: str) -> bool:
        """Whether the group has members of the classic protocol, here."""
        group = self._groups.get(name)
        return group is not None and bool(group.members or group.pending)

    async def note_alive(self) -> None:
        """Tell Postgres which groups have members here: their offsets are not to expire."""
        names = [name for name, group in self._groups.items() if group.members]
        names += self._heartbeats.names()
        if names:
            await self._broker.log.run(calls.kafka_note_alive(names, self._broker.incarnation), patience_seconds=2)

    async def is_empty(self, name: str) -> bool:
        """Whether the group has no members. Refused, if another broker would have to say so."""
        if self._heartbeats.group_named(name) is not None:
            return False
        if await self._known(name) is None:
            raise Refused(ErrorCode.group_id_not_found)
        return (await self._taken_up(name)).state is State.EMPTY

    # Looking at groups

    async def describe(self, request: Request) -> dict[str, Any]:
        groups = []
        for name in request.fields.groups or ():
            try:
                if not request.allowed("describe", "group", name):
                    raise Refused(ErrorCode.group_authorization_failed)
                known = await self._known(name)
                # One that nobody knows is not taken up: that would make it.
                group = Group(name, 0, 0.0) if known is None else await self._taken_up(name)
            except Refused as refused:
                groups.append({"error_code": refused.code, "group_id": name, "group_state": ""})
                continue
            assigned = self._heartbeats.group_named(name) is not None
            dead = not group.members and (known is None or assigned)
            if dead and request.version >= 6:
                groups.append(
                    {
                        "error_code": ErrorCode.group_id_not_found,
                        "error_message": f"there is no group {name}",
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
                        for member in group.described()
                    ],
                    "authorized_operations": -(2**31),
                }
            )
        return {"groups": groups}

    async def _known(self, name: str) -> str | None:
        """The kind of protocol that the group has, or had last; None: there is no such group."""
        if not name or "\x00" in name:
            raise Refused(ErrorCode.invalid_group_id)
        if self.has_members(name):
            return self._groups[name].protocol_type
        return await self._broker.log.run(calls.kafka_group_protocol(name), patience_seconds=2)

    async def list(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        states = {state.lower() for state in getattr(fields, "states_filter", None) or ()}
        kinds = {kind.lower() for kind in getattr(fields, "types_filter", None) or ()}
        groups = []
        for name, protocol_type in await self._broker.log.run(
            calls.kafka_groups(self._broker.incarnation), patience_seconds=2
        ):
            if not request.allowed("describe", "group", name):
                continue
            group = self._groups.get(name)
            assigned = self._heartbeats.group_named(name)
            state = (group.state if group is not None else State.EMPTY).value if assigned is None else assigned.state
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
                if not request.allowed("delete", "group", name):
                    raise Refused(ErrorCode.group_authorization_failed)
                if await self._known(name) is None:
                    raise Refused(ErrorCode.group_id_not_found)
                async with self._lock(name):
                    group = await self._group(name)
                    if group.members or self._heartbeats.group_named(name) is not None:
                        code = ErrorCode.non_empty_group
                    else:
                        call = calls.kafka_delete_group(name, self._broker.incarnation)
                        gone = await self._broker.log.run(call, patience_seconds=2)
                        code = ErrorCode.none if gone else ErrorCode.not_coordinator
                        self._dissolve(name)
            except Refused as refused:
                code = refused.code
            results.append({"group_id": name, "error_code": code})
        return {"results": results}


def _nowhere(key: str, code: ErrorCode) -> dict[str, Any]:
    return {"key": key, "node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": None}


def _answer(replies: list[Reply]) -> None:
    for reply in replies:
        if not reply.waiter.done():
            reply.waiter.set_result(reply.answer)


def _sent_away(answer: Joined | Synced) -> Joined | Synced:
    if isinstance(answer, Joined):
        return Joined(ErrorCode.not_coordinator, answer.member_id)
    return Synced(ErrorCode.not_coordinator)


def _joined(answer: Joined, version: int) -> dict[str, Any]:
    return {
        "error_code": answer.code,
        "generation_id": answer.generation,
        "protocol_type": answer.protocol_type,
        # Null is understood since version 7.
        "protocol_name": answer.protocol if answer.protocol is not None or version >= 7 else "",
        "leader": answer.leader,
        "skip_assignment": answer.skip_assignment,
        "member_id": answer.member_id,
        "members": [
            {"member_id": member_id, "group_instance_id": instance, "metadata": metadata}
            for member_id, instance, metadata in answer.members
        ],
    }
