"""The readers of a trial that use the library: follow, process, SQL subscription, event store.

Each notes what it got in a file. One without a cursor takes up again from the place in its own notes, as a program
would that keeps its position on another disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg

import headwater
from headwater import App, Event
from headwater.errors import EpochChanged, LogUnavailable
from headwater.trials.chaos.journal import Deliveries
from headwater.trials.chaos.queue_workers import INSERT_EFFECT, run_app
from headwater.trials.chaos.stage import (
    FOLLOW,
    FOLLOW_BARE,
    PROCESS,
    SQL,
    STORE,
    STORE_BARE,
    Stage,
    id_of,
    quiet_and_busy,
)

AGAIN_SECONDS: Final = 0.1
BATCH_SIZE: Final = 200


def again_and_again(act: Callable[[], None]) -> None:
    """As a supervisor would: after every outage from the start."""
    while True:
        try:
            return act()
        except LogUnavailable:
            threading.Event().wait(AGAIN_SECONDS)


def side_by_side(acts: Sequence[Callable[[], None]]) -> None:
    """Run readers in threads; the error of one ends the process."""
    over = threading.Event()
    errors: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            again_and_again(act)
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            over.set()

    for act in acts:
        threading.Thread(target=run, args=(act,), daemon=True).start()
    over.wait()
    if errors:
        raise errors[0]


def follow(stage: Stage) -> None:
    """With a cursor, which the log keeps."""

    def one(reader: str) -> None:
        deliveries = Deliveries(Path(stage.directory), reader)
        with _log(stage) as log:
            for batch in log.follow_batches(
                stage.topics_of(reader), cursor=stage.consumer(reader), batch_size=BATCH_SIZE, must_not_lose=True
            ):
                deliveries.note([id_of(event.data) for event in batch])

    side_by_side([lambda reader=reader: one(reader) for reader in quiet_and_busy(FOLLOW)])  # type: ignore[misc]


def follow_without_cursor(stage: Stage) -> None:
    """From a position that the reader remembers by itself, with the epoch in which it got that position."""

    def one(reader: str) -> None:
        deliveries = Deliveries(Path(stage.directory), reader)
        with _log(stage) as log:
            position, epoch = deliveries.place() or (0, log.state().epoch)
            while True:
                try:
                    # As it raises in another epoch, everything that it delivers is of this one.
                    for batch in log.follow_batches(
                        stage.topics_of(reader),
                        after=position,
                        epoch=epoch,
                        batch_size=BATCH_SIZE,
                        on_epoch_change="error",
                    ):
                        position = batch[-1].position
                        deliveries.note([id_of(event.data) for event in batch], (position, epoch))
                except EpochChanged as changed:
                    position, epoch = changed.common_position, changed.epoch

    side_by_side([lambda reader=reader: one(reader) for reader in quiet_and_busy(FOLLOW_BARE)])  # type: ignore[misc]


def process(stage: Stage) -> None:
    """Its effects and its cursor are in one transaction."""

    def one(reader: str) -> None:
        def handle(connection: psycopg.Connection[Any], events: Sequence[Event]) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(INSERT_EFFECT, [(reader, id_of(event.data)) for event in events])

        with _log(stage) as log:
            log.process(
                stage.topics_of(reader),
                handle,
                cursor=stage.consumer(reader),
                batch_size=BATCH_SIZE,
                must_not_lose=True,
            )

    side_by_side([lambda reader=reader: one(reader) for reader in quiet_and_busy(PROCESS)])  # type: ignore[misc]


def subscribe_by_sql(stage: Stage, name: str) -> None:
    deliveries = Deliveries(Path(stage.directory), SQL)
    app = App()

    @app.subscriber(stage.consumer(SQL), stage.quiet_condition, name="chaos")
    async def take(event: Event) -> None:
        deliveries.note([id_of(event.data)])

    run_app(app, stage, name)


def subscribe_to_store(stage: Stage) -> None:
    """Catch up, then live; with a cursor, and from a position that the reader remembers by itself."""

    def with_cursor() -> None:
        deliveries = Deliveries(Path(stage.directory), STORE)
        with _log(stage) as log:
            for batch in log.store(stage.store_topic).subscribe_batches(
                cursor=stage.consumer(STORE), batch_size=BATCH_SIZE
            ):
                deliveries.note([id_of(event.data) for event in batch])

    def without_cursor() -> None:
        deliveries = Deliveries(Path(stage.directory), STORE_BARE)
        position, epoch = deliveries.place() or (0, None)
        with _log(stage) as log:
            # In another epoch it goes back by itself, to the last position that both epochs share.
            for page in log.store(stage.store_topic).subscribe_pages(
                after=position, epoch=epoch, batch_size=BATCH_SIZE
            ):
                deliveries.note([id_of(event.data) for event in page.events], (page.events[-1].position, page.epoch))

    side_by_side([with_cursor, without_cursor])


def _log(stage: Stage) -> headwater.Headwater:
    return headwater.connect(stage.dsn, pool_size=1, application_name=stage.name)
