"""Do SSE streams bring every event once, in order, whatever the client and the server go through?"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import httpx
import psycopg
import pytest

import headwater
from headwater.log.sse_frames import ResumePoint
from headwater.servers.options import ServerLimits
from http_server import http_process, http_server
from patience import PATIENCE_SECONDS

CONNECTIONS = 1000


class Told(NamedTuple):
    """One event of a stream, as a client reads it."""

    id: str | None
    event: str | None
    data: Any


def parsed(lines: Iterator[str]) -> Iterator[Told]:
    """What a client of server-sent events makes of the lines. Heartbeats have no data."""
    fields: dict[str, str] = {}
    for line in lines:
        if line == "":
            if "data" in fields or "id" in fields:
                data = fields.get("data")
                yield Told(fields.get("id"), fields.get("event"), None if data is None else json.loads(data))
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def place_of(id: str | None) -> int:
    """The position of an id, which is position.epoch."""
    mark = ResumePoint.parse(id or "")
    assert mark is not None
    assert mark.epoch
    return mark.position


@pytest.fixture(scope="module")
def address(dsn: str) -> Iterator[str]:
    with http_server(dsn, limits=ServerLimits(heartbeat_seconds=0.5)) as found:
        yield found


def follow(http: httpx.Client, path: str, count: int, **headers: str) -> list[Told]:
    """The first so many events of a stream."""
    found: list[Told] = []
    with http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for told in parsed(response.iter_lines()):
            if told.data is not None:
                found.append(told)
            if len(found) == count:
                return found
    return found


def test_a_stream_catches_up_and_goes_on_live(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    positions = log.publish_batch(topic, [headwater.NewEvent(n, type="t") for n in range(1500)])
    found: list[Told] = []
    with http.stream("GET", f"/v1/topics/{topic}/follow?after=0") as response:
        for told in parsed(response.iter_lines()):
            if told.data is None:
                continue
            found.append(told)
            if len(found) == 1500:
                positions += log.publish_batch(topic, [headwater.NewEvent(n, type="t") for n in range(1500, 1520)])
            if len(found) == 1520:
                break
    assert [told.data["position"] for told in found] == positions
    assert [told.data["data"] for told in found] == list(range(1520))
    assert [place_of(told.id) for told in found] == positions
    assert {told.event for told in found} == {"t"}


def test_a_stream_begins_at_the_end_unless_told_otherwise(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    log.publish(topic, "before")
    with http.stream("GET", f"/v1/topics/{topic}/follow") as response:
        lines = response.iter_lines()
        assert next(lines) == "retry: 1000"
        next(parsed(lines))
        log.publish(topic, "after")
        assert next(told.data["data"] for told in parsed(lines) if told.data is not None) == "after"


def test_last_event_id_resumes_without_a_gap_or_a_repeat(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    positions = log.publish_batch(topic, [headwater.NewEvent(n) for n in range(50)])
    got: list[int] = []
    last = "0"
    while len(got) < 50:
        part = follow(http, f"/v1/topics/{topic}/follow?after=0", min(7, 50 - len(got)), **{"last-event-id": last})
        got += [told.data["position"] for told in part]
        last = part[-1].id or ""
    assert got == positions


def test_a_stream_brings_what_was_selected_and_its_names_cannot_be_forged(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    log.publish_batch(
        topic,
        [
            headwater.NewEvent(0, type="a", key="x", headers={"h": "1"}),
            headwater.NewEvent(1, type="a", key="y", headers={"h": "1"}),
            headwater.NewEvent(2, type="b", key="x", headers={"h": "1"}),
            headwater.NewEvent(3, type="a", key="x", headers={"h": "2"}),
            headwater.NewEvent(4, type="a", key="x", headers={"h": "1"}),
            headwater.NewEvent({"text": "two\nlines"}, type="end"),
            headwater.NewEvent(b"a\r\nid: 1\r\n\r\ndata: forged\r\n", type="x\nid: 7"),
        ],
    )
    chosen = follow(http, f"/v1/topics/{topic}/follow?after=0&type=a&key=x&header.h=1", 2)
    assert [told.data["data"] for told in chosen] == [0, 4]
    everything = follow(http, f"/v1/topics/{topic}/follow?after=0", 7)
    assert [told.event for told in everything] == ["a", "a", "b", "a", "a", "event", "event"]
    assert everything[6].data["text"] == "a\r\nid: 1\r\n\r\ndata: forged\r\n"
    unnamed = follow(http, f"/v1/topics/{topic}/follow?after=0&named=false", 7)
    assert {told.event for told in unnamed} == {None}
    other = log.create_topic(f"{topic}-b").name
    log.publish(other, "there")
    both = follow(http, f"/v1/follow?topic={topic}&topic={other}&after=0", 8)
    assert both[7].data["data"] == "there"
    whole = follow(http, f"/v1/follow?after={both[6].id}", 1)
    assert whole[0].data["topic"] == other


def test_streams_of_several_topics_share_a_reader_and_miss_nothing(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    other = log.create_topic(f"{topic}-late").name
    with (
        http.stream("GET", f"/v1/topics/{topic}/follow") as first,
        http.stream("GET", f"/v1/topics/{topic}/follow?type=none"),
    ):
        lines = first.iter_lines()
        next(lines)
        positions = log.publish_batch(other, [headwater.NewEvent(n) for n in range(10)])
        log.publish(topic, "mine")
        assert next(told for told in parsed(lines) if told.data is not None).data["data"] == "mine"
        # The reader has passed the other topic's events by; who asks for them now must still get them.
        late = follow(http, f"/v1/topics/{other}/follow?after={positions[0] - 1}", 10)
        assert [told.data["position"] for told in late] == positions
        with http.stream("GET", f"/v1/follow?after={positions[0] - 1}") as whole:
            found = []
            for told in parsed(whole.iter_lines()):
                if told.data is not None:
                    found.append(told.data["position"])
                if len(found) == 11:
                    break
        assert found == sorted(found)
        assert len(found) == 11


def test_what_bindings_and_subscriptions_select_is_followed(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    log.create_queue(f"g-{topic}")
    log.bind(f"g-{topic}", topic=topic, pattern="a.*", headers={"x": 1}, from_position=0)
    log.publish(topic, "no", routing_key="b.c", headers={"x": 1})
    log.publish(topic, "one", routing_key="a.b", headers={"x": 1})
    id = log.subscribe(f"s-{topic}", "e.topic = s.params ->> 't' and e.data = '\"one\"'", {"t": topic})
    other = log.subscribe(f"s-{topic}", "e.topic = s.params ->> 't'", {"t": topic})
    start = log.state().stable
    with (
        http.stream("GET", f"/v1/queues/g-{topic}/follow?after=0") as bound,
        http.stream("GET", f"/v1/subscriptions/s-{topic}/{id}/follow?after={start}") as matched,
        http.stream("GET", f"/v1/subscriptions/s-{topic}/{other}/follow?after={start}") as all_matched,
    ):
        events = parsed(bound.iter_lines())
        matches = parsed(matched.iter_lines())
        all_matches = parsed(all_matched.iter_lines())
        assert next(told for told in events if told.data).data["data"] == "one"
        log.publish(topic, "two", routing_key="a.c", headers={"x": 1, "y": 2})
        log.publish(topic, "one", routing_key="x")
        assert next(told for told in events if told.data).data["data"] == "two"
        assert next(told for told in matches if told.data).data["routing_key"] == "x"
        assert [next(told for told in all_matches if told.data).data["data"] for _ in range(2)] == ["two", "one"]
    # Nothing was claimed.
    lease = log.claim(f"g-{topic}", worker="w", batch_size=10)
    assert lease is not None
    assert [event.data for event in lease.events] == ["one", "two"]
    assert http.get("/v1/queues/nobody/follow").status_code == 404
    assert http.get(f"/v1/queues/s-{topic}/follow").status_code == 400
    assert http.get(f"/v1/subscriptions/s-{topic}/999999/follow").status_code == 404


def beats(lines: Iterator[str], count: int) -> list[str]:
    """The lines of a stream up to its n-th heartbeat."""
    found: list[str] = []
    for line in lines:
        found.append(line)
        if found.count(":") == count:
            break
    return found


@pytest.mark.parametrize("selected", ["", "&type=wanted"])
def test_no_id_of_a_stream_is_beyond_what_it_delivered(
    http: httpx.Client, log: headwater.Headwater, topic: str, selected: str
) -> None:
    before = log.publish(topic, 0, type="wanted")
    with http.stream("GET", f"/v1/topics/{topic}/follow?named=true{selected}") as response:
        lines = response.iter_lines()
        told = parsed(lines)
        first = next(told)
        assert place_of(first.id) == before, "a stream begins behind the last event of its topic"
        delivered = log.publish(topic, 1, type="wanted")
        other = log.create_topic(f"{topic}-other").name
        log.publish_batch(other, [headwater.NewEvent(n) for n in range(5)])
        log.publish(topic, 2, type="wanted" if not selected else "unwanted")
        last = delivered if selected else log.publish(topic, 3, type="wanted")
        ids = [first.id]
        for one in told:
            ids.append(one.id)
            if one.data is not None and one.data["position"] == last:
                break
        # Only what was published in another topic, or is not selected, comes from now on.
        log.publish_batch(other, [headwater.NewEvent(n) for n in range(5)])
        for line in beats(lines, 3):
            assert not line.startswith("id:") or place_of(line.removeprefix("id: ")) <= (last or 0)
    position = log.publish(topic, "later", type="wanted")
    resumed = follow(http, f"/v1/topics/{topic}/follow?named=true{selected}", 1, **{"last-event-id": str(last)})
    assert resumed[0].data["position"] == position
    assert place_of(ids[-1]) == last


def test_a_stream_that_got_nothing_resumes_where_it_began(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    log.publish(topic, "before")
    with http.stream("GET", f"/v1/topics/{topic}/follow") as response:
        last = [line.removeprefix("id: ") for line in beats(response.iter_lines(), 2) if line.startswith("id:")][-1]
    missed = log.publish(topic, "while it was away")
    resumed = follow(http, f"/v1/topics/{topic}/follow", 1, **{"last-event-id": last})
    assert resumed[0].data["position"] == missed


def test_a_stream_that_passed_over_what_retention_took_resumes(
    http: httpx.Client, log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    """Only a stream that may have missed something is refused."""
    wanted = log.publish(topic, 0, type="wanted")
    last = ""
    with http.stream("GET", f"/v1/topics/{topic}/follow?type=wanted&after=0") as response:
        for told in parsed(response.iter_lines()):
            if told.data is not None:
                others = log.publish_batch(topic, [headwater.NewEvent(n, type="other") for n in range(3)])
            elif told.id is not None and "/" in told.id and int(told.id.split("/")[1]) >= (others[-1] or 0):
                last = told.id
                break
    assert place_of(last) == wanted
    connection.execute("update headwater_internal.topic set expired_to = %s where name = %s", (others[-1], topic))
    again = log.publish(topic, 1, type="wanted")
    resumed = follow(http, f"/v1/topics/{topic}/follow?type=wanted", 1, **{"last-event-id": last})
    assert resumed[0].data["position"] == again
    refused = http.get(f"/v1/topics/{topic}/follow?type=wanted", headers={"last-event-id": str(wanted)})
    assert refused.status_code == 410


def test_a_stream_keeps_its_subscription_from_expiring(
    dsn: str, http: httpx.Client, log: headwater.Headwater, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.servers.http.sse_hub.KEEP_ALIVE_SECONDS", 0.05)
    with (
        http_server(dsn, limits=ServerLimits(heartbeat_seconds=0.2)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        life = timedelta(seconds=20)
        id = log.subscribe(f"kept-{topic}", "e.topic = s.params ->> 't'", {"t": topic}, expires_after=life)
        with (
            client.stream("GET", f"/v1/subscriptions/kept-{topic}/{id}/follow", timeout=PATIENCE_SECONDS) as response,
            psycopg.connect(dsn, autocommit=True) as connection,
        ):
            told = parsed(response.iter_lines())
            next(told)
            for n in range(5):
                # As if it had not been in use for longer than it lives; then the maintenance comes.
                connection.execute(
                    "update headwater_internal.subscription set last_active_at = now() - interval '19 s' where id = %s",
                    (id,),
                )
                kept = (
                    "select last_active_at > now() - interval '15 s' from headwater_internal.subscription where id = %s"
                )
                deadline = time.monotonic() + PATIENCE_SECONDS
                while connection.execute(kept, (id,)).fetchone() != (True,):
                    assert time.monotonic() < deadline, "the stream did not keep its subscription"
                    time.sleep(0.01)
                log.maintain()
                log.publish(topic, n)
                assert next(one for one in told if one.data is not None).data["data"] == n


def test_the_end_of_a_subscription_ends_its_streams_with_a_reason(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    id = log.subscribe(f"ends-{topic}", "e.topic = s.params ->> 't'", {"t": topic})
    other = log.subscribe(f"ends-{topic}", "e.topic = s.params ->> 't' and true", {"t": topic})
    with (
        http.stream("GET", f"/v1/subscriptions/ends-{topic}/{id}/follow") as ends,
        http.stream("GET", f"/v1/subscriptions/ends-{topic}/{other}/follow") as goes_on,
    ):
        rest = goes_on.iter_lines()
        told = parsed(ends.iter_lines())
        next(told)
        delivered = log.publish(topic, "one")
        assert next(one for one in told if one.data is not None).data["data"] == "one"
        assert log.unsubscribe(id)
        last = [one for one in told if one.data is not None]
        assert [one.event for one in last] == ["end"]
        assert last[0].data["reason"] == f"subscription {id} was deleted or has expired"
        assert last[0].data["after"] == delivered
        log.publish(topic, "two")
        found = [one.data["data"] for one in (next(o for o in parsed(rest) if o.data is not None) for _ in range(2))]
        assert found == ["one", "two"]


def test_what_retention_took_is_said_before_the_stream_begins(
    http: httpx.Client, log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    positions = log.publish_batch(topic, [headwater.NewEvent(n) for n in range(3)])
    connection.execute("update headwater_internal.topic set expired_to = %s where name = %s", (positions[1], topic))
    refused = http.get(f"/v1/topics/{topic}/follow?after=0")
    assert refused.status_code == 410
    assert refused.json()["earliest_position"] == positions[2]
    again = follow(http, f"/v1/topics/{topic}/follow?after=0&skip_expired=true", 1)
    assert again[0].data["position"] == positions[2]


def test_a_deleted_topic_ends_its_streams_and_no_others(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    doomed = log.create_topic(f"{topic}-doomed").name
    with (
        http.stream("GET", f"/v1/topics/{doomed}/follow") as ends,
        http.stream("GET", f"/v1/topics/{topic}/follow") as goes_on,
    ):
        rest = goes_on.iter_lines()
        next(rest)
        log.delete_topic(doomed)
        log.publish(topic, "still here")
        last = [told for told in parsed(ends.iter_lines()) if told.data is not None]
        assert [told.event for told in last] == ["end"]
        assert doomed in last[0].data["reason"]
        assert next(told for told in parsed(rest) if told.data is not None).data["data"] == "still here"


def test_a_slow_client_is_told_the_end_and_resumes_without_loss(
    dsn: str,
    http: httpx.Client,
    log: headwater.Headwater,
    topic: str,
    until: Callable[[Callable[[], Any]], Any],
) -> None:
    with http_server(dsn, limits=ServerLimits(slow_seconds=1.0)) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE_SECONDS)
        slow.connect((host, int(port)))
        slow.sendall(f"GET /v1/topics/{topic}/follow?after=0 HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        positions: list[int | None] = []
        for _ in range(16):
            positions += log.publish_batch(topic, [headwater.NewEvent("x" * 50_000) for _ in range(20)])
        # It reads nothing until the server has given up on it.
        until(lambda: httpx.get(f"{address}/v1/overview", timeout=PATIENCE_SECONDS).json()["streams"] == 0)
        told = list(parsed(iter(_all_of(slow).decode().split("\n"))))
    assert told[-1].event == "end"
    assert told[-1].data["reason"] == "the client reads too slowly"
    got = [one.data["position"] for one in told if one.data is not None and one.event != "end"]
    assert 0 < len(got) < len(positions)
    assert got[-1] == place_of(told[-1].id)
    after = {"last-event-id": told[-1].id or ""}
    resumed = follow(http, f"/v1/topics/{topic}/follow", len(positions) - len(got), **after)
    assert got + [one.data["position"] for one in resumed] == positions


def _all_of(connection: socket.socket) -> bytes:
    """The body of an answer, which must be whole."""
    received = b""
    while part := connection.recv(1 << 20):
        received += part
    connection.close()
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    body = b""
    while rest and not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    assert rest == b"0\r\n\r\n", "the answer is whole"
    return body


def test_who_falls_behind_what_is_kept_reads_from_the_log_again(
    dsn: str, log: headwater.Headwater, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.servers.http.sse_hub.MAX_BUFFERED_EVENTS", 20)
    with http_server(dsn) as address, httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
        host, _, port = address.removeprefix("http://").partition(":")
        late = socket.socket()
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        late.settimeout(PATIENCE_SECONDS)
        late.connect((host, int(port)))
        late.sendall(f"GET /v1/topics/{topic}/follow HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        lines = late.makefile("rb")
        while lines.readline() != b"retry: 1000\n":
            pass
        with client.stream("GET", f"/v1/topics/{topic}/follow") as quick:
            rest = quick.iter_lines()
            next(rest)
            positions: list[int | None] = []
            for _ in range(10):
                positions += log.publish_batch(topic, [headwater.NewEvent("x" * 50_000) for _ in range(30)])
            seen = (told.data["position"] for told in parsed(rest) if told.data is not None)
            # While one takes all of them, the other takes none: what it lacks is no longer kept.
            assert [next(seen) for _ in positions] == positions
            got = []
            while len(got) < len(positions):
                line = lines.readline()
                assert line, "the stream ended"
                if line.startswith(b"data: "):
                    got.append(json.loads(line[6:])["position"])
            assert got == positions
        late.close()


async def _read_head(reader: asyncio.StreamReader) -> None:
    while (await reader.readline()) != b"\r\n":
        pass


@asynccontextmanager
async def _followers(address: str, path: str, count: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    host, _, port = address.removeprefix("http://").partition(":")
    readers, writers = [], []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        readers.append(reader)
        writers.append(writer)
    for reader in readers:
        await _read_head(reader)
    try:
        yield readers
    finally:
        for writer in writers:
            writer.close()


def test_a_thousand_connections_get_everything_from_one_process(dsn: str, log: headwater.Headwater, topic: str) -> None:
    async def all_of_them(address: str) -> None:
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            _followers(address, f"/v1/topics/{topic}/follow", CONNECTIONS) as readers,
        ):
            positions = []
            for n in range(5):
                positions += await asyncio.to_thread(
                    log.publish_batch, topic, [headwater.NewEvent(n * 4 + m) for m in range(4)]
                )

            async def read(reader: asyncio.StreamReader) -> list[int]:
                got: list[int] = []
                while len(got) < len(positions):
                    line = await reader.readline()
                    assert line, "the stream ended"
                    if line.startswith(b"data: "):
                        got.append(json.loads(line[6:])["position"])
                return got

            for got in await asyncio.gather(*map(read, readers)):
                assert got == positions

    with http_process(dsn) as (address, _):
        asyncio.run(all_of_them(address))


def test_a_server_that_stops_tells_its_streams_where_to_go_on(
    dsn: str, log: headwater.Headwater, topic: str, until: Callable[[Callable[[], Any]], Any]
) -> None:
    log.create_queue(f"stop-{topic}", topics=topic)
    log.publish(topic, 1)
    with http_process(dsn) as (address, process), httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
        with client.stream("GET", f"/v1/topics/{topic}/follow?after=0") as response:
            told = parsed(response.iter_lines())
            assert next(one for one in told if one.data is not None).data["data"] == 1
            process.terminate()
            last = [one for one in told if one.data is not None]
        assert [one.event for one in last] == ["end"]
        assert last[0].data["reason"] == "the server is shutting down"
        assert process.wait(PATIENCE_SECONDS) == 0
    position = log.publish(topic, 2)
    with http_process(dsn) as (address, _), httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
        after = {"last-event-id": last[0].id or ""}
        resumed = follow(client, f"/v1/topics/{topic}/follow", 1, **after)
        assert resumed[0].data["position"] == position


def test_a_stream_survives_the_loss_of_its_database_connections(
    http: httpx.Client, log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    with http.stream("GET", f"/v1/topics/{topic}/follow") as response:
        lines = response.iter_lines()
        next(lines)
        positions = []
        for n in range(5):
            positions.append(log.publish(topic, n))
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and application_name = 'server'"
            )
        found = []
        for told in parsed(lines):
            if told.data is not None:
                found.append(told.data["position"])
            if len(found) == 5:
                break
    assert found == positions


# --- an open publisher holds back the streams of its own topics only -----------------------------------------------

# A stream that gets nothing still gets heartbeats, every half second here.
MAX_BEATS = 60


class Following:
    """A stream that is read a little at a time."""

    def __init__(self, http: httpx.Client, path: str) -> None:
        self.got: list[int] = []
        self._open = http.stream("GET", path)
        self._response = self._open.__enter__()
        assert self._response.status_code == 200, self._response.read()
        self._lines = self._response.iter_lines()
        assert next(self._lines) == "retry: 1000"

    def next(self, count: int) -> list[int]:
        """The positions of the next events."""
        wanted, beats = len(self.got) + count, 0
        while len(self.got) < wanted:
            line = next(self._lines)
            beats = beats + 1 if line == ":" else beats
            assert beats < MAX_BEATS, f"{self.got[wanted - count :]} and nothing more"
            if line.startswith("data: "):
                told = json.loads(line[6:])
                assert "position" in told, told
                self.got.append(told["position"])
        return self.got[-count:]

    def close(self) -> None:
        self._open.__exit__(None, None, None)


@pytest.fixture
def following(http: httpx.Client) -> Iterator[Callable[[str], Following]]:
    opened: list[Following] = []

    def begin(path: str) -> Following:
        opened.append(Following(http, path))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def positions_of(events: list[headwater.Event]) -> list[int]:
    return [event.position for event in events]


def test_a_stream_waits_for_publishers_of_its_own_topics_only(
    log: headwater.Headwater,
    topic: str,
    connection: psycopg.Connection,
    following: Callable[[str], Following],
    http: httpx.Client,
) -> None:
    b, c = (log.create_topic(f"{topic}-{name}").name for name in "bc")
    start = log.publish(b, "first") or 0
    log.create_queue(f"g-{topic}", topics=[b])
    id = log.subscribe(f"s-{topic}", "true", topics=[b])
    goes_on = [
        following(f"/v1/topics/{b}/follow?after={start}"),
        following(f"/v1/follow?topic={b}&topic={c}&after={start}"),
        following(f"/v1/queues/g-{topic}/follow?after={start}"),
        following(f"/v1/subscriptions/s-{topic}/{id}/follow?after={start}"),
    ]
    waits = [
        following(f"/v1/topics/{topic}/follow?after={start}"),
        following(f"/v1/follow?topic={topic}&topic={b}&after={start}"),
        following(f"/v1/follow?after={start}"),
    ]
    with connection.transaction():
        log.publish(topic, "held", connection=connection)
        for n in range(3):
            position = log.publish(b, n)
            for stream in goes_on:
                assert stream.next(1) == [position]
        # One that is behind catches up, and one that wants what comes from now on begins behind the last of its topic.
        late = following(f"/v1/topics/{b}/follow?after={start}")
        assert late.next(3) == goes_on[0].got
        assert http.get(f"/v1/events/{goes_on[0].got[-1]}").json()["data"] == 2
        newest = following(f"/v1/topics/{b}/follow")
        position = log.publish(b, 3) or 0
        for stream in [*goes_on, late, newest]:
            assert stream.next(1) == [position]
        claimed = http.post(
            f"/v1/queues/g-{topic}/claim", json={"worker": "w", "batch_size": 10, "wait_seconds": 10}
        ).json()
        assert position in [event["position"] for event in claimed["events"]]
        log.publish(topic, "held too", connection=connection)
        assert [stream.got for stream in waits] == [[], [], []]
    log.publish(topic, "after")
    log.publish(b, "after")
    assert waits[0].next(3) == positions_of(log.read(topic, after=start))
    assert waits[1].next(8) == positions_of(log.read([topic, b], after=start))
    assert waits[2].next(8) == positions_of(log.read(after=start))
    for stream in [*goes_on, late]:
        stream.next(1)
        assert stream.got == positions_of(log.read(b, after=start))


def test_streams_that_wait_get_in_order_what_is_no_longer_kept(
    dsn: str, log: headwater.Headwater, topic: str, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.servers.http.sse_hub.MAX_BUFFERED_EVENTS", 20)
    b = log.create_topic(f"{topic}-b").name
    start = log.publish(b, "first") or 0
    with (
        http_server(dsn, limits=ServerLimits(heartbeat_seconds=0.5)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as http,
    ):
        free = Following(http, f"/v1/topics/{b}/follow?after={start}")
        both = Following(http, f"/v1/follow?topic={topic}&topic={b}&after={start}")
        whole = Following(http, f"/v1/follow?after={start}")
        for _ in range(2):
            with connection.transaction():
                log.publish(topic, "held", connection=connection)
                for n in range(10):
                    log.publish_batch(b, [headwater.NewEvent(n) for _ in range(5)])
                    free.next(5)
                log.publish(topic, "held too", connection=connection)
            both.next(52)
            whole.next(52)
        log.publish(topic, "live")
        both.next(1)
        whole.next(1)
        assert both.got == positions_of(log.read([topic, b], after=start, batch_size=1000))
        assert whole.got == both.got
        assert free.got == positions_of(log.read(b, after=start, batch_size=1000))
        for stream in (free, both, whole):
            stream.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_stream_gets_its_topics_in_order_whatever_publishers_do(
    dsn: str, log: headwater.Headwater, topic: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Publishers begin, publish and end at random, over three topics; streams of each choice of topics."""
    monkeypatch.setattr("headwater.servers.http.sse_hub.MAX_BUFFERED_EVENTS", 10)
    monkeypatch.setattr("headwater.servers.http.sse_hub.BATCH_SIZE", 7)
    monkeypatch.setattr("headwater.servers.http.sse_hub.HELD_SECONDS", 0.003)
    choose = random.Random(seed)
    topics = [log.create_topic(f"{topic}-{name}").name for name in "abc"]
    start = log.publish(topics[0], "first") or 0
    chosen = [[name for n, name in enumerate(topics) if mask & (1 << n)] for mask in range(8)]
    with (
        http_server(dsn, limits=ServerLimits(heartbeat_seconds=0.5)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_connections=None)) as http,
        ExitStack() as stack,
    ):
        paths = ["/v1/follow?" + "".join(f"topic={name}&" for name in names) + f"after={start}" for names in chosen]
        streams = [Following(http, path) for path in paths]
        connections = [stack.enter_context(psycopg.connect(dsn, autocommit=True)) for _ in range(4)]
        for step in range(300):
            connection = choose.choice(connections)
            is_open = connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
            if not is_open and choose.random() < 0.5:
                connection.execute("begin")
            elif is_open and choose.random() < 0.4:
                connection.execute("commit" if choose.random() < 0.8 else "rollback")
            else:
                log.publish(choose.choice(topics), step, connection=connection)
            if step % 100 == 50:
                # Streams that come in the middle of it.
                more = choose.randrange(8)
                streams.append(Following(http, paths[more]))
                chosen.append(chosen[more])
        for connection in connections:
            connection.execute("commit")
        for names, stream in zip(chosen, streams, strict=True):
            wanted = positions_of(log.read(names or None, after=start, batch_size=1000))
            stream.next(len(wanted))
            assert stream.got == wanted, names
        # And live after all that.
        last = [log.publish(name, "last") or 0 for name in topics]
        for names, stream in zip(chosen, streams, strict=True):
            wanted = [place for name, place in zip(topics, last, strict=True) if not names or name in names]
            assert stream.next(len(wanted)) == wanted
            stream.close()
