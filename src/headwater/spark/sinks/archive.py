"""What a pipeline that archives tells the log, so that retention waits for it and readers find what it keeps.

Its sink registers before the first batch, which fixes from where on the archive is complete, and notes each batch
after it is durable: what is not noted, retention does not take.

Readers look in an archive only for what retention took, so never beyond the note. The note is in the database, so after
a failover or a restore it is not beyond the log. Rows of events that the log has lost are therefore never read; they
are removed before the archive gets its next batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import headwater
from headwater import calls
from headwater.errors import InvalidRequest
from headwater.spark.arrow import EVENT

# A source with more options than these does not read all events of its topics after one position.
FITTING_OPTIONS = frozenset(
    {
        "topics", "after", "partitions", "max_events", "max_bytes", "maxEventsPerTrigger", "maxBytesPerTrigger",
        "waitSeconds",
    }
)  # fmt: skip


def refuse_unfit(source: str, options: Mapping[str, Any], columns: Sequence[str] | None = None) -> None:
    """Say why what such a pipeline writes cannot stand in for the log, if it cannot."""
    if source != "log":
        raise InvalidRequest(
            f"an archive holds the log, and this pipeline reads {source}", hint="Leave out archive: true."
        )
    unfit = sorted(
        name for name, value in options.items() if name not in FITTING_OPTIONS and value not in (None, False)
    )
    if unfit:
        raise InvalidRequest(
            f"an archive holds every event of its topics, and {', '.join(unfit)} would leave some out",
            hint="Read with the options topics and after only.",
        )
    missing = [] if columns is None else [name for name in EVENT.fieldNames() if name not in columns]
    if missing:
        raise InvalidRequest(
            f"an archive holds events whole, and these rows lack {', '.join(missing)}",
            hint="Leave out the transform, or archive: true.",
        )


def topics_of(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The topics that the options of a source name; None for the whole log."""
    named = options.get("topics")
    if named is None:
        return None
    names = named.split(",") if isinstance(named, str) else named
    return tuple(sorted({str(name).strip() for name in names if str(name).strip()}))


def register(
    dsn: str, pipeline: str, *, location: str, source: str, options: Mapping[str, Any], written_to: int | None
) -> int:
    """Note the archive of a pipeline before its first batch; the answer is up to where it is known to be complete.

    `location` is absolute, `written_to` what the table notes for the pipeline already: what was written before there
    was an archive does not count, since nobody knows from where on it is complete.
    """
    refuse_unfit(source, options)
    start_after = max(int(options.get("after") or 0), written_to or 0)
    call = calls.register_archive(pipeline, location, topics=topics_of(options), start_after=start_after)
    with headwater.connect(dsn, pool_size=1) as log:
        return log.run(call)


def on_committed(dsn: str, pipeline: str, end: int, epoch: int | None = None) -> None:
    """Note that the archive of a pipeline durably has everything up to `end`. Harmless when repeated.

    EpochChanged if `end` is of an epoch whose events the log has lost since."""
    with headwater.connect(dsn, pool_size=1) as log:
        log.run(calls.note_archived(pipeline, to_position=end, epoch=epoch))
