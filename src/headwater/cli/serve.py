"""`headwater serve`: the doors of the log that listen, until told to stop."""

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
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import connect, session, translated
from headwater.cli.gc_tuning import collected_now_and_then
from headwater.cli.log_lines import LogLines
from headwater.cli.optional_packages import needs
from headwater.cli.signals import first_of, stop_on_signals
from headwater.cli.webhook import AllowNetwork
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.servers.options import Limits, Opening
from headwater.webhooks.addresses import Network, networks

app = typer.Typer()

DEFAULT_HTTP: Final = "127.0.0.1:8080"
GARBAGE_SECONDS: Final = 60.0
# What a process may need besides its grace: what is called off then clears up, settles and gives back.
STOP_SECONDS: Final = 20.0
# How many connections one broker takes.
KAFKA_CONNECTIONS: Final = 2_000
# What a process has open besides the connections of its callers: sessions of the database, receivers, files.
OTHER_FILES: Final = 500

T = TypeVar("T")


class DoorFailed(HeadwaterError):
    """Something that a door cannot do without came to an end: a bug of ours."""


@dataclass(frozen=True, slots=True)
class KafkaPlan:
    """One broker."""

    opening: Opening
    advertised_host: str
    default_partitions: int
    rebalance_delay_seconds: float
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process serves: a log, or the event stores of a directory."""

    dsn: str
    stores: str | None
    pool_size: int
    kafka: KafkaPlan | None
    http: Opening | None
    grpc: Opening | None
    webhooks: bool
    webhook_networks: tuple[Network, ...]
    grace_seconds: float
    log_lines: LogLines


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
            help=f"HTTP, server-sent events and the console. Alone if no door is named, at {DEFAULT_HTTP}.",
            show_default=False,
        ),
    ] = None,
    kafka: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Speak Kafka here. Port 0: any free one.", show_default=False),
    ] = None,
    grpc: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Speak gRPC here.", show_default=False)] = None,
    stores: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="sqlite:///DIR",
            help="Serve the event stores of a directory by gRPC, without a Postgres.",
            show_default=False,
        ),
    ] = None,
    webhooks: Annotated[bool, typer.Option("--webhooks", help="Deliver events to the URLs of webhooks.")] = False,
    allow_network: AllowNetwork = None,
    processes_: Annotated[
        int,
        typer.Option(
            "--processes",
            min=1,
            max=64,
            help="How many. HTTP and gRPC share one port; each broker of Kafka has its own, one after the other.",
        ),
    ] = 1,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="The name under which Kafka's clients reach this machine.")
    ] = None,
    partitions: Annotated[
        int, typer.Option(min=1, max=1024, help="Partitions of a topic that a client makes without saying how many.")
    ] = 1,
    rebalance_delay_seconds: Annotated[
        float, typer.Option(min=0, max=60, help="How long the first member of a consumer group waits for others.")
    ] = 0.2,
    memory_mib: Annotated[
        int,
        typer.Option(min=0, max=65_536, help="Recent records that each broker keeps in memory for readers, in MiB."),
    ] = 64,
    tls_certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Encrypt with this certificate chain, in PEM.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The private key of the certificate.")] = None,
    authenticate: Annotated[
        bool,
        typer.Option("--authenticate", help="Callers say who they are, and may do what their account may."),
    ] = False,
    without_authentication: Annotated[
        bool,
        typer.Option("--without-authentication", help="Listen beyond this machine, where everybody may do everything."),
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Believe a proxy at this address or network what X-Forwarded-For and X-Forwarded-Proto say of its "
            "clients. Repeat for several.",
            show_default=False,
        ),
    ] = None,
    max_body_mib: Annotated[int, typer.Option(min=1, max=1024, help="The largest body of a request, in MiB.")] = 16,
    requests_per_second: Annotated[
        float,
        typer.Option(min=0, help="How many requests by HTTP one caller may send to one process. 0: no limit."),
    ] = 5000,
    connections: Annotated[
        int, typer.Option(min=1, help="How many connections by HTTP one process takes, live streams included.")
    ] = 10_000,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="How long what is under way may take to end after Ctrl-C or SIGTERM.")
    ] = 20.0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Open doors of the log to clients of HTTP, Kafka and gRPC, until Ctrl-C or SIGTERM.

    Everything is in Postgres: run as many of these as you like, on as many machines, and stop any of them at any time.
    """
    if authenticate and without_authentication:
        raise typer.BadParameter("--authenticate and --without-authentication exclude each other")
    if (tls_certificate is None) != (tls_key is None):
        raise typer.BadParameter("a certificate and its key go together: --tls-certificate and --tls-key")
    if stores is not None and (
        grpc is None or http is not None or kafka is not None or webhooks or authenticate or processes_ > 1
    ):
        raise typer.BadParameter(
            "the event stores of a directory are served by gRPC alone, by one process, and have no accounts: "
            "--grpc HOST:PORT --store sqlite:///DIR"
        )
    if http is None and kafka is None and grpc is None and not webhooks:
        http = DEFAULT_HTTP

    limits = Limits(
        max_body_bytes=max_body_mib * 1024 * 1024,
        requests_per_second=requests_per_second,
        connections=connections,
        grace_seconds=grace_seconds,
    )

    allowed = networks(allow_network or ())
    proxies = tuple(_network(one) for one in trusted_proxy or ())

    def opening(text: str | None, option: str) -> Opening | None:
        if text is None:
            return None
        host, port = _address(text, option)
        loopback = _is_loopback(host)
        if not loopback and not authenticate and not without_authentication:
            raise InvalidRequest(
                f"{host} can be reached from other machines, and clients are not asked who they are",
                hint="Ask them with --authenticate, listen on 127.0.0.1, or allow it with --without-authentication.",
            )
        return Opening(host, port, tls_certificate, tls_key, authenticate, loopback, limits, allowed, proxies)

    doors = {"http": opening(http, "--http"), "kafka": opening(kafka, "--kafka"), "grpc": opening(grpc, "--grpc")}
    _refuse_bad_certificate(tls_certificate, tls_key)
    advertised = None if doors["kafka"] is None else _advertised(doors["kafka"].host, advertise)
    found = session(context)
    database = "" if stores is not None else found.dsn(dsn)
    if advertised is not None:
        with found.log(dsn) as log:
            _look_at_others(log, advertised, authenticate=authenticate)
    elif stores is None:
        with translated():
            connect(database).close()

    _raise_limit_of_files(doors["http"], doors["kafka"])
    with ExitStack() as reserved:
        for name in ("http", "grpc"):
            if (one := doors[name]) is not None:
                doors[name] = reserved.enter_context(_Reserved(one)).opening
        if doors["http"] is not None and processes_ > 1:
            directory = reserved.enter_context(tempfile.TemporaryDirectory(prefix="headwater-counts-"))
            doors["http"] = replace(doors["http"], counts_directory=directory)
        plans = [
            Plan(
                dsn=database,
                stores=stores,
                pool_size=found.settings.pool_size,
                kafka=_broker(doors["kafka"], number, advertised, partitions, rebalance_delay_seconds, memory_mib),
                http=doors["http"],
                grpc=doors["grpc"],
                webhooks=webhooks,
                webhook_networks=allowed,
                grace_seconds=grace_seconds,
                log_lines=found.log_lines,
            )
            for number in range(processes_)
        ]

        def tell(addresses: list[dict[str, str]]) -> None:
            _tell(addresses, webhooks=webhooks, as_json=as_json)

        if processes_ == 1:
            _run(plans[0], _serve(plans[0], lambda addresses: tell([addresses]), parent=None))
        else:
            stop_seconds = grace_seconds + STOP_SECONDS
            processes.supervise(plans, _run_child, _on_same_port, tell, stop_seconds=stop_seconds)
    if as_json:
        output.emit({"stopped": True})
    else:
        output.note("stopped")


