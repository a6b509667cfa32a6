"""Who calls, and what they may do: passwords, API keys and sessions, the same by HTTP and by gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from headwater.access import permissions as access_permissions
from headwater.access.password_checks import PasswordChecks, TooManyPasswords
from headwater.access.permissions import Access, Verifiers
from headwater.aio import AsyncHeadwater
from headwater.calls import access as calls
from headwater.errors import HeadwaterError, InvalidRequest, NotAllowed
from headwater.observability.metrics import ERROR, logger
from headwater.supervisor import supervise

SESSION: Final = timedelta(hours=24)
# How long what was looked up holds. Whoever is shut out is shut out after as many seconds.
TRUSTED_SECONDS: Final = 5.0
MAX_REMEMBERED: Final = 10_000
PATIENCE_SECONDS: Final = 5.0


class NotAuthenticated(HeadwaterError):
    """Nobody known calls: send the name and password of an account, or an API key."""


class AccountExists(HeadwaterError):
    """An account has that name already."""


class TooManyRequests(HeadwaterError):
    """More than one caller may send: slow down, and try again."""


class Credential:
    """What somebody came with: a key, or a password as it is kept. `holds` until it is found to be taken back."""

    __slots__ = ("__weakref__", "account", "holds", "key_hash", "verifiers")

    def __init__(self, account: str, *, key_hash: bytes | None = None, verifiers: Verifiers | None = None) -> None:
        self.account = account
        self.key_hash = key_hash
        self.verifiers = verifiers
        self.holds = True


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may do something. Without authentication it is everybody, who may do everything."""

    account: str | None
    _rights: Access | None
    credential: Credential | None = None

    def may(self, action: str, kind: str, name: str) -> bool:
        if access_permissions.is_kept_from_all(action, kind, name):
            return False
        if self._rights is None:
            return True
        return self.account is not None and self._rights.allows(self.account, action, kind, name)

    def need(self, action: str, kind: str, name: str) -> None:
        """Raise NotAllowed, unless the caller may do this."""
        if not self.may(action, kind, name):
            of = f"the {kind}" if kind == "log" else f"the {kind} {name}"
            raise NotAllowed(
                f"{self.account} may not {action} {of}",
                hint=f"An administrator allows it: headwater account allow {self.account} {action} {kind} '{name}'",
                detail={"account": self.account, "action": action, "kind": kind, "name": name},
            )


