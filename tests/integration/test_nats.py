"""Does the publisher lose or repeat anything? A real NATS server, killed and cut off on purpose."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_SECONDS

pytest.importorskip("pyarrow")
pytest.importorskip("nats")

import pyarrow as pa
from nats.js.api import AckPolicy, ConsumerConfig

from headwater.embedded.errors import EmbeddedError
from headwater.embedded.nats import Nats
from headwater.nats import frames, messages, streams, subjects
from headwater.nats.errors import InvalidMessage, NatsRefused, NatsUnavailable
from headwater.nats.publisher import JetStreamPublisher, PublishTotals
from headwater.nats.subjects import Table


@pytest.fixture
def server() -> Iterator[Nats]:
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        server = Nats(Path(directory, "nats"))
        server.start()
        asyncio.run(make_streams(server.url))
        yield server
        server.kill()


async def make_streams(url: str) -> list[str]:
    async with streams.connect(url) as client:
        return await streams.ensure_streams(client.jetstream())


def batch_of(count: int, *, first: int = 0, size: int = 150) -> pa.RecordBatch:
    numbers = range(first, first + count)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(["cdc.orders.insert"] * count),
            pa.array([f"{subjects.change_id(1000, n)}-public.orders-insert" for n in numbers]),
            pa.nulls(count, pa.binary()),
            pa.array([str(n).encode().ljust(size, b".") for n in numbers], pa.binary()),
        ],
        schema=frames.SCHEMA,
    )


def stored_ids(url: str) -> list[str]:
    """The message ids in the stream CDC, in its order."""

    async def read() -> list[str]:
        async with streams.connect(url) as client:
            js = client.jetstream()
            count = (await js.stream_info("CDC")).state.messages
            config = ConsumerConfig(ack_policy=AckPolicy.NONE, headers_only=True)
            subscription = await js.pull_subscribe("cdc.>", stream="CDC", config=config)
            ids: list[str] = []
            while len(ids) < count:
                ids += [
                    str((m.headers or {})["Nats-Msg-Id"])
                    for m in await subscription.fetch(2000, timeout=PATIENCE_SECONDS)
                ]
            return ids

    return asyncio.run(read())


# --- the server ----------------------------------------------------------------------------------------------


def test_a_killed_server_starts_again_with_what_it_acknowledged(server: Nats) -> None:
    with JetStreamPublisher(server.url) as publisher:
        publisher.publish(batch_of(500))
    url, pid = server.url, server.pid
    server.kill()
    assert not server.running
    server.start()
    assert (server.url, server.pid == pid) == (url, False)
    assert stored_ids(server.url) == batch_of(500).column("msg_id").to_pylist()


def test_a_second_program_attaches_to_the_running_server(server: Nats) -> None:
    other = Nats(server.data_dir)
    with other:
        assert other.pid == server.pid
        assert not other.started_here
    assert server.running
    with pytest.raises(EmbeddedError, match="already runs"):
        Nats(server.data_dir, port=1).start()
    other.stop()
    assert not server.running


def test_a_busy_port_is_said_to_be_busy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EmbeddedError, match="in use"):
        Nats(tmp_path / "n", port=taken.getsockname()[1]).start()


def test_a_program_that_is_no_server_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match="did not start"):
        Nats(tmp_path / "n", binary=Path("/bin/false")).start()


def test_streams_and_buckets_are_made_once(server: Nats) -> None:
    assert asyncio.run(make_streams(server.url)) == []

    async def put() -> tuple[Any, ...]:
        async with streams.connect(server.url) as client:
            js = client.jetstream()
            table = Table("sales", "größe 1")
            document = messages.schema_document(table, [messages.SchemaColumn("id", "int4")], timestamp=1)
            first = await streams.put_schema(js, table, document)
            again = await streams.put_schema(js, table, {**document, "timestamp": 2})
            return first, again, await streams.get_schema(js, table) == document

    assert asyncio.run(put()) == (True, False, True)


# --- the publisher -------------------------------------------------------------------------------------------


def test_what_is_published_again_is_counted_as_a_duplicate_and_stored_once(server: Nats) -> None:
    with JetStreamPublisher(server.url, chunk=100, window=250) as publisher:
        assert publisher.publish(batch_of(1000)) == PublishTotals(stored=1000, duplicates=0)
        assert publisher.publish(batch_of(1000, first=500)) == PublishTotals(stored=500, duplicates=500)
        assert publisher.publish(batch_of(0)) == PublishTotals(0, 0)
    assert stored_ids(server.url) == batch_of(1500).column("msg_id").to_pylist()


def test_large_messages_pass_one_by_one_through_a_small_window(server: Nats) -> None:
    with JetStreamPublisher(server.url, window_bytes=1_000_000) as publisher:
        assert publisher.publish(batch_of(20, size=2_000_000)).stored == 20


@pytest.mark.crash
def test_nothing_is_lost_or_repeated_when_the_server_is_killed_in_the_middle(
    server: Nats, until: Callable[[Callable[[], Any]], Any]
) -> None:
    batch = batch_of(60_000)
    with JetStreamPublisher(server.url) as publisher, ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(publisher.publish, batch)
        seen = 0
        for _ in range(3):
            # More than at the last kill: so it has connected again since.
            until(lambda seen=seen: publisher.progress.acknowledged > seen + 5_000 or publishing.done())
            server.kill()
            assert not publishing.done(), "it must be in the middle"
            seen = publisher.progress.acknowledged
            server.start()
        published = publishing.result(timeout=PATIENCE_SECONDS)
        assert publisher.reconnects >= 3
    assert published.acknowledged == 60_000
    assert stored_ids(server.url) == batch.column("msg_id").to_pylist()


class DeafProxy:
    """Passes on what clients say and nothing of what servers answer, once greeted; hangs up after so many bytes."""

    def __init__(self, port: int, *, deaf_bytes: int) -> None:
        self._target = port
        self._deaf_bytes = deaf_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self.connections += 1
            upstream = socket.create_connection(("127.0.0.1", self._target))
            deaf = self.connections <= 3
            threading.Thread(target=self._pass, args=(upstream, client, deaf), daemon=True).start()
            threading.Thread(target=self._pass_up, args=(client, upstream, deaf), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, deaf: bool) -> None:
        greeted = False
        try:
            while piece := source.recv(65536):
                if not deaf or not greeted:
                    target.sendall(piece)
                greeted = greeted or b"PONG" in piece
        except OSError:
            return

    def _pass_up(self, source: socket.socket, target: socket.socket, deaf: bool) -> None:
        passed = 0
        try:
            while piece := source.recv(65536):
                target.sendall(piece)
                passed += len(piece)
                if deaf and passed > self._deaf_bytes:
                    break
        except OSError:
            return
        for end in (source, target):
            end.shutdown(socket.SHUT_WR)
        source.close()

    def close(self) -> None:
        self._listener.close()


def test_messages_whose_acknowledgement_was_lost_are_stored_once(server: Nats) -> None:
    proxy = DeafProxy(server.port or 0, deaf_bytes=300_000)
    url = server.url.replace(f":{server.port}", f":{proxy.port}")
    with JetStreamPublisher(url, chunk=500) as publisher:
        published = publisher.publish(batch_of(5000))
    proxy.close()
    assert proxy.connections == 4
    assert published.acknowledged == 5000
    assert published.duplicates > 0
    assert stored_ids(server.url) == batch_of(5000).column("msg_id").to_pylist()


def test_a_server_that_stays_away_is_an_error_in_time(server: Nats) -> None:
    with JetStreamPublisher(server.url, retry_seconds=0.5) as publisher:
        publisher.publish(batch_of(10))
        server.kill()
        started = time.monotonic()
        with pytest.raises(NatsUnavailable, match=r"0\.5 seconds"):
            publisher.publish(batch_of(10, first=10))
        assert time.monotonic() - started < PATIENCE_SECONDS
        server.start()
        # What was open is sent with the next.
        assert publisher.publish(batch_of(10, first=20)).stored == 20


def test_a_server_that_does_not_answer_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NatsUnavailable, match=r"handshake|timed out"):
            JetStreamPublisher(url, connect_seconds=0.2, retry_seconds=0.5).publish(batch_of(1))


def test_a_wrong_token_is_refused_at_once(server: Nats) -> None:
    with pytest.raises(NatsRefused, match=r"(?i)authorization"):
        JetStreamPublisher(f"nats://wrong@127.0.0.1:{server.port}").publish(batch_of(1))


def test_a_subject_that_no_stream_takes_is_refused(server: Nats) -> None:
    batch = batch_of(1).set_column(0, frames.SCHEMA.field("subject"), pa.array(["nowhere.at.all"]))
    with pytest.raises(NatsRefused, match=r"no stream has the subject nowhere\.at\.all"):
        JetStreamPublisher(server.url, retry_seconds=0.3).publish(batch)


def test_a_message_above_the_servers_limit_is_refused_before_anything_is_sent(server: Nats) -> None:
    batch = pa.concat_batches([batch_of(10), batch_of(1, first=10, size=9_000_000)])
    with (
        JetStreamPublisher(server.url) as publisher,
        pytest.raises(InvalidMessage, match="the server accepts at most 8388608"),
    ):
        publisher.publish(batch)
    assert stored_ids(server.url) == []


def test_a_full_stream_that_refuses_is_an_error_with_its_reason(server: Nats) -> None:
    async def limit() -> None:
        async with streams.connect(server.url) as client:
            js = client.jetstream()
            config = (await js.stream_info("CDC")).config
            await js.update_stream(config, max_msgs=5, discard="new")

    asyncio.run(limit())
    with pytest.raises(NatsRefused, match="maximum messages"):
        JetStreamPublisher(server.url).publish(batch_of(10))
