"""`headwater bench`: a quick look at how fast a database takes events and gives them back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

import headwater
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, examples
from headwater.cli.connection import session
from headwater.cli.temporary_log import scratch_log
from headwater.model import NewEvent

app = typer.Typer()


@app.command(epilog=examples("headwater bench", "headwater bench --dsn postgresql://db/app --yes"))
def bench(
    context: typer.Context,
    events: Annotated[
        int, typer.Option(min=1000, max=10_000_000, help="How many events for the bulk measures.")
    ] = 50_000,
    payload_bytes: Annotated[int, typer.Option(min=1, max=1_000_000, help="How large each payload is.")] = 100,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Measure publishing one by one, in batches and in bulk, and reading back, with one connection.

    Without a database given it starts a temporary embedded one. A given one gets a topic for the time of the
    measuring, which followers of the whole log will see, so it asks. For comparisons with a bare table, and with
    many connections, see docs/benchmarks.md.
    """
    run = session(context)
    if dsn or run.settings.dsn:
        output.confirm(f"publish some {2 * events + 1000} events to a topic of their own in this database?", yes=yes)
    with scratch_log(run, dsn) as log:
        topic = f"headwater-bench-{secrets.token_hex(4)}"
        log.create_topic(topic, max_payload_bytes=1_048_576)
        try:
            measured = _measure(log, topic, events, b"x" * payload_bytes)
        finally:
            log.delete_topic(topic)
    if as_json:
        output.emit({"payload_bytes": payload_bytes, "measures": measured})
        return
    output.table(
        ("measure", "events", "seconds", "events/s"),
        ((m["measure"], m["events"], f"{m['seconds']:.2f}", f"{m['events_per_second']:,.0f}") for m in measured),
    )


def _measure(log: headwater.Headwater, topic: str, events: int, payload: bytes) -> list[dict[str, Any]]:
    event = NewEvent(payload)

    def one_by_one() -> int:
        for _ in range(1000):
            log.publish(topic, payload)
        return 1000

    def batches() -> int:
        for _ in range(events // 1000):
            log.publish_batch(topic, [event] * 1000)
        return events // 1000 * 1000

    def bulk() -> int:
        return log.publish_many(topic, (event for _ in range(events)))

    def read_back() -> int:
        return sum(len(batch) for batch in log.follow_batches(topic, stop_when_caught_up=True))

    return [
        _timed("publish one by one", one_by_one),
        _timed("publish in batches of 1000", batches),
        _timed("publish in bulk by COPY", bulk),
        _timed("follow from the start", read_back),
    ]


def _timed(name: str, act: Callable[[], int]) -> dict[str, Any]:
    started = time.perf_counter()
    count = act()
    seconds = time.perf_counter() - started
    return {"measure": name, "events": count, "seconds": seconds, "events_per_second": count / seconds}
