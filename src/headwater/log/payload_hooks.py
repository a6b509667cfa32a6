"""Payloads in a form of the application's own: the `dumps` and `loads` of a log, and the models of typed topics.

Events are named tuples without a reference to their log. Events of a log with `loads` therefore get a subclass whose
`data` calls it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

from headwater.errors import InvalidEvent, InvalidRequest
from headwater.log.model import Event, NewEvent, Payload

T = TypeVar("T")
Dumps: TypeAlias = Callable[[Any], str | bytes]
"""Encodes a payload that is neither bytes nor None."""
Loads: TypeAlias = Callable[[bytes], Any]
"""Decodes a payload."""

JSON_TYPE = "application/json"


def dumped(dumps: Dumps | None, payload: Payload, content_type: str | None) -> tuple[Payload, str | None]:
    """The payload encoded by `dumps`, and its content type, which is JSON if the caller gives none."""
    if dumps is None or payload is None or isinstance(payload, (bytes, bytearray, memoryview)):
        return payload, content_type
    try:
        encoded = dumps(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(f"dumps() cannot encode the payload: {error}") from error
    return encoded.encode() if isinstance(encoded, str) else encoded, content_type or JSON_TYPE


def dumped_events(dumps: Dumps | None, events: Iterable[NewEvent]) -> Iterable[NewEvent]:
    """The events with their payloads encoded by `dumps`, one at a time."""
    if dumps is None:
        return events
    return (
        event._replace(payload=payload, content_type=content_type)
        for event in events
        for payload, content_type in [dumped(dumps, event.payload, event.content_type)]
    )


def with_loads(loads: Loads, result: Any) -> Any:
    """The result of a call, where `data` of every event is decoded by `loads`."""
    if isinstance(result, tuple):
        if "payload" in getattr(result, "_fields", ()):
            return tuple.__new__(_event_class(type(result), loads, None), result)
        return tuple.__new__(type(result), [with_loads(loads, part) for part in result])
    if isinstance(result, list):
        return [with_loads(loads, part) for part in result]
    if is_dataclass(result) and not isinstance(result, type) and hasattr(result, "events"):
        return replace(result, events=with_loads(loads, result.events))
    return result


@lru_cache(maxsize=64)
def _event_class(cls: type, loads: Loads, loads_none: Callable[[None], Any] | None) -> type:
    """The class of events that `loads` decodes. Without `loads_none`, `data` of an event without a payload is None."""

    def data(self: Any) -> Any:
        """The payload decoded. Decodes on every access."""
        if self.payload is None:
            return None if loads_none is None else loads_none(None)
        return loads(self.payload)

    def reduce(self: Any) -> Any:
        # Pickled as a plain event: the class exists in this process only.
        return cls, tuple(self)

    names = {"__slots__": (), "__doc__": cls.__doc__, "data": property(data), "__reduce__": reduce}
    return type(cls.__name__, (cls,), names)


class TypedEvent(Event, Generic[T]):
    """An event whose `data` is an object of a model. Raises InvalidEvent if the payload does not fit."""

    @property
    def data(self) -> T:
        raise NotImplementedError


class TypedTopic(Generic[T]):
    """A topic whose payloads are objects of one model: a pydantic model, a dataclass, a TypedDict or another type that
    pydantic validates. `load` decodes a payload instead of pydantic."""

    def __init__(self, name: str, model: type[T], *, load: Callable[[bytes], T] | None = None) -> None:
        self.name = name
        self.model = model
        self._load = load or _validator(model)
        self._event_class = _event_class(TypedEvent, self._decode, self._decode)

    def load(self, event: Any) -> T:
        """The payload of an event as an object of the model, for example of the event of a worker.

        Raises InvalidEvent if the payload does not fit.
        """
        return self._decode(event.payload)

    def typed_event(self, event: Event) -> TypedEvent[T]:
        """The event, with `data` as an object of the model."""
        typed: TypedEvent[T] = tuple.__new__(self._event_class, event)
        return typed

    def _decode(self, payload: bytes | None) -> T:
        if payload is None:
            raise InvalidEvent(f"an event of topic {self.name} without a payload is no {self.model.__name__}")
        try:
            return self._load(payload)
        except ValueError as error:
            raise InvalidEvent(f"an event of topic {self.name} is no {self.model.__name__}: {error}") from error


def _validator(model: type[T]) -> Callable[[bytes], T]:
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise InvalidRequest(
            "typed topics need pydantic",
            hint="Run: pip install 'headwater[models]', or give load=, a function from bytes to the model.",
        ) from None
    return TypeAdapter(model).validate_json
