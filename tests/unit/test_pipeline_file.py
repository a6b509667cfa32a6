"""Is a file of pipelines read as it is meant, and everything wrong with it message at once?"""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from headwater.capture.timeline import WalHistory
from headwater.errors import InvalidRequest, PipelineNotFound, SlotLost
from headwater.spark.pipelines.batch_query import explain, offset_in
from headwater.spark.pipelines.checkpoint import end_in
from headwater.spark.pipelines.file import parse
from headwater.spark.pipelines.runner import is_final

GOOD = """
postgres: postgresql://${DB_USER}@db/shop
nats: nats://127.0.0.1:4222
pipelines:
  orders-to-nats:
    from: {changes: {tables: public.orders}}
    to: {nats: {shape: packed, url: "nats://secret@host"}}
  totals:
    from: log
    transform: {sql: select 1}
    to: [{table: {name: t, key: [a]}}, topic]
    every_seconds: 0
"""


def test_a_file_says_what_runs_where() -> None:
    declared = parse(GOOD, {"DB_USER": "ada"})
    assert declared.postgres == "postgresql://ada@db/shop"
    first, second = declared.pipelines
    assert (first.source, first.source_options, first.slot) == (
        "changes",
        {"tables": ["public.orders"]},
        "orders_to_nats",
    )
    assert [sink.kind for sink in second.sinks] == ["table", "topic"]
    assert (first.every_seconds, second.every_seconds) == (1.0, 0.0)


def test_what_is_shown_of_a_pipeline_has_no_addresses() -> None:
    assert "secret" not in str(parse(GOOD, {"DB_USER": ""}).pipelines[0].definition)


def test_pipelines_are_chosen_by_name() -> None:
    declared = parse(GOOD, {"DB_USER": ""})
    assert [spec.name for spec in declared.chosen(["totals"])] == ["totals"]
    assert len(declared.chosen([])) == 2
    with pytest.raises(PipelineNotFound, match="does not declare the pipeline nope"):
        declared.chosen(["nope"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{from: log}", "p.to: expected a sink"),
        ("{from: log, to: kafka}", "unknown sink 'kafka'"),
        ("{from: {log: {topics: []}}, to: topic}", "topics: expected a list of names"),
        ("{from: {log: {topic: a}}, to: topic}", "p.from.log.topic: unknown key"),
        ("{from: {log: {after: -1}}, to: topic}", "after: -1: expected a whole number"),
        ("{from: {changes: {}}, to: topic}", "expected tables, or an existing publication"),
        ("{from: {changes: {publication: x, snapshot: true}}, to: lake}", "a snapshot requires tables"),
        ("{from: {changes: {tables: [t], snapshot: maybe}}, to: lake}", "expected true or false"),
        ("{from: {log: {}, changes: {}}, to: topic}", "expected one source"),
        ("{from: log, to: topic, transform: {sql: a, python: b}}", "expected either sql or python"),
        ("{from: log, to: topic, transform: {sql: ''}}", "transform.sql: expected a text"),
        ("{from: log, to: topic, every_seconds: true}", "expected 0 to 86400 seconds"),
        ("{from: log, to: topic, when: now}", "p.when: unknown key"),
        (
            "{from: log, transform: {sql: select 1}, to: {lake: {path: x, archive: true}}}",
            "an archive cannot be combined with a transform",
        ),
        ("[]", "expected a mapping"),
        ("{from: log, to: {topic: {name: '${GONE}'}}}", "the environment variable GONE is not set"),
    ],
)
def test_what_makes_no_sense_is_refused(body: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(f"pipelines: {{p: {body}}}", {})
    assert message in refusal.value.message


def test_all_problems_are_told_together() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse("nets: x\npipelines: {a: {from: log}, 'b c': {from: nowhere, to: topic}}", {})
    assert len(refusal.value.detail["problems"]) == 4


@pytest.mark.parametrize("text", ["", "[]", "a: {", "pipelines: {}"])
def test_a_file_without_pipelines_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text, {})


def test_two_pipelines_may_not_share_a_slot() -> None:
    one = "{from: {changes: {tables: [t], slot: s}}, to: topic}"
    with pytest.raises(InvalidRequest, match="shares the slot 's' with a"):
        parse(f"pipelines: {{a: {one}, b: {one}}}", {})


def test_the_end_of_a_batch_is_in_its_file_of_offsets() -> None:
    assert end_in('v1\n{"batchWatermarkMs":0}\n{"position":42,"gone_to":0}\n') == (42, None, None)
    assert end_in('v1\n{"batchWatermarkMs":0}\n{"lsn":7}') == (7, None, None)
    assert end_in('v1\n{"batchWatermarkMs":0}\n{"position":42,"gone_to":0,"epoch":3}\n') == (42, 3, None)
    assert end_in('v1\n{}\n{"lsn":7,"timeline":2,"system":9}') == (7, None, WalHistory(9, 2))
    assert end_in("v1\n{}\n-") is None


def test_the_offset_is_where_the_source_stands() -> None:
    assert offset_in({"sources": [{"endOffset": '{"lsn": 5}'}]}) == (5, None, None)
    assert offset_in({"sources": [{"endOffset": {"position": 6}}]}) == (6, None, None)
    assert offset_in({"sources": [{"endOffset": None}]}) is None
    assert offset_in({"sources": []}) is None


def test_the_error_behind_javas_is_told() -> None:
    text = (
        "[STREAM_FAILED] Query terminated with exception: org.apache.spark.SparkException\n"
        'Traceback (most recent call last):\n  File "x"\n'
        "headwater.errors.SlotLost: replication slot 's' does not exist\n  Make a new one.\n\tat org.apache.spark.Foo\n"
    )
    error = explain(text)
    assert type(error) is SlotLost
    assert (error.message, error.hint) == ("replication slot 's' does not exist", "Make a new one.")
    assert is_final(error)
    other = explain("a\nValueError: no good\n\tat java.lang.Thread")
    assert other.message == "ValueError: no good"
    assert not is_final(other)
