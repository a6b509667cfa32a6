"""Who may come in by gRPC, and what may they do? Passwords, sessions, keys, rights, users, encryption."""

from __future__ import annotations

import base64
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psycopg
import pytest

import headwater
from headwater.access import permissions, scram
from headwater.access.permissions import Permission
from headwater.calls import access as calls
from headwater.errors import QueueNotFound
from headwater.eventstore import NewStoreEvent
from patience import PATIENCE_SECONDS

grpc = pytest.importorskip("grpc")
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from rpc_servers import rpc_server  # noqa: E402

from headwater.servers.grpc.client import service  # noqa: E402
from headwater.servers.grpc.generated import eventstore_pb2 as orisun  # noqa: E402
from headwater.servers.grpc.generated import headwater_pb2 as pb  # noqa: E402

_numbers = itertools.count()
Until = Callable[[Callable[[], Any]], Any]
Metadata = list[tuple[str, str]]
EMPTY = orisun.PingRequest()


def basic(name: str, password: str) -> Metadata:
    return [("authorization", "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode())]


def bearer(key: str) -> Metadata:
    return [("authorization", f"Bearer {key}")]


ROOT = basic("root", "root:secret")
SHOP = basic("shop", "ä")
READERS_RIGHT = Permission("reader", "read", "topic", "shop-store")
COMPETITORS_RIGHT = Permission("reader", "read", "consumer", "shared-", True)


@pytest.fixture(scope="module")
def channel(dsn: str) -> Iterator[Any]:
    with headwater.connect(dsn) as log:
        # As few as the table takes: what is made slow on purpose is tested elsewhere.
        log.run(calls.set_account("root", scram.verifiers("root:secret", os.urandom(16), 4096), administrator=True))
        log.run(calls.set_account("shop", scram.verifiers("ä", os.urandom(16), 4096)))
        log.run(calls.allow(Permission("shop", "write", "topic", "shop-", True)))
        log.run(calls.allow(Permission("shop", "read", "topic", "shop-orders")))
        log.run(calls.allow(Permission("shop", "read", "consumer", "shop")))
        log.run(calls.set_account("reader", scram.verifiers("r", os.urandom(16), 4096)))
        log.run(calls.allow(READERS_RIGHT))
        log.run(calls.allow(COMPETITORS_RIGHT))
        log.run(calls.allow(Permission("reader", "read", "topic", "shared")))
        log.create_topic("shop-orders")
        log.create_topic("secret")
        log.create_store("shop-store").append(NewStoreEvent("A", {}))
        log.create_store("hidden").append(NewStoreEvent("A", {}))
        log.create_queue("shop", "shop-orders")
        log.create_store("shared").append(NewStoreEvent("A", {}))
        log.create_queue("shared-there", "shared")
    with rpc_server("--authenticate", dsn=dsn) as server, grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def store(channel: Any) -> Any:
    return service(channel, "orisun.EventStore")


@pytest.fixture
def admin(channel: Any) -> Any:
    return service(channel, "orisun.Admin")


def refused(code: Any) -> Any:
    return pytest.raises(grpc.RpcError, match=f"StatusCode.{code.name}\\b")


def token_of(call: Any, metadata: Metadata, request: Any = EMPTY) -> str | None:
    """The session that a call is told of."""
    _, done = call.with_call(request, timeout=PATIENCE_SECONDS, metadata=metadata)
    return dict(done.initial_metadata()).get("x-auth-token")


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        basic("root", "wrong"),
        basic("nobody", "root:secret"),
        [("authorization", "Basic !!!")],
        [("authorization", "Basic " + base64.b64encode(b"root").decode())],
        [("authorization", "Basic " + base64.b64encode(b"\xff:\xff").decode())],
        [("authorization", "Digest root")],
        bearer("hw_nothing"),
        [("x-auth-token", "hw_nothing")],
    ],
    ids=str,
)
def test_who_is_not_known_does_not_come_in(channel: Any, store: Any, metadata: Metadata) -> None:
    with refused(grpc.StatusCode.UNAUTHENTICATED):
        store.Ping(EMPTY, timeout=PATIENCE_SECONDS, metadata=metadata)
    subscribe = service(channel, "headwater.v1.EventStore").Subscribe
    with refused(grpc.StatusCode.UNAUTHENTICATED):
        next(subscribe(pb.SubscribeRequest(store="shop-store"), timeout=PATIENCE_SECONDS, metadata=metadata))


