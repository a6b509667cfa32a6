"""What is decided about a write from Spark: which DataFrames fit, and how rows become chunks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructType

from headwater.errors import InvalidEvent, InvalidRequest
from headwater.spark.formats import log_writer
from headwater.spark.formats.log_writer import WriteOptions, chunks, staging_row


def schema(*names: str) -> StructType:
    made = StructType()
    for name in names:
        made = made.add(name, StringType())
    return made


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


@pytest.mark.parametrize(
    ("frame", "given", "message"),
    [
        (schema("payload"), {}, "give the topic either"),
        (schema("payload", "topic"), {"topic": "orders"}, "give the topic either"),
        (schema("topic"), {}, "give the content of an event either"),
        (schema("topic", "data", "payload"), {}, "give the content of an event either"),
        (schema("topic", "data", "position"), {}, "unknown columns for an event: position"),
        (schema("topic", "data").add("type", LongType()), {}, "type (bigint)"),
        (schema("topic", "data"), {"topics": "orders"}, "unknown options for writing: topics"),
    ],
)
def test_a_frame_that_cannot_be_events_is_refused_with_the_reason(
    frame: StructType, given: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        WriteOptions.parse({"dsn": "dbname=x"} | given, frame)
    assert message in refusal.value.message


def test_text_becomes_bytes_and_data_is_said_to_be_json() -> None:
    (chunk,) = chunks(batch(data=['{"a": 1}', None], key=["k", None]), "orders")
    assert chunk.topic == "orders"
    assert chunk.columns["payload"].to_pylist() == [b'{"a": 1}', None]
    assert chunk.columns["key"].to_pylist() == [b"k", None]
    assert chunk.columns["content_type"].to_pylist() == ["application/json"] * 2


@pytest.mark.parametrize(
    "columns",
    [
        {"data": ["{"]},
        {"data": ['"\\u0000"']},
        {"payload": [b"{"], "content_type": ["application/json"]},
        {"payload": [b"x"], "headers": ["[1]"]},
        {"payload": [b"x"], "headers": ["{"]},
        {"payload": [b"x"], "topic": pa.array([None], pa.string())},
    ],
)
def test_a_row_that_cannot_be_an_event_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvent):
        list(chunks(batch(**columns), "orders"))


@given(
    rows=st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.binary(max_size=12)), max_size=30),
    most_events=st.integers(1, 5),
    most_bytes=st.integers(1, 20),
)
def test_chunks_hold_every_row_once_and_each_topic_in_order(
    rows: list[tuple[str, bytes]], most_events: int, most_bytes: int
) -> None:
    made = batch(
        topic=pa.array([topic for topic, _ in rows], pa.string()),
        payload=pa.array([payload for _, payload in rows], pa.binary()),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_writer, "CHUNK_EVENTS", most_events)
        patch.setattr(log_writer, "CHUNK_BYTES", most_bytes)
        cut = list(chunks(made, None))
    for name in "abc":
        got = [payload for chunk in cut if chunk.topic == name for payload in chunk.columns["payload"].to_pylist()]
        assert got == [payload for topic, payload in rows if topic == name]
    for chunk in cut:
        assert 1 <= len(chunk) <= most_events
        assert len(chunk) == 1 or sum(map(len, chunk.columns["payload"].to_pylist())) <= most_bytes


def test_a_staging_row_leaves_out_what_no_event_has() -> None:
    made = batch(payload=[b"1", b"2"], type=pa.array([None, None], pa.string()), key=[b"k", None])
    (chunk,) = chunks(made, "orders")
    row = staging_row(chunk, writer="w", epoch=3, attempt="a", chunk_number=0)
    assert row.num_rows == 1
    assert row.to_pylist() == [
        {
            "writer": "w",
            "epoch": 3,
            "attempt": "a",
            "chunk_number": 0,
            "topic": "orders",
            "payloads": [b"1", b"2"],
            "keys": [b"k", None],
        }
    ]
