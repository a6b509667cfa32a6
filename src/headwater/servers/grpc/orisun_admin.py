"""Orisun's service Admin on the event stores and the accounts of the log."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import datetime
from typing import Final

from headwater.access import permissions, scram
from headwater.access.permissions import Permission
from headwater.aio import AsyncHeadwater
from headwater.calls import access as calls
from headwater.errors import HeadwaterError, InvalidRequest, NotAllowed, TopicNotFound
from headwater.servers.authentication import AccountExists, Authenticator, NotAuthenticated
from headwater.servers.grpc.backends import Backend
from headwater.servers.grpc.errors import NotSupported, PreconditionFailed, ResourceNotFound
from headwater.servers.grpc.generated import eventstore_pb2 as pb
from headwater.servers.grpc.interceptor import GrpcCall

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
ADMIN, OPERATIONS = "ADMIN", "OPERATIONS"
# The permissions of the role OPERATIONS: save and read events of every boundary, and describe all of them.
OPERATIONS_PERMISSIONS: Final = (("read", "topic", "*"), ("write", "topic", "*"), ("describe", "log", "*"))


class OrisunAdmin:
    """The methods of the service; the proto file documents each. Without a log, accounts are not supported."""

    def __init__(self, backend: Backend, log: AsyncHeadwater | None, authenticator: Authenticator | None) -> None:
        self._backend = backend
        self._log = log
        self._authenticator = authenticator

    async def create_boundary(self, request: pb.CreateBoundaryRequest, call: GrpcCall) -> pb.CreateBoundaryResponse:
        call.require("create", "topic", request.name)
        if not NAME.fullmatch(request.name):
            raise InvalidRequest(
                "invalid name of a boundary: expected 1 to 63 letters, digits and _, not starting with a digit"
            )
        if not request.placement.backend or not request.placement.namespace:
            raise InvalidRequest("placement is incomplete: expected backend and namespace")
        if request.placement.backend != self._backend.kind:
            raise InvalidRequest(
                f'unsupported backend "{request.placement.backend}": this server uses "{self._backend.kind}"'
            )
        await self._backend.create(request.name, if_missing=request.existed_before_catalog)
        created = self._boundary(request.name)
        created.description = request.description
        created.placement.namespace = request.placement.namespace
        created.existed_before_catalog = request.existed_before_catalog
        return pb.CreateBoundaryResponse(boundary=created)

    async def list_boundaries(self, request: pb.ListBoundariesRequest, call: GrpcCall) -> pb.ListBoundariesResponse:
        names = await self._backend.stores()
        return pb.ListBoundariesResponse(
            boundaries=[self._boundary(name) for name in names if call.principal.may("describe", "topic", name)]
        )

    async def get_boundary(self, request: pb.GetBoundaryRequest, call: GrpcCall) -> pb.GetBoundaryResponse:
        if not request.name:
            raise InvalidRequest("name is missing")
        call.require("describe", "topic", request.name)
        if request.name not in await self._backend.stores():
            raise TopicNotFound(
                f'boundary "{request.name}" does not exist',
                hint="Create it with CreateBoundary.",
                detail={"topic": request.name},
            )
        return pb.GetBoundaryResponse(boundary=self._boundary(request.name))

    async def create_user(self, request: pb.CreateUserRequest, call: GrpcCall) -> pb.CreateUserResponse:
        log = self._accounts(call)
        if not request.username or not request.password:
            raise InvalidRequest("username or password is missing")
        if request.username == permissions.ALL_ACCOUNTS:
            raise InvalidRequest("invalid username *: it stands for all users")
        if not request.roles or not set(request.roles) <= {ADMIN, OPERATIONS}:
            raise InvalidRequest(f"invalid roles: expected {ADMIN}, {OPERATIONS} or both")
        verifiers = await asyncio.to_thread(scram.verifiers, request.password, os.urandom(16))
        details = {"roles": list(request.roles)}
        async with log.audited(call.principal.account, "account.create", request.username, details) as connection:
            if not await log.run(calls.account_is_free(request.username), connection=connection):
                raise AccountExists(f'user "{request.username}" already exists')
            made = calls.set_account(request.username, verifiers, administrator=ADMIN in request.roles)
            await log.run(made, connection=connection)
            if OPERATIONS in request.roles:
                for permission in OPERATIONS_PERMISSIONS:
                    await log.run(calls.allow(Permission(request.username, *permission)), connection=connection)
        await self._refresh()
        (user,) = [one for one in await _users(log) if one.user_id == request.username]
        return pb.CreateUserResponse(user=user)

    async def delete_user(self, request: pb.DeleteUserRequest, call: GrpcCall) -> pb.DeleteUserResponse:
        log = self._accounts(call)
        if not request.user_id:
            raise InvalidRequest("user_id is missing")
        if request.user_id == call.principal.account:
            raise PreconditionFailed("users cannot delete their own account")
        async with log.audited(call.principal.account, "account.delete", request.user_id, {}) as connection:
            if not await log.run(calls.delete_account(request.user_id), connection=connection):
                raise _no_user(request.user_id)
        await self._refresh()
        return pb.DeleteUserResponse(success=True)

    async def change_password(self, request: pb.ChangePasswordRequest, call: GrpcCall) -> pb.ChangePasswordResponse:
        log = self._require_log(self._log)
        if not request.user_id or not request.current_password or not request.new_password:
            raise InvalidRequest("user_id, current_password or new_password is missing")
        if call.principal.account not in (None, request.user_id):
            raise NotAllowed("users can change only their own password")
        if not await _password_matches(log, request.user_id, request.current_password):
            raise NotAuthenticated("the current password is wrong")
        verifiers = await asyncio.to_thread(scram.verifiers, request.new_password, os.urandom(16))
        changed = calls.set_account(request.user_id, verifiers)
        await log.run_audited(changed, call.principal.account, "account.password", request.user_id, {})
        return pb.ChangePasswordResponse(success=True)

    async def list_users(self, request: pb.ListUsersRequest, call: GrpcCall) -> pb.ListUsersResponse:
        return pb.ListUsersResponse(users=await _users(self._accounts(call)))

    async def validate_credentials(
        self, request: pb.ValidateCredentialsRequest, call: GrpcCall
    ) -> pb.ValidateCredentialsResponse:
        log = self._accounts(call)
        if not request.username or not request.password:
            raise InvalidRequest("username or password is missing")
        if not await _password_matches(log, request.username, request.password):
            return pb.ValidateCredentialsResponse(success=False)
        found = [one for one in await _users(log) if one.user_id == request.username]
        return pb.ValidateCredentialsResponse(success=bool(found), user=found[0] if found else None)

    async def get_user_count(self, request: pb.GetUserCountRequest, call: GrpcCall) -> pb.GetUserCountResponse:
        accounts = await self._accounts(call)._run(calls.accounts())
        return pb.GetUserCountResponse(count=len(accounts))

    async def get_event_count(self, request: pb.GetEventCountRequest, call: GrpcCall) -> pb.GetEventCountResponse:
        if not request.boundary:
            raise InvalidRequest("boundary is missing")
        call.require("describe", "topic", request.boundary)
        return pb.GetEventCountResponse(count=await (await self._backend.store(request.boundary)).count())

    def _accounts(self, call: GrpcCall) -> AsyncHeadwater:
        """Return the log for managing accounts. Needs all permissions, since it allows to create an administrator."""
        call.require("all", "log", "*")
        return self._require_log(self._log)

    def _require_log(self, log: AsyncHeadwater | None) -> AsyncHeadwater:
        if log is None:
            raise NotSupported("accounts are not supported with SQLite", hint="Serve a Postgres database.")
        return log

    async def _refresh(self) -> None:
        """Apply changes on this server at once; others apply them when they next read the permissions."""
        if self._authenticator is not None:
            await self._authenticator.refresh()

    def _boundary(self, name: str) -> pb.BoundaryInfo:
        return pb.BoundaryInfo(
            name=name,
            placement=pb.BoundaryPlacementInput(
                backend=self._backend.kind, namespace="headwater" if self._backend.kind == "postgres" else name
            ),
            status=pb.BOUNDARY_LIFECYCLE_STATUS_ACTIVE,
        )


async def _password_matches(log: AsyncHeadwater, name: str, password: str) -> bool:
    kept = await log.run(calls.find_account(name))
    known = kept if kept is not None else scram.decoy_verifiers(name, b"")
    return await asyncio.to_thread(scram.verify_password, password, known)


async def _users(log: AsyncHeadwater) -> list[pb.AdminUser]:
    accounts = await log.run(calls.accounts())
    times = await log.run(calls.account_times())
    given: dict[str, set[tuple[str, str, str]]] = {}
    for one in await log.run(calls.permissions()):
        if not one.prefix:
            given.setdefault(one.account, set()).add((one.action, one.kind, one.name))
    return [_user(name, administrator, given.get(name, set()), times.get(name)) for name, administrator in accounts]


def _user(
    name: str, administrator: bool, given: set[tuple[str, str, str]], created_at: datetime | None
) -> pb.AdminUser:
    operates = all(one in given for one in OPERATIONS_PERMISSIONS)
    return pb.AdminUser(
        user_id=name,
        name=name,
        username=name,
        roles=[ADMIN] * administrator + [OPERATIONS] * operates,
        created_at=created_at,
        updated_at=created_at,
    )


def _no_user(name: str) -> HeadwaterError:
    return ResourceNotFound(f'user "{name}" does not exist', hint="See ListUsers.", detail={"account": name})
