"""Calls for archives and replays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text
from headwater.calls.reading import topic_names


@dataclass(frozen=True, slots=True)
class TopicCoverage:
    """Which events of a topic exist: those after `lost_to`, of which those up to `expired_to` are in an archive."""

    topic: str
    created_after: int
    """All its events come after this position. An archive may have events of an earlier topic with the same name."""
    expired_to: int
    lost_to: int
    location: str | None
    """The location of the archive with the events removed by retention; None if there is none."""


@dataclass(frozen=True, slots=True)
class ArchiveOverview:
    """An archive, its lag, and the topics whose retention waits for it."""

    name: str
    location: str
    topics: tuple[str, ...] | None
    archived_to: int
    registered_at: datetime
    updated_at: datetime
    lag_events: int
    lag_is_more: bool
    oldest_unarchived_age: timedelta | None
    held_topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay: its request and its progress."""

    name: str
    request: Mapping[str, Any]
    plan: Mapping[str, Any]
    start_after: int
    up_to: int
    done_to: int
    events: int
    started_at: datetime
    updated_at: datetime
    finished_at: datetime | None


_REPLAY = "name, request, plan, start_after, up_to, done_to, events, started_at, updated_at, finished_at"


def register_archive(name: str, location: str, *, topics: Sequence[str] | None, start_after: int) -> Call[int]:
    """Register an archive that receives all events after a position; returns the position up to which it has them."""
    return Call(
        "select archived_to from headwater_internal.register_archive(%s, %s, %s::text[], %s)",
        (
            checked_text(name, "archive name"),
            checked_text(location, "location"),
            None if topics is None else sorted(set(topic_names(topics) or [])),
            start_after,
        ),
        only_value,
    )


def note_archived(name: str, *, to_position: int, epoch: int | None = None) -> Call[None]:
    """Record that an archive has everything up to a position of that epoch."""
    return Call(
        "select headwater_internal.note_archived(%s, %s, %s)",
        (checked_text(name, "archive name"), to_position, epoch),
        nothing,
    )


def forget_archive(name: str) -> Call[bool]:
    return Call("select headwater_internal.forget_archive(%s)", (checked_text(name, "archive name"),), only_value)


def archives() -> Call[list[ArchiveOverview]]:
    return Call(
        "select name, location, topics, archived_to, registered_at, updated_at, lag_events, lag_is_more, "
        "oldest_unarchived_age, held_topics from headwater.archive_overview order by name",
        (),
        lambda rows: [
            ArchiveOverview(
                r[0], r[1], None if r[2] is None else tuple(r[2]), r[3], r[4], r[5], r[6], r[7], r[8], tuple(r[9])
            )
            for r in rows
        ],
    )


def kept_topics(topics: Sequence[str] | None) -> Call[list[TopicCoverage]]:
    """Which events of these topics exist, in the log and in archives; None: all topics."""
    return Call(
        "select topic, created_after, expired_to, lost_to, location from headwater_internal.kept_topics(%s::text[]) "
        "order by 1",
        (topic_names(topics),),
        lambda rows: [TopicCoverage(*row) for row in rows],
    )


def uncleared_topics(topics: Sequence[str] | None, *, after: int) -> Call[list[str]]:
    """The topics with events in the log after a position that already count as removed by retention."""
    return Call(
        "select t.name from headwater_internal.topic t where t.id = any (headwater_internal.topic_ids(%s::text[])) "
        "and exists ("
        "select from headwater_internal.event e where e.topic_id = t.id and e.position > %s and e.position <= "
        "t.expired_to)",
        (topic_names(topics), after),
        lambda rows: [row[0] for row in rows],
    )


def average_bytes(topics: Sequence[str] | None, *, after: int, up_to: int) -> Call[int]:
    """The average size of the next events, from a sample; 0 if there are none."""
    return Call(
        "select headwater_internal.average_bytes(%s::text[], %s, %s)", (topic_names(topics), after, up_to), only_value
    )


def start_replay(
    name: str, request: Mapping[str, Any], *, start_after: int, up_to: int, plan: Mapping[str, Any]
) -> Call[Replay]:
    """Start a replay, or return the existing one with this name."""
    return Call(
        f"select {_REPLAY} from headwater_internal.start_replay(%s, %s::jsonb, %s, %s, %s::jsonb)",
        (checked_text(name, "replay name"), json.dumps(request), start_after, up_to, json.dumps(plan)),
        lambda rows: _replay(rows[0]),
    )


def advance_replay(name: str, *, from_position: int, to_position: int, more_events: int) -> Call[None]:
    return Call(
        "select headwater_internal.advance_replay(%s, %s, %s, %s)",
        (checked_text(name, "replay name"), from_position, to_position, more_events),
        nothing,
    )


def find_replay(name: str) -> Call[Replay | None]:
    return Call(
        f"select {_REPLAY} from headwater_internal.replay where name = %s",
        (checked_text(name, "replay name"),),
        lambda rows: _replay(rows[0]) if rows else None,
    )


def replays() -> Call[list[Replay]]:
    return Call(f"select {_REPLAY} from headwater_internal.replay order by started_at", (), _replays)


def replay_writer(name: str) -> str:
    """The writer name under which a replay publishes."""
    return f"replay-{checked_text(name, 'replay name')}"


def forget_replay(name: str) -> Call[bool]:
    """Delete a replay and the record of what it has published, so that its name can be used again."""
    return Call(
        "with gone as (delete from headwater_internal.writer_epoch where writer = %s) select "
        "headwater_internal.forget_replay(%s)",
        (replay_writer(name), name),
        only_value,
    )


def _replays(rows: Rows) -> list[Replay]:
    return [_replay(row) for row in rows]


def _replay(row: Sequence[Any]) -> Replay:
    return Replay(*row)
