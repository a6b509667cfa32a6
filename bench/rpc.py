"""The gRPC server: calls per second and server CPU per call; sequential, concurrent and streaming."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

import headwater
from bench import _measure as measure
from bench._serving import serving
from headwater.servers.grpc.client import service
from headwater.servers.grpc.generated import eventstore_pb2 as orisun
from headwater.servers.grpc.generated import headwater_pb2 as pb

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("append_cpu_us", "stream_cpu_us", "stream_appends_a_second")

STORE = "bench"
DATA = b'{"customer": "c-1", "note": "' + b"x" * 150 + b'"}'
AT_ONCE = 32


@dataclass(frozen=True)
class Run:
    """The cost of a number of calls or appends."""

    name: str
    count: int
    seconds: float
    server_cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.server_cpu_seconds / self.count * 1e6


@contextmanager
def rpc_server(dsn: str) -> Iterator[tuple[str, int]]:
    """Run a server; yields its address and process id."""
    with serving(dsn, "--grpc", "127.0.0.1:0") as (ready, pid):
        yield ready["grpc"], pid


async def measured(name: str, count: int, pid: int, work: Awaitable[Any]) -> Run:
    before, started = measure._family_cpu_seconds(pid), time.monotonic()
    await work
    spent = time.monotonic() - started
    return Run(name, count, spent, measure._family_cpu_seconds(pid) - before)


async def calls(count: int, at_once: int, call: Callable[[], Awaitable[Any]]) -> None:
    async def some() -> None:
        for _ in range(count // at_once):
            await call()

    await asyncio.gather(*(some() for _ in range(at_once)))


async def stream(store: Any, count: int, in_message: int, append: pb.NumberedAppend) -> None:
    async def requests() -> Any:
        for _ in range(count // in_message):
            yield pb.AppendStreamRequest(store=STORE, appends=[append] * in_message)

    received = 0
    async for answer in store.AppendStream(requests()):
        received += len(answer.verdicts)
    assert received == count // in_message * in_message


async def runs(address: str, pid: int, scale: int) -> list[Run]:
    done = []
    async with grpc.aio.insecure_channel(address) as channel:
        store, boundary = service(channel, "headwater.v1.EventStore"), service(channel, "orisun.EventStore")
        event = pb.NewStoreEvent(type="Happened", payload=DATA, content_type="application/json", tags=["all"])
        numbers = itertools.count()

        def saved() -> Awaitable[Any]:
            to_save = orisun.EventToSave(event_id=f"e{next(numbers)}", event_type="Happened", data=DATA.decode())
            return boundary.SaveEvents(orisun.SaveEventsRequest(boundary=STORE, events=[to_save]))

        for name, call in (
            ("nothing", lambda: boundary.GetServerInfo(orisun.GetServerInfoRequest())),
            ("ping", lambda: boundary.Ping(orisun.PingRequest())),
            ("append", lambda: store.Append(pb.AppendRequest(store=STORE, events=[event]))),
            ("save", saved),
            ("read 10", lambda: store.ReadMatching(pb.ReadMatchingRequest(store=STORE, batch_size=10))),
        ):
            for at_once in (1, AT_ONCE):
                count = scale * at_once
                done.append(await measured(f"{name}, {at_once} at once", count, pid, calls(count, at_once, call)))
        append = pb.NumberedAppend(number=1, events=[event])
        for in_message in (1, 50):
            count = scale * 20
            work = stream(store, count, in_message, append)
            done.append(await measured(f"append stream, {in_message} in a message", count, pid, work))
    return done


def main() -> None:
    options = measure.arguments(__doc__ or "")
    with measure.measured_server(options.dsn) as server, rpc_server(server.dsn) as (address, pid):
        with headwater.connect(server.dsn) as log:
            log.create_store(STORE)
        done = asyncio.run(runs(address, pid, options.sized(2000, 100, 2)))
        measure.table(
            "calls (appends in a stream) per second, and server CPU per call",
            ("", "a second", "CPU us"),
            [(run.name, measure.number(run.rate), measure.number(run.cpu_us)) for run in done],
        )
        by_name = {run.name: run for run in done}
        measure.finish(
            server,
            options,
            "rpc",
            {
                "append_cpu_us": round(by_name[f"append, {AT_ONCE} at once"].cpu_us),
                "stream_cpu_us": round(by_name["append stream, 50 in a message"].cpu_us),
                "stream_appends_a_second": round(by_name["append stream, 50 in a message"].rate),
            },
        )


if __name__ == "__main__":
    main()
