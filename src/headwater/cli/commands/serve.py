"""`headwater serve`: run the HTTP, Kafka and gRPC servers and deliver webhooks until stopped."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import socket
import ssl
import tempfile
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Annotated, Any, Final, TypeVar

import typer

import headwater
from headwater import aio, eventstore
from headwater.access.password_checks import PasswordChecks
from headwater.calls import access as access_calls
from headwater.calls import kafka as kafka_calls
from headwater.cli import open_files, output, processes
from headwater.cli.connection import connect, session, translate_errors
from headwater.cli.gc_tuning import tune_garbage_collection
from headwater.cli.log_lines import LogConfig
from headwater.cli.optional_packages import require_extras
from headwater.cli.options import AllowNetwork, Dsn, Json, examples
from headwater.cli.signals import stop_on_signals, wait_for_any
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.servers.options import ServerLimits, ServerOptions
from headwater.webhooks.addresses import Network, networks

app = typer.Typer()

DEFAULT_HTTP: Final = "127.0.0.1:8080"
GARBAGE_SECONDS: Final = 60.0
# Time for cleanup after the grace period: cancelled requests settle leases and return events.
STOP_SECONDS: Final = 20.0
# Maximum number of connections of one broker.
MAX_KAFKA_CONNECTIONS: Final = 2_000
# Open files of a process besides client connections: database sessions, webhook requests, files.
OTHER_FILES: Final = 500

T = TypeVar("T")


class ServerFailed(HeadwaterError):
    """An essential task of a server ended: a bug."""


@dataclass(frozen=True, slots=True)
class KafkaPlan:
    """The configuration of one Kafka broker."""

    options: ServerOptions
    advertised_host: str
    default_partitions: int
    rebalance_delay_seconds: float
    memory_mib: int


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What one process serves: a log, or the event stores of a directory."""

    dsn: str
    stores: str | None
    pool_size: int
    kafka: KafkaPlan | None
    http: ServerOptions | None
    grpc: ServerOptions | None
    webhooks: bool
    webhook_networks: tuple[Network, ...]
    grace_seconds: float
    log_config: LogConfig
    cloud_events_source: str


