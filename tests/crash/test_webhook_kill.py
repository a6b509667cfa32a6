"""Is every webhook delivered, under one id, when those who deliver are killed in the middle of it?"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headwater
from effort import effort
from headwater import NewEvent
from patience import PATIENCE_SECONDS
from webhook_receiver import Received, Receiver, Reply

KILLS = effort(2)
EVENTS = 60


class Gate:
    """Answers nothing while it is shut."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0
        self.accepted: dict[int, int] = defaultdict(int)

    async def respond(self, received: Received) -> Reply:
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        self.accepted[received.position] += 1
        return Reply()


def start(dsn: str, complaints: Path) -> subprocess.Popen[bytes]:
    program = "from headwater.cli import main; main()"
    with complaints.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-c", program, "webhook", "deliver", "--dsn", dsn, "--allow-network", "127.0.0.1"],
            stderr=file,
        )


@pytest.mark.crash
def test_killing_those_who_deliver_loses_nothing_and_keeps_the_ids(
    log: headwater.Headwater, dsn: str, topic: str, until: Callable[[Callable[[], Any]], Any], tmp_path: Path
) -> None:
    gate = Gate()
    complaints = tmp_path / "complaints"
    with Receiver(gate.respond) as receiver:
        log.create_webhook(topic, receiver.url, topic, max_concurrency=6)
        log.alter_queue(topic, lease_seconds=0.5)
        positions = log.publish_batch(topic, [NewEvent(n) for n in range(EVENTS)])
        before = 0
        for _ in range(KILLS):
            process = start(dsn, complaints)
            # One at least: what the dead had in hand comes alone, the next only after it.
            until(lambda seen=before: gate.waiting > 0 and len(receiver.received) > seen)  # type: ignore[misc]
            process.kill()
            process.wait(PATIENCE_SECONDS)
            # What it had sent is answered into the void: nobody is left to note it.
            receiver.call(gate.open.set)
            until(lambda: gate.waiting == 0)
            receiver.call(gate.open.clear)
            before = len(receiver.received)
        receiver.call(gate.open.set)
        process = start(dsn, complaints)
        until(lambda: [one.done for one in log.queues() if one.name == topic] == [EVENTS])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, complaints.read_text()
    ids = defaultdict(set)
    for one in receiver.received:
        ids[one.position].add(one.id)
    assert sorted(ids) == sorted(gate.accepted) == sorted(positions)
    assert {len(of_event) for of_event in ids.values()} == {1}
    assert len({one for of_event in ids.values() for one in of_event}) == EVENTS
    assert log.dead_letters(topic) == []
    # The kills were in the middle: something came twice.
    assert len(receiver.received) > EVENTS
