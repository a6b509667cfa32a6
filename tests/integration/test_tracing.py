"""Does a trace go on from the publisher to every consumer, and does it cost nothing where there is none?"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

import headwater
from headwater import App, NewEvent, Retry
from patience import PATIENCE_SECONDS

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

_exporter = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def provider() -> Iterator[None]:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(_exporter))
    # Not for ever: a server that other tests run in this process would trace, too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_TRACER_PROVIDER", made)
        yield


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    _exporter.clear()
    yield _exporter
    _exporter.clear()


def consumed(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.kind is trace.SpanKind.CONSUMER]


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.trace_id for link in span.links}


def in_span(name: str) -> Any:
    return trace.get_tracer("test").start_as_current_span(name)


def run_until(app: App, dsn: str, finished: asyncio.Event) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(dsn, stop=stop))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await finished.wait()
            stop.set()
            await running

    asyncio.run(main())


def test_every_way_to_publish_carries_the_open_span(log: headwater.Headwater, topic: str) -> None:
    with in_span("order") as span:
        trace_id = f"{span.get_span_context().trace_id:032x}"
        log.publish(topic, 1)
        log.publish_batch(topic, [NewEvent(2, headers={"a": 1})])
        log.publish_many(topic, [NewEvent(3)])
        log.publish(topic, 4, headers={"traceparent": "mine"})
    log.publish(topic, 5)
    headers = [event.headers for event in log.read(topic)]
    for carried in headers[:3]:
        assert carried is not None
        assert carried["traceparent"].split("-")[1] == trace_id
    assert headers[1] is not None
    assert headers[1]["a"] == 1
    assert headers[3:] == [{"traceparent": "mine"}, None]


def test_a_scheduled_event_carries_the_span_that_scheduled_it(log: headwater.Headwater, topic: str) -> None:
    with in_span("later") as span:
        trace_id = f"{span.get_span_context().trace_id:032x}"
        log.schedule(topic, 1, deliver_at=datetime.now(UTC))
    log.maintain()
    (event,) = log.read(topic)
    assert event.headers is not None
    assert trace_id in event.headers["traceparent"]


@pytest.mark.parametrize("transactional", [False, True])
def test_a_worker_works_in_a_span_linked_to_the_publishers(
    log: headwater.Headwater, dsn: str, topic: str, spans: InMemorySpanExporter, transactional: bool
) -> None:
    with in_span("order") as span:
        context = span.get_span_context()
        log.publish(topic, 1)
    app, finished = App(), asyncio.Event()
    active: list[int] = []

    @app.worker(topic, queue=topic, transactional=transactional, backoff_seconds=0)
    async def handle(event: headwater.ClaimedEvent, connection: Any = None) -> Retry | None:
        active.append(trace.get_current_span().get_span_context().span_id)
        if event.attempt == 1:
            return Retry(reason="again")
        if event.attempt == 2:
            raise KeyError("broken")
        finished.set()
        return None

    run_until(app, dsn, finished)
    again, broken, done = consumed(spans)
    for number, one in enumerate((again, broken, done)):
        assert one.name == f"process {topic}"
        assert linked(one) == {context.trace_id}
        assert one.context is not None
        assert one.context.span_id == active[number]
        assert one.attributes is not None
        assert one.attributes["messaging.consumer.group.name"] == topic
    assert broken.status.status_code is trace.StatusCode.ERROR
    assert broken.events[0].name == "exception"
    assert again.status.status_code is not trace.StatusCode.ERROR
    assert done.attributes is not None
    assert done.attributes["headwater.outcome"] == "done"


def test_a_blocking_handler_is_in_the_span_too(
    log: headwater.Headwater, dsn: str, topic: str, spans: InMemorySpanExporter
) -> None:
    log.publish(topic, 1)
    app, finished = App(), asyncio.Event()
    active: list[int] = []

    @app.worker(topic, queue=topic)
    def handle(event: headwater.ClaimedEvent) -> None:
        active.append(trace.get_current_span().get_span_context().span_id)
        loop.call_soon_threadsafe(finished.set)

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(dsn, stop=stop))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await finished.wait()
            stop.set()
            await running

    loop: asyncio.AbstractEventLoop
    asyncio.run(main())
    (span,) = consumed(spans)
    assert span.context is not None
    assert active == [span.context.span_id]
    assert linked(span) == set()


def test_a_batch_is_linked_to_all_of_its_publishers(
    log: headwater.Headwater, topic: str, spans: InMemorySpanExporter
) -> None:
    traces = set()
    for n in range(3):
        with in_span("order") as span:
            traces.add(span.get_span_context().trace_id)
            log.publish_batch(topic, [NewEvent(n), NewEvent(n)])
    log.publish(topic, "odd", headers={"traceparent": 7})
    log.publish(topic, "odder", headers={"traceparent": "not one"})
    handled: list[int] = []

    def handle(connection: psycopg.Connection[Any], events: Sequence[headwater.Event]) -> None:
        assert trace.get_current_span().get_span_context().is_valid
        handled.append(len(events))

    log.process(topic, handle, cursor=topic, stop_when_caught_up=True)
    assert handled == [8]
    (span,) = consumed(spans)
    assert linked(span) == traces
    assert len(span.links) == 3
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 8


def test_a_subscriber_is_called_in_a_span_linked_to_the_publishers(
    log: headwater.Headwater, dsn: str, topic: str, spans: InMemorySpanExporter
) -> None:
    app, finished = App(), asyncio.Event()

    @app.subscriber(f"{topic}-subscribers", f"e.topic = '{topic}'")
    async def handle(event: headwater.Event) -> None:
        assert trace.get_current_span().get_span_context().is_valid
        finished.set()

    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(dsn, stop=stop))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not finished.is_set():
                with in_span("said"):
                    await asyncio.to_thread(log.publish, topic, 1)
                await asyncio.sleep(0.05)
            stop.set()
            await running

    asyncio.run(main())
    published = {s.context.trace_id for s in spans.get_finished_spans() if s.name == "said" and s.context is not None}
    assert consumed(spans)
    for span in consumed(spans):
        assert linked(span) <= published
        assert len(span.links) == 1


def test_a_program_that_does_not_trace_imports_nothing_of_it(dsn: str, topic: str) -> None:
    program = (
        "import sys, headwater\n"
        f"with headwater.connect({dsn!r}) as log:\n"
        f"    log.publish({topic!r}, 1)\n"
        f"    log.process({topic!r}, lambda c, e: None, cursor='untraced', stop_when_caught_up=True)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
