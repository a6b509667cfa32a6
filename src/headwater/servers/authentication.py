"""Authentication of HTTP and gRPC requests: passwords, API keys and sessions.

`Authenticator` turns what a request presents into a `Principal`, which knows its permissions. Verified credentials are
cached for TRUSTED_SECONDS, and permissions are re-read at the same interval: a revoked key, a changed password or a
withdrawn permission takes effect within that time. Long streams register their principal with `watch` and call
`revalidate` to notice it. Kafka authenticates by SASL instead (servers/kafka/security.py), with the same accounts.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from headwater.access import permissions as access_permissions
from headwater.access import scram
from headwater.access.password_checks import PasswordChecks, TooManyPasswordAttempts
from headwater.access.permissions import AccessPolicy
from headwater.access.scram import Verifiers
from headwater.aio import AsyncHeadwater
from headwater.bounded_dict import BoundedDict
from headwater.calls import access as calls
from headwater.errors import HeadwaterError, InvalidRequest, NotAllowed
from headwater.observability.metrics import ERROR, logger
from headwater.servers.options import REQUEST_PATIENCE_SECONDS
from headwater.supervisor import supervise

SESSION: Final = timedelta(hours=24)
# How long a verified credential is cached; a revoked one is rejected after at most this time.
TRUSTED_SECONDS: Final = 5.0
MAX_CACHED: Final = 10_000


class NotAuthenticated(HeadwaterError):
    """Authentication is required: send the name and password of an account, or an API key."""


class AccountExists(HeadwaterError):
    """An account with this name already exists."""


class TooManyRequests(HeadwaterError):
    """The rate limit is exceeded: slow down and retry."""


class Credential:
    """The key or password (as its verifiers) of an authenticated principal. `is_valid` until found to be revoked."""

    __slots__ = ("__weakref__", "account", "is_valid", "key_hash", "verifiers")

    def __init__(self, account: str, *, key_hash: bytes | None = None, verifiers: Verifiers | None = None) -> None:
        self.account = account
        self.key_hash = key_hash
        self.verifiers = verifiers
        self.is_valid = True


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated principal and its permissions; unrestricted if authentication is off."""

    account: str | None
    _policy: AccessPolicy | None
    credential: Credential | None = None

    def may(self, action: str, kind: str, name: str) -> bool:
        if access_permissions.is_always_denied(action, kind, name):
            return False
        if self._policy is None:
            return True
        return self.account is not None and self._policy.allows(self.account, action, kind, name)

    def need(self, action: str, kind: str, name: str) -> None:
        """Raise NotAllowed unless the principal has this permission."""
        if not self.may(action, kind, name):
            of = f"the {kind}" if kind == "log" else f"the {kind} {name}"
            raise NotAllowed(
                f"{self.account} may not {action} {of}",
                hint=f"An administrator can grant it: headwater account allow {self.account} {action} {kind} '{name}'",
                detail={"account": self.account, "action": action, "kind": kind, "name": name},
            )


