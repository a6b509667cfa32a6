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
from patience import PATIENCE_SECONDS

KEYS = 1_200_000
MAX_GROWTH_MIB = 400
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(dsn: str) -> Iterator[tuple[str, int]]:
    with headwater.connect(dsn) as log:
        log.create_topic("orders")
    with http_process(dsn) as (address, process):
        yield address, process.pid


def resident_mib(pid: int, *, peak: bool = False) -> int:
    name = "VmHWM" if peak else "VmRSS"
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) // 1024


def forget_peak(pid: int) -> int:
    """What a process has now. Its peak begins anew, so that what an earlier request took hides nothing."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return resident_mib(pid)


def many_keys(count: int) -> bytes:
    return b"{" + b",".join(b'"%07x":1' % number for number in range(count)) + b"}"


@pytest.mark.parametrize(
    "path", ["/v1/sessions", "/v1/accounts", "/v1/topics", "/v1/topics/orders/events", "/v1/stores/orders/append"]
)
def test_a_body_of_a_million_unknown_keys_is_refused_and_costs_little(server: tuple[str, int], path: str) -> None:
    address, pid = server
    before = forget_peak(pid)
    answer = httpx.post(f"{address}{path}", content=many_keys(KEYS), headers=JSON, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 413
    assert resident_mib(pid, peak=True) - before < MAX_GROWTH_MIB


def test_problems_are_listed_for_some_keys_only(server: tuple[str, int]) -> None:
    address, pid = server
    for body, problem in (
        (many_keys(200_000), "too many keys: 200000"),
        (b'{"events":[' + b",".join([many_keys(200)] * 1000) + b"]}", "too many keys: 200"),
        (b'{"events":[' + b",".join([b"0"] * 200_000) + b"]}", "valid dictionary"),
    ):
        before = forget_peak(pid)
        answer = httpx.post(f"{address}/v1/topics/orders/events", content=body, headers=JSON, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 422, answer.text
        # One problem for all the keys of an object, and none of the events after the first that is wrong.
        assert [problem in one["problem"] for one in answer.json()["problems"]] == [True], answer.text
        assert resident_mib(pid, peak=True) - before < MAX_GROWTH_MIB


def test_many_elements_within_texts_are_no_elements(server: tuple[str, int]) -> None:
    body = json.dumps({"text": 'a,"[{' * 180_000}).encode()
    answer = httpx.post(f"{server[0]}/v1/topics/orders/events", content=body, headers=JSON, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200
    assert not has_more_elements(body, 2)
    assert has_more_elements(b'{"a":[1,2,3]}', 3)


def test_a_compressed_body_is_refused_without_expanding_it(server: tuple[str, int]) -> None:
    bomb = gzip.compress(b" " * 100_000_000)
    answer = httpx.post(
        f"{server[0]}/v1/topics/orders/events",
        content=bomb,
        headers={**JSON, "content-encoding": "gzip"},
        timeout=PATIENCE_SECONDS,
    )
    assert answer.status_code == 415


def test_every_path_that_takes_a_body_has_a_limit_and_signing_in_the_smallest() -> None:
    paths = [route.path for router in ROUTERS for route in router.routes if getattr(route, "body_field", None)]  # type: ignore[attr-defined]
    assert len(paths) > 20
    assert limit_for("/v1/sessions") == limit_for("/v1/accounts/x/keys") == SIGN_IN
    assert limit_for("/v1/queues/a/settle").max_bytes is None
    assert limit_for("/anything") == OTHER
    assert all(limit_for(path).max_elements <= 500_000 for path in paths)
