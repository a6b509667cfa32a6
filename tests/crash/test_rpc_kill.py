"""Is anything lost or doubled when servers of gRPC are killed while clients append, subscribe and compete?"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headwater
from effort import effort
from headwater.eventstore import NewStoreEvent
from patience import PATIENCE_SECONDS

grpc = pytest.importorskip("grpc")
sys.path.append(str(Path(__file__).parents[1] / "conformance"))
from rpc_client import RpcStore, RpcStores  # noqa: E402
from rpc_servers import rpc_server  # noqa: E402
from store_history import Asked, check  # noqa: E402
from test_store_history import NO_ANSWER, random_appends  # noqa: E402

from headwater.servers.grpc.client import service  # noqa: E402
from headwater.servers.grpc.generated import headwater_pb2 as pb  # noqa: E402

Until = Callable[[Callable[[], Any]], Any]
WRITERS = 4
APPENDS = effort(30, least=20)
KILLS = effort(3)

pytestmark = pytest.mark.crash


def connected(address: str) -> Any:
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


def serving_children(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(one) for one in children if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def test_what_was_confirmed_is_there_once_and_every_subscriber_saw_it_once_in_order(
    dsn: str, log: headwater.Headwater
) -> None:
    store = log.create_store("killed")
    deadline = time.monotonic() + PATIENCE_SECONDS
    killed = threading.Event()
    confirmed: dict[str, int] = {}
    received: list[Any] = []

    def write(writer: int, address: str) -> None:
        """Append until the last kill and then a little, half of it in streams. What has no answer is repeated."""
        written = 0
        after_kills = 0
        while after_kills < APPENDS:
            left = [f"{writer}-{written + n}" for n in range(random.randint(1, 8))]
            written += len(left)
            after_kills += len(left) if killed.is_set() else 0
            while left:
                assert time.monotonic() < deadline
                with connected(address) as channel:
                    try:
                        for event_id, position in sent(channel, left).items():
                            confirmed[event_id] = position
                            left.remove(event_id)
                    except grpc.RpcError as error:
                        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                            raise

    def sent(channel: Any, batch: list[str]) -> dict[str, int]:
        stores = service(channel, "headwater.v1.EventStore")
        events = [pb.NewStoreEvent(type="A", event_id=event_id) for event_id in batch]
        if len(batch) % 2:
            request = pb.AppendRequest(store="killed", events=events[:1])
            return {batch[0]: stores.Append(request, timeout=PATIENCE_SECONDS, wait_for_ready=True).positions[0]}
        appends = [pb.NumberedAppend(number=n, events=[event]) for n, event in enumerate(events)]
        requests = iter([pb.AppendStreamRequest(store="killed", appends=appends)])
        answers = stores.AppendStream(requests, timeout=PATIENCE_SECONDS, wait_for_ready=True)
        verdicts = [verdict for answer in answers for verdict in answer.verdicts]
        assert [verdict.WhichOneof("outcome") for verdict in verdicts] == ["appended"] * len(batch)
        return {batch[verdict.number]: verdict.appended.positions[0] for verdict in verdicts}

    def subscribe(address: str) -> None:
        while not received or received[-1].type != "End":
            assert time.monotonic() < deadline
            after = received[-1].position if received else 0
            with connected(address) as channel:
                stores = service(channel, "headwater.v1.EventStore")
                request = pb.SubscribeRequest(store="killed", after=after)
                try:
                    for answer in stores.Subscribe(request, timeout=PATIENCE_SECONDS, wait_for_ready=True):
                        received.extend(answer.events)
                        if received[-1].type == "End":
                            return
                except grpc.RpcError as error:
                    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        raise

    with rpc_server("--processes", "2", dsn=dsn) as server, ThreadPoolExecutor(WRITERS + 1) as pool:
        tasks = [pool.submit(subscribe, server.address)]
        tasks += [pool.submit(write, writer, server.address) for writer in range(WRITERS)]
        victims: set[int] = set()
        for _ in range(KILLS):
            before = len(received)
            while len(received) == before or not (living := set(serving_children(server.process)) - victims):
                assert time.monotonic() < deadline
                for task in tasks:
                    if task.done():
                        task.result()
                time.sleep(0.01)
            victim = random.choice(sorted(living))
            victims.add(victim)
            os.kill(victim, signal.SIGKILL)
        killed.set()
        for task in tasks[1:]:
            task.result(PATIENCE_SECONDS)
        store.append(NewStoreEvent("End"))
        tasks[0].result(PATIENCE_SECONDS)
    *kept, _ = store.read_all()
    assert {event.event_id: event.position for event in kept} == confirmed
    assert len(kept) == len(confirmed)
    assert [event.position for event in received[:-1]] == [event.position for event in kept]


def test_every_verdict_is_right_while_servers_are_killed(dsn: str, log: headwater.Headwater, until: Until) -> None:
    store = log.create_store("judged")
    over = threading.Event()

    def append(address: str, seed: int) -> list[Asked]:
        history: list[Asked] = []
        for number in itertools.count():
            # Each time anew: a channel that has lost its server takes its time to try again.
            with closing(RpcStores(address, ("grpc.use_local_subchannel_pool", 1))) as stores:
                grpc.channel_ready_future(stores.channel).result(PATIENCE_SECONDS)
                history += random_appends(
                    stores.store("judged"), 5, seed * 1000 + number, lost=(*NO_ANSWER, grpc.RpcError)
                )
            if over.is_set() and len(history) >= 20:
                return history
        raise AssertionError("counting has no end")

    def moved_on(start: int) -> bool:
        for task in tasks:
            # One that has failed says more than that nothing comes.
            assert not task.done(), task.result()
        return store.head() > start

    with rpc_server("--processes", "2", dsn=dsn) as server, ThreadPoolExecutor(WRITERS) as pool:
        tasks = [pool.submit(append, server.address, seed) for seed in range(WRITERS)]
        try:
            victims: set[int] = set()
            for _ in range(2):
                # Not before something was appended since the last one.
                until(partial(moved_on, store.head()))
                victim = until(lambda: sorted(set(serving_children(server.process)) - victims))[0]
                victims.add(victim)
                os.kill(victim, signal.SIGKILL)
            until(partial(moved_on, store.head()))
        finally:
            over.set()
        history = [asked for task in tasks for asked in task.result(PATIENCE_SECONDS)]
    check(history, list(store.read_all()))
    assert sum(asked.positions is not None for asked in history) > 10
    assert sum(asked.moved_to is not None for asked in history) > 3


class Hand:
    """A batch that somebody got: when they asked for it, and when they were told that it was done, if they were."""

    def __init__(self, positions: list[int], asked_at: float) -> None:
        self.positions = positions
        self.asked_at = asked_at
        self.done_at: float | None = None


def test_those_who_compete_by_grpc_work_on_every_event_and_none_is_given_again_once_done(
    dsn: str, log: headwater.Headwater, until: Until
) -> None:
    store = log.create_store("competed")
    queue = "competitors"
    lease_seconds = 1.0
    hands: list[Hand] = []
    over = threading.Event()

    def work(address: str, worker: str) -> None:
        while not over.is_set():
            with closing(RpcStores(address, ("grpc.use_local_subchannel_pool", 1))) as stores:
                grpc.channel_ready_future(stores.channel).result(PATIENCE_SECONDS)
                try:
                    compete(stores.store(store.topic), worker)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise

    def compete(competing: RpcStore, worker: str) -> None:
        asked_at = time.monotonic()
        hand = None
        for events in competing.compete(
            queue, worker=worker, batch_size=3, lease_seconds=lease_seconds, stop_when_caught_up=True
        ):
            if hand is not None:
                hand.done_at = time.monotonic()
            hand = Hand([event.position for event in events], asked_at)
            hands.append(hand)
            asked_at = time.monotonic()
        if hand is not None:
            hand.done_at = time.monotonic()

    def ended() -> bool:
        for task in tasks:
            # One that has failed says more than that nothing comes.
            assert not task.done(), task.result()
        done = log.deliveries(queue, status="done", batch_size=1000)
        return len(done) + len(log.dead_letters(queue)) == store.count()

    with rpc_server("--processes", "2", dsn=dsn) as server, ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(work, server.address, f"w{n}") for n in range(3)]
        try:
            victims: set[int] = set()
            for _ in range(2):
                held = len(hands)
                store.append([NewStoreEvent("A") for _ in range(30)])
                # In the middle of it.
                until(lambda held=held: len(hands) > held + 2)
                victim = until(lambda: sorted(set(serving_children(server.process)) - victims))[0]
                victims.add(victim)
                os.kill(victim, signal.SIGKILL)
            until(ended)
        finally:
            over.set()
        for task in tasks:
            task.result(PATIENCE_SECONDS)
    events = [event.position for event in store.read_all()]
    assert {position for hand in hands for position in hand.positions} == set(events)
    # Who was told in time that it is done had it for good; all others died, or may have been late.
    kept = [hand for hand in hands if hand.done_at is not None and hand.done_at - hand.asked_at < lease_seconds]
    times = Counter(position for hand in kept for position in hand.positions)
    assert times
    assert max(times.values()) == 1
