"""Whether records fit the schemas that their topic is bound to, before anything of their batch is written."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from headwater.aio import AsyncHeadwater
from headwater.calls import registry as calls
from headwater.calls.kafka import KafkaTopic
from headwater.errors import HeadwaterError, LogUnavailable
from headwater.observability.metrics import ERROR, logger
from headwater.schema_registry import registry
from headwater.schema_registry.avro import AvroSchema
from headwater.schema_registry.run import PATIENCE_SECONDS, carry_out
from headwater.schema_registry.schemas import Parsed, Unfit
from headwater.servers.kafka.records import Columns
from headwater.servers.kafka.wire import ErrorCode

SUBJECT_AGE_SECONDS: Final = 1.0
"""How long after a version was registered or deleted a broker may still go by what it knew."""
MAX_SUBJECTS: Final = 1_000
MAX_SCHEMAS: Final = 200
MAX_IDS: Final = 50
"""Of how many schemas one batch may be."""
MAX_TOLD: Final = 1_000

FRAME_BYTES: Final = 5
# Beside the event loop: others of a broker do not wait while a large batch is looked at. Not the threads that compare
# schemas, which may take a while.
CHECKING: Final = ThreadPoolExecutor(2, thread_name_prefix="headwater records")


class Unfitting(Exception):
    """A batch that is not taken, with its records that do not fit."""

    def __init__(self, code: ErrorCode, message: str, records: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.records = records


class _Rule(NamedTuple):
    """What the keys or the values of a topic must fit."""

    part: str
    # None: each record's own name says which.
    subject: str | None
    # What comes before the name of a record in its subject.
    prefix: str
    framed: bool
    registered: frozenset[int]
    latest: int | None


class Validation:
    """Knows schemas and subjects that were asked for lately."""

    def __init__(self, log: AsyncHeadwater) -> None:
        self._log = log
        # Subject -> until when this holds, and the ids of its versions in order.
        self._subjects: OrderedDict[str, tuple[float, list[int]]] = OrderedDict()
        self._schemas: OrderedDict[int, Parsed] = OrderedDict()

    async def refuse_unfitting(self, topic: KafkaTopic, columns: Columns) -> None:
        """Raise Unfitting unless every record fits."""
        problems: dict[int, str] = {}
        try:
            for kind, payloads in (("key", columns.keys), ("value", columns.values)):
                if topic.schemas and kind in topic.schemas:
                    found = await self._problems(await self._rule(topic, kind), payloads)
                    problems.update({number: f"{kind}: {problem}" for number, problem in found.items()})
        except LogUnavailable as error:
            raise Unfitting(ErrorCode.request_timed_out, error.message) from None
        except HeadwaterError as error:
            logger.error("records could not be validated", extra={ERROR: str(error)})
            raise Unfitting(ErrorCode.invalid_config, f"the schema cannot be used: {error}") from None
        if problems:
            first = min(problems)
            raise Unfitting(
                ErrorCode.invalid_record,
                f"{len(problems)} of {len(columns.values)} records do not fit the schema of the topic; "
                f"record {first}, {problems[first]}",
                [
                    {"batch_index": number, "batch_index_error_message": problems[number]}
                    for number in sorted(problems)[:MAX_TOLD]
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
        """The numbers of records that do not fit, and why."""
        ids = {_id(payload) for payload in payloads if payload is not None}
        wanted = {one for one in ids if one is not None}
        if rule.subject is not None:
            wanted &= rule.registered
            if rule.latest is not None and not rule.framed:
                wanted.add(rule.latest)
        if len(wanted) > MAX_IDS:
            raise Unfitting(ErrorCode.invalid_record, f"a batch is of up to {MAX_IDS} schemas, not {len(wanted)}")
        known = {one: parsed for one in wanted if (parsed := await self._schema(one)) is not None}
        loop = asyncio.get_running_loop()
        problems, named = await loop.run_in_executor(CHECKING, _checked, rule, known, payloads)
        for (schema_id, name), numbers in named.items():
            subject = f"{rule.prefix}{name}"
            if schema_id not in await self._ids(subject):
                problems.update(dict.fromkeys(numbers, f"schema {schema_id} is not registered under {subject}"))
        return problems

    async def _ids(self, subject: str) -> list[int]:
        """The ids of the versions of a subject, as of a moment ago."""
        until, ids = self._subjects.get(subject, (0.0, []))
        now = time.monotonic()
        if now >= until:
            versions = await self._log.run(calls.versions(subject), patience_seconds=PATIENCE_SECONDS)
            ids = [schema_id for _, schema_id in versions]
            _remember(self._subjects, subject, (now + SUBJECT_AGE_SECONDS, ids), MAX_SUBJECTS)
        return ids

    async def _schema(self, schema_id: int) -> Parsed | None:
        """The schema with an id, which never means another."""
        parsed = self._schemas.get(schema_id)
        if parsed is None:
            parsed = await carry_out(self._log, registry.load(schema_id))
        if parsed is not None:
            _remember(self._schemas, schema_id, parsed, MAX_SCHEMAS)
        return parsed


def _remember(kept: OrderedDict[Any, Any], key: Any, value: Any, limit: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > limit:
        kept.popitem(last=False)


def _id(payload: bytes) -> int | None:
    """The id of the schema that a payload says it is of."""
    if len(payload) < FRAME_BYTES or payload[0] != 0:
        return None
    return int.from_bytes(payload[1:FRAME_BYTES], "big")


_Named = dict[tuple[int, str], list[int]]


def _checked(
    rule: _Rule, known: Mapping[int, Parsed], payloads: Sequence[bytes | None]
) -> tuple[dict[int, str], _Named]:
    """What does not fit; and, where the name of a record says its subject, which records have which."""
    problems: dict[int, str] = {}
    named: _Named = {}
    for number, payload in enumerate(payloads):
        # Without a payload there is nothing to fit: it deletes its key.
        if payload is None:
            continue
        schema_id = _id(payload)
        try:
            name = _check(rule, known, payload, schema_id)
        except Unfit as unfit:
            problems[number] = str(unfit)
            continue
        if rule.subject is None and schema_id is not None:
            named.setdefault((schema_id, name or ""), []).append(number)
    return problems, named


def _check(rule: _Rule, known: Mapping[int, Parsed], payload: bytes, schema_id: int | None) -> str | None:
    latest = None if rule.latest is None else known.get(rule.latest)
    try:
        if schema_id is not None and schema_id in known:
            return known[schema_id].check(payload[FRAME_BYTES:], framed=True)
        if schema_id is not None:
            where = "" if rule.subject is None else f" under {rule.subject}"
            raise Unfit(f"schema {schema_id} is not registered{where}")
    except Unfit:
        # A plain payload of Avro may begin as if it carried an id.
        if rule.framed or not isinstance(latest, AvroSchema):
            raise
        return latest.check(payload, framed=False)
    if rule.framed:
        raise Unfit("it carries no id of a schema")
    if latest is None:
        raise Unfit(f"subject {rule.subject} has no schema yet: register one")
    return latest.check(payload, framed=False)
