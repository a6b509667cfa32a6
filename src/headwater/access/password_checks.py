"""Password checks of one process, shared by every protocol: bounded, fair, and in a thread pool of their own.

A check takes several hundred thousand hash rounds, on purpose. A dedicated thread pool runs the checks, so a flood of
wrong passwords delays no other work. Checks wait in one queue per address and run one at a time per queue: an address
that sends many delays only itself. An account that has signed in from an address before has its own queue and its own
limit there, so wrong passwords of other accounts at that address do not lock it out.
Invariants: at most MAX_WAITING checks wait; further ones are rejected at once. An address gets WRONG_PASSWORDS attempts
at once and then one per second. An attempt counts before it is checked, and is given back if the password is right.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final

from headwater.access import scram
from headwater.access.rate_limit import TokenBuckets
from headwater.access.scram import Verifiers
from headwater.bounded_dict import BoundedDict
from headwater.errors import HeadwaterError

WRONG_PASSWORDS: Final = 20
MAX_WAITING: Final = 256
MAX_KNOWN_LOGINS: Final = 10_000
# At most half of the processors, so that requests are still served.
_THREADS: Final = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) // 2)), thread_name_prefix="password")


class TooManyPasswordAttempts(HeadwaterError):
    """Too many wrong passwords from one address, or too many waiting password checks. Try again later."""


class _AddressQueue:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class PasswordChecks:
    """The password checks of one process. Bound to the event loop that creates it."""

    def __init__(self) -> None:
        self._wrong = TokenBuckets(1.0, WRONG_PASSWORDS)
        self._queues: dict[str, _AddressQueue] = {}
        self._waiting = 0
        # "address account" pairs that have signed in, the oldest first.
        self._known: BoundedDict[str, None] = BoundedDict(MAX_KNOWN_LOGINS)

    @asynccontextmanager
    async def turn(self, address: str, name: str) -> AsyncIterator[None]:
        """Wait for this address's turn: one check at a time. Raises TooManyPasswordAttempts if too many wait."""
        if self._waiting >= MAX_WAITING:
            raise TooManyPasswordAttempts("too many password checks are waiting", hint="Try again in a few seconds.")
        key = self._queue_key(address, name)
        queue = self._queues.setdefault(key, _AddressQueue())
        queue.users += 1
        self._waiting += 1
        try:
            async with queue.lock:
                yield
        finally:
            self._waiting -= 1
            queue.users -= 1
            if not queue.users:
                self._queues.pop(key, None)

    async def verify(self, password: str, stored: Verifiers, *, address: str, name: str) -> bool:
        """Whether this is the password. Call it within `turn`."""
        self.count_attempt(address, name)
        loop = asyncio.get_running_loop()
        is_right = await loop.run_in_executor(_THREADS, scram.verify_password, password, stored)
        if is_right:
            self.count_success(address, name)
        return is_right

    def count_attempt(self, address: str, name: str) -> None:
        """Count an attempt before it is checked. Raises TooManyPasswordAttempts above the limit."""
        if not self._wrong.take(self._queue_key(address, name), time.monotonic()):
            raise TooManyPasswordAttempts(
                "too many wrong passwords from this address", hint="Try again in a few seconds."
            )

    def count_success(self, address: str, name: str) -> None:
        """The last attempt was right: give it back, and remember that the account signs in from this address."""
        self._wrong.give_back(self._queue_key(address, name), time.monotonic())
        self._known[f"{address} {name}"] = None

    def _queue_key(self, address: str, name: str) -> str:
        known = f"{address} {name}"
        return known if known in self._known else address
