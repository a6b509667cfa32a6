"""`headwater bench`: a quick benchmark of publishing and reading."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

import headwater
from headwater.cli import output
from headwater.cli.connection import session
from headwater.cli.options import Dsn, Json, Yes, examples
from headwater.cli.temporary_log import temporary_log
from headwater.log.model import NewEvent

app = typer.Typer()


@app.command(epilog=examples("headwater bench", "headwater bench --dsn postgresql://db/app --yes"))
def bench(
    context: typer.Context,
    events: Annotated[
        int, typer.Option(min=1000, max=10_000_000, help="Number of events for the bulk measurements.")
    ] = 50_000,
    payload_bytes: Annotated[int, typer.Option(min=1, max=1_000_000, help="Size of each payload in bytes.")] = 100,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Measure publishing one by one, in batches and in bulk, and reading, on one connection.

    Without --dsn or HEADWATER_DSN it runs on a temporary embedded Postgres. In a given database it creates a temporary
    topic, whose events followers of all topics receive, so it asks for confirmation. For comparisons with a plain
    table, and with many connections, see `headwater docs benchmarks-method`.
    """
    run = session(context)
    if dsn or run.settings.dsn:
        output.confirm(f"publish about {2 * events + 1000} events to a temporary topic in this database?", yes=yes)
    with temporary_log(run, dsn) as log:
        topic = f"headwater-bench-{secrets.token_hex(4)}"
        log.create_topic(topic, max_payload_bytes=1_048_576)
        try:
            measured = _measure(log, topic, events, b"x" * payload_bytes)
        finally:
            log.delete_topic(topic)
    if as_json:
        output.emit({"payload_bytes": payload_bytes, "measures": measured})
        return
    output.print_table(
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
