"""Transforms: what a pipeline makes of its rows, in SQL or in Python, and how Spark has to run that."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pyspark.cloudpickle import register_pickle_by_value
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from headwater.errors import InvalidRequest
from headwater.spark.options import refuse_unknown_keys
from headwater.spark.pipelines.batch import Source

if TYPE_CHECKING:
    from pyspark.sql.types import StructField

Mode = Literal["append", "update", "complete"]

OPTIONS: Final = ("sql", "python", "mode")
MODES: Final[tuple[Mode, ...]] = ("append", "update", "complete")
VIEWS: Final[Mapping[Source, str]] = {"log": "events", "changes": "changes"}
PLACES: Final[Mapping[Source, str]] = {"log": "position", "changes": "commit_lsn"}
"""The column of each source that says where in it a row stands."""

# What is known of a column travels with it as metadata, which Spark keeps as long as a column is only passed on.
PLACE: Final = "headwater.place"
DERIVED: Final = "headwater.derived"
STATEFUL: Final = "headwater.stateful"

# Operators of Spark's plans that remember something from batch to batch, and the mode in which each gives its rows.
_WITH_STATE: Final[Mapping[str, Mode]] = {
    "Aggregate": "update",
    "Distinct": "update",
    "Deduplicate": "append",
    "DeduplicateWithinWatermark": "append",
    "GlobalLimit": "append",
}
# These are told their mode by whoever wrote them.
_WITH_OWN_MODE: Final = ("GroupsWithState", "InPandasWithState", "TransformWithState")

# The view is the session's: two transforms at once would see each other's.
_one_view_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Transformed:
    """The rows that go to the sinks, and how the query that makes them has to be run."""

    rows: DataFrame
    mode: Mode
    stateful: bool
    """Its results rest on what earlier batches left in the checkpoint: without that, it must begin from the start."""


@dataclass(frozen=True, slots=True)
class Transform:
    """SQL over the view `events` or `changes`, or a function from DataFrame to DataFrame; neither: rows as they are."""

    sql: str | None = None
    python: str | None = None
    mode: Mode | None = None
    directory: Path | None = None
    """Where the function's module may lie, besides where Python looks anyway."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, *, directory: Path | None = None) -> Transform:
        """What the options of a transform say; InvalidRequest if they make no sense."""
        if options is None:
            return cls(directory=directory)
        if not isinstance(options, Mapping):
            raise InvalidRequest(
                f"the transform is {options!r}", hint='Write transform: {sql: "select ... from events"}.'
            )
        refuse_unknown_keys(options, OPTIONS, "a transform")
        sql, python, mode = (options.get(name) for name in OPTIONS)
        if (sql is None) == (python is None):
            raise InvalidRequest("a transform is either sql or python", hint="Give one of them.")
        for name, text in (("sql", sql), ("python", python)):
            if text is not None and not (isinstance(text, str) and text.strip()):
                raise InvalidRequest(f"the transform's {name} is {text!r}, not a text")
        if python is not None and not re.fullmatch(r"[\w.]+:\w+", python):
            raise InvalidRequest(
                f"the transform's python is {python!r}", hint="Write package.module:function, as in totals:by_customer."
            )
        if mode is not None and mode not in MODES:
            raise InvalidRequest(f"the transform's mode is {mode!r}", hint=f"Known are {', '.join(MODES)}.")
        return cls(sql, python, mode, directory)

    def apply(self, rows: DataFrame, source: Source) -> Transformed:
        """The transform of a source's rows, streaming or not; InvalidRequest that shows the place if it is refused."""
        if self.sql is not None:
            result = self._by_sql(with_data(rows, source), VIEWS[source])
        elif self.python is not None:
            result = self._by_function(with_data(rows, source), self.python)
        else:
            return Transformed(_with_place(rows, source), self.mode or "append", False)
        if rows.isStreaming and not result.isStreaming:
            raise InvalidRequest(
                f"the transform does not read the {VIEWS[source]}",
                hint=f"Select from {VIEWS[source]}: {self.sql or self.python}",
            )
        result = _without_helpers(result, rows)
        needs = _needed_modes(result) if result.isStreaming else []
        mode = self.mode or _mode_for(needs)
        if needs:
            result = result.select(*(_noted(field, STATEFUL) for field in result.schema.fields))
        if result.isStreaming:
            with _refusals(self.sql, self.python):
                _refuse_impossible(result, mode)
        return Transformed(result, mode, bool(needs))

    def _by_sql(self, rows: DataFrame, view: str) -> DataFrame:
        assert self.sql is not None
        spark = rows.sparkSession
        with _one_view_at_a_time, _refusals(self.sql, None):
            rows.createOrReplaceTempView(view)
            try:
                return spark.sql(self.sql)
            finally:
                spark.catalog.dropTempView(view)

    def _by_function(self, rows: DataFrame, place: str) -> DataFrame:
        function = self.function()
        try:
            takes = len(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            takes = 1
        with _refusals(None, place):
            result = function(rows, rows.sparkSession) if takes >= 2 else function(rows)
        if not isinstance(result, DataFrame):
            raise InvalidRequest(
                f"the function {place} gave {type(result).__name__}, not a DataFrame",
                hint="Return the DataFrame that goes to the sinks.",
            )
        return result

    def function(self) -> Callable[..., Any]:
        """The function that the transform names; InvalidRequest if there is none."""
        assert self.python is not None
        module_name, _, name = self.python.partition(":")
        if self.directory is not None and str(self.directory) not in sys.path:
            sys.path.append(str(self.directory))
        try:
            module = importlib.import_module(module_name)
        except (ImportError, SyntaxError) as error:
            raise InvalidRequest(
                f"the transform {self.python} cannot be imported: {error}",
                hint="The module must be beside the pipelines' file, or installed.",
            ) from error
        if self.directory is not None and _lies_in(module.__file__, self.directory):
            # Spark's workers do not look beside the pipelines' file: what they need of it is sent to them.
            register_pickle_by_value(sys.modules[module_name.partition(".")[0]])  # type: ignore[no-untyped-call]
        function = getattr(module, name, None)
        if not callable(function):
            raise InvalidRequest(f"the module {module_name} has no function {name}", hint=f"It is {module.__file__}.")
        return function  # type: ignore[no-any-return]


def transformed(
    options: Mapping[str, Any] | None, rows: DataFrame, *, source: Source, directory: Path | None = None
) -> tuple[DataFrame, Mode]:
    """The rows that the options make of a source's rows, and the mode in which the query has to be run."""
    result = Transform.parse(options, directory=directory).apply(rows, source)
    return result.rows, result.mode


def check(options: Mapping[str, Any] | None, *, directory: Path | None = None) -> None:
    """InvalidRequest for what can be seen to be wrong without Spark."""
    declared = Transform.parse(options, directory=directory)
    if declared.python is not None:
        declared.function()


def with_data(rows: DataFrame, source: Source) -> DataFrame:
    """A source's rows with their JSON as VARIANT beside: `data` of events, `old` and `new` of changes.

    So that `data:amount::double` is a number. Null for what is not JSON.
    """
    rows = _with_place(rows, source)
    if source == "log":
        may_be_json = f.col("content_type").isNull() | f.col("content_type").contains("json")
        parsed = f.when(may_be_json, f.try_parse_json(f.col("payload").cast("string")))
        return rows.withColumn("data", parsed.alias("data", metadata={DERIVED: True}))
    return rows.withColumns(
        {
            name: f.try_parse_json(image).alias(name, metadata={DERIVED: True})
            for name, image in (("old", "before"), ("new", "after"))
        }
    )


def place_column(rows: DataFrame) -> str | None:
    """The column that still holds each row's place in its source, if the transform passed it on."""
    for field in rows.schema.fields:
        if field.metadata.get(PLACE):
            return field.name
    return None


def is_stateful(rows: DataFrame) -> bool:
    """Whether these rows come from a transform that keeps state."""
    return any(field.metadata.get(STATEFUL) for field in rows.schema.fields)


def _with_place(rows: DataFrame, source: Source) -> DataFrame:
    place = PLACES[source]
    return rows.withColumn(place, f.col(place).alias(place, metadata={PLACE: True}))


def _without_helpers(result: DataFrame, source: DataFrame) -> DataFrame:
    """With `select *` the rows go on as they came; what was put beside them was for the conditions."""
    if not set(source.columns) <= set(result.columns):
        return result
    return result.drop(*(field.name for field in result.schema.fields if field.metadata.get(DERIVED)))


def _noted(field: StructField, note: str) -> Any:
    quoted = field.name.replace("`", "``")
    return f.col(f"`{quoted}`").alias(field.name, metadata={**field.metadata, note: True})


def _needed_modes(result: DataFrame) -> list[Mode]:
    """The modes of all operators that keep state; none: each batch stands for itself."""
    needed: list[Mode] = []
    open_nodes = [result._jdf.queryExecution().analyzed()]
    while open_nodes:
        node = open_nodes.pop()
        # What is not streaming is read anew for each batch.
        if not node.isStreaming():
            continue
        children = [node.children().apply(index) for index in range(node.children().size())]
        open_nodes += children
        name = node.nodeName()
        if any(part in name for part in _WITH_OWN_MODE):
            needed.append(node.outputMode().toString().lower())
        elif name in _WITH_STATE:
            needed.append(_WITH_STATE[name])
        elif name == "Join" and all(child.isStreaming() for child in children):
            needed.append("append")
        elif name == "Sort" and getattr(node, "global")():  # a word of Python's
            needed.append("complete")
    return needed


def _mode_for(needed: list[Mode]) -> Mode:
    for mode in ("complete", "update"):
        if mode in needed:
            return mode
    return "append"


def _refuse_impossible(result: DataFrame, mode: Mode) -> None:
    """Let Spark say now what it would say at the query's start."""
    jvm: Any = result.sparkSession._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    chosen = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[mode]()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(result._jdf.queryExecution().analyzed(), chosen)


@contextmanager
def _refusals(sql: str | None, python: str | None) -> Iterator[None]:
    """Spark's refusal of a transform as ours, with the place; and not on the screen as well."""
    log = logging.getLogger("SQLQueryContextLogger")
    before, log.disabled = log.disabled, True
    try:
        yield
    except PySparkException as error:
        message = _sentence(str(error))
        if sql is None:
            raise InvalidRequest(f"Spark refuses the transform {python}: {message}") from error
        raise InvalidRequest(
            f"Spark refuses the SQL of the transform: {message}", hint=shown_place(sql, _index_in(error, sql))
        ) from error
    finally:
        log.disabled = before


def _sentence(text: str) -> str:
    """What Spark says, without the name of the error and the plan behind it."""
    text = re.split(r"\s*SQLSTATE:", text.strip())[0]
    text = re.sub(r"^\[[\w.]+\]\s*", "", text)
    return " ".join(text.split())[:500]


def _index_in(error: PySparkException, sql: str) -> int | None:
    for context in error.getQueryContext() or ():
        if 0 <= context.startIndex() < len(sql):
            return int(context.startIndex())
    found = re.search(r"line (\d+),? pos (\d+)", str(error))
    if found is None:
        return None
    lines = sql.splitlines(keepends=True)[: int(found[1]) - 1]
    return sum(map(len, lines)) + int(found[2])


def shown_place(sql: str, index: int | None) -> str:
    """The line of the SQL with a mark under the place; the whole of it if the place is not known."""
    if index is None:
        return sql
    start = sql.rfind("\n", 0, index) + 1
    line = sql[start:].partition("\n")[0]
    number = sql.count("\n", 0, index) + 1
    head = f"line {number}: "
    return f"{head}{line}\n  {' ' * (len(head) + index - start)}^"


def _lies_in(file: str | None, directory: Path) -> bool:
    return file is not None and Path(file).resolve().is_relative_to(directory.resolve())
