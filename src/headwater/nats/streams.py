"""JetStream streams and buckets: their configuration and creation; access to schemas, dictionaries and snapshots."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, NotFoundError

from headwater.nats import codec, subjects
from headwater.nats.codec import Encoding
from headwater.nats.errors import InvalidMessage, NatsRefused, NatsUnavailable
from headwater.nats.subjects import Table


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """StreamLimits of a stream: when one is reached, the oldest messages are removed."""

    max_age_seconds: float
    max_bytes: int
    max_messages: int = -1
    duplicate_seconds: float = 120.0
    replicas: int = 1


_DAY: Final = 86_400.0
_ANSWER_SECONDS: Final = 5.0
# A server lists at most this many subjects of a stream.
MAX_LISTED_SUBJECTS: Final = 100_000
_GIB: Final = 1 << 30

STREAMS: Final[Mapping[str, tuple[str, StreamLimits]]] = {
    subjects.CDC_STREAM: ("cdc.>", StreamLimits(max_age_seconds=8 * _DAY, max_bytes=8 * _GIB)),
    subjects.INIT_STREAM: ("init.>", StreamLimits(max_age_seconds=7 * _DAY, max_bytes=8 * _GIB)),
}
# How many versions of a value a bucket keeps.
BUCKETS: Final[Mapping[str, int]] = {
    subjects.SCHEMAS_BUCKET: 10,
    subjects.DICTIONARIES_BUCKET: 1,
    subjects.SNAPSHOTS_BUCKET: 1,
}


@asynccontextmanager
async def connect(url: str, *, name: str = "headwater", connect_seconds: float = 5.0) -> AsyncIterator[Client]:
    """Connect within `connect_seconds`, and reconnect automatically until the block ends."""

    async def ignore(_: Exception) -> None:
        """Ignore connection errors: the call that fails raises its own error."""

    try:
        client = await nats.connect(
            servers=url.split(","),
            name=name,
            connect_timeout=max(1, round(connect_seconds)),
            max_reconnect_attempts=1,
            reconnect_time_wait=0.1,
            error_cb=ignore,
        )
    except (OSError, nats.errors.Error, TimeoutError) as error:
        if "authorization" in str(error).lower():
            raise NatsRefused(f"NATS refused: {error}", hint="Check the user or token in the address.") from error
        raise NatsUnavailable(f"cannot connect to NATS: {error or 'timeout'}", hint="Check the address.") from error
    client.options["max_reconnect_attempts"] = -1
    client.options["reconnect_time_wait"] = 1
    try:
        yield client
    finally:
        await client.close()


async def ensure_streams(
    js: JetStreamContext, *, limits: Mapping[str, StreamLimits] | None = None, buckets: Mapping[str, int] = BUCKETS
) -> list[str]:
    """Create missing streams and buckets; return their names. Existing ones are not changed."""
    created: list[str] = []
    for name, (subject, default) in STREAMS.items():
        try:
            info = await js.stream_info(name)
        except NotFoundError:
            await js.add_stream(_stream(name, subject, (limits or {}).get(name, default)))
            created.append(name)
            continue
        if subject not in (info.config.subjects or []):
            raise NatsRefused(
                f"the existing stream {name} has the subjects {info.config.subjects}, which do not include {subject}",
                hint="Add the subject to the stream, or remove the stream.",
            )
    for name, history in buckets.items():
        try:
            await js.key_value(name)
        except BucketNotFoundError:
            await js.create_key_value(
                KeyValueConfig(bucket=name, history=history, storage=StorageType.FILE, direct=True)
            )
            created.append(name)
    return created


async def put_schema(
    js: JetStreamContext, table: Table, document: Mapping[str, Any], *, encoding: Encoding = "msgpack"
) -> bool:
    """Publish the schema document of a table. False if the bucket already has it, except for the timestamp."""
    bucket = await js.key_value(subjects.SCHEMAS_BUCKET)
    known = await get_schema(js, table)
    if known is not None and {**known, "timestamp": None} == {**document, "timestamp": None}:
        return False
    await bucket.put(table.token, codec.encode(dict(document), encoding))
    return True


async def get_schema(js: JetStreamContext, table: Table) -> dict[str, Any] | None:
    """The schema document of a table; None if there is none."""
    value = await _value(js, subjects.SCHEMAS_BUCKET, table.token)
    document = None if value is None else codec.decode(value)
    return document if isinstance(document, dict) else None


async def put_dictionary(js: JetStreamContext, table: Table, dictionary: bytes) -> str:
    """Publish a dictionary; return the key by which messages refer to it."""
    key = subjects.dictionary_key(table, codec.dictionary_id(dictionary))
    bucket = await js.key_value(subjects.DICTIONARIES_BUCKET)
    if await _value(js, subjects.DICTIONARIES_BUCKET, key) != dictionary:
        await bucket.put(key, dictionary)
    return key


async def get_dictionary(js: JetStreamContext, key: str) -> bytes | None:
    """A dictionary by the key in a message; None if there is none."""
    return await _value(js, subjects.DICTIONARIES_BUCKET, key)


async def _value(js: JetStreamContext, bucket: str, key: str) -> bytes | None:
    try:
        entry = await (await js.key_value(bucket)).get(key)
    except (KeyNotFoundError, BucketNotFoundError):
        return None
    return entry.value


async def get_snapshot(js: JetStreamContext, table: Table) -> dict[str, Any] | None:
    """The record of the last or running snapshot of a table; None if there is none."""
    value = await _value(js, subjects.SNAPSHOTS_BUCKET, table.token)
    document = None if value is None else codec.decode(value)
    return document if isinstance(document, dict) else None


async def put_snapshot(js: JetStreamContext, table: Table, document: Mapping[str, Any]) -> None:
    """Store the record of a table's snapshot."""
    bucket = await js.key_value(subjects.SNAPSHOTS_BUCKET)
    await bucket.put(table.token, codec.encode(dict(document), "json"))


