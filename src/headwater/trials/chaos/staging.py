"""What a trial makes in the log before it begins, and removes when it ends: topics, queues, cursors, a table."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import headwater
from headwater.trials.chaos.cast import Cast
from headwater.trials.chaos.stage import ORDERED, SQL, WEBHOOK, Stage

LEASE_SECONDS: Final = 1.0
MAX_ATTEMPTS: Final = 3
PARTITIONS: Final = 4
# A webhook whose receiver is killed is tried again until the receiver is back.
WEBHOOK_ATTEMPTS: Final = 1000

MAKE_TABLES: Final = """
create schema if not exists headwater_chaos;
create table if not exists headwater_chaos.effect (
    id bigint generated always as identity primary key, consumer text not null, event text not null
);
"""
REMOVE_TABLES: Final = "drop schema if exists headwater_chaos cascade"


def make_stage(cast: Cast, directory: Path, *, dsn: str, events_per_second: float) -> Stage:
    """Names and free ports. `dsn`: what the processes of the trial connect to."""
    return Stage(
        dsn=dsn,
        name=f"chaos-{secrets.token_hex(3)}",
        directory=str(directory),
        # Two producers share it.
        events_per_second=events_per_second / 2,
        lease_seconds=LEASE_SECONDS,
        max_attempts=MAX_ATTEMPTS,
        http_port=_free_port() if "sse" in cast.served else 0,
        grpc_port=_free_port() if "grpc" in cast.served else 0,
        kafka_port=_free_port() if "kafka" in cast.served else 0,
        webhook_port=_free_port() if "webhook" in cast.served else 0,
    )


@contextmanager
def staged(cast: Cast, stage: Stage, current_dsn: Callable[[], str]) -> Iterator[None]:
    """Everything that readers stand on exists before the first event. `current_dsn`: after a failover it is another."""
    with headwater.connect(current_dsn(), pool_size=2) as log:
        with log.connection() as connection:
            connection.execute(MAKE_TABLES)
        log.create_topic(stage.open_topic)
        log.create_topic(stage.lane_topic, kind="sequenced", partitions=PARTITIONS)
        log.create_topic(stage.quiet_topic)
        log.create_topic(stage.rollback_topic)
        log.create_store(stage.store_topic)
        for reader in cast.readers:
            name, topics = stage.consumer(reader.name), stage.topics_of(reader.name)
            match reader.keeper:
                case "queue":
                    log.create_group(name, topics, ordered_keys=reader.name == ORDERED)
                case "cursor":
                    log.open_cursor(name, topics=topics, must_not_lose=True)
                case "subscription":
                    log.subscribe(stage.consumer(SQL), stage.quiet_condition, from_position=0)
                case "webhook":
                    log.create_webhook(
                        stage.consumer(WEBHOOK),
                        f"http://127.0.0.1:{stage.webhook_port}/",
                        topics,
                        max_attempts=WEBHOOK_ATTEMPTS,
                        backoff_seconds=0.1,
                        backoff_max_seconds=0.5,
                        timeout_seconds=5.0,
                    )
                    log.alter_group(stage.consumer(WEBHOOK), lease_seconds=2 * LEASE_SECONDS)
                case "none":
                    continue
    try:
        yield
    finally:
        _remove(cast, stage, current_dsn())


def _remove(cast: Cast, stage: Stage, dsn: str) -> None:
    with headwater.connect(dsn, pool_size=2) as log:
        for reader in cast.readers:
            name = stage.consumer(reader.name)
            match reader.keeper:
                case "queue" | "subscription":
                    log.delete_group(name)
                case "cursor":
                    log.delete_cursor(name)
                case "webhook":
                    log.delete_webhook(name, with_group=True)
                case "none":
                    continue
        for topic in (*stage.log_topics, stage.rollback_topic):
            log.delete_topic(topic)
        with log.connection() as connection:
            connection.execute(REMOVE_TABLES)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
