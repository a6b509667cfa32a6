"""What administrators do by a door, noted in the log itself, in the transaction of the act."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import AsyncConnection

from headwater.aio import AsyncHeadwater
from headwater.calls.audit import audit
from headwater.server.callers import Caller


@asynccontextmanager
async def audited(
    log: AsyncHeadwater, caller: Caller, action: str, subject: str, detail: dict[str, Any]
) -> AsyncIterator[AsyncConnection[Any]]:
    """A transaction for an act, and for the event that tells of it: neither is there without the other.

    The block may add to `detail` what it finds out. Nothing secret belongs there.
    """
    async with log.transaction() as connection:
        yield connection
        await log.run(audit(caller.account or "everybody", action, subject, detail), connection=connection)
