"""The name and meaning of every metric and log field, on one page. Log lines are constant; what varies is a field."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal

logger: Final = logging.getLogger("headwater")

# --- log fields ----------------------------------------------------------------------------------------------

CURSOR: Final = "cursor"
GROUP: Final = "group"
WEBHOOK: Final = "webhook"
POSITION: Final = "position"
WAIT_SECONDS: Final = "wait_seconds"
ERROR: Final = "error"
SLOT: Final = "slot"
RETAINED_BYTES: Final = "retained_bytes"
OPEN: Final = "open"
EPOCH: Final = "epoch"
READ_TO: Final = "read_to"

LOG_FIELDS: Final = {
    CURSOR: "the cursor's name",
    GROUP: "the group's name",
    WEBHOOK: "the webhook's name",
    POSITION: "a place in the log",
    WAIT_SECONDS: "how long until the next try",
    ERROR: "what went wrong, as text",
    SLOT: "the replication slot's name",
    RETAINED_BYTES: "what a slot keeps of the server's log",
    OPEN: "messages that wait for their acknowledgement",
    EPOCH: "the present epoch of the log",
    READ_TO: "the position that a reader had reached",
}

# --- metrics -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that is published. `source`: asked of the database, or counted by this process since its start."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    meaning: str
    source: Literal["database", "process"] = "database"


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", labels, meaning)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", labels, meaning)


def _counted(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", labels, meaning, "process")


PUBLISHED: Final = _counted(
    "headwater_published_events_total",
    "events that this process published; not those that waited for their time, or for a transaction of Kafka's to end",
    "topic",
)
APPENDS: Final = _counted(
    "headwater_appends_total",
    "appends to event stores by this process; outcome: appended, or conflict where the condition did not hold",
    "topic",
    "outcome",
)
HANDLED: Final = _counted(
    "headwater_handled_events_total",
    "events that handlers of this process ended; outcome: done, retry, dead or snooze",
    "group",
    "outcome",
)
LEASES_LOST: Final = _counted("headwater_leases_lost_total", "leases that ran out under this process", "group")
WEBHOOK_REQUESTS: Final = _counted(
    "headwater_webhook_requests_total",
    "requests that this process sent to receivers; answer: 2xx, 3xx, 4xx, 5xx, or none where there was no answer",
    "webhook",
    "answer",
)
STOPPED_FILTERS: Final = _counted(
    "headwater_stopped_filters_total",
    "times that this process found a filter of its SQL subscriptions stopped because it takes too long",
    "group",
)
UNAVAILABLE: Final = _counted("headwater_unavailable_total", "calls of this process that found no database")
EPOCH_CHANGED: Final = _counted(
    "headwater_epoch_changes_total",
    "times that a reader of this process found the log in another epoch and went back to the last common position",
)
SCRAPES_FAILED: Final = _counted("headwater_scrapes_failed_total", "times that the database gave no figures")
BACKGROUND_FAILURES: Final = _counted(
    "headwater_background_failures_total",
    "Failures of background tasks of this process; each task is restarted after a pause. Any is a bug: see the log.",
    "task",
)

METRICS: Final = (
    _gauge(
        "headwater_up",
        "1: the database answered when it was asked for these figures; 0: only what this process has counted follows",
    ),
    _gauge("headwater_log_drawn_position", "the last position that was handed out"),
    _gauge(
        "headwater_log_settled_position",
        "up to here readers see the log; below the drawn one while publishers are open",
    ),
    _counter(
        "headwater_log_positions_total", "positions handed out since the log began: its events, and those rolled back"
    ),
    _gauge("headwater_publishers_in_flight", "open transactions that have published"),
    _gauge("headwater_oldest_publisher_age_seconds", "how long the oldest of them is open; readers wait for it"),
    _gauge(
        "headwater_oldest_publisher_pid", "its process id in Postgres, for pg_terminate_backend; 0: none, or prepared"
    ),
    _gauge("headwater_segments", "segments; state: closed, open, or ahead (made and not reached yet)", "state"),
    _gauge("headwater_open_segment_free_positions", "positions left in the open segment"),
    _gauge(
        "headwater_oldest_segment_age_seconds", "how long ago the oldest segment was begun: how far back the log goes"
    ),
    _gauge("headwater_log_bytes", "what the events take on disk, with their indexes"),
    _gauge(
        "headwater_retention_held_positions",
        "settled positions that retention must keep for a reader that must not lose",
    ),
    _gauge("headwater_maintenance_age_seconds", "how long ago upkeep ran last; missing: never"),
    _counter("headwater_clock_steps_total", "Steps back of the database clock that maintenance has seen."),
    _gauge("headwater_scheduled_overdue_seconds", "by how much the most overdue scheduled event is late"),
    _gauge("headwater_topics", "topics"),
    _gauge("headwater_topic_last_position", "the topic's last event; 0: it has none", "topic"),
    _gauge("headwater_topic_silent_seconds", "how long ago it was published", "topic"),
    _gauge(
        "headwater_topic_events_per_second",
        "how fast it grows: by its last 50 events, or those of the last minute",
        "topic",
    ),
    _gauge("headwater_groups", "groups"),
    _gauge(
        "headwater_group_lag_events",
        "Events of its own topics that the group has not finished. New events are counted up to 1000.",
        "group",
    ),
    _gauge(
        "headwater_group_lag_is_more", "1 if headwater_group_lag_events is a lower bound, 0 if it is exact.", "group"
    ),
    _gauge(
        "headwater_group_lag_seconds",
        "Age in seconds of the oldest event that the group has not claimed; 0 if there is none.",
        "group",
    ),
    _gauge(
        "headwater_group_unfinished_seconds",
        "the age of the oldest event that is not done with, retries included",
        "group",
    ),
    _gauge("headwater_group_leased_events", "events that workers hold now", "group"),
    _gauge("headwater_group_open_leases", "batches that are claimed and not settled", "group"),
    _gauge(
        "headwater_group_redeliveries", "events that are to be tried again, or wait behind one of their key", "group"
    ),
    _gauge("headwater_group_dead_letters", "events that the group has given up on", "group"),
    _counter("headwater_group_claimed_events_total", "events that were handed out for the first time", "group"),
    _gauge("headwater_group_paused", "1: nobody gets events of it", "group"),
    _gauge(
        "headwater_group_has_workers",
        "1 if a worker asked for events in the last minute or holds a lease, or a reader holds the group; else 0.",
        "group",
    ),
    _gauge(
        "headwater_group_stalled",
        "1 if workers ask and events have waited for over a minute, but none is handed out; else 0.",
        "group",
    ),
    _gauge("headwater_cursors", "cursors"),
    _gauge(
        "headwater_cursor_lag_events",
        "Events of its own topics after the cursor, counted up to 1000.",
        "cursor",
    ),
    _gauge(
        "headwater_cursor_lag_is_more", "1 if headwater_cursor_lag_events is a lower bound, 0 if it is exact.", "cursor"
    ),
    _gauge(
        "headwater_cursor_lag_seconds",
        "Age in seconds of the oldest event after the cursor; 0 if there is none.",
        "cursor",
    ),
    _gauge("headwater_pipeline_running", "1: somebody runs it", "pipeline"),
    _gauge(
        "headwater_pipeline_behind",
        "Events of its own topics that it has yet to read, counted up to 1000; or bytes of WAL if it captures changes.",
        "pipeline",
        "source",
    ),
    _gauge(
        "headwater_pipeline_behind_is_more",
        "1 if headwater_pipeline_behind is a lower bound, 0 if it is exact.",
        "pipeline",
        "source",
    ),
    _gauge(
        "headwater_pipeline_failed", "1 if its last run ended with an error or its runner is lost; else 0.", "pipeline"
    ),
    _counter("headwater_pipeline_rows_total", "rows that it has moved", "pipeline"),
    _counter("headwater_pipeline_batches_total", "batches that it has finished", "pipeline"),
    _gauge("headwater_pipeline_failures", "failures in a row; a batch that succeeds makes it 0", "pipeline"),
    _gauge("headwater_pipeline_silent_seconds", "how long ago its last batch ended", "pipeline"),
    _gauge("headwater_slot_lag_bytes", "what the replication slot keeps of the server's log", "slot"),
    _gauge("headwater_slot_active", "1: somebody reads from it", "slot"),
    _gauge(
        "headwater_kafka_group_lag_events",
        "Records after what the group has committed, over all partitions; in an open topic counted up to 1000.",
        "group",
        "topic",
    ),
    PUBLISHED,
    APPENDS,
    HANDLED,
    LEASES_LOST,
    WEBHOOK_REQUESTS,
    STOPPED_FILTERS,
    UNAVAILABLE,
    EPOCH_CHANGED,
    SCRAPES_FAILED,
    BACKGROUND_FAILURES,
)
