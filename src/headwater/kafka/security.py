"""Who a connection belongs to: SASL, with the accounts of the log. And what they may do, as ACLs show it."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

from headwater import access
from headwater.access import AuthenticationFailed, Permission, Scram, Verifiers
from headwater.calls import access as calls
from headwater.errors import InvalidRequest
from headwater.kafka.broker import Broker
from headwater.kafka.wire import ErrorCode, Request

HANDSHAKE, AUTHENTICATE = 17, 36
# Makes the challenge for a name that nobody has; another after each start, which tells nothing either.
_SECRET: Final = secrets.token_bytes(32)


class Session:
    """One connection: whose it is, and where it stands in telling so."""

    def __init__(self, broker: Broker, *, encrypted: bool) -> None:
        self._broker = broker
        # A password in clear goes over an encrypted connection, or within one machine.
        self._mechanisms = (*access.MECHANISMS, *(("PLAIN",) if encrypted or broker.settings.loopback else ()))
        self._mechanism: str | None = None
        self._scram: Scram | None = None
        self._kept: Verifiers | None = None
        self.account: str | None = None
        self.failed = False

    @property
    def admitted(self) -> bool:
        return self.account is not None or not self._broker.settings.authenticate

    def allowed(self, action: str, kind: str, name: str) -> bool:
        if not self._broker.settings.authenticate:
            return True
        return self.account is not None and self._broker.access.allows(self.account, action, kind, name)

    async def handshake(self, request: Request) -> dict[str, Any]:
        if self.account is not None or request.fields.mechanism not in self._mechanisms:
            code = ErrorCode.illegal_sasl_state if self.account else ErrorCode.unsupported_sasl_mechanism
            return {"error_code": code, "mechanisms": self._mechanisms}
        self._mechanism = request.fields.mechanism
        return {"error_code": ErrorCode.none, "mechanisms": self._mechanisms}

    async def authenticate(self, request: Request) -> dict[str, Any]:
        if self._mechanism is None or self.account is not None:
            self.failed = True
            return {"error_code": ErrorCode.illegal_sasl_state, "error_message": "shake hands first", "auth_bytes": b""}
        try:
            token = bytes(request.fields.auth_bytes)
            answer = await (self._plain(token) if self._mechanism == "PLAIN" else self._next_of_scram(token))
        except AuthenticationFailed as failure:
            self.failed = True
            return {
                "error_code": ErrorCode.sasl_authentication_failed,
                "error_message": str(failure),
                "auth_bytes": b"",
            }
        return {"error_code": ErrorCode.none, "auth_bytes": answer, "session_lifetime": 0}

    async def _plain(self, token: bytes) -> bytes:
        try:
            authorized, name, password = token.decode().split("\x00")
        except ValueError:
            raise AuthenticationFailed("the message is not PLAIN") from None
        if authorized not in ("", name):
            raise AuthenticationFailed("acting for others is not offered")
        # Made slow on purpose, so not among what other connections wait for.
        if not await asyncio.to_thread(access.password_fits, password, await self._verifiers(name)):
            raise AuthenticationFailed("the name or the password is wrong")
        self.account = name
        return b""

    async def _next_of_scram(self, token: bytes) -> bytes:
        assert self._mechanism is not None
        if self._scram is None or self._kept is None:
            self._scram = Scram(self._mechanism, secrets.token_urlsafe(24))
            self._kept = await self._verifiers(self._scram.name_of(token))
            return self._scram.challenge(self._kept)
        answer = self._scram.finish(token, self._kept)
        self.account = self._scram.account
        return answer

    async def _verifiers(self, name: str) -> Verifiers:
        try:
            kept = await self._broker.log.run(calls.find_account(name), patience_seconds=5)
        except InvalidRequest:
            kept = None
        return kept if kept is not None else access.stranger(name, _SECRET)


# ACLs: only what is allowed is ever said, for every host.

_KINDS: Final = {2: "topic", 3: "group", 4: "log", 5: "transaction"}
_ACTIONS: Final = {2: "all", 3: "read", 4: "write", 5: "create", 6: "delete", 7: "alter", 8: "describe"}
_NUMBERS: Final = {name: number for table in (_KINDS, _ACTIONS) for number, name in table.items()}
_ANY, _MATCH, _LITERAL, _PREFIXED, _ALLOW = 1, 2, 3, 4, 3


class Acls:
    """The APIs that look at permissions and change them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def describe(self, request: Request) -> dict[str, Any]:
        if not request.allowed("describe", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "resources": ()}
        fields = request.fields
        found: dict[tuple[str, str, bool], list[Permission]] = {}
        for one in await self._broker.log.run(calls.permissions(), patience_seconds=5):
            if _matches(one, fields):
                found.setdefault((one.kind, one.name, one.prefix), []).append(one)
        return {
            "error_code": ErrorCode.none,
            "resources": [
                {
                    "resource_type": _NUMBERS[kind],
                    "resource_name": name,
                    "pattern_type": _PREFIXED if prefix else _LITERAL,
                    "acls": [
                        {
                            "principal": f"User:{one.account}",
                            "host": "*",
                            "operation": _NUMBERS[one.action],
                            "permission_type": _ALLOW,
                        }
                        for one in given
                    ],
                }
                for (kind, name, prefix), given in found.items()
            ],
        }

    async def create(self, request: Request) -> dict[str, Any]:
        results = []
        for one in request.fields.creations or ():
            code, message = ErrorCode.none, None
            try:
                if not request.allowed("alter", "log", "*"):
                    code = ErrorCode.cluster_authorization_failed
                else:
                    await self._broker.log.run(calls.allow(_permission(one)), patience_seconds=5)
            except InvalidRequest as error:
                code, message = ErrorCode.invalid_request, error.message
            results.append({"error_code": code, "error_message": message})
        await self._broker.refresh_access()
        return {"results": results}

    async def delete(self, request: Request) -> dict[str, Any]:
        results = []
        for one in request.fields.filters or ():
            if not request.allowed("alter", "log", "*"):
                results.append({"error_code": ErrorCode.cluster_authorization_failed, "matching_acls": ()})
                continue
            gone = [
                {
                    "error_code": ErrorCode.none,
                    "resource_type": _NUMBERS[given.kind],
                    "resource_name": given.name,
                    "pattern_type": _PREFIXED if given.prefix else _LITERAL,
                    "principal": f"User:{given.account}",
                    "host": "*",
                    "operation": _NUMBERS[given.action],
                    "permission_type": _ALLOW,
                }
                for given in await self._broker.log.run(calls.permissions(), patience_seconds=5)
                if _matches(given, one) and await self._broker.log.run(calls.disallow(given), patience_seconds=5)
            ]
            results.append({"error_code": ErrorCode.none, "matching_acls": gone})
        await self._broker.refresh_access()
        return {"filter_results": results}


