"""Transforms of a pipeline, in SQL or Python, and the output mode in which Spark has to run them."""

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
OFFSET_COLUMNS: Final[Mapping[Source, str]] = {"log": "position", "changes": "commit_lsn"}
"""The column of each source with the offset of a row."""

# Properties of a column are stored in its metadata, which Spark keeps while a column is only passed on.
OFFSET: Final = "headwater.offset"
DERIVED: Final = "headwater.derived"
STATEFUL: Final = "headwater.stateful"

# Operators of Spark's plans that keep state between batches, and the output mode that each requires.
_WITH_STATE: Final[Mapping[str, Mode]] = {
    "Aggregate": "update",
    "Distinct": "update",
    "Deduplicate": "append",
    "DeduplicateWithinWatermark": "append",
    "GlobalLimit": "append",
}
# The user sets the mode of these operators.
_WITH_OWN_MODE: Final = ("GroupsWithState", "InPandasWithState", "TransformWithState")

# Temporary views belong to the session, so only one transform may be analyzed at a time.
_view_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class TransformResult:
    """The rows for the sinks, and how to run their query."""

    rows: DataFrame
    mode: Mode
    stateful: bool
    """Whether the query keeps state in its checkpoint; without the checkpoint it must start from the beginning."""


@dataclass(frozen=True, slots=True)
class Transform:
    """SQL over the view `events` or `changes`, or a function from DataFrame to DataFrame, or neither."""

    sql: str | None = None
    python: str | None = None
    mode: Mode | None = None
    directory: Path | None = None
    """An additional directory for importing the function's module."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, *, directory: Path | None = None) -> Transform:
        """Parse the options of a transform; InvalidRequest if they are invalid."""
        if options is None:
            return cls(directory=directory)
        if not isinstance(options, Mapping):
            raise InvalidRequest(
                f"invalid transform {options!r}: expected a mapping",
                hint='Write transform: {sql: "select ... from events"}.',
            )
        refuse_unknown_keys(options, OPTIONS, "a transform")
        sql, python, mode = (options.get(name) for name in OPTIONS)
        if (sql is None) == (python is None):
            raise InvalidRequest("invalid transform: expected either sql or python")
        for name, text in (("sql", sql), ("python", python)):
            if text is not None and not (isinstance(text, str) and text.strip()):
                raise InvalidRequest(f"the transform's {name} is {text!r}: expected a text")
        if python is not None and not re.fullmatch(r"[\w.]+:\w+", python):
            raise InvalidRequest(
                f"the transform's python is {python!r}", hint="Write package.module:function, as in totals:by_customer."
            )
        if mode is not None and mode not in MODES:
            raise InvalidRequest(f"the transform's mode is {mode!r}: expected {', '.join(MODES)}")
        return cls(sql, python, mode, directory)

    def apply(self, rows: DataFrame, source: Source) -> TransformResult:
        """Apply the transform to rows, streaming or not; InvalidRequest with the line of SQL if Spark rejects it."""
        if self.sql is not None:
            result = self._by_sql(with_data(rows, source), VIEWS[source])
        elif self.python is not None:
            result = self._by_function(with_data(rows, source), self.python)
        else:
            return TransformResult(_with_offset(rows, source), self.mode or "append", False)
        if rows.isStreaming and not result.isStreaming:
            raise InvalidRequest(
                f"the transform does not read {VIEWS[source]}",
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
        return TransformResult(result, mode, bool(needs))

    def _by_sql(self, rows: DataFrame, view: str) -> DataFrame:
        assert self.sql is not None
        spark = rows.sparkSession
        with _view_lock, _refusals(self.sql, None):
            rows.createOrReplaceTempView(view)
            try:
                return spark.sql(self.sql)
            finally:
                spark.catalog.dropTempView(view)

    def _by_function(self, rows: DataFrame, name: str) -> DataFrame:
        function = self.function()
        try:
            takes = len(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            takes = 1
        with _refusals(None, name):
            result = function(rows, rows.sparkSession) if takes >= 2 else function(rows)
        if not isinstance(result, DataFrame):
            raise InvalidRequest(
                f"the function {name} returned {type(result).__name__}: expected a DataFrame",
                hint="Return the DataFrame for the sinks.",
            )
        return result

    def function(self) -> Callable[..., Any]:
        """Import the function of the transform; InvalidRequest if it does not exist."""
        assert self.python is not None
        module_name, _, name = self.python.partition(":")
        if self.directory is not None and str(self.directory) not in sys.path:
            sys.path.append(str(self.directory))
        try:
            module = importlib.import_module(module_name)
        except (ImportError, SyntaxError) as error:
            raise InvalidRequest(
                f"the transform {self.python} cannot be imported: {error}",
                hint="The module must be next to the pipeline file, or installed.",
            ) from error
        if self.directory is not None and _lies_in(module.__file__, self.directory):
            # Spark's workers cannot import modules next to the pipeline file, so the code is sent to them.
            register_pickle_by_value(sys.modules[module_name.partition(".")[0]])  # type: ignore[no-untyped-call]
        function = getattr(module, name, None)
        if not callable(function):
            raise InvalidRequest(f"the module {module_name} has no function {name}", hint=f"It is {module.__file__}.")
        return function  # type: ignore[no-any-return]


def apply_transform(
    options: Mapping[str, Any] | None, rows: DataFrame, *, source: Source, directory: Path | None = None
) -> tuple[DataFrame, Mode]:
    """Apply the transform in `options`; return the rows and the output mode of the query."""
    result = Transform.parse(options, directory=directory).apply(rows, source)
    return result.rows, result.mode


def check(options: Mapping[str, Any] | None, *, directory: Path | None = None) -> None:
    """Check a transform without Spark; InvalidRequest if it is invalid."""
    declared = Transform.parse(options, directory=directory)
    if declared.python is not None:
        declared.function()


def with_data(rows: DataFrame, source: Source) -> DataFrame:
    """Add the JSON of rows as VARIANT columns: `data` for events, `old` and `new` for changes.

    With them, `data:amount::double` is a number. Null if a value is not JSON.
    """
    rows = _with_offset(rows, source)
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


def offset_column(rows: DataFrame) -> str | None:
    """The column with the source offset of each row, if the transform passed it on."""
    for field in rows.schema.fields:
        if field.metadata.get(OFFSET):
            return field.name
    return None


def is_stateful(rows: DataFrame) -> bool:
    """Whether these rows come from a transform that keeps state."""
    return any(field.metadata.get(STATEFUL) for field in rows.schema.fields)


def _with_offset(rows: DataFrame, source: Source) -> DataFrame:
    name = OFFSET_COLUMNS[source]
    return rows.withColumn(name, f.col(name).alias(name, metadata={OFFSET: True}))


def _without_helpers(result: DataFrame, source: DataFrame) -> DataFrame:
    """Remove the columns of `with_data` from the result of `select *`: they are only for use in expressions."""
    if not set(source.columns) <= set(result.columns):
        return result
    return result.drop(*(field.name for field in result.schema.fields if field.metadata.get(DERIVED)))


def _noted(field: StructField, note: str) -> Any:
    quoted = field.name.replace("`", "``")
    return f.col(f"`{quoted}`").alias(field.name, metadata={**field.metadata, note: True})


def _needed_modes(result: DataFrame) -> list[Mode]:
    """The modes of all operators that keep state; empty if batches are independent."""
    needed: list[Mode] = []
    open_nodes = [result._jdf.queryExecution().analyzed()]
    while open_nodes:
        node = open_nodes.pop()
        # Inputs that are not streaming are read again for each batch.
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
        elif name == "Sort" and getattr(node, "global")():  # `global` is a Python keyword
            needed.append("complete")
    return needed


def _mode_for(needed: list[Mode]) -> Mode:
    for mode in ("complete", "update"):
        if mode in needed:
            return mode
    return "append"


def _refuse_impossible(result: DataFrame, mode: Mode) -> None:
    """Run the checks that Spark does at the start of the query."""
    jvm: Any = result.sparkSession._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    chosen = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[mode]()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(result._jdf.queryExecution().analyzed(), chosen)


@contextmanager
def _refusals(sql: str | None, python: str | None) -> Iterator[None]:
    """Convert Spark's errors about a transform to InvalidRequest with the line of SQL, and suppress its log output."""
    log = logging.getLogger("SQLQueryContextLogger")
    before, log.disabled = log.disabled, True
    try:
        yield
    except PySparkException as error:
        message = _sentence(str(error))
        if sql is None:
            raise InvalidRequest(f"Spark rejects the transform {python}: {message}") from error
        raise InvalidRequest(
            f"Spark rejects the SQL of the transform: {message}", hint=marked_line(sql, _index_in(error, sql))
        ) from error
    finally:
        log.disabled = before


def _sentence(text: str) -> str:
    """Spark's message without the error class and the plan."""
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


def marked_line(sql: str, index: int | None) -> str:
    """The line of the SQL with a mark under the index; the whole SQL if the index is unknown."""
    if index is None:
        return sql
    start = sql.rfind("\n", 0, index) + 1
    line = sql[start:].partition("\n")[0]
    number = sql.count("\n", 0, index) + 1
    head = f"line {number}: "
    return f"{head}{line}\n  {' ' * (len(head) + index - start)}^"


def _lies_in(file: str | None, directory: Path) -> bool:
    return file is not None and Path(file).resolve().is_relative_to(directory.resolve())
