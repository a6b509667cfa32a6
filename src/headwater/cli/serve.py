"""`headwater serve`: the doors of the log that listen, until told to stop."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import multiprocessing
import os
import signal
import ssl
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Annotated, Final

import typer

from headwater import aio
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import connect, session, translated
from headwater.errors import HeadwaterError, InvalidRequest, LogUnavailable

app = typer.Typer()

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 15.0
RESTART_SECONDS: Final = 1.0


class BrokerFailed(HeadwaterError):
    """Something that a broker cannot do without came to an end: a bug of ours."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process serves."""

    dsn: str
    host: str
    port: int
    advertised_host: str
    default_partitions: int
    pool_size: int
    rebalance_delay_seconds: float
    memory_mib: int
    certificate: str | None
    private_key: str | None
    authenticate: bool


@app.command(
    epilog=examples("headwater serve --kafka 127.0.0.1:9092", "headwater serve --kafka 127.0.0.1:9092 --processes 2")
)
def serve(
    context: typer.Context,
    kafka: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Speak Kafka here. Port 0: any free one.", show_default=False)
    ],
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="How many brokers; each has a port of its own, one after the other.")
    ] = 1,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="The name under which clients reach this machine.")
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
        typer.Option("--authenticate", help="Clients say who they are (SASL) and may do what their account may."),
    ] = False,
    without_authentication: Annotated[
        bool,
        typer.Option("--without-authentication", help="Listen beyond this machine, where everybody may do everything."),
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Serve the log to clients of Kafka, until Ctrl-C or SIGTERM.

    Everything is in Postgres: run as many brokers as you like, on as many machines, and stop any of them at any time.
    """
    host, port = _address(kafka)
    if authenticate and without_authentication:
        raise typer.BadParameter("--authenticate and --without-authentication exclude each other")
    if not _is_loopback(host) and not authenticate and not without_authentication:
        raise InvalidRequest(
            f"{host} can be reached from other machines, and clients are not asked who they are",
            hint="Ask them with --authenticate, listen on 127.0.0.1, or allow it with --without-authentication.",
        )
    if (tls_certificate is None) != (tls_key is None):
        raise typer.BadParameter("a certificate and its key go together: --tls-certificate and --tls-key")
    found = session(context)
    database = found.dsn(dsn)
    with translated():
        connect(database).close()
    plans = [
        Plan(
            dsn=database,
            host=host,
            port=port + number if port else 0,
            advertised_host=advertise or ("127.0.0.1" if host == "localhost" else host),
            default_partitions=partitions,
            pool_size=found.settings.pool_size,
            rebalance_delay_seconds=rebalance_delay_seconds,
            memory_mib=memory_mib,
            certificate=tls_certificate,
            private_key=tls_key,
            authenticate=authenticate,
        )
        for number in range(processes)
    ]
    if processes == 1:
        asyncio.run(_serve(plans[0], lambda address: _tell([address], as_json=as_json), parent=None))
    else:
        _supervise(plans, as_json=as_json)
    if as_json:
        output.emit({"stopped": True})
    else:
        output.note("stopped")


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is no address: write 127.0.0.1:9092", param_hint="--kafka")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tell(addresses: list[str], *, as_json: bool) -> None:
    if as_json:
        output.emit({"kafka": addresses})
    else:
        output.note(f"Kafka clients connect to {','.join(addresses)}; Ctrl-C stops")


async def _serve(plan: Plan, tell: object, *, parent: Connection | None) -> None:
    """One broker, until a signal, or until the process that started it is gone."""
    try:
        from headwater.kafka.server import serving
    except ModuleNotFoundError as missing:
        raise InvalidRequest(
            f"the Kafka door needs {missing.name}, which is not installed", hint="pip install 'headwater[kafka]'"
        ) from missing
    assert callable(tell)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        # Nothing is ever sent: that it can be read means that the other end is closed.
        loop.add_reader(parent.fileno(), stop.set)
    context = None
    if plan.certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(plan.certificate, plan.private_key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(f"the certificate or its key cannot be used: {error}") from error
    log = await aio.connect(plan.dsn, pool_size=max(plan.pool_size, 4), application_name="headwater kafka")
    async with log:
        try:
            async with serving(
                log,
                listen_host=plan.host,
                port=plan.port,
                advertised_host=plan.advertised_host,
                context=context,
                default_partitions=plan.default_partitions,
                rebalance_delay_seconds=plan.rebalance_delay_seconds,
                kept_bytes=plan.memory_mib * 1024 * 1024,
                authenticate=plan.authenticate,
                loopback=_is_loopback(plan.host),
            ) as broker:
                # Rows come by the ten thousand and go as fast. Looking for cycles among them every 700 objects, and
                # among all that was ever imported, took a sixth of a broker's time.
                gc.collect()
                gc.freeze()
                gc.set_threshold(100_000, 20, 20)
                tell(f"{broker.settings.host}:{broker.settings.port}")
                waits = [asyncio.ensure_future(event.wait()) for event in (stop, broker.failed)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for one in waits:
                    one.cancel()
                if broker.failed.is_set():
                    raise BrokerFailed("the broker stopped working; what went wrong is in its log")
        except OSError as error:
            raise InvalidRequest(
                f"{plan.host}:{plan.port} cannot be listened on: {error}", hint="Choose another port, or 0 for any."
            ) from error


# Several processes


@dataclass(slots=True)
class _Child:
    plan: Plan
    process: BaseProcess
    # Its end tells the address once, and closes with the process that holds the other.
    pipe: Connection


def _supervise(plans: list[Plan], *, as_json: bool) -> None:
    """Keep a process for each plan running, until a signal."""
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    children: list[_Child] = []
    try:
        children = [_start(plan) for plan in plans]
        addresses = [_first_word(child) for child in children]
        _tell(addresses, as_json=as_json)
        while not stopping:
            ended = wait([child.process.sentinel for child in children], timeout=RESTART_SECONDS)
            if ended and not stopping:
                for place, child in enumerate(children):
                    if child.process.sentinel in ended:
                        child.pipe.close()
                        output.note(f"a broker ended with code {child.process.exitcode} and is started again")
                        # On the port that clients know.
                        port = int(addresses[place].rpartition(":")[2])
                        children[place] = _start(replace(child.plan, port=port))
                        try:
                            _first_word(children[place])
                        except LogUnavailable as error:
                            output.note(error.message)
    finally:
        for child in children:
            child.pipe.close()
        for child in children:
            child.process.join(STOP_SECONDS)
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(plan: Plan) -> _Child:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run_child, args=(plan, there), daemon=False)
    process.start()
    there.close()
    return _Child(plan, process, here)


def _first_word(child: _Child) -> str:
    try:
        if child.pipe.poll(START_SECONDS):
            return str(child.pipe.recv())
    except EOFError:
        pass
    raise LogUnavailable(
        f"a broker did not start on {child.plan.host}:{child.plan.port}", hint="Its own message is above."
    )


def _run_child(plan: Plan, parent: Connection) -> None:
    # Ctrl-C in a terminal goes to all; the parent decides, and says so by closing the pipe.
    os.setpgrp()
    asyncio.run(_serve(plan, parent.send, parent=parent))