def _permission(asked: Any) -> Permission:
    kind = _KINDS.get(asked.resource_type)
    action = _ACTIONS.get(asked.operation)
    pattern = getattr(asked, "resource_pattern_type", _LITERAL)
    if kind is None or action is None or pattern not in (_LITERAL, _PREFIXED):
        actions = ", ".join(_ACTIONS.values())
        raise InvalidRequest(f"permissions are for topics, groups, transactional ids and the cluster: {actions}")
    if asked.permission_type != _ALLOW or asked.host != "*":
        raise InvalidRequest("what is not allowed is denied: only ALLOW for the host * can be said")
    principal, _, account = asked.principal.partition(":")
    if principal != "User" or not account:
        raise InvalidRequest("a principal is User:NAME, or User:* for everybody")
    return Permission(account, action, kind, "*" if kind == "log" else asked.resource_name, pattern == _PREFIXED)


def _matches(given: Permission, wanted: Any) -> bool:
    """Whether a permission is among those that a filter describes."""
    name = wanted.resource_name_filter
    pattern = wanted.pattern_type_filter
    if wanted.resource_type_filter not in (_ANY, _NUMBERS[given.kind]) or wanted.operation not in (
        _ANY,
        _NUMBERS[given.action],
    ):
        return False
    if wanted.permission_type not in (_ANY, _ALLOW) or wanted.host_filter not in (None, "*"):
        return False
    if wanted.principal_filter not in (None, f"User:{given.account}"):
        return False
    if pattern == _MATCH and name is not None:
        return given.name in (name, "*") or (given.prefix and name.startswith(given.name))
    if pattern not in (_ANY, _MATCH, _PREFIXED if given.prefix else _LITERAL):
        return False
    # The cluster has one name, which Kafka knows by another.
    return name is None or given.name == name or given.kind == "log"
