"""The names and meanings of all metrics and log fields. The text of a log line is constant; values are fields."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal

logger: Final = logging.getLogger("headwater")

# --- log fields ----------------------------------------------------------------------------------------------

CURSOR: Final = "cursor"
QUEUE: Final = "queue"
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
    QUEUE: "the queue's name",
    GROUP: "the Kafka consumer group's name",
    WEBHOOK: "the webhook's name",
    POSITION: "a position in the log",
    WAIT_SECONDS: "seconds until the next attempt",
    ERROR: "the error message",
    SLOT: "the replication slot's name",
    RETAINED_BYTES: "bytes of WAL that the slot retains",
    OPEN: "messages that are not acknowledged yet",
    EPOCH: "the current epoch of the log",
    READ_TO: "the position that the reader had reached",
}

# --- metrics -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `source` is the database, or the process, which counts since its start."""

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
    "Events published by this process, without scheduled events and events of Kafka transactions.",
    "topic",
)
APPENDS: Final = _counted(
    "headwater_appends_total",
    "Event-store appends by this process. outcome: appended, or conflict if the append condition was not met.",
    "topic",
    "outcome",
)
HANDLED: Final = _counted(
    "headwater_handled_events_total",
    "Events processed by handlers of this process. outcome: done, retry, dead or snooze.",
    "queue",
    "outcome",
)
LEASES_LOST: Final = _counted(
    "headwater_leases_lost_total", "Leases of this process that expired before they were settled.", "queue"
)
WEBHOOK_REQUESTS: Final = _counted(
    "headwater_webhook_requests_total",
    "Webhook requests sent by this process. answer: 2xx, 3xx, 4xx, 5xx, or none without a response.",
    "webhook",
    "answer",
)
STOPPED_FILTERS: Final = _counted(
    "headwater_stopped_filters_total",
    "Times that this process found a filter of its SQL subscriptions stopped because it took too long.",
    "queue",
)
UNAVAILABLE: Final = _counted(
    "headwater_unavailable_total", "Calls of this process that failed because the database was unavailable."
)
EPOCH_CHANGED: Final = _counted(
    "headwater_epoch_changes_total",
    "Times that a reader of this process found a new epoch and went back to the last common position.",
)
SCRAPES_FAILED: Final = _counted(
    "headwater_scrapes_failed_total", "Scrapes of this process that could not read metrics from the database."
)
BACKGROUND_FAILURES: Final = _counted(
    "headwater_background_failures_total",
    "Failures of background tasks of this process; each task is restarted after a pause. Any is a bug: see the log.",
    "task",
)

