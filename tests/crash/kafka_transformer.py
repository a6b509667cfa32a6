"""The process that the test of transactions kills: reads from one topic, writes to another, commits both as one."""

from __future__ import annotations

import sys
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer

from patience import PATIENCE_SECONDS


class StartAnew(Exception):
    """What happened can only be mended by beginning again, as a process that was killed does."""


def transform(bootstrap: str, source: str, sink: str, name: str) -> None:
    """Move records until killed. Whoever had this name before is fenced."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": name, "transaction.timeout.ms": 20_000, "log_level": 0}
    )
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "transformers",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "session.timeout.ms": 2000,
            "heartbeat.interval.ms": 200,
            "log_level": 0,
        }
    )
    try:
        producer.init_transactions(PATIENCE_SECONDS)
        consumer.subscribe([source])
        while True:
            messages = [message for message in consumer.consume(20, timeout=0.2) if message.error() is None]
            if messages:
                _move(producer, consumer, sink, messages)
    except KafkaException as error:
        raise StartAnew(str(error)) from error
    finally:
        consumer.close()


def _move(producer: Producer, consumer: Consumer, sink: str, messages: list[Any]) -> None:
    producer.begin_transaction()
    try:
        for message in messages:
            producer.produce(sink, message.value(), partition=int(message.value()) % 2)
        places = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), PATIENCE_SECONDS)
        producer.commit_transaction(PATIENCE_SECONDS)
    except KafkaException as error:
        if error.args[0].txn_requires_abort():
            producer.abort_transaction(PATIENCE_SECONDS)
        # What was read must be read again, from where the group is.
        raise StartAnew(str(error)) from error


if __name__ == "__main__":
    while True:
        try:
            transform(*sys.argv[1:])
        except StartAnew as reason:
            print(f"starts anew: {reason}", file=sys.stderr, flush=True)
