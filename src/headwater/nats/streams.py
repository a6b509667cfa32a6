"""Streams and buckets of JetStream: what they are set to, made where they are missing; schemas and dictionaries."""

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
class Limits:
    """What a stream keeps: the oldest messages go when one of these is reached."""

    max_age_seconds: float
    max_bytes: int
    max_messages: int = -1
    duplicate_seconds: float = 120.0
    replicas: int = 1


_DAY: Final = 86_400.0
_ANSWER_SECONDS: Final = 5.0
# How many subjects a server lists of a stream.
MOST_SUBJECTS: Final = 100_000
_GIB: Final = 1 << 30

STREAMS: Final[Mapping[str, tuple[str, Limits]]] = {
    subjects.CDC_STREAM: ("cdc.>", Limits(max_age_seconds=8 * _DAY, max_bytes=8 * _GIB)),
    subjects.INIT_STREAM: ("init.>", Limits(max_age_seconds=7 * _DAY, max_bytes=8 * _GIB)),
}
# How many versions of a value a bucket keeps.
BUCKETS: Final[Mapping[str, int]] = {
    subjects.SCHEMAS_BUCKET: 10,
    subjects.DICTIONARIES_BUCKET: 1,
    subjects.SNAPSHOTS_BUCKET: 1,
}


@asynccontextmanager
async def connected(url: str, *, name: str = "headwater", connect_seconds: float = 5.0) -> AsyncIterator[Client]:
    """A connection that reconnects for as long as it is open. The first one must come within the time."""

    async def ignore(_: Exception) -> None:
        """Each call says for itself what went wrong with it."""

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
        raise NatsUnavailable(f"no NATS server answers: {error or 'timeout'}", hint="Check the address.") from error
    client.options["max_reconnect_attempts"] = -1
    client.options["reconnect_time_wait"] = 1
    try:
        yield client
    finally:
        await client.close()


async def ensure_streams(
    js: JetStreamContext, *, limits: Mapping[str, Limits] | None = None, buckets: Mapping[str, int] = BUCKETS
) -> list[str]:
    """Make the streams and buckets that are missing; says which. What is there is left as it is."""
    made: list[str] = []
    for name, (subject, default) in STREAMS.items():
        try:
            info = await js.stream_info(name)
        except NotFoundError:
            await js.add_stream(_stream(name, subject, (limits or {}).get(name, default)))
            made.append(name)
            continue
        if subject not in (info.config.subjects or []):
            raise NatsRefused(
                f"the stream {name} is there and takes {info.config.subjects}, not {subject}",
                hint="Give it that subject, or remove it.",
            )
    for name, history in buckets.items():
        try:
            await js.key_value(name)
        except BucketNotFoundError:
            await js.create_key_value(
                KeyValueConfig(bucket=name, history=history, storage=StorageType.FILE, direct=True)
            )
            made.append(name)
    return made


async def put_schema(
    js: JetStreamContext, table: Table, document: Mapping[str, Any], *, encoding: Encoding = "msgpack"
) -> bool:
    """Publish what a table's columns are. False if the bucket says the same already, but for the time."""
    bucket = await js.key_value(subjects.SCHEMAS_BUCKET)
    known = await get_schema(js, table)
    if known is not None and {**known, "timestamp": None} == {**document, "timestamp": None}:
        return False
    await bucket.put(table.token, codec.encode(dict(document), encoding))
    return True


async def get_schema(js: JetStreamContext, table: Table) -> dict[str, Any] | None:
    """What the bucket says of a table's columns."""
    value = await _value(js, subjects.SCHEMAS_BUCKET, table.token)
    document = None if value is None else codec.decode(value)
    return document if isinstance(document, dict) else None


async def put_dictionary(js: JetStreamContext, table: Table, dictionary: bytes) -> str:
    """Publish a dictionary; returns the key by which messages name it."""
    key = subjects.dictionary_key(table, codec.dictionary_id(dictionary))
    bucket = await js.key_value(subjects.DICTIONARIES_BUCKET)
    if await _value(js, subjects.DICTIONARIES_BUCKET, key) != dictionary:
        await bucket.put(key, dictionary)
    return key