def _raise_limit_of_files(http: Opening | None, kafka: Opening | None) -> None:
    needed = OTHER_FILES
    needed += http.limits.connections if http is not None else 0
    needed += KAFKA_CONNECTIONS if kafka is not None else 0
    allowed = open_files.raise_limit(needed)
    if allowed < needed:
        output.note(
            f"a process may have {allowed} files open, and needs up to {needed} for the connections that it may take: "
            f"raise the limit (ulimit -Hn {needed}, LimitNOFILE={needed} in a unit of systemd) or lower --connections"
        )


def _broker(
    opening: Opening | None,
    number: int,
    advertised: str | None,
    partitions: int,
    rebalance_delay_seconds: float,
    memory_mib: int,
) -> KafkaPlan | None:
    if opening is None or advertised is None:
        return None
    return KafkaPlan(
        _at(opening, opening.port + number if opening.port else 0),
        advertised,
        partitions,
        rebalance_delay_seconds,
        memory_mib,
    )


def _advertised(host: str, advertise: str | None) -> str:
    """The name under which clients are told to reach a broker."""
    if advertise is not None:
        return advertise
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise InvalidRequest(
                f"{host} is no address that clients of Kafka could be sent to",
                hint="Say under which name they reach this machine: --advertise HOST.",
            )
    return "127.0.0.1" if host == "localhost" else host


