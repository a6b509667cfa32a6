"""The processes that the crash test kills. Each notes line by line what it was told, before it goes on."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

import headwater
from headwater import Event, NewEvent
from patience import PATIENCE_SECONDS

BATCH_SIZE = 25


class Journal:
    """Lines that survive the process: the kernel has them as soon as they are written."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, kind: str, value: Any = None) -> None:
        os.write(self.descriptor, f"{kind} {json.dumps(value)}\n".encode())


def publish(log: headwater.Headwater, journal: Journal, name: str, stop: str) -> None:
    """Publish numbered events until told to stop. A number whose answer was lost is noted and not used again."""
    topic, style = name.split(":")
    first = int(sys.argv[5])
    size = {"single": 1, "id": 1, "batch": 10, "copy": 20}[style]
    numbers = itertools.count(first)
    while not os.path.exists(stop):
        chunk = list(itertools.islice(numbers, size))
        events = [NewEvent({"publisher": name, "n": n}, key=name) for n in chunk]
        journal.note("trying", chunk)
        while True:
            try:
                match style:
                    case "single":
                        log.publish(topic, events[0].payload, key=name)
                    case "id":
                        log.publish(topic, events[0].payload, key=name, event_id=f"{name}-{chunk[0]}")
                    case "batch":
                        log.publish_batch(topic, events)
                    case "copy":
                        log.publish_many(topic, events)
                journal.note("acknowledged", chunk)
            except headwater.LogUnavailable:
                # Not a wait for something: there is nothing to be done without a database.
                threading.Event().wait(0.05)
                if style == "id":
                    continue
            break


def follow(log: headwater.Headwater, journal: Journal, topic: str) -> None:
    """Note every batch; the next one coming means that the cursor's move behind the last was acknowledged."""
    for delivery in log.follow_deliveries(
        topic, cursor=f"follow {topic}", batch_size=BATCH_SIZE, patience_seconds=PATIENCE_SECONDS
    ):
        journal.note("epoch", delivery.epoch)
        journal.note("delivered", [event.position for event in delivery.events])
        if any(event.data == "end" for event in delivery.events):
            return


def process(log: headwater.Headwater, journal: Journal, topic: str) -> None:
    """Write every event's position into a table, in the transaction that moves the cursor."""

    def handle(connection: psycopg.Connection[Any], events: Sequence[Event]) -> None:
        with connection.cursor() as cursor:
            cursor.executemany("insert into effect (position) values (%s)", [(event.position,) for event in events])
        journal.note("handled", [event.position for event in events])

    log.process(topic, handle, cursor=f"process {topic}", batch_size=BATCH_SIZE, patience_seconds=PATIENCE_SECONDS)


def main() -> None:
    role, name, dsn, path = sys.argv[1:5]
    journal = Journal(path)
    with headwater.connect(dsn, pool_size=2, connect_timeout_seconds=5) as log:
        journal.note("started")
        acts: dict[str, Callable[[], None]] = {
            "publish": lambda: publish(log, journal, name, sys.argv[6]),
            "follow": lambda: follow(log, journal, name),
            "process": lambda: process(log, journal, name),
        }
        acts[role]()
    journal.note("ended")


if __name__ == "__main__":
    main()
