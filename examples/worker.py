"""A worker: handlers on the events of a topic, with retries and dead letters.

Run it as a process with `headwater work examples.worker:app`; here it stops by itself when all is done.
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


@app.worker("mails", group="mailer", concurrency=5, max_attempts=3, backoff_seconds=0.1)
async def send(event: ClaimedEvent) -> Retry | Dead | None:
    """None is done; an exception is a failed try; a result says what else is to become of the event."""
    match event.data["to"]:
        case "nobody":
            return Dead("no such address")
        case "busy" if event.attempt == 1:
            return Retry(after=timedelta(milliseconds=20), reason="mail server busy")
        case "flaky" if event.attempt < 3:
            raise ConnectionError("connection reset")
    return None


@app.worker("mails", group="mail-counter", batch=True, prefetch=100)
def count(events: list[ClaimedEvent]) -> None:
    """Another group gets the same events, here in batches, and a blocking function will do."""
    print(f"counted {len(events)}")


@app.middleware
async def watch_for_the_end(event: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """Around every handler: a place for timing, tracing, context. Here: all is done when the last mail is sent."""
    result = await call_next(event)
    if isinstance(event, ClaimedEvent) and event.data["to"] == "flaky" and result is None:
        finished.set()
    return result


async def main() -> None:
    dsn = os.environ["HEADWATER_DSN"]
    with headwater.connect(dsn) as log:
        log.create_topic("mails", if_missing=True)
        log.publish_batch("mails", [headwater.NewEvent({"to": to}) for to in ("ada", "busy", "nobody", "flaky")])
        await app.run(dsn, stop=finished)
        (mailer,) = [group for group in log.groups() if group.name == "mailer"]
        print(f"dead letters: {[letter.last_error for letter in log.dead_letters('mailer')]}")
        print(f"mailer: done {mailer.done}, dead {mailer.dead}")


if __name__ == "__main__":
    asyncio.run(main())
