"""Is nothing lost, and nothing done twice, when workers and servers are told to stop under load?"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import psycopg
import pytest

import headwater
from headwater import NewEvent
from headwater.servers.grpc.client import service
from headwater.servers.grpc.generated import headwater_pb2 as pb
from patience import PATIENCE_SECONDS, TEST_SECONDS
from serve_process import first_line, serve_process
from webhook_receiver import Received, Receiver, Reply

confluent = pytest.importorskip("confluent_kafka")

RESTARTS = 2
# Longer than any test waits: nothing here is decided by it.
LONG_GRACE = ("--grace-seconds", "600")
Until = Callable[[Callable[[], Any]], Any]

pytestmark = pytest.mark.crash

# What a worker process runs: one queue whose effects are its acknowledgements, one with handlers that take a moment.
WORKERS = """
import asyncio, os
import headwater

app = headwater.App()
notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.worker("load", queue="exact", concurrency=2, transactional=True, lease_seconds=600)
async def exact(event, connection):
    await connection.execute("insert into effect values (%s)", (event.position,))

@app.worker("load", queue="slow", concurrency=20, lease_seconds=600)
async def slow(event):
    await asyncio.sleep(0.02)
    os.write(notes, b"%d\\n" % event.position)
"""


def test_workers_that_are_told_to_stop_under_load_lose_nothing_and_repeat_nothing(
    dsn: str,
    log: headwater.Headwater,
    connection: psycopg.Connection,
    tmp_path: Path,
    until: Callable[[Callable[[], bool]], bool],
) -> None:
    (tmp_path / "loaded.py").write_text(WORKERS)
    notes = tmp_path / "notes"
    notes.touch()
    connection.execute("create table effect (position bigint)")
    log.create_topic("load")
    for queue in ("exact", "slow"):
        log.create_queue(queue, "load")
    published: list[int] = []
    enough = threading.Event()

    def publish() -> None:
        with headwater.connect(dsn, pool_size=1) as own:
            while not enough.is_set():
                published.extend(p for p in own.publish_batch("load", [NewEvent(n) for n in range(5)]) if p)
                enough.wait(0.05)

    def start() -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        command = [sys.executable, "-c", "from headwater.cli import main; main()", "work", "loaded:app", "--json"]
        started = subprocess.Popen(
            [*command, "--dsn", dsn],
            cwd=tmp_path,
            env={**kept, "NOTES": str(notes)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        # It says that it works when it listens to signals.
        assert "working" in first_line(started)
        return started

    def done() -> int:
        return len(notes.read_text().splitlines())

    def left() -> int:
        (effects,) = connection.execute("select count(*) from effect").fetchone() or (0,)
        return 2 * len(published) - done() - effects

    publisher = threading.Thread(target=publish)
    publisher.start()
    running: list[subprocess.Popen[str]] = []
    try:
        running.extend(start() for _ in range(2))
        for turn in range(RESTARTS):
            before = done()
            until(lambda: done() > before + 40)  # noqa: B023
            # One after the other, as a deployment does.
            leaving = running.pop(0)
            leaving.send_signal(signal.SIGTERM if turn % 2 else signal.SIGINT)
            assert leaving.wait(PATIENCE_SECONDS) == 0
            running.append(start())
        enough.set()
        publisher.join(PATIENCE_SECONDS)
        # However slow the machine: as long as it goes on, it may take its time.
        while remaining := left():
            until(lambda: left() < remaining)
        for one in running:
            one.send_signal(signal.SIGTERM)
        assert [one.wait(PATIENCE_SECONDS) for one in running] == [0, 0]
    finally:
        enough.set()
        publisher.join(PATIENCE_SECONDS)
        for one in running:
            one.kill()
            one.wait(PATIENCE_SECONDS)

    once = dict.fromkeys(published, 1)
    assert Counter(position for (position,) in connection.execute("select position from effect")) == once
    # Handlers that ran when the signal came were waited for, and what was not begun was given back at once: with
    # leases of ten minutes, what was merely left behind would still be waiting.
    assert Counter(int(line) for line in notes.read_text().splitlines()) == once
    for one in log.queues():
        assert (one.ready, one.processing, one.retrying, one.dead) == (0, 0, 0, 0)


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS).close()
    except ConnectionRefusedError:
        return False
    return True


class Requests:
    """One request by each server that publishes, all of them under way: they wait for a partition that somebody "
    "holds."""

    def __init__(self, told: dict[str, Any], topic: str, threads: ThreadPoolExecutor) -> None:
        self._told, self._topic = told, topic
        self.answers = [threads.submit(request) for request in (self.by_http, self.by_grpc, self.by_kafka)]

    def by_http(self) -> object:
        url = f"{self._told['http']}/v1/topics/{self._topic}/events"
        return httpx.post(url, json={"data": "http"}, timeout=PATIENCE_SECONDS).status_code

    def by_grpc(self) -> object:
        with grpc.insecure_channel(self._told["grpc"]) as channel:
            request = pb.PublishRequest(topic=self._topic, event=pb.NewEvent(payload=b'"grpc"'))
            try:
                return (
                    service(channel, "headwater.v1.Log").Publish(request, timeout=PATIENCE_SECONDS).HasField("position")
                )
            except grpc.RpcError as error:
                return error.code()

    def by_kafka(self) -> object:
        # Sent once: who is not answered hears so, and does not send it again.
        options = {"bootstrap.servers": self._told["kafka"][0], "message.timeout.ms": TEST_SECONDS * 1000}
        producer = confluent.Producer({**options, "retries": 0, "log_level": 0})
        reports: list[bool] = []
        producer.produce(self._topic, b'"kafka"', on_delivery=lambda error, _: reports.append(error is None))
        producer.flush(PATIENCE_SECONDS)
        return reports


