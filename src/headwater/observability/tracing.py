"""Propagates OpenTelemetry traces from publisher to consumer in the headers of events (W3C Trace Context).

This module does not import OpenTelemetry. A program with an open span has imported it; if it is not in `sys.modules`
there is no trace to propagate, and the check costs next to nothing.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from headwater.log.model import NewEvent

PARENT: Final = "traceparent"
STATE: Final = "tracestate"
# A batch may contain many traces; OpenTelemetry keeps this number of links by default.
MAX_LINKS: Final = 128
MAX_STATE: Final = 512
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class ConsumedEvent(Protocol):
    """The attributes of a consumed event that tracing uses."""

    @property
    def position(self) -> int: ...
    @property
    def topic(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, Any] | None: ...


def named_by(headers: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the trace headers of an event or a request; empty if they are missing or invalid."""
    parent = None if headers is None else headers.get(PARENT)
    if not isinstance(parent, str) or _TRACEPARENT.fullmatch(parent) is None:
        return {}
    assert headers is not None
    state = headers.get(STATE)
    if not isinstance(state, str) or len(state) > MAX_STATE or not (state.isascii() and state.isprintable()):
        return {PARENT: parent}
    return {PARENT: parent, STATE: state}


def joined(headers: Mapping[str, Any] | None, carried: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Add trace headers. Headers that already contain a trace are unchanged."""
    return headers if not carried or (headers is not None and PARENT in headers) else {**(headers or {}), **carried}


def outgoing(headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Add the current span to headers. Headers that already contain a trace are unchanged."""
    return joined(headers, _current_headers())


def outgoing_batch(events: Sequence[NewEvent]) -> Sequence[NewEvent]:
    """Add the current span to the headers of a batch of events."""
    return list(outgoing_stream(events)) if _current_headers() else events


def outgoing_stream(events: Iterable[NewEvent]) -> Iterator[NewEvent]:
    """Add the span that is current at the start to the headers of a stream of events."""
    carried = _current_headers()
    if not carried:
        return iter(events)
    return (event._replace(headers=joined(event.headers, carried)) for event in events)


@contextmanager
def consuming(
    consumer: str, events: Sequence[ConsumedEvent], *, no_error: tuple[type[BaseException], ...] = ()
) -> Iterator[Callable[[str], None]]:
    """Open a span around the handling of events, linked to the spans that published them.

    Yields a function that sets the outcome attribute. An exception sets the status to error, unless it is `no_error`.
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


def _current_headers() -> dict[str, str]:
    """The trace headers of the current span; empty without one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return carrier


def _links(trace: Any, events: Sequence[ConsumedEvent]) -> list[Any]:
    found: dict[tuple[int, int], Any] = {}
    for event in events:
        named = {
            name: value
            for name in (PARENT, STATE)
            if event.headers is not None and isinstance(value := event.headers.get(name), str)
        }
        if PARENT in named and len(found) < MAX_LINKS:
            context = trace.get_current_span(_propagator().extract(named, context={})).get_span_context()
            if context.is_valid:
                found[context.trace_id, context.span_id] = context
    return [trace.Link(context) for context in found.values()]


def _propagator() -> Any:
    return importlib.import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
