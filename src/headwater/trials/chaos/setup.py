"""Creates the topics, queues, cursors and tables of a trial, and removes them at its end."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import headwater
from headwater.trials.chaos.config import ORDERED, SQL, WEBHOOK, TrialConfig
from headwater.trials.chaos.participants import Participants

LEASE_SECONDS: Final = 1.0
MAX_ATTEMPTS: Final = 3
PARTITIONS: Final = 4
# A webhook whose receiver is killed is retried until the receiver is restarted.
WEBHOOK_ATTEMPTS: Final = 1000

CREATE_TABLES: Final = """
create schema if not exists headwater_chaos;
create table if not exists headwater_chaos.effect (
    id bigint generated always as identity primary key, consumer text not null, event text not null
);
"""
DROP_TABLES: Final = "drop schema if exists headwater_chaos cascade"


def make_config(participants: Participants, directory: Path, *, dsn: str, events_per_second: float) -> TrialConfig:
    """Choose names and free ports. `dsn` is the address that the processes of the trial connect to."""
    return TrialConfig(
        dsn=dsn,
        name=f"chaos-{secrets.token_hex(3)}",
        directory=str(directory),
        # There are two producers.
        events_per_second=events_per_second / 2,
        lease_seconds=LEASE_SECONDS,
        max_attempts=MAX_ATTEMPTS,
        http_port=_free_port() if "sse" in participants.served else 0,
        grpc_port=_free_port() if "grpc" in participants.served else 0,
        kafka_port=_free_port() if "kafka" in participants.served else 0,
        webhook_port=_free_port() if "webhook" in participants.served else 0,
    )


@contextmanager
def set_up(participants: Participants, config: TrialConfig, current_dsn: Callable[[], str]) -> Iterator[None]:
    """Create all objects before the first event, and remove them after the block. A failover changes `current_dsn`."""
    with headwater.connect(current_dsn(), pool_size=2) as log:
        with log.connection() as connection:
            connection.execute(CREATE_TABLES)
        log.create_topic(config.open_topic)
        log.create_topic(config.partition_topic, kind="sequenced", partitions=PARTITIONS)
        log.create_topic(config.quiet_topic)
        log.create_topic(config.rollback_topic)
        log.create_store(config.store_topic)
        for reader in participants.readers:
            name, topics = config.consumer(reader.name), config.topics_of(reader.name)
            match reader.consumer_kind:
                case "queue":
                    log.create_queue(name, topics, ordered_keys=reader.name == ORDERED)
                case "cursor":
                    log.open_cursor(name, topics=topics, holds_retention=True)
                case "subscription":
                    log.subscribe(config.consumer(SQL), config.quiet_filter, from_position=0)
                case "webhook":
                    log.create_webhook(
                        config.consumer(WEBHOOK),
                        f"http://127.0.0.1:{config.webhook_port}/",
                        topics,
                        max_attempts=WEBHOOK_ATTEMPTS,
                        backoff_seconds=0.1,
                        backoff_max_seconds=0.5,
                        timeout_seconds=5.0,
                    )
                    log.alter_queue(config.consumer(WEBHOOK), lease_seconds=2 * LEASE_SECONDS)
                case "none":
                    continue
    try:
        yield
    finally:
        _remove(participants, config, current_dsn())


def _remove(participants: Participants, config: TrialConfig, dsn: str) -> None:
    with headwater.connect(dsn, pool_size=2) as log:
        for reader in participants.readers:
            name = config.consumer(reader.name)
            match reader.consumer_kind:
                case "queue" | "subscription":
                    log.delete_queue(name)
                case "cursor":
                    log.delete_cursor(name)
                case "webhook":
                    log.delete_webhook(name, with_queue=True)
                case "none":
                    continue
        for topic in (*config.log_topics, config.rollback_topic):
            log.delete_topic(topic)
        with log.connection() as connection:
            connection.execute(DROP_TABLES)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
