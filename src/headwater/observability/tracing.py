"""Traces that go on from publisher to consumer, through the headers of events, with OpenTelemetry.

Nothing of OpenTelemetry is imported here. A program that has a span open has imported it, so where it is not among the
modules there is nothing to carry on, and looking costs next to nothing. The headers are those of W3C Trace Context.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from headwater.model import NewEvent

PARENT: Final = "traceparent"
STATE: Final = "tracestate"
# A batch may be of many traces; OpenTelemetry keeps as many links by default.
MOST_LINKS: Final = 128
MAX_STATE: Final = 512
_READABLE: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Traced(Protocol):
    """What is known of an event that is consumed."""

    @property
    def position(self) -> int: ...
    @property
    def topic(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, Any] | None: ...


def named_by(headers: Mapping[str, Any] | None) -> dict[str, str]:
    """The trace that headers name, of an event or of a request; nothing if they name none that can be read."""
    parent = None if headers is None else headers.get(PARENT)
    if not isinstance(parent, str) or _READABLE.fullmatch(parent) is None:
        return {}
    assert headers is not None
    state = headers.get(STATE)
    if not isinstance(state, str) or len(state) > MAX_STATE or not (state.isascii() and state.isprintable()):
        return {PARENT: parent}
    return {PARENT: parent, STATE: state}


def joined(headers: Mapping[str, Any] | None, carried: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Headers with a trace in them. Those that name one already stay as they are."""
    return headers if not carried or (headers is not None and PARENT in headers) else {**(headers or {}), **carried}


def outgoing(headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Headers with the open span in them. Those that name one already stay as they are."""
    return joined(headers, _carried())


def outgoing_batch(events: Sequence[NewEvent]) -> Sequence[NewEvent]:
    """The same for a batch of events."""
    return list(outgoing_stream(events)) if _carried() else events


def outgoing_stream(events: Iterable[NewEvent]) -> Iterator[NewEvent]:
    """The same for a stream, with the span that is open at its start."""
    carried = _carried()
    if not carried:
        return iter(events)
    return (event._replace(headers=joined(event.headers, carried)) for event in events)


@contextmanager
def consuming(
    consumer: str, events: Sequence[Traced], *, no_error: tuple[type[BaseException], ...] = ()
) -> Iterator[Callable[[str], None]]:
    """A span around the handling of events, linked to those that they were published in.

    What is yielded takes how it ended, in a word. An exception makes the span one of an error, unless it is `no_error`.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not events:
        yield lambda outcome: None
        return
    topics = sorted({event.topic for event in events})
    attributes: dict[str, Any] = {
        "messaging.system": "headwater",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": consumer,
        "messaging.destination.name": ",".join(topics),
        "headwater.position": events[0].position,
    }
    if len(events) > 1:
        attributes["messaging.batch.message_count"] = len(events)
    with trace.get_tracer("headwater").start_as_current_span(
        f"process {topics[0]}" if len(topics) == 1 else "process",
        kind=trace.SpanKind.CONSUMER,
        links=_links(trace, events),
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield lambda outcome: span.set_attribute("headwater.outcome", outcome)
        except BaseException as error:
            if not isinstance(error, no_error):
                span.record_exception(error)
                span.set_status(trace.Status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}"))
            raise


def _carried() -> dict[str, str]:
    """What a header needs to say of the open span; nothing if there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return carrier


def _links(trace: Any, events: Sequence[Traced]) -> list[Any]:
    found: dict[tuple[int, int], Any] = {}
    for event in events:
        named = {
            name: value
            for name in (PARENT, STATE)
            if event.headers is not None and isinstance(value := event.headers.get(name), str)
        }
        if PARENT in named and len(found) < MOST_LINKS:
            context = trace.get_current_span(_propagator().extract(named, context={})).get_span_context()
            if context.is_valid:
                found[context.trace_id, context.span_id] = context
    return [trace.Link(context) for context in found.values()]


def _propagator() -> Any:
    return importlib.import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
