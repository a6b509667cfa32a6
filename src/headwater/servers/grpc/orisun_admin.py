"""Orisun's service Admin on the event stores and the accounts of the log."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import datetime
from typing import Final

from headwater.access import permissions
from headwater.access.permissions import Permission
from headwater.aio import AsyncHeadwater
from headwater.calls import access as calls
from headwater.errors import HeadwaterError, InvalidRequest, NotAllowed, TopicNotFound
from headwater.servers.authentication import AccountExists, Callers, NotAuthenticated
from headwater.servers.grpc.backends import Backend
from headwater.servers.grpc.errors import NotOffered, NotThere, Refused
from headwater.servers.grpc.generated import eventstore_pb2 as pb
from headwater.servers.grpc.interceptor import Call

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
ADMIN, OPERATIONS = "ADMIN", "OPERATIONS"
# What an account may do that has the role OPERATIONS: save and read events of every boundary, and look at all of them.
OPERATING: Final = (("read", "topic", "*"), ("write", "topic", "*"), ("describe", "log", "*"))


class OrisunAdmin:
    """Every method is one of the protocol; its promise is there. Without a log there are no accounts."""

    def __init__(self, backend: Backend, log: AsyncHeadwater | None, callers: Callers | None) -> None:
        self._backend = backend
        self._log = log
        self._callers = callers

    async def create_boundary(self, request: pb.CreateBoundaryRequest, call: Call) -> pb.CreateBoundaryResponse:
        call.need("create", "topic", request.name)
        if not NAME.fullmatch(request.name):
            raise InvalidRequest("the name of a boundary is 1 to 63 letters, digits and _, and begins with no digit")
        if not request.placement.backend or not request.placement.namespace:
            raise InvalidRequest("a boundary has a placement, with a backend and a namespace")
        if request.placement.backend != self._backend.kind:
            raise InvalidRequest(f'this server keeps boundaries in "{self._backend.kind}"')
        await self._backend.create(request.name, if_missing=request.existed_before_catalog)
        made = self._boundary(request.name)
        made.description = request.description
        made.placement.namespace = request.placement.namespace
        made.existed_before_catalog = request.existed_before_catalog
        return pb.CreateBoundaryResponse(boundary=made)

    async def list_boundaries(self, request: pb.ListBoundariesRequest, call: Call) -> pb.ListBoundariesResponse:
        names = await self._backend.stores()
        return pb.ListBoundariesResponse(
            boundaries=[self._boundary(name) for name in names if call.caller.may("describe", "topic", name)]
        )

    async def get_boundary(self, request: pb.GetBoundaryRequest, call: Call) -> pb.GetBoundaryResponse:
        if not request.name:
            raise InvalidRequest("the name of a boundary is needed")
        call.need("describe", "topic", request.name)
        if request.name not in await self._backend.stores():
            raise TopicNotFound(
                f'there is no boundary "{request.name}"',
                hint="Make it: CreateBoundary.",
                detail={"topic": request.name},
            )
        return pb.GetBoundaryResponse(boundary=self._boundary(request.name))

    async def create_user(self, request: pb.CreateUserRequest, call: Call) -> pb.CreateUserResponse:
        log = self._accounts(call)
        if not request.username or not request.password:
            raise InvalidRequest("a user has a username and a password")
        if request.username == permissions.EVERYBODY:
            raise InvalidRequest("* stands for everybody and is no user")
        if not request.roles or not set(request.roles) <= {ADMIN, OPERATIONS}:
            raise InvalidRequest(f"the roles of a user are {ADMIN} or {OPERATIONS}, or both")
        kept = await asyncio.to_thread(permissions.verifiers, request.password, os.urandom(16))
        told = {"roles": list(request.roles)}
        async with log.audited(call.caller.account, "account.create", request.username, told) as connection:
            if not await log._run(calls.account_is_free(request.username), connection):
                raise AccountExists(f'there is a user "{request.username}" already')
            made = calls.set_account(request.username, kept, administrator=ADMIN in request.roles)
            await log._run(made, connection)
            if OPERATIONS in request.roles:
                for permission in OPERATING:
                    await log._run(calls.allow(Permission(request.username, *permission)), connection)
        await self._refresh()
        (user,) = [one for one in await _users(log) if one.user_id == request.username]
        return pb.CreateUserResponse(user=user)

    async def delete_user(self, request: pb.DeleteUserRequest, call: Call) -> pb.DeleteUserResponse:
        log = self._accounts(call)
        if not request.user_id:
            raise InvalidRequest("a user_id is needed")
        if request.user_id == call.caller.account:
            raise Refused("nobody can delete their own account")
        async with log.audited(call.caller.account, "account.delete", request.user_id, {}) as connection:
            if not await log._run(calls.delete_account(request.user_id), connection):
                raise _no_user(request.user_id)
        await self._refresh()
        return pb.DeleteUserResponse(success=True)

    async def change_password(self, request: pb.ChangePasswordRequest, call: Call) -> pb.ChangePasswordResponse:
        log = self._known(self._log)
        if not request.user_id or not request.current_password or not request.new_password:
            raise InvalidRequest("a user_id, the current password and the new one are needed")
        if call.caller.account not in (None, request.user_id):
            raise NotAllowed("everybody can change their own password only")
        if not await _fits(log, request.user_id, request.current_password):
            raise NotAuthenticated("the current password is wrong")
        kept = await asyncio.to_thread(permissions.verifiers, request.new_password, os.urandom(16))
        changed = calls.set_account(request.user_id, kept)
        await log.run_audited(changed, call.caller.account, "account.password", request.user_id, {})
        return pb.ChangePasswordResponse(success=True)

    async def list_users(self, request: pb.ListUsersRequest, call: Call) -> pb.ListUsersResponse:
        return pb.ListUsersResponse(users=await _users(self._accounts(call)))

    async def validate_credentials(
        self, request: pb.ValidateCredentialsRequest, call: Call
    ) -> pb.ValidateCredentialsResponse:
        log = self._accounts(call)
        if not request.username or not request.password:
            raise InvalidRequest("a username and a password are needed")
        if not await _fits(log, request.username, request.password):
            return pb.ValidateCredentialsResponse(success=False)
        found = [one for one in await _users(log) if one.user_id == request.username]
        return pb.ValidateCredentialsResponse(success=bool(found), user=found[0] if found else None)

    async def get_user_count(self, request: pb.GetUserCountRequest, call: Call) -> pb.GetUserCountResponse:
        accounts = await self._accounts(call)._run(calls.accounts())
        return pb.GetUserCountResponse(count=len(accounts))

    async def get_event_count(self, request: pb.GetEventCountRequest, call: Call) -> pb.GetEventCountResponse:
        if not request.boundary:
            raise InvalidRequest("a boundary is needed")
        call.need("describe", "topic", request.boundary)
        return pb.GetEventCountResponse(count=await (await self._backend.store(request.boundary)).count())

    def _accounts(self, call: Call) -> AsyncHeadwater:
        """The log, for somebody who may manage its accounts: who makes one could make an administrator."""
        call.need("all", "log", "*")
        return self._known(self._log)

    def _known(self, log: AsyncHeadwater | None) -> AsyncHeadwater:
        if log is None:
            raise NotOffered("a directory of SQLite files has no accounts", hint="Serve a Postgres.")
        return log

    async def _refresh(self) -> None:
        """What was changed here counts here at once; elsewhere when rights are read again."""
        if self._callers is not None:
            await self._callers.refresh()

    def _boundary(self, name: str) -> pb.BoundaryInfo:
        return pb.BoundaryInfo(
            name=name,
            placement=pb.BoundaryPlacementInput(
                backend=self._backend.kind, namespace="headwater" if self._backend.kind == "postgres" else name
            ),
            status=pb.BOUNDARY_LIFECYCLE_STATUS_ACTIVE,
        )


async def _fits(log: AsyncHeadwater, name: str, password: str) -> bool:
    kept = await log._run(calls.find_account(name))
    known = kept if kept is not None else permissions.stranger(name, b"")
    return await asyncio.to_thread(permissions.password_fits, password, known)


async def _users(log: AsyncHeadwater) -> list[pb.AdminUser]:
    accounts = await log._run(calls.accounts())
    times = await log._run(calls.account_times())
    given: dict[str, set[tuple[str, str, str]]] = {}
    for one in await log._run(calls.permissions()):
        if not one.prefix:
            given.setdefault(one.account, set()).add((one.action, one.kind, one.name))
    return [_user(name, administrator, given.get(name, set()), times.get(name)) for name, administrator in accounts]


def _user(
    name: str, administrator: bool, given: set[tuple[str, str, str]], created_at: datetime | None
) -> pb.AdminUser:
    operates = all(one in given for one in OPERATING)
    return pb.AdminUser(
        user_id=name,
        name=name,
        username=name,
        roles=[ADMIN] * administrator + [OPERATIONS] * operates,
        created_at=created_at,
        updated_at=created_at,
    )


def _no_user(name: str) -> HeadwaterError:
    return NotThere(f'there is no user "{name}"', hint="See ListUsers.", detail={"account": name})
