"""The settings of topics and brokers as Kafka names them: what they are now, and what a change to one means. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from headwater.calls.kafka import KafkaTopic

# Where a value comes from, and what kind of value it is, as DescribeConfigs says it.
DYNAMIC_TOPIC: Final = 1
STATIC_BROKER: Final = 4
DEFAULT: Final = 5
BOOLEAN, STRING, INT, LONG, LIST = 1, 2, 3, 5, 7

_SET, _DELETE, _APPEND, _SUBTRACT = 0, 1, 2, 3
_FOR_EVER_MS: Final = 1000 * 86_400_000 * 365


class BadConfig(ValueError):
    """A setting that does not exist, or a value that it cannot have."""


class Change(NamedTuple):
    """What changes of a topic. None leaves it as it is."""

    retention: timedelta | None = None
    keep_forever: bool = False
    max_payload_bytes: int | None = None
    timestamp_type: str | None = None
    compression_type: str | None = None
    compacted: bool | None = None
    tombstones_kept: timedelta | None = None
    # -1: no limit.
    retention_bytes: int | None = None
    # key or value -> subject, framed, strategy: what is named of them changes.
    schemas: Mapping[str, Mapping[str, Any]] | None = None


class _Config(NamedTuple):
    kind: int
    default: str
    documentation: str
    # Settings that have one value only are told, for clients that read them.
    fixed: bool = False


STRATEGIES: Final = "io.confluent.kafka.serializers.subject."
# Setting -> whether of keys or values, and which part of it.
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
    "framed": _Config(BOOLEAN, "false", "Only payloads that carry the id of a schema of their subject are taken."),
    "strategy": _Config(STRING, f"{STRATEGIES}TopicNameStrategy", "Which subject that is, if none is named."),
    "subject": _Config(STRING, "", "The subject whose schema payloads must fit, with or without an id. Empty: none."),
}

TOPIC_CONFIGS: Final[Mapping[str, _Config]] = {
    "cleanup.policy": _Config(LIST, "delete", "delete, compact or both: what goes when it is old or superseded."),
    "compression.type": _Config(STRING, "producer", "What fetched records are packed with."),
    "delete.retention.ms": _Config(LONG, "86400000", "How long the deletion of a key stays in a compacted topic."),
    "max.message.bytes": _Config(INT, "1048576", "The largest batch, and the largest value, that is taken."),
    "message.timestamp.type": _Config(STRING, "CreateTime", "Whose time a record has: the producer's or the log's."),
    "min.insync.replicas": _Config(INT, "1", "Postgres replicates; a broker has nothing to replicate.", fixed=True),
    "retention.bytes": _Config(LONG, "-1", "How large a partition may get before its oldest records go; -1: no limit."),
    "retention.ms": _Config(LONG, "-1", "How long records are kept; -1 keeps them for ever."),
    "segment.bytes": _Config(INT, "1073741824", "Told for clients; segments are the log's own.", fixed=True),
    **{name: _SCHEMA_KINDS[field] for name, (_, field) in SCHEMA_CONFIGS.items()},
}


def topic_values(topic: KafkaTopic) -> dict[str, str]:
    """Every setting of a topic with its value now."""
    values = {name: config.default for name, config in TOPIC_CONFIGS.items()}
    values["max.message.bytes"] = str(topic.max_payload_bytes)
    values["message.timestamp.type"] = topic.timestamp_type
    values["compression.type"] = topic.compression_type
    values["delete.retention.ms"] = str(round(topic.tombstones_kept.total_seconds() * 1000))
    if topic.compacted:
        deletes = topic.retention is not None or topic.retention_bytes is not None
        values["cleanup.policy"] = "compact,delete" if deletes else "compact"
    if topic.retention_bytes is not None:
        values["retention.bytes"] = str(topic.retention_bytes)
    if topic.retention is not None:
        values["retention.ms"] = str(round(topic.retention.total_seconds() * 1000))
    for part, (subject, framed, strategy) in (topic.schemas or {}).items():
        values[f"confluent.{part}.schema.validation"] = str(framed).lower()
        values[f"confluent.{part}.subject.name.strategy"] = STRATEGIES + strategy
        values[f"headwater.{part}.schema"] = subject or ""
    return values


def change_of(values: Mapping[str, str | None]) -> Change:
    """What these settings change; None gives a setting its default back."""
    change = Change()
    for name, given in values.items():
        if name not in TOPIC_CONFIGS:
            raise BadConfig(f"there is no topic setting {name}; there are {', '.join(TOPIC_CONFIGS)}")
        config = TOPIC_CONFIGS[name]
        value = config.default if given is None else given.strip()
        if config.fixed:
            if value != config.default:
                raise BadConfig(f"{name} can only be {config.default}. {config.documentation}")
        elif name == "retention.ms":
            kept_ms = _number(name, value, least=-1)
            forever = kept_ms == -1 or kept_ms > _FOR_EVER_MS
            change = change._replace(
                retention=None if forever else timedelta(milliseconds=max(kept_ms, 1)), keep_forever=forever
            )
        elif name == "retention.bytes":
            change = change._replace(retention_bytes=_number(name, value, least=-1))
        elif name == "cleanup.policy":
            policies = {policy.strip() for policy in value.split(",")}
            if not policies or not policies <= {"compact", "delete"}:
                raise BadConfig(f"{name} is delete, compact or compact,delete, not {value!r}")
            change = change._replace(compacted="compact" in policies)
        elif name == "delete.retention.ms":
            kept_ms = min(_number(name, value, least=0), _FOR_EVER_MS)
            change = change._replace(tombstones_kept=timedelta(milliseconds=kept_ms))
        elif name == "max.message.bytes":
            change = change._replace(max_payload_bytes=_number(name, value, least=1))
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
    if change.compacted and "delete" not in (values.get("cleanup.policy") or ""):
        # Only what is superseded goes, however old the rest is.
        change = change._replace(retention=None, keep_forever=True, retention_bytes=-1)
    return change


def after(values: Mapping[str, str], name: str, operation: int, value: str | None) -> str | None:
    """What a setting is after an incremental change; None: its default."""
    if operation == _SET:
        return value
    if operation == _DELETE:
        return None
    if name not in TOPIC_CONFIGS or TOPIC_CONFIGS[name].kind != LIST or operation not in (_APPEND, _SUBTRACT):
        raise BadConfig(f"{name} is not a list that one could add to or take from")
    now = values[name].split(",")
    given = [part.strip() for part in (value or "").split(",") if part.strip()]
    if operation == _APPEND:
        return ",".join([*now, *(part for part in given if part not in now)])
    return ",".join(part for part in now if part not in given)


def described(values: Mapping[str, str], wanted: list[str] | None) -> list[dict[str, Any]]:
    """The settings of a topic as DescribeConfigs tells them; `wanted`: only these."""
    return [
        {
            "name": name,
            "value": value,
            "read_only": TOPIC_CONFIGS[name].fixed,
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


def described_broker(values: Mapping[str, str], wanted: list[str] | None) -> list[dict[str, Any]]:
    """The settings of a broker: given at its start, so none can be changed from here."""
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
        # Clients name it by its class, people by its name.
        known = ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")
        return _one_of(name, value.rpartition(".")[2], known)
    return value


def _number(name: str, value: str, *, least: int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise BadConfig(f"{name} is a number, not {value!r}") from None
    if not least <= number < 2**63:
        raise BadConfig(f"{name} is {least} or more, not {value}")
    return number


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise BadConfig(f"{name} is one of {', '.join(known)}, not {value!r}")
    return value
