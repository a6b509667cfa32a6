"""Does `headwater serve` keep the limits that it is given, and know who asks behind a proxy?"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner

import headwater
from headwater.access import scram
from headwater.calls import access as calls
from headwater.cli import app, open_files, processes
from headwater.servers.options import ServerLimits
from http_server import http_process, http_server
from patience import PATIENCE_SECONDS

PASSWORD = "a password of some length"
Until = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def supervised(
    dsn: str, clean_environment: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Any], str]]:
    """How `serve` with these options would supervise its processes, and what it said. None is started."""

    def run(*options: str) -> tuple[dict[str, Any], str]:
        seen: dict[str, Any] = {}
        monkeypatch.setattr(processes, "supervise", lambda *arguments, **named: seen.update(named, plans=arguments[0]))
        address = ("--http", "127.0.0.1:0", "--processes", "2")
        result = CliRunner().invoke(app, ["serve", *address, *options, "--dsn", dsn])
        assert result.exit_code == 0, result.output
        return seen, result.output

    return run


def test_processes_count_together_and_have_longer_to_stop_than_what_is_under_way(supervised: Any) -> None:
    seen, _ = supervised("--grace-seconds", "33")
    assert len({plan.http.counts_directory for plan in seen["plans"]} - {None}) == 1
    assert all(plan.grace_seconds == plan.http.limits.grace_seconds == 33 for plan in seen["plans"])
    # What is called off then still has to settle: ten seconds for webhooks.
    assert seen["stop_seconds"] > 33 + 10


def test_a_server_may_have_as_many_files_open_as_the_system_allows(dsn: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with http_process(dsn) as (_, process):
            limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (files,) = [line.split()[3:5] for line in limits if line.startswith("Max open files")]
    assert files[0] == files[1]


def test_a_server_that_may_open_too_few_files_says_what_to_do(supervised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "open files" not in supervised("--connections", "5")[1]
    monkeypatch.setattr(open_files, "raise_limit", lambda wanted: wanted - 1)
    _, said = supervised("--connections", "5000")
    assert "LimitNOFILE=5500" in said
    assert "--connections" in said


def test_as_many_connections_are_taken_as_the_limit_says_and_probes_always(dsn: str, until: Until) -> None:
    with http_server(dsn, limits=ServerLimits(connections=3)) as address, ExitStack() as stack:
        clients = [
            stack.enter_context(
                httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_connections=1))
            )
            for _ in range(4)
        ]
        *within, beyond = clients
        assert [client.get("/v1/topics").status_code for client in within] == [200] * 3
        refused = beyond.get("/v1/topics")
        assert refused.status_code == 503
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert refused.json()["type"] == "urn:headwater:error:TooManyConnections"
        assert beyond.get("/health").status_code == 200
        assert beyond.get("/ready").status_code == 200
        assert [client.get("/v1/topics").status_code for client in within] == [200] * 3
        # One that was refused takes nobody's place, also while it is open and says nothing.
        where = urlsplit(address)
        silent = stack.enter_context(socket.create_connection((where.hostname, where.port)))
        within[0].close()
        until(lambda: beyond.get("/v1/topics").status_code == 200)
        silent.close()


@pytest.fixture(scope="module")
def accounts(dsn: str) -> None:
    with headwater.connect(dsn) as log:
        log.run(calls.set_account("shop", scram.verifiers(PASSWORD, os.urandom(16), 4096), administrator=True))


@pytest.mark.usefixtures("accounts")
def test_who_asks_by_a_trusted_proxy_and_how_is_what_it_says_and_nobody_else_is_believed(dsn: str) -> None:
    # Ten requests of each address, and then none for a long time.
    limits = ServerLimits(requests_per_second=0.0001)

    def ask(client: httpx.Client, *forwarded_for: str) -> int:
        return client.get("/docs", headers={"x-forwarded-for": ", ".join(forwarded_for)}).status_code

    def cookie(client: httpx.Client, **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = client.post("/v1/sessions", json={"name": "shop", "password": PASSWORD}, headers=named)
        return str(answer.headers["set-cookie"])

    with (
        http_server(dsn, authenticate=True, limits=limits, trusted_proxies=("127.0.0.0/8",)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        assert {ask(client, "203.0.113.7") for _ in range(11)} == {200, 429}
        # Whatever a client writes there itself comes before what the proxy adds.
        assert ask(client, "198.51.100.1", "203.0.113.7") == 429
        assert ask(client, "198.51.100.1") == 200
        assert "Secure" in cookie(client, x_forwarded_for="198.51.100.1", x_forwarded_proto="https")
        assert "Secure" not in cookie(client, x_forwarded_for="198.51.100.1", x_forwarded_proto="http")
    with (
        http_server(dsn, authenticate=True, limits=limits, trusted_proxies=("192.0.2.1/32",)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        assert "Secure" not in cookie(client, x_forwarded_proto="https")
        assert {ask(client, f"203.0.113.{n}") for n in range(11)} == {200, 429}


def test_trusted_proxies_are_addresses_and_networks(supervised: Any, dsn: str) -> None:
    seen, _ = supervised("--trusted-proxy", "10.0.0.7", "--trusted-proxy", "2001:db8::/64")
    assert seen["plans"][0].http.trusted_proxies == ("10.0.0.7/32", "2001:db8::/64")
    for wrong in ("*", "proxy.example"):
        assert CliRunner().invoke(app, ["serve", "--trusted-proxy", wrong, "--dsn", dsn]).exit_code == 2
