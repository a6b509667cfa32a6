"""Metrics in the Prometheus text format, and readiness checks. Used by the HTTP server and by the command line.

The database is queried at most once a second, however many scrapes arrive. If it cannot be reached, the counters of the
server are still returned.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import psycopg

from headwater.aio import AsyncHeadwater
from headwater.calls import log as log_calls
from headwater.calls import overview
from headwater.calls.metrics import LogHealth, Sample
from headwater.database import schema
from headwater.errors import HeadwaterError, SchemaMismatch
from headwater.log.model import LogFault
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, METRICS, SCRAPES_FAILED, logger
from headwater.servers.multiprocess_counters import MultiprocessCounters
from headwater.version import VERSION

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CACHE_SECONDS: Final = 1.0
QUERY_SECONDS: Final = 5.0
PING_AFTER_SECONDS: Final = 0.5
# Every consumer runs maintenance once a minute.
MAX_MAINTENANCE_AGE_SECONDS: Final = 600.0
MAX_PUBLISHER_SECONDS: Final = 60.0
MIN_POSITIONS_LEFT: Final = 1_000_000
# A warning for the server's readiness, because every server has the same log, but a failure for `headwater doctor`.
POSITIONS: Final = "positions"


# --- metrics -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ScrapeCache:
    """The last samples from the database. The lock lets one scrape query for all that wait."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    at: float = -math.inf
    samples: list[Sample] = field(default_factory=list)


_caches: WeakKeyDictionary[AsyncHeadwater, _ScrapeCache] = WeakKeyDictionary()


async def render(log: AsyncHeadwater, counters: MultiprocessCounters | None = None) -> bytes:
    """Every metric in the Prometheus text format, with these counters; default: those of this process."""
    samples = await _from_database(log)
    return in_text_format([*samples, *await (counters or MultiprocessCounters(None)).samples()])


async def _from_database(log: AsyncHeadwater) -> list[Sample]:
    cache = _caches.setdefault(log, _ScrapeCache())
    async with cache.lock:
        if time.monotonic() - cache.at >= CACHE_SECONDS:
            try:
                async with asyncio.timeout(QUERY_SECONDS):
                    cache.samples = [Sample("headwater_up", (), 1), *await log.metrics()]
            except (HeadwaterError, psycopg.Error, TimeoutError) as error:
                COUNTERS.add(SCRAPES_FAILED)
                logger.warning(
                    "the metrics could not be read from the database", extra={ERROR: str(error) or type(error).__name__}
                )
                cache.samples = [Sample("headwater_up", (), 0)]
            cache.at = time.monotonic()
        return cache.samples


def in_text_format(samples: Iterable[Sample]) -> bytes:
    """Samples as text, in the order of METRICS. A metric that is not in METRICS is left out."""
    by_name: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_name[sample.name].append(sample)
    lines: list[str] = []
    for metric in METRICS:
        if found := by_name.get(metric.name):
            lines += [f"# HELP {metric.name} {_escaped(metric.meaning)}", f"# TYPE {metric.name} {metric.kind}"]
            for sample in sorted(found):
                pairs = zip(metric.labels, sample.labels, strict=True)
                labels = ",".join(f'{name}="{_escaped(value, quote=True)}"' for name, value in pairs)
                lines.append(f"{metric.name}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}")
    return ("\n".join(lines) + "\n").encode()


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


# --- readiness -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, and what to do if it failed. A check that is not `required` is only a warning."""

    name: str
    ok: bool
    message: str
    action: str | None = None
    required: bool = True


def is_ready(checks: Sequence[Check]) -> bool:
    """Whether this server can take requests. Warnings do not count: every other server has the same log."""
    return all(check.ok for check in checks if check.required)


async def readiness(log: AsyncHeadwater) -> list[Check]:
    """Run the readiness checks in order. A failure that makes the later ones meaningless ends the list.

    database: it answers in time. schema: it matches this program. primary: the server is a primary and accepts writes.
    room: positions are left to assign. segments, register: the log is intact. storage: the disk is not full. Warnings:
    publishers (no publishing transaction delays readers for long), maintenance (it runs), positions (no cursor or queue
    is beyond the head).
    """
    answers = Check("database", True, "the database answers")
    try:
        async with asyncio.timeout(QUERY_SECONDS):
            health, faults = await _health(log)
    except SchemaMismatch as error:
        return [answers, Check("schema", False, error.message, error.hint)]
    except (HeadwaterError, psycopg.Error, TimeoutError) as error:
        message = error.message if isinstance(error, HeadwaterError) else str(error)
        return [
            Check(
                "database",
                False,
                message or f"no answer within {QUERY_SECONDS:g} s",
                "Start Postgres, or correct the DSN.",
            )
        ]
    return [
        answers,
        Check("schema", True, f"the schema matches Headwater {VERSION}"),
        *_check_health(health),
        *_check_faults(health, faults),
        await _check_storage(log),
    ]


