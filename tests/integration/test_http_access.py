"""Does the HTTP server let in who may come in, and only to what they may do?"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from typer.testing import CliRunner

import headwater
from headwater.access import permissions as access_permissions
from headwater.access import scram
from headwater.access.permissions import Permission
from headwater.calls import access as calls
from headwater.cli import app
from headwater.servers.authentication import Principal
from headwater.servers.http import app as application
from http_server import http_process, http_server
from patience import PATIENCE_SECONDS

PASSWORD = "correct horse"


def account(
    log: headwater.Headwater, name: str, *permissions: tuple[str, str, str], administrator: bool = False
) -> str:
    """An account that may do this, and a key of it."""
    # As few iterations as the table takes: what is tested here is not how slow a guess is.
    log.run(calls.set_account(name, scram.verifiers(PASSWORD, os.urandom(16), 4096), administrator=administrator))
    for action, kind, of in permissions:
        log.run(calls.allow(Permission(name, action, kind, of)))
    key = access_permissions.encode_api_key(os.urandom(32))
    log.run(calls.create_api_key(access_permissions.hash_api_key(key), name))
    return key


@pytest.fixture(scope="module")
def keys(dsn: str) -> dict[str, str]:
    with headwater.connect(dsn) as log:
        for name in ("orders", "secrets"):
            log.create_topic(name)
        return {
            "root": account(log, "root", administrator=True),
            "shop": account(log, "shop", ("write", "topic", "orders"), ("read", "topic", "orders")),
            "nobody": account(log, "nobody"),
            "worker": account(log, "worker", ("read", "consumer", "mailer"), ("read", "topic", "orders")),
        }


@pytest.fixture(scope="module")
def address(dsn: str, keys: dict[str, str]) -> Iterator[str]:
    with http_server(dsn, authenticate=True) as found:
        yield found


@pytest.fixture
def as_(address: str, keys: dict[str, str]) -> Iterator[Callable[[str | None], httpx.Client]]:
    clients: list[httpx.Client] = []

    def client(name: str | None) -> httpx.Client:
        headers = {} if name is None else {"authorization": f"Bearer {keys[name]}"}
        clients.append(httpx.Client(base_url=address, headers=headers, timeout=PATIENCE_SECONDS))
        return clients[-1]

    yield client
    for one in clients:
        one.close()


def test_every_route_requires_authentication(as_: Callable[[str | None], httpx.Client]) -> None:
    stranger = as_(None)
    for method, path in (
        ("GET", "/v1/topics"),
        ("POST", "/v1/topics/orders/events"),
        ("GET", "/v1/me"),
        ("GET", "/metrics"),
        ("GET", "/v1/topics/orders/follow"),
        ("GET", "/dcb/x/read"),
        ("GET", "/nowhere"),
    ):
        refused = stranger.request(method, path, content=b"x" * 100)
        assert refused.status_code == 401, path
        assert refused.headers["www-authenticate"] == 'Bearer realm="headwater"'
        assert refused.json()["type"] == "urn:headwater:error:NotAuthenticated"
    for path in ("/health", "/", "/docs", "/openapi.json"):
        assert stranger.get(path).status_code == 200
    for given in ("Bearer hw_wrong", "Bearer", "Basic !!!", "Basic eA==", "Digest x", "Basic c2hvcDp3cm9uZw=="):
        assert stranger.get("/v1/me", headers={"authorization": given}).status_code == 401, given


def test_every_route_declares_its_permission() -> None:
    document = application.openapi_document(application.create_api())
    declared = [route["x-headwater-permission"] for methods in document["paths"].values() for route in methods.values()]
    assert len(declared) > 60
    assert all(declared)
    without = {
        path
        for path, methods in document["paths"].items()
        for route in methods.values()
        if route["x-headwater-permission"].startswith("none")
    }
    assert without == {"/health", "/ready", "/v1/me", "/v1/sessions"}


def test_every_route_rejects_accounts_without_permission(as_: Callable[[str | None], httpx.Client]) -> None:
    """Each route of the description, called by an account that may do nothing."""
    nobody = as_("nobody")
    bodies = {
        "create_topic": {"name": "x"},
        "change_topic": {},
        "publish_events": {"data": 1},
        "create_queue": {"name": "x"},
        "change_queue": {},
        "claim": {"worker": "w"},
        "settle": {"token": "1", "done": "all"},
        "extend": {"token": "1"},
        "rewind": {"to": 0},
        "bind": {},
        "redrive": {"all": True},
        "discard": {"all": True},
        "set_cursor": {"position": 0},
        "subscribe": {"queue": "x", "filter": "true"},
        "schedule": {"topic": "orders", "deliver_at": "2999-01-01T00:00:00Z"},
        "move_schedule": {"deliver_at": "2999-01-01T00:00:00Z"},
        "set_cron_schedule": {"name": "x", "cron": "* * * * *", "topic": "orders"},
        "pause_cron_schedule": {"paused": True},
        "append": {"events": [{"type": "A"}]},
        "read": {},
        "count": {},
        "latest": {"query": {}},
        "dcb_append": {"events": []},
        "dcb_measured_read": {},
        "create_account": {"name": "x", "password": "y"},
        "change_account": {},
        "allow": {"action": "read", "kind": "topic"},
        "create_key": {},
    }
    own = {"health", "ready", "me", "sign_in", "sign_out"}
    # These show what the caller may see, which is nothing; or say that it is not there.
    empty = {
        "list_topics",
        "list_queues",
        "list_cursors",
        "list_subscriptions",
        "list_schedules",
        "list_cron_schedules",
    }
    empty |= {"list_kafka_groups"}
    hidden = {"show_event", "move_schedule", "cancel_schedule", "pause_cron_schedule", "delete_cron_schedule"}
    document = application.openapi_document(application.create_api())
    asked = 0
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            name = route["operationId"]
            if name in own:
                continue
            filled = path
            for parameter in ("topic", "queue", "name", "id", "position"):
                filled = filled.replace(f"{{{parameter}}}", "1" if parameter in ("id", "position") else "orders")
            filled = filled.replace("{hash_prefix}", "0123456789abcdef")
            query = {"action": "read", "kind": "topic"} if name == "disallow" else {}
            response = nobody.request(method.upper(), filled, json=bodies.get(name), params=query)
            asked += 1
            if name in empty:
                assert response.status_code == 200
                assert list(response.json().values()) == [[]], name
            elif name in hidden:
                assert response.status_code == 404, (name, response.text)
            else:
                assert response.status_code == 403, (name, response.status_code, response.text)
    assert asked > 55


def test_an_account_does_what_it_may_and_no_more(
    as_: Callable[[str | None], httpx.Client], log: headwater.Headwater
) -> None:
    shop, worker, root = as_("shop"), as_("worker"), as_("root")
    position = shop.post("/v1/topics/orders/events", json={"data": 1}).json()["positions"][0]
    assert shop.get(f"/v1/events/{position}").json()["data"] == 1
    hidden = log.publish("secrets", "hush")
    assert shop.get(f"/v1/events/{hidden}").status_code == 404
    assert root.get(f"/v1/events/{hidden}").json()["data"] == "hush"
    refused = shop.post("/v1/topics/secrets/events", json={"data": 1})
    assert refused.status_code == 403
    assert "headwater account allow shop write topic 'secrets'" in refused.json()["hint"]
    assert shop.get("/v1/events").status_code == 403
    assert shop.get("/v1/follow?topic=orders&topic=secrets").status_code == 403
    assert [topic["name"] for topic in shop.get("/v1/topics").json()["topics"]] == ["orders"]
    # Who may read a queue may read what it is bound to: so who binds must be allowed to.
    made = root.post("/v1/queues", json={"name": "mailer", "bindings": [{"topic": "orders"}]})
    assert made.status_code == 201
    root.post(
        "/v1/accounts/worker/permissions", json={"action": "create", "kind": "consumer", "name": "w", "prefix": True}
    )
    assert worker.post("/v1/queues/mailer/claim", json={"worker": "w"}).json()["events"][0]["data"] == 1
    assert worker.post("/v1/queues", json={"name": "w1", "bindings": [{"topic": "secrets"}]}).status_code == 403
    assert worker.post("/v1/queues", json={"name": "w1", "bindings": [{}]}).status_code == 403
    assert worker.post("/v1/queues", json={"name": "w1", "bindings": [{"topic": "orders"}]}).status_code == 201
    mine = worker.get("/v1/me").json()
    assert (mine["account"], mine["administrator"], mine["authenticated"]) == ("worker", False, True)
    assert {(p["action"], p["name"]) for p in mine["permissions"]} >= {("read", "mailer"), ("create", "w")}


def test_who_may_see_few_schedules_sees_them_though_others_have_many(
    as_: Callable[[str | None], httpx.Client], log: headwater.Headwater
) -> None:
    due = datetime(2999, 1, 1, tzinfo=UTC)
    for _ in range(3):
        log.schedule("secrets", "hush", deliver_at=due)
    log.schedule("orders", "mine", deliver_at=due + timedelta(days=1))
    shown = as_("shop").get("/v1/schedules?limit=2").json()["schedules"]
    assert [one["topic"] for one in shown] == ["orders"]
    assert as_("shop").get("/v1/schedules?topic=secrets").json()["schedules"] == []
    assert len(as_("root").get("/v1/schedules?limit=3").json()["schedules"]) == 3


def test_of_two_who_make_the_same_account_the_second_is_refused(
    as_: Callable[[str | None], httpx.Client], address: str
) -> None:
    root = as_("root")

    def make(password: str) -> int:
        return root.post("/v1/accounts", json={"name": "twin", "password": password}).status_code

    passwords = [f"password {n}" for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(make, passwords))
    assert sorted(codes) == [201, 409, 409, 409]
    # The password is that of who was told that it was made.
    with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, auth=("twin", passwords[codes.index(201)])) as twin:
        assert twin.get("/v1/me").json()["account"] == "twin"


def test_administrators_manage_accounts_and_keys_and_no_secret_is_shown(
    as_: Callable[[str | None], httpx.Client], address: str, log: headwater.Headwater
) -> None:
    root = as_("root")
    before = log.state().head
    assert root.post("/v1/accounts", json={"name": "new", "password": PASSWORD}).status_code == 201
    assert root.post("/v1/accounts", json={"name": "new", "password": "other"}).status_code == 409
    assert root.post("/v1/accounts", json={"name": "*", "password": "x"}).status_code == 400
    given = {"action": "write", "kind": "topic", "name": "orders"}
    assert root.post("/v1/accounts/new/permissions", json=given).status_code == 201
    assert root.post("/v1/accounts/missing/permissions", json=given).status_code == 404
    made = root.post("/v1/accounts/new/keys", json={"label": "ci"}).json()
    assert made["key"].startswith("hw_")
    with httpx.Client(
        base_url=address, timeout=PATIENCE_SECONDS, headers={"authorization": f"Bearer {made['key']}"}
    ) as new:
        assert new.post("/v1/topics/orders/events", json={"data": 2}).status_code == 200
        assert new.get("/v1/accounts").status_code == 403
    with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, auth=("new", PASSWORD)) as by_password:
        assert by_password.post("/v1/topics/orders/events", json={"data": 3}).status_code == 200
    listed = root.get("/v1/accounts/new/keys").json()["keys"]
    assert [(key["label"], key["hash"]) for key in listed] == [("ci", made["hash"])]
    assert root.patch("/v1/accounts/new", json={"password": "another"}).status_code == 200
    assert root.patch("/v1/accounts/missing", json={"password": "another"}).status_code == 404
    assert root.delete(f"/v1/accounts/new/keys/{made['hash'][:16]}").status_code == 200
    assert root.delete(f"/v1/accounts/new/keys/{made['hash'][:16]}").status_code == 404
    assert root.delete("/v1/accounts/new/permissions", params=given).status_code == 200
    assert root.delete("/v1/accounts/new/permissions", params=given).status_code == 404
    assert root.delete("/v1/accounts/new").status_code == 200
    assert root.delete("/v1/accounts/new").status_code == 404
    told = log.read("headwater.audit", after=before)
    assert [(event.type, event.data["actor"]) for event in told] == [
        (action, "root")
        for action in (
            "account.create",
            "account.allow",
            "key.create",
            "account.alter",
            "key.delete",
            "account.disallow",
            "account.delete",
        )
    ]
    text = json.dumps([event.data for event in told])
    assert PASSWORD not in text
    assert "another" not in text
    assert made["key"] not in text


def test_a_key_that_is_taken_back_is_worth_nothing(as_: Callable[[str | None], httpx.Client], address: str) -> None:
    root = as_("root")
    made = root.post("/v1/accounts/shop/keys", json={"expires_in_seconds": 3600}).json()
    with httpx.Client(
        base_url=address, timeout=PATIENCE_SECONDS, headers={"authorization": f"Bearer {made['key']}"}
    ) as client:
        assert client.get("/v1/me").status_code == 200
        root.delete(f"/v1/accounts/shop/keys/{made['hash'][:8]}")
        assert client.get("/v1/me").status_code == 401


def test_a_session_is_for_the_console_and_for_no_other_site(
    as_: Callable[[str | None], httpx.Client], address: str
) -> None:
    with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as browser:
        assert browser.post("/v1/sessions", json={"name": "shop", "password": "wrong"}).status_code == 401
        signed_in = browser.post("/v1/sessions", json={"name": "shop", "password": PASSWORD})
        assert signed_in.status_code == 201
        cookie = signed_in.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        mine = browser.get("/v1/me")
        assert mine.json()["account"] == "shop"
        # It lasts from its last use: so does the cookie.
        assert mine.headers["set-cookie"] == cookie
        assert "Max-Age=86400" in cookie
        body = {"data": 1}
        path = "/v1/topics/orders/events"
        # Neither a form of another site nor a program with the cookie alone.
        assert browser.post(path, json=body).status_code == 403
        assert browser.post(path, json=body, headers={"origin": "https://evil.example"}).status_code == 403
        assert browser.post(path, json=body, headers={"origin": "null"}).status_code == 403
        assert browser.post(path, json=body, headers={"origin": address}).status_code == 200
        assert browser.post(path, json=body, headers={"x-headwater-console": "1"}).status_code == 200
        kept = dict(browser.cookies)
        assert browser.delete("/v1/sessions", headers={"x-headwater-console": "1"}).json() == {"deleted": True}
        browser.cookies.update(kept)
        assert browser.get("/v1/me").status_code == 401


def test_guessing_passwords_is_slowed_down(dsn: str, keys: dict[str, str]) -> None:
    with (
        http_server(dsn, authenticate=True) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        codes = [401]
        while codes[-1] == 401:
            codes.append(client.get("/v1/me", auth=("shop", f"guess {len(codes)}")).status_code)
            assert len(codes) < 500, "nobody minds"
        assert codes[-1] == 429
        assert len(codes) > 20
        assert client.get("/v1/me", headers={"authorization": f"Bearer {keys['shop']}"}).status_code == 200


def test_many_guesses_at_once_are_no_way_around_the_limit(dsn: str, keys: dict[str, str]) -> None:
    with (
        http_server(dsn, authenticate=True) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
        ThreadPoolExecutor(30) as threads,
    ):

        def ask(password: str) -> int:
            return client.get("/v1/me", auth=("shop", password)).status_code

        # Whoever is right is never held up by themselves.
        assert set(threads.map(ask, [PASSWORD] * 60)) == {200}
        started = time.monotonic()
        codes = list(threads.map(ask, [f"guess {n}" for n in range(80)]))
        # One more comes with each second.
        assert codes.count(401) <= 20 + (time.monotonic() - started) + 1
        assert codes.count(429) == 80 - codes.count(401)


def test_a_stream_ends_when_its_right_does(
    as_: Callable[[str | None], httpx.Client], address: str, log: headwater.Headwater
) -> None:
    root, shop = as_("root"), as_("shop")
    given = {"action": "read", "kind": "topic", "name": "secrets"}
    assert root.post("/v1/accounts/shop/permissions", json=given).status_code == 201
    log.publish("secrets", "seen")
    with shop.stream("GET", "/v1/topics/secrets/follow?after=0") as response:
        lines = response.iter_lines()
        assert any("hush" in line or "seen" in line for line in lines if line.startswith("data"))
        assert root.delete("/v1/accounts/shop/permissions", params=given).status_code == 200
        rest = list(lines)
    assert any("no longer allowed" in line for line in rest)


def test_a_stream_ends_when_what_it_came_with_is_taken_back(
    as_: Callable[[str | None], httpx.Client], address: str, log: headwater.Headwater
) -> None:
    root = as_("root")
    path = "/v1/topics/orders/follow"

    def ended(client: httpx.Client, take_back: Callable[[], Any]) -> bool:
        with client.stream("GET", path) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("retry")
            take_back()
            deadline = time.monotonic() + PATIENCE_SECONDS
            for line in lines:
                if "no longer allowed" in line:
                    return True
                # A heartbeat comes every 15 seconds.
                assert time.monotonic() < deadline, "it goes on and on"
        return False

    def client(**how: Any) -> httpx.Client:
        return httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, **how)

    def bearer(key: str) -> httpx.Client:
        return client(headers={"authorization": f"Bearer {key}"})

    # By this server, which knows it at once.
    made = root.post("/v1/accounts/shop/keys", json={}).json()
    with bearer(made["key"]) as shop:
        assert ended(shop, lambda: root.delete(f"/v1/accounts/shop/keys/{made['hash']}"))
    # By anybody else.
    made = root.post("/v1/accounts/shop/keys", json={}).json()
    with bearer(made["key"]) as shop:
        assert ended(shop, lambda: log.run(calls.delete_api_key("shop", made["hash"])))
    with client() as browser:
        browser.post("/v1/sessions", json={"name": "shop", "password": PASSWORD})
        assert ended(browser, lambda: browser.delete("/v1/sessions", headers={"x-headwater-console": "1"}))
    assert root.post("/v1/accounts", json={"name": "changing", "password": PASSWORD}).status_code == 201
    given = {"action": "read", "kind": "topic", "name": "orders"}
    assert root.post("/v1/accounts/changing/permissions", json=given).status_code == 201
    with client(auth=("changing", PASSWORD)) as by_password:
        assert ended(by_password, lambda: root.patch("/v1/accounts/changing", json={"password": "another"}))


def test_it_speaks_tls(dsn: str, tmp_path: Path, keys: dict[str, str]) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*made.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=str(certificate))
    with (
        http_server(dsn, authenticate=True, certificate=(str(certificate), str(key))) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, verify=trusted) as client,
    ):
        assert address.startswith("https://")
        signed_in = client.post("/v1/sessions", json={"name": "shop", "password": PASSWORD})
        assert "Secure" in signed_in.headers["set-cookie"]
        with client.stream("GET", "/v1/topics/orders/follow?after=0") as response:
            assert next(line for line in response.iter_lines() if line.startswith("data"))


def test_the_record_of_acts_is_not_written_by_callers() -> None:
    everybody = Principal(None, None)
    assert not everybody.may("write", "topic", "headwater.audit")
    assert not everybody.may("delete", "topic", "headwater.audit")
    assert not everybody.may("alter", "topic", "headwater.audit")
    assert everybody.may("read", "topic", "headwater.audit")


def run(dsn: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--dsn", dsn], env={"HEADWATER_DSN": None})


def test_keys_are_made_listed_and_taken_back_on_the_command_line(
    dsn: str, keys: dict[str, str], log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    made = json.loads(
        run(dsn, "account", "key", "create", "shop", "--label", "ci", "--expires-in", "1h", "--json").stdout
    )
    assert log.run(calls.account_of_key(access_permissions.hash_api_key(made["key"]))) == "shop"
    listed = json.loads(run(dsn, "account", "key", "list", "shop", "--json").stdout)["keys"]
    assert ("shop", made["hash"], "ci") in {(key["account"], key["hash"], key["label"]) for key in listed}
    assert made["key"] not in json.dumps(listed)
    assert made["hash"][:12] in run(dsn, "account", "key", "list").stdout
    assert run(dsn, "account", "key", "delete", "shop", made["hash"][:12]).exit_code == 0
    assert run(dsn, "account", "key", "delete", "shop", made["hash"][:12]).exit_code == 4
    assert run(dsn, "account", "key", "delete", "shop", "abc").exit_code == 3
    assert run(dsn, "account", "key", "create", "missing").exit_code == 3
    assert log.run(calls.account_of_key(access_permissions.hash_api_key(made["key"]))) is None


def test_it_listens_on_one_port_with_several_processes_and_within_its_limits(dsn: str, keys: dict[str, str]) -> None:
    options = ("--processes", "2", "--authenticate", "--max-body-mib", "1", "--requests-per-second", "0")
    with http_process(dsn, *options) as (address, _):
        headers = {"authorization": f"Bearer {keys['shop']}"}
        for _ in range(8):
            # Each on a connection of its own, so that both processes get some.
            with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, headers=headers) as client:
                assert client.get("/v1/me").json()["account"] == "shop"
        large = httpx.post(
            f"{address}/v1/topics/orders/events",
            json={"data": "x" * 1_100_000},
            headers=headers,
            timeout=PATIENCE_SECONDS,
        )
        assert large.status_code == 413
