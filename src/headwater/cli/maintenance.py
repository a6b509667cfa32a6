"""Maintenance of the log by `headwater maintain` and `headwater up`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import headwater
from headwater.calls import publishing
from headwater.errors import LogUnavailable
from headwater.log.model import MaintenanceResult
from headwater.log.steps import FULL_SWEEP, MaintenanceSchedule
from headwater.observability.metrics import ERROR, WAIT_SECONDS, logger


def publish_cron_schedules(log: headwater.Headwater) -> int:
    """Publish the cron schedules that are due, unless another process does; returns their number."""
    fire = MaintenanceSchedule().handle_result(log.run(publishing.due_cron_schedules()), 0.0, datetime.now(UTC))
    return sum(log.run(call) for call in fire)


def maintain_repeatedly(
    log: headwater.Headwater,
    *,
    every_seconds: float,
    report: Callable[[MaintenanceResult, int], None] = lambda maintenance, cron_schedules: None,
) -> None:
    """Maintain the log at an interval until interrupted. Continues after the database was unavailable."""
    while True:
        try:
            maintenance, cron_schedules = log.maintain(), publish_cron_schedules(log)
        except LogUnavailable as error:
            logger.warning("log unavailable", extra={ERROR: error.message, WAIT_SECONDS: every_seconds})
        else:
            report(maintenance, cron_schedules)
            if maintenance.events_swept >= FULL_SWEEP:
                # One run removes a limited number of events; there are more.
                continue
        time.sleep(every_seconds)
