"""When a cron expression comes round next. No clock here: time comes in as an argument."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from headwater.errors import InvalidRequest


def next_time(cron: str, time_zone: str, after: datetime) -> datetime:
    """The first time of the expression after `after`, in UTC; InvalidRequest if it is none or never comes."""
    try:
        zone = ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise InvalidRequest(f"{time_zone!r} is not a time zone", hint="For example Europe/Berlin, or UTC.") from None
    try:
        return next(CronSim(cron, after.astimezone(zone))).astimezone(UTC)
    except CronSimError:
        raise InvalidRequest(
            f"{cron!r} is not a cron expression",
            hint="Five parts: minute hour day-of-month month day-of-week, for example '*/5 * * * *'.",
        ) from None
    except StopIteration:
        raise InvalidRequest(f"{cron!r} never comes") from None
