"""The blocking API: `connect` and `AsyncHeadwater`."""
# Generated from aio/__init__.py by tools/unasync.py: write there.

from __future__ import annotations

from typing import TypeVar

from psycopg_pool import ConnectionPool, PoolTimeout

from headwater.calls import Call
from headwater.calls import log as log_calls
from headwater.client.database.connection import MAX_DEADLOCK_TRIES, PooledConnection, prepare_session
from headwater.client.eventstore.api import EventStoreApi
from headwater.client.log.administration import AdministrationApi
from headwater.client.log.follow import FollowApi
from headwater.client.log.publish import PublishApi
from headwater.client.log.typed import TypedApi
from headwater.client.queue.api import QueueApi
from headwater.client.sql_subscriptions.api import SubscriptionApi
from headwater.client.webhooks.api import WebhookApi
from headwater.database import schema
from headwater.database.caller_connection import CallerConnection
from headwater.errors import LogUnavailable
from headwater.log.payload_hooks import Dumps, Loads, with_loads

T = TypeVar("T")

# The pool reconnects with exponential backoff and gives up after this time; `_restart_backoff` then starts it again
# with the shortest delay. So a Postgres that returns after an hour is reached as soon as one that returns after
# seconds.
RECONNECT_SECONDS = 3.0


def _restart_backoff(pool: ConnectionPool[PooledConnection]) -> None:
    pool.check()


def connect(
    dsn: str | None = None,
    *,
    pool_size: int = 10,
    connect_timeout_seconds: float = 10.0,
    application_name: str = "headwater",
    lazy: bool = False,
    dumps: Dumps | None = None,
    loads: Loads | None = None,
) -> Headwater:
    """Connect to the log in this Postgres database. Raises SchemaMismatch if the schema's version does not match.

    `dsn` is a URL or a conninfo string. Without it, connects to the database that the command line uses: that of
    HEADWATER_DSN, otherwise of `headwater up`.

    `lazy`: connect, without this check, when a method first needs a connection of the log's own.

    `dumps` encodes the payloads that are published, except bytes and None; `loads` decodes the `data` of events.
    """
    # Imported when needed: importing the library does not load the embedded server.
    from headwater.embedded.address import find_dsn

    pool = ConnectionPool(
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
    log = Headwater(pool) if loads is None else _LoadingHeadwater(pool, loads)
    log._dumps = dumps
    try:
        pool.open(wait=not lazy, timeout=connect_timeout_seconds)
        if not lazy:
            schema.refuse_misfit(log._run(log_calls.installed()))
    except PoolTimeout as timeout:
        pool.close()
        raise LogUnavailable(
            f"no connection to Postgres within {connect_timeout_seconds:g} s",
            hint="Check that Postgres is running and that the DSN (the argument, or HEADWATER_DSN) is right, "
            "or run `headwater up` for an embedded one.",
        ) from timeout
    except BaseException:
        pool.close()
        raise
    return log


class Headwater(
    TypedApi, PublishApi, FollowApi, QueueApi, SubscriptionApi, EventStoreApi, WebhookApi, AdministrationApi
):
    """The log. Methods with a `connection` parameter can run inside the caller's own transaction."""


class _LoadingHeadwater(Headwater):
    """A log with `loads`."""

    def __init__(self, pool: ConnectionPool[PooledConnection], loads: Loads) -> None:
        super().__init__(pool)
        self._loads = loads

    def _run(self, call: Call[T], connection: CallerConnection | None = None, *, tries: int = MAX_DEADLOCK_TRIES) -> T:
        result: T = with_loads(self._loads, super()._run(call, connection, tries=tries))
        return result
