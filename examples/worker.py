"""A worker: handlers for the events of a topic, with retries and dead letters.

Run it as a process with `headwater work examples.worker:app`; as a program it stops when all events are processed.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import headwater
from headwater import ClaimedEvent, Dead, Retry

app = headwater.App()
finished = asyncio.Event()


@app.worker("mails", queue="mailer", concurrency=5, max_attempts=3, backoff_seconds=0.1)
async def send(event: ClaimedEvent) -> Retry | Dead | None:
    """Return None to acknowledge the event, Retry or Dead otherwise. An exception is a failed attempt."""
    match event.data["to"]:
        case "unknown":
            return Dead("no such address")
        case "busy" if event.attempt == 1:
            return Retry(after=timedelta(milliseconds=20), reason="mail server busy")
        case "flaky" if event.attempt < 3:
            raise ConnectionError("connection reset")
    return None


@app.worker("mails", queue="mail-counter", batch=True, prefetch=100)
def count(events: list[ClaimedEvent]) -> None:
    """Another queue gets the same events, here in batches, with a blocking function."""
    print(f"counted {len(events)}")


@app.middleware
async def stop_after_last_mail(event: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """Wrap every handler, for timing, tracing or context. This one stops the worker when the last mail is sent."""
    result = await call_next(event)
    if isinstance(event, ClaimedEvent) and event.data["to"] == "flaky" and result is None:
        finished.set()
    return result


async def main() -> None:
    dsn = os.environ["HEADWATER_DSN"]
    with headwater.connect(dsn) as log:
        log.create_topic("mails", if_missing=True)
        log.publish_batch("mails", [headwater.NewEvent({"to": to}) for to in ("ada", "busy", "unknown", "flaky")])
        await app.run(dsn, stop=finished)
        (mailer,) = [queue for queue in log.queues() if queue.name == "mailer"]
        print(f"dead letters: {[letter.last_error for letter in log.dead_letters('mailer')]}")
        print(f"mailer: done {mailer.done}, dead {mailer.dead}")


if __name__ == "__main__":
    asyncio.run(main())