def _look_at_others(log: headwater.Headwater, advertised: str, *, authenticate: bool) -> None:
    """Clients are sent from each broker to every other: refuse to be one of them that is not as they are."""
    for other in log.run(kafka_calls.kafka_brokers()):
        if _is_loopback(other.host) != _is_loopback(advertised):
            near, far = (other.host, advertised) if _is_loopback(other.host) else (advertised, other.host)
            raise InvalidRequest(
                f"a broker of this log is at {other.host}:{other.port}, and this one would be at {advertised}: "
                f"clients that reach {far} would be sent to {near}, which is their own machine",
                hint="Stop the other, or say with --advertise under which name clients reach this one.",
            )
    if not authenticate and log.run(access_calls.accounts()):
        output.note(
            "warning: the log has accounts, and this broker does not ask its clients who they are: what accounts may "
            "not do at other brokers, anybody may do here"
        )


def _at(opening: Opening, port: int) -> Opening:
    return replace(opening, port=port)


def _on_same_port(plan: Plan, addresses: dict[str, str]) -> Plan:
    """The plan for a process that takes another's place: on the port that clients know."""
    if plan.kafka is None:
        return plan
    port = int(addresses["kafka"].rpartition(":")[2])
    return replace(plan, kafka=replace(plan.kafka, opening=_at(plan.kafka.opening, port)))


