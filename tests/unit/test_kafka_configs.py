"""Do settings of topics mean what Kafka means by them, and are those without effect kept as they were given?"""

from __future__ import annotations

from datetime import timedelta

import pytest

from headwater.calls.kafka import KafkaTopic
from headwater.servers.kafka.configs import (
    BOOLEAN,
    TOPIC_CONFIGS,
    InvalidConfig,
    apply_operation,
    describe_topic,
    parse_configs,
    topic_values,
)

TOPIC = KafkaTopic(
    1, "t", "sequenced", True, 1, None, 1_048_576, 65_536, "CreateTime", "producer", False, timedelta(days=1), None,
    None, True, {},
)  # fmt: skip
WITHOUT_EFFECT = {name: config for name, config in TOPIC_CONFIGS.items() if config.no_effect}


def test_what_kafkas_tools_often_set_is_taken_and_told() -> None:
    given = {
        "segment.bytes": "104857600",
        "segment.ms": "3600000",
        "min.insync.replicas": "2",
        "unclean.leader.election.enable": "true",
        "max.compaction.lag.ms": "9223372036854775807",
        "min.compaction.lag.ms": "60000",
        "message.timestamp.before.max.ms": "1000",
        "message.timestamp.after.max.ms": "1000",
        "flush.ms": "1000",
        "flush.messages": "1",
        "min.cleanable.dirty.ratio": "0.01",
        "file.delete.delay.ms": "0",
        "index.interval.bytes": "4096",
        "segment.index.bytes": "10485760",
        "segment.jitter.ms": "10",
        "preallocate": "true",
        "local.retention.ms": "-2",
        "local.retention.bytes": "1000",
        "remote.storage.enable": "false",
    }
    change = parse_configs(given)
    assert change.settings == given
    told = topic_values(TOPIC._replace(settings=given))
    assert {name: told[name] for name in given} == given
    sources = {one["name"]: one["is_default"] for one in describe_topic(told, None)}
    assert (sources["segment.ms"], sources["preallocate"], sources["local.retention.ms"]) == (False, False, True)
    # And forgotten again, one by one.
    assert parse_configs({"segment.ms": None}).settings == {"segment.ms": None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment.bytes", "13"),
        ("segment.bytes", "2147483648"),
        ("segment.ms", "a week"),
        ("min.insync.replicas", "0"),
        ("min.cleanable.dirty.ratio", "1.5"),
        ("min.cleanable.dirty.ratio", "half"),
        ("preallocate", "maybe"),
        ("remote.storage.enable", "true"),
        ("flush.ms", "9223372036854775808"),
        ("no.such.setting", "1"),
    ],
)
def test_what_kafka_would_refuse_is_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        parse_configs({name: value})


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_the_default_of_a_setting_without_effect_is_one_of_its_values(name: str) -> None:
    assert parse_configs({name: WITHOUT_EFFECT[name].default}).settings == {name: WITHOUT_EFFECT[name].default}
    assert WITHOUT_EFFECT[name].kind != BOOLEAN or WITHOUT_EFFECT[name].default in ("true", "false")


@pytest.mark.parametrize("policy", ["delete", "compact", "compact,delete"])
def test_the_policy_is_what_was_said_and_retention_does_not_change_it(policy: str) -> None:
    change = parse_configs({"cleanup.policy": policy})
    assert (change.compacted, change.deletes) == ("compact" in policy, "delete" in policy)
    assert (change.retention, change.keep_forever, change.retention_bytes) == (None, False, None)
    assert parse_configs({"retention.ms": "1000", "retention.bytes": "5"})._replace(
        retention=None, retention_bytes=None
    ) == parse_configs({})
    topic = TOPIC._replace(compacted=bool(change.compacted), deletes=bool(change.deletes), retention_bytes=5)
    assert topic_values(topic)["cleanup.policy"] == policy


def test_a_policy_is_added_to_a_list_and_taken_from_it() -> None:
    values = topic_values(TOPIC)
    assert apply_operation(values, "cleanup.policy", 2, "compact") == "delete,compact"
    assert apply_operation({**values, "cleanup.policy": "compact,delete"}, "cleanup.policy", 3, "delete") == "compact"
    assert apply_operation(values, "leader.replication.throttled.replicas", 2, "0:1") == "0:1"
