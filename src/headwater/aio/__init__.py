"""The asyncio API: `connect` and `AsyncHeadwater`."""

from __future__ import annotations

from typing import TypeVar

from psycopg_pool import AsyncConnectionPool, PoolTimeout

from headwater.calls import Call
from headwater.calls import log as log_calls
from headwater.database import schema
from headwater.database.caller_connection import AsyncCallerConnection
from headwater.database.connection import MAX_DEADLOCK_TRIES, PooledConnection, prepare_session
from headwater.errors import LogUnavailable
from headwater.eventstore.api import EventStoreApi
from headwater.log.administration import AdministrationApi
from headwater.log.follow import FollowApi
from headwater.log.payload_hooks import Dumps, Loads, with_loads
from headwater.log.publish import PublishApi
from headwater.log.typed import TypedApi
from headwater.queue.api import QueueApi
from headwater.sql_subscriptions.api import SubscriptionApi
from headwater.webhooks.api import WebhookApi

T = TypeVar("T")

# The pool reconnects with exponential backoff and gives up after this time; `_restart_backoff` then starts it again
# with the shortest delay. So a Postgres that returns after an hour is reached as soon as one that returns after
# seconds.
RECONNECT_SECONDS = 3.0


async def _restart_backoff(pool: AsyncConnectionPool[PooledConnection]) -> None:
    await pool.check()


async def connect(
    dsn: str | None = None,
    *,
    pool_size: int = 10,
    connect_timeout_seconds: float = 10.0,
    application_name: str = "headwater",
    lazy: bool = False,
    dumps: Dumps | None = None,
    loads: Loads | None = None,
) -> AsyncHeadwater:
    """Connect to the log in this Postgres database. Raises SchemaMismatch if the schema's version does not match.

    `dsn` is a URL or a conninfo string. Without it, connects to the database that the command line uses: that of
    HEADWATER_DSN, otherwise of `headwater up`.

    `lazy`: connect, without this check, when a method first needs a connection of the log's own.

    `dumps` encodes the payloads that are published, except bytes and None; `loads` decodes the `data` of events.
    """
    # Imported when needed: importing the library does not load the embedded server.
    from headwater.embedded.address import find_dsn

    pool = AsyncConnectionPool(
        find_dsn(dsn),
        min_size=0 if lazy else 1,
        max_size=pool_size,
        timeout=connect_timeout_seconds,
        reconnect_timeout=RECONNECT_SECONDS,
        reconnect_failed=_restart_backoff,
        kwargs={"autocommit": True, "application_name": application_name},
        open=False,
        connection_class=PooledConnection,
        configure=prepare_session,
        name="headwater",
    )
    log = AsyncHeadwater(pool) if loads is None else _LoadingHeadwater(pool, loads)
    log._dumps = dumps
    try:
        await pool.open(wait=not lazy, timeout=connect_timeout_seconds)
        if not lazy:
            schema.refuse_misfit(await log._run(log_calls.installed()))
    except PoolTimeout as timeout:
        await pool.close()
        raise LogUnavailable(
            f"no connection to Postgres within {connect_timeout_seconds:g} s",
            hint="Check that Postgres is running and that the DSN (the argument, or HEADWATER_DSN) is right, "
            "or run `headwater up` for an embedded one.",
        ) from timeout
    except BaseException:
        await pool.close()
        raise
    return log


class AsyncHeadwater(
    TypedApi, PublishApi, FollowApi, QueueApi, SubscriptionApi, EventStoreApi, WebhookApi, AdministrationApi
):
    """The log. Methods with a `connection` parameter can run inside the caller's own transaction."""


class _LoadingHeadwater(AsyncHeadwater):
    """A log with `loads`."""

    def __init__(self, pool: AsyncConnectionPool[PooledConnection], loads: Loads) -> None:
        super().__init__(pool)
        self._loads = loads

    async def _run(
        self, call: Call[T], connection: AsyncCallerConnection | None = None, *, tries: int = MAX_DEADLOCK_TRIES
    ) -> T:
        result: T = with_loads(self._loads, await super()._run(call, connection, tries=tries))
        return result
