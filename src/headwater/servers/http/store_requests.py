"""Request models of event stores."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, FailFast, Field, model_validator

from headwater.eventstore import query
from headwater.eventstore.query import Condition, LatestMatchIs, NewStoreEvent, NoMatchAfter
from headwater.log.event_json import from_base64
from headwater.servers.http.requests import MAX_EVENTS, Flag, Number, Object, Position, RequestModel

TagText = Annotated[str, Field(min_length=1, max_length=255)]
TypeText = Annotated[str, Field(min_length=1, max_length=200)]
Scalar = str | Annotated[bool, Field(strict=True)] | Annotated[int, Field(strict=True)] | float


class QueryItem(RequestModel):
    """Matches events with one of these types, all of these tags, and all of these fields in their data."""

    types: list[TypeText] = Field(default_factory=list, max_length=100)
    tags: list[TagText] = Field(default_factory=list, max_length=100)
    fields: dict[str, Scalar] = Field(default_factory=dict)


class StoreQuery(RequestModel):
    """Matches events that match any item; without items, every event."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"items": [{"tags": ["course:c1"]}]}]})

    items: list[QueryItem] = Field(default_factory=list, max_length=100)

    def query(self) -> query.Query:
        return query.Query([query.Item(item.types, item.tags, item.fields) for item in self.items])


class StoreCondition(RequestModel):
    """An append condition: no event after a position matches, or the latest match is at a position."""

    query: StoreQuery
    after: Position | None = Field(default=None, description="no match after this position; default: no match at all")
    latest: Position | None = Field(
        default=None, description="the latest match is at this position; 0: no event matches"
    )
    epoch: Number | None = Field(
        default=None, description="the epoch of the position; 409 EpochChanged if the log has another epoch"
    )

    @model_validator(mode="after")
    def _has_one_position(self) -> StoreCondition:
        if self.after is not None and self.latest is not None:
            raise ValueError("give only one of after and latest")
        return self

    def condition(self) -> Condition:
        if self.latest is not None:
            return LatestMatchIs(self.query.query(), self.latest or None, self.epoch)
        return NoMatchAfter(self.query.query(), self.after or 0, self.epoch)


class EventToAppend(RequestModel):
    """An event to append."""

    type: TypeText
    data: Any = None
    tags: list[TagText] = Field(default_factory=list, max_length=100)
    metadata: Object | None = None
    event_id: str | None = Field(default=None, min_length=1, max_length=255)
    content_type: str | None = Field(default=None, min_length=1, max_length=200)
    text: str | None = None
    base64: str | None = None

    @model_validator(mode="after")
    def _has_one_payload(self) -> EventToAppend:
        if len({"data", "text", "base64"} & self.model_fields_set) > 1:
            raise ValueError("give only one of data, text and base64")
        return self

    def new_event(self) -> NewStoreEvent:
        data, content_type = self.data, self.content_type
        if self.text is not None:
            data, content_type = self.text.encode(errors="strict"), content_type or "text/plain"
        elif self.base64 is not None:
            data, content_type = from_base64(self.base64, "base64"), content_type or "application/octet-stream"
        return NewStoreEvent(self.type, data, self.tags, self.metadata, self.event_id, content_type)


class AppendRequest(RequestModel):
    """Events to append atomically if the condition holds."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "events": [{"type": "CoursePlanned", "tags": ["course:c1"], "data": {"seats": 30}}],
                    "condition": {"query": {"items": [{"tags": ["course:c1"]}]}, "after": 0},
                }
            ]
        },
    )

    events: Annotated[list[EventToAppend], FailFast()] = Field(min_length=1, max_length=MAX_EVENTS)
    condition: StoreCondition | None = None


class StoreRead(RequestModel):
    """Which events of an event store to read."""

    query: StoreQuery = Field(default_factory=StoreQuery)
    after: Position = 0
    before: Position | None = None
    backwards: Flag = False
    limit: Annotated[int, Field(strict=True, ge=1, le=1000)] = 100
    epoch: Number | None = Field(
        default=None, description="the epoch of the positions; 409 if the log has another epoch"
    )


class StoreCount(RequestModel):
    """Which events of an event store to count."""

    query: StoreQuery = Field(default_factory=StoreQuery)
    after: Position = 0
    before: Position | None = None


class StoreLatest(RequestModel):
    """The query whose items' latest events to read."""

    query: StoreQuery
