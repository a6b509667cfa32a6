"""Validation of produced records against the schemas of their topic, before their batch is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from headwater.aio import AsyncHeadwater
from headwater.bounded_dict import BoundedDict
from headwater.calls import registry as calls
from headwater.calls.kafka import KafkaTopic
from headwater.errors import HeadwaterError, LogUnavailable
from headwater.observability.metrics import ERROR, logger
from headwater.schema_registry import registry
from headwater.schema_registry.avro import AvroSchema
from headwater.schema_registry.run import run_steps
from headwater.schema_registry.schemas import ParsedSchema, PayloadMismatch
from headwater.servers.kafka.records import Columns
from headwater.servers.kafka.wire import ErrorCode

SUBJECT_AGE_SECONDS: Final = 1.0
"""Maximum age of the cached versions of a subject; changes by others are seen after this time."""
MAX_SUBJECTS: Final = 1_000
MAX_SCHEMAS: Final = 200
MAX_IDS: Final = 50
"""Maximum schemas of one batch."""
MAX_REPORTED_RECORDS: Final = 1_000

PREFIX_BYTES: Final = 5
# Threads, so that large batches do not block the event loop. Separate from the threads that compare schemas, which may
# be busy for long.
VALIDATION_POOL: Final = ThreadPoolExecutor(2, thread_name_prefix="headwater records")


class UnfitRecords(Exception):
    """A batch is rejected because of records that do not match the schema."""

    def __init__(self, code: ErrorCode, message: str, records: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.records = records


class _Rule(NamedTuple):
    """The schema rule for the keys or the values of a topic."""

    part: str
    # None: derived from the record name in the schema of each payload.
    subject: str | None
    # The prefix of the subject before the record name.
    prefix: str
    framed: bool
    registered: frozenset[int]
    latest: int | None


class SchemaValidator:
    """Validates records; caches recently used schemas and subjects."""

    def __init__(self, log: AsyncHeadwater) -> None:
        self._log = log
        # Subject -> expiry of this entry, and the schema ids of its versions in order.
        self._subjects: BoundedDict[str, tuple[float, list[int]]] = BoundedDict(MAX_SUBJECTS)
        self._schemas: BoundedDict[int, ParsedSchema] = BoundedDict(MAX_SCHEMAS)

    async def validate(self, topic: KafkaTopic, columns: Columns) -> None:
        """Raise UnfitRecords unless every record matches the schemas of the topic."""
        problems: dict[int, str] = {}
        try:
            for kind, payloads in (("key", columns.keys), ("value", columns.values)):
                if topic.schemas and kind in topic.schemas:
                    found = await self._problems(await self._rule(topic, kind), payloads)
                    problems.update({number: f"{kind}: {problem}" for number, problem in found.items()})
        except LogUnavailable as error:
            raise UnfitRecords(ErrorCode.request_timed_out, error.message) from None
        except HeadwaterError as error:
            logger.error("records could not be validated", extra={ERROR: str(error)})
            raise UnfitRecords(ErrorCode.invalid_config, f"the records cannot be validated: {error}") from None
        if problems:
            first = min(problems)
            raise UnfitRecords(
                ErrorCode.invalid_record,
                f"{len(problems)} of {len(columns.values)} records do not match the schema of the topic; "
                f"record {first}, {problems[first]}",
                [
                    {"batch_index": number, "batch_index_error_message": problems[number]}
                    for number in sorted(problems)[:MAX_REPORTED_RECORDS]
                ],
            )

    async def _rule(self, topic: KafkaTopic, kind: str) -> _Rule:
        assert topic.schemas is not None
        subject, framed, strategy = topic.schemas[kind]
        if subject is None and strategy != "TopicNameStrategy":
            return _Rule(kind, None, f"{topic.name}-" if strategy.startswith("Topic") else "", True, frozenset(), None)
        subject = subject or f"{topic.name}-{kind}"
        ids = await self._ids(subject)
        return _Rule(kind, subject, "", framed, frozenset(ids), ids[-1] if ids else None)

    async def _problems(self, rule: _Rule, payloads: Sequence[bytes | None]) -> dict[int, str]:
        """The indexes of records that do not match, and why."""
        ids = {_id(payload) for payload in payloads if payload is not None}
        wanted = {one for one in ids if one is not None}
        if rule.subject is not None:
            wanted &= rule.registered
            if rule.latest is not None and not rule.framed:
                wanted.add(rule.latest)
        if len(wanted) > MAX_IDS:
            raise UnfitRecords(
                ErrorCode.invalid_record, f"a batch with {len(wanted)} schemas: expected up to {MAX_IDS}"
            )
        known = {one: parsed for one in wanted if (parsed := await self._schema(one)) is not None}
        loop = asyncio.get_running_loop()
        problems, named = await loop.run_in_executor(VALIDATION_POOL, _check_all, rule, known, payloads)
        for (schema_id, name), numbers in named.items():
            subject = f"{rule.prefix}{name}"
            if schema_id not in await self._ids(subject):
                problems.update(dict.fromkeys(numbers, f"schema {schema_id} is not registered under {subject}"))
        return problems

    async def _ids(self, subject: str) -> list[int]:
        """The schema ids of the versions of a subject, from a recent copy."""
        until, ids = self._subjects.get(subject, (0.0, []))
        now = time.monotonic()
        if now >= until:
            versions = await self._log.run(calls.versions(subject))
            ids = [schema_id for _, schema_id in versions]
            self._subjects[subject] = (now + SUBJECT_AGE_SECONDS, ids)
        return ids

    async def _schema(self, schema_id: int) -> ParsedSchema | None:
        """The schema with an id. Ids are never reassigned, so the cache does not expire."""
        parsed = self._schemas.get(schema_id)
        if parsed is None:
            parsed = await run_steps(self._log, registry.load(schema_id))
        if parsed is not None:
            self._schemas[schema_id] = parsed
        return parsed


def _id(payload: bytes) -> int | None:
    """The schema id in the prefix of a payload (Confluent wire format), if present."""
    if len(payload) < PREFIX_BYTES or payload[0] != 0:
        return None
    return int.from_bytes(payload[1:PREFIX_BYTES], "big")


_Named = dict[tuple[int, str], list[int]]


def _check_all(
    rule: _Rule, known: Mapping[int, ParsedSchema], payloads: Sequence[bytes | None]
) -> tuple[dict[int, str], _Named]:
    """Records that do not match, and why; and records by schema id and name, where the name determines the subject."""
    problems: dict[int, str] = {}
    named: _Named = {}
    for number, payload in enumerate(payloads):
        # A tombstone has no payload to validate.
        if payload is None:
            continue
        schema_id = _id(payload)
        try:
            name = _check(rule, known, payload, schema_id)
        except PayloadMismatch as unfit:
            problems[number] = str(unfit)
            continue
        if rule.subject is None and schema_id is not None:
            named.setdefault((schema_id, name or ""), []).append(number)
    return problems, named


def _check(rule: _Rule, known: Mapping[int, ParsedSchema], payload: bytes, schema_id: int | None) -> str | None:
    latest = None if rule.latest is None else known.get(rule.latest)
    try:
        if schema_id is not None and schema_id in known:
            return known[schema_id].check(payload[PREFIX_BYTES:], framed=True)
        if schema_id is not None:
            where = "" if rule.subject is None else f" under {rule.subject}"
            raise PayloadMismatch(f"schema {schema_id} is not registered{where}")
    except PayloadMismatch:
        # A plain Avro payload may begin with bytes that look like a schema id.
        if rule.framed or not isinstance(latest, AvroSchema):
            raise
        return latest.check(payload, framed=False)
    if rule.framed:
        raise PayloadMismatch("the payload has no schema id prefix")
    if latest is None:
        raise PayloadMismatch(f"subject {rule.subject} has no schema: register one")
    return latest.check(payload, framed=False)
