"""Our own messages: events, queries and conditions, from values and to values. No I/O here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

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
from headwater.model import Dead, DeadLetter, Event, Lease, NewEvent, Outcome, Retry, Snooze
from headwater.servers.grpc.errors import code_for
from headwater.servers.grpc.generated import headwater_pb2 as pb

M = TypeVar("M", pb.Event, pb.StoreEvent)

MAX_READ: Final = 10_000
MAX_STREAMED: Final = 1000
MAX_READ_BYTES: Final = 16_777_216
# As much of the log is in hand for a follower, who may be slow to take it.
FOLLOWED_BYTES: Final = 4_194_304
# A message of a stream is as large as this, or has one event. So much is in hand for each subscriber of an event store:
# there are many, and what one does not take comes from the log again.
PARCEL_BYTES: Final = 1_048_576
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


_encode = json.JSONEncoder(ensure_ascii=False).encode
_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


def within(asked: int, default: int, most: int, what: str) -> int:
    """A number of a request that has a limit; 0 is not said."""
    if not 0 <= asked <= most:
        raise InvalidRequest(f"{what} is 1 to {most}, not {asked}")
    return asked or default


def json_object(text: str, what: str) -> dict[str, Any]:
    """A JSON object of a request."""
    try:
        found = _decode(text)
        if "\\u" in text:
            # Half of a pair of surrogates is text to Python, and to nobody else.
            _encode(found).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidEvent(f"{what} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidEvent(f"{what} is a JSON object, not {text[:40]!r}")
    return found


def timestamp(at: datetime) -> Timestamp:
    """A time. Protocol buffers can do this themselves, in four times the time."""
    since = at - EPOCH
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
        group=lease.group,
        token=lease.token,
        expires_at=lease.expires_at,
        events=[pb.ClaimedEvent(event=event_message(one.event), attempt=one.attempt) for one in lease.events],
        alone=lease.alone,
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
            raise InvalidRequest(f"how the event at {message.position} ended is not said: done, retry, dead or release")


def new_store_event(message: pb.NewStoreEvent) -> NewStoreEvent:
    # A type that is left out is told of as every other event without one.
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
    asked = message.condition
    match asked.WhichOneof("holds"):
        case "no_match_after":
            return NoMatchAfter(query(asked.query), asked.no_match_after, asked.epoch or None)
        case "latest_match_is":
            return LatestMatchIs(query(asked.query), asked.latest_match_is or None, asked.epoch or None)
        case _:
            raise InvalidRequest("a condition says what holds: no_match_after or latest_match_is")


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


def parcels(events: Iterable[M]) -> Iterator[list[M]]:
    """Events that are messages already, in parcels that fit into a message."""
    parcel: list[M] = []
    size = 0
    for event in events:
        # Of a message within a message, its tag and its length come beside it.
        own = event.ByteSize() + 6
        if parcel and size + own > PARCEL_BYTES:
            yield parcel
            parcel, size = [], 0
        parcel.append(event)
        size += own
    yield parcel


def _text(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else _encode(value)
