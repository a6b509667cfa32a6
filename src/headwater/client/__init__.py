"""The blocking shell: the log as a program uses it."""
# Generated from aio/__init__.py by tools/unasync.py: write there.

from __future__ import annotations

from psycopg_pool import ConnectionPool, PoolTimeout

from headwater import calls
from headwater.client.database.connection import PooledConnection, prepare_session
from headwater.client.eventstore.postgres import Stores
from headwater.client.log.administration import Administration
from headwater.client.log.follow import Following
from headwater.client.log.publish import Publishing
from headwater.client.queue.api import Groups
from headwater.client.sql_subscriptions.api import Subscriptions
from headwater.client.webhooks.api import Webhooks
from headwater.database import schema
from headwater.errors import LogUnavailable

# A pool waits between its tries to reach a lost Postgres, each time twice as long, and gives up after so many seconds.
# It then begins anew: a Postgres that comes back after an hour is found as soon as one that comes back after seconds.
RECONNECT_SECONDS = 3.0


def _begin_anew(pool: ConnectionPool[PooledConnection]) -> None:
    pool.check()


def connect(
    dsn: str,
    *,
    pool_size: int = 10,
    connect_timeout_seconds: float = 10.0,
    application_name: str = "headwater",
) -> Headwater:
    """Open the log at this Postgres. Raises SchemaMismatch where program and database do not fit."""
    pool = ConnectionPool(
        dsn,
        min_size=1,
        max_size=pool_size,
        timeout=connect_timeout_seconds,
        reconnect_timeout=RECONNECT_SECONDS,
        reconnect_failed=_begin_anew,
        kwargs={"autocommit": True, "application_name": application_name},
        open=False,
        connection_class=PooledConnection,
        configure=prepare_session,
        name="headwater",
    )
    log = Headwater(pool)
    try:
        pool.open(wait=True, timeout=connect_timeout_seconds)
        schema.refuse_misfit(log._run(calls.installed()))
    except PoolTimeout as timeout:
        pool.close()
        raise LogUnavailable(
            f"no connection to Postgres within {connect_timeout_seconds:g} s",
            hint="Is it running? Check HEADWATER_DSN, or start an embedded one with `headwater up`.",
        ) from timeout
    except BaseException:
        pool.close()
        raise
    return log


class Headwater(Publishing, Following, Groups, Subscriptions, Stores, Webhooks, Administration):
    """The log. Every method takes `connection=` to run inside the caller's own transaction."""
