"""Parses the YAML file that declares pipelines, and reports all problems at once. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import yaml

from headwater.errors import InvalidRequest, PipelineNotFound
from headwater.spark.pipelines.batch import ON_EPOCH_CHANGE, OnEpochChange, Source

SOURCES: Final[Mapping[str, frozenset[str]]] = {
    "log": frozenset({"topics", "after", "since", "from_end", "skip_expired", "max_events", "max_bytes", "partitions"}),
    "changes": frozenset({"tables", "slot", "publication", "max_bytes", "snapshot"}),
}
SINKS: Final = ("topic", "nats", "lake", "table")
# These sinks are in the same database as the log, so they lose the same events in a failover or restore.
IN_DATABASE: Final = frozenset({"topic", "table"})
FILE_KEYS: Final = frozenset({"postgres", "nats", "checkpoints", "spark", "pipelines"})
PIPELINE_KEYS: Final = frozenset({"from", "transform", "to", "every_seconds", "on_epoch_change"})
TRANSFORMS: Final = ("sql", "python")
TRANSFORM_KEYS: Final = frozenset({*TRANSFORMS, "mode"})

DEFAULT_EVERY_SECONDS: Final = 1.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """A declared sink: its kind, and its options from the file."""

    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A declared pipeline."""

    name: str
    source: Source
    source_options: Mapping[str, Any]
    transform: Mapping[str, Any] | None
    sinks: tuple[SinkSpec, ...]
    every_seconds: float
    on_epoch_change: OnEpochChange = "stop"
    """What to do when the log has lost events that were read."""

    @property
    def definition(self) -> dict[str, Any]:
        """The declaration without addresses, which may contain passwords."""
        return {
            "from": {self.source: dict(self.source_options)},
            "transform": None if self.transform is None else dict(self.transform),
            "to": [
                {sink.kind: {name: value for name, value in sink.options.items() if name not in ("url", "storage")}}
                for sink in self.sinks
            ],
            "every_seconds": self.every_seconds,
            "on_epoch_change": self.on_epoch_change,
        }

    @property
    def slot(self) -> str:
        """The replication slot of a pipeline that captures changes."""
        return str(self.source_options.get("slot") or re.sub(r"[^a-z0-9_]", "_", self.name.lower()))


@dataclass(frozen=True, slots=True)
class PipelineFile:
    """The contents of a pipeline file."""

    postgres: str | None
    nats: str | None
    checkpoints: str
    spark: Mapping[str, str]
    pipelines: tuple[PipelineSpec, ...]

    def chosen(self, names: list[str]) -> tuple[PipelineSpec, ...]:
        """The pipelines with these names; all if there are no names."""
        known = {spec.name: spec for spec in self.pipelines}
        missing = [name for name in names if name not in known]
        if missing:
            raise PipelineNotFound(
                f"the file does not declare the pipeline {', '.join(missing)}", hint=f"It declares {', '.join(known)}."
            )
        return tuple(known[name] for name in names) if names else self.pipelines


