"""Does a client have to say who it is, and may it do then what its account may, and nothing else?"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import BrokerProcess, broker_process

import headwater
from headwater.access import scram
from headwater.access.permissions import Permission
from headwater.calls import access as calls
from patience import PATIENCE_SECONDS

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import (  # noqa: E402
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (  # noqa: E402
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)


@pytest.fixture(scope="module")
def guarded(dsn: str) -> Iterator[BrokerProcess]:
    """A broker that asks who comes; with an administrator, a clerk and a porter who may do a few things, and topics."""
    with headwater.connect(dsn) as log:
        for name, administrator in (("root", True), ("clerk", False), ("porter", False)):
            kept = scram.verifiers(f"{name}'s", os.urandom(16), 4096)
            log.run(calls.set_account(name, kept, administrator=administrator))
        for topic in ("open-desk", "vault", "cellar"):
            log.create_topic(topic, kind="sequenced")
        for permission in (
            Permission("clerk", "write", "topic", "open-", prefix=True),
            Permission("clerk", "read", "topic", "open-desk"),
            Permission("clerk", "describe", "topic", "vault"),
            Permission("clerk", "read", "consumer", "clerks"),
            Permission("clerk", "write", "transaction", "till-", prefix=True),
            Permission("porter", "read", "topic", "cellar"),
            Permission("porter", "all", "consumer", "porters"),
            Permission("clerk", "read", "consumer", "porters"),
        ):
            log.run(calls.allow(permission))
    with broker_process(dsn, "--authenticate") as started:
        yield started


def config(broker: BrokerProcess, name: str, password: str | None = None, mechanism: str = "SCRAM-SHA-256") -> Any:
    return {
        "bootstrap.servers": broker.bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": name,
        "sasl.password": password or f"{name}'s",
        "log_level": 0,
    }


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_librdkafka_comes_in_with_every_mechanism(guarded: BrokerProcess, mechanism: str) -> None:
    topics = AdminClient(config(guarded, "root", mechanism=mechanism)).list_topics(timeout=PATIENCE_SECONDS).topics
    assert {"open-desk", "vault"} <= set(topics)


def test_other_clients_come_in_too(guarded: BrokerProcess) -> None:
    kafka = pytest.importorskip("kafka")
    aiokafka = pytest.importorskip("aiokafka")
    settings = {
        "bootstrap_servers": guarded.bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "clerk",
        "sasl_plain_password": "clerk's",
    }
    producer = kafka.KafkaProducer(**settings)
    assert producer.send("open-desk", b"kp").get(PATIENCE_SECONDS).offset >= 0
    producer.close()

    async def send() -> int:
        producer = aiokafka.AIOKafkaProducer(**settings)
        await producer.start()
        try:
            return int((await producer.send_and_wait("open-desk", b"aio")).offset)
        finally:
            await producer.stop()

    assert asyncio.run(send()) >= 0


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
@pytest.mark.parametrize("name", ["root", "nobody"])
def test_a_wrong_password_or_name_does_not_come_in(guarded: BrokerProcess, name: str, mechanism: str) -> None:
    errors: list[Any] = []
    admin = AdminClient({**config(guarded, name, "wrong", mechanism), "error_cb": errors.append})
    deadline = time.monotonic() + PATIENCE_SECONDS
    while KafkaError._AUTHENTICATION not in {error.code() for error in errors}:
        assert time.monotonic() < deadline
        with pytest.raises(KafkaException):
            admin.list_topics(timeout=0.7)
        admin.poll(0)


def test_kafkas_tools_give_accounts_their_passwords_one_mechanism_at_a_time(
    guarded: BrokerProcess, log: headwater.Headwater
) -> None:
    admin = AdminClient(config(guarded, "root"))

    def alter(*changes: Any) -> Any:
        done = admin.alter_user_scram_credentials(list(changes))
        return [future.result(PATIENCE_SECONDS) for future in done.values()]

    def enters(password: str, mechanism: str) -> bool:
        errors: list[Any] = []
        client = AdminClient({**config(guarded, "temp", password, mechanism), "error_cb": errors.append})
        deadline = time.monotonic() + PATIENCE_SECONDS
        while KafkaError._AUTHENTICATION not in {error.code() for error in errors}:
            assert time.monotonic() < deadline
            try:
                client.list_topics(timeout=0.7)
            except KafkaException:
                # Refused, or a machine that takes its time: the client tells which.
                client.poll(0)
            else:
                return True
        return False

    def infos() -> list[tuple[Any, int]]:
        found = admin.describe_user_scram_credentials(["temp"])["temp"].result(PATIENCE_SECONDS)
        return [(one.mechanism, one.iterations) for one in found.scram_credential_infos]

    sha_256, sha_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
    alter(UserScramCredentialUpsertion("temp", ScramCredentialInfo(sha_256, 4096), b"first", b"salt" * 4))
    assert enters("first", "SCRAM-SHA-256")
    assert enters("first", "PLAIN")
    assert not enters("first", "SCRAM-SHA-512")
    alter(UserScramCredentialUpsertion("temp", ScramCredentialInfo(sha_512, 8192), b"second"))
    assert enters("second", "SCRAM-SHA-512")
    assert not enters("second", "SCRAM-SHA-256")
    assert infos() == [(sha_256, 4096), (sha_512, 8192)]
    alter(UserScramCredentialDeletion("temp", sha_256))
    assert infos() == [(sha_512, 8192)]
    assert enters("second", "PLAIN")
    assert not enters("first", "SCRAM-SHA-256")
    alter(UserScramCredentialDeletion("temp", sha_512))
    for ask, code in (
        (infos, KafkaError.RESOURCE_NOT_FOUND),
        (lambda: alter(UserScramCredentialDeletion("temp", sha_512)), KafkaError.RESOURCE_NOT_FOUND),
        (
            lambda: alter(UserScramCredentialUpsertion("temp", ScramCredentialInfo(sha_256, 100), b"p")),
            KafkaError.UNACCEPTABLE_CREDENTIAL,
        ),
    ):
        with pytest.raises(KafkaException) as refused:
            ask()
        assert refused.value.args[0].code() == code
    assert not enters("second", "PLAIN")
    everybody = admin.describe_user_scram_credentials().result(PATIENCE_SECONDS)
    assert {"root", "clerk"} <= set(everybody)
    clerk = AdminClient(config(guarded, "clerk"))
    forbidden = clerk.alter_user_scram_credentials([UserScramCredentialDeletion("root", sha_256)])["root"]
    with pytest.raises(KafkaException) as denied:
        forbidden.result(PATIENCE_SECONDS)
    assert denied.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED


def test_who_says_nothing_does_not_come_in(guarded: BrokerProcess) -> None:
    with pytest.raises(KafkaException):
        AdminClient({"bootstrap.servers": guarded.bootstrap, "log_level": 0}).list_topics(timeout=0.7)


def delivered(settings: Any, topic: str) -> Any:
    codes: list[Any] = []
    producer = Producer({**settings, "message.timeout.ms": PATIENCE_SECONDS * 1000})
    producer.produce(topic, b"x", on_delivery=lambda error, message: codes.append(error and error.code()))
    producer.flush(PATIENCE_SECONDS)
    return codes[0]


def test_an_account_may_do_what_it_is_allowed_and_nothing_else(guarded: BrokerProcess) -> None:
    clerk = config(guarded, "clerk")
    admin = AdminClient(clerk)
    assert set(admin.list_topics(timeout=PATIENCE_SECONDS).topics) == {"open-desk", "vault"}
    assert delivered(clerk, "open-desk") is None
    assert delivered(clerk, "vault") == delivered(clerk, "cellar") == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert delivered(config(guarded, "root"), "vault") is None
    for topic, group, code in (
        ("vault", "clerks", KafkaError.TOPIC_AUTHORIZATION_FAILED),
        ("cellar", "clerks", KafkaError.TOPIC_AUTHORIZATION_FAILED),
        ("open-desk", "strangers", KafkaError.GROUP_AUTHORIZATION_FAILED),
        ("open-desk", "clerks", None),
    ):
        consumer = Consumer({**clerk, "group.id": group, "auto.offset.reset": "earliest"})
        consumer.subscribe([topic])
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert (message.error() and message.error().code()) == code
        consumer.close()
    direct = Consumer({**clerk, "group.id": "clerks"})
    direct.assign([TopicPartition("vault", 0, 0)])
    message = direct.poll(PATIENCE_SECONDS)
    assert message is not None
    assert message.error().code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    direct.close()
    for future in (
        admin.create_topics([NewTopic("mine", 1, 1)])["mine"],
        admin.delete_topics(["open-desk"])["open-desk"],
    ):
        with pytest.raises(KafkaException) as refused:
            future.result(PATIENCE_SECONDS)
        assert refused.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    for name, allowed in (("till-1", True), ("other", False)):
        producer = Producer({**clerk, "transactional.id": name})
        if allowed:
            producer.init_transactions(PATIENCE_SECONDS)
        else:
            with pytest.raises(KafkaException) as refused:
                producer.init_transactions(PATIENCE_SECONDS)
            assert refused.value.args[0].code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


def test_members_with_different_rights_share_a_group_that_the_coordinator_assigns_for(guarded: BrokerProcess) -> None:
    for topic in ("open-desk", "cellar"):
        assert delivered(config(guarded, "root"), topic) is None
    common = {"group.id": "porters", "group.protocol": "consumer", "auto.offset.reset": "earliest"}
    clerk, porter = (Consumer({**config(guarded, name), **common}) for name in ("clerk", "porter"))
    clerk.subscribe(["open-desk"])
    porter.subscribe(["cellar"])
    found: dict[str, Any] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < 2:
        assert time.monotonic() < deadline, found
        for consumer in (clerk, porter):
            message = consumer.poll(0.1)
            if message is not None:
                assert message.error() is None
                found[message.topic()] = consumer
    assert found == {"open-desk": clerk, "cellar": porter}
    admin = AdminClient(config(guarded, "root"))
    # And it comes to rest.
    state = None
    while state != confluent.ConsumerGroupState.STABLE:
        assert time.monotonic() < deadline, state
        clerk.poll(0.1)
        porter.poll(0.1)
        described = admin.describe_consumer_groups(["porters"])["porters"].result(PATIENCE_SECONDS)
        assert len(described.members) == 2
        state = described.state
    for consumer in (clerk, porter):
        consumer.close()


def test_who_subscribes_to_a_topic_that_it_may_not_see_is_told_so(guarded: BrokerProcess) -> None:
    settings = {**config(guarded, "clerk"), "group.id": "clerks", "group.protocol": "consumer"}
    consumer = Consumer(settings)
    consumer.subscribe(["cellar"])
    message = consumer.poll(PATIENCE_SECONDS)
    assert message is not None
    assert message.error().code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    consumer.close()


def test_offsets_of_topics_that_an_account_may_not_see_are_neither_told_nor_deleted(guarded: BrokerProcess) -> None:
    root = AdminClient(config(guarded, "root"))
    topic_partitions = [TopicPartition(topic, 0, 7) for topic in ("open-desk", "cellar")]
    wanted = ConsumerGroupTopicPartitions("porters", topic_partitions)
    root.alter_consumer_group_offsets([wanted])["porters"].result(PATIENCE_SECONDS)

    def told(name: str, partitions: Any) -> dict[str, tuple[int, Any]]:
        asked = ConsumerGroupTopicPartitions("porters", partitions)
        admin = AdminClient(config(guarded, name))
        offsets = admin.list_consumer_group_offsets([asked])["porters"].result(PATIENCE_SECONDS).topic_partitions
        return {one.topic: (one.offset, one.error and one.error.code()) for one in offsets}

    everything = [TopicPartition(one.topic, 0) for one in topic_partitions]
    hidden = KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert told("root", everything) == told("root", None) == {"open-desk": (7, None), "cellar": (7, None)}
    assert told("porter", None) == {"cellar": (7, None)}
    assert told("porter", everything)["open-desk"] == (-1001, hidden)
    assert told("porter", everything)["cellar"] == (7, None)
    # One that is not there is hidden likewise.
    assert told("porter", [TopicPartition("nowhere", 0)]) == {"nowhere": (-1001, hidden)}

    kafka = pytest.importorskip("kafka")
    porter = kafka.KafkaAdminClient(
        bootstrap_servers=guarded.bootstrap,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_plain_username="porter",
        sasl_plain_password="porter's",
    )
    deleted = porter.delete_group_offsets("porters", [kafka.TopicPartition(one.topic, 0) for one in topic_partitions])
    porter.close()
    assert "TopicAuthorizationFailed" in str(deleted[kafka.TopicPartition("open-desk", 0)])
    assert told("root", None) == {"open-desk": (7, None)}


def test_permissions_are_given_seen_and_taken_as_acls(guarded: BrokerProcess) -> None:
    root = AdminClient(config(guarded, "root"))
    clerk = config(guarded, "clerk")
    binding = AclBinding(
        ResourceType.TOPIC, "vau", ResourcePatternType.PREFIXED, "User:clerk", "*", AclOperation.WRITE,
        AclPermissionType.ALLOW,
    )  # fmt: skip
    with pytest.raises(KafkaException):
        AdminClient(clerk).create_acls([binding])[binding].result(PATIENCE_SECONDS)
    root.create_acls([binding])[binding].result(PATIENCE_SECONDS)
    everything = AclBindingFilter(
        ResourceType.TOPIC, None, ResourcePatternType.ANY, "User:clerk", None, AclOperation.ANY, AclPermissionType.ANY
    )
    assert binding in root.describe_acls(everything).result(PATIENCE_SECONDS)
    assert delivered(clerk, "vault") is None
    exactly = AclBindingFilter(
        ResourceType.TOPIC, "vau", ResourcePatternType.PREFIXED, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    assert root.delete_acls([exactly])[exactly].result(PATIENCE_SECONDS) == [binding]
    assert delivered(clerk, "vault") == KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.mark.parametrize(
    ("kind", "name", "operation", "told"),
    [
        (ResourceType.TOPIC, "shelf", AclOperation.DESCRIBE_CONFIGS, AclOperation.DESCRIBE),
        (ResourceType.TOPIC, "shelf", AclOperation.ALTER_CONFIGS, AclOperation.ALTER),
        (ResourceType.BROKER, "kafka-cluster", AclOperation.IDEMPOTENT_WRITE, AclOperation.WRITE),
    ],
)
def test_finer_operations_of_acls_mean_those_that_there_are(
    guarded: BrokerProcess, kind: Any, name: str, operation: Any, told: Any
) -> None:
    root = AdminClient(config(guarded, "root"))
    binding = AclBinding(kind, name, ResourcePatternType.LITERAL, "User:temp", "*", operation, AclPermissionType.ALLOW)
    root.create_acls([binding])[binding].result(PATIENCE_SECONDS)
    for asked in (operation, told):
        those = AclBindingFilter(
            kind, name, ResourcePatternType.LITERAL, "User:temp", "*", asked, AclPermissionType.ALLOW
        )
        assert [one.operation for one in root.describe_acls(those).result(PATIENCE_SECONDS)] == [told]
    assert len(root.delete_acls([those])[those].result(PATIENCE_SECONDS)) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_connections_are_encrypted_where_a_certificate_is_given(dsn: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    with broker_process(dsn, "--tls-certificate", str(certificate), "--tls-key", str(key)) as encrypted:
        settings = {
            "bootstrap.servers": encrypted.bootstrap,
            "security.protocol": "SSL",
            "ssl.ca.location": str(certificate),
            "log_level": 0,
        }
        assert AdminClient(settings).list_topics(timeout=PATIENCE_SECONDS).brokers
        with pytest.raises(KafkaException):
            AdminClient({"bootstrap.servers": encrypted.bootstrap, "log_level": 0}).list_topics(timeout=0.7)