class Callers:
    """Finds out who calls. Holds nothing but what it has just looked up."""

    def __init__(self, log: AsyncHeadwater, *, authenticate: bool, passwords: PasswordChecks | None = None) -> None:
        self._log = log
        # Shared by all protocols of the process, where there are several.
        self._passwords = passwords or PasswordChecks()
        self._authenticate = authenticate
        self._rights = Access((), ())
        # Makes what is remembered of a password useless elsewhere, and the challenge for a name that nobody has.
        self._secret = secrets.token_bytes(32)
        # What was shown, hashed -> what it is and until when that is trusted.
        self._remembered: OrderedDict[bytes, tuple[Credential, float]] = OrderedDict()
        # What those came with whose calls go on.
        self._watched: weakref.WeakSet[Credential] = weakref.WeakSet()

    @asynccontextmanager
    async def kept_current(self) -> AsyncIterator[None]:
        """Rights are read now, and again and again until the block is left."""
        if not self._authenticate:
            yield
            return
        await self.refresh()
        task = supervise("rights of accounts", self._refresh_for_ever)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def refresh(self) -> None:
        """Read accounts and rights now."""
        accounts = await self._log.run(calls.accounts(), patience_seconds=PATIENCE_SECONDS)
        permissions = await self._log.run(calls.permissions(), patience_seconds=PATIENCE_SECONDS)
        self._rights = Access((name for name, administrator in accounts if administrator), permissions)
        await self._look_at_watched()

    async def _look_at_watched(self) -> None:
        keys = {one.key_hash: one for one in self._watched if one.holds and one.key_hash is not None}
        if keys:
            living = await self._log.run(calls.living_keys(list(keys)), patience_seconds=PATIENCE_SECONDS)
            for hashed, one in keys.items():
                one.holds = hashed in living
        for one in [one for one in self._watched if one.holds and one.key_hash is None]:
            kept = await self._log.run(calls.find_account(one.account), patience_seconds=PATIENCE_SECONDS)
            one.holds = kept == one.verifiers

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TRUSTED_SECONDS)
            try:
                await self.refresh()
            except HeadwaterError as error:
                # What was known stays in force; the next round tries again.
                logger.warning("rights could not be read", extra={ERROR: error.message})

    def everybody(self) -> Caller:
        """Somebody who said nothing of who they are."""
        if self._authenticate:
            raise NotAuthenticated(
                "this log is for accounts only", hint="Send the name and password of an account, or an API key."
            )
        return Caller(None, None)

    def watch(self, caller: Caller) -> None:
        """The call of this one goes on: look again and again whether what it came with still holds."""
        if caller.credential is not None:
            self._watched.add(caller.credential)

    def still(self, caller: Caller) -> Caller:
        """Somebody who is watched, with the rights of now; NotAuthenticated if what they came with was taken back."""
        if not self._authenticate:
            return caller
        if caller.credential is None or not caller.credential.holds:
            raise NotAuthenticated("the key or the password of this call holds no longer")
        return self._holder(caller.credential)

    def _holder(self, credential: Credential) -> Caller:
        return Caller(credential.account, self._rights, credential)

    async def by_password(self, name: str, password: str, *, address: str) -> Caller:
        """Who comes with a name and a password, unless too many wrong ones came from that address."""
        if not self._authenticate:
            return Caller(name, None)
        shown = hmac.digest(self._secret, b"\0".join((name.encode(), password.encode())), "sha256")
        credential = self._recall(shown)
        if credential is None:
            try:
                async with self._passwords.turn(address, name):
                    # Others who sent the same may have waited in front.
                    credential = self._recall(shown) or await self._checked(name, password, address)
                    self._remember(shown, credential)
            except TooManyPasswords as error:
                raise TooManyRequests(error.message, hint=error.hint) from None
        return self._holder(credential)

    async def _checked(self, name: str, password: str, address: str) -> Credential:
        kept = await self._verifiers(name)
        if not await self._passwords.fits(password, kept, address=address, name=name):
            raise NotAuthenticated("the name or the password is wrong")
        return Credential(name, verifiers=kept)

    async def by_key(self, key: str) -> Caller:
        """Who comes with an API key, or with a session."""
        if not self._authenticate:
            return Caller(None, None)
        hashed = access_permissions.key_hash(key)
        credential = self._recall(hashed)
        if credential is None:
            account = await self._log.run(calls.account_of_key(hashed), patience_seconds=PATIENCE_SECONDS)
            if account is None:
                raise NotAuthenticated("the key is not known, or has run out")
            credential = Credential(account, key_hash=hashed)
            self._remember(hashed, credential)
        return self._holder(credential)

    def forget(self, hash_prefix: str) -> None:
        """A key was taken back here: no longer trust what was remembered of it. Its hash begins so, in hex."""
        for shown in [shown for shown in self._remembered if shown.hex().startswith(hash_prefix)]:
            del self._remembered[shown]
        for one in self._watched:
            if one.key_hash is not None and one.key_hash.hex().startswith(hash_prefix):
                one.holds = False

    async def open_session(self, caller: Caller) -> str | None:
        """A key for a while, for who came with a password; None where nobody has to."""
        if not self._authenticate or caller.account is None:
            return None
        key = access_permissions.key_of(secrets.token_bytes(32))
        call = calls.create_api_key(access_permissions.key_hash(key), caller.account, expires_in=SESSION, session=True)
        await self._log.run(call, patience_seconds=PATIENCE_SECONDS)
        return key

    async def _verifiers(self, name: str) -> Verifiers:
        try:
            kept = await self._log.run(calls.find_account(name), patience_seconds=PATIENCE_SECONDS)
        except InvalidRequest:
            kept = None
        return kept if kept is not None else access_permissions.stranger(name, hashlib.sha256(self._secret).digest())

    def _recall(self, shown: bytes) -> Credential | None:
        credential, until = self._remembered.get(shown, (None, 0.0))
        return credential if time.monotonic() < until else None

    def _remember(self, shown: bytes, credential: Credential) -> None:
        self._remembered[shown] = (credential, time.monotonic() + TRUSTED_SECONDS)
        self._remembered.move_to_end(shown)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
