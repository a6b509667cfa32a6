"""Calls for the log as a whole and its topics."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Unpack

from headwater.calls.call import Call, Rows, Selected, named_arguments, nothing, only_value, setting_columns
from headwater.calls.encoding import checked_text
from headwater.database.schema import Installed
from headwater.errors import never_issued_error
from headwater.log.model import (
    Growth,
    LogSettings,
    LogState,
    LogStateByTopic,
    MaintenanceResult,
    Publisher,
    Topic,
    TopicOverview,
    WaitedState,
    WaitKey,
)
from headwater.log.settings import NewTopicSettings, TopicChanges, TopicSettings
from headwater.setting_definitions import changeable, checked, definitions


def installed() -> Call[Installed | None]:
    """The installed schema versions. Fails with SchemaMismatch if there is no schema."""
    return Call(
        "select max(m.number), max(m.oldest_program), i.version, i.functions_checksum "
        "from headwater_internal.migration m cross join headwater_internal.installed i group by 3, 4",
        (),
        lambda rows: Installed(*rows[0]) if rows else None,
    )


def probe_storage() -> Call[None]:
    """Write to the disk and free the space again. Fails with StorageFull if the disk is full."""
    return Call("select headwater_internal.probe_storage()", (), lambda rows: None)


def head() -> Call[int]:
    """The head: the highest position assigned so far. Takes no snapshot, so it is cheap enough to poll."""
    return Call("select headwater.head()", (), only_value)


def log_state(topics: Sequence[str] | None = None) -> Call[LogState]:
    """The head, the stable position for readers of these topics or of the whole log, and the epoch."""
    names = None if topics is None else list(topics)
    return Call(
        "select head, stable, epoch from headwater.log_state(%s::text[])", (names,), lambda rows: LogState(*rows[0])
    )


def log_state_by_topic(topics: Sequence[str]) -> Call[LogStateByTopic]:
    """The stable position of each of these topics."""

    def decode(rows: Rows) -> LogStateByTopic:
        head, stable, epoch, bounds, held_topics, held_to = rows[0]
        held = dict(zip(held_topics or (), held_to or (), strict=True))
        return LogStateByTopic(head, stable, epoch, tuple(bounds or ()), frozenset(topics), held)

    return Call(
        "select head, stable, epoch, bounds, held_topics, held_to from "
        "headwater_internal.log_state_by_topic(%s::text[])",
        (list(topics),),
        decode,
    )


def states_of_waiters(queues: Sequence[str], cursors: Sequence[str]) -> Call[dict[WaitKey, WaitedState]]:
    """The states of queues and cursors that waiters of this process wait for. What does not exist is missing."""
    return Call(
        "select kind, name, state, due, due_seconds, topics "
        "from headwater_internal.states_of_waiters(%s::text[], %s::text[])",
        (list(queues), list(cursors)),
        lambda rows: {WaitKey(kind, name): WaitedState(*state) for kind, name, *state in rows},
    )


def growth(seen_head: int | None, seen_stable: int, topics: Sequence[str]) -> Call[Growth | None]:
    """How the log has grown beyond this head; None: it has not. Without a head, the result is always there."""

    def decode(rows: Rows) -> Growth | None:
        head, epoch, bounds, grown = rows[0]
        return None if epoch is None else Growth(head, epoch, tuple(bounds), frozenset(grown))

    return Call(
        "select head, epoch, bounds, grown from headwater_internal.growth(%s::bigint, %s::bigint, %s::text[])",
        (seen_head, seen_stable, list(topics)),
        decode,
    )


def current_epoch() -> Call[int]:
    """The current epoch: see LogState."""
    return Call("select headwater.current_epoch()", (), only_value)


def common_position(epoch: int, position: int) -> Call[int]:
    """The last position at or below this one that identifies the same event in that epoch and in the current one."""
    return Call("select headwater.common_position(%s, %s)", (epoch, position), only_value)


def resume(epoch: int | None, position: int) -> Call[tuple[int, int]]:
    """The position where a reader continues in the current epoch, and that epoch; `epoch` is that of the position, if
    known.

    Raises EpochChanged for a position that this log never assigned.
    """

    def decode(rows: Rows) -> tuple[int, int]:
        present, common, head = rows[0]
        if common > head:
            raise never_issued_error(position, epoch, present, head)
        return common, present

    return Call(
        "select headwater.current_epoch(), headwater.common_position(%s, %s), headwater.head()",
        (epoch, position),
        decode,
    )


def publishers_in_flight() -> Call[list[Publisher]]:
    return Call(
        "select pid, prepared, position_bound, user_name, application_name, state, began_at, age, topics "
        "from headwater.publisher_in_flight order by position_bound",
        (),
        lambda rows: [Publisher(*row) for row in rows],
    )


def maintain() -> Call[MaintenanceResult]:
    return Call(
        "select busy, coalesce(released, 0), coalesce(segments_made, 0), coalesce(segments_dropped, 0), "
        "coalesce(events_swept, 0) from headwater.maintain()",
        (),
        lambda rows: MaintenanceResult(*rows[0]),
    )


_SETTINGS = "segment_interval, segments_ahead, auto_create_topics, kafka_offsets_kept, max_publisher_seconds"


def log_settings() -> Call[LogSettings]:
    return Call(
        f"select {_SETTINGS} from headwater_internal.setting",
        (),
        lambda rows: LogSettings(*rows[0]),
    )


def change_log_settings(
    *,
    segment_interval: timedelta | None = None,
    segments_ahead: int | None = None,
    auto_create_topics: bool | None = None,
    kafka_offsets_kept: timedelta | None = None,
    max_publisher_seconds: float | None = None,
) -> Call[LogSettings]:
    """Change settings of the whole log; None leaves a setting unchanged; 0 for max_publisher_seconds removes the
    limit."""
    return Call(
        "update headwater_internal.setting set segment_interval = coalesce(%s, segment_interval), "
        "segments_ahead = coalesce(%s, segments_ahead), auto_create_topics = coalesce(%s, auto_create_topics), "
        "kafka_offsets_kept = coalesce(%s, kafka_offsets_kept), "
        "max_publisher_seconds = nullif(coalesce(%s::float8, max_publisher_seconds), 0) "
        f"returning {_SETTINGS}",
        (segment_interval, segments_ahead, auto_create_topics, kafka_offsets_kept, max_publisher_seconds),
        lambda rows: LogSettings(*rows[0]),
    )


_TOPIC = Selected(
    Topic,
    {
        "id": "id",
        "name": "name",
        "created_at": "created_at",
        "expired_to": "expired_to",
        **setting_columns(TopicSettings),
    },
)
_TOPIC_OVERVIEW = Selected(
    TopicOverview,
    {
        "name": "name",
        "created_at": "created_at",
        "expired_to": "expired_to",
        "first_position": "first_position",
        "last_position": "last_position",
        "last_published_at": "last_published_at",
        **setting_columns(TopicSettings),
    },
)


def create_topic(name: str, *, if_missing: bool = False, **settings: Unpack[NewTopicSettings]) -> Call[Topic]:
    arguments, params = named_arguments(
        {
            "name": checked_text(name, "topic name"),
            "if_missing": if_missing,
            **checked(definitions(TopicSettings), settings),
        }
    )
    return Call(f"select {_TOPIC.sql} from headwater.create_topic({arguments})", params, _TOPIC.first)


def alter_topic(name: str, *, keep_forever: bool = False, **changes: Unpack[TopicChanges]) -> Call[Topic]:
    """Change settings; None leaves a setting unchanged, `keep_forever` removes the retention."""
    arguments, params = named_arguments(
        {
            "name": checked_text(name, "topic name"),
            "keep_forever": keep_forever,
            **checked(changeable(TopicSettings), changes),
        }
    )
    return Call(f"select {_TOPIC.sql} from headwater.alter_topic({arguments})", params, _TOPIC.first)


def delete_topic(name: str) -> Call[None]:
    return Call("select headwater.delete_topic(%s)", (checked_text(name, "topic name"),), nothing)


def find_topic(name: str) -> Call[Topic]:
    return Call(
        f"select {_TOPIC.sql} from headwater_internal.find_topic(%s)", (checked_text(name, "topic name"),), _TOPIC.first
    )


def topic_to_publish(name: str) -> Call[Topic]:
    """The topic. A missing topic is created only if `auto_create_topics` is on."""
    return Call(
        f"select {_TOPIC.sql} from headwater_internal.topic_to_publish(%s)",
        (checked_text(name, "topic name"),),
        _TOPIC.first,
    )


def topics() -> Call[list[TopicOverview]]:
    return Call(f"select {_TOPIC_OVERVIEW.sql} from headwater.topic_overview order by name", (), _TOPIC_OVERVIEW.all)
