"""Does mypy report handlers with the wrong parameters or results?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import headwater
from patience import PATIENCE_SECONDS

SOURCE = Path(headwater.__file__).parent.parent

# A line that ends with "# wrong" must be reported, and no other line.
HANDLERS = """
from typing import Any

import psycopg

from headwater import App, ClaimedEvent, Dead, Event, Retry

app = App()
batch: bool = bool(app)


@app.worker("orders", queue="one", concurrency=10, max_attempts=3)
async def one(event: ClaimedEvent) -> None: ...

@app.worker("orders", queue="blocking")
def blocking(event: ClaimedEvent) -> Retry | Dead | None:
    return Retry()

@app.worker("orders", queue="untyped", transactional=True)
def untyped(event, connection): ...  # type: ignore

@app.worker("orders", queue="many", batch=True, prefetch=100)
async def many(events: list[ClaimedEvent]) -> dict[int, Retry]:
    return {event.position: Retry() for event in events}

@app.worker("orders", queue="transactional", transactional=True)
async def transactional(event: ClaimedEvent, connection: psycopg.AsyncConnection[Any]) -> None: ...

@app.worker("orders", queue="transactional-blocking", transactional=True)
def transactional_blocking(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None: ...

@app.worker("orders", queue="transactional-batch", transactional=True, batch=True)
async def transactional_batch(events: list[ClaimedEvent], connection: psycopg.AsyncConnection[Any]) -> None: ...

@app.worker("orders", queue="either", batch=batch)
async def either(given: Any) -> None: ...

@app.subscriber("mail", "e.topic = 'orders'")
async def subscriber(event: Event) -> Retry | None: ...

@app.subscriber("mail", "e.topic = 'orders'", batch=True, batch_size=10)
def subscriber_batch(events: list[Event]) -> None: ...


@app.worker("orders", queue="no-connection", transactional=True)  # wrong
async def no_connection(event: ClaimedEvent) -> None: ...

@app.worker("orders", queue="connection")  # wrong
async def with_connection(event: ClaimedEvent, connection: psycopg.AsyncConnection[Any]) -> None: ...

@app.worker("orders", queue="blocking-connection", transactional=True)  # wrong
async def blocking_connection(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None: ...

@app.worker("orders", queue="not-a-batch", batch=True)  # wrong
async def not_a_batch(event: ClaimedEvent) -> None: ...

@app.worker("orders", queue="a-batch")  # wrong
async def a_batch(events: list[ClaimedEvent]) -> None: ...

@app.worker("orders", queue="result")  # wrong
async def result(event: ClaimedEvent) -> int: ...

@app.subscriber("mail", "e.topic = 'orders'")  # wrong
async def subscriber_of_claims(event: ClaimedEvent) -> None: ...

@app.subscriber("mail", "e.topic = 'orders'", batch=True)  # wrong
async def subscriber_without_batch(event: Event) -> None: ...

app.worker("orders", queue="option", concurency=3)  # wrong
"""


def test_mypy_reports_handlers_with_wrong_parameters(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("mypy")
    # Kept between runs: mypy checks the package and its dependencies again only where they have changed.
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("mypy")
    file = tmp_path / "handlers.py"
    file.write_text(HANDLERS)
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file=", "--strict", "--follow-imports=silent"),
            *("--disable-error-code=empty-body", "--ignore-missing-imports", f"--cache-dir={cache}"),
            str(file),
        ],
        # mypy rejects site-packages here, and does not need it: the package is typed.
        env={"MYPYPATH": str(SOURCE)} if SOURCE.name == "src" else {},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    reported = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    wrong = {number for number, line in enumerate(HANDLERS.splitlines(), 1) if line.endswith("# wrong")}
    assert reported == wrong, checked.stdout + checked.stderr


def test_the_package_declares_that_it_is_typed() -> None:
    assert (SOURCE / "headwater" / "py.typed").exists()
