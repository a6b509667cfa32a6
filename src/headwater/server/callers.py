"""Who calls, and what they may do: passwords, API keys and sessions, the same by HTTP and by gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from headwater import access
from headwater.access import Access, Verifiers
from headwater.aio import AsyncHeadwater
from headwater.calls import access as calls
from headwater.errors import HeadwaterError, InvalidRequest, NotAllowed
from headwater.telemetry import ERROR, logger

SESSION: Final = timedelta(hours=24)
# How long what was looked up holds. Whoever is shut out is shut out after as many seconds.
TRUSTED_SECONDS: Final = 5.0
MAX_REMEMBERED: Final = 10_000
PATIENCE_SECONDS: Final = 5.0


class NotAuthenticated(HeadwaterError):
    """Nobody known calls: send the name and password of an account, or an API key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may do something. Without authentication it is everybody, who may do everything."""

    account: str | None
    _rights: Access | None

    def may(self, action: str, kind: str, name: str) -> bool:
        if access.is_kept_from_all(action, kind, name):
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

    def __init__(self, log: AsyncHeadwater, *, authenticate: bool) -> None:
        self._log = log
        self._authenticate = authenticate
        self._rights = Access((), ())
        # Makes what is remembered of a password useless elsewhere, and the challenge for a name that nobody has.
        self._secret = secrets.token_bytes(32)
        # What was shown, hashed -> whose it is and until when that holds.
        self._remembered: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    @asynccontextmanager
    async def kept_current(self) -> AsyncIterator[None]:
        """Rights are read now, and again and again until the block is left."""
        if not self._authenticate:
            yield
            return
        await self.refresh()
        task = asyncio.create_task(self._refresh_for_ever())
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

    def named(self, account: str) -> Caller:
        """Somebody who is known from before, as by a call that goes on."""
        return Caller(account, self._rights if self._authenticate else None)

    async def by_password(self, name: str, password: str) -> Caller:
        """Who comes with a name and a password."""
        if not self._authenticate:
            return Caller(name, None)
        shown = hmac.digest(self._secret, b"\0".join((name.encode(), password.encode())), "sha256")
        if self._recall(shown) is None:
            # Made slow on purpose, so not among what others wait for.
            if not await asyncio.to_thread(access.password_fits, password, await self._verifiers(name)):
                raise NotAuthenticated("the name or the password is wrong")
            self._remember(shown, name)
        return self.named(name)

    async def by_key(self, key: str) -> Caller:
        """Who comes with an API key, or with a session."""
        if not self._authenticate:
            return Caller(None, None)
        hashed = access.key_hash(key)
        account = self._recall(hashed)
        if account is None:
            account = await self._log.run(calls.account_of_key(hashed), patience_seconds=PATIENCE_SECONDS)
            if account is None:
                raise NotAuthenticated("the key is not known, or has run out")
            self._remember(hashed, account)
        return self.named(account)

    def forget(self, hash_prefix: str) -> None:
        """A key was taken back here: no longer trust what was remembered of it. Its hash begins so, in hex."""
        for shown in [shown for shown in self._remembered if shown.hex().startswith(hash_prefix)]:
            del self._remembered[shown]

    async def open_session(self, caller: Caller) -> str | None:
        """A key for a while, for who came with a password; None where nobody has to."""
        if not self._authenticate or caller.account is None:
            return None
        key = access.key_of(secrets.token_bytes(32))
        call = calls.create_api_key(access.key_hash(key), caller.account, expires_in=SESSION, session=True)
        await self._log.run(call, patience_seconds=PATIENCE_SECONDS)
        return key

    async def _verifiers(self, name: str) -> Verifiers:
        try:
            kept = await self._log.run(calls.find_account(name), patience_seconds=PATIENCE_SECONDS)
        except InvalidRequest:
            kept = None
        return kept if kept is not None else access.stranger(name, hashlib.sha256(self._secret).digest())

    def _recall(self, shown: bytes) -> str | None:
        account, until = self._remembered.get(shown, ("", 0.0))
        return account if time.monotonic() < until else None

    def _remember(self, shown: bytes, account: str) -> None:
        self._remembered[shown] = (account, time.monotonic() + TRUSTED_SECONDS)
        self._remembered.move_to_end(shown)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
