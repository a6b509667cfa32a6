"""The log in Django: `publish` on the current transaction, workers and the schema as management commands.

Add "headwater.integrations.django" to INSTALLED_APPS. The log is in a database of DATABASES; `settings.HEADWATER` may
say which one. `migrate` on that database also installs and upgrades the log's schema.
Invariant: `publish` runs on Django's own connection, so the event has the fate of the current transaction.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.module_loading import import_string
from psycopg import pq
from psycopg.conninfo import make_conninfo

from headwater import client
from headwater.client import Headwater
from headwater.log.model import Payload
from headwater.log.payload_hooks import Dumps, Loads


@dataclass(frozen=True)
class HeadwaterSettings:
    """`settings.HEADWATER`, with the names in capitals. `dumps` and `loads` may be dotted paths."""

    database: str = DEFAULT_DB_ALIAS
    # Whether `migrate` installs and upgrades the log's schema.
    migrate: bool = True
    pool_size: int = 4
    dumps: Dumps | str | None = None
    loads: Loads | str | None = None


def load_settings() -> HeadwaterSettings:
    """The settings of the project. Raises ImproperlyConfigured for an unknown name."""
    given: Mapping[str, Any] = getattr(settings, "HEADWATER", {})
    known = {field.name.upper() for field in fields(HeadwaterSettings)}
    if unknown := sorted(given.keys() - known):
        raise ImproperlyConfigured(f"unknown in HEADWATER: {', '.join(unknown)}; expected {', '.join(sorted(known))}")
    return HeadwaterSettings(**{name.lower(): value for name, value in given.items()})


def database_dsn(using: str | None = None) -> str:
    """The DSN of a database of the project, by default that of the log."""
    alias = using or load_settings().database
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(f'database "{alias}" is not Postgres: name another in HEADWATER["DATABASE"]')
    keywords = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    given = connection.get_connection_params()
    return make_conninfo(**{name: str(value) for name, value in given.items() if name in keywords})


# By process too: a connection must not be used after a fork.
_logs: dict[tuple[int, str], Headwater] = {}
_opening = threading.Lock()


def log(using: str | None = None) -> Headwater:
    """The log in a database of the project, opened when it is first used, and then shared by the process."""
    chosen = load_settings()
    dsn = database_dsn(using or chosen.database)
    with _opening:
        found = _logs.get((os.getpid(), dsn))
        if found is None:
            found = _logs[os.getpid(), dsn] = client.connect(
                dsn,
                pool_size=chosen.pool_size,
                application_name="headwater django",
                # `publish` needs no connection of the log's own, and one would keep a test database from being dropped.
                lazy=True,
                dumps=import_string(chosen.dumps) if isinstance(chosen.dumps, str) else chosen.dumps,
                loads=import_string(chosen.loads) if isinstance(chosen.loads, str) else chosen.loads,
            )
        return found


def close_logs() -> None:
    """Close the logs of this process, for example before a test database is dropped."""
    with _opening:
        for pid, dsn in list(_logs):
            closing = _logs.pop((pid, dsn))
            if pid == os.getpid():
                closing.close()


def publish(
    topic: str,
    payload: Payload,
    *,
    using: str | None = None,
    key: str | bytes | None = None,
    type: str | None = None,
    routing_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    event_id: str | None = None,
    content_type: str | None = None,
    deliver_at: datetime | None = None,
    delay: timedelta | None = None,
) -> int | None:
    """Publish one event on Django's connection: in `transaction.atomic()` its commit publishes it, else at once.

    Returns its position, or None if it is scheduled for later. `using`: the alias of the database.
    """
    alias = using or load_settings().database
    return log(alias).publish(
        topic,
        payload,
        key=key,
        type=type,
        routing_key=routing_key,
        headers=headers,
        event_id=event_id,
        content_type=content_type,
        deliver_at=deliver_at,
        delay=delay,
        connection=connections[alias],
    )
