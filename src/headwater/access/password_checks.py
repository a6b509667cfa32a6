"""Password checks of one process, shared by every protocol: bounded, fair, and in threads of their own.

A check takes a few hundred thousand rounds of a hash, on purpose. Threads that nothing else uses run them, so a flood
of wrong passwords delays no other work. Checks wait in lanes, one lane for each address and one check of a lane at a
time: an address that sends many delays itself. An account that signed in from an address before has a lane and a limit
of its own there, so wrong passwords of others at that address do not lock it out.
Invariants: at most MAX_WAITING wait, more are refused at once. An address gets WRONG_PASSWORDS tries at once and then
one each second; a try counts before it is checked, and is given back if the password is right.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final

from headwater.access import permissions
from headwater.access.permissions import Verifiers
from headwater.access.rate_limit import Buckets
from headwater.errors import HeadwaterError

WRONG_PASSWORDS: Final = 20
MAX_WAITING: Final = 256
MAX_KNOWN: Final = 10_000
# Half of the processors at most: the others serve.
_THREADS: Final = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) // 2)), thread_name_prefix="password")


class TooManyPasswords(HeadwaterError):
    """Too many wrong passwords came from an address, or too many wait to be checked: try again later."""


class _Lane:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class PasswordChecks:
    """The checks of one process. Of one event loop: make it where it is used."""

    def __init__(self) -> None:
        self._wrong = Buckets(1.0, WRONG_PASSWORDS)
        self._lanes: dict[str, _Lane] = {}
        self._waiting = 0
        # Addresses and accounts that signed in from them, the oldest first.
        self._known: OrderedDict[str, None] = OrderedDict()

    @asynccontextmanager
    async def turn(self, address: str, name: str) -> AsyncIterator[None]:
        """Wait for the turn of an address, one check at a time. Raises TooManyPasswords if too many wait."""
        if self._waiting >= MAX_WAITING:
            raise TooManyPasswords("too many passwords wait to be checked")
        key = self._lane_of(address, name)
        lane = self._lanes.setdefault(key, _Lane())
        lane.users += 1
        self._waiting += 1
        try:
            async with lane.lock:
                yield
        finally:
            self._waiting -= 1
            lane.users -= 1
            if not lane.users:
                self._lanes.pop(key, None)

    async def fits(self, password: str, kept: Verifiers, *, address: str, name: str) -> bool:
        """Whether this is the password. Called within a turn."""
        self.count_try(address, name)
        loop = asyncio.get_running_loop()
        fits = await loop.run_in_executor(_THREADS, permissions.password_fits, password, kept)
        if fits:
            self.count_right(address, name)
        return fits

    def count_try(self, address: str, name: str) -> None:
        """Count a try before it is checked. Raises TooManyPasswords beyond the limit of wrong ones."""
        if not self._wrong.take(self._lane_of(address, name), time.monotonic()):
            raise TooManyPasswords("too many wrong passwords from this address", hint="Try again in some seconds.")

    def count_right(self, address: str, name: str) -> None:
        """The password of the last try was right: give the try back, and remember the account at the address."""
        self._wrong.give_back(self._lane_of(address, name), time.monotonic())
        known = f"{address} {name}"
        self._known[known] = None
        self._known.move_to_end(known)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _lane_of(self, address: str, name: str) -> str:
        known = f"{address} {name}"
        return known if known in self._known else address
