"""Calls about archives, what they have of the log, and what is replayed from there."""

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
class KeptTopic:
    """What there is of a topic: its events after `lost_to`, of which those up to `expired_to` are in an archive."""

    topic: str
    created_after: int
    """All its events come after this position. An archive may have events of an earlier topic of that name."""
    expired_to: int
    lost_to: int
    location: str | None
    """The archive that has what retention took; None if there is none."""


@dataclass(frozen=True, slots=True)
class ArchiveOverview:
    """An archive with what it has yet to get, and the topics whose retention waits for it."""

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
    """A replay by its name: what was asked for, and how far it is."""

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
    """Note an archive that gets all events after a position; the answer is up to where it has them."""
    return Call(
        "select archived_to from headwater.register_archive(%s, %s, %s::text[], %s)",
        (
            checked_text(name, "archive name"),
            checked_text(location, "location"),
            None if topics is None else sorted(set(topic_names(topics) or [])),
            start_after,
        ),
        only_value,
    )


def note_archived(name: str, *, to_position: int, epoch: int | None = None) -> Call[None]:
    """An archive has everything up to a position of that epoch."""
    return Call(
        "select headwater.note_archived(%s, %s, %s)", (checked_text(name, "archive name"), to_position, epoch), nothing
    )


def forget_archive(name: str) -> Call[bool]:
    return Call("select headwater.forget_archive(%s)", (checked_text(name, "archive name"),), only_value)


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


def kept_topics(topics: Sequence[str] | None) -> Call[list[KeptTopic]]:
    """What there is of these topics, in the log and in archives; None: of all."""
    return Call(
        "select topic, created_after, expired_to, lost_to, location from headwater.kept_topics(%s::text[]) order by 1",
        (topic_names(topics),),
        lambda rows: [KeptTopic(*row) for row in rows],
    )


def uncleared_topics(topics: Sequence[str] | None, *, after: int) -> Call[list[str]]:
    """Those topics that still have events in the log after a position which retention counts as gone already."""
    return Call(
        "select t.name from headwater.topic t where t.id = any (headwater.topic_ids(%s::text[])) and exists ("
        "select from headwater.event e where e.topic_id = t.id and e.position > %s and e.position <= t.expired_to)",
        (topic_names(topics), after),
        lambda rows: [row[0] for row in rows],
    )


def average_bytes(topics: Sequence[str] | None, *, after: int, up_to: int) -> Call[int]:
    """How large the next events are on average, by looking at some; 0 if there are none."""
    return Call("select headwater.average_bytes(%s::text[], %s, %s)", (topic_names(topics), after, up_to), only_value)


def start_replay(
    name: str, request: Mapping[str, Any], *, start_after: int, up_to: int, plan: Mapping[str, Any]
) -> Call[Replay]:
    """Begin a replay, or find the one of that name."""
    return Call(
        f"select {_REPLAY} from headwater.start_replay(%s, %s::jsonb, %s, %s, %s::jsonb)",
        (checked_text(name, "replay name"), json.dumps(request), start_after, up_to, json.dumps(plan)),
        lambda rows: _replay(rows[0]),
    )


def advance_replay(name: str, *, from_position: int, to_position: int, more_events: int) -> Call[None]:
    return Call(
        "select headwater.advance_replay(%s, %s, %s, %s)",
        (checked_text(name, "replay name"), from_position, to_position, more_events),
        nothing,
    )


def find_replay(name: str) -> Call[Replay | None]:
    return Call(
        f"select {_REPLAY} from headwater.replay where name = %s",
        (checked_text(name, "replay name"),),
        lambda rows: _replay(rows[0]) if rows else None,
    )


def replays() -> Call[list[Replay]]:
    return Call(f"select {_REPLAY} from headwater.replay order by started_at", (), _replays)


def replay_writer(name: str) -> str:
    """The name under which a replay publishes."""
    return f"replay-{checked_text(name, 'replay name')}"


def forget_replay(name: str) -> Call[bool]:
    """Forget a replay, and what it has published: under its name another can begin."""
    return Call(
        "with gone as (delete from headwater.writer_epoch where writer = %s) select headwater.forget_replay(%s)",
        (replay_writer(name), name),
        only_value,
    )


def _replays(rows: Rows) -> list[Replay]:
    return [_replay(row) for row in rows]


def _replay(row: Sequence[Any]) -> Replay:
    return Replay(*row)
