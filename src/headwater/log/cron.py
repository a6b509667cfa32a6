"""Cron expressions: the next time of a schedule. Pure: the present time is an argument."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from headwater.errors import InvalidRequest


def next_time(cron: str, time_zone: str, after: datetime) -> datetime:
    """The first time of the expression after `after`, in UTC. Raises InvalidRequest if the expression is invalid or has
    no such time."""
    try:
        zone = ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise InvalidRequest(
            f"unknown time zone {time_zone!r}", hint="Use an IANA name, for example Europe/Berlin or UTC."
        ) from None
    try:
        return next(CronSim(cron, after.astimezone(zone))).astimezone(UTC)
    except CronSimError:
        raise InvalidRequest(
            f"invalid cron expression {cron!r}",
            hint="Expected five fields: minute hour day-of-month month day-of-week, for example '*/5 * * * *'.",
        ) from None
    except StopIteration:
        raise InvalidRequest(f"cron expression {cron!r} matches no future time") from None
