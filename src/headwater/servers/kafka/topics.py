"""What clients ask of topics: which there are, and their settings; making, changing and deleting them."""

from __future__ import annotations

from typing import Any, Final

from headwater import calls as log_calls
from headwater.calls import kafka as calls
from headwater.calls.kafka import KafkaTopic, Lane
from headwater.errors import HeadwaterError, InvalidRequest, NotAllowed, SchemaNotFound, TopicExists, TopicNotFound
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.configs import (
    TOPIC_CONFIGS,
    BadConfig,
    after,
    change_of,
    described,
    described_broker,
    topic_values,
)
from headwater.servers.kafka.wire import ErrorCode, Request

TOPIC, BROKER = 2, 4
_CLIENT_METRICS: Final = 16
_RESOURCES: Final = (TOPIC, BROKER, 8, _CLIENT_METRICS, 32)
"""What can be asked for by number: topics, brokers, loggers of brokers, metrics of clients, groups."""
# Which operations a client may do is not told: nobody asked the log yet.
UNKNOWN_OPERATIONS: Final = -(2**31)


def code_for(error: HeadwaterError) -> ErrorCode:
    """Kafka's code for an error of ours, where topics are made or changed."""
    if isinstance(error, TopicExists):
        return ErrorCode.topic_already_exists
    if isinstance(error, TopicNotFound):
        return ErrorCode.unknown_topic_or_partition
    if isinstance(error, NotAllowed):
        return ErrorCode.topic_authorization_failed
    if isinstance(error, SchemaNotFound):
        return ErrorCode.invalid_config
    if isinstance(error, InvalidRequest):
        return ErrorCode.invalid_request
    return ErrorCode.request_timed_out