def test_a_password_opens_a_session_and_the_session_is_enough(store: Any, log: headwater.Headwater) -> None:
    token = token_of(store.Ping, ROOT)
    assert token
    # Asked for again, it is the same one: sessions are few.
    assert token_of(store.Ping, ROOT) == token
    assert log.run(calls.account_of_key(permissions.hash_api_key(token))) == "root"
    assert token_of(store.Ping, [("x-auth-token", token)]) is None
    assert token_of(store.Ping, [("x-auth-token", token), *basic("root", "wrong")]) is None
    # One that does not hold is made good by the password.
    assert token_of(store.Ping, [("x-auth-token", "hw_old"), *ROOT]) not in (None, token)


def test_a_key_is_enough_and_opens_no_session(store: Any, log: headwater.Headwater) -> None:
    key = permissions.encode_api_key(os.urandom(32))
    log.run(calls.create_api_key(permissions.hash_api_key(key), "shop", label="test"))
    assert token_of(store.Ping, bearer(key)) is None
    asked = orisun.GetEventsRequest(boundary="hidden", count=1)
    with refused(grpc.StatusCode.PERMISSION_DENIED):
        store.GetEvents(asked, timeout=PATIENCE_SECONDS, metadata=bearer(key))


def competition(store: str, queue: str) -> pb.CompeteRequest:
    return pb.CompeteRequest(store=store, queue=queue, worker="w", batch_size=1)


