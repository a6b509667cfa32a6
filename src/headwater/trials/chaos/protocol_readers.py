"""The readers of a trial that speak a protocol to `headwater serve`: SSE, gRPC, Kafka, and a receiver of webhooks.

Each is written as a client of that protocol would be: it reconnects from the place that it remembers by itself.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from headwater.trials.chaos.journal import Deliveries
from headwater.trials.chaos.readers import side_by_side
from headwater.trials.chaos.stage import GRPC, KAFKA, SSE, WEBHOOK, Stage, id_of, id_of_payload, quiet_and_busy

AGAIN_SECONDS: Final = 0.2
# Longer than a server is silent: its heartbeats come every 15 seconds.
SILENCE_SECONDS: Final = 25.0
GRPC_SECONDS: Final = 20.0


class ServerSentEvent(NamedTuple):
    """One event of an SSE stream, and the id that the client then has."""

    name: str
    data: str
    last_id: str | None


class PositionRefused(Exception):
    """The server does not take the position that a reader came with."""


def server_sent_events(response: http.client.HTTPResponse, last_id: str | None) -> Iterator[ServerSentEvent]:
    """Parse an SSE stream as the standard says: an id counts from the next empty line, with or without data."""
    name, new_id = "", last_id
    data: list[str] = []
    while line := response.readline():
        text = line.decode().rstrip("\r\n")
        if not text:
            yield ServerSentEvent(name or "message", "\n".join(data), new_id)
            name, data = "", []
            continue
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "id":
                new_id = value
            case "event":
                name = value
            case "data":
                data.append(value)


def read_sse(stage: Stage) -> None:
    """Reconnects with Last-Event-ID, as an EventSource in a browser does."""
    side_by_side([lambda reader=reader: _follow_sse(stage, reader) for reader in quiet_and_busy(SSE)])  # type: ignore[misc]


def _follow_sse(stage: Stage, reader: str) -> None:
    deliveries = Deliveries(Path(stage.directory), reader)
    last_id: str | None = deliveries.place()
    query = urlencode([("topic", topic) for topic in stage.topics_of(reader)] + [("after", "0")])
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", stage.http_port, timeout=SILENCE_SECONDS)
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        try:
            connection.request("GET", f"/v1/follow?{query}", headers=headers)
            response = connection.getresponse()
            if response.status >= 500:
                raise ConnectionError
            if response.status != 200:
                raise PositionRefused(f"{response.status} for id {last_id}: {response.read(500)!r}")
            for event in server_sent_events(response, last_id):
                last_id = event.last_id
                is_event = event.data and event.name != "end"
                deliveries.note([_id_of_json(event.data)] if is_event else [], last_id)
        except (OSError, http.client.HTTPException):
            threading.Event().wait(AGAIN_SECONDS)
        finally:
            connection.close()


def _id_of_json(text: str) -> str:
    """By what an event is known, from its JSON; a payload that came by Kafka says nothing of its type."""
    event = json.loads(text)
    return id_of(event["data"] if "data" in event else json.loads(event["text"]))


def read_grpc(stage: Stage) -> None:
    """Gives back the position and the epoch of the last answer, and the server finds where to go on."""
    side_by_side([lambda reader=reader: _follow_grpc(stage, reader) for reader in quiet_and_busy(GRPC)])  # type: ignore[misc]


def _follow_grpc(stage: Stage, reader: str) -> None:
    import grpc

    from headwater.servers.grpc.client import service
    from headwater.servers.grpc.generated import headwater_pb2 as pb

    deliveries = Deliveries(Path(stage.directory), reader)
    # 0: no position yet, so of no epoch.
    after, epoch = deliveries.place() or (0, 0)
    lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
    while True:
        with grpc.insecure_channel(f"127.0.0.1:{stage.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            log = service(channel, "headwater.v1.Log")
            request = pb.FollowRequest(topics=stage.topics_of(reader), after=after, epoch=epoch)
            try:
                for answer in log.Follow(request, timeout=GRPC_SECONDS, wait_for_ready=True):
                    after, epoch = answer.events[-1].position, answer.epoch
                    deliveries.note([id_of_payload(event.payload) for event in answer.events], (after, epoch))
            except grpc.RpcError as error:
                if error.code() not in lost:
                    raise PositionRefused(
                        f"{error.code()} after {after} of epoch {epoch}: {error.details()}"
                    ) from error
                threading.Event().wait(AGAIN_SECONDS)


def read_kafka(stage: Stage) -> None:
    """A member of a consumer group. What is noted is committed; the position in between is in the client's memory."""
    from confluent_kafka import Consumer, KafkaException

    deliveries = Deliveries(Path(stage.directory), KAFKA)
    consumer = Consumer(
        {
            "bootstrap.servers": f"127.0.0.1:{stage.kafka_port}",
            "group.id": stage.consumer(KAFKA),
            "auto.offset.reset": "earliest",
            "enable.auto.offset.store": False,
            "auto.commit.interval.ms": 500,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1000,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
    )
    consumer.subscribe(list(stage.topics_of(KAFKA)))
    while True:
        messages = [one for one in consumer.consume(100, 0.2) if one.error() is None]
        if messages:
            deliveries.note([id_of_payload(one.value()) for one in messages])
            for one in messages:
                try:
                    consumer.store_offsets(one)
                except KafkaException:
                    # The partition was taken away meanwhile: its next owner reads from what was committed.
                    continue


def receive_webhooks(stage: Stage) -> None:
    """A receiver that answers when it has noted what came."""
    deliveries = Deliveries(Path(stage.directory), WEBHOOK)

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = SILENCE_SECONDS

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            deliveries.note([id_of(json.loads(body)["data"])])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

    Server(("127.0.0.1", stage.webhook_port), Receiver).serve_forever()
