"""The readers of a trial that are clients of `headwater serve`: SSE, gRPC, Kafka, and a webhook receiver.

Each reconnects and resumes as an ordinary client of its protocol does, from a position that it stores itself.
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

from headwater.trials.chaos.config import GRPC, KAFKA, SSE, WEBHOOK, TrialConfig, id_of, id_of_payload, quiet_and_busy
from headwater.trials.chaos.journal import DeliveryLog
from headwater.trials.chaos.readers import run_concurrently

RETRY_SECONDS: Final = 0.2
# Longer than the interval of server heartbeats, which is 15 seconds.
SILENCE_SECONDS: Final = 25.0
GRPC_SECONDS: Final = 20.0


class ServerSentEvent(NamedTuple):
    """One event of an SSE stream, and the last event id of the client after it."""

    name: str
    data: str
    last_id: str | None


class PositionRejected(Exception):
    """The server rejected the position of a reader."""


def server_sent_events(response: http.client.HTTPResponse, last_id: str | None) -> Iterator[ServerSentEvent]:
    """Parse an SSE stream. As in the standard, an id takes effect at the next empty line, with or without data."""
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


def read_sse(config: TrialConfig) -> None:
    """Follow an SSE stream; reconnect with Last-Event-ID, as an EventSource in a browser does."""
    run_concurrently([lambda reader=reader: _follow_sse(config, reader) for reader in quiet_and_busy(SSE)])  # type: ignore[misc]


def _follow_sse(config: TrialConfig, reader: str) -> None:
    deliveries = DeliveryLog(Path(config.directory), reader)
    last_id: str | None = deliveries.checkpoint()
    query = urlencode([("topic", topic) for topic in config.topics_of(reader)] + [("after", "0")])
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", config.http_port, timeout=SILENCE_SECONDS)
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        try:
            connection.request("GET", f"/v1/follow?{query}", headers=headers)
            response = connection.getresponse()
            if response.status >= 500:
                raise ConnectionError
            if response.status != 200:
                raise PositionRejected(f"{response.status} for id {last_id}: {response.read(500)!r}")
            for event in server_sent_events(response, last_id):
                last_id = event.last_id
                is_event = event.data and event.name != "end"
                deliveries.record([_id_of_json(event.data)] if is_event else [], last_id)
        except (OSError, http.client.HTTPException):
            threading.Event().wait(RETRY_SECONDS)
        finally:
            connection.close()


def _id_of_json(text: str) -> str:
    """The id of an event, from its JSON. The payload of an event published with Kafka has no content type."""
    event = json.loads(text)
    return id_of(event["data"] if "data" in event else json.loads(event["text"]))


def read_grpc(config: TrialConfig) -> None:
    """Follow with gRPC; reconnect with the position and epoch of the last response."""
    run_concurrently([lambda reader=reader: _follow_grpc(config, reader) for reader in quiet_and_busy(GRPC)])  # type: ignore[misc]


def _follow_grpc(config: TrialConfig, reader: str) -> None:
    import grpc

    from headwater.servers.grpc.client import service
    from headwater.servers.grpc.generated import headwater_pb2 as pb

    deliveries = DeliveryLog(Path(config.directory), reader)
    # Epoch 0: no position yet.
    after, epoch = deliveries.checkpoint() or (0, 0)
    retryable = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
    while True:
        with grpc.insecure_channel(f"127.0.0.1:{config.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            log = service(channel, "headwater.v1.Log")
            request = pb.FollowRequest(topics=config.topics_of(reader), after=after, epoch=epoch)
            try:
                for response in log.Follow(request, timeout=GRPC_SECONDS, wait_for_ready=True):
                    after, epoch = response.events[-1].position, response.epoch
                    deliveries.record([id_of_payload(event.payload) for event in response.events], (after, epoch))
            except grpc.RpcError as error:
                if error.code() not in retryable:
                    raise PositionRejected(
                        f"{error.code()} after {after} of epoch {epoch}: {error.details()}"
                    ) from error
                threading.Event().wait(RETRY_SECONDS)


def read_kafka(config: TrialConfig) -> None:
    """Read as a member of a consumer group. Recorded events are committed; the client keeps the position in between."""
    from confluent_kafka import Consumer, KafkaException

    deliveries = DeliveryLog(Path(config.directory), KAFKA)
    consumer = Consumer(
        {
            "bootstrap.servers": f"127.0.0.1:{config.kafka_port}",
            "group.id": config.consumer(KAFKA),
            "auto.offset.reset": "earliest",
            "enable.auto.offset.store": False,
            "auto.commit.interval.ms": 500,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1000,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
    )
    consumer.subscribe(list(config.topics_of(KAFKA)))
    while True:
        messages = [one for one in consumer.consume(100, 0.2) if one.error() is None]
        if messages:
            deliveries.record([id_of_payload(one.value()) for one in messages])
            for one in messages:
                try:
                    consumer.store_offsets(one)
                except KafkaException:
                    # The partition was revoked: its next owner reads from the committed offset.
                    continue


def receive_webhooks(config: TrialConfig) -> None:
    """Receive webhooks; respond after the event is recorded."""
    deliveries = DeliveryLog(Path(config.directory), WEBHOOK)

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = SILENCE_SECONDS

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            deliveries.record([id_of(json.loads(body)["data"])])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

    Server(("127.0.0.1", config.webhook_port), Receiver).serve_forever()