def test_an_account_may_what_it_was_allowed_and_nothing_else(channel: Any, store: Any, admin: Any) -> None:
    log, queue, stores = (service(channel, f"headwater.v1.{name}") for name in ("Log", "Queue", "EventStore"))
    event = orisun.EventToSave(event_id="x", event_type="A", data="{}")
    new = pb.NewStoreEvent(type="A")
    allowed = [
        (log.Publish, pb.PublishRequest(topic="shop-orders", event=pb.NewEvent())),
        (log.Read, pb.ReadRequest(topics=["shop-orders"])),
        (queue.Claim, pb.ClaimRequest(queue="shop", worker="w")),
        (store.SaveEvents, orisun.SaveEventsRequest(boundary="shop-store", events=[event])),
        (stores.Append, pb.AppendRequest(store="shop-store", events=[new])),
        (admin.GetEventCount, orisun.GetEventCountRequest(boundary="shop-store")),
        (log.GetTopic, pb.GetTopicRequest(name="shop-orders")),
    ]
    denied = [
        (log.Publish, pb.PublishRequest(topic="secret", event=pb.NewEvent())),
        (log.PublishBatch, pb.PublishBatchRequest(topic="secret", events=[pb.NewEvent()])),
        (log.Read, pb.ReadRequest(topics=["shop-orders", "secret"])),
        (log.Read, pb.ReadRequest()),
        (log.GetTopic, pb.GetTopicRequest(name="secret")),
        (log.CreateTopic, pb.CreateTopicRequest(name="shop-new")),
        (log.DeleteTopic, pb.DeleteTopicRequest(name="shop-orders")),
        (log.OpenCursor, pb.OpenCursorRequest(cursor="theirs")),
        (log.AdvanceCursor, pb.AdvanceCursorRequest(cursor="theirs")),
        (queue.CreateQueue, pb.CreateQueueRequest(queue="other", topics=["secret"])),
        (queue.Claim, pb.ClaimRequest(queue="other", worker="w")),
        (queue.Settle, pb.SettleRequest(queue="other", token=1)),
        (queue.Extend, pb.ExtendRequest(queue="other", token=1)),
        (stores.CreateStore, pb.CreateStoreRequest(store="shop-new")),
        (stores.Append, pb.AppendRequest(store="hidden", events=[new])),
        (stores.ReadMatching, pb.ReadMatchingRequest(store="shop-store")),
        (stores.Latest, pb.LatestRequest(store="shop-store")),
        (stores.Count, pb.CountRequest(store="shop-store")),
        (stores.Head, pb.HeadRequest(store="shop-store")),
        (stores.DeadLetters, pb.DeadLettersRequest(store="shop-store", queue="other")),
        # To read a queue is not to change it.
        (stores.Redrive, pb.RedriveRequest(store="shop-store", queue="shop", all=True)),
        (stores.OpenStoreCursor, pb.OpenStoreCursorRequest(store="shop-store", cursor="theirs")),
        (stores.AdvanceStoreCursor, pb.AdvanceStoreCursorRequest(store="shop-store", cursor="theirs")),
        (store.SaveEvents, orisun.SaveEventsRequest(boundary="hidden", events=[event])),
        (store.GetEvents, orisun.GetEventsRequest(boundary="hidden", count=1)),
        (store.GetLatestByCriteria, orisun.GetLatestByCriteriaRequest(boundary="hidden")),
        (
            store.CreateIndex,
            orisun.CreateIndexRequest(boundary="shop-store", name="x", fields=[orisun.IndexField(json_key="x")]),
        ),
        (store.DropIndex, orisun.DropIndexRequest(boundary="shop-store", name="x")),
        (store.ListIndexes, orisun.ListIndexesRequest(boundary="hidden")),
        (store.GetIndex, orisun.GetIndexRequest(boundary="hidden", name="x")),
        (admin.CreateBoundary, orisun.CreateBoundaryRequest(name="new")),
        (admin.GetBoundary, orisun.GetBoundaryRequest(name="hidden")),
        (admin.GetEventCount, orisun.GetEventCountRequest(boundary="hidden")),
        (admin.CreateUser, orisun.CreateUserRequest(username="u", password="p", roles=["ADMIN"])),
        (admin.DeleteUser, orisun.DeleteUserRequest(user_id="root")),
        (admin.ListUsers, orisun.ListUsersRequest()),
        (admin.GetUserCount, orisun.GetUserCountRequest()),
        (admin.ValidateCredentials, orisun.ValidateCredentialsRequest(username="root", password="p")),
    ]
    for call, request in allowed:
        call(request, timeout=PATIENCE_SECONDS, metadata=SHOP)
    for call, request in denied:
        with refused(grpc.StatusCode.PERMISSION_DENIED):
            call(request, timeout=PATIENCE_SECONDS, metadata=SHOP)
    streams = [
        log.Follow(pb.FollowRequest(topics=["secret"]), timeout=PATIENCE_SECONDS, metadata=SHOP),
        stores.Subscribe(pb.SubscribeRequest(store="hidden"), timeout=PATIENCE_SECONDS, metadata=SHOP),
        stores.AppendStream(iter([pb.AppendStreamRequest(store="hidden")]), timeout=PATIENCE_SECONDS, metadata=SHOP),
        stores.Compete(iter([competition("hidden", "shop")]), timeout=PATIENCE_SECONDS, metadata=SHOP),
        stores.Compete(iter([competition("shop-store", "shop")]), timeout=PATIENCE_SECONDS, metadata=SHOP),
        store.CatchUpSubscribeToEvents(
            orisun.CatchUpSubscribeToEventStoreRequest(boundary="hidden"), timeout=PATIENCE_SECONDS, metadata=SHOP
        ),
    ]
    for stream in streams:
        with refused(grpc.StatusCode.PERMISSION_DENIED):
            next(stream)
    # Whatever there is has been asked for above, or tells of what the principal may know alone.
    listing = {"ListTopics", "ListStores", "ListBoundaries", "Ping", "GetServerInfo", "ChangePassword"}
    asked = {str(call._method, "utf-8").rpartition("/")[2] for call, _ in denied} | listing
    asked |= {"Follow", "Subscribe", "AppendStream", "Compete", "CatchUpSubscribeToEvents"}
    offered = {
        method.name
        for file in (pb.DESCRIPTOR, orisun.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert asked == offered
    topics = log.ListTopics(pb.ListTopicsRequest(), timeout=PATIENCE_SECONDS, metadata=SHOP).topics
    assert {topic.name for topic in topics} == {"shop-orders", "shop-store"}
    assert list(stores.ListStores(pb.ListStoresRequest(), timeout=PATIENCE_SECONDS, metadata=SHOP).stores) == [
        "shop-store"
    ]
    boundaries = admin.ListBoundaries(
        orisun.ListBoundariesRequest(), timeout=PATIENCE_SECONDS, metadata=SHOP
    ).boundaries
    assert [boundary.name for boundary in boundaries] == ["shop-store"]


def test_who_competes_may_read_the_store_and_the_queue_and_make_what_is_missing(
    channel: Any, log: headwater.Headwater
) -> None:
    compete = service(channel, "headwater.v1.EventStore").Compete
    reader = basic("reader", "r")
    for queue in ("other", "shared-missing"):
        with refused(grpc.StatusCode.PERMISSION_DENIED):
            next(compete(iter([competition("shared", queue)]), timeout=PATIENCE_SECONDS, metadata=reader))
        with pytest.raises(QueueNotFound):
            log.queue(queue)
    for queue, who in (("shared-there", reader), ("shared-missing", ROOT)):
        (answer,) = compete(iter([competition("shared", queue)]), timeout=PATIENCE_SECONDS, metadata=who)
        assert len(answer.events) == 1
    # It is there now.
    log.store("shared").append(NewStoreEvent("B"))
    (answer,) = compete(iter([competition("shared", "shared-missing")]), timeout=PATIENCE_SECONDS, metadata=reader)
    assert len(answer.events) == 1


def test_a_stream_ends_when_the_right_to_it_is_taken_back(channel: Any, log: headwater.Headwater, until: Until) -> None:
    stores = service(channel, "headwater.v1.EventStore")
    reader = basic("reader", "r")
    asking: list[SimpleQueue[pb.CompeteRequest | None]] = [SimpleQueue(), SimpleQueue()]
    competing = []
    for queue, asked in zip(("shared-waiting", "shared-holding"), asking, strict=True):
        log.create_queue(queue, "shared", after=log.store("shared").head())
        asked.put(competition("shared", queue))
        competing.append(stores.Compete(iter(asked.get, None), timeout=PATIENCE_SECONDS, metadata=reader))
    subscribed = stores.Subscribe(pb.SubscribeRequest(store="shop-store"), timeout=PATIENCE_SECONDS, metadata=reader)
    log.store("shared").append(NewStoreEvent("A"))
    for answers in (*competing, subscribed):
        assert next(answers).events
    asking[0].put(pb.CompeteRequest())
    until(lambda: log.deliveries("shared-waiting", status="done"))
    log.run(calls.disallow(READERS_RIGHT))
    log.run(calls.disallow(COMPETITORS_RIGHT))

    def ended() -> bool:
        log.store("shop-store").append(NewStoreEvent("B"))
        try:
            next(subscribed)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.PERMISSION_DENIED)
        return False

    until(ended)
    # Who waited is given nothing, and who has something is not heard any more.
    log.store("shared").append(NewStoreEvent("B"))
    asking[1].put(pb.CompeteRequest())
    for answers, asked in zip(competing, asking, strict=True):
        with refused(grpc.StatusCode.PERMISSION_DENIED):
            next(answers)
        asked.put(None)
    assert log.deliveries("shared-holding", status="done") == []


def test_a_stream_ends_when_its_key_is_taken_back(channel: Any, log: headwater.Headwater, until: Until) -> None:
    key = permissions.encode_api_key(os.urandom(32))
    log.run(calls.create_api_key(permissions.hash_api_key(key), "root"))
    stores = service(channel, "headwater.v1.EventStore")
    answers = stores.Subscribe(pb.SubscribeRequest(store="shop-store"), timeout=PATIENCE_SECONDS, metadata=bearer(key))
    assert next(answers).events
    log.run(calls.delete_api_key("root", permissions.hash_api_key(key).hex()))

    def ended() -> bool:
        log.store("shop-store").append(NewStoreEvent("B"))
        try:
            next(answers)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
        return False

    until(ended)


def test_guessing_passwords_is_slowed_down(dsn: str, channel: Any) -> None:
    with rpc_server("--authenticate", dsn=dsn) as server, grpc.insecure_channel(server.address) as own:
        call = service(own, "orisun.EventStore").Ping

        def guess(number: int) -> Any:
            try:
                call(EMPTY, timeout=PATIENCE_SECONDS, metadata=basic("root", f"guess {number}"))
            except grpc.RpcError as error:
                return error.code()

        with ThreadPoolExecutor(16) as threads:
            told = []
            # One a second is checked, so on a slow machine some more.
            while grpc.StatusCode.RESOURCE_EXHAUSTED not in told:
                told += threads.map(guess, range(len(told), len(told) + 32))
                assert len(told) < 1000, "nobody minds"
        assert told.count(grpc.StatusCode.UNAUTHENTICATED) >= 20


def test_health_is_told_to_everybody(channel: Any) -> None:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_users_are_made_with_roles_change_their_passwords_and_go(
    admin: Any, store: Any, log: headwater.Headwater, until: Until
) -> None:
    def made(name: str, *roles: str) -> Any:
        request = orisun.CreateUserRequest(name="Name", username=name, password="first", roles=roles)
        return admin.CreateUser(request, timeout=PATIENCE_SECONDS, metadata=ROOT).user

    user = made("operator", "OPERATIONS")
    assert (user.user_id, user.username, list(user.roles)) == ("operator", "operator", ["OPERATIONS"])
    assert list(made("chief", "ADMIN").roles) == ["ADMIN"]
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        made("operator", "ADMIN")
    for roles in ((), ("admin",), ("ADMIN", "KING")):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            made("somebody", *roles)
    operator = basic("operator", "first")
    save = orisun.SaveEventsRequest(
        boundary="hidden", events=[orisun.EventToSave(event_id="by-operator", event_type="A", data="{}")]
    )
    store.SaveEvents(save, timeout=PATIENCE_SECONDS, metadata=operator)
    with refused(grpc.StatusCode.PERMISSION_DENIED):
        admin.ListUsers(orisun.ListUsersRequest(), timeout=PATIENCE_SECONDS, metadata=operator)
    users = admin.ListUsers(orisun.ListUsersRequest(), timeout=PATIENCE_SECONDS, metadata=basic("chief", "first")).users
    assert {one.username: list(one.roles) for one in users} == {
        "root": ["ADMIN"],
        "chief": ["ADMIN"],
        "operator": ["OPERATIONS"],
        "shop": [],
        "reader": [],
    }
    assert admin.GetUserCount(orisun.GetUserCountRequest(), timeout=PATIENCE_SECONDS, metadata=ROOT).count == 5

    def valid(password: str) -> bool:
        request = orisun.ValidateCredentialsRequest(username="operator", password=password)
        answer = admin.ValidateCredentials(request, timeout=PATIENCE_SECONDS, metadata=ROOT)
        assert answer.HasField("user") == answer.success
        return bool(answer.success)

    def change(name: str, current: str) -> Any:
        request = orisun.ChangePasswordRequest(user_id=name, current_password=current, new_password="second")
        return admin.ChangePassword(request, timeout=PATIENCE_SECONDS, metadata=operator)

    token = token_of(store.Ping, operator)
    assert token is not None
    assert (valid("first"), valid("second")) == (True, False)
    with refused(grpc.StatusCode.PERMISSION_DENIED):
        change("root", "root:secret")
    with refused(grpc.StatusCode.UNAUTHENTICATED):
        change("operator", "wrong")
    assert change("operator", "first").success
    assert (valid("first"), valid("second")) == (False, True)
    # The session that the old password opened is gone.
    assert log.run(calls.account_of_key(permissions.hash_api_key(token))) is None
    with refused(grpc.StatusCode.FAILED_PRECONDITION):
        admin.DeleteUser(orisun.DeleteUserRequest(user_id="root"), timeout=PATIENCE_SECONDS, metadata=ROOT)
    admin.DeleteUser(orisun.DeleteUserRequest(user_id="operator"), timeout=PATIENCE_SECONDS, metadata=ROOT)
    with refused(grpc.StatusCode.NOT_FOUND):
        admin.DeleteUser(orisun.DeleteUserRequest(user_id="operator"), timeout=PATIENCE_SECONDS, metadata=ROOT)
    with refused(grpc.StatusCode.UNAUTHENTICATED):
        store.Ping(EMPTY, timeout=PATIENCE_SECONDS, metadata=basic("operator", "second"))
    told = [event.data for event in log.read("headwater.audit") if event.data["subject"] == "operator"]
    assert [(one["actor"], one["action"]) for one in told] == [
        ("root", "account.create"),
        ("operator", "account.password"),
        ("root", "account.delete"),
    ]
    assert not [one for one in told if "first" in str(one) or "second" in str(one)]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_connections_are_encrypted_where_a_certificate_is_given(dsn: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    with rpc_server("--tls-certificate", str(certificate), "--tls-key", str(key), dsn=dsn) as server:
        trusting = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(server.address, trusting) as channel:
            service(channel, "orisun.EventStore").Ping(EMPTY, timeout=PATIENCE_SECONDS)
        with grpc.insecure_channel(server.address) as channel, refused(grpc.StatusCode.UNAVAILABLE):
            service(channel, "orisun.EventStore").Ping(EMPTY, timeout=PATIENCE_SECONDS)


def test_of_two_who_make_the_same_user_the_second_finds_it(
    dsn: str, connection: psycopg.Connection, until: Until
) -> None:
    free = calls.account_is_free("wanted")
    made = calls.set_account("wanted", scram.verifiers("p", os.urandom(16), 4096))
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second, ThreadPoolExecutor(1) as pool:
        assert first.execute(free.sql, free.params).fetchall() == [(True,)]
        asking = pool.submit(lambda: second.execute(free.sql, free.params).fetchall())
        waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        until(lambda: connection.execute(waits, [second.info.backend_pid]).fetchall() == [(True,)])
        first.execute(made.sql, made.params)
        first.commit()
        assert asking.result(PATIENCE_SECONDS) == [(False,)]
    connection.execute("select headwater_internal.delete_account('wanted')")
