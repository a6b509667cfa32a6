"""The gRPC server: the services of the log and of Orisun, health checks and reflection, on one port."""

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
from headwater.servers.authentication import Authenticator
from headwater.servers.grpc.backends import Backend, PostgresBackend, SqliteBackend
from headwater.servers.grpc.generated import eventstore_pb2, headwater_pb2
from headwater.servers.grpc.interceptor import CallAuthenticator, make_handlers
from headwater.servers.grpc.log_service import LogService
from headwater.servers.grpc.orisun_admin import OrisunAdmin
from headwater.servers.grpc.orisun_store import OrisunEventStore
from headwater.servers.grpc.queue_service import QueueService
from headwater.servers.grpc.store_service import EventStoreService
from headwater.servers.options import RunningServer, ServerOptions
from headwater.supervisor import supervise

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
MAX_CALLS: Final = 10_000
HEALTH_SECONDS: Final = 5.0
OPTIONS: Final = (
    ("grpc.so_reuseport", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 1000),
    # Detect dead connections.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Close connections that do not start HTTP/2.
    ("grpc.server_handshake_timeout_ms", 15_000),
    # Close connections that ping more often.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.keepalive_permit_without_calls", 1),
)


@asynccontextmanager
async def serving(
    log: AsyncHeadwater, options: ServerOptions, *, passwords: PasswordChecks | None = None
) -> AsyncIterator[RunningServer]:
    """Serve a log until the block is left."""
    # A client of gRPC repeats its calls by itself, within its deadline.
    log = log.with_patience(0)
    authenticator = Authenticator(log, authenticate=options.authenticate, passwords=passwords)
    async with authenticator.keep_current():
        backend = PostgresBackend(log)
        services = {
            "Log": LogService(log),
            "Queue": QueueService(log),
            "EventStore": EventStoreService(backend),
        }
        required = authenticator if options.authenticate else None
        async with _open(
            backend, services, OrisunAdmin(backend, log, required), CallAuthenticator(required), options
        ) as running:
            yield running


@asynccontextmanager
async def serving_stores(stores: AsyncSqliteStores, options: ServerOptions) -> AsyncIterator[RunningServer]:
    """Serve the event stores of a directory until the block is left. Without accounts, so without authentication."""
    backend = SqliteBackend(stores)
    services = {"EventStore": EventStoreService(backend)}
    async with _open(backend, services, OrisunAdmin(backend, None, None), CallAuthenticator(None), options) as running:
        yield running


@asynccontextmanager
async def _open(
    backend: Backend,
    services: Mapping[str, object],
    admin: OrisunAdmin,
    authenticator: CallAuthenticator,
    options: ServerOptions,
) -> AsyncIterator[RunningServer]:
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    orisun = {"EventStore": OrisunEventStore(backend), "Admin": admin}
    server.add_generic_rpc_handlers(
        [
            *make_handlers(headwater_pb2.DESCRIPTOR, services, authenticator),
            *make_handlers(eventstore_pb2.DESCRIPTOR, orisun, authenticator),
        ]
    )
    names = [f"headwater.v1.{name}" for name in services] + [f"orisun.{name}" for name in orisun]
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    _listen(server, options)
    await server.start()
    running = RunningServer(f"{options.host}:{options.port}")
    watch = supervise("grpc health", partial(_watch_health, backend, servicer, names))
    try:
        await _set_health(servicer, names, serving=True)
        yield running
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await servicer.enter_graceful_shutdown()
        # Streams and other calls share the grace period.
        ends = time.monotonic() + options.limits.grace_seconds
        await authenticator.stop(options.limits.grace_seconds)
        await server.stop(max(0.0, ends - time.monotonic()))
        await backend.close()


def _listen(server: Any, options: ServerOptions) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.port}"
    try:
        if options.certificate is None or options.private_key is None:
            if options.authenticate and not options.loopback:
                logger.warning("passwords and API keys are sent unencrypted: configure a TLS certificate")
            server.add_insecure_port(address)
        else:
            pair = (Path(options.private_key).read_bytes(), Path(options.certificate).read_bytes())
            server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except (OSError, RuntimeError) as error:
        raise InvalidRequest(
            f"cannot listen on {address}: {error}", hint="Choose another port, or check the certificate."
        ) from error


async def _watch_health(backend: Backend, servicer: Any, names: list[str]) -> None:
    """Report in the health service whether the database can be reached."""
    reported = True
    while True:
        await asyncio.sleep(HEALTH_SECONDS)
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await backend.ping()
            reached = True
        except (HeadwaterError, TimeoutError) as error:
            logger.warning("database not reachable", extra={ERROR: str(error)})
            reached = False
        if reached != reported:
            await _set_health(servicer, names, serving=reached)
            reported = reached


async def _set_health(servicer: Any, names: list[str], *, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", *names):
        await servicer.set(name, status)
