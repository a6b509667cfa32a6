"""Does a hostile or broken Kafka client cost anything but its own connection?"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cramjam
import google_crc32c
import pytest
from brokers import broker_process
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader
from raw_client import Raw, batch_of

import headwater
from headwater import aio
from headwater.access import password_checks, scram
from headwater.access.password_checks import WRONG_PASSWORDS
from headwater.calls import access as access_calls
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import BACKGROUND_FAILURES
from headwater.servers.authentication import Authenticator
from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.compression import CODECS, compress
from headwater.servers.kafka.server import serving
from headwater.servers.kafka.wire import ErrorCode, _entity_writer
from patience import PATIENCE_SECONDS

HEARTBEAT = 68


def frame(api: int, version: int, fields: dict[str, Any], correlation: int = 1) -> bytes:
    """A request as this side writes it, which also writes null where the schema has none."""
    schema: Any = load_request_schema(api, version)
    parts = [struct.pack(">hhihc", api, version, correlation, 1, b"h")]
    if schema.__flexible__:
        parts.append(b"\x00")
    _entity_writer(schema)(parts, fields)
    body = b"".join(parts)
    return struct.pack(">i", len(body)) + body


class Client:
    """A connection to a broker of this process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, broker: Broker, *, source: str | None = None) -> Client:
        address = None if source is None else (source, 0)
        return cls(*await asyncio.open_connection("127.0.0.1", broker.settings.port, local_addr=address))

    async def answer(self, api: int, version: int) -> Any:
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        data = await self._reader.readexactly(size)
        schema: Any = load_response_schema(api, version)
        return entity_reader(schema)(data, 4 + (schema.__flexible__ and api != 18))[0]

    async def ask(self, api: int, version: int, fields: dict[str, Any]) -> Any:
        """The answer; None: the broker has closed the connection."""
        self.writer.write(frame(api, version, fields))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self.answer(api, version)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def is_closed(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return not await self._reader.read(1)
        except ConnectionError:
            return True


async def until(question: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not question():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def with_broker(dsn: str, act: Callable[[Broker, Any], Awaitable[None]], **settings: Any) -> None:
    """Run `act` on a broker and the log."""

    async def run() -> None:
        async with (
            await aio.connect(dsn, pool_size=6) as log,
            serving(log, listen_host="127.0.0.1", port=0, grace_seconds=1, **settings) as broker,
        ):
            await act(broker, log)

    asyncio.run(run())


def beat(member: str, topics: list[str | None] | None, *, group: str = "g", epoch: int = 0) -> dict[str, Any]:
    return {
        "group_id": group,
        "member_id": member,
        "member_epoch": epoch,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 1000,
        "subscribed_topic_names": topics,
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": [] if epoch == 0 else None,
    }


def failures(task: str) -> int:
    return sum(n for metric, labels, n in COUNTERS.samples() if metric is BACKGROUND_FAILURES and labels == (task,))


def test_a_null_topic_name_costs_its_connection_and_members_that_expire_cost_nothing(dsn: str) -> None:
    """The two frames that ended the whole server: a second member wants a topic without a name, the first expires."""

    async def act(broker: Broker, log: Any) -> None:
        await log.create_topic("fz", kind="sequenced", partitions=2)
        first, second = await Client.to(broker), await Client.to(broker)
        assert (await first.ask(HEARTBEAT, 1, beat("a", ["fz"]))).error_code == ErrorCode.none
        # So that the first expires well before the second.
        await asyncio.sleep(1)
        assert await second.ask(HEARTBEAT, 1, beat("b", ["fz", None])) is None
        third = await Client.to(broker)
        assert (await third.ask(HEARTBEAT, 1, beat("c", ["fz"], group="other"))).error_code == ErrorCode.none
        # Nobody beats again: every member expires, and the broker answers as before.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await third.ask(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, described("g", "other"))).groups[
                0
            ].error_code == ErrorCode.none:
                pass
        assert failures("kafka heartbeats") == failures("kafka group") == 0
        assert (await third.ask(HEARTBEAT, 1, beat("a", ["fz"]))).error_code == ErrorCode.none

    with_broker(dsn, act, session_seconds=2.0)


def described(*names: str) -> dict[str, Any]:
    return {"group_ids": list(names), "include_authorized_operations": False}


def test_a_group_whose_state_makes_its_coordinator_fail_is_dropped_and_others_go_on(dsn: str) -> None:
    async def act(broker: Broker, log: Any) -> None:
        client = await Client.to(broker)
        for name in ("broken", "whole"):
            assert (await client.ask(HEARTBEAT, 1, beat("a", ["fz"], group=name))).error_code == ErrorCode.none
            await client.ask(HEARTBEAT, 1, beat("b", ["fz"], group=name))
        groups = kafka_groups(broker)
        broken = groups["broken"]
        before = failures("kafka group")
        # What no client can bring about: the coordinator cannot sort the names when the other member expires.
        broken.members["a"].topics = frozenset([None, "fz"])
        broken.members["b"].expires_at = 0.0
        await until(lambda: failures("kafka group") > before)
        await until(lambda: "broken" not in groups)
        assert list(groups) == ["whole"]
        # Its members are unknown, join again, and all goes on.
        answer = await client.ask(HEARTBEAT, 1, beat("b", None, group="broken", epoch=2))
        assert answer.error_code == ErrorCode.unknown_member_id
        assert (await client.ask(HEARTBEAT, 1, beat("b", ["fz"], group="broken"))).error_code == ErrorCode.none
        epoch = groups["whole"].members["a"].epoch
        assert (await client.ask(HEARTBEAT, 1, beat("a", None, group="whole", epoch=epoch))).error_code == 0

    with_broker(dsn, act)


def kafka_groups(broker: Broker) -> dict[str, Any]:
    """What a broker has in memory of the groups of the server-side protocol."""
    import gc

    from headwater.servers.kafka.consumer_protocol import ConsumerGroupApis

    (found,) = [one for one in gc.get_objects() if isinstance(one, ConsumerGroupApis) and one._broker is broker]
    return found._groups


# --- connections of clients that do not say who they are ---


def metadata() -> dict[str, Any]:
    return {"topics": [], "allow_auto_topic_creation": False}


def test_silent_connections_do_not_shut_out_an_honest_client(dsn: str) -> None:
    async def act(broker: Broker, log: Any) -> None:
        before = await Client.to(broker)
        assert await before.ask(ApiKey.METADATA, 9, metadata()) is not None
        silent = [await Client.to(broker) for _ in range(3 * 24)]
        for one in silent:
            one.writer.write(b"\x00\x00")
        honest = await Client.to(broker)
        assert await honest.ask(ApiKey.METADATA, 9, metadata()) is not None
        # Who has proven itself is not closed for others, and silent ones from elsewhere have their own share.
        assert await before.ask(ApiKey.METADATA, 9, metadata()) is not None
        other = await Client.to(broker, source="127.0.0.2")
        assert await other.ask(ApiKey.METADATA, 9, metadata()) is not None

    with_broker(dsn, act, max_connections=24, admission_seconds=600.0)


def test_a_connection_that_says_nothing_or_does_not_authenticate_is_closed_within_seconds(dsn: str) -> None:
    async def act(broker: Broker, log: Any) -> None:
        silent, asking = await Client.to(broker), await Client.to(broker)
        # A valid request is enough only where nobody has to authenticate.
        assert (
            await asking.ask(ApiKey.API_VERSIONS, 3, {"client_software_name": "x", "client_software_version": "1"})
            is not None
        )
        assert await silent.is_closed()
        assert await asking.is_closed()

    with_broker(dsn, act, admission_seconds=1.0, authenticate=True)


# --- wrong passwords ---


async def sign_in(client: Client, name: str, password: str) -> ErrorCode | None:
    """What a broker says to a password in clear; None: it closed the connection."""
    if await client.ask(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"}) is None:
        return None
    answer = await client.ask(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": f"\0{name}\0{password}".encode()})
    return None if answer is None else ErrorCode(answer.error_code)


async def make_account(log: Any, name: str, *, iterations: int = 4096) -> None:
    kept = scram.verifiers(f"{name}'s", b"0" * 16, iterations)
    await log.run(access_calls.set_account(name, kept, administrator=True))


def test_wrong_passwords_by_sasl_are_limited_and_do_not_lock_out_who_came_before(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One more attempt is allowed for each second that passes: let none pass.
    monkeypatch.setattr(password_checks, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    async def act(broker: Broker, log: Any) -> None:
        await make_account(log, "app")
        assert await sign_in(await Client.to(broker), "app", "app's") is ErrorCode.none
        answers = [await sign_in(await Client.to(broker), f"n{number}", "wrong") for number in range(WRONG_PASSWORDS)]
        assert set(answers) == {ErrorCode.sasl_authentication_failed}
        # Further ones are not even checked: the broker closes the connection.
        assert [await sign_in(await Client.to(broker), f"m{number}", "wrong") for number in range(3)] == [None] * 3
        assert await sign_in(await Client.to(broker), "app", "app's") is ErrorCode.none
        # Another address has a limit of its own.
        elsewhere = await Client.to(broker, source="127.0.0.2")
        assert await sign_in(elsewhere, "app", "app's") is ErrorCode.none

    with_broker(dsn, act, authenticate=True)


def test_a_right_login_by_http_is_checked_between_the_wrong_ones_of_a_flood_by_kafka(dsn: str) -> None:
    async def act(broker: Broker, log: Any) -> None:
        await make_account(log, "app", iterations=600_000)
        authenticator = Authenticator(log, authenticate=True, passwords=broker.passwords)
        clients = [await Client.to(broker, source="127.0.0.2") for _ in range(WRONG_PASSWORDS)]
        answered = 0

        async def attack(client: Client) -> None:
            nonlocal answered
            await sign_in(client, "app", "wrong")
            answered += 1

        flood = [asyncio.create_task(attack(one)) for one in clients]
        await until(lambda: answered)
        began = answered
        principal = await authenticator.by_password("app", "app's", address="127.0.0.1")
        assert principal.account == "app"
        # One check of the flood may have been under way, and one more may end with it.
        assert answered - began <= 3
        await asyncio.gather(*flood)

    with_broker(dsn, act, authenticate=True, admission_seconds=600.0)


# Compression bombs

BOMB_BYTES = 400 * 1024 * 1024
BOMBS_AT_ONCE = 4
# Two batches are unpacked at a time, to 64 MiB each, and the broker has what was sent.
MAX_GROWTH_MIB = 400


def packed_as(codec: str) -> bytes:
    """A few hundred kilobytes, a few megabytes of snappy, that would become hundreds of megabytes."""
    if codec == "snappy declared":
        # A length of 4 GiB, with nothing behind it.
        return b"\xff\xff\xff\xff\x0f" + b"\x00" * 100
    if codec == "snappy":
        block = bytes(cramjam.snappy.compress_raw(bytes(65536)))
        return b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + (struct.pack(">i", len(block)) + block) * 2000
    return compress(CODECS.index(codec), bytes(BOMB_BYTES))


def bomb(codec: str) -> bytes:
    """A batch of one record, with a right CRC, whose records are packed well."""
    body = packed_as(codec)
    batch = bytearray(batch_of(b"")[:61])
    struct.pack_into(">i", batch, 8, 61 - 12 + len(body))
    struct.pack_into(">h", batch, 21, CODECS.index(codec.split()[0]))
    batch += body
    struct.pack_into(">I", batch, 17, google_crc32c.value(bytes(batch[21:])))
    return bytes(batch)


def highest_resident_mib(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


@pytest.mark.parametrize("codec", ["gzip", "snappy", "snappy declared", "lz4", "zstd"])
def test_a_batch_that_would_become_hundreds_of_megabytes_is_refused_within_bounds(dsn: str, codec: str) -> None:
    topic = f"bombed-{codec.replace(' ', '-')}"
    with headwater.connect(dsn) as log:
        log.create_topic(topic, kind="sequenced", max_payload_bytes=16 * 1024 * 1024)
    batch = bomb(codec)
    assert len(batch) < 10_000_000
    with broker_process(dsn) as broker:
        honest = Raw(broker)
        assert honest.produce(topic, batch_of(b"before")).error_code == ErrorCode.none
        before = highest_resident_mib(broker.process.pid)
        clients = [Raw(broker) for _ in range(BOMBS_AT_ONCE)]
        with ThreadPoolExecutor(len(clients)) as pool:
            answers = list(pool.map(lambda client: client.produce(topic, batch).error_code, clients))
        assert answers == [ErrorCode.corrupt_message] * BOMBS_AT_ONCE
        assert broker.process.poll() is None
        assert honest.produce(topic, batch_of(b"after")).error_code == ErrorCode.none
        assert honest.values(topic) == [b"before", b"after"]
        assert highest_resident_mib(broker.process.pid) < before + MAX_GROWTH_MIB
        for client in (honest, *clients):
            client.socket.close()
