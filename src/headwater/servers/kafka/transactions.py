"""Transactions of producers, and producer ids.

The records and offsets of an open transaction are staged in Postgres. The end of the transaction moves them to the log
and to the committed offsets in one Postgres transaction. Any broker can serve any transaction.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final
from weakref import WeakValueDictionary

import psycopg

from headwater.calls import kafka as calls
from headwater.calls.kafka import AppendBatch, OpenTransaction, ProduceResult
from headwater.errors import LogUnavailable, TransactionAborted
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.classic_protocol import ClassicGroupApis
from headwater.servers.kafka.offsets import OffsetApis
from headwater.servers.kafka.wire import ErrorCode, Request

MAX_TIMEOUT_MS: Final = 900_000
# From these versions on (KIP-890), the first batch or offset begins the transaction, and its end raises the epoch.
FIRST_PRODUCE_WITH_IMPLICIT_BEGIN: Final = 12
FIRST_OFFSET_COMMIT_WITH_IMPLICIT_BEGIN: Final = 5
FIRST_END_WITH_EPOCH_BUMP: Final = 5

_CODES: Final = {
    "ok": ErrorCode.none,
    "unknown": ErrorCode.invalid_producer_id_mapping,
    "fenced": ErrorCode.producer_fenced,
    "no transaction": ErrorCode.invalid_txn_state,
}


def _code(outcome: str, *, knows_fenced: bool) -> ErrorCode:
    code = _CODES[outcome]
    # Older clients do not know PRODUCER_FENCED.
    old = code is ErrorCode.producer_fenced and not knows_fenced
    return ErrorCode.invalid_producer_epoch if old else code


def _request_error(request: Request, transactional_id: str) -> ErrorCode | None:
    """The error for an invalid or unauthorized transactional id, before Postgres is queried."""
    if "\x00" in transactional_id:
        # No producer can have an id with NUL.
        return ErrorCode.invalid_producer_id_mapping
    allowed = request.allowed("write", "transaction", transactional_id)
    return None if allowed else ErrorCode.transactional_id_authorization_failed


class TransactionApis:
    """The APIs of idempotent and transactional producers."""

    def __init__(self, broker: Broker, groups: ClassicGroupApis, offsets: OffsetApis) -> None:
        self._broker = broker
        self._groups = groups
        self._offsets = offsets
        # Batches of a producer are staged in the order of arrival, or their sequence numbers would not match.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def init_producer(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        refused = {"producer_id": -1, "producer_epoch": -1}
        if fields.transactional_id is None:
            producer_id = await self._broker.log.run(calls.kafka_new_producer())
            return {"error_code": ErrorCode.none, "producer_id": producer_id, "producer_epoch": 0}
        if not fields.transactional_id or "\x00" in fields.transactional_id:
            return {"error_code": ErrorCode.invalid_request, **refused}
        if not request.allowed("write", "transaction", fields.transactional_id):
            return {"error_code": ErrorCode.transactional_id_authorization_failed, **refused}
        if not 1 <= fields.transaction_timeout <= MAX_TIMEOUT_MS:
            return {"error_code": ErrorCode.invalid_transaction_timeout, **refused}
        outcome, producer_id, epoch = await self._broker.log.run(
            calls.kafka_init_transactions(
                fields.transactional_id,
                timeout_ms=fields.transaction_timeout,
                known_id=getattr(fields, "producer_id", -1),
                known_epoch=getattr(fields, "producer_epoch", -1),
            ),
        )
        if outcome != "ok":
            return {"error_code": _code(outcome, knows_fenced=request.version >= 4), **refused}
        return {"error_code": ErrorCode.none, "producer_id": producer_id, "producer_epoch": epoch}

    async def add_partitions(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        requested = fields.v3_and_below_topics or ()
        missing = set()
        refused = _request_error(request, fields.v3_and_below_transactional_id)
        for one in requested:
            if not request.allowed("write", "topic", one.name):
                refused = refused or ErrorCode.transactional_id_authorization_failed
            topic = await self._broker.topic_named(one.name)
            missing |= {
                (one.name, index)
                for index in one.partitions or ()
                if topic is None or not topic.writable or not 0 <= index < topic.partitions
            }
        code = ErrorCode.operation_not_attempted
        if refused is not None:
            code = refused
        elif not missing:
            outcome = await self._broker.log.run(
                calls.kafka_begin(
                    fields.v3_and_below_transactional_id,
                    fields.v3_and_below_producer_id,
                    fields.v3_and_below_producer_epoch,
                ),
            )
            code = _code(outcome, knows_fenced=request.version >= 2)
        return {
            "results_by_topic_v3_and_below": [
                {
                    "name": one.name,
                    "results_by_partition": [
                        {
                            "partition_index": index,
                            "partition_error_code": ErrorCode.unknown_topic_or_partition
                            if (one.name, index) in missing
                            else code,
                        }
                        for index in one.partitions or ()
                    ],
                }
                for one in requested
            ]
        }

    async def add_offsets(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        if (error := _request_error(request, fields.transactional_id)) is not None:
            return {"error_code": error}
        if not request.allowed("read", "consumer", fields.group_id):
            return {"error_code": ErrorCode.group_authorization_failed}
        call = calls.kafka_begin(fields.transactional_id, fields.producer_id, fields.producer_epoch)
        outcome = await self._broker.log.run(call)
        return {"error_code": _code(outcome, knows_fenced=request.version >= 2)}

    async def stage(self, transactional_id: str, batch: AppendBatch, *, may_begin: bool) -> ProduceResult:
        """Stage a batch; its offset is not known before the transaction ends."""
        lock = self._locks.setdefault(transactional_id, asyncio.Lock())
        async with lock:
            outcome = await self._broker.impatient.run(calls.kafka_stage(transactional_id, batch, may_begin=may_begin))
        return ProduceResult(outcome, -1, -1)

    async def commit_offsets(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        refused = _request_error(request, fields.transactional_id)
        if refused is None and not request.allowed("read", "consumer", fields.group_id):
            refused = ErrorCode.group_authorization_failed
        if refused is None:
            refused = await self._groups.commit_error(
                fields.group_id,
                getattr(fields, "member_id", ""),
                getattr(fields, "group_instance_id", None),
                getattr(fields, "generation_id", -1),
                transactional=True,
            )
        topics, offsets = await self._offsets.offsets_of(request, refused, by_id=False)
        if offsets:
            outcome = await self._broker.log.run(
                calls.kafka_stage_offsets(
                    fields.transactional_id,
                    fields.producer_id,
                    fields.producer_epoch,
                    fields.group_id,
                    offsets,
                    may_begin=request.version >= FIRST_OFFSET_COMMIT_WITH_IMPLICIT_BEGIN,
                ),
            )
            code = _code(outcome, knows_fenced=False)
            if code is not ErrorCode.none:
                topics = [
                    {**topic, "partitions": [{**part, "error_code": code} for part in topic["partitions"]]}
                    for topic in topics
                ]
        return {"topics": topics}

    async def end(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        if (error := _request_error(request, fields.transactional_id)) is not None:
            return {"error_code": error}
        next_epoch = request.version >= FIRST_END_WITH_EPOCH_BUMP
        call = calls.kafka_end_transaction(
            fields.transactional_id,
            fields.producer_id,
            fields.producer_epoch,
            committed=fields.committed,
            next_epoch=next_epoch,
        )
        try:
            # Retries are safe: ending a transaction is idempotent.
            outcome, producer_id, epoch = await self._broker.log.run(call)
        except (psycopg.errors.LockNotAvailable, TransactionAborted, LogUnavailable):
            return {"error_code": ErrorCode.concurrent_transactions}
        code = _code(outcome, knows_fenced=request.version >= 2)
        if code is not ErrorCode.none or not next_epoch:
            return {"error_code": code}
        return {"error_code": code, "producer_id": producer_id, "producer_epoch": epoch}

    # Describing transactions and producers

    async def describe_producers(self, request: Request) -> dict[str, Any]:
        topics = []
        for one in request.fields.topics or ():
            topic = await self._broker.topic_named(one.name)
            denied = not request.allowed("read", "topic", one.name)
            producers = []
            if topic is not None and not denied:
                producers = await self._broker.log.run(calls.kafka_producers(topic.id))
            partitions = []
            for index in one.partition_indexes or ():
                code = ErrorCode.topic_authorization_failed if denied else ErrorCode.none
                if not denied and (topic is None or not 0 <= index < topic.partitions):
                    code = ErrorCode.unknown_topic_or_partition
                active = [
                    {
                        "producer_id": known.producer_id,
                        "producer_epoch": known.epoch,
                        "last_sequence": known.last_sequence,
                        "last_timestamp": known.last_batch_ms,
                        "coordinator_epoch": -1,
                        "current_txn_start_offset": -1,
                    }
                    for known in producers
                    if known.topic_partition.partition == index
                ]
                partitions.append({"partition_index": index, "error_code": code, "active_producers": active})
            topics.append({"name": one.name, "partitions": partitions})
        return {"topics": topics}

    async def describe(self, request: Request) -> dict[str, Any]:
        known = {one.transactional_id: one for one in await self._all()}
        names = {topic.id: topic.name for topic in await self._broker.topics(as_of_now=True)}
        states = []
        for transactional_id in request.fields.transactional_ids or ():
            found = known.get(transactional_id)
            if not request.allowed("describe", "transaction", transactional_id):
                code = ErrorCode.transactional_id_authorization_failed
                states.append({"error_code": code, "transactional_id": transactional_id})
            elif found is None:
                code = ErrorCode.transactional_id_not_found
                states.append({"error_code": code, "transactional_id": transactional_id})
            else:
                topics: dict[str, list[int]] = {}
                for topic_partition in found.topic_partitions:
                    if topic_partition.topic_id in names:
                        topics.setdefault(names[topic_partition.topic_id], []).append(topic_partition.partition)
                states.append(
                    {
                        "error_code": ErrorCode.none,
                        "transactional_id": transactional_id,
                        "transaction_state": _state(found),
                        "transaction_timeout": found.timeout_ms,
                        "transaction_start_time": -1 if found.began_ms is None else found.began_ms,
                        "producer_id": found.producer_id,
                        "producer_epoch": found.epoch,
                        "topics": [{"topic": name, "partitions": parts} for name, parts in topics.items()],
                    }
                )
        return {"transaction_states": states}

    async def list_all(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        wanted = set(fields.state_filters or ())
        producers = set(fields.producer_id_filters or ())
        longer_ms = getattr(fields, "duration_filter", -1)
        now_ms = time.time() * 1000
        # Tools query all brokers and merge the results, so each transaction is listed by one broker only.
        await self._broker.refresh_brokers()
        return {
            "error_code": ErrorCode.none,
            "unknown_state_filters": sorted(wanted - set(_STATES)),
            "transaction_states": [
                {
                    "transactional_id": one.transactional_id,
                    "producer_id": one.producer_id,
                    "transaction_state": _state(one),
                }
                for one in await self._all()
                if self._broker.speaks_for(one.transactional_id)
                and (not wanted or _state(one) in wanted)
                and (not producers or one.producer_id in producers)
                and (longer_ms < 0 or (one.began_ms is not None and now_ms - one.began_ms > longer_ms))
                and request.allowed("describe", "transaction", one.transactional_id)
            ],
        }

    async def _all(self) -> list[OpenTransaction]:
        return await self._broker.log.run(calls.kafka_transactions())


_STATES: Final = ("Empty", "Ongoing", "CompleteCommit", "CompleteAbort")


def _state(one: OpenTransaction) -> str:
    """The state under its name in Kafka."""
    if one.began_ms is not None:
        return "Ongoing"
    return {"committed": "CompleteCommit", "aborted": "CompleteAbort"}.get(one.last_outcome or "", "Empty")
