"""The readers of a trial that use the library: follow, process, SQL subscription, event store.

Each records its deliveries in a file. A reader without a cursor resumes from the checkpoint in that file, as a program
does that stores its position outside the database.
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
from headwater.trials.chaos.config import (
    FOLLOW,
    FOLLOW_BARE,
    PROCESS,
    SQL,
    STORE,
    STORE_BARE,
    TrialConfig,
    id_of,
    quiet_and_busy,
)
from headwater.trials.chaos.journal import DeliveryLog
from headwater.trials.chaos.queue_workers import INSERT_EFFECT, run_app

RETRY_SECONDS: Final = 0.1
BATCH_SIZE: Final = 200


def retry_forever(act: Callable[[], None]) -> None:
    """Restart after every outage, as a supervisor does."""
    while True:
        try:
            return act()
        except LogUnavailable:
            threading.Event().wait(RETRY_SECONDS)


def run_concurrently(acts: Sequence[Callable[[], None]]) -> None:
    """Run readers in threads; an error of one ends the process."""
    over = threading.Event()
    errors: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            retry_forever(act)
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


def follow(config: TrialConfig) -> None:
    """Follow with a cursor in the database."""

    def one(reader: str) -> None:
        deliveries = DeliveryLog(Path(config.directory), reader)
        with _log(config) as log:
            for batch in log.follow_batches(
                config.topics_of(reader), cursor=config.consumer(reader), batch_size=BATCH_SIZE, holds_retention=True
            ):
                deliveries.record([id_of(event.data) for event in batch])

    run_concurrently([lambda reader=reader: one(reader) for reader in quiet_and_busy(FOLLOW)])  # type: ignore[misc]


def follow_without_cursor(config: TrialConfig) -> None:
    """Follow from a position and an epoch that the reader stores itself."""

    def one(reader: str) -> None:
        deliveries = DeliveryLog(Path(config.directory), reader)
        with _log(config) as log:
            position, epoch = deliveries.checkpoint() or (0, log.state().epoch)
            while True:
                try:
                    # It raises in another epoch, so everything delivered belongs to this epoch.
                    for batch in log.follow_batches(
                        config.topics_of(reader),
                        after=position,
                        epoch=epoch,
                        batch_size=BATCH_SIZE,
                        on_epoch_change="error",
                    ):
                        position = batch[-1].position
                        deliveries.record([id_of(event.data) for event in batch], (position, epoch))
                except EpochChanged as changed:
                    position, epoch = changed.common_position, changed.epoch

    run_concurrently([lambda reader=reader: one(reader) for reader in quiet_and_busy(FOLLOW_BARE)])  # type: ignore[misc]


def process(config: TrialConfig) -> None:
    """Process events; effects and cursor are written in one transaction."""

    def one(reader: str) -> None:
        def handle(connection: psycopg.Connection[Any], events: Sequence[Event]) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(INSERT_EFFECT, [(reader, id_of(event.data)) for event in events])

        with _log(config) as log:
            log.process(
                config.topics_of(reader),
                handle,
                cursor=config.consumer(reader),
                batch_size=BATCH_SIZE,
                holds_retention=True,
            )

    run_concurrently([lambda reader=reader: one(reader) for reader in quiet_and_busy(PROCESS)])  # type: ignore[misc]


def subscribe_by_sql(config: TrialConfig, name: str) -> None:
    deliveries = DeliveryLog(Path(config.directory), SQL)
    app = App()

    @app.subscriber(config.consumer(SQL), config.quiet_filter, name="chaos")
    async def take(event: Event) -> None:
        deliveries.record([id_of(event.data)])

    run_app(app, config, name)


def subscribe_to_store(config: TrialConfig) -> None:
    """Subscribe to the event store, with a cursor and from a position that the reader stores itself."""

    def with_cursor() -> None:
        deliveries = DeliveryLog(Path(config.directory), STORE)
        with _log(config) as log:
            for batch in log.store(config.store_topic).subscribe_batches(
                cursor=config.consumer(STORE), batch_size=BATCH_SIZE
            ):
                deliveries.record([id_of(event.data) for event in batch])

    def without_cursor() -> None:
        deliveries = DeliveryLog(Path(config.directory), STORE_BARE)
        position, epoch = deliveries.checkpoint() or (0, None)
        with _log(config) as log:
            # In another epoch it goes back automatically to the last common position.
            for page in log.store(config.store_topic).subscribe_pages(
                after=position, epoch=epoch, batch_size=BATCH_SIZE
            ):
                deliveries.record([id_of(event.data) for event in page.events], (page.events[-1].position, page.epoch))

    run_concurrently([with_cursor, without_cursor])


def _log(config: TrialConfig) -> headwater.Headwater:
    return headwater.connect(config.dsn, pool_size=1, application_name=config.name)
