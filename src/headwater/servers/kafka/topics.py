"""The APIs about topics, their settings and the cluster: Metadata, CreateTopics, DescribeConfigs and others."""

from __future__ import annotations

from typing import Any, Final

from headwater.calls import kafka as calls
from headwater.calls import log as log_calls
from headwater.calls.kafka import KafkaTopic, TopicPartition
from headwater.errors import HeadwaterError, InvalidRequest, NotAllowed, SchemaNotFound, TopicExists, TopicNotFound
from headwater.log.model import TOPIC_NAME
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.configs import (
    TOPIC_CONFIGS,
    InvalidConfig,
    apply_operation,
    describe_broker,
    describe_topic,
    parse_configs,
    topic_values,
)
from headwater.servers.kafka.wire import ErrorCode, Request

TOPIC, BROKER = 2, 4
_CLIENT_METRICS: Final = 16
_RESOURCES: Final = (TOPIC, BROKER, 8, _CLIENT_METRICS, 32)
"""Known types of config resources: topics, brokers, broker loggers, client metrics, groups."""
# Authorized operations are not reported.
UNKNOWN_OPERATIONS: Final = -(2**31)


def code_for(error: HeadwaterError) -> ErrorCode:
    """The Kafka error code for an error of the log, for requests that create or change topics."""
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


