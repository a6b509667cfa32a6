"""Settings of topics and brokers under their Kafka names: current values, and how changes map to the log. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from headwater.calls.kafka import KafkaTopic

# config_source and config_type of DescribeConfigs.
DYNAMIC_TOPIC: Final = 1
STATIC_BROKER: Final = 4
DEFAULT: Final = 5
BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 1, 2, 3, 5, 6, 7

_SET, _DELETE, _APPEND, _SUBTRACT = 0, 1, 2, 3
_MAX_RETENTION_MS: Final = 1000 * 86_400_000 * 365
_MAX_VALUE_CHARACTERS: Final = 10_000
_NEVER: Final = str(2**63 - 1)


class InvalidConfig(ValueError):
    """An unknown setting, or an invalid value."""


class TopicConfigChange(NamedTuple):
    """Changes to the settings of a topic. None leaves a setting unchanged."""

    retention: timedelta | None = None
    keep_forever: bool = False
    max_payload_bytes: int | None = None
    timestamp_type: str | None = None
    compression_type: str | None = None
    # cleanup.policy
    compacted: bool | None = None
    deletes: bool | None = None
    tombstones_kept: timedelta | None = None
    # -1: no limit.
    retention_bytes: int | None = None
    # "key" or "value" -> the changed ones of subject, framed and strategy.
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    # Settings without effect; None resets to the default.
    settings: Mapping[str, str | None] | None = None


class _Config(NamedTuple):
    kind: int
    default: str
    documentation: str
    # Stored and returned for tools that set it, but without effect.
    no_effect: bool = False
    # Minimum of a number without effect.
    minimum: int = 0


STRATEGIES: Final = "io.confluent.kafka.serializers.subject."
# Setting -> "key" or "value", and the field that it sets.
SCHEMA_CONFIGS: Final = {
    name.format(part=part): (part, field)
    for part in ("key", "value")
    for name, field in (
        ("confluent.{part}.schema.validation", "framed"),
        ("confluent.{part}.subject.name.strategy", "strategy"),
        ("headwater.{part}.schema", "subject"),
    )
}
_SCHEMA_KINDS: Final = {
    "framed": _Config(
        BOOLEAN, "false", "Reject payloads without the id of a schema that is registered under their subject."
    ),
    "strategy": _Config(
        STRING,
        f"{STRATEGIES}TopicNameStrategy",
        "How the subject is determined if headwater.key.schema or headwater.value.schema is not set.",
    ),
    "subject": _Config(
        STRING, "", "The subject whose schema payloads must match, with or without a schema id. Empty: no validation."
    ),
}

# Why settings have no effect -> name, kind, default and minimum value.
_WITHOUT_EFFECT: Final[Mapping[str, tuple[tuple[str, int, str, int], ...]]] = {
    "Segments of the log cannot be configured per topic.": (
        ("file.delete.delay.ms", LONG, "60000", 0),
        ("index.interval.bytes", INT, "4096", 0),
        ("preallocate", BOOLEAN, "false", 0),
        ("segment.bytes", INT, "1073741824", 14),
        ("segment.index.bytes", INT, "10485760", 4),
        ("segment.jitter.ms", LONG, "0", 0),
        ("segment.ms", LONG, "604800000", 1),
    ),
    "Acknowledged records are committed in Postgres.": (
        ("flush.messages", LONG, _NEVER, 1),
        ("flush.ms", LONG, _NEVER, 0),
    ),
    "Replication is done by Postgres; brokers are stateless.": (
        ("follower.replication.throttled.replicas", LIST, "", 0),
        ("leader.replication.throttled.replicas", LIST, "", 0),
        ("min.insync.replicas", INT, "1", 1),
        ("unclean.leader.election.enable", BOOLEAN, "false", 0),
    ),
    "New records are compacted within seconds.": (
        ("max.compaction.lag.ms", LONG, _NEVER, 1),
        ("min.cleanable.dirty.ratio", DOUBLE, "0.5", 0),
        ("min.compaction.lag.ms", LONG, "0", 0),
    ),
    "Any producer timestamp is accepted.": (
        ("message.timestamp.after.max.ms", LONG, "3600000", 0),
        ("message.timestamp.before.max.ms", LONG, _NEVER, 0),
    ),
    "Compression levels cannot be configured.": (
        ("compression.gzip.level", INT, "-1", -1),
        ("compression.lz4.level", INT, "9", 1),
        ("compression.zstd.level", INT, "3", -131072),
    ),
    "Tiered storage is not supported; see archives.": (
        ("local.retention.bytes", LONG, "-2", -2),
        ("local.retention.ms", LONG, "-2", -2),
        ("remote.log.copy.disable", BOOLEAN, "false", 0),
        ("remote.log.delete.on.disable", BOOLEAN, "false", 0),
        ("remote.storage.enable", BOOLEAN, "false", 0),
    ),
}

TOPIC_CONFIGS: Final[Mapping[str, _Config]] = {
    "cleanup.policy": _Config(
        LIST, "delete", "delete (by age or size), compact (keep the latest record of each key), or both."
    ),
    "compression.type": _Config(STRING, "producer", "Compression of fetched records."),
    "delete.retention.ms": _Config(LONG, "86400000", "How long tombstones are kept in a compacted topic."),
    "max.message.bytes": _Config(INT, "1048576", "Maximum size of a batch, and of an uncompressed value."),
    "message.timestamp.type": _Config(
        STRING, "CreateTime", "CreateTime (set by the producer) or LogAppendTime (set by the log)."
    ),
    "retention.bytes": _Config(LONG, "-1", "Maximum size of a partition; older records are deleted. -1: no limit."),
    "retention.ms": _Config(LONG, "-1", "How long records are kept; -1: forever."),
    **{name: _SCHEMA_KINDS[field] for name, (_, field) in SCHEMA_CONFIGS.items()},
    **{
        name: _Config(kind, default, why, no_effect=True, minimum=minimum)
        for why, those in _WITHOUT_EFFECT.items()
        for name, kind, default, minimum in those
    },
}


def topic_values(topic: KafkaTopic) -> dict[str, str]:
    """All settings of a topic with their current values."""
    values = {name: config.default for name, config in TOPIC_CONFIGS.items()}
    values["max.message.bytes"] = str(topic.max_payload_bytes)
    values["message.timestamp.type"] = topic.timestamp_type
    values["compression.type"] = topic.compression_type
    values["delete.retention.ms"] = str(round(topic.tombstones_kept.total_seconds() * 1000))
    if topic.compacted:
        values["cleanup.policy"] = "compact,delete" if topic.deletes else "compact"
    if topic.retention_bytes is not None:
        values["retention.bytes"] = str(topic.retention_bytes)
    if topic.retention is not None:
        values["retention.ms"] = str(round(topic.retention.total_seconds() * 1000))
    for part, (subject, framed, strategy) in (topic.schemas or {}).items():
        values[f"confluent.{part}.schema.validation"] = str(framed).lower()
        values[f"confluent.{part}.subject.name.strategy"] = STRATEGIES + strategy
        values[f"headwater.{part}.schema"] = subject or ""
    values.update({name: value for name, value in topic.settings.items() if name in TOPIC_CONFIGS})
    return values


def parse_configs(values: Mapping[str, str | None]) -> TopicConfigChange:
    """Parse settings to a change of a topic; None resets a setting to its default."""
    change = TopicConfigChange()
    for name, given in values.items():
        if name not in TOPIC_CONFIGS:
            raise InvalidConfig(f"unknown topic setting {name}: expected one of {', '.join(TOPIC_CONFIGS)}")
        config = TOPIC_CONFIGS[name]
        value = config.default if given is None else given.strip()
        if config.no_effect:
            _check_value(name, config, value)
            change = change._replace(settings={**(change.settings or {}), name: None if given is None else value})
        elif name == "retention.ms":
            kept_ms = _number(name, value, minimum=-1)
            forever = kept_ms == -1 or kept_ms > _MAX_RETENTION_MS
            change = change._replace(
                retention=None if forever else timedelta(milliseconds=max(kept_ms, 1)), keep_forever=forever
            )
        elif name == "retention.bytes":
            change = change._replace(retention_bytes=_number(name, value, minimum=-1))
        elif name == "cleanup.policy":
            policies = {policy.strip() for policy in value.split(",")}
            if not policies or not policies <= {"compact", "delete"}:
                raise InvalidConfig(f"invalid {name} {value!r}: expected delete, compact or compact,delete")
            change = change._replace(compacted="compact" in policies, deletes="delete" in policies)
        elif name == "delete.retention.ms":
            kept_ms = min(_number(name, value, minimum=0), _MAX_RETENTION_MS)
            change = change._replace(tombstones_kept=timedelta(milliseconds=kept_ms))
        elif name == "max.message.bytes":
            change = change._replace(max_payload_bytes=_number(name, value, minimum=1))
        elif name == "message.timestamp.type":
            change = change._replace(timestamp_type=_one_of(name, value, ("CreateTime", "LogAppendTime")))
        elif name == "compression.type":
            known = ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")
            change = change._replace(compression_type=_one_of(name, value, known))
        elif name in SCHEMA_CONFIGS:
            part, field = SCHEMA_CONFIGS[name]
            known_parts = dict(change.schemas or {})
            known_parts[part] = {**known_parts.get(part, {}), field: _schema_value(name, field, value)}
            change = change._replace(schemas=known_parts)
    return change


def apply_operation(values: Mapping[str, str], name: str, operation: int, value: str | None) -> str | None:
    """The value of a setting after an incremental change; None: its default."""
    if operation == _SET:
        return value
    if operation == _DELETE:
        return None
    if name not in TOPIC_CONFIGS or TOPIC_CONFIGS[name].kind != LIST or operation not in (_APPEND, _SUBTRACT):
        raise InvalidConfig(f"{name} is not a list: APPEND and SUBTRACT are not possible")
    now = [part for part in values[name].split(",") if part]
    given = [part.strip() for part in (value or "").split(",") if part.strip()]
    if operation == _APPEND:
        return ",".join([*now, *(part for part in given if part not in now)])
    return ",".join(part for part in now if part not in given)


def describe_topic(values: Mapping[str, str], wanted: list[str] | None) -> list[dict[str, Any]]:
    """Settings of a topic for DescribeConfigs; `wanted`: only these."""
    return [
        {
            "name": name,
            "value": value,
            "read_only": False,
            "config_source": DEFAULT if value == TOPIC_CONFIGS[name].default else DYNAMIC_TOPIC,
            "is_default": value == TOPIC_CONFIGS[name].default,
            "is_sensitive": False,
            "synonyms": (),
            "config_type": TOPIC_CONFIGS[name].kind,
            "documentation": TOPIC_CONFIGS[name].documentation,
        }
        for name, value in values.items()
        if wanted is None or name in wanted
    ]


def describe_broker(values: Mapping[str, str], wanted: list[str] | None) -> list[dict[str, Any]]:
    """Settings of a broker for DescribeConfigs. They are fixed when it starts, so all are read-only."""
    return [
        {
            "name": name,
            "value": value,
            "read_only": True,
            "config_source": STATIC_BROKER,
            "is_default": False,
            "is_sensitive": False,
            "synonyms": (),
            "config_type": STRING,
        }
        for name, value in values.items()
        if wanted is None or name in wanted
    ]


def _schema_value(name: str, field: str, value: str) -> str | bool:
    if field == "framed":
        return _one_of(name, value.lower(), ("true", "false")) == "true"
    if field == "strategy":
        # Accept the full Java class name and the short name.
        known = ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")
        return _one_of(name, value.rpartition(".")[2], known)
    return value


def _check_value(name: str, config: _Config, value: str) -> None:
    if config.kind == BOOLEAN:
        _one_of(name, value.lower(), ("false",) if name == "remote.storage.enable" else ("true", "false"))
    elif config.kind == DOUBLE:
        try:
            fits = 0 <= float(value) <= 1
        except ValueError:
            fits = False
        if not fits:
            raise InvalidConfig(f"invalid {name} {value!r}: expected a number from 0 to 1")
    elif config.kind in (INT, LONG):
        number = _number(name, value, minimum=config.minimum)
        if config.kind == INT and number >= 2**31:
            raise InvalidConfig(f"invalid {name} {value}: expected up to {2**31 - 1}")
    elif len(value) > _MAX_VALUE_CHARACTERS:
        raise InvalidConfig(f"invalid {name}: expected up to {_MAX_VALUE_CHARACTERS} characters")


def _number(name: str, value: str, *, minimum: int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise InvalidConfig(f"invalid {name} {value!r}: expected a number") from None
    if not minimum <= number < 2**63:
        raise InvalidConfig(f"invalid {name} {value}: expected {minimum} or more")
    return number


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise InvalidConfig(f"invalid {name} {value!r}: expected one of {', '.join(known)}")
    return value
