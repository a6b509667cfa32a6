"""Does `headwater serve` keep its processes, and refuse what would open the log to strangers?"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from brokers import BrokerProcess, broker_process
from raw_client import Raw
from typer.testing import CliRunner

import headwater
from headwater.calls import access as calls
from headwater.cli import app
from headwater.servers.kafka.api_keys import ApiKey
from patience import PATIENCE_SECONDS
from serve_process import serve_process

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, Producer, TopicPartition  # noqa: E402
from confluent_kafka.admin import AdminClient  # noqa: E402


def run(dsn: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--dsn", dsn], env={"HEADWATER_DSN": None})


pytestmark = pytest.mark.usefixtures("clean_environment")


def test_several_processes_are_several_brokers_and_one_that_dies_is_started_again(
    dsn: str, log: headwater.Headwater, connection: psycopg.Connection, until: Callable[[Callable[[], Any]], Any]
) -> None:
    topic = log.create_topic("spread", kind="sequenced", partitions=4).name
    with broker_process(dsn, "--processes", "2") as started:
        assert len(started.addresses) == 2
        admin = AdminClient({"bootstrap.servers": started.addresses[1]})

        def complete() -> Any:
            metadata = admin.list_topics(timeout=PATIENCE_SECONDS)
            found = {f"{one.host}:{one.port}" for one in metadata.brokers.values()}
            return metadata if found == set(started.addresses) else None

        metadata = until(complete)
        leaders = [part.leader for part in metadata.topics[topic].partitions.values()]
        assert sorted(leaders) == [1, 1, 2, 2]
        incarnations = set(connection.execute("select incarnation from headwater.kafka_live_broker").fetchall())
        parent = started.process.pid
        children = [int(one) for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        brokers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(brokers) == 2
        os.kill(brokers[0], signal.SIGKILL)
        until(
            lambda: len(
                set(connection.execute("select incarnation from headwater.kafka_live_broker").fetchall()) - incarnations
            )
        )
        # Every partition, so those too that the one that died led.
        producer = Producer({"bootstrap.servers": started.bootstrap, "log_level": 0})
        failed: list[Any] = []
        for partition in range(4):
            producer.produce(topic, b"x", partition=partition, on_delivery=lambda e, m: e and failed.append(e))
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert failed == []
        consumer = Consumer({"bootstrap.servers": started.bootstrap, "group.id": "s", "log_level": 0})
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(4)])
        deadline = time.monotonic() + PATIENCE_SECONDS
        got: set[int] = set()
        while got != {0, 1, 2, 3}:
            assert time.monotonic() < deadline
            got |= {m.partition() for m in consumer.consume(4, timeout=0.5) if m.error() is None}
        consumer.close()
    # They told that they go, so nobody waits for their leases to end.
    assert connection.execute("select count(*) from headwater.kafka_live_broker").fetchone() == (0,)


def test_what_its_processes_log_is_written_as_the_settings_say(dsn: str, tmp_path: Path) -> None:
    settings = {"HEADWATER_LOG_LEVEL": "info", "HEADWATER_LOG_FORMAT": "json"}
    options = ("--kafka", "127.0.0.1:0", "--processes", "2")
    with (
        (tmp_path / "log").open("w") as log,
        serve_process(*options, dsn=dsn, settings=settings, log=log) as started,
    ):
        for address in started.told["kafka"]:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as stranger:
                stranger.sendall(b"\x00\x00\x00\x04what")
                assert stranger.recv(1) == b""
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["message"] for line in lines].count("kafka connection ended") == 2


def test_it_does_not_listen_beyond_the_machine_without_asking_who_comes(dsn: str) -> None:
    refused = run(dsn, "serve", "--kafka", "0.0.0.0:0", "--json")
    assert refused.exit_code == 3
    assert "--authenticate" in json.loads(refused.stderr)["hint"]
    for wrong in ("9092", "host:", "host:port", ":9092"):
        assert run(dsn, "serve", "--kafka", wrong).exit_code == 2


def test_a_port_that_is_taken_is_said(dsn: str) -> None:
    with broker_process(dsn) as started:
        for processes in ("1", "2"):
            refused = run(dsn, "serve", "--kafka", started.addresses[0], "--processes", processes)
            assert refused.exit_code == 3
            assert "cannot listen on" in refused.stderr
            assert "Traceback" not in refused.stderr


def test_an_address_that_clients_could_not_be_sent_to_is_refused(dsn: str) -> None:
    for host in ("0.0.0.0", "[::]"):
        refused = run(dsn, "serve", "--kafka", f"{host}:0", "--authenticate", "--json")
        assert refused.exit_code == 3
        assert "--advertise" in json.loads(refused.stderr)["hint"]


def test_brokers_that_only_their_own_machine_reaches_do_not_mix_with_others(dsn: str) -> None:
    with broker_process(dsn) as started:
        refused = run(dsn, "serve", "--kafka", "0.0.0.0:0", "--authenticate", "--advertise", "db.example", "--json")
        assert refused.exit_code == 3
        assert started.addresses[0] in json.loads(refused.stderr)["message"]
    with broker_process(dsn, "--advertise", "db.example"):
        refused = run(dsn, "serve", "--kafka", "127.0.0.1:0", "--json")
        assert refused.exit_code == 3
        assert "db.example" in json.loads(refused.stderr)["message"]


def test_a_broker_that_asks_nobody_says_so_where_there_are_accounts(dsn: str, tmp_path: Path) -> None:
    assert run(dsn, "account", "create", "shop", "--password", "secret").exit_code == 0
    try:
        for options, warned in (((), True), (("--authenticate",), False)):
            with (
                (tmp_path / "log").open("w") as lines,
                serve_process("--kafka", "127.0.0.1:0", *options, dsn=dsn, log=lines),
            ):
                pass
            assert ("the log has accounts" in (tmp_path / "log").read_text()) is warned
    finally:
        assert run(dsn, "account", "delete", "shop").exit_code == 0


def test_accounts_are_made_and_allowed_on_the_command_line(dsn: str, log: headwater.Headwater) -> None:
    assert run(dsn, "account", "create", "shop", "--password", "secret").exit_code == 0
    assert run(dsn, "account", "allow", "shop", "write", "topic", "orders*").exit_code == 0
    assert run(dsn, "account", "allow", "shop", "read", "consumer", "shop").exit_code == 0
    listed = json.loads(run(dsn, "account", "list", "--json").stdout)
    assert listed["accounts"] == [{"name": "shop", "administrator": False}]
    assert {(p["action"], p["name"], p["prefix"]) for p in listed["permissions"]} == {
        ("write", "orders", True),
        ("read", "shop", False),
    }
    assert "secret" not in repr(log.run(calls.find_account("shop")))
    assert run(dsn, "account", "disallow", "shop", "write", "topic", "orders*").exit_code == 0
    assert run(dsn, "account", "disallow", "shop", "write", "topic", "orders*").exit_code == 4
    assert run(dsn, "account", "allow", "shop", "fly", "topic").exit_code == 2
    assert run(dsn, "account", "create", "*", "--password", "x").exit_code == 3
    assert run(dsn, "account", "delete", "shop").exit_code == 0
    assert run(dsn, "account", "delete", "shop").exit_code == 4
    assert json.loads(run(dsn, "account", "list", "--json").stdout) == {"accounts": [], "permissions": []}


def test_all_brokers_tell_of_the_same_brokers_from_the_first_moment(dsn: str) -> None:
    with broker_process(dsn, "--processes", "3") as started:
        for address in started.addresses:
            raw = Raw(BrokerProcess(started.process, [address]))
            told = raw.ask(ApiKey.METADATA, 12, {"topics": []}).brokers
            raw.socket.close()
            assert {f"{one.host}:{one.port}" for one in told} == set(started.addresses)


def test_what_is_produced_is_counted(dsn: str, log: headwater.Headwater) -> None:
    topic = log.create_topic("counted", kind="sequenced", partitions=2).name
    with serve_process("--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0", dsn=dsn) as started:
        producer = Producer({"bootstrap.servers": ",".join(started.told["kafka"]), "log_level": 0})
        for number in range(5):
            producer.produce(topic, b"x", partition=number % 2)
        assert producer.flush(PATIENCE_SECONDS) == 0
        page = httpx.get(f"{started.told['http']}/metrics", timeout=PATIENCE_SECONDS).text
    assert 'headwater_published_events_total{topic="counted"} 5' in page
