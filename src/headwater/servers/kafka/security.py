"""SASL authentication with the accounts of the log, and the APIs about SCRAM credentials and ACLs."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final

from headwater.access import permissions, scram
from headwater.access.permissions import Permission
from headwater.access.scram import AuthenticationFailed, ScramCredential, ScramExchange, Verifiers
from headwater.calls import access as calls
from headwater.errors import InvalidRequest
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.wire import ErrorCode, Request

# Derives the SCRAM challenge for names without an account, so that it does not reveal whether an account exists.
_SECRET: Final = secrets.token_bytes(32)


class SaslSession:
    """The authentication state and the principal of one connection."""

    def __init__(self, broker: Broker, *, address: str, encrypted: bool) -> None:
        self._broker = broker
        self._address = address
        # PLAIN only over an encrypted connection, or on loopback.
        self._mechanisms = (*scram.MECHANISMS, *(("PLAIN",) if encrypted or broker.settings.loopback else ()))
        self._mechanism: str | None = None
        self._scram: ScramExchange | None = None
        self._credential: ScramCredential | None = None
        self.account: str | None = None
        self.failed = False

    @property
    def admitted(self) -> bool:
        return self.account is not None or not self._broker.settings.authenticate

    def allowed(self, action: str, kind: str, name: str) -> bool:
        if permissions.is_always_denied(action, kind, name):
            return False
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
            return {
                "error_code": ErrorCode.illegal_sasl_state,
                "error_message": "send SaslHandshake first",
                "auth_bytes": b"",
            }
        try:
            token = bytes(request.fields.auth_bytes)
            answer = await (self._plain(token) if self._mechanism == "PLAIN" else self._scram_step(token))
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
            raise AuthenticationFailed("invalid PLAIN message") from None
        if authorized not in ("", name):
            raise AuthenticationFailed("an authorization identity other than the user name is not supported")
        passwords = self._broker.passwords
        async with passwords.turn(self._address, name):
            verifiers = await self._verifiers(name)
            if not await passwords.verify(password, verifiers, address=self._address, name=name):
                raise AuthenticationFailed("wrong user name or password")
        self.account = name
        return b""

    async def _scram_step(self, token: bytes) -> bytes:
        assert self._mechanism is not None
        if self._scram is None or self._credential is None:
            self._scram = ScramExchange(self._mechanism, secrets.token_urlsafe(24))
            name = self._scram.name_of(token)
            # A missing credential looks the same as a missing account.
            known = (await self._verifiers(name)).credential(self._mechanism)
            self._credential = known or scram.decoy_verifiers(name, _SECRET).credential(self._mechanism)
            assert self._credential is not None
            return self._scram.challenge(self._credential)
        # Counted as an attempt like any other password, although the check is cheap here.
        self._broker.passwords.count_attempt(self._address, self._scram.account)
        answer = self._scram.finish(token, self._credential)
        self.account = self._scram.account
        self._broker.passwords.count_success(self._address, self.account)
        return answer

    async def _verifiers(self, name: str) -> Verifiers:
        try:
            verifiers = await self._broker.log.run(calls.find_account(name))
        except InvalidRequest:
            verifiers = None
        return verifiers if verifiers is not None and any(verifiers) else scram.decoy_verifiers(name, _SECRET)


# SCRAM credentials of accounts, for Kafka's tools.

_MECHANISMS: Final = {1: "SCRAM-SHA-256", 2: "SCRAM-SHA-512"}
_MIN_ITERATIONS, _MAX_ITERATIONS = 4096, 16384


class _BadCredential(Exception):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CredentialApis:
    """The APIs about SCRAM credentials. An account that is created here has no permissions until they are granted."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def describe(self, request: Request) -> dict[str, Any]:
        if not request.allowed("describe", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "results": ()}
        known = await self._broker.log.run(calls.credentials())
        asked = [one.name for one in request.fields.users or ()] or [
            name for name, verifiers in known.items() if any(verifiers)
        ]
        results = []
        for name in dict.fromkeys(asked):
            answer: dict[str, Any] = {"user": name, "error_code": ErrorCode.none, "credential_infos": ()}
            verifiers = known.get(name)
            if asked.count(name) > 1:
                answer.update(error_code=ErrorCode.duplicate_resource, error_message=f"user {name} is listed twice")
            elif verifiers is None or not any(verifiers):
                answer.update(
                    error_code=ErrorCode.resource_not_found, error_message=f"user {name} has no SCRAM credential"
                )
            else:
                answer["credential_infos"] = [
                    {"mechanism": number, "iterations": credential.iterations}
                    for number, mechanism in _MECHANISMS.items()
                    if (credential := verifiers.credential(mechanism)) is not None
                ]
            results.append(answer)
        return {"error_code": ErrorCode.none, "results": results}

    async def alter(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        changes = [(one, None) for one in fields.deletions or ()] + [(one, one) for one in fields.upsertions or ()]
        named = [(one.name, one.mechanism) for one, _ in changes]
        results: dict[str, dict[str, Any]] = {}
        for one, upserted in changes:
            answer = results.setdefault(one.name, {"user": one.name, "error_code": ErrorCode.none})
            if answer["error_code"] is not ErrorCode.none:
                continue
            try:
                if not request.allowed("alter", "log", "*"):
                    raise _BadCredential(ErrorCode.cluster_authorization_failed, "not authorized to alter credentials")
                if named.count((one.name, one.mechanism)) > 1:
                    raise _BadCredential(ErrorCode.duplicate_resource, "the credential is listed twice")
                await self._change(one, upserted, request.account)
            except _BadCredential as error:
                answer.update(error_code=error.code, error_message=str(error))
            except InvalidRequest as error:
                answer.update(error_code=ErrorCode.unacceptable_credential, error_message=error.message)
        return {"results": list(results.values())}

    async def _change(self, one: Any, upserted: Any | None, account: str | None) -> None:
        mechanism = _MECHANISMS.get(one.mechanism)
        if mechanism is None:
            raise _BadCredential(
                ErrorCode.unsupported_sasl_mechanism,
                f"unknown mechanism {one.mechanism}: expected 1 (SCRAM-SHA-256) or 2 (SCRAM-SHA-512)",
            )
        credential = None
        if upserted is not None:
            algorithm = scram.MECHANISMS[mechanism]
            size = hashlib.new(algorithm).digest_size
            if not one.name or one.name == permissions.ALL_ACCOUNTS:
                raise _BadCredential(ErrorCode.unacceptable_credential, "invalid user name: it must not be empty or *")
            if not _MIN_ITERATIONS <= one.iterations <= _MAX_ITERATIONS:
                message = f"invalid iterations {one.iterations}: expected {_MIN_ITERATIONS} to {_MAX_ITERATIONS}"
                raise _BadCredential(ErrorCode.unacceptable_credential, message)
            if len(one.salted_password) != size or not 8 <= len(one.salt) <= 64:
                message = f"invalid salt or salted password: expected 8 to 64 bytes and {size} bytes"
                raise _BadCredential(ErrorCode.unacceptable_credential, message)
            salted = bytes(one.salted_password)
            credential = scram.credential_of(algorithm, salted, bytes(one.salt), one.iterations)
        call = calls.set_credential(one.name, mechanism, credential)
        details = {"mechanism": mechanism, "deleted": credential is None}
        if not await self._broker.log.run_audited(call, account, "account.credential", one.name, details):
            raise _BadCredential(ErrorCode.resource_not_found, f"user {one.name} has no {mechanism} credential")


# ACLs: permissions of the log only allow, and apply to every host.

_KINDS: Final = {2: "topic", 3: "consumer", 4: "log", 5: "transaction"}
_ACTIONS: Final = {2: "all", 3: "read", 4: "write", 5: "create", 6: "delete", 7: "alter", 8: "describe"}
# Kafka also has DESCRIBE_CONFIGS, ALTER_CONFIGS and IDEMPOTENT_WRITE, which the log does not distinguish.
_OPERATIONS: Final = {**_ACTIONS, 10: "describe", 11: "alter", 12: "write"}
_NUMBERS: Final = {name: number for table in (_KINDS, _ACTIONS) for number, name in table.items()}
_ANY, _MATCH, _LITERAL, _PREFIXED, _ALLOW = 1, 2, 3, 4, 3


class AclApis:
    """The APIs that describe, create and delete permissions as ACLs."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def describe(self, request: Request) -> dict[str, Any]:
        if not request.allowed("describe", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "resources": ()}
        fields = request.fields
        found: dict[tuple[str, str, bool], list[Permission]] = {}
        for one in await self._broker.log.run(calls.permissions()):
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
                        for one in granted
                    ],
                }
                for (kind, name, prefix), granted in found.items()
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
                    permission = _permission(one)
                    call = calls.allow(permission)
                    await self._broker.log.run_audited(
                        call, request.account, "account.allow", permission.account, permission._asdict()
                    )
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
                    "resource_type": _NUMBERS[permission.kind],
                    "resource_name": permission.name,
                    "pattern_type": _PREFIXED if permission.prefix else _LITERAL,
                    "principal": f"User:{permission.account}",
                    "host": "*",
                    "operation": _NUMBERS[permission.action],
                    "permission_type": _ALLOW,
                }
                for permission in await self._broker.log.run(calls.permissions())
                if _matches(permission, one)
                and await self._broker.log.run_audited(
                    calls.disallow(permission),
                    request.account,
                    "account.disallow",
                    permission.account,
                    permission._asdict(),
                )
            ]
            results.append({"error_code": ErrorCode.none, "matching_acls": gone})
        await self._broker.refresh_access()
        return {"filter_results": results}


def _permission(asked: Any) -> Permission:
    kind = _KINDS.get(asked.resource_type)
    action = _OPERATIONS.get(asked.operation)
    pattern = getattr(asked, "resource_pattern_type", _LITERAL)
    if kind is None or action is None or pattern not in (_LITERAL, _PREFIXED):
        actions = ", ".join(_ACTIONS.values())
        raise InvalidRequest(
            f"invalid ACL: expected a topic, group, transactional id or the cluster, and one of {actions}"
        )
    if asked.permission_type != _ALLOW or asked.host != "*":
        raise InvalidRequest("invalid ACL: only ALLOW for the host * is supported; all else is denied by default")
    principal, _, account = asked.principal.partition(":")
    if principal != "User" or not account:
        raise InvalidRequest("invalid principal: expected User:NAME, or User:* for all users")
    return Permission(account, action, kind, "*" if kind == "log" else asked.resource_name, pattern == _PREFIXED)


def _matches(permission: Permission, wanted: Any) -> bool:
    """Whether a permission matches an ACL filter."""
    name = wanted.resource_name_filter
    pattern = wanted.pattern_type_filter
    if wanted.resource_type_filter not in (_ANY, _NUMBERS[permission.kind]):
        return False
    if wanted.operation != _ANY and _OPERATIONS.get(wanted.operation) != permission.action:
        return False
    if wanted.permission_type not in (_ANY, _ALLOW) or wanted.host_filter not in (None, "*"):
        return False
    if wanted.principal_filter not in (None, f"User:{permission.account}"):
        return False
    if pattern == _MATCH and name is not None:
        return permission.name in (name, "*") or (permission.prefix and name.startswith(permission.name))
    if pattern not in (_ANY, _MATCH, _PREFIXED if permission.prefix else _LITERAL):
        return False
    # The cluster has a single name, which is different in Kafka.
    return name is None or permission.name == name or permission.kind == "log"