def test_requests_under_way_at_sigterm_are_answered_by_every_protocol(
    dsn: str, log: headwater.Headwater, connection: psycopg.Connection, until: Until
) -> None:
    log.create_topic("held", kind="sequenced")
    servers = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--kafka", "127.0.0.1:0", *LONG_GRACE)
    with serve_process(*servers, dsn=dsn) as server, ThreadPoolExecutor() as threads:
        with connection.transaction():
            log.publish("held", "holds the partition", connection=connection)
            requests = Requests(server.told, "held", threads)
            until(lambda: waiting_for_locks(dsn) == 3)
            server.process.terminate()
            servers_closed = [urlsplit(server.told["http"]).netloc, server.told["grpc"], server.told["kafka"][0]]
            until(lambda: not any(map(listens, servers_closed)))
            assert not any(answer.done() for answer in requests.answers)
        assert [answer.result(PATIENCE_SECONDS) for answer in requests.answers] == [200, True, [True]]
        assert server.process.wait(PATIENCE_SECONDS) == 0
    published = [json.loads(event.payload or b"") for event in log.read("held")]
    assert sorted(published) == ["grpc", "holds the partition", "http", "kafka"]


def waiting_for_locks(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        (count,) = connection.execute(query).fetchone() or (0,)
        return int(count)


def test_what_outlasts_the_grace_is_called_off(
    dsn: str, log: headwater.Headwater, connection: psycopg.Connection, until: Until
) -> None:
    log.create_topic("stuck", kind="sequenced")
    servers = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--kafka", "127.0.0.1:0", "--grace-seconds", "0")
    with serve_process(*servers, dsn=dsn) as server, ThreadPoolExecutor() as threads:
        with connection.transaction():
            log.publish("stuck", "holds the partition", connection=connection)
            requests = Requests(server.told, "stuck", threads)
            until(lambda: waiting_for_locks(dsn) == 3)
            server.process.terminate()
            assert server.process.wait(PATIENCE_SECONDS) == 0
        http, grpc_, kafka = [answer.result(PATIENCE_SECONDS) for answer in requests.answers]
        assert http == 504
        assert grpc_ in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert kafka == [False]
    assert [json.loads(event.payload or b"") for event in log.read("stuck")] == ["holds the partition"]


def test_a_server_that_waits_for_an_answer_to_a_webhook_is_not_ready_and_takes_no_more(
    dsn: str, log: headwater.Headwater, until: Until
) -> None:
    log.create_topic("hooked")
    answered = asyncio.Event()

    async def respond(_: Received) -> Reply:
        await answered.wait()
        return Reply()

    with Receiver(respond) as receiver:
        log.create_webhook("waits", receiver.url, "hooked")
        log.publish("hooked", 1)
        options = ("--http", "127.0.0.1:0", "--webhooks", "--allow-network", "127.0.0.1", "--processes", "2")
        with serve_process(*options, *LONG_GRACE, dsn=dsn) as server:
            assert httpx.get(f"{server.told['http']}/ready", timeout=PATIENCE_SECONDS).status_code == 200
            until(lambda: receiver.received)
            server.process.terminate()
            until(lambda: not listens(urlsplit(server.told["http"]).netloc))
            assert server.process.poll() is None
            receiver.call(answered.set)
            assert server.process.wait(PATIENCE_SECONDS) == 0
        # The answer that was waited for counts: nobody sends it again.
        assert len(receiver.received) == 1
    (queue,) = [one for one in log.queues() if one.name == log.webhook("waits").queue]
    assert (queue.ready, queue.processing, queue.retrying, queue.done) == (0, 0, 0, 1)
