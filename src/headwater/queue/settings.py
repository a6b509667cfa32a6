"""The settings of a queue. To add one: here, the column in `0003_queue.sql`, `create_queue` and `alter_queue` in
`queue.sql`, and what it does. Everything else follows: see `setting_definitions.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypedDict

from headwater.setting_definitions import MAX_INTEGER, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """How a queue leases events to its workers and retries them."""

    lease_seconds: Annotated[
        float,
        Setting(
            label="Lease in seconds",
            help="How long a worker may hold a batch before it is delivered again. Workers extend leases.",
            rule="a lease is 0.1 seconds to 1 day",
            minimum=0.1,
            maximum=86_400,
            unit="seconds",
        ),
    ] = 30.0
    max_attempts: Annotated[
        int,
        Setting(
            label="Maximum attempts",
            help="Attempts until an event becomes a dead letter.",
            rule="max attempts are 1 to 1000",
            minimum=1,
            maximum=1000,
        ),
    ] = 5
    backoff_seconds: Annotated[
        float,
        Setting(
            label="Backoff in seconds",
            help="Delay after the first failed attempt.",
            rule="a backoff is 0 seconds to 1 day",
            minimum=0,
            maximum=86_400,
            unit="seconds",
        ),
    ] = 1.0
    backoff_factor: Annotated[
        float,
        Setting(
            help="Factor by which the delay grows with each attempt.",
            rule="a backoff factor is 1 to 100",
            minimum=1,
            maximum=100,
        ),
    ] = 2.0
    backoff_max_seconds: Annotated[
        float,
        Setting(
            label="Longest backoff in seconds",
            help="Maximum delay between attempts.",
            rule="the longest backoff is 0 seconds to 30 days",
            minimum=0,
            maximum=2_592_000,
            unit="seconds",
        ),
    ] = 3600.0
    backoff_jitter: Annotated[
        float,
        Setting(
            help="Random variation of delays: 0.2 is 20 % in either direction.",
            rule="jitter is 0 to 1",
            minimum=0,
            maximum=1,
        ),
    ] = 0.2
    retry_age_seconds: Annotated[
        float | None,
        Setting(
            label="Retry age in seconds",
            help="An event that fails when it is older than this becomes a dead letter, with attempts left or not.",
            rule="the retry age is 1 second to 10 years",
            minimum=1,
            maximum=315_360_000,
            unit="seconds",
            none="no limit",
        ),
    ] = None
    ordered_keys: Annotated[
        bool,
        Setting(
            help="Process events of the same key one at a time and in order.",
            rule="ordered keys are true or false",
            fixed=True,
        ),
    ] = False
    max_in_flight: Annotated[
        int | None,
        Setting(
            label="Maximum in flight",
            help="Maximum number of events that are leased at once.",
            rule="events in flight are limited to 1 or more",
            minimum=1,
            maximum=MAX_INTEGER,
            none="no limit",
        ),
    ] = None
    holds_retention: Annotated[
        bool,
        Setting(
            help="Whether retention keeps events until this queue has processed them.",
            rule="holding retention is true or false",
        ),
    ] = True


class QueueChanges(TypedDict, total=False):
    """The settings of `alter_queue`. None: unchanged; 0 removes a limit."""

    lease_seconds: float | None
    max_attempts: int | None
    backoff_seconds: float | None
    backoff_factor: float | None
    backoff_max_seconds: float | None
    backoff_jitter: float | None
    retry_age_seconds: float | None
    max_in_flight: int | None
    holds_retention: bool | None


class NewQueueSettings(QueueChanges, total=False):
    """The settings of `create_queue` and of workers. None: the default."""

    ordered_keys: bool | None
