"""Conversion between the messages of headwater.v1 and values: events, queries, conditions, leases. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from headwater.errors import HeadwaterError, InvalidEvent, InvalidRequest
from headwater.eventstore.query import (
    Appended,
    Condition,
    Item,
    LatestMatchIs,
    NewStoreEvent,
    NoMatchAfter,
    Query,
    StoreEvent,
)
from headwater.log.model import Event, NewEvent
from headwater.queue.model import Dead, DeadLetter, Lease, Outcome, Retry, Snooze
from headwater.servers.grpc.errors import code_for
from headwater.servers.grpc.generated import headwater_pb2 as pb
from headwater.setting_definitions import SettingDefinition

M = TypeVar("M", pb.Event, pb.StoreEvent)

MAX_READ: Final = 10_000
MAX_STREAM_BATCH: Final = 1000
MAX_READ_BYTES: Final = 16_777_216
# Maximum bytes that the server buffers for each Follow stream, whose client may be slow.
MAX_FOLLOW_BYTES: Final = 4_194_304
# Maximum size of a message of a stream, unless a single event is larger. Also the bytes that the server buffers for
# each subscriber of an event store: there may be many subscribers, and events can be read again.
MAX_CHUNK_BYTES: Final = 1_048_576
UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def settings_of(request: Message, definitions: tuple[SettingDefinition, ...]) -> dict[str, Any]:
    """The settings that a request gives. A field without presence gives one if it is not 0 or empty."""
    fields = request.DESCRIPTOR.fields_by_name
    found = {}
    for one in definitions:
        if one.json_name in fields:
            value = getattr(request, one.json_name)
            if request.HasField(one.json_name) if fields[one.json_name].has_presence else value:
                found[one.name] = one.from_json(value)
    return found


def _reject_constant(text: str) -> Any:
    raise ValueError(f"invalid JSON number {text}")


_encode = json.JSONEncoder(ensure_ascii=False).encode
_decode = json.JSONDecoder(parse_constant=_reject_constant).decode


def check_range(value: int, default: int, maximum: int, what: str) -> int:
    """Check a number of a request against its limit; 0 means the default."""
    if not 0 <= value <= maximum:
        raise InvalidRequest(f"invalid {what} {value}: expected 1 to {maximum}, or 0 for the default")
    return value or default


def json_object(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object of a request."""
    try:
        found = _decode(text)
        if "\\u" in text:
            # Python accepts lone surrogates, which are not valid Unicode: encoding fails on them.
            _encode(found).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidEvent(f"invalid JSON in {what}: {error}") from None
    if not isinstance(found, dict):
        raise InvalidEvent(f"invalid {what} {text[:40]!r}: expected a JSON object")
    return found


def timestamp(at: datetime) -> Timestamp:
    """Convert a time. Four times as fast as Timestamp.FromDatetime."""
    since = at - UNIX_EPOCH
    return Timestamp(seconds=since.days * 86400 + since.seconds, nanos=since.microseconds * 1000)


def new_event(message: pb.NewEvent) -> NewEvent:
    return NewEvent(
        payload=message.payload if message.HasField("payload") else None,
        key=message.key if message.HasField("key") else None,
        type=message.type if message.HasField("type") else None,
        routing_key=message.routing_key if message.HasField("routing_key") else None,
        headers=json_object(message.headers, "headers") if message.HasField("headers") else None,
        event_id=message.event_id if message.HasField("event_id") else None,
        content_type=message.content_type if message.HasField("content_type") else None,
        partition=message.partition if message.HasField("partition") else None,
    )


def event_message(event: Event) -> pb.Event:
    return pb.Event(
        position=event.position,
        topic=event.topic,
        partition=event.partition,
        topic_offset=event.topic_offset,
        key=event.key,
        type=event.type,
        routing_key=event.routing_key,
        headers=_text(event.headers),
        content_type=event.content_type,
        payload=event.payload,
        event_id=event.event_id,
        published_at=timestamp(event.published_at),
    )