METRICS: Final = (
    _gauge(
        "headwater_up",
        "1 if the database answered this scrape; 0 if only the counters of this process follow.",
    ),
    _gauge("headwater_log_head_position", "Head of the log: the highest position assigned so far."),
    _gauge(
        "headwater_log_stable_position",
        "Stable position of the log, up to which readers see events; below the head while publishers are open.",
    ),
    _counter(
        "headwater_log_positions_total",
        "Positions assigned since the log was created, including those of rolled-back transactions.",
    ),
    _gauge("headwater_publishers_in_flight", "Open transactions that have published events."),
    _gauge(
        "headwater_oldest_publisher_age_seconds",
        "Age in seconds of the oldest open publishing transaction; readers wait for it.",
    ),
    _gauge(
        "headwater_oldest_publisher_pid",
        "Postgres process id of the oldest open publishing transaction; 0 if there is none or it is prepared.",
    ),
    _gauge(
        "headwater_segments", "Segments of the log. state: closed, open, or ahead (created but not used yet).", "state"
    ),
    _gauge("headwater_open_segment_free_positions", "Unassigned positions in the open segment."),
    _gauge("headwater_oldest_segment_age_seconds", "Age in seconds of the oldest segment: how far back the log goes."),
    _gauge("headwater_log_bytes", "Size in bytes of all events on disk, including indexes."),
    _gauge(
        "headwater_retention_held_positions",
        "Positions that retention keeps for cursors, queues and archives that hold retention.",
    ),
    _gauge("headwater_maintenance_age_seconds", "Seconds since maintenance last ran; absent if it never ran."),
    _counter("headwater_clock_steps_total", "Steps back of the database clock that maintenance has seen."),
    _gauge(
        "headwater_scheduled_overdue_seconds",
        "Delay in seconds of the most overdue scheduled event; 0 if none is overdue.",
    ),
    _gauge("headwater_topics", "Number of topics."),
    _gauge("headwater_topic_last_position", "Position of the last event of the topic; 0 if it has none.", "topic"),
    _gauge("headwater_topic_silent_seconds", "Seconds since the last event of the topic was published.", "topic"),
    _gauge(
        "headwater_topic_events_per_second",
        "Publishing rate of the topic in events per second, over its last 50 events or the last minute.",
        "topic",
    ),
    _gauge("headwater_queues", "Number of queues."),
    _gauge(
        "headwater_queue_lag_events",
        "Events of the queue's topics that it has not finished. New events are counted up to 1000.",
        "queue",
    ),
    _gauge(
        "headwater_queue_lag_is_more", "1 if headwater_queue_lag_events is a lower bound, 0 if it is exact.", "queue"
    ),
    _gauge(
        "headwater_queue_lag_seconds",
        "Age in seconds of the oldest event that the queue has not claimed; 0 if there is none.",
        "queue",
    ),
    _gauge(
        "headwater_queue_unfinished_seconds",
        "Age in seconds of the oldest unfinished event of the queue, including retries; 0 if there is none.",
        "queue",
    ),
    _gauge("headwater_queue_leased_events", "Events of the queue that workers hold in leases.", "queue"),
    _gauge("headwater_queue_open_leases", "Leases of the queue that are not settled.", "queue"),
    _gauge(
        "headwater_queue_redeliveries",
        "Events of the queue that wait for a retry, or behind an event with the same key.",
        "queue",
    ),
    _gauge("headwater_queue_dead_letters", "Dead letters of the queue.", "queue"),
    _counter("headwater_queue_claimed_events_total", "Events that the queue delivered for the first time.", "queue"),
    _gauge("headwater_queue_paused", "1 if the queue is paused; else 0.", "queue"),
    _gauge(
        "headwater_queue_has_workers",
        "1 if a worker claimed in the last minute or holds a lease, or a reader holds the queue; else 0.",
        "queue",
    ),
    _gauge(
        "headwater_queue_stalled",
        "1 if workers claim and events have waited for over a minute, but none is delivered; else 0.",
        "queue",
    ),
    _gauge("headwater_cursors", "Number of cursors."),
    _gauge(
        "headwater_cursor_lag_events",
        "Events of the cursor's topics after its position, counted up to 1000.",
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
    _gauge("headwater_pipeline_running", "1 if a process runs the pipeline; else 0.", "pipeline"),
    _gauge(
        "headwater_pipeline_behind",
        "Unread events of the pipeline's topics, counted up to 1000; or unread bytes of WAL if it captures changes.",
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
        "headwater_pipeline_failed",
        "1 if the pipeline stopped with an error or its runner is lost; else 0.",
        "pipeline",
    ),
    _counter("headwater_pipeline_rows_total", "Rows written by the pipeline.", "pipeline"),
    _counter("headwater_pipeline_batches_total", "Batches finished by the pipeline.", "pipeline"),
    _gauge(
        "headwater_pipeline_failures",
        "Consecutive failures of the pipeline; a successful batch resets it to 0.",
        "pipeline",
    ),
    _gauge("headwater_pipeline_silent_seconds", "Seconds since the last batch of the pipeline ended.", "pipeline"),
    _gauge("headwater_slot_lag_bytes", "Bytes of WAL that the replication slot retains.", "slot"),
    _gauge("headwater_slot_active", "1 if the replication slot is in use; else 0.", "slot"),
    _gauge(
        "headwater_kafka_group_lag_events",
        "Records after the committed offsets of the consumer group; in an open topic counted up to 1000.",
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