class Authenticator:
    """Authenticates the requests of one process. Its only state is a short-lived cache."""

    def __init__(self, log: AsyncHeadwater, *, authenticate: bool, passwords: PasswordChecks | None = None) -> None:
        self._log = log.with_patience(REQUEST_PATIENCE_SECONDS)
        # Shared by all protocols of the process.
        self._passwords = passwords or PasswordChecks()
        self._authenticate = authenticate
        self._policy = AccessPolicy((), ())
        # Keys the cached password hashes, and the decoy verifiers of accounts that do not exist.
        self._secret = secrets.token_bytes(32)
        # Hash of what was presented -> (credential, end of its cache time).
        self._cached: BoundedDict[bytes, tuple[Credential, float]] = BoundedDict(MAX_CACHED)
        # Credentials of streams in progress.
        self._watched: weakref.WeakSet[Credential] = weakref.WeakSet()

    @asynccontextmanager
    async def keep_current(self) -> AsyncIterator[None]:
        """Read the permissions now and regularly until the block is left."""
        if not self._authenticate:
            yield
            return
        await self.refresh()
        task = supervise("account permissions", self._refresh_forever)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def refresh(self) -> None:
        """Read accounts and permissions now."""
        accounts = await self._log.run(calls.accounts())
        permissions = await self._log.run(calls.permissions())
        self._policy = AccessPolicy((name for name, administrator in accounts if administrator), permissions)
        await self._revalidate_watched()

    async def _revalidate_watched(self) -> None:
        keys = {one.key_hash: one for one in self._watched if one.is_valid and one.key_hash is not None}
        if keys:
            valid = await self._log.run(calls.valid_keys(list(keys)))
            for hashed, one in keys.items():
                one.is_valid = hashed in valid
        for one in [one for one in self._watched if one.is_valid and one.key_hash is None]:
            stored = await self._log.run(calls.find_account(one.account))
            one.is_valid = stored == one.verifiers

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(TRUSTED_SECONDS)
            try:
                await self.refresh()
            except HeadwaterError as error:
                # The last known permissions stay in force until the next attempt.
                logger.warning("account permissions could not be read", extra={ERROR: error.message})

    def anonymous(self) -> Principal:
        """The principal of a request without credentials; NotAuthenticated if authentication is on."""
        if self._authenticate:
            raise NotAuthenticated(
                "authentication required", hint="Send the name and password of an account, or an API key."
            )
        return Principal(None, None)

    def watch(self, principal: Principal) -> None:
        """Revalidate the credential of this principal regularly, for as long as the credential object lives."""
        if principal.credential is not None:
            self._watched.add(principal.credential)

    def revalidate(self, principal: Principal) -> Principal:
        """A watched principal with its current permissions; NotAuthenticated if its credential was revoked."""
        if not self._authenticate:
            return principal
        if principal.credential is None or not principal.credential.is_valid:
            raise NotAuthenticated("the API key was revoked or has expired, or the password was changed")
        return self._principal(principal.credential)

    def _principal(self, credential: Credential) -> Principal:
        return Principal(credential.account, self._policy, credential)

    async def by_password(self, name: str, password: str, *, address: str) -> Principal:
        """Authenticate by account name and password. TooManyRequests after too many wrong ones from the address."""
        if not self._authenticate:
            return Principal(name, None)
        presented = hmac.digest(self._secret, b"\0".join((name.encode(), password.encode())), "sha256")
        credential = self._find_cached(presented)
        if credential is None:
            try:
                async with self._passwords.turn(address, name):
                    # Another request with the same password may have verified it meanwhile.
                    credential = self._find_cached(presented) or await self._check(name, password, address)
                    self._cache(presented, credential)
            except TooManyPasswordAttempts as error:
                raise TooManyRequests(error.message, hint=error.hint) from None
        return self._principal(credential)

    async def _check(self, name: str, password: str, address: str) -> Credential:
        stored = await self._verifiers(name)
        if not await self._passwords.verify(password, stored, address=address, name=name):
            raise NotAuthenticated("wrong account name or password")
        return Credential(name, verifiers=stored)

    async def by_key(self, key: str) -> Principal:
        """Authenticate by an API key or a session key."""
        if not self._authenticate:
            return Principal(None, None)
        hashed = access_permissions.hash_api_key(key)
        credential = self._find_cached(hashed)
        if credential is None:
            account = await self._log.run(calls.account_of_key(hashed))
            if account is None:
                raise NotAuthenticated("the API key or session is unknown or has expired")
            credential = Credential(account, key_hash=hashed)
            self._cache(hashed, credential)
        return self._principal(credential)

    def forget(self, hash_prefix: str) -> None:
        """Drop a revoked key from the cache, by the beginning of its hash in hex."""
        for presented in [presented for presented in self._cached if presented.hex().startswith(hash_prefix)]:
            del self._cached[presented]
        for one in self._watched:
            if one.key_hash is not None and one.key_hash.hex().startswith(hash_prefix):
                one.is_valid = False

    async def open_session(self, principal: Principal) -> str | None:
        """Create a session key for a principal; None if authentication is off."""
        if not self._authenticate or principal.account is None:
            return None
        key = access_permissions.encode_api_key(secrets.token_bytes(32))
        call = calls.create_api_key(
            access_permissions.hash_api_key(key), principal.account, expires_in=SESSION, session=True
        )
        await self._log.run(call)
        return key

    async def _verifiers(self, name: str) -> Verifiers:
        try:
            stored = await self._log.run(calls.find_account(name))
        except InvalidRequest:
            stored = None
        return stored if stored is not None else scram.decoy_verifiers(name, hashlib.sha256(self._secret).digest())

    def _find_cached(self, presented: bytes) -> Credential | None:
        credential, until = self._cached.get(presented, (None, 0.0))
        return credential if time.monotonic() < until else None

    def _cache(self, presented: bytes, credential: Credential) -> None:
        self._cached[presented] = (credential, time.monotonic() + TRUSTED_SECONDS)
