"""Registers an archive with the log, so that retention waits for it and readers find it.

The sink registers before the first batch, which fixes the position from which the archive is complete, and records
each batch after it is durable: retention does not remove events that are not recorded as archived.

Readers use an archive only for events removed by retention, so never beyond the recorded position. That is in the
database, so after a failover or restore it is not beyond the log. Archived rows of events that the log has lost are
therefore never read; they are removed before the archive gets its next batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import headwater
from headwater.calls import archives as archive_calls
from headwater.errors import InvalidRequest
from headwater.spark.arrow import EVENT

# With any other option, a source does not read all events of its topics after one position.
FITTING_OPTIONS = frozenset(
    {
        "topics", "after", "partitions", "max_events", "max_bytes", "maxEventsPerTrigger", "maxBytesPerTrigger",
        "waitSeconds",
    }
)  # fmt: skip


def refuse_unfit(source: str, options: Mapping[str, Any], columns: Sequence[str] | None = None) -> None:
    """Raise InvalidRequest if a pipeline with this source and these columns cannot write an archive."""
    if source != "log":
        raise InvalidRequest(
            f"an archive requires the source log, but this pipeline reads {source}", hint="Remove archive: true."
        )
    unfit = sorted(
        name for name, value in options.items() if name not in FITTING_OPTIONS and value not in (None, False)
    )
    if unfit:
        raise InvalidRequest(
            f"an archive must contain all events of its topics, but {', '.join(unfit)} would exclude some",
            hint="Read with the options topics and after only.",
        )
    missing = [] if columns is None else [name for name in EVENT.fieldNames() if name not in columns]
    if missing:
        raise InvalidRequest(
            f"an archive requires all columns of an event, but these rows lack {', '.join(missing)}",
            hint="Remove the transform, or archive: true.",
        )


def topics_of(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The topics in the options of a source; None for the whole log."""
    named = options.get("topics")
    if named is None:
        return None
    names = named.split(",") if isinstance(named, str) else named
    return tuple(sorted({str(name).strip() for name in names if str(name).strip()}))


def register(
    dsn: str, pipeline: str, *, location: str, source: str, options: Mapping[str, Any], written_to: int | None
) -> int:
    """Register the archive of a pipeline before its first batch; return the position up to which it is complete.

    `location` is absolute; `written_to` is the version that the table already records for the pipeline. Rows written
    before the registration do not count, because the position from which they are complete is unknown.
    """
    refuse_unfit(source, options)
    start_after = max(int(options.get("after") or 0), written_to or 0)
    call = archive_calls.register_archive(pipeline, location, topics=topics_of(options), start_after=start_after)
    with headwater.connect(dsn, pool_size=1) as log:
        return log.run(call)


def on_committed(dsn: str, pipeline: str, end: int, epoch: int | None = None) -> None:
    """Record that the archive of a pipeline has everything up to `end` durably. Idempotent.

    EpochChanged if the log has lost events up to `end` since that epoch."""
    with headwater.connect(dsn, pool_size=1) as log:
        log.run(archive_calls.note_archived(pipeline, to_position=end, epoch=epoch))