@app.command(
    epilog=examples(
        "headwater serve",
        "headwater serve --http 127.0.0.1:8080 --webhooks",
        "headwater serve --kafka 127.0.0.1:9092 --processes 2",
        "headwater serve --grpc 127.0.0.1:5005 --store sqlite:///stores",
        "headwater serve --http 0.0.0.0:443 --authenticate --tls-certificate cert.pem --tls-key key.pem",
    )
)
def serve(
    context: typer.Context,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Serve HTTP, server-sent events and the console. Default if no server is given: {DEFAULT_HTTP}.",
            show_default=False,
        ),
    ] = None,
    kafka: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve the Kafka protocol. Port 0: any free port.", show_default=False),
    ] = None,
    grpc: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Serve gRPC.", show_default=False)] = None,
    stores: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="sqlite:///DIR",
            help="Serve the event stores of a directory over gRPC, without Postgres.",
            show_default=False,
        ),
    ] = None,
    webhooks: Annotated[bool, typer.Option("--webhooks", help="Deliver webhooks.")] = False,
    allow_network: AllowNetwork = None,
    processes_: Annotated[
        int,
        typer.Option(
            "--processes",
            min=1,
            max=64,
            help="Number of processes. HTTP and gRPC processes share a port; Kafka brokers use consecutive ports.",
        ),
    ] = 1,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="Host name under which Kafka clients reach this machine.")
    ] = None,
    partitions: Annotated[
        int, typer.Option(min=1, max=1024, help="Default number of partitions of topics that Kafka clients create.")
    ] = 1,
    rebalance_delay_seconds: Annotated[
        float,
        typer.Option(min=0, max=60, help="How long the first member of a consumer group waits for others, in seconds."),
    ] = 0.2,
    memory_mib: Annotated[
        int,
        typer.Option(min=0, max=65_536, help="Memory of each broker for recent records, in MiB."),
    ] = 64,
    tls_certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Enable TLS with this certificate chain (PEM).")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Private key of the certificate (PEM).")] = None,
    authenticate: Annotated[
        bool,
        typer.Option(
            "--authenticate", help="Require clients to authenticate, and check the permissions of their account."
        ),
    ] = False,
    without_authentication: Annotated[
        bool,
        typer.Option(
            "--without-authentication", help="Allow unauthenticated clients on addresses other than loopback."
        ),
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Trust X-Forwarded-For and X-Forwarded-Proto from a proxy at this address or network. "
            "Repeat for several.",
            show_default=False,
        ),
    ] = None,
    max_body_mib: Annotated[int, typer.Option(min=1, max=1024, help="Maximum size of a request body, in MiB.")] = 16,
    requests_per_second: Annotated[
        float,
        typer.Option(min=0, help="HTTP requests per second that one client may send to one process. 0: no limit."),
    ] = 5000,
    connections: Annotated[
        int, typer.Option(min=1, help="Maximum number of HTTP connections of one process, including SSE streams.")
    ] = 10_000,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that requests in progress have to finish after Ctrl-C or SIGTERM.")
    ] = 20.0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Serve the log over HTTP, Kafka and gRPC until Ctrl-C or SIGTERM.

    Servers are stateless, since all state is in Postgres: run any number on any number of machines, and stop any of
    them at any time.
    """
    if authenticate and without_authentication:
        raise typer.BadParameter("give only one of --authenticate and --without-authentication")
    if (tls_certificate is None) != (tls_key is None):
        raise typer.BadParameter("--tls-certificate and --tls-key must be given together")
    if stores is not None and (
        grpc is None or http is not None or kafka is not None or webhooks or authenticate or processes_ > 1
    ):
        raise typer.BadParameter(
            "--store supports only --grpc, with one process and without authentication: "
            "--grpc HOST:PORT --store sqlite:///DIR"
        )
    if http is None and kafka is None and grpc is None and not webhooks:
        http = DEFAULT_HTTP

    limits = ServerLimits(
        max_body_bytes=max_body_mib * 1024 * 1024,
        requests_per_second=requests_per_second,
        connections=connections,
        grace_seconds=grace_seconds,
    )

    allowed = networks(allow_network or ())
    proxies = tuple(_network(one) for one in trusted_proxy or ())

    def options(text: str | None, option: str) -> ServerOptions | None:
        if text is None:
            return None
        host, port = _address(text, option)
        loopback = _is_loopback(host)
        if not loopback and not authenticate and not without_authentication:
            raise InvalidRequest(
                f"{host} is reachable from other machines, but clients are not authenticated",
                hint="Use --authenticate, listen on 127.0.0.1, or allow it with --without-authentication.",
            )
        return ServerOptions(host, port, tls_certificate, tls_key, authenticate, loopback, limits, allowed, proxies)

    servers = {"http": options(http, "--http"), "kafka": options(kafka, "--kafka"), "grpc": options(grpc, "--grpc")}
    _check_certificate(tls_certificate, tls_key)
    advertised = None if servers["kafka"] is None else _advertised(servers["kafka"].host, advertise)
    found = session(context)
    if servers["http"] is not None:
        servers["http"] = replace(servers["http"], cloud_events_source=found.settings.cloud_events_source)
    database = "" if stores is not None else found.dsn(dsn)
    if advertised is not None:
        with found.log(dsn) as log:
            _check_other_brokers(log, advertised, authenticate=authenticate)
    elif stores is None:
        with translate_errors():
            connect(database).close()

    _raise_file_limit(servers["http"], servers["kafka"])
    with ExitStack() as reserved:
        for name in ("http", "grpc"):
            if (one := servers[name]) is not None:
                servers[name] = reserved.enter_context(_PortReservation(one)).options
        if servers["http"] is not None and processes_ > 1:
            directory = reserved.enter_context(tempfile.TemporaryDirectory(prefix="headwater-counts-"))
            servers["http"] = replace(servers["http"], counts_directory=directory)
        plans = [
            ServePlan(
                dsn=database,
                stores=stores,
                pool_size=found.settings.pool_size,
                kafka=_broker(servers["kafka"], number, advertised, partitions, rebalance_delay_seconds, memory_mib),
                http=servers["http"],
                grpc=servers["grpc"],
                webhooks=webhooks,
                webhook_networks=allowed,
                grace_seconds=grace_seconds,
                log_config=found.log_config,
                cloud_events_source=found.settings.cloud_events_source,
            )
            for number in range(processes_)
        ]

        def report(addresses: list[dict[str, str]]) -> None:
            _print_addresses(addresses, webhooks=webhooks, as_json=as_json)

        if processes_ == 1:
            _run(plans[0], _serve(plans[0], lambda addresses: report([addresses]), parent=None))
        else:
            stop_seconds = grace_seconds + STOP_SECONDS
            processes.supervise(plans, _run_child, _on_same_port, report, stop_seconds=stop_seconds)
    if as_json:
        output.emit({"stopped": True})
    else:
        output.print_status("stopped")


def _raise_file_limit(http: ServerOptions | None, kafka: ServerOptions | None) -> None:
    needed = OTHER_FILES
    needed += http.limits.connections if http is not None else 0
    needed += MAX_KAFKA_CONNECTIONS if kafka is not None else 0
    allowed = open_files.raise_limit(needed)
    if allowed < needed:
        output.print_status(
            f"warning: the limit of open files is {allowed}, but {needed} may be needed for connections: "
            f"raise it (ulimit -Hn {needed}, or LimitNOFILE={needed} in a systemd unit) or lower --connections"
        )


def _broker(
    options: ServerOptions | None,
    number: int,
    advertised: str | None,
    partitions: int,
    rebalance_delay_seconds: float,
    memory_mib: int,
) -> KafkaPlan | None:
    if options is None or advertised is None:
        return None
    return KafkaPlan(
        _with_port(options, options.port + number if options.port else 0),
        advertised,
        partitions,
        rebalance_delay_seconds,
        memory_mib,
    )


def _advertised(host: str, advertise: str | None) -> str:
    """The host name that a broker advertises to clients."""
    if advertise is not None:
        return advertise
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise InvalidRequest(
                f"cannot advertise {host} to Kafka clients",
                hint="Give the host name under which clients reach this machine: --advertise HOST.",
            )
    return "127.0.0.1" if host == "localhost" else host


def _check_other_brokers(log: headwater.Headwater, advertised: str, *, authenticate: bool) -> None:
    """Check that this broker fits the running ones, since every broker redirects clients to all others."""
    for other in log.run(kafka_calls.kafka_brokers()):
        if _is_loopback(other.host) != _is_loopback(advertised):
            near, far = (other.host, advertised) if _is_loopback(other.host) else (advertised, other.host)
            raise InvalidRequest(
                f"another broker of this log advertises {other.host}:{other.port}, this one {advertised}: "
                f"clients of {far} would be redirected to {near}, which is their own machine",
                hint="Stop the other broker, or use --advertise HOST to set the host name of this one.",
            )
    if not authenticate and log.run(access_calls.accounts()):
        output.print_status(
            "warning: the log has accounts, but this broker does not authenticate clients: every client has all "
            "permissions here"
        )


def _with_port(options: ServerOptions, port: int) -> ServerOptions:
    return replace(options, port=port)


def _on_same_port(plan: ServePlan, addresses: dict[str, str]) -> ServePlan:
    """The plan for a restarted process: on the same port as before."""
    if plan.kafka is None:
        return plan
    port = int(addresses["kafka"].rpartition(":")[2])
    return replace(plan, kafka=replace(plan.kafka, options=_with_port(plan.kafka.options, port)))


class _PortReservation:
    """Keeps a port reserved for the processes that listen on it, also while one of them restarts."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._socket: socket.socket | None = None

    def __enter__(self) -> _PortReservation:
        host, port = self.options.host, self.options.port
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            # Bind once without SO_REUSEPORT, so that a port in use by another program is an error.
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                port = probe.getsockname()[1]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((address[0], port, *address[2:]))
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {host}:{port}: {error}", hint="Choose another port, or 0 for any free port."
            ) from error
        self.options = _with_port(self.options, port)
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()


