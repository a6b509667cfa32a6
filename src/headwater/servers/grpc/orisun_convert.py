"""Orisun's messages: positions, criteria and events, as the event stores of the log have them. No I/O here.

A position of the log P is {P, P}, so that pairs are in the order of the log. {0, 0} is before every event, {-1, -1} is
no event. The type of an event is not in its data: the key `eventType` of a criterion asks for it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

from headwater.errors import AppendConflict, InvalidEvent, InvalidRequest
from headwater.eventstore.field_index import FieldIndex, IndexCondition, Kind, defined
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
# No event is there, so whoever expects it is told where the latest match is.
NOWHERE: Final = (1 << 62) - 1
# Where an event's payload goes that is no JSON: other doors can append those.
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
    """Where an event is; 0: there is none."""
    return pb.Position(commit_position=of or -1, prepare_position=of or -1)


def first_from(asked: pb.Position) -> int:
    """What to read after, to read from a position on."""
    commit, prepare = asked.commit_position, asked.prepare_position
    return _within(commit - 1 if prepare <= commit else commit)


def last_before(asked: pb.Position) -> int:
    """What to read before, to read backwards from a position on."""
    commit, prepare = asked.commit_position, asked.prepare_position
    return _within(commit + 1 if prepare >= commit else commit)


def first_after(asked: pb.Position) -> int:
    """What to read after, to read on from a position, which is not included."""
    commit, prepare = asked.commit_position, asked.prepare_position
    return _within(commit if prepare >= commit else commit - 1)


def _within(place: int) -> int:
    """A place of the log, whatever was asked for: all that is beyond is as far as it goes."""
    return min(max(place, 0), NOWHERE)


def item(criterion: pb.Criterion) -> Item | None:
    """A criterion as an item of a query. None: nothing can match it."""
    asked: dict[str, str] = {}
    for tag in criterion.tags:
        if asked.setdefault(tag.key, tag.value) != tag.value:
            return None
    kind = asked.pop(TYPE_KEY, None)
    if kind is None:
        return Item(fields=asked)
    if not 1 <= len(kind) <= MAX_TYPE_CHARACTERS:
        return None
    return Item((kind,), fields=asked)


def query(asked: pb.Query) -> Query | None:
    """A query. None: nothing can match it."""
    items = [item(criterion) for criterion in asked.criteria]
    possible = tuple(one for one in items if one is not None)
    if items and not possible:
        return None
    return Query(possible) if possible else EVERYTHING


def latest_query(criteria: Sequence[pb.Criterion]) -> tuple[Query, list[int]]:
    """Criteria as a query, and for each of its items the place of its criterion."""
    if not criteria:
        raise InvalidRequest("at least one criterion is needed")
    for place, criterion in enumerate(criteria):
        if not criterion.tags:
            raise InvalidRequest(f"criterion {place} has no tags")
    items = [(place, one) for place, one in enumerate(map(item, criteria)) if one is not None]
    return Query(tuple(one for _, one in items)), [place for place, _ in items]


def latest_response(
    criteria: Sequence[pb.Criterion], places: Sequence[int], latest: Latest
) -> pb.GetLatestByCriteriaResponse:
    found = dict(zip(places, latest.events, strict=True))
    results = []
    for place, criterion in enumerate(criteria):
        one = found.get(place)
        results.append(pb.LatestCriterionResult(criterion=criterion, event=None if one is None else event(one)))
    return pb.GetLatestByCriteriaResponse(results=results, context_position=position(latest.position))


def condition(request: pb.SaveEventsRequest) -> Condition | None:
    """Under which condition events are saved. None: under none, or nothing can be in its way."""
    if not request.query.HasField("subsetQuery"):
        return None
    asked = query(request.query.subsetQuery)
    expected = _expected(request)
    if asked is not None:
        return LatestMatchIs(asked, expected)
    if expected is not None:
        raise conflict(request, 0)
    return None


def _expected(request: pb.SaveEventsRequest) -> int | None:
    if not request.query.HasField("expected_position"):
        return None
    commit, prepare = request.query.expected_position.commit_position, request.query.expected_position.prepare_position
    if (commit, prepare) == (-1, -1):
        return None
    return commit if commit == prepare and 0 < commit < NOWHERE else NOWHERE


def conflict(request: pb.SaveEventsRequest, actual: int) -> AppendConflict:
    """What Orisun's clients are told, and then once more as those among them read it that look for two numbers."""
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
    """Events to save, checked."""
    return [_new_event(message, place) for place, message in enumerate(messages)]


def _new_event(message: pb.EventToSave, place: int) -> NewStoreEvent:
    if not message.event_type:
        raise InvalidEvent(f"event {place} has no event_type")
    data = message.data
    if TYPE_KEY in json_object(data, f"the data of event {place}"):
        data = without_member(data, TYPE_KEY)
    # Clients leave it out where there is none.
    metadata = json_object(message.metadata or "{}", f"the metadata of event {place}")
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
    """A JSON object without the members of a name, and to the letter what it was otherwise."""
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


def known_number(kind: Any, number: int, what: str) -> None:
    """Refuse a number that the protocol does not know: who sends it means something that is not done here."""
    if number not in kind.values():
        raise InvalidRequest(f"{what} is one of {', '.join(kind.keys())}, not {number}")


def index(request: pb.CreateIndexRequest) -> FieldIndex:
    """An index as it is kept. Events are always found by their type, so that is left out: the index has more events."""
    for value_type in (field.value_type for field in request.fields):
        known_number(pb.ValueType, value_type, "value_type")
    known_number(pb.ConditionCombinator, request.condition_combinator, "condition_combinator")
    fields = {field.json_key: KINDS[field.value_type] for field in request.fields}
    conditions = [one for one in request.conditions if one.key != TYPE_KEY]
    either = request.condition_combinator == pb.OR
    if either and len(conditions) < len(request.conditions):
        # Of the events of a type it would have all.
        conditions = []
    operators: Any = [one.operator for one in conditions]
    return defined(
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
