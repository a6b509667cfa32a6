"""The main function of every process of a trial, which may be killed and restarted at any time.

Run with the arguments ROLE NAME SEED, and a `TrialConfig` as JSON in the environment.
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
from headwater.trials.chaos import parent_watch, producers, queue_workers, readers
from headwater.trials.chaos.config import CONFIG_VARIABLE, TrialConfig
from headwater.trials.chaos.journal import Journal


def main() -> None:
    role, name, seed = sys.argv[1:4]
    config = TrialConfig(**json.loads(os.environ[CONFIG_VARIABLE]))
    parent_watch.exit_with_parent()
    rng = random.Random(f"{seed} {name}")
    numbers = itertools.count(1)

    def journal() -> Journal:
        return Journal(Path(config.directory), name)

    def protocol(reader: str) -> None:
        # These readers need optional dependencies.
        from headwater.trials.chaos import protocol_readers

        getattr(protocol_readers, reader)(config)

    roles: dict[str, Callable[[], None]] = {
        "producer": lambda: producers.produce(config, name, journal(), rng, numbers),
        "rollback": lambda: producers.roll_back(config),
        "appender": lambda: producers.append(config, name, journal(), numbers),
        "kafka-producer": lambda: producers.produce_with_kafka(config, name, journal(), numbers),
        "worker": lambda: queue_workers.work(config, name, rng),
        "follow": lambda: readers.follow(config),
        "follow-bare": lambda: readers.follow_without_cursor(config),
        "process": lambda: readers.process(config),
        "sql": lambda: readers.subscribe_by_sql(config, name),
        "store": lambda: readers.subscribe_to_store(config),
        "sse": lambda: protocol("read_sse"),
        "grpc": lambda: protocol("read_grpc"),
        "kafka": lambda: protocol("read_kafka"),
        "webhook": lambda: protocol("receive_webhooks"),
    }
    while True:
        try:
            return roles[role]()
        except* LogUnavailable:
            producers.sleep(producers.RETRY_SECONDS)
