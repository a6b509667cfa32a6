"""Metrics as Prometheus reads them, and whether the log can be worked with. Needs no server: the command line asks too.

However many ask, the database is asked once a second at most. Without it what this process has counted is still told.
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

from headwater import calls
from headwater.aio import AsyncHeadwater
from headwater.calls import overview
from headwater.database import schema
from headwater.errors import HeadwaterError, SchemaMismatch
from headwater.model import LogFault, LogHealth, Sample
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, METRICS, SCRAPES_FAILED, logger
from headwater.servers.multiprocess_counters import Counts

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CACHE_SECONDS: Final = 1.0
ASK_SECONDS: Final = 5.0
SOON_SECONDS: Final = 0.5
# Upkeep runs once a minute wherever anything consumes.
MAINTENANCE_SECONDS: Final = 600.0
OLD_PUBLISHER_SECONDS: Final = 60.0
FEW_POSITIONS: Final = 1_000_000
# The check that is a warning to a server, since all serve the same log, and a failure to a monitor.
POSITIONS: Final = "positions"


# --- metrics -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Asked:
    """What the database said last, and when. The lock lets one ask for all."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    at: float = -math.inf
    samples: list[Sample] = field(default_factory=list)


_asked: WeakKeyDictionary[AsyncHeadwater, _Asked] = WeakKeyDictionary()


async def render(log: AsyncHeadwater, counts: Counts | None = None) -> bytes:
    """Every metric in Prometheus' text format. `counts`: of whom what was counted is told; else of this process."""
    asked = await _from_database(log)
    return in_text_format([*asked, *await (counts or Counts(None)).samples()])


async def _from_database(log: AsyncHeadwater) -> list[Sample]:
    asked = _asked.setdefault(log, _Asked())
    async with asked.lock:
        if time.monotonic() - asked.at >= CACHE_SECONDS:
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    asked.samples = [Sample("headwater_up", (), 1), *await log.metrics()]
            except (HeadwaterError, psycopg.Error, TimeoutError) as error:
                COUNTERS.add(SCRAPES_FAILED)
                logger.warning("no figures from the database", extra={ERROR: str(error) or type(error).__name__})
                asked.samples = [Sample("headwater_up", (), 0)]
            asked.at = time.monotonic()
        return asked.samples


def in_text_format(samples: Iterable[Sample]) -> bytes:
    """Samples as text, by metric in the order of their page. A metric that is not on the page is not published."""
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
    """What was looked at, and what to do if it is not well. One that is not `required` is a warning only."""

    name: str
    ok: bool
    message: str
    action: str | None = None
    required: bool = True


def is_ready(checks: Sequence[Check]) -> bool:
    """Whether requests may be sent here. A warning is no reason to send them elsewhere: it is the same log there."""
    return all(check.ok for check in checks if check.required)


async def readiness(log: AsyncHeadwater) -> list[Check]:
    """Whether the log can be worked with: each of these in turn, up to the first that the others need.

    database: it answers in time. schema: it fits this program. primary: it is no standby and takes writes. room:
    positions are left to draw. storage: the disk is not full. And as warnings: settling (no publisher holds readers up
    for long), maintenance (somebody does the log's upkeep).
    """
    answers = Check("database", True, "the database answers")
    try:
        async with asyncio.timeout(ASK_SECONDS):
            health, faults = await _health(log)
    except SchemaMismatch as error:
        return [answers, Check("schema", False, error.message, error.hint)]
    except (HeadwaterError, psycopg.Error, TimeoutError) as error:
        message = error.message if isinstance(error, HeadwaterError) else str(error)
        return [
            Check("database", False, message or f"no answer within {ASK_SECONDS:g} s", "Start it, or correct the DSN.")
        ]
    return [
        answers,
        Check("schema", True, f"the schema fits Headwater {schema.VERSION}"),
        *_judged(health),
        *_faulty(health, faults),
        await _storage(log),
    ]