async def get_dictionary(js: JetStreamContext, key: str) -> bytes | None:
    """A dictionary by the key that a message names."""
    return await _value(js, subjects.DICTIONARIES_BUCKET, key)


async def _value(js: JetStreamContext, bucket: str, key: str) -> bytes | None:
    try:
        entry = await (await js.key_value(bucket)).get(key)
    except (KeyNotFoundError, BucketNotFoundError):
        return None
    return entry.value


async def get_snapshot(js: JetStreamContext, table: Table) -> dict[str, Any] | None:
    """What is known of the last snapshot of a table, or of the one that runs."""
    value = await _value(js, subjects.SNAPSHOTS_BUCKET, table.token)
    document = None if value is None else codec.decode(value)
    return document if isinstance(document, dict) else None


async def put_snapshot(js: JetStreamContext, table: Table, document: Mapping[str, Any]) -> None:
    """Say how a table's snapshot stands."""
    bucket = await js.key_value(subjects.SNAPSHOTS_BUCKET)
    await bucket.put(table.token, codec.encode(dict(document), "json"))


async def get_ranges(js: JetStreamContext, table: Table, snapshot_id: str) -> list[dict[str, Any]]:
    """What was noted of the ranges of a snapshot that are done."""
    found = await _values(js, subjects.SNAPSHOTS_BUCKET, f"{table.token}.{snapshot_id}.*")
    return [codec.decode(value) for value in found.values()]


async def put_range(
    js: JetStreamContext, table: Table, snapshot_id: str, number: int, document: Mapping[str, Any]
) -> None:
    """Note that a range of a snapshot is done."""
    bucket = await js.key_value(subjects.SNAPSHOTS_BUCKET)
    await bucket.put(subjects.range_key(table, snapshot_id, number), codec.encode(dict(document), "json"))


async def forget_ranges(js: JetStreamContext, table: Table, snapshot_id: str) -> None:
    """Drop the notes of a snapshot that needs them no more."""
    await js.purge_stream(
        f"KV_{subjects.SNAPSHOTS_BUCKET}", subject=f"$KV.{subjects.SNAPSHOTS_BUCKET}.{table.token}.{snapshot_id}.*"
    )


async def drop_chunks(
    js: JetStreamContext, table: Table, snapshot_id: str, *, but: Sequence[Sequence[int]] = ()
) -> int:
    """Drop the chunks of a snapshot but those with numbers in these runs; says how many."""
    wanted = subjects.chunks_filter(table, snapshot_id)
    info = await js.stream_info(subjects.INIT_STREAM, subjects_filter=wanted)
    numbers = [int(subject.rpartition(".")[2]) for subject in info.state.subjects or ()]
    stray = [number for number in numbers if not any(first <= number <= last for first, last in but)]
    for number in stray:
        await js.purge_stream(subjects.INIT_STREAM, subject=subjects.chunk_subject(table, snapshot_id, number))
    return len(stray)


async def count_chunks(js: JetStreamContext, table: Table, snapshot_id: str) -> int:
    """How many different chunks of a snapshot the stream has, as far as it says: at most MOST_SUBJECTS."""
    wanted = subjects.chunks_filter(table, snapshot_id)
    info = await js.stream_info(subjects.INIT_STREAM, subjects_filter=wanted)
    return len(info.state.subjects or ())


async def publish_error(
    js: JetStreamContext, table: Table, document: Mapping[str, Any], *, encoding: Encoding = "msgpack"
) -> None:
    """Say that a snapshot failed, and why."""
    await js.publish(subjects.error_subject(table), codec.encode(dict(document), encoding))


async def schemas(js: JetStreamContext) -> dict[Table, dict[str, Any]]:
    """Everything that the bucket says of tables. What others keep there is passed over."""
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
    """The values of all keys that match."""
    watcher = await (await js.key_value(bucket)).watch(keys, ignore_deletes=True)
    found: dict[str, bytes] = {}
    try:
        # It says None when it has told everything that is there.
        while (entry := await watcher.updates(timeout=_ANSWER_SECONDS)) is not None:  # type: ignore[no-untyped-call]
            found[entry.key] = entry.value or b""
    finally:
        await watcher.stop()  # type: ignore[no-untyped-call]
    return found


def _stream(name: str, subject: str, limits: Limits) -> StreamConfig:
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
