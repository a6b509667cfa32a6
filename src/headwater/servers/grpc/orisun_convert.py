"""Conversion between Orisun's messages and values of the event store: positions, criteria, events. No I/O.

A position P of the log is {P, P}, so that pairs sort in the order of the log. {0, 0} is before every event, {-1, -1}
means no event. The type of an event is not part of its data: the key `eventType` of a criterion matches it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

from headwater.errors import AppendConflict, InvalidEvent, InvalidRequest
from headwater.eventstore.field_index import FieldIndex, IndexCondition, Kind, define_index
from headwater.eventstore.query import (
    EVERYTHING,
    JSON_TYPE,
    MAX_TYPE_CHARACTERS,
    Condition,
    Item,
    Latest,
    LatestMatchIs,
    NewStoreEvent,
    Query,
    StoreEvent,
)
from headwater.servers.grpc.convert import json_object, timestamp
from headwater.servers.grpc.generated import eventstore_pb2 as pb

TYPE_KEY: Final = "eventType"
# Beyond every event, so an append that expects it fails with the position of the latest match.
MAX_POSITION: Final = (1 << 62) - 1
# The key for payloads that are not JSON, which other protocols can append.
BYTES_KEY: Final = "payload_base64"
KINDS: Final[Mapping[pb.ValueType, Kind]] = {
    pb.TEXT: "text",
    pb.NUMERIC: "numeric",
    pb.BOOLEAN: "boolean",
    pb.TIMESTAMPTZ: "timestamp",
}
VALUE_TYPES: Final = {kind: number for number, kind in KINDS.items()}

_decode = json.JSONDecoder().raw_decode
_encode = json.JSONEncoder(ensure_ascii=False).encode


def position(of: int) -> pb.Position:
    """The position of an event; 0: no event."""
    return pb.Position(commit_position=of or -1, prepare_position=of or -1)


def first_from(of: pb.Position) -> int:
    """The position to read after, to read from a position (inclusive)."""
    commit, prepare = of.commit_position, of.prepare_position
    return _clamp(commit - 1 if prepare <= commit else commit)


def last_before(of: pb.Position) -> int:
    """The position to read before, to read backwards from a position (inclusive)."""
    commit, prepare = of.commit_position, of.prepare_position
    return _clamp(commit + 1 if prepare >= commit else commit)


def first_after(of: pb.Position) -> int:
    """The position to read after, to read from a position (exclusive)."""
    commit, prepare = of.commit_position, of.prepare_position
    return _clamp(commit if prepare >= commit else commit - 1)


def _clamp(position: int) -> int:
    """Limit a position to the valid range."""
    return min(max(position, 0), MAX_POSITION)


def item(criterion: pb.Criterion) -> Item | None:
    """Convert a criterion to an item of a query. None: no event can match it."""
    fields: dict[str, str] = {}
    for tag in criterion.tags:
        if fields.setdefault(tag.key, tag.value) != tag.value:
            return None
    kind = fields.pop(TYPE_KEY, None)
    if kind is None:
        return Item(fields=fields)
    if not 1 <= len(kind) <= MAX_TYPE_CHARACTERS:
        return None
    return Item((kind,), fields=fields)


def query(message: pb.Query) -> Query | None:
    """Convert a query. None: no event can match it."""
    items = [item(criterion) for criterion in message.criteria]
    possible = tuple(one for one in items if one is not None)
    if items and not possible:
        return None
    return Query(possible) if possible else EVERYTHING


def latest_query(criteria: Sequence[pb.Criterion]) -> tuple[Query, list[int]]:
    """Convert criteria to a query, with the index of the criterion of each item."""
    if not criteria:
        raise InvalidRequest("criteria are missing: expected at least one")
    for index, criterion in enumerate(criteria):
        if not criterion.tags:
            raise InvalidRequest(f"criterion {index} has no tags")
    items = [(index, one) for index, one in enumerate(map(item, criteria)) if one is not None]
    return Query(tuple(one for _, one in items)), [index for index, _ in items]


def latest_response(
    criteria: Sequence[pb.Criterion], indexes: Sequence[int], latest: Latest
) -> pb.GetLatestByCriteriaResponse:
    found = dict(zip(indexes, latest.events, strict=True))
    results = []
    for index, criterion in enumerate(criteria):
        one = found.get(index)
        results.append(pb.LatestCriterionResult(criterion=criterion, event=None if one is None else event(one)))
    return pb.GetLatestByCriteriaResponse(results=results, context_position=position(latest.position))


def condition(request: pb.SaveEventsRequest) -> Condition | None:
    """The append condition of a request. None: no condition, or one that always holds."""
    if not request.query.HasField("subsetQuery"):
        return None
    subset = query(request.query.subsetQuery)
    expected = _expected(request)
    if subset is not None:
        return LatestMatchIs(subset, expected)
    if expected is not None:
        raise conflict(request, 0)
    return None


def _expected(request: pb.SaveEventsRequest) -> int | None:
    if not request.query.HasField("expected_position"):
        return None
    commit, prepare = request.query.expected_position.commit_position, request.query.expected_position.prepare_position
    if (commit, prepare) == (-1, -1):
        return None
    return commit if commit == prepare and 0 < commit < MAX_POSITION else MAX_POSITION


def conflict(request: pb.SaveEventsRequest, actual: int) -> AppendConflict:
    """The conflict, in a text that Orisun's clients parse: some look for pairs of numbers, others for single ones."""
    expected = request.query.expected_position if request.query.HasField("expected_position") else position(0)
    found = position(actual)
    return AppendConflict(
        "OptimisticConcurrencyException:StreamVersionConflict: "
        f"Expected ({expected.commit_position}, {expected.prepare_position}), "
        f"Actual ({found.commit_position}, {found.prepare_position}) "
        f"[Expected {max(expected.commit_position, 0)}, Actual {actual}]",
        detail={"actual_position": actual, "expected_position": max(expected.commit_position, 0)},
    )


