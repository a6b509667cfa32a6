"""The door for gRPC: the services of the log, those of Orisun, health and reflection, on one port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headwater.access.password_checks import PasswordChecks
from headwater.aio import AsyncHeadwater
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.eventstore import AsyncSqliteStores
from headwater.observability.metrics import ERROR, logger
from headwater.servers.authentication import Callers
from headwater.servers.grpc.backends import Backend, PostgresBackend, SqliteBackend
from headwater.servers.grpc.generated import eventstore_pb2, headwater_pb2
from headwater.servers.grpc.interceptor import Gate, handlers
from headwater.servers.grpc.log_service import LogService
from headwater.servers.grpc.orisun_admin import OrisunAdmin
from headwater.servers.grpc.orisun_store import OrisunEventStore
from headwater.servers.grpc.queue_service import QueueService
from headwater.servers.grpc.store_service import EventStoreService
from headwater.servers.options import Door, Opening
from headwater.supervisor import supervise

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
MAX_CALLS: Final = 10_000
HEALTH_SECONDS: Final = 5.0
OPTIONS: Final = (
    ("grpc.so_reuseport", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 1000),
    # A connection whose other end has gone without a word is noticed.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A connection that does not begin to speak HTTP/2 is closed.
    ("grpc.server_handshake_timeout_ms", 15_000),
    # Who asks more often whether we live is sent away.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.keepalive_permit_without_calls", 1),
)


@asynccontextmanager
async def serving(
    log: AsyncHeadwater, opening: Opening, *, passwords: PasswordChecks | None = None
) -> AsyncIterator[Door]:
    """Serve a log until the block is left."""
    callers = Callers(log, authenticate=opening.authenticate, passwords=passwords)
    async with callers.kept_current():
        backend = PostgresBackend(log)
        services = {
            "Log": LogService(log),
            "Queue": QueueService(log),
            "EventStore": EventStoreService(backend),
        }
        asked = callers if opening.authenticate else None
        async with _open(backend, services, OrisunAdmin(backend, log, asked), Gate(asked), opening) as door:
            yield door


@asynccontextmanager
async def serving_stores(stores: AsyncSqliteStores, opening: Opening) -> AsyncIterator[Door]:
    """Serve the event stores of a directory until the block is left. There are no accounts, so everybody may come."""
    backend = SqliteBackend(stores)
    services = {"EventStore": EventStoreService(backend)}
    async with _open(backend, services, OrisunAdmin(backend, None, None), Gate(None), opening) as door:
        yield door


@asynccontextmanager
async def _open(
    backend: Backend, services: Mapping[str, object], admin: OrisunAdmin, gate: Gate, opening: Opening
) -> AsyncIterator[Door]:
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    orisun = {"EventStore": OrisunEventStore(backend), "Admin": admin}
    server.add_generic_rpc_handlers(
        [
            *handlers(headwater_pb2.DESCRIPTOR, services, gate),
            *handlers(eventstore_pb2.DESCRIPTOR, orisun, gate),
        ]
    )
    names = [f"headwater.v1.{name}" for name in services] + [f"orisun.{name}" for name in orisun]
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    _listen(server, opening)
    await server.start()
    door = Door(f"{opening.host}:{opening.port}")
    watch = supervise("grpc health", partial(_keep_health, backend, healthy, names))
    try:
        await _tell_health(healthy, names, serving=True)
        yield door
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await healthy.enter_graceful_shutdown()
        # Streams and all else that is under way have the same time to end.
        ends = time.monotonic() + opening.limits.grace_seconds
        await gate.stop(opening.limits.grace_seconds)
        await server.stop(max(0.0, ends - time.monotonic()))
        await backend.close()


def _listen(server: Any, opening: Opening) -> None:
    host = f"[{opening.host}]" if ":" in opening.host else opening.host
    address = f"{host}:{opening.port}"
    try:
        if opening.certificate is None or opening.private_key is None:
            if opening.authenticate and not opening.loopback:
                logger.warning("passwords and keys come over the network in clear: give the server a certificate")
            server.add_insecure_port(address)
        else:
            pair = (Path(opening.private_key).read_bytes(), Path(opening.certificate).read_bytes())
            server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except (OSError, RuntimeError) as error:
        raise InvalidRequest(
            f"{address} cannot be listened on: {error}", hint="Choose another port, or another certificate."
        ) from error


async def _keep_health(backend: Backend, healthy: Any, names: list[str]) -> None:
    """Tell who asks for our health whether the database can be reached."""
    told = True
    while True:
        await asyncio.sleep(HEALTH_SECONDS)
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await backend.ping()
            reached = True
        except (HeadwaterError, TimeoutError) as error:
            logger.warning("the database cannot be reached", extra={ERROR: str(error)})
            reached = False
        if reached != told:
            await _tell_health(healthy, names, serving=reached)
            told = reached


async def _tell_health(healthy: Any, names: list[str], *, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", *names):
        await healthy.set(name, status)