def lease_message(lease: Lease) -> pb.Lease:
    return pb.Lease(
        queue=lease.queue,
        token=lease.token,
        expires_at=lease.expires_at,
        events=[pb.ClaimedEvent(event=event_message(one.event), attempt=one.attempt) for one in lease.events],
        isolated=lease.isolated,
    )


def outcomes(messages: Iterable[pb.Outcome]) -> dict[int, Outcome]:
    return {message.position: _outcome(message) for message in messages}


def _outcome(message: pb.Outcome) -> Outcome:
    match message.WhichOneof("end"):
        case "done":
            return None
        case "retry":
            after = timedelta(seconds=message.retry.after_seconds) if message.retry.HasField("after_seconds") else None
            return Retry(after, message.retry.reason) if message.retry.reason else Retry(after)
        case "dead":
            return Dead(message.dead.reason)
        case "release":
            return Snooze(timedelta(seconds=message.release.after_seconds))
        case _:
            raise InvalidRequest(
                f"the outcome of event {message.position} is missing: expected done, retry, dead or release"
            )


def new_store_event(message: pb.NewStoreEvent) -> NewStoreEvent:
    # A missing type is reported by the same check as for all other events.
    kind: Any = message.type if message.HasField("type") else None
    return NewStoreEvent(
        kind,
        message.payload if message.HasField("payload") else None,
        tuple(message.tags),
        json_object(message.metadata, "metadata") if message.HasField("metadata") else None,
        message.event_id if message.HasField("event_id") else None,
        message.content_type if message.HasField("content_type") else None,
    )


def store_event_message(event: StoreEvent) -> pb.StoreEvent:
    return pb.StoreEvent(
        position=event.position,
        topic_offset=event.topic_offset,
        event_id=event.event_id,
        type=event.type,
        tags=event.tags,
        metadata=_text(event.metadata),
        content_type=event.content_type,
        payload=event.payload,
        published_at=timestamp(event.published_at),
    )


def query(message: pb.Query) -> Query:
    return Query(tuple(Item(tuple(item.types), tuple(item.tags), dict(item.fields)) for item in message.items))


def condition(message: pb.AppendRequest | pb.NumberedAppend) -> Condition | None:
    if not message.HasField("condition"):
        return None
    sent = message.condition
    match sent.WhichOneof("holds"):
        case "no_match_after":
            return NoMatchAfter(query(sent.query), sent.no_match_after, sent.epoch or None)
        case "latest_match_is":
            return LatestMatchIs(query(sent.query), sent.latest_match_is or None, sent.epoch or None)
        case _:
            raise InvalidRequest("invalid condition: expected no_match_after or latest_match_is")


def dead_letter_message(letter: DeadLetter) -> pb.DeadLetter:
    return pb.DeadLetter(
        position=letter.position,
        type=letter.type,
        attempts=letter.attempts,
        last_error=letter.last_error,
        history=_encode(letter.history),
        died_at=timestamp(letter.died_at),
    )


def append_response(appended: Appended) -> pb.AppendResponse:
    return pb.AppendResponse(positions=appended.positions, repeated=appended.repeated)


def refusal(error: HeadwaterError) -> pb.Refusal:
    return pb.Refusal(
        code=code_for(type(error)).value[0],
        error=type(error).__name__,
        message=error.message,
        hint=error.hint or "",
        detail=json.dumps(dict(error.detail), default=str) if error.detail else "",
    )


def split_into_chunks(events: Iterable[M]) -> Iterator[list[M]]:
    """Split events into lists that fit into a message."""
    chunk: list[M] = []
    size = 0
    for event in events:
        # A nested message also takes its tag and its length.
        own = event.ByteSize() + 6
        if chunk and size + own > MAX_CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(event)
        size += own
    yield chunk


def _text(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else _encode(value)