async def _storage(log: AsyncHeadwater) -> Check:
    """Whether the disk has room. A probe is written only after a call found the disk full, until one succeeds."""
    if log.is_storage_full:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await log.run(calls.probe_storage(), patience_seconds=0)
            log.is_storage_full = False
        except (HeadwaterError, psycopg.Error, TimeoutError) as error:
            message = error.message if isinstance(error, HeadwaterError) else str(error)
            return Check("storage", False, message or "a probe was not written in time", "Give the disk room.")
    return Check("storage", True, "the disk takes writes")


async def _health(log: AsyncHeadwater) -> tuple[LogHealth, list[LogFault]]:
    async def ask() -> tuple[LogHealth, list[LogFault]]:
        schema.refuse_misfit(await log.run(calls.installed(), patience_seconds=0))
        health = await log.health()
        return health, await log.run(overview.log_faults()) if health.primary_server else []

    asking = asyncio.create_task(ask())
    try:
        await asyncio.wait([asking], timeout=SOON_SECONDS)
        if not asking.done():
            # A pool waits for a server that is not there as for one that is slow. Whoever knocks is told at once.
            await log.knock()
        return await asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def _faulty(health: LogHealth, faults: Sequence[LogFault]) -> list[Check]:
    """What stops publishing or delivery. Every process serves the same log: a reader that is wrong is a warning."""
    if not health.primary_server:
        return []
    missing = [fault.name for fault in faults if fault.kind == "segment"]
    register = [fault for fault in faults if fault.kind == "register"]
    beyond = [f"{fault.kind} {fault.name}" for fault in faults if fault.kind in ("cursor", "group")]
    return [
        Check(
            "segments",
            not missing,
            f"tables of segments are missing: {_some(missing)}" if missing else "every segment has its table",
            "Events cannot be published or are gone; restore the database from a backup. See headwater doctor.",
        ),
        Check(
            "register",
            not register,
            f"the settled position is noted at {register[0].position}, beyond the head at {register[0].head}"
            if register
            else "the settled position is not beyond the head",
            "Queues would skip events. Stop all workers, then run headwater migrate.",
        ),
        Check(
            POSITIONS,
            not beyond,
            f"beyond the head of the log: {_some(beyond)}" if beyond else "no cursor or group is beyond the head",
            "They get no events until the log has come there; see headwater doctor.",
            required=False,
        ),
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _judged(health: LogHealth) -> list[Check]:
    """What the log's own figures say."""
    if not health.primary_server or not health.writable:
        what = "takes no writes" if health.primary_server else "is a standby, where order cannot be known"
        return [Check("primary", False, f"this server {what}", "Connect to the primary.")]
    return [
        Check("primary", True, "this server is a primary and takes writes"),
        Check(
            "room",
            (health.positions_left or 0) > FEW_POSITIONS,
            f"{health.positions_left} positions are left in the segments that are ready",
            "Run headwater maintain: publishing stops where no segment is ready.",
        ),
        Check(
            "settling",
            (health.oldest_publisher_seconds or 0.0) < OLD_PUBLISHER_SECONDS,
            "no publisher is open"
            if health.oldest_publisher_seconds is None
            else f"the oldest publisher, process {health.oldest_publisher_pid}, is open for "
            f"{health.oldest_publisher_seconds:.0f} s; {health.unsettled} positions wait for it",
            f"Let it commit, or end it: select pg_terminate_backend({health.oldest_publisher_pid})",
            required=False,
        ),
        Check(
            "maintenance",
            (health.maintained_seconds_ago or 0.0) < MAINTENANCE_SECONDS and health.maintained_seconds_ago is not None,
            "upkeep never ran"
            if health.maintained_seconds_ago is None
            else f"upkeep ran {health.maintained_seconds_ago:.0f} s ago",
            "Keep a consumer or `headwater maintain --every 60` running.",
            required=False,
        ),
    ]
