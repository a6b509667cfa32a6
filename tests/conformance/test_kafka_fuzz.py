"""Does a broker survive mutated frames of every API, and is every connection answered or closed?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from brokers import broker_process
from kafka_fuzzer import Fuzzer, resident_mib

import headwater
from effort import effort

FRAMES = effort(4000)
SEEDS = (11, 12)
MAX_GROWTH_MIB = 150


@pytest.fixture
def topics(log: headwater.Headwater) -> None:
    log.create_topic("fz", kind="sequenced", partitions=3)
    log.create_topic("fz-open")


def test_mutated_frames_cost_their_connections_at_most(dsn: str, topics: None) -> None:
    with broker_process(dsn) as broker:
        host, _, port = broker.addresses[0].rpartition(":")
        # The first frames load every schema: what grows after them would grow for ever.
        Fuzzer((host, int(port)), 10).run(2000)
        before = resident_mib(broker.process.pid)
        fuzzers = [Fuzzer((host, int(port)), seed) for seed in SEEDS]
        with ThreadPoolExecutor(len(fuzzers)) as pool:
            for done in [pool.submit(one.run, FRAMES // len(fuzzers)) for one in fuzzers]:
                done.result()
        assert broker.process.poll() is None
        assert sum(one.handled for one in fuzzers) >= FRAMES
        assert all(one.counts["answers"] > one.counts["closed by the broker"] > 0 for one in fuzzers)
        assert resident_mib(broker.process.pid) < before + MAX_GROWTH_MIB
