"""Checks whether the declared pipelines can run, without starting or changing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import headwater
from headwater.calls import log as log_calls
from headwater.capture.slot import Slot
from headwater.errors import HeadwaterError
from headwater.spark.pipelines.file import PipelineFile, PipelineSpec
from headwater.spark.pipelines.runner import RunnerSettings, context_of, make_sink
from headwater.spark.pipelines.transform import check


def problems(declared: PipelineFile, *, dsn: str, directory: Path) -> list[str]:
    """All problems that would prevent pipelines from running, each with the name of its pipeline."""
    found: list[str] = []
    with headwater.connect(dsn, pool_size=1) as log:
        topics = {topic.name for topic in log.run(log_calls.topics())}
    for spec in declared.pipelines:
        found += [f"{spec.name}: {problem}" for problem in _of(spec, declared, dsn, directory, topics)]
    return found


def _of(spec: PipelineSpec, declared: PipelineFile, dsn: str, directory: Path, topics: set[str]) -> list[str]:
    found = []
    if spec.source == "log":
        missing = [name for name in spec.source_options.get("topics", ()) if name not in topics]
        found += [f'topic "{name}" does not exist' for name in missing]
    else:
        publication = spec.source_options.get("publication", spec.slot)
        try:
            Slot(dsn, spec.slot, publication).check(spec.source_options.get("tables", ()))
        except HeadwaterError as error:
            found.append(error.message)
    for number, sink in enumerate(spec.sinks):
        settings = RunnerSettings(
            dsn=dsn, nats_url=declared.nats, directory=directory, checkpoints=declared.checkpoints
        )
        try:
            # Creating a sink does not use Spark.
            make_sink(sink.kind, sink.options, context_of(cast(Any, None), spec, settings, number))
        except HeadwaterError as error:
            found.append(f"to {sink.kind}: {error.message}")
    if spec.transform is not None:
        try:
            check(spec.transform, directory=directory)
        except HeadwaterError as error:
            found.append(f"transform: {error.message}")
    return found
