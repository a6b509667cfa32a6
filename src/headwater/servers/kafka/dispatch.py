"""Dispatch of requests: maps each API key to the method that handles it.

`server.py` decodes a request and calls `ApiDispatcher.begin`. Produce is begun in the order of arrival and awaited
later, so that several produce requests of one connection share a transaction; all other APIs are awaited one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from headwater.servers.kafka.api_keys import SUPPORTED_VERSIONS, ApiKey
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.classic_protocol import ClassicGroupApis
from headwater.servers.kafka.consumer_protocol import ConsumerGroupApis
from headwater.servers.kafka.fetch import FetchApi
from headwater.servers.kafka.offsets import OffsetApis
from headwater.servers.kafka.partitions import PartitionApis
from headwater.servers.kafka.produce import ProduceApi
from headwater.servers.kafka.security import AclApis, CredentialApis
from headwater.servers.kafka.topics import TopicApis
from headwater.servers.kafka.transactions import FIRST_PRODUCE_WITH_IMPLICIT_BEGIN, TransactionApis
from headwater.servers.kafka.wire import ErrorCode, Request
from headwater.supervisor import supervise

FEATURES: Final[Mapping[str, int]] = {"group.version": 1, "transaction.version": 2}
"""Finalized features: consumer groups of KIP-848, and transactions that raise the producer's epoch (KIP-890)."""

MEMBER_APIS: Final = (ApiKey.JOIN_GROUP, ApiKey.HEARTBEAT, ApiKey.LEAVE_GROUP, ApiKey.SYNC_GROUP)
"""APIs that only members of a classic group call; they need the permission to read the group."""

Response = dict[str, Any] | None
"""The fields of a response. None: the client expects no response (acks=0)."""


class ApiDispatcher:
    """All APIs of a broker, and the background tasks that they need."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._produce = ProduceApi(broker)
        self._consumer_groups = ConsumerGroupApis(broker)
        self._classic_groups = groups = ClassicGroupApis(broker, self._consumer_groups)
        topics = TopicApis(broker)
        topic_partitions = PartitionApis(broker)
        acls = AclApis(broker)
        credentials = CredentialApis(broker)
        offsets = OffsetApis(broker, groups)
        self._transactions = transactions = TransactionApis(broker, groups, offsets)
        self._handlers: dict[ApiKey, Callable[[Request], Awaitable[dict[str, Any]]]] = {
            ApiKey.FETCH: FetchApi(broker).fetch,
            ApiKey.LIST_OFFSETS: topic_partitions.list_offsets,
            ApiKey.METADATA: topics.metadata,
            ApiKey.OFFSET_COMMIT: offsets.commit,
            ApiKey.OFFSET_FETCH: offsets.fetch_offsets,
            ApiKey.FIND_COORDINATOR: groups.find_coordinator,
            ApiKey.HEARTBEAT: groups.heartbeat,
            ApiKey.LEAVE_GROUP: groups.leave,
            ApiKey.SYNC_GROUP: groups.sync,
            ApiKey.DESCRIBE_GROUPS: groups.describe,
            ApiKey.LIST_GROUPS: groups.list,
            ApiKey.API_VERSIONS: self._api_versions,
            ApiKey.CREATE_TOPICS: topics.create,
            ApiKey.DELETE_TOPICS: topics.delete,
            ApiKey.DELETE_RECORDS: topic_partitions.delete_records,
            ApiKey.INIT_PRODUCER_ID: transactions.init_producer,
            ApiKey.OFFSET_FOR_LEADER_EPOCH: topic_partitions.offset_for_leader_epoch,
            ApiKey.ADD_PARTITIONS_TO_TXN: transactions.add_partitions,
            ApiKey.ADD_OFFSETS_TO_TXN: transactions.add_offsets,
            ApiKey.END_TXN: transactions.end,
            ApiKey.TXN_OFFSET_COMMIT: transactions.commit_offsets,
            ApiKey.DESCRIBE_ACLS: acls.describe,
            ApiKey.CREATE_ACLS: acls.create,
            ApiKey.DELETE_ACLS: acls.delete,
            ApiKey.DESCRIBE_CONFIGS: topics.describe_configs,
            ApiKey.ALTER_CONFIGS: topics.alter_configs,
            ApiKey.DESCRIBE_LOG_DIRS: topic_partitions.describe_log_dirs,
            ApiKey.CREATE_PARTITIONS: topics.create_partitions,
            ApiKey.DELETE_GROUPS: groups.delete,
            ApiKey.ELECT_LEADERS: topics.elect_leaders,
            ApiKey.INCREMENTAL_ALTER_CONFIGS: topics.incremental_alter_configs,
            ApiKey.LIST_PARTITION_REASSIGNMENTS: topics.list_reassignments,
            ApiKey.OFFSET_DELETE: offsets.delete_offsets,
            ApiKey.DESCRIBE_CLIENT_QUOTAS: topics.describe_quotas,
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: credentials.describe,
            ApiKey.ALTER_USER_SCRAM_CREDENTIALS: credentials.alter,
            ApiKey.DESCRIBE_CLUSTER: topics.describe_cluster,
            ApiKey.DESCRIBE_PRODUCERS: transactions.describe_producers,
            ApiKey.DESCRIBE_TRANSACTIONS: transactions.describe,
            ApiKey.LIST_TRANSACTIONS: transactions.list_all,
            ApiKey.CONSUMER_GROUP_DESCRIBE: self._consumer_groups.describe,
            ApiKey.LIST_CONFIG_RESOURCES: topics.list_config_resources,
            ApiKey.DESCRIBE_TOPIC_PARTITIONS: topics.describe_topic_partitions,
        }

    def tasks(self) -> list[asyncio.Task[None]]:
        """Start the background tasks; they run until they are cancelled."""
        return [
            *self._produce.tasks(),
            supervise("kafka groups", self._classic_groups.run),
            supervise("kafka heartbeats", self._consumer_groups.run),
        ]

    async def begin(self, request: Request, client_host: str) -> Awaitable[Response]:
        """Begin a request and return an awaitable for its response. Further requests may begin before it completes."""
        if request.api == ApiKey.PRODUCE:
            may_begin = request.version >= FIRST_PRODUCE_WITH_IMPLICIT_BEGIN
            return await self._produce.begin(request, partial(self._transactions.stage, may_begin=may_begin))
        if request.api in MEMBER_APIS and not request.allowed("read", "consumer", request.fields.group_id):
            return _error_response(ErrorCode.group_authorization_failed)
        if request.api == ApiKey.JOIN_GROUP:
            return self._classic_groups.join(request, client_host)
        if request.api == ApiKey.CONSUMER_GROUP_HEARTBEAT:
            classic = self._classic_groups.has_members(request.fields.group_id)
            return self._consumer_groups.heartbeat(request, client_host, classic=classic)
        return self._handlers[request.api](request)

    async def _api_versions(self, request: Request) -> dict[str, Any]:
        return api_versions(ErrorCode.none)


async def _error_response(code: ErrorCode) -> Response:
    return {"error_code": code}


def api_versions(code: ErrorCode) -> dict[str, Any]:
    return {
        "error_code": code,
        "api_keys": [
            {"api_key": api, "min_version": oldest, "max_version": newest}
            for api, (oldest, newest) in SUPPORTED_VERSIONS.items()
        ],
        "supported_features": [
            {"name": name, "min_version": 0, "max_version": level} for name, level in FEATURES.items()
        ],
        "finalized_features_epoch": 1,
        "finalized_features": [
            {"name": name, "min_version_level": level, "max_version_level": level} for name, level in FEATURES.items()
        ],
    }
