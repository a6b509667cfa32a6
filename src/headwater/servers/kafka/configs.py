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
BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 1, 2, 3, 5, 6, 7

_SET, _DELETE, _APPEND, _SUBTRACT = 0, 1, 2, 3
_FOR_EVER_MS: Final = 1000 * 86_400_000 * 365
_LONGEST_VALUE: Final = 10_000
_NEVER: Final = str(2**63 - 1)


class BadConfig(ValueError):
    """A setting that does not exist, or a value that it cannot have."""


class Change(NamedTuple):
    """What changes of a topic. None leaves it as it is."""

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
    # key or value -> subject, framed, strategy: what is named of them changes.
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    # What is only told; None: its default.
    settings: Mapping[str, str | None] | None = None


class _Config(NamedTuple):
    kind: int
    default: str
    documentation: str
    # For tools that set it or look for it: what was said is kept and told, and changes nothing.
    only_told: bool = False
    # Of a number that is only told.
    least: int = 0


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

# Why it changes nothing -> name, kind, default and least value.
_WITHOUT_EFFECT: Final[Mapping[str, tuple[tuple[str, int, str, int], ...]]] = {
    "Segments are the log's own.": (
        ("file.delete.delay.ms", LONG, "60000", 0),
        ("index.interval.bytes", INT, "4096", 0),
        ("preallocate", BOOLEAN, "false", 0),
        ("segment.bytes", INT, "1073741824", 14),
        ("segment.index.bytes", INT, "10485760", 4),
        ("segment.jitter.ms", LONG, "0", 0),
        ("segment.ms", LONG, "604800000", 1),
    ),
    "What is acknowledged is committed by Postgres.": (
        ("flush.messages", LONG, _NEVER, 1),
        ("flush.ms", LONG, _NEVER, 0),
    ),
    "Postgres replicates; a broker has nothing to replicate.": (
        ("follower.replication.throttled.replicas", LIST, "", 0),
        ("leader.replication.throttled.replicas", LIST, "", 0),
        ("min.insync.replicas", INT, "1", 1),
        ("unclean.leader.election.enable", BOOLEAN, "false", 0),
    ),
    "Whatever is new is compacted soon.": (
        ("max.compaction.lag.ms", LONG, _NEVER, 1),
        ("min.cleanable.dirty.ratio", DOUBLE, "0.5", 0),
        ("min.compaction.lag.ms", LONG, "0", 0),
    ),
    "Any time that a producer gives is taken.": (
        ("message.timestamp.after.max.ms", LONG, "3600000", 0),
        ("message.timestamp.before.max.ms", LONG, _NEVER, 0),
    ),
    "A codec packs as it does.": (
        ("compression.gzip.level", INT, "-1", -1),
        ("compression.lz4.level", INT, "9", 1),
        ("compression.zstd.level", INT, "3", -131072),
    ),
    "There is no second place for old segments; an archive is another matter.": (
        ("local.retention.bytes", LONG, "-2", -2),
        ("local.retention.ms", LONG, "-2", -2),
        ("remote.log.copy.disable", BOOLEAN, "false", 0),
        ("remote.log.delete.on.disable", BOOLEAN, "false", 0),
        ("remote.storage.enable", BOOLEAN, "false", 0),
    ),
}

TOPIC_CONFIGS: Final[Mapping[str, _Config]] = {
    "cleanup.policy": _Config(LIST, "delete", "delete, compact or both: what goes when it is old or superseded."),
    "compression.type": _Config(STRING, "producer", "What fetched records are packed with."),
    "delete.retention.ms": _Config(LONG, "86400000", "How long the deletion of a key stays in a compacted topic."),
    "max.message.bytes": _Config(INT, "1048576", "The largest batch, and the largest value, that is taken."),
    "message.timestamp.type": _Config(STRING, "CreateTime", "Whose time a record has: the producer's or the log's."),
    "retention.bytes": _Config(LONG, "-1", "How large a partition may get before its oldest records go; -1: no limit."),
    "retention.ms": _Config(LONG, "-1", "How long records are kept; -1 keeps them for ever."),
    **{name: _SCHEMA_KINDS[field] for name, (_, field) in SCHEMA_CONFIGS.items()},
    **{
        name: _Config(kind, default, why, only_told=True, least=least)
        for why, those in _WITHOUT_EFFECT.items()
        for name, kind, default, least in those
    },
}


def topic_values(topic: KafkaTopic) -> dict[str, str]:
    """Every setting of a topic with its value now."""
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


def change_of(values: Mapping[str, str | None]) -> Change:
    """What these settings change; None gives a setting its default back."""
    change = Change()
    for name, given in values.items():
        if name not in TOPIC_CONFIGS:
            raise BadConfig(f"there is no topic setting {name}; there are {', '.join(TOPIC_CONFIGS)}")
        config = TOPIC_CONFIGS[name]
        value = config.default if given is None else given.strip()
        if config.only_told:
            _check_form(name, config, value)
            change = change._replace(settings={**(change.settings or {}), name: None if given is None else value})
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
            change = change._replace(compacted="compact" in policies, deletes="delete" in policies)
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
    return change


def after(values: Mapping[str, str], name: str, operation: int, value: str | None) -> str | None:
    """What a setting is after an incremental change; None: its default."""
    if operation == _SET:
        return value
    if operation == _DELETE:
        return None
    if name not in TOPIC_CONFIGS or TOPIC_CONFIGS[name].kind != LIST or operation not in (_APPEND, _SUBTRACT):
        raise BadConfig(f"{name} is not a list that one could add to or take from")
    now = [part for part in values[name].split(",") if part]
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


def _check_form(name: str, config: _Config, value: str) -> None:
    if config.kind == BOOLEAN:
        _one_of(name, value.lower(), ("false",) if name == "remote.storage.enable" else ("true", "false"))
    elif config.kind == DOUBLE:
        try:
            fits = 0 <= float(value) <= 1
        except ValueError:
            fits = False
        if not fits:
            raise BadConfig(f"{name} is a number from 0 to 1, not {value!r}")
    elif config.kind in (INT, LONG):
        number = _number(name, value, least=config.least)
        if config.kind == INT and number >= 2**31:
            raise BadConfig(f"{name} is up to {2**31 - 1}, not {value}")
    elif len(value) > _LONGEST_VALUE:
        raise BadConfig(f"{name} is up to {_LONGEST_VALUE} characters")


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