class TopicApis:
    """The APIs about topics."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def metadata(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        await self._broker.refresh_brokers()
        requested = fields.topics
        if requested is None or (request.version == 0 and not requested):
            topics = [
                self._describe(topic)
                for topic in await self._broker.topics(as_of_now=True)
                if request.allowed("describe", "topic", topic.name)
            ]
        else:
            may_create = getattr(fields, "allow_auto_topic_creation", True)
            topics = [await self._describe_requested(request, one, may_create=may_create) for one in requested]
        return {
            "brokers": self._brokers(),
            "cluster_id": str(self._broker.cluster_id),
            "controller_id": self._controller(),
            "topics": topics,
            "cluster_authorized_operations": UNKNOWN_OPERATIONS,
        }

    async def _describe_requested(self, request: Request, requested: Any, *, may_create: bool) -> dict[str, Any]:
        uuid = getattr(requested, "topic_id", None)
        if not requested.name:
            # By id: the Java client then sends an empty name.
            topic = await self._broker.topic_with_uuid(uuid)
            if topic is None or not request.allowed("describe", "topic", topic.name):
                code = ErrorCode.invalid_topic_exception if uuid is None else ErrorCode.unknown_topic_id
                return {"error_code": code, "name": requested.name, "topic_id": uuid, "partitions": ()}
            return self._describe(topic)
        if not request.allowed("describe", "topic", requested.name):
            code = ErrorCode.topic_authorization_failed
            return {"error_code": code, "name": requested.name, "topic_id": None, "partitions": ()}
        topic = await self._broker.topic_named(requested.name)
        code = ErrorCode.unknown_topic_or_partition
        if topic is None and may_create and _may_create(request, requested.name):
            try:
                call = calls.kafka_create_missing(requested.name, self._broker.settings.default_partitions)
                if await self._broker.log.run(call) is not None:
                    await self._broker.refresh_topics()
                    topic = await self._broker.topic_named(requested.name)
            except InvalidRequest:
                code = ErrorCode.invalid_topic_exception
        if topic is None:
            return {"error_code": code, "name": requested.name, "topic_id": None, "partitions": ()}
        return self._describe(topic)

    def _describe(self, topic: KafkaTopic) -> dict[str, Any]:
        return {
            "error_code": ErrorCode.none,
            "name": topic.name,
            "topic_id": self._broker.uuid_of(topic),
            "is_internal": False,
            "partitions": [self._partition(topic, index) for index in range(topic.partitions)],
            "topic_authorized_operations": UNKNOWN_OPERATIONS,
        }

    def _partition(self, topic: KafkaTopic, index: int) -> dict[str, Any]:
        leader = self._broker.leader_of(TopicPartition(topic.id, index))
        return {
            "error_code": ErrorCode.none,
            "partition_index": index,
            "leader_id": leader,
            # Any broker can serve any partition. The epoch changes when offsets may be assigned again.
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
                "error_message": "unsupported endpoint type: there are no controllers besides the brokers",
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
        requested = {one.name for one in fields.topics or ()}
        names = sorted(requested or {topic.name for topic in await self._broker.topics(as_of_now=True)})
        left = min(max(fields.response_partition_limit, 1), 2000)
        start = (fields.cursor.topic_name, fields.cursor.partition_index) if fields.cursor else ("", 0)
        topics: list[dict[str, Any]] = []
        for name in names:
            if name < start[0]:
                continue
            topic = await self._broker.topic_named(name)
            if topic is None or not request.allowed("describe", "topic", name):
                if requested:
                    topics.append({"error_code": ErrorCode.unknown_topic_or_partition, "name": name, "partitions": ()})
                continue
            first = start[1] if name == start[0] else 0
            shown = range(first, min(topic.partitions, first + left))
            left -= len(shown)
            topics.append({**self._describe(topic), "partitions": [self._partition(topic, index) for index in shown]})
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
        """Always empty: partitions are not stored on brokers."""
        return {"error_code": ErrorCode.none, "topics": ()}

    async def elect_leaders(self, request: Request) -> dict[str, Any]:
        """Never needed: leaders are derived from the list of live brokers."""
        if not request.allowed("alter", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "replica_election_results": ()}
        results = []
        # Null requests all partitions; those that need no election are then left out, so the result is empty.
        for requested in request.fields.topic_partitions or ():
            topic = await self._broker.topic_named(requested.topic)
            answers = []
            for index in requested.partitions or ():
                known = topic is not None and 0 <= index < topic.partitions
                code = ErrorCode.election_not_needed if known else ErrorCode.unknown_topic_or_partition
                answers.append({"partition_id": index, "error_code": code, "error_message": None})
            results.append({"topic": requested.topic, "partition_result": answers})
        return {"error_code": ErrorCode.none, "replica_election_results": results}

    async def describe_quotas(self, request: Request) -> dict[str, Any]:
        """Quotas are not supported. The list is empty, not null, since some clients fail on null."""
        allowed = request.allowed("describe", "log", "*")
        return {"error_code": ErrorCode.none if allowed else ErrorCode.cluster_authorization_failed, "entries": ()}

    # Creating, changing and deleting

    async def create(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        answers = []
        names = [one.name for one in fields.topics or ()]
        for one in fields.topics or ():
            answer: dict[str, Any] = {"name": one.name, "configs": (), "num_partitions": -1, "replication_factor": -1}
            try:
                if not _may_create(request, one.name):
                    raise _TopicError(ErrorCode.topic_authorization_failed, "not authorized to create the topic")
                if names.count(one.name) > 1:
                    raise InvalidRequest("the topic is listed twice in the request")
                created = await self._create_one(request, one)
                answer.update(error_code=ErrorCode.none, **created)
            except InvalidConfig as error:
                answer.update(error_code=ErrorCode.invalid_config, error_message=str(error))
            except _TopicError as error:
                answer.update(error_code=error.code, error_message=str(error))
            except HeadwaterError as error:
                answer.update(error_code=code_for(error), error_message=error.message)
            answers.append(answer)
        await self._broker.refresh_topics()
        for answer in answers:
            if answer["error_code"] is ErrorCode.none:
                topic = await self._broker.topic_named(answer["name"])
                answer["topic_id"] = topic and self._broker.uuid_of(topic)
        return {"topics": answers}

    async def _create_one(self, request: Request, one: Any) -> dict[str, Any]:
        if not TOPIC_NAME.fullmatch(one.name):
            raise _TopicError(ErrorCode.invalid_topic_exception, "a topic name is 1 to 249 of A-Z a-z 0-9 . _ -")
        partitions = one.num_partitions
        if one.assignments:
            if one.num_partitions != -1 or one.replication_factor != -1:
                raise InvalidRequest("give either num_partitions and replication_factor, or assignments")
            partitions = len(one.assignments)
            if sorted(part.partition_index for part in one.assignments) != list(range(partitions)):
                raise _TopicError(
                    ErrorCode.invalid_replica_assignment,
                    "invalid assignments: expected partitions numbered consecutively from 0",
                )
        elif partitions == -1:
            partitions = self._broker.settings.default_partitions
        if not 1 <= partitions <= 1024:
            raise _TopicError(
                ErrorCode.invalid_partitions, f"invalid number of partitions {partitions}: expected 1 to 1024"
            )
        if one.replication_factor == 0 or one.replication_factor < -1:
            raise _TopicError(
                ErrorCode.invalid_replication_factor,
                f"invalid replication factor {one.replication_factor}: expected 1 or more, or -1",
            )
        change = parse_configs({config.name: config.value for config in one.configs or ()})
        if getattr(request.fields, "validate_only", False):
            if await self._broker.topic_named(one.name) is not None:
                raise TopicExists(f'topic "{one.name}" already exists')
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
            requested = [(one.name, one.topic_id) for one in fields.topics or ()]
        else:
            requested = [(name, None) for name in fields.topic_names or ()]
        answers = []
        for name, uuid in requested:
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
                    call = log_calls.delete_topic(topic.name)
                    await self._broker.log.run_audited(call, request.account, "topic.delete", topic.name, {})
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
                    error_message=f"invalid number of partitions {one.count}: expected {topic.partitions + 1} to 1024",
                )
            elif not request.fields.validate_only:
                try:
                    call = log_calls.alter_topic(one.name, partitions=one.count)
                    details = {"partitions": one.count}
                    await self._broker.log.run_audited(call, request.account, "topic.alter", one.name, details)
                except HeadwaterError as error:
                    answer.update(error_code=code_for(error), error_message=error.message)
            answers.append(answer)
        await self._broker.refresh_topics()
        return {"results": answers}

    # Settings

    async def describe_configs(self, request: Request) -> dict[str, Any]:
        # Refresh, so that changes by other brokers are included.
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
                    answer["configs"] = describe_topic(topic_values(topic), one.configuration_keys)
            elif one.resource_type == BROKER and not request.allowed("describe", "log", "*"):
                answer["error_code"] = ErrorCode.cluster_authorization_failed
            elif one.resource_type == BROKER and one.resource_name not in ("", str(self._broker.node_id)):
                answer["error_code"] = ErrorCode.invalid_request
                answer["error_message"] = (
                    f"this is broker {self._broker.node_id}: send the request to broker {one.resource_name}"
                )
            elif one.resource_type == BROKER:
                # No name means the dynamic defaults of all brokers, which do not exist here.
                values = self._broker_values() if one.resource_name else {}
                answer["configs"] = describe_broker(values, one.configuration_keys)
            else:
                answer["error_code"] = ErrorCode.invalid_request
                answer["error_message"] = "unsupported resource type: expected a topic (2) or a broker (4)"
            results.append(answer)
        return {"results": results}

    async def list_config_resources(self, request: Request) -> dict[str, Any]:
        """List the resources with settings: topics and brokers. Groups and client metrics have none."""
        if not request.allowed("describe", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "config_resources": ()}
        # Version 0 is ListClientMetricsResources.
        requested = (_CLIENT_METRICS,) if request.version == 0 else request.fields.resource_types or (TOPIC, BROKER)
        if set(requested) - set(_RESOURCES):
            return {"error_code": ErrorCode.unsupported_version, "config_resources": ()}
        await self._broker.refresh_brokers()
        names = [(TOPIC, topic.name) for topic in await self._broker.topics(as_of_now=True) if TOPIC in requested]
        names += [(BROKER, str(one.node_id)) for one in self._broker.brokers if BROKER in requested]
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
        """Replace the settings of topics: settings that are not listed get their default."""

        def wanted(one: Any, topic: KafkaTopic) -> dict[str, str | None]:
            return {**dict.fromkeys(TOPIC_CONFIGS), **{config.name: config.value for config in one.configs or ()}}

        return await self._alter(request, wanted)

    async def incremental_alter_configs(self, request: Request) -> dict[str, Any]:
        def wanted(one: Any, topic: KafkaTopic) -> dict[str, str | None]:
            values = topic_values(topic)
            requested = [(config.name, config.config_operation, config.value) for config in one.configs or ()]
            return {name: apply_operation(values, name, operation, value) for name, operation, value in requested}

        return await self._alter(request, wanted)

    async def _alter(self, request: Request, wanted: Any) -> dict[str, Any]:
        # Refresh, since an incremental change applies to the current value.
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
                    raise InvalidRequest(
                        "only settings of topics can be altered; settings of a broker are fixed when it starts"
                    )
                if not request.allowed("alter", "topic", one.resource_name):
                    raise NotAllowed("not authorized to alter the topic")
                topic = await self._broker.topic_named(one.resource_name)
                if topic is None:
                    raise TopicNotFound(f'topic "{one.resource_name}" does not exist')
                values = wanted(one, topic)
                change = parse_configs(values)
                if not request.fields.validate_only:
                    call = calls.kafka_alter_topic(topic.name, **change._asdict())
                    await self._broker.log.run_audited(call, request.account, "topic.alter", topic.name, values)
            except InvalidConfig as error:
                answer.update(error_code=ErrorCode.invalid_config, error_message=str(error))
            except HeadwaterError as error:
                answer.update(error_code=code_for(error), error_message=error.message)
            answers.append(answer)
        await self._broker.refresh_topics()
        return {"responses": answers}


def _may_create(request: Request, name: str) -> bool:
    return request.allowed("create", "topic", name) or request.allowed("create", "log", "*")


class _TopicError(Exception):
    """A request about a topic is rejected with this error code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