async def get_ranges(js: JetStreamContext, table: Table, snapshot_id: str) -> list[dict[str, Any]]:
    """The records of the completed ranges of a snapshot."""
    found = await _values(js, subjects.SNAPSHOTS_BUCKET, f"{table.token}.{snapshot_id}.*")
    return [codec.decode(value) for value in found.values()]


async def put_range(
    js: JetStreamContext, table: Table, snapshot_id: str, number: int, document: Mapping[str, Any]
) -> None:
    """Store the record of a completed range of a snapshot."""
    bucket = await js.key_value(subjects.SNAPSHOTS_BUCKET)
    await bucket.put(subjects.range_key(table, snapshot_id, number), codec.encode(dict(document), "json"))


async def forget_ranges(js: JetStreamContext, table: Table, snapshot_id: str) -> None:
    """Delete the range records of a snapshot."""
    await js.purge_stream(
        f"KV_{subjects.SNAPSHOTS_BUCKET}", subject=f"$KV.{subjects.SNAPSHOTS_BUCKET}.{table.token}.{snapshot_id}.*"
    )


async def drop_chunks(
    js: JetStreamContext, table: Table, snapshot_id: str, *, but: Sequence[Sequence[int]] = ()
) -> int:
    """Delete the chunks of a snapshot, except those with numbers in the runs `but`; return the number deleted."""
    wanted = subjects.chunks_filter(table, snapshot_id)
    info = await js.stream_info(subjects.INIT_STREAM, subjects_filter=wanted)
    numbers = [int(subject.rpartition(".")[2]) for subject in info.state.subjects or ()]
    stray = [number for number in numbers if not any(first <= number <= last for first, last in but)]
    for number in stray:
        await js.purge_stream(subjects.INIT_STREAM, subject=subjects.chunk_subject(table, snapshot_id, number))
    return len(stray)


async def count_chunks(js: JetStreamContext, table: Table, snapshot_id: str) -> int:
    """How many distinct chunks of a snapshot the stream has; the server reports at most MAX_LISTED_SUBJECTS."""
    wanted = subjects.chunks_filter(table, snapshot_id)
    info = await js.stream_info(subjects.INIT_STREAM, subjects_filter=wanted)
    return len(info.state.subjects or ())


async def publish_error(
    js: JetStreamContext, table: Table, document: Mapping[str, Any], *, encoding: Encoding = "msgpack"
) -> None:
    """Publish that a snapshot failed, and why."""
    await js.publish(subjects.error_subject(table), codec.encode(dict(document), encoding))


async def get_schemas(js: JetStreamContext) -> dict[Table, dict[str, Any]]:
    """The schema documents of all tables. Entries of other formats are skipped."""
    documents = {}
    for key, value in (await _values(js, subjects.SCHEMAS_BUCKET, ">")).items():
        try:
            table, document = Table.of_token(key), codec.decode(value)
        except InvalidMessage:
            continue
        if isinstance(document, dict):
            documents[table] = document
    return documents


async def _values(js: JetStreamContext, bucket: str, keys: str) -> dict[str, bytes]:
    """The values of all matching keys."""
    watcher = await (await js.key_value(bucket)).watch(keys, ignore_deletes=True)
    found: dict[str, bytes] = {}
    try:
        # None marks the end of the current entries.
        while (entry := await watcher.updates(timeout=_ANSWER_SECONDS)) is not None:  # type: ignore[no-untyped-call]
            found[entry.key] = entry.value or b""
    finally:
        await watcher.stop()  # type: ignore[no-untyped-call]
    return found


def _stream(name: str, subject: str, limits: StreamLimits) -> StreamConfig:
    return StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        max_age=limits.max_age_seconds,
        max_bytes=limits.max_bytes,
        max_msgs=limits.max_messages,
        duplicate_window=limits.duplicate_seconds,
        num_replicas=limits.replicas,
        allow_direct=True,
    )