class Topics:
    """The APIs about topics."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def metadata(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        await self._broker.refresh_brokers()
        asked = fields.topics
        if asked is None or (request.version == 0 and not asked):
            topics = [
                self._described(topic)
                for topic in await self._broker.topics(as_of_now=True)
                if request.allowed("describe", "topic", topic.name)
            ]
        else:
            may_create = getattr(fields, "allow_auto_topic_creation", True)
            topics = [await self._one(request, one, may_create=may_create) for one in asked]
        return {
            "brokers": self._brokers(),
            "cluster_id": str(self._broker.cluster_id),
            "controller_id": self._controller(),
            "topics": topics,
            "cluster_authorized_operations": UNKNOWN_OPERATIONS,
        }

    async def _one(self, request: Request, asked: Any, *, may_create: bool) -> dict[str, Any]:
        uuid = getattr(asked, "topic_id", None)
        if not asked.name:
            # By its id. The Java client then gives an empty name.
            topic = await self._broker.topic_with_uuid(uuid)
            if topic is None or not request.allowed("describe", "topic", topic.name):
                code = ErrorCode.invalid_topic_exception if uuid is None else ErrorCode.unknown_topic_id
                return {"error_code": code, "name": asked.name, "topic_id": uuid, "partitions": ()}
            return self._described(topic)
        if not request.allowed("describe", "topic", asked.name):
            code = ErrorCode.topic_authorization_failed
            return {"error_code": code, "name": asked.name, "topic_id": None, "partitions": ()}
        topic = await self._broker.topic_named(asked.name)
        code = ErrorCode.unknown_topic_or_partition
        if topic is None and may_create and _may_create(request, asked.name):
            try:
                call = calls.kafka_create_missing(asked.name, self._broker.settings.default_partitions)
                if await self._broker.log.run(call, patience_seconds=5) is not None:
                    await self._broker.refresh_topics()
                    topic = await self._broker.topic_named(asked.name)
            except InvalidRequest:
                code = ErrorCode.invalid_topic_exception
        if topic is None:
            return {"error_code": code, "name": asked.name, "topic_id": None, "partitions": ()}
        return self._described(topic)

    def _described(self, topic: KafkaTopic) -> dict[str, Any]:
        return {
            "error_code": ErrorCode.none,
            "name": topic.name,
            "topic_id": self._broker.uuid_of(topic),
            "is_internal": False,
            "partitions": [self._partition(topic, index) for index in range(topic.partitions)],
            "topic_authorized_operations": UNKNOWN_OPERATIONS,
        }

    def _partition(self, topic: KafkaTopic, index: int) -> dict[str, Any]:
        leader = self._broker.leader_of(Lane(topic.id, index))
        return {
            "error_code": ErrorCode.none,
            "partition_index": index,
            "leader_id": leader,
            # Any broker may serve any lane. Epochs change when offsets may be issued again, as in Kafka.
            "leader_epoch": self._broker.leader_epoch,
            "replica_nodes": (leader,),
            "isr_nodes": (leader,),
            "eligible_leader_replicas": (),
            "last_known_elr": (),
            "offline_replicas": (),
        }

    def _brokers(self) -> list[dict[str, Any]]:
        return [
            {"node_id": one.node_id, "broker_id": one.node_id, "host": one.host, "port": one.port, "rack": None}
            for one in self._broker.brokers
        ]

    def _controller(self) -> int:
        return min((one.node_id for one in self._broker.brokers), default=self._broker.node_id)

    async def describe_cluster(self, request: Request) -> dict[str, Any]:
        if getattr(request.fields, "endpoint_type", 1) != 1:
            return {
                "error_code": ErrorCode.unsupported_endpoint_type,
                "error_message": "there are no controllers apart from the brokers",
                "cluster_id": str(self._broker.cluster_id),
                "controller_id": -1,
                "endpoint_type": request.fields.endpoint_type,
            }
        await self._broker.refresh_brokers()
        return {
            "endpoint_type": 1,
            "cluster_id": str(self._broker.cluster_id),
            "controller_id": self._controller(),
            "brokers": self._brokers(),
            "cluster_authorized_operations": UNKNOWN_OPERATIONS,
        }

    async def describe_topic_partitions(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        await self._broker.refresh_brokers()
        asked = {one.name for one in fields.topics or ()}
        names = sorted(asked or {topic.name for topic in await self._broker.topics(as_of_now=True)})
        left = min(max(fields.response_partition_limit, 1), 2000)
        start = (fields.cursor.topic_name, fields.cursor.partition_index) if fields.cursor else ("", 0)
        topics: list[dict[str, Any]] = []
        for name in names:
            if name < start[0]:
                continue
            topic = await self._broker.topic_named(name)
            if topic is None or not request.allowed("describe", "topic", name):
                if asked:
                    topics.append({"error_code": ErrorCode.unknown_topic_or_partition, "name": name, "partitions": ()})
                continue
            first = start[1] if name == start[0] else 0
            shown = range(first, min(topic.partitions, first + left))
            left -= len(shown)
            topics.append({**self._described(topic), "partitions": [self._partition(topic, index) for index in shown]})
            if shown.stop < topic.partitions or left <= 0:
                more = shown.stop < topic.partitions
                following = names[names.index(name) + 1 :]
                cursor = (name, shown.stop) if more else (following[0], 0) if following else None
                return {
                    "topics": topics,
                    "next_cursor": cursor and {"topic_name": cursor[0], "partition_index": cursor[1]},
                }
        return {"topics": topics, "next_cursor": None}

    async def list_reassignments(self, request: Request) -> dict[str, Any]:
        """Nothing is ever on its way from one broker to another."""
        return {"error_code": ErrorCode.none, "topics": ()}

    async def elect_leaders(self, request: Request) -> dict[str, Any]:
        """Who leads what follows from who lives: there is nothing to elect."""
        if not request.allowed("alter", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "replica_election_results": ()}
        results = []
        # All partitions are asked for by none, and those that need no election are then not told.
        for asked in request.fields.topic_partitions or ():
            topic = await self._broker.topic_named(asked.topic)
            answers = []
            for index in asked.partitions or ():
                known = topic is not None and 0 <= index < topic.partitions
                code = ErrorCode.election_not_needed if known else ErrorCode.unknown_topic_or_partition
                answers.append({"partition_id": index, "error_code": code, "error_message": None})
            results.append({"topic": asked.topic, "partition_result": answers})
        return {"error_code": ErrorCode.none, "replica_election_results": results}

    async def describe_quotas(self, request: Request) -> dict[str, Any]:
        """Nobody has a quota. An empty list: clients trip over none at all."""
        allowed = request.allowed("describe", "log", "*")
        return {"error_code": ErrorCode.none if allowed else ErrorCode.cluster_authorization_failed, "entries": ()}

    # Making and changing

    async def create(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        answers = []
        names = [one.name for one in fields.topics or ()]
        for one in fields.topics or ():
            answer: dict[str, Any] = {"name": one.name, "configs": (), "num_partitions": -1, "replication_factor": -1}
            try:
                if not _may_create(request, one.name):
                    raise _Refused(ErrorCode.topic_authorization_failed, "the topic may not be made")
                if names.count(one.name) > 1:
                    raise InvalidRequest("a topic is named twice in one request")
                created = await self._create_one(request, one)
                answer.update(error_code=ErrorCode.none, **created)
            except BadConfig as error:
                answer.update(error_code=ErrorCode.invalid_config, error_message=str(error))
            except _Refused as error:
                answer.update(error_code=error.code, error_message=str(error))
            except HeadwaterError as error:
                code = ErrorCode.invalid_topic_exception if "topic name" in error.message else code_for(error)
                answer.update(error_code=code, error_message=error.message)
            answers.append(answer)
        await self._broker.refresh_topics()
        for answer in answers:
            if answer["error_code"] is ErrorCode.none:
                topic = await self._broker.topic_named(answer["name"])
                answer["topic_id"] = topic and self._broker.uuid_of(topic)
        return {"topics": answers}

    async def _create_one(self, request: Request, one: Any) -> dict[str, Any]:
        partitions = one.num_partitions
        if one.assignments:
            if one.num_partitions != -1 or one.replication_factor != -1:
                raise InvalidRequest("say either how many partitions there are, or where they are")
            partitions = len(one.assignments)
            if sorted(part.partition_index for part in one.assignments) != list(range(partitions)):
                raise _Refused(ErrorCode.invalid_replica_assignment, "partitions are numbered from 0 on")
        elif partitions == -1:
            partitions = self._broker.settings.default_partitions
        if not 1 <= partitions <= 1024:
            raise _Refused(ErrorCode.invalid_partitions, f"partitions are 1 to 1024, not {partitions}")
        if one.replication_factor == 0 or one.replication_factor < -1:
            raise _Refused(ErrorCode.invalid_replication_factor, "the replication factor is 1 or more")
        change = change_of({config.name: config.value for config in one.configs or ()})
        if getattr(request.fields, "validate_only", False):
            if await self._broker.topic_named(one.name) is not None:
                raise TopicExists(f'topic "{one.name}" exists already')
        else:
            await self._broker.log.run_audited(
                calls.kafka_create_topic(
                    one.name,
                    partitions,
                    retention=change.retention,
                    max_payload_bytes=change.max_payload_bytes,
                    timestamp_type=change.timestamp_type,
                    compression_type=change.compression_type,
                    compacted=change.compacted,
                    tombstones_kept=change.tombstones_kept,
                    retention_bytes=change.retention_bytes,
                    schemas=change.schemas,
                    deletes=change.deletes,
                    settings=change.settings,
                ),
                request.account,
                "topic.create",
                one.name,
                {"partitions": partitions, **{config.name: config.value for config in one.configs or ()}},
            )
        return {"num_partitions": partitions, "replication_factor": 1}

    async def delete(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        if request.version >= 6:
            asked = [(one.name, one.topic_id) for one in fields.topics or ()]
        else:
            asked = [(name, None) for name in fields.topic_names or ()]
        answers = []
        for name, uuid in asked:
            topic = await (self._broker.topic_named(name) if name is not None else self._broker.topic_with_uuid(uuid))
            missing = ErrorCode.unknown_topic_or_partition if name is not None else ErrorCode.unknown_topic_id
            answer: dict[str, Any] = {"name": name, "topic_id": uuid, "error_code": ErrorCode.none}
            try:
                if topic is None:
                    answer["error_code"] = missing
                elif not request.allowed("delete", "topic", topic.name):
                    answer["error_code"] = ErrorCode.topic_authorization_failed
                else:
                    answer.update(name=topic.name, topic_id=self._broker.uuid_of(topic))
                    gone = log_calls.delete_topic(topic.name)
                    await self._broker.log.run_audited(gone, request.account, "topic.delete", topic.name, {})
            except HeadwaterError as error:
                answer.update(error_code=code_for(error), error_message=error.message)
            answers.append(answer)
        await self._broker.refresh_topics()
        return {"responses": answers}

    async def create_partitions(self, request: Request) -> dict[str, Any]:
        answers = []
        for one in request.fields.topics or ():
            answer: dict[str, Any] = {"name": one.name, "error_code": ErrorCode.none}
            topic = await self._broker.topic_named(one.name)
            if not request.allowed("alter", "topic", one.name):
                answer["error_code"] = ErrorCode.topic_authorization_failed
            elif topic is None:
                answer["error_code"] = ErrorCode.unknown_topic_or_partition
            elif not topic.partitions < one.count <= 1024:
                answer.update(
                    error_code=ErrorCode.invalid_partitions,
                    error_message=f"the topic has {topic.partitions} partitions, and may get up to 1024",
                )
            elif not request.fields.validate_only:
                try:
                    call = log_calls.alter_topic(one.name, partitions=one.count)
                    told = {"partitions": one.count}
                    await self._broker.log.run_audited(call, request.account, "topic.alter", one.name, told)
                except HeadwaterError as error:
                    answer.update(error_code=code_for(error), error_message=error.message)
            answers.append(answer)
        await self._broker.refresh_topics()
        return {"results": answers}

    # Settings

    async def describe_configs(self, request: Request) -> dict[str, Any]:
        # What was just changed by another broker is told as it is now.
        await self._broker.topics(as_of_now=True)
        results = []
        for one in request.fields.resources or ():
            answer: dict[str, Any] = {
                "resource_type": one.resource_type,
                "resource_name": one.resource_name,
                "error_code": ErrorCode.none,
                "configs": (),
            }
            if one.resource_type == TOPIC:
                topic = await self._broker.topic_named(one.resource_name)
                if not request.allowed("describe", "topic", one.resource_name):
                    answer["error_code"] = ErrorCode.topic_authorization_failed
                elif topic is None:
                    answer["error_code"] = ErrorCode.unknown_topic_or_partition
                else:
                    answer["configs"] = described(topic_values(topic), one.configuration_keys)
            elif one.resource_type == BROKER and not request.allowed("describe", "log", "*"):
                answer["error_code"] = ErrorCode.cluster_authorization_failed
            elif one.resource_type == BROKER and one.resource_name not in ("", str(self._broker.node_id)):
                answer["error_code"] = ErrorCode.invalid_request
                answer["error_message"] = f"this is broker {self._broker.node_id}: ask the one that you mean"
            elif one.resource_type == BROKER:
                # Without a name: what was changed for all brokers while they ran, which cannot be.
                values = self._broker_values() if one.resource_name else {}
                answer["configs"] = described_broker(values, one.configuration_keys)
            else:
                answer["error_code"] = ErrorCode.invalid_request
                answer["error_message"] = "topics and brokers have settings here, nothing else"
            results.append(answer)
        return {"results": results}

    async def list_config_resources(self, request: Request) -> dict[str, Any]:
        """What has settings: topics and brokers. Groups and clients have none."""
        if not request.allowed("describe", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "config_resources": ()}
        # Version 0 asks for what clients of telemetry have.
        asked = (_CLIENT_METRICS,) if request.version == 0 else request.fields.resource_types or (TOPIC, BROKER)
        if set(asked) - set(_RESOURCES):
            return {"error_code": ErrorCode.unsupported_version, "config_resources": ()}
        await self._broker.refresh_brokers()
        names = [(TOPIC, topic.name) for topic in await self._broker.topics(as_of_now=True) if TOPIC in asked]
        names += [(BROKER, str(one.node_id)) for one in self._broker.brokers if BROKER in asked]
        return {
            "error_code": ErrorCode.none,
            "config_resources": [{"resource_name": name, "resource_type": kind} for kind, name in names],
        }

    def _broker_values(self) -> dict[str, str]:
        settings = self._broker.settings
        return {
            "advertised.listeners": f"PLAINTEXT://{settings.host}:{settings.port}",
            "broker.id": str(self._broker.node_id),
            "node.id": str(self._broker.node_id),
            "num.partitions": str(settings.default_partitions),
            "default.replication.factor": "1",
            "socket.request.max.bytes": str(settings.max_frame_bytes),
            "max.connections": str(settings.max_connections),
        }

    async def alter_configs(self, request: Request) -> dict[str, Any]:
        """Replace the settings of topics: what is not named gets its default."""

        def wanted(one: Any, topic: KafkaTopic) -> dict[str, str | None]:
            return {**dict.fromkeys(TOPIC_CONFIGS), **{config.name: config.value for config in one.configs or ()}}

        return await self._alter(request, wanted)

    async def incremental_alter_configs(self, request: Request) -> dict[str, Any]:
        def wanted(one: Any, topic: KafkaTopic) -> dict[str, str | None]:
            values = topic_values(topic)
            asked = [(config.name, config.config_operation, config.value) for config in one.configs or ()]
            return {name: after(values, name, operation, value) for name, operation, value in asked}

        return await self._alter(request, wanted)

    async def _alter(self, request: Request, wanted: Any) -> dict[str, Any]:
        # What is added to a list, is added to what it is now.
        await self._broker.topics(as_of_now=True)
        answers = []
        for one in request.fields.resources or ():
            answer: dict[str, Any] = {
                "resource_type": one.resource_type,
                "resource_name": one.resource_name,
                "error_code": ErrorCode.none,
            }
            try:
                if one.resource_type != TOPIC:
                    raise InvalidRequest("only the settings of topics can be changed; a broker has its from its start")
                if not request.allowed("alter", "topic", one.resource_name):
                    raise NotAllowed("the topic may not be changed")
                topic = await self._broker.topic_named(one.resource_name)
                if topic is None:
                    raise TopicNotFound(f'there is no topic "{one.resource_name}"')
                values = wanted(one, topic)
                change = change_of(values)
                if not request.fields.validate_only:
                    call = calls.kafka_alter_topic(topic.name, **change._asdict())
                    await self._broker.log.run_audited(call, request.account, "topic.alter", topic.name, values)
            except BadConfig as error:
                answer.update(error_code=ErrorCode.invalid_config, error_message=str(error))
            except HeadwaterError as error:
                answer.update(error_code=code_for(error), error_message=error.message)
            answers.append(answer)
        await self._broker.refresh_topics()
        return {"responses": answers}


def _may_create(request: Request, name: str) -> bool:
    return request.allowed("create", "topic", name) or request.allowed("create", "log", "*")


class _Refused(Exception):
    """What is asked cannot be, with the code that says why."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
