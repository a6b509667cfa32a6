"""A clock that tests can move: retries, leases, scheduled events and cron schedules become due without waiting."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib import resources
from typing import TYPE_CHECKING

from headwater.errors import InvalidRequest
from headwater.log.steps import MaintenanceSchedule

if TYPE_CHECKING:
    from headwater.client import Headwater


def advance_clock(log: Headwater, by: timedelta) -> None:
    """Let time pass for everything in the log that waits for a time: retries and their delays, leases, scheduled
    events, cron schedules and subscriptions that expire. Events that become due are published. The clock itself and the
    times of past events stay as they are.

    Needs the rights of the owner of the schema. Only for tests: a lease that a running worker holds expires, too.
    """
    if by <= timedelta(0):
        raise InvalidRequest(f"invalid time to advance {by}: expected more than zero")
    statement = resources.files(__package__).joinpath("advance_clock.sql").read_bytes()
    with log.transaction() as connection:
        connection.execute("select set_config('headwater_testing.advance_by', %s, true)", (f"{by.total_seconds()} s",))
        connection.execute(statement)
    schedule = MaintenanceSchedule()
    while (call := schedule.next_call(0.0)) is not None:
        due = [call]
        while due:
            due += schedule.handle_result(log.run(due.pop(0)), 0.0, datetime.now(UTC))