def new_events(messages: Iterable[pb.EventToSave]) -> list[NewStoreEvent]:
    """Convert and check events to save."""
    return [_new_event(message, index) for index, message in enumerate(messages)]


def _new_event(message: pb.EventToSave, index: int) -> NewStoreEvent:
    if not message.event_type:
        raise InvalidEvent(f"event {index} has no event_type")
    data = message.data
    if TYPE_KEY in json_object(data, f"the data of event {index}"):
        data = without_member(data, TYPE_KEY)
    # Clients omit empty metadata.
    metadata = json_object(message.metadata or "{}", f"the metadata of event {index}")
    return NewStoreEvent(
        message.event_type, data.encode(), metadata=metadata, event_id=message.event_id or None, content_type=JSON_TYPE
    )


def event(stored: StoreEvent) -> pb.Event:
    return pb.Event(
        event_id=stored.event_id or "",
        event_type=stored.type or "",
        data=_data(stored),
        metadata=_encode(stored.metadata or {}),
        position=pb.Position(commit_position=stored.position, prepare_position=stored.position),
        date_created=timestamp(stored.published_at),
    )


def _data(stored: StoreEvent) -> str:
    if stored.payload is None:
        return "{}"
    if stored.content_type in (None, JSON_TYPE):
        try:
            text = stored.payload.decode()
            if stored.content_type is None:
                json.loads(text)
        except ValueError:
            pass
        else:
            return text
    return json.dumps({BYTES_KEY: base64.b64encode(stored.payload).decode()})


def without_member(text: str, name: str) -> str:
    """Remove the members with a name from a JSON object, and leave the rest of the text unchanged."""
    kept: list[str] = []
    at = _past_space(text, text.index("{") + 1)
    while text[at] != "}":
        start = at
        key, at = scanstring(text, at + 1, True)
        at = _past_space(text, _past_space(text, at) + 1)
        _, at = _decode(text, at)
        if key != name:
            kept.append(text[start:at])
        at = _past_space(text, at)
        if text[at] == ",":
            at = _past_space(text, at + 1)
    return "{" + ",".join(kept) + "}"


def _past_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def check_enum(kind: Any, number: int, what: str) -> None:
    """Reject an unknown enum value: a newer client may mean something that is not supported."""
    if number not in kind.values():
        raise InvalidRequest(f"invalid {what} {number}: expected one of {', '.join(kind.keys())}")


def index(request: pb.CreateIndexRequest) -> FieldIndex:
    """Convert an index. Types are always indexed, so `eventType` is left out and the index covers more events."""
    for value_type in (field.value_type for field in request.fields):
        check_enum(pb.ValueType, value_type, "value_type")
    check_enum(pb.ConditionCombinator, request.condition_combinator, "condition_combinator")
    fields = {field.json_key: KINDS[field.value_type] for field in request.fields}
    conditions = [one for one in request.conditions if one.key != TYPE_KEY]
    either = request.condition_combinator == pb.OR
    if either and len(conditions) < len(request.conditions):
        # With OR and a condition on the type, the index would contain all events of that type.
        conditions = []
    operators: Any = [one.operator for one in conditions]
    return define_index(
        request.name,
        {name: kind for name, kind in fields.items() if name != TYPE_KEY} or fields,
        [IndexCondition(one.key, operator, one.value) for one, operator in zip(conditions, operators, strict=True)],
        "or" if either else "and",
    )


def index_definition(kept: FieldIndex) -> pb.IndexDefinition:
    return pb.IndexDefinition(
        name=kept.name,
        fields=[
            pb.IndexField(json_key=field, value_type=VALUE_TYPES[kind])
            for field, kind in zip(kept.fields, kept.kinds, strict=True)
        ],
        conditions=[
            pb.IndexCondition(key=one.field, operator=one.operator, value=str(one.value)) for one in kept.conditions
        ],
        condition_combinator=pb.OR if kept.combine == "or" else pb.AND,
        state=pb.INDEX_STATE_READY if kept.ready else pb.INDEX_STATE_BUILDING,
    )