class _Reserved:
    """A port that is kept for the processes that listen on it, also while one of them is started again."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self._socket: socket.socket | None = None

    def __enter__(self) -> _Reserved:
        host, port = self.opening.host, self.opening.port
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            # Asked once as anybody would, so that a port that another program has is refused and not shared.
            with socket.socket(family, socket.SOCK_STREAM) as asked:
                asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                asked.bind(address)
                port = asked.getsockname()[1]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((address[0], port, *address[2:]))
        except OSError as error:
            raise InvalidRequest(
                f"{host}:{port} cannot be listened on: {error}", hint="Choose another port, or 0 for any."
            ) from error
        self.opening = _at(self.opening, port)
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()


def _address(text: str, option: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is no address: write 127.0.0.1:9092", param_hint=option)
    return host.strip("[]"), int(port)


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise typer.BadParameter(f"{error}; write 10.0.0.7 or 10.0.0.0/24", param_hint="--trusted-proxy") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse_bad_certificate(certificate: str | None, key: str | None) -> None:
    if certificate is not None:
        _tls(certificate, key)


def _tls(certificate: str, key: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"the certificate or its key cannot be used: {error}") from error
    return context


def _tell(addresses: list[dict[str, str]], *, webhooks: bool, as_json: bool) -> None:
    first = addresses[0]
    brokers = [one["kafka"] for one in addresses if "kafka" in one]
    if as_json:
        output.emit({**first, **({"kafka": brokers} if brokers else {}), **({"webhooks": True} if webhooks else {})})
        return
    if "http" in first:
        output.note(f"HTTP and the console are at {first['http']}")
    if "grpc" in first:
        output.note(f"gRPC clients connect to {first['grpc']}")
    if brokers:
        output.note(f"Kafka clients connect to {','.join(brokers)}")
    if webhooks:
        output.note("webhooks are delivered")
    output.note("Ctrl-C stops")


class _Doors:
    """Doors that are opened one after the other and closed all at once, so that each has the whole grace."""

    def __init__(self) -> None:
        self._open: list[AsyncExitStack] = []

    async def __aenter__(self) -> _Doors:
        return self

    async def __aexit__(self, *_: object) -> None:
        ends = await asyncio.gather(*(door.aclose() for door in self._open), return_exceptions=True)
        for error in ends:
            if error is not None:
                raise error

    async def open(self, door: AbstractAsyncContextManager[T]) -> T:
        stack = AsyncExitStack()
        found = await stack.enter_async_context(door)
        self._open.append(stack)
        return found


async def _serve(plan: Plan, tell: processes.Tell, *, parent: Connection | None) -> None:
    """The doors of one process, until a signal, or until the process that started it is gone."""
    stop = stop_on_signals()
    if parent is not None:
        # Nothing is ever sent: that it can be read means that the other end is closed.
        asyncio.get_running_loop().add_reader(parent.fileno(), stop.set)
    async with AsyncExitStack() as stack:
        open_all = _open_doors if plan.stores is None else _open_stores
        addresses, failures = await open_all(stack, plan)
        await stack.enter_async_context(collected_now_and_then(every_seconds=GARBAGE_SECONDS))
        tell(addresses)
        await first_of(stop, *failures)
        if not stop.is_set():
            raise DoorFailed("a door stopped working; what went wrong is in its log")


async def _open_doors(stack: AsyncExitStack, plan: Plan) -> tuple[dict[str, str], list[asyncio.Event]]:
    """The doors of a log: the address of each, and what tells that one of them stopped working."""
    # All of them before the first connection: what is missing is told at once.
    if plan.http is not None:
        with needs("http"):
            from headwater.servers.http.server import serving as serving_http
    if plan.grpc is not None:
        with needs("grpc"):
            from headwater.servers.grpc.server import serving as serving_grpc
    if plan.kafka is not None:
        with needs("kafka"):
            import headwater.servers.kafka.server  # noqa: F401
    if plan.webhooks:
        with needs("webhooks"):
            from headwater.webhooks.deliver import dispatching
    addresses: dict[str, str] = {}
    failures: list[asyncio.Event] = []
    # A broker has one connection for its lease alone.
    pool_size = max(plan.pool_size, 4) + (plan.kafka is not None)
    log = await stack.enter_async_context(
        await aio.connect(plan.dsn, pool_size=pool_size, application_name="headwater serve")
    )
    doors = await stack.enter_async_context(_Doors())
    passwords = PasswordChecks()
    if plan.kafka is not None:
        addresses["kafka"] = await _open_kafka(doors, log, plan.kafka, passwords)
    if plan.http is not None:
        door = await doors.open(serving_http(log, plan.http, passwords=passwords))
        addresses["http"] = door.address
        failures.append(door.failed)
    if plan.grpc is not None:
        door = await doors.open(serving_grpc(log, plan.grpc, passwords=passwords))
        addresses["grpc"] = door.address
        failures.append(door.failed)
    if plan.webhooks:
        await doors.open(dispatching(log, allowed=plan.webhook_networks, grace_seconds=plan.grace_seconds))
    return addresses, failures


async def _open_stores(stack: AsyncExitStack, plan: Plan) -> tuple[dict[str, str], list[asyncio.Event]]:
    """The same for the event stores of a directory."""
    with needs("grpc"):
        from headwater.servers.grpc.server import serving_stores
    assert plan.stores is not None
    assert plan.grpc is not None
    if not plan.stores.startswith("sqlite:"):
        raise InvalidRequest("event stores in Postgres are served with --dsn, and need no --store")
    stores = await eventstore.open_async(plan.stores)
    assert isinstance(stores, eventstore.AsyncSqliteStores)
    await stack.enter_async_context(stores)
    door = await stack.enter_async_context(serving_stores(stores, plan.grpc))
    return {"grpc": door.address}, [door.failed]


async def _open_kafka(doors: _Doors, log: aio.AsyncHeadwater, plan: KafkaPlan, passwords: PasswordChecks) -> str:
    from headwater.servers.kafka.server import serving

    opening = plan.opening
    try:
        broker = await doors.open(
            serving(
                log,
                listen_host=opening.host,
                port=opening.port,
                advertised_host=plan.advertised_host,
                context=None if opening.certificate is None else _tls(opening.certificate, opening.private_key),
                default_partitions=plan.default_partitions,
                rebalance_delay_seconds=plan.rebalance_delay_seconds,
                kept_bytes=plan.memory_mib * 1024 * 1024,
                max_connections=KAFKA_CONNECTIONS,
                authenticate=opening.authenticate,
                loopback=opening.loopback,
                grace_seconds=opening.limits.grace_seconds,
                passwords=passwords,
            )
        )
    except OSError as error:
        raise InvalidRequest(
            f"{opening.host}:{opening.port} cannot be listened on: {error}", hint="Choose another port, or 0 for any."
        ) from error
    return f"{broker.settings.host}:{broker.settings.port}"


def _run_child(plan: Plan, parent: Connection) -> None:
    plan.log_lines.write()
    _run(plan, _serve(plan, parent.send, parent=parent))


def _run(plan: Plan, doors: Coroutine[Any, Any, None]) -> None:
    """In a loop that is made for many connections, where there is one."""
    factory = None
    if plan.http is not None:
        with suppress(ModuleNotFoundError):
            factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(doors)
