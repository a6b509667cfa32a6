"""Does a process with subscribers survive what happens to its database, and miss nothing because of it?"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import headwater
from headwater import App, NewEvent
from headwater.database import schema
from headwater.embedded import Postgres
from patience import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A Postgres of this module's own, which may be stopped; what it acknowledges is on the disk."""
    with tempfile.TemporaryDirectory(prefix="headwater-sub-", ignore_cleanup_errors=True) as directory:
        own = Postgres(Path(directory, "pg"))
        own.start()
        with psycopg.connect(own.dsn("postgres"), autocommit=True) as connection:
            schema.upgrade(connection)
        yield own
        own.stop(mode="immediate")


class Seen:
    """What the handlers of one App got, in order."""

    def __init__(self) -> None:
        self.subscribed: list[int] = []
        self.worked: list[int] = []

    @property
    def in_order(self) -> bool:
        """Whether each event came first after those before it; what came again may be further back."""
        first = list(dict.fromkeys(self.subscribed))
        return first == sorted(first)


def an_app(topic: str, seen: Seen) -> App:
    app = App()

    @app.subscriber(f"sub-{topic}", "e.topic = s.params ->> 'topic'", {"topic": topic})
    async def take(event: headwater.Event) -> None:
        seen.subscribed.append(event.data)

    @app.worker(topic, queue=f"work-{topic}")
    async def work(event: headwater.ClaimedEvent) -> None:
        seen.worked.append(event.event.data)

    return app


def survives(dsn: str, topic: str, harm: Callable[[], Any], *, times: int) -> Seen:
    """Publish, do harm, publish: everything must come to the subscriber and to the worker."""
    seen = Seen()
    with headwater.connect(dsn) as log:
        log.create_topic(topic)

    def publish(numbers: range) -> None:
        with headwater.connect(dsn) as log:
            log.publish_batch(topic, [NewEvent(n) for n in numbers])

    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(an_app(topic, seen).run(dsn, stop=stop, grace_seconds=5))

        async def came(count: int) -> None:
            while len(set(seen.subscribed)) < count or len(set(seen.worked)) < count:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)

        async with asyncio.timeout(PATIENCE_SECONDS):
            with headwater.connect(dsn) as log:
                # Subscribed and bound: what is published from now on is theirs.
                while not log.subscriptions(f"sub-{topic}"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for turn in range(times):
                await asyncio.to_thread(publish, range(turn * 20, turn * 20 + 10))
                await came(turn * 20 + 10)
                await asyncio.to_thread(harm)
                await asyncio.to_thread(publish, range(turn * 20 + 10, turn * 20 + 20))
                await came(turn * 20 + 20)
            stop.set()
            await running

    asyncio.run(main())
    assert set(seen.subscribed) == set(range(times * 20))
    assert seen.in_order
    return seen


def do_sql(dsn: str, statement: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement).rowcount  # type: ignore[arg-type]


def test_a_subscriber_and_its_workers_survive_the_end_of_their_sessions(server: Postgres) -> None:
    dsn = server.dsn("postgres")
    end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'headwater work'"
    survives(dsn, "sessions-ended", lambda: do_sql(dsn, end), times=3)


def test_a_subscriber_survives_a_cancelled_statement_of_any_of_its_sessions(server: Postgres) -> None:
    dsn = server.dsn("postgres")

    def cancel() -> None:
        # Statements are short: a lock on what they need holds them until they are cancelled.
        with (
            psycopg.connect(dsn, autocommit=True) as connection,
            psycopg.connect(dsn, autocommit=True) as canceller,
            connection.transaction(),
        ):
            connection.execute("lock table headwater_internal.reading")
            cancelled = 0
            for _ in range(6000):
                cancelled += canceller.execute(
                    "select pg_cancel_backend(pid) from pg_stat_activity where application_name = 'headwater work' "
                    "and state = 'active' and wait_event_type = 'Lock' and query ~ 'read_next|commit_reading'"
                ).rowcount
                if cancelled >= 3:
                    return
                time.sleep(0.01)
            raise AssertionError("no statement was there to cancel")

    survives(dsn, "statements-cancelled", cancel, times=2)


def test_a_subscriber_and_its_workers_survive_an_immediate_restart_of_postgres(server: Postgres) -> None:
    def restart() -> None:
        server.stop(mode="immediate")
        server.start()

    survives(server.dsn("postgres"), "restarted", restart, times=2)