def parse(text: str, environment: Mapping[str, str]) -> PipelineFile:
    """Parse a file. `${NAME}` is replaced by the environment variable NAME."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"the file is not valid YAML: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequest("the file has no declarations", hint="Write a mapping with the key pipelines.")
    problems: list[str] = []
    document = _filled(document, environment, "", problems)
    problems += _unknown(document, FILE_KEYS, "")
    for name in ("postgres", "nats", "checkpoints"):
        if not isinstance(document.get(name, ""), str):
            problems.append(f"{name}: expected a text")
    settings = document.get("spark") or {}
    if not isinstance(settings, dict):
        problems.append("spark: expected a mapping of settings")
        settings = {}
    declared = document.get("pipelines")
    specs: list[PipelineSpec] = []
    if not isinstance(declared, dict) or not declared:
        problems.append("pipelines: expected a mapping of at least one pipeline")
    else:
        for name, body in declared.items():
            spec = _pipeline(str(name), body, problems)
            if spec is not None:
                specs.append(spec)
    problems += _shared_slots(specs)
    if problems:
        raise InvalidRequest("; ".join(problems), detail={"problems": problems})
    return PipelineFile(
        postgres=document.get("postgres"),
        nats=document.get("nats"),
        checkpoints=document.get("checkpoints", "checkpoints"),
        spark={str(key): _spark_value(value) for key, value in settings.items()},
        pipelines=tuple(specs),
    )


def _pipeline(name: str, body: Any, problems: list[str]) -> PipelineSpec | None:
    where = f"pipelines.{name}"
    before = len(problems)
    if not _NAME.fullmatch(name):
        problems.append(f"{where}: invalid name: expected 1 to 100 letters, digits, dots, dashes or underscores")
    if not isinstance(body, dict):
        problems.append(f"{where}: expected a mapping with from and to")
        return None
    problems += _unknown(body, PIPELINE_KEYS, where)
    source, source_options = _source(body.get("from"), f"{where}.from", problems)
    sinks = tuple(_sinks(body.get("to"), f"{where}.to", problems))
    transform = body.get("transform")
    if transform is not None:
        _check_transform(transform, f"{where}.transform", problems)
        if any(sink.options.get("archive") for sink in sinks):
            # Retention would treat events that the transform filtered out as archived.
            problems.append(f"{where}: an archive cannot be combined with a transform; remove one of them")
    every = body.get("every_seconds", DEFAULT_EVERY_SECONDS)
    if isinstance(every, bool) or not isinstance(every, int | float) or not 0 <= every <= 86_400:
        problems.append(f"{where}.every_seconds: {every!r}: expected 0 to 86400 seconds")
        every = DEFAULT_EVERY_SECONDS
    # Sinks in the same database lose the rows together with the events, so rewinding needs no attention.
    on_epoch_change = body.get("on_epoch_change", "rewind" if {sink.kind for sink in sinks} <= IN_DATABASE else "stop")
    if on_epoch_change not in ON_EPOCH_CHANGE:
        problems.append(f"{where}.on_epoch_change: {on_epoch_change!r}: expected {' or '.join(ON_EPOCH_CHANGE)}")
    if len(problems) > before:
        return None
    return PipelineSpec(
        name, cast(Source, source), source_options, transform, sinks, float(every), cast(OnEpochChange, on_epoch_change)
    )


def _source(declared: Any, where: str, problems: list[str]) -> tuple[str, Mapping[str, Any]]:
    # A source without options may be given by its name alone.
    declared = {declared: {}} if isinstance(declared, str) else declared
    if not isinstance(declared, dict) or len(declared) != 1 or next(iter(declared)) not in SOURCES:
        problems.append(f"{where}: expected one source, {' or '.join(SOURCES)}")
        return "", {}
    ((kind, options),) = declared.items()
    options = {} if options is None else options
    if not isinstance(options, dict):
        problems.append(f"{where}.{kind}: expected a mapping of options")
        return kind, {}
    problems += _unknown(options, SOURCES[kind], f"{where}.{kind}")
    for name in ("topics", "tables"):
        if name in options:
            names = options[name] if isinstance(options[name], list) else [options[name]]
            if not names or not all(isinstance(one, str) and one for one in names):
                problems.append(f"{where}.{kind}.{name}: expected a list of names")
            options = {**options, name: names}
    for name in ("after", "max_events", "max_bytes", "partitions"):
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            problems.append(f"{where}.{kind}.{name}: {value!r}: expected a whole number")
    for name in ("from_end", "skip_expired", "snapshot"):
        if not isinstance(options.get(name, False), bool):
            problems.append(f"{where}.{kind}.{name}: {options[name]!r}: expected true or false")
    if kind == "changes" and not options.get("tables") and not options.get("publication"):
        problems.append(f"{where}.changes: expected tables, or an existing publication")
    if kind == "changes" and options.get("snapshot") and not options.get("tables"):
        problems.append(f"{where}.changes: a snapshot requires tables")
    return kind, options


def _sinks(declared: Any, where: str, problems: list[str]) -> Iterator[SinkSpec]:
    # One sink, a mapping of several kinds, or a list, in which a kind may occur more than once.
    parts = declared if isinstance(declared, list) else [declared]
    if not declared:
        problems.append(f"{where}: expected a sink: {', '.join(SINKS)}")
        return
    for part in parts:
        whole = {part: {}} if isinstance(part, str) else part
        if not isinstance(whole, dict):
            problems.append(f"{where}: unknown sink {part!r}: expected {', '.join(SINKS)}")
            continue
        for kind, options in whole.items():
            if kind not in SINKS:
                problems.append(f"{where}: unknown sink {kind!r}: expected {', '.join(SINKS)}")
            elif options is not None and not isinstance(options, dict):
                problems.append(f"{where}.{kind}: expected a mapping of options")
            else:
                yield SinkSpec(kind, options or {})


def _check_transform(declared: Any, where: str, problems: list[str]) -> None:
    if not isinstance(declared, dict) or sum(kind in declared for kind in TRANSFORMS) != 1:
        problems.append(f"{where}: expected either sql or python")
        return
    problems += _unknown(declared, TRANSFORM_KEYS, where)
    for kind in TRANSFORMS:
        if kind in declared and not (isinstance(declared[kind], str) and declared[kind].strip()):
            problems.append(f"{where}.{kind}: expected a text")


def _shared_slots(specs: list[PipelineSpec]) -> Iterator[str]:
    """Two pipelines that share a slot: each would miss the changes that the other has confirmed."""
    owners: dict[str, str] = {}
    for spec in specs:
        if spec.source != "changes":
            continue
        if spec.slot in owners:
            yield f"pipelines.{spec.name}.from.changes: shares the slot {spec.slot!r} with {owners[spec.slot]}"
        owners.setdefault(spec.slot, spec.name)


def _unknown(mapping: Mapping[Any, Any], known: frozenset[str], where: str) -> Iterator[str]:
    for key in mapping:
        if key not in known:
            yield f"{where + '.' if where else ''}{key}: unknown key: expected {', '.join(sorted(known))}"


def _filled(value: Any, environment: Mapping[str, str], where: str, problems: list[str]) -> Any:
    """The document with environment variables substituted."""
    if isinstance(value, dict):
        return {
            key: _filled(item, environment, f"{where}.{key}" if where else str(key), problems)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_filled(item, environment, where, problems) for item in value]
    if not isinstance(value, str):
        return value

    def variable(found: re.Match[str]) -> str:
        if found.group(1) not in environment:
            problems.append(f"{where}: the environment variable {found.group(1)} is not set")
            return ""
        return environment[found.group(1)]

    return _VARIABLE.sub(variable, value)


def _spark_value(value: Any) -> str:
    # Spark expects "true" for YAML's true.
    return str(value).lower() if isinstance(value, bool) else str(value)