async def _check_storage(log: AsyncHeadwater) -> Check:
    """Whether the disk has room. After a call has found the disk full, a probe is written until one succeeds."""
    if log.shared.is_storage_full:
        try:
            async with asyncio.timeout(QUERY_SECONDS):
                await log.with_patience(0).run(log_calls.probe_storage())
            log.shared.is_storage_full = False
        except (HeadwaterError, psycopg.Error, TimeoutError) as error:
            message = error.message if isinstance(error, HeadwaterError) else str(error)
            return Check("storage", False, message or "the probe was not written in time", "Free or add disk space.")
    return Check("storage", True, "the disk accepts writes")


async def _health(log: AsyncHeadwater) -> tuple[LogHealth, list[LogFault]]:
    async def query() -> tuple[LogHealth, list[LogFault]]:
        schema.refuse_misfit(await log.with_patience(0).run(log_calls.installed()))
        health = await log.health()
        return health, await log.run(overview.log_faults()) if health.primary_server else []

    task = asyncio.create_task(query())
    try:
        await asyncio.wait([task], timeout=PING_AFTER_SECONDS)
        if not task.done():
            # A pool waits for a server that is down as it does for a slow one; a direct connection fails at once.
            await log.ping()
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _check_faults(health: LogHealth, faults: Sequence[LogFault]) -> list[Check]:
    """Faults that stop publishing or delivery."""
    if not health.primary_server:
        return []
    missing = [fault.name for fault in faults if fault.kind == "segment"]
    register = [fault for fault in faults if fault.kind == "register"]
    beyond = [f"{fault.kind} {fault.name}" for fault in faults if fault.kind in ("cursor", "queue")]
    return [
        Check(
            "segments",
            not missing,
            f"segment tables are missing: {_some(missing)}" if missing else "every segment has its table",
            "Events are lost or cannot be published. Restore the database from a backup. See headwater doctor.",
        ),
        Check(
            "register",
            not register,
            f"the stored stable position {register[0].position} is beyond the head {register[0].head}"
            if register
            else "the stable position is not beyond the head",
            "Queues would skip events. Stop all workers, then run headwater migrate.",
        ),
        Check(
            POSITIONS,
            not beyond,
            f"beyond the head of the log: {_some(beyond)}" if beyond else "no cursor or queue is beyond the head",
            "They receive no events until the head reaches them. See headwater doctor.",
            required=False,
        ),
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _check_health(health: LogHealth) -> list[Check]:
    """Checks on the health figures of the log."""
    if not health.primary_server or not health.writable:
        what = "accepts no writes" if health.primary_server else "is a standby, where the order of events is not known"
        return [Check("primary", False, f"this server {what}", "Connect to the primary.")]
    return [
        Check("primary", True, "this server is a primary and accepts writes"),
        Check(
            "room",
            (health.positions_left or 0) > MIN_POSITIONS_LEFT,
            f"{health.positions_left} positions are left in the prepared segments",
            "Run headwater maintain: publishing stops when no prepared segment is left.",
        ),
        Check(
            "publishers",
            (health.oldest_publisher_seconds or 0.0) < MAX_PUBLISHER_SECONDS,
            "no publishing transaction is open"
            if health.oldest_publisher_seconds is None
            else f"the publishing transaction of process {health.oldest_publisher_pid} has been open for "
            f"{health.oldest_publisher_seconds:.0f} s; readers wait for {health.unstable} positions",
            f"Commit it, or terminate it: select pg_terminate_backend({health.oldest_publisher_pid})",
            required=False,
        ),
        Check(
            "maintenance",
            (health.maintained_seconds_ago or 0.0) < MAX_MAINTENANCE_AGE_SECONDS
            and health.maintained_seconds_ago is not None,
            "maintenance has never run"
            if health.maintained_seconds_ago is None
            else f"maintenance ran {health.maintained_seconds_ago:.0f} s ago",
            "Keep a consumer or `headwater maintain --every 60s` running.",
            required=False,
        ),
    ]
