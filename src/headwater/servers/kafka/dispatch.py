"""Which APIs are offered in which versions, and what answers each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.classic_protocol import Groups
from headwater.servers.kafka.consumer_protocol import Heartbeats
from headwater.servers.kafka.fetch import Fetching
from headwater.servers.kafka.offsets import Offsets
from headwater.servers.kafka.partitions import Lanes
from headwater.servers.kafka.produce import Producing
from headwater.servers.kafka.security import Acls, Credentials
from headwater.servers.kafka.topics import Topics
from headwater.servers.kafka.transactions import FIRST_PRODUCE_THAT_BEGINS, Transactions
from headwater.servers.kafka.wire import API_VERSIONS, PRODUCE, ErrorCode, Request
from headwater.supervisor import supervise

OFFERED: Final[Mapping[int, tuple[int, int]]] = {
    # Versions below 3 are refused when used; yet without them old librdkafka would quietly stop compressing.
    PRODUCE: (0, 13),
    1: (4, 18),
    2: (1, 10),
    3: (0, 13),
    8: (2, 10),
    9: (1, 10),
    10: (0, 6),
    11: (0, 9),
    12: (0, 4),
    13: (0, 5),
    14: (0, 5),
    15: (0, 6),
    16: (0, 5),
    17: (1, 1),
    API_VERSIONS: (0, 4),
    19: (2, 7),
    20: (1, 6),
    21: (0, 2),
    22: (0, 5),
    23: (2, 4),
    24: (0, 3),
    25: (0, 4),
    26: (0, 5),
    28: (0, 5),
    29: (1, 3),
    30: (1, 3),
    31: (1, 3),
    32: (1, 4),
    33: (0, 2),
    35: (1, 4),
    36: (0, 2),
    37: (0, 3),
    42: (0, 2),
    43: (0, 2),
    44: (0, 1),
    46: (0, 0),
    47: (0, 0),
    48: (0, 1),
    50: (0, 0),
    51: (0, 0),
    60: (0, 2),
    61: (0, 0),
    65: (0, 0),
    66: (0, 1),
    68: (0, 1),
    69: (0, 1),
    74: (0, 1),
    75: (0, 0),
}

FEATURES: Final[Mapping[str, int]] = {"group.version": 1, "transaction.version": 2}
"""What clients ask for by name: groups of the server-side protocol, and transactions with an epoch each."""

JOIN: Final = 11
HEARTBEAT: Final = 68
OF_MEMBERS: Final = (JOIN, 12, 13, 14)
"""What only members of a group ask."""

Answer = dict[str, Any] | None


class Apis:
    """All that a broker answers. None: the client wants no answer."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._producing = Producing(broker)
        self._heartbeats = Heartbeats(broker)
        self._groups = Groups(broker, self._heartbeats)
        topics = Topics(broker)
        lanes = Lanes(broker)
        acls = Acls(broker)
        credentials = Credentials(broker)
        groups = self._groups
        offsets = Offsets(broker, groups)
        self._transactions = transactions = Transactions(broker, groups, offsets)
        self._handlers: dict[int, Callable[[Request], Awaitable[dict[str, Any]]]] = {
            1: Fetching(broker).fetch,
            2: lanes.list_offsets,
            3: topics.metadata,
            8: offsets.commit,
            9: offsets.fetch_offsets,
            10: groups.find_coordinator,
            12: groups.heartbeat,
            13: groups.leave,
            14: groups.sync,
            15: groups.describe,
            16: groups.list,
            API_VERSIONS: self._api_versions,
            19: topics.create,
            20: topics.delete,
            21: lanes.delete_records,
            22: transactions.init_producer,
            23: lanes.offset_for_leader_epoch,
            24: transactions.add_partitions,
            25: transactions.add_offsets,
            26: transactions.end,
            28: transactions.commit_offsets,
            29: acls.describe,
            30: acls.create,
            31: acls.delete,
            32: topics.describe_configs,
            33: topics.alter_configs,
            35: lanes.describe_log_dirs,
            37: topics.create_partitions,
            42: groups.delete,
            43: topics.elect_leaders,
            44: topics.incremental_alter_configs,
            46: topics.list_reassignments,
            47: offsets.delete_offsets,
            48: topics.describe_quotas,
            50: credentials.describe,
            51: credentials.alter,
            60: topics.describe_cluster,
            61: transactions.describe_producers,
            65: transactions.describe,
            66: transactions.list_all,
            69: self._heartbeats.describe,
            74: topics.list_config_resources,
            75: topics.describe_topic_partitions,
        }

    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs beside the answers, until it is cancelled."""
        return [
            *self._producing.tasks(),
            supervise("kafka groups", self._groups.run),
            supervise("kafka heartbeats", self._heartbeats.run),
        ]

    async def begin(self, request: Request, client_host: str) -> Awaitable[Answer]:
        """Begin to answer. What comes back is awaited for the answer; requests may be begun before it is there."""
        if request.api == PRODUCE:
            may_begin = request.version >= FIRST_PRODUCE_THAT_BEGINS
            return await self._producing.begin(request, partial(self._transactions.stage, may_begin=may_begin))
        if request.api in OF_MEMBERS and not request.allowed("read", "group", request.fields.group_id):
            return _told(ErrorCode.group_authorization_failed)
        if request.api == JOIN:
            return self._groups.join(request, client_host)
        if request.api == HEARTBEAT:
            classic = self._groups.has_members(request.fields.group_id)
            return self._heartbeats.heartbeat(request, client_host, classic=classic)
        return self._handlers[request.api](request)

    async def _api_versions(self, request: Request) -> dict[str, Any]:
        return api_versions(ErrorCode.none)


async def _told(code: ErrorCode) -> Answer:
    return {"error_code": code}


def api_versions(code: ErrorCode) -> dict[str, Any]:
    return {
        "error_code": code,
        "api_keys": [
            {"api_key": api, "min_version": oldest, "max_version": newest} for api, (oldest, newest) in OFFERED.items()
        ],
        "supported_features": [
            {"name": name, "min_version": 0, "max_version": level} for name, level in FEATURES.items()
        ],
        "finalized_features_epoch": 1,
        "finalized_features": [
            {"name": name, "min_version_level": level, "max_version_level": level} for name, level in FEATURES.items()
        ],
    }