def _address(text: str, option: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(
            f"invalid address {text!r}: expected HOST:PORT, such as 127.0.0.1:9092", param_hint=option
        )
    return host.strip("[]"), int(port)


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise typer.BadParameter(
            f"{error}: expected an address or network, such as 10.0.0.7 or 10.0.0.0/24", param_hint="--trusted-proxy"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_certificate(certificate: str | None, key: str | None) -> None:
    if certificate is not None:
        _tls(certificate, key)


def _tls(certificate: str, key: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"cannot load the TLS certificate or its key: {error}") from error
    return context


def _print_addresses(addresses: list[dict[str, str]], *, webhooks: bool, as_json: bool) -> None:
    first = addresses[0]
    brokers = [one["kafka"] for one in addresses if "kafka" in one]
    if as_json:
        output.emit({**first, **({"kafka": brokers} if brokers else {}), **({"webhooks": True} if webhooks else {})})
        return
    if "http" in first:
        output.print_status(f"HTTP API and console: {first['http']}")
    if "grpc" in first:
        output.print_status(f"gRPC: {first['grpc']}")
    if brokers:
        output.print_status(f"Kafka: {','.join(brokers)}")
    if webhooks:
        output.print_status("webhooks: delivering")
    output.print_status("press Ctrl-C to stop")


class _ServerGroup:
    """Servers that are opened one by one and closed concurrently, so that each has the full grace period."""

    def __init__(self) -> None:
        self._open: list[AsyncExitStack] = []

    async def __aenter__(self) -> _ServerGroup:
        return self

    async def __aexit__(self, *_: object) -> None:
        ends = await asyncio.gather(*(server.aclose() for server in self._open), return_exceptions=True)
        for error in ends:
            if error is not None:
                raise error

    async def open(self, server: AbstractAsyncContextManager[T]) -> T:
        stack = AsyncExitStack()
        found = await stack.enter_async_context(server)
        self._open.append(stack)
        return found


async def _serve(plan: ServePlan, report: processes.ReportAddresses, *, parent: Connection | None) -> None:
    """Run the servers of one process until a signal, or until the parent process ends."""
    stop = stop_on_signals()
    if parent is not None:
        # The parent never sends data: the pipe becomes readable when the parent closes it.
        asyncio.get_running_loop().add_reader(parent.fileno(), stop.set)
    async with AsyncExitStack() as stack:
        open_all = _open_servers if plan.stores is None else _open_stores
        addresses, failures = await open_all(stack, plan)
        await stack.enter_async_context(tune_garbage_collection(every_seconds=GARBAGE_SECONDS))
        report(addresses)
        await wait_for_any(stop, *failures)
        if not stop.is_set():
            raise ServerFailed("a server stopped unexpectedly; see the log lines above")


async def _open_servers(stack: AsyncExitStack, plan: ServePlan) -> tuple[dict[str, str], list[asyncio.Event]]:
    """Open the servers of a log; returns their addresses, and events that are set when a server fails."""
    # Import all of them before the first connection, so that a missing package is reported at once.
    if plan.http is not None:
        with require_extras("http"):
            from headwater.servers.http.server import serving as serving_http
    if plan.grpc is not None:
        with require_extras("grpc"):
            from headwater.servers.grpc.server import serving as serving_grpc
    if plan.kafka is not None:
        with require_extras("kafka"):
            import headwater.servers.kafka.server  # noqa: F401
    if plan.webhooks:
        with require_extras("webhooks"):
            from headwater.webhooks.deliver import dispatching
    addresses: dict[str, str] = {}
    failures: list[asyncio.Event] = []
    # A broker uses one connection exclusively for its lease.
    pool_size = max(plan.pool_size, 4) + (plan.kafka is not None)
    log = await stack.enter_async_context(
        await aio.connect(plan.dsn, pool_size=pool_size, application_name="headwater serve")
    )
    servers = await stack.enter_async_context(_ServerGroup())
    passwords = PasswordChecks()
    if plan.kafka is not None:
        addresses["kafka"] = await _open_kafka(servers, log, plan.kafka, passwords)
    if plan.http is not None:
        server = await servers.open(serving_http(log, plan.http, passwords=passwords))
        addresses["http"] = server.address
        failures.append(server.failed)
    if plan.grpc is not None:
        server = await servers.open(serving_grpc(log, plan.grpc, passwords=passwords))
        addresses["grpc"] = server.address
        failures.append(server.failed)
    if plan.webhooks:
        delivery = dispatching(
            log,
            allowed=plan.webhook_networks,
            grace_seconds=plan.grace_seconds,
            cloud_events_source=plan.cloud_events_source,
        )
        await servers.open(delivery)
    return addresses, failures


async def _open_stores(stack: AsyncExitStack, plan: ServePlan) -> tuple[dict[str, str], list[asyncio.Event]]:
    """Open the gRPC server for the event stores of a directory."""
    with require_extras("grpc"):
        from headwater.servers.grpc.server import serving_stores
    assert plan.stores is not None
    assert plan.grpc is not None
    if not plan.stores.startswith("sqlite:"):
        raise InvalidRequest(
            "invalid --store: expected sqlite:///DIR; event stores in Postgres are served without --store"
        )
    stores = await eventstore.open_async(plan.stores)
    assert isinstance(stores, eventstore.AsyncSqliteStores)
    await stack.enter_async_context(stores)
    server = await stack.enter_async_context(serving_stores(stores, plan.grpc))
    return {"grpc": server.address}, [server.failed]


async def _open_kafka(
    servers: _ServerGroup, log: aio.AsyncHeadwater, plan: KafkaPlan, passwords: PasswordChecks
) -> str:
    from headwater.servers.kafka.server import serving

    options = plan.options
    try:
        broker = await servers.open(
            serving(
                log,
                listen_host=options.host,
                port=options.port,
                advertised_host=plan.advertised_host,
                context=None if options.certificate is None else _tls(options.certificate, options.private_key),
                default_partitions=plan.default_partitions,
                rebalance_delay_seconds=plan.rebalance_delay_seconds,
                cache_bytes=plan.memory_mib * 1024 * 1024,
                max_connections=MAX_KAFKA_CONNECTIONS,
                authenticate=options.authenticate,
                loopback=options.loopback,
                grace_seconds=options.limits.grace_seconds,
                passwords=passwords,
            )
        )
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {options.host}:{options.port}: {error}",
            hint="Choose another port, or 0 for any free port.",
        ) from error
    return f"{broker.settings.host}:{broker.settings.port}"


def _run_child(plan: ServePlan, parent: Connection) -> None:
    plan.log_config.apply()
    _run(plan, _serve(plan, parent.send, parent=parent))


def _run(plan: ServePlan, servers: Coroutine[Any, Any, None]) -> None:
    """Run the servers; for HTTP in the event loop of uvloop, if it is installed."""
    factory = None
    if plan.http is not None:
        with suppress(ModuleNotFoundError):
            factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(servers)
