"""The entry of every process of a trial. Each is killed at any moment, and started again.

Run with the arguments ROLE NAME SEED and a `Stage` as JSON in the environment.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

from headwater.errors import LogUnavailable
from headwater.trials.chaos import lifeline, producers, queue_workers, readers
from headwater.trials.chaos.journal import Journal
from headwater.trials.chaos.stage import STAGE_VARIABLE, Stage


def main() -> None:
    role, name, seed = sys.argv[1:4]
    stage = Stage(**json.loads(os.environ[STAGE_VARIABLE]))
    lifeline.watch()
    chance = random.Random(f"{seed} {name}")
    numbers = itertools.count(1)

    def journal() -> Journal:
        return Journal(Path(stage.directory), name)

    def protocol(reader: str) -> None:
        # Needs extras that the others do not.
        from headwater.trials.chaos import protocol_readers

        getattr(protocol_readers, reader)(stage)

    acts: dict[str, Callable[[], None]] = {
        "producer": lambda: producers.produce(stage, name, journal(), chance, numbers),
        "rollback": lambda: producers.roll_back(stage),
        "appender": lambda: producers.append(stage, name, journal(), numbers),
        "kafka-producer": lambda: producers.produce_by_kafka(stage, name, journal(), numbers),
        "worker": lambda: queue_workers.work(stage, name, chance),
        "follow": lambda: readers.follow(stage),
        "follow-bare": lambda: readers.follow_without_cursor(stage),
        "process": lambda: readers.process(stage),
        "sql": lambda: readers.subscribe_by_sql(stage, name),
        "store": lambda: readers.subscribe_to_store(stage),
        "sse": lambda: protocol("read_sse"),
        "grpc": lambda: protocol("read_grpc"),
        "kafka": lambda: protocol("read_kafka"),
        "webhook": lambda: protocol("receive_webhooks"),
    }
    while True:
        try:
            return acts[role]()
        except* LogUnavailable:
            producers.sleep(producers.AGAIN_SECONDS)
