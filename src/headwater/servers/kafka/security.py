"""Who a connection belongs to: SASL, with the accounts of the log. And what they may do, as ACLs show it."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final

from headwater.access import permissions
from headwater.access.permissions import AuthenticationFailed, Credential, Permission, Scram, Verifiers
from headwater.calls import access as calls
from headwater.errors import InvalidRequest
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.wire import ErrorCode, Request

HANDSHAKE, AUTHENTICATE = 17, 36
# Makes the challenge for a name that nobody has; another after each start, which tells nothing either.
_SECRET: Final = secrets.token_bytes(32)


class Session:
    """One connection: whose it is, and where it stands in telling so."""

    def __init__(self, broker: Broker, *, address: str, encrypted: bool) -> None:
        self._broker = broker
        self._address = address
        # A password in clear goes over an encrypted connection, or within one machine.
        self._mechanisms = (*permissions.MECHANISMS, *(("PLAIN",) if encrypted or broker.settings.loopback else ()))
        self._mechanism: str | None = None
        self._scram: Scram | None = None
        self._kept: Credential | None = None
        self.account: str | None = None
        self.failed = False

    @property
    def admitted(self) -> bool:
        return self.account is not None or not self._broker.settings.authenticate

    def allowed(self, action: str, kind: str, name: str) -> bool:
        if permissions.is_kept_from_all(action, kind, name):
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
        passwords = self._broker.passwords
        async with passwords.turn(self._address, name):
            kept = await self._verifiers(name)
            if not await passwords.fits(password, kept, address=self._address, name=name):
                raise AuthenticationFailed("the name or the password is wrong")
        self.account = name
        return b""

    async def _next_of_scram(self, token: bytes) -> bytes:
        assert self._mechanism is not None
        if self._scram is None or self._kept is None:
            self._scram = Scram(self._mechanism, secrets.token_urlsafe(24))
            name = self._scram.name_of(token)
            # One that the account does not have looks like that of an account that is not there.
            known = (await self._verifiers(name)).credential(self._mechanism)
            self._kept = known or permissions.stranger(name, _SECRET).credential(self._mechanism)
            assert self._kept is not None
            return self._scram.challenge(self._kept)
        # Cheap to check here, but a wrong proof is a wrong password like any other.
        self._broker.passwords.count_try(self._address, self._scram.account)
        answer = self._scram.finish(token, self._kept)
        self.account = self._scram.account
        self._broker.passwords.count_right(self._address, self.account)
        return answer

    async def _verifiers(self, name: str) -> Verifiers:
        try:
            kept = await self._broker.log.run(calls.find_account(name), patience_seconds=5)
        except InvalidRequest:
            kept = None
        return kept if kept is not None and any(kept) else permissions.stranger(name, _SECRET)


# Passwords of accounts, as Kafka's tools look at them and change them.

_MECHANISMS: Final = {1: "SCRAM-SHA-256", 2: "SCRAM-SHA-512"}
_LEAST_ITERATIONS, _MOST_ITERATIONS = 4096, 16384


class _BadCredential(Exception):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Credentials:
    """The APIs about SCRAM credentials. An account that is made here may do nothing before somebody allows it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def describe(self, request: Request) -> dict[str, Any]:
        if not request.allowed("describe", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "results": ()}
        known = await self._broker.log.run(calls.credentials(), patience_seconds=5)
        asked = [one.name for one in request.fields.users or ()] or [name for name, kept in known.items() if any(kept)]
        results = []
        for name in dict.fromkeys(asked):
            answer: dict[str, Any] = {"user": name, "error_code": ErrorCode.none, "credential_infos": ()}
            kept = known.get(name)
            if asked.count(name) > 1:
                answer.update(error_code=ErrorCode.duplicate_resource, error_message=f"{name} is named twice")
            elif kept is None or not any(kept):
                answer.update(error_code=ErrorCode.resource_not_found, error_message=f"{name} has no credential")
            else:
                answer["credential_infos"] = [
                    {"mechanism": number, "iterations": credential.iterations}
                    for number, mechanism in _MECHANISMS.items()
                    if (credential := kept.credential(mechanism)) is not None
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
                    raise _BadCredential(ErrorCode.cluster_authorization_failed, "credentials may not be changed")
                if named.count((one.name, one.mechanism)) > 1:
                    raise _BadCredential(ErrorCode.duplicate_resource, "the credential is named twice")
                await self._change(one, upserted, request.account)
            except _BadCredential as error:
                answer.update(error_code=error.code, error_message=str(error))
            except InvalidRequest as error:
                answer.update(error_code=ErrorCode.unacceptable_credential, error_message=error.message)
        return {"results": list(results.values())}

    async def _change(self, one: Any, upserted: Any | None, account: str | None) -> None:
        mechanism = _MECHANISMS.get(one.mechanism)
        if mechanism is None:
            raise _BadCredential(ErrorCode.unsupported_sasl_mechanism, "the mechanisms are 1 and 2: SHA-256, SHA-512")
        credential = None
        if upserted is not None:
            algorithm = permissions.MECHANISMS[mechanism]
            size = hashlib.new(algorithm).digest_size
            if not one.name or one.name == permissions.EVERYBODY:
                raise _BadCredential(ErrorCode.unacceptable_credential, "an account has a name, other than *")
            if not _LEAST_ITERATIONS <= one.iterations <= _MOST_ITERATIONS:
                message = f"iterations are {_LEAST_ITERATIONS} to {_MOST_ITERATIONS}"
                raise _BadCredential(ErrorCode.unacceptable_credential, message)
            if len(one.salted_password) != size or not 8 <= len(one.salt) <= 64:
                message = f"a salt has 8 to 64 bytes, and a salted password {size}"
                raise _BadCredential(ErrorCode.unacceptable_credential, message)
            salted = bytes(one.salted_password)
            credential = permissions.credential_of(algorithm, salted, bytes(one.salt), one.iterations)
        call = calls.set_credential(one.name, mechanism, credential)
        told = {"mechanism": mechanism, "deleted": credential is None}
        if not await self._broker.log.run_audited(call, account, "account.credential", one.name, told):
            raise _BadCredential(ErrorCode.resource_not_found, f"{one.name} has no credential of that mechanism")


# ACLs: only what is allowed is ever said, for every host.

_KINDS: Final = {2: "topic", 3: "group", 4: "log", 5: "transaction"}
_ACTIONS: Final = {2: "all", 3: "read", 4: "write", 5: "create", 6: "delete", 7: "alter", 8: "describe"}
# With what Kafka tells apart and the log does not: DESCRIBE_CONFIGS, ALTER_CONFIGS and IDEMPOTENT_WRITE.
_MEANT: Final = {**_ACTIONS, 10: "describe", 11: "alter", 12: "write"}
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
                    given = _permission(one)
                    call = calls.allow(given)
                    await self._broker.log.run_audited(
                        call, request.account, "account.allow", given.account, given._asdict()
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
                    "resource_type": _NUMBERS[given.kind],
                    "resource_name": given.name,
                    "pattern_type": _PREFIXED if given.prefix else _LITERAL,
                    "principal": f"User:{given.account}",
                    "host": "*",
                    "operation": _NUMBERS[given.action],
                    "permission_type": _ALLOW,
                }
                for given in await self._broker.log.run(calls.permissions(), patience_seconds=5)
                if _matches(given, one)
                and await self._broker.log.run_audited(
                    calls.disallow(given), request.account, "account.disallow", given.account, given._asdict()
                )
            ]
            results.append({"error_code": ErrorCode.none, "matching_acls": gone})
        await self._broker.refresh_access()
        return {"filter_results": results}


def _permission(asked: Any) -> Permission:
    kind = _KINDS.get(asked.resource_type)
    action = _MEANT.get(asked.operation)
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
    if wanted.resource_type_filter not in (_ANY, _NUMBERS[given.kind]):
        return False
    if wanted.operation != _ANY and _MEANT.get(wanted.operation) != given.action:
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
