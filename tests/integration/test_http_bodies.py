"""Is what a request may cost bounded by its route, before anything of its body is parsed?"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import headwater
from headwater.servers.http.app import ROUTERS
from headwater.servers.http.body_limits import OTHER, SIGN_IN, has_more_elements, limit_for
from http_server import http_process

KEYS = 1_200_000
MAX_GROWTH_MIB = 400
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(dsn: str) -> Iterator[tuple[str, int]]:
    with headwater.connect(dsn) as log:
        log.create_topic("orders")
    with http_process(dsn) as (address, process):
        yield address, process.pid


def peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


def many_keys(count: int) -> bytes:
    return b"{" + b",".join(b'"%07x":1' % number for number in range(count)) + b"}"


@pytest.mark.parametrize(
    "path", ["/v1/sessions", "/v1/accounts", "/v1/topics", "/v1/topics/orders/events", "/v1/stores/orders/append"]
)
def test_a_body_of_a_million_unknown_keys_is_refused_and_costs_little(server: tuple[str, int], path: str) -> None:
    address, pid = server
    before = peak_mib(pid)
    answer = httpx.post(f"{address}{path}", content=many_keys(KEYS), headers=JSON, timeout=60)
    assert answer.status_code == 413
    assert peak_mib(pid) - before < MAX_GROWTH_MIB


def test_problems_are_listed_for_some_keys_only(server: tuple[str, int]) -> None:
    address, pid = server
    for body in (
        many_keys(200_000),
        b'{"events":[' + b",".join([many_keys(200)] * 1000) + b"]}",
        b'{"events":[' + b",".join([b"0"] * 200_000) + b"]}",
    ):
        before = peak_mib(pid)
        answer = httpx.post(f"{address}/v1/topics/orders/events", content=body, headers=JSON, timeout=60)
        assert answer.status_code == 422, answer.text
        assert peak_mib(pid) - before < MAX_GROWTH_MIB


def test_many_elements_within_texts_are_no_elements(server: tuple[str, int]) -> None:
    body = json.dumps({"text": 'a,"[{' * 180_000}).encode()
    answer = httpx.post(f"{server[0]}/v1/topics/orders/events", content=body, headers=JSON, timeout=60)
    assert answer.status_code == 200
    assert not has_more_elements(body, 2)
    assert has_more_elements(b'{"a":[1,2,3]}', 3)


def test_a_compressed_body_is_refused_without_expanding_it(server: tuple[str, int]) -> None:
    bomb = gzip.compress(b" " * 100_000_000)
    answer = httpx.post(
        f"{server[0]}/v1/topics/orders/events", content=bomb, headers={**JSON, "content-encoding": "gzip"}, timeout=60
    )
    assert answer.status_code == 415


def test_every_path_that_takes_a_body_has_a_limit_and_signing_in_the_smallest() -> None:
    paths = [route.path for router in ROUTERS for route in router.routes if getattr(route, "body_field", None)]  # type: ignore[attr-defined]
    assert len(paths) > 20
    assert limit_for("/v1/sessions") == limit_for("/v1/accounts/x/keys") == SIGN_IN
    assert limit_for("/v1/groups/a/settle").max_bytes is None
    assert limit_for("/anything") == OTHER
    assert all(limit_for(path).max_elements <= 500_000 for path in paths)
