"""Generated from proto/orisun/eventstore.proto by tools/protos.py: change that."""
import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ASC: _ClassVar[Direction]
    DESC: _ClassVar[Direction]

class StorageBackend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORAGE_BACKEND_UNSPECIFIED: _ClassVar[StorageBackend]
    STORAGE_BACKEND_POSTGRES: _ClassVar[StorageBackend]
    STORAGE_BACKEND_SQLITE: _ClassVar[StorageBackend]
    STORAGE_BACKEND_FOUNDATIONDB: _ClassVar[StorageBackend]

class ServerCapability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_CAPABILITY_UNSPECIFIED: _ClassVar[ServerCapability]
    SERVER_CAPABILITY_COMMAND_CONTEXT_CONSISTENCY: _ClassVar[ServerCapability]
    SERVER_CAPABILITY_CATCH_UP_SUBSCRIPTIONS: _ClassVar[ServerCapability]
    SERVER_CAPABILITY_INDEX_MANAGEMENT: _ClassVar[ServerCapability]
    SERVER_CAPABILITY_BOUNDARY_CATALOG: _ClassVar[ServerCapability]
    SERVER_CAPABILITY_GRPC_HEALTH: _ClassVar[ServerCapability]

class ValueType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEXT: _ClassVar[ValueType]
    NUMERIC: _ClassVar[ValueType]
    BOOLEAN: _ClassVar[ValueType]
    TIMESTAMPTZ: _ClassVar[ValueType]

class ConditionCombinator(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AND: _ClassVar[ConditionCombinator]
    OR: _ClassVar[ConditionCombinator]

class IndexState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEX_STATE_UNSPECIFIED: _ClassVar[IndexState]
    INDEX_STATE_BUILDING: _ClassVar[IndexState]
    INDEX_STATE_READY: _ClassVar[IndexState]

class BoundaryLifecycleStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOUNDARY_LIFECYCLE_STATUS_UNSPECIFIED: _ClassVar[BoundaryLifecycleStatus]
    BOUNDARY_LIFECYCLE_STATUS_PROVISIONING: _ClassVar[BoundaryLifecycleStatus]
    BOUNDARY_LIFECYCLE_STATUS_ACTIVE: _ClassVar[BoundaryLifecycleStatus]
    BOUNDARY_LIFECYCLE_STATUS_FAILED: _ClassVar[BoundaryLifecycleStatus]
ASC: Direction
DESC: Direction
STORAGE_BACKEND_UNSPECIFIED: StorageBackend
STORAGE_BACKEND_POSTGRES: StorageBackend
STORAGE_BACKEND_SQLITE: StorageBackend
STORAGE_BACKEND_FOUNDATIONDB: StorageBackend
SERVER_CAPABILITY_UNSPECIFIED: ServerCapability
SERVER_CAPABILITY_COMMAND_CONTEXT_CONSISTENCY: ServerCapability
SERVER_CAPABILITY_CATCH_UP_SUBSCRIPTIONS: ServerCapability
SERVER_CAPABILITY_INDEX_MANAGEMENT: ServerCapability
SERVER_CAPABILITY_BOUNDARY_CATALOG: ServerCapability
SERVER_CAPABILITY_GRPC_HEALTH: ServerCapability
TEXT: ValueType
NUMERIC: ValueType
BOOLEAN: ValueType
TIMESTAMPTZ: ValueType
AND: ConditionCombinator
OR: ConditionCombinator
INDEX_STATE_UNSPECIFIED: IndexState
INDEX_STATE_BUILDING: IndexState
INDEX_STATE_READY: IndexState
BOUNDARY_LIFECYCLE_STATUS_UNSPECIFIED: BoundaryLifecycleStatus
BOUNDARY_LIFECYCLE_STATUS_PROVISIONING: BoundaryLifecycleStatus
BOUNDARY_LIFECYCLE_STATUS_ACTIVE: BoundaryLifecycleStatus
BOUNDARY_LIFECYCLE_STATUS_FAILED: BoundaryLifecycleStatus

class Position(_message.Message):
    __slots__ = ("commit_position", "prepare_position")
    COMMIT_POSITION_FIELD_NUMBER: _ClassVar[int]
    PREPARE_POSITION_FIELD_NUMBER: _ClassVar[int]
    commit_position: int
    prepare_position: int
    def __init__(self, commit_position: _Optional[int] = ..., prepare_position: _Optional[int] = ...) -> None: ...

class Tag(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Criterion(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedCompositeFieldContainer[Tag]
    def __init__(self, tags: _Optional[_Iterable[_Union[Tag, _Mapping]]] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("criteria",)
    CRITERIA_FIELD_NUMBER: _ClassVar[int]
    criteria: _containers.RepeatedCompositeFieldContainer[Criterion]
    def __init__(self, criteria: _Optional[_Iterable[_Union[Criterion, _Mapping]]] = ...) -> None: ...

class EventToSave(_message.Message):
    __slots__ = ("event_id", "event_type", "data", "metadata")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    event_type: str
    data: str
    metadata: str
    def __init__(self, event_id: _Optional[str] = ..., event_type: _Optional[str] = ..., data: _Optional[str] = ..., metadata: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("event_id", "event_type", "data", "metadata", "position", "date_created")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DATE_CREATED_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    event_type: str
    data: str
    metadata: str
    position: Position
    date_created: _timestamp_pb2.Timestamp
    def __init__(self, event_id: _Optional[str] = ..., event_type: _Optional[str] = ..., data: _Optional[str] = ..., metadata: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., date_created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class SaveQuery(_message.Message):
    __slots__ = ("expected_position", "subsetQuery")
    EXPECTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    SUBSETQUERY_FIELD_NUMBER: _ClassVar[int]
    expected_position: Position
    subsetQuery: Query
    def __init__(self, expected_position: _Optional[_Union[Position, _Mapping]] = ..., subsetQuery: _Optional[_Union[Query, _Mapping]] = ...) -> None: ...

class SaveEventsRequest(_message.Message):
    __slots__ = ("boundary", "query", "events")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    query: SaveQuery
    events: _containers.RepeatedCompositeFieldContainer[EventToSave]
    def __init__(self, boundary: _Optional[str] = ..., query: _Optional[_Union[SaveQuery, _Mapping]] = ..., events: _Optional[_Iterable[_Union[EventToSave, _Mapping]]] = ...) -> None: ...

class WriteResult(_message.Message):
    __slots__ = ("log_position",)
    LOG_POSITION_FIELD_NUMBER: _ClassVar[int]
    log_position: Position
    def __init__(self, log_position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class GetEventsRequest(_message.Message):
    __slots__ = ("query", "from_position", "count", "direction", "boundary")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    query: Query
    from_position: Position
    count: int
    direction: Direction
    boundary: str
    def __init__(self, query: _Optional[_Union[Query, _Mapping]] = ..., from_position: _Optional[_Union[Position, _Mapping]] = ..., count: _Optional[int] = ..., direction: _Optional[_Union[Direction, str]] = ..., boundary: _Optional[str] = ...) -> None: ...

class GetEventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class GetLatestByCriteriaRequest(_message.Message):
    __slots__ = ("boundary", "criteria")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    CRITERIA_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    criteria: _containers.RepeatedCompositeFieldContainer[Criterion]
    def __init__(self, boundary: _Optional[str] = ..., criteria: _Optional[_Iterable[_Union[Criterion, _Mapping]]] = ...) -> None: ...

class LatestCriterionResult(_message.Message):
    __slots__ = ("criterion", "event")
    CRITERION_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    criterion: Criterion
    event: Event
    def __init__(self, criterion: _Optional[_Union[Criterion, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class GetLatestByCriteriaResponse(_message.Message):
    __slots__ = ("results", "context_position")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[LatestCriterionResult]
    context_position: Position
    def __init__(self, results: _Optional[_Iterable[_Union[LatestCriterionResult, _Mapping]]] = ..., context_position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class CatchUpSubscribeToEventStoreRequest(_message.Message):
    __slots__ = ("after_position", "query", "subscriber_name", "boundary")
    AFTER_POSITION_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_NAME_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    after_position: Position
    query: Query
    subscriber_name: str
    boundary: str
    def __init__(self, after_position: _Optional[_Union[Position, _Mapping]] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., subscriber_name: _Optional[str] = ..., boundary: _Optional[str] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "git_commit", "build_time", "backend", "node_id", "capabilities")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GIT_COMMIT_FIELD_NUMBER: _ClassVar[int]
    BUILD_TIME_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    version: str
    git_commit: str
    build_time: str
    backend: StorageBackend
    node_id: str
    capabilities: _containers.RepeatedScalarFieldContainer[ServerCapability]
    def __init__(self, version: _Optional[str] = ..., git_commit: _Optional[str] = ..., build_time: _Optional[str] = ..., backend: _Optional[_Union[StorageBackend, str]] = ..., node_id: _Optional[str] = ..., capabilities: _Optional[_Iterable[_Union[ServerCapability, str]]] = ...) -> None: ...

class IndexField(_message.Message):
    __slots__ = ("json_key", "value_type")
    JSON_KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_TYPE_FIELD_NUMBER: _ClassVar[int]
    json_key: str
    value_type: ValueType
    def __init__(self, json_key: _Optional[str] = ..., value_type: _Optional[_Union[ValueType, str]] = ...) -> None: ...

class IndexCondition(_message.Message):
    __slots__ = ("key", "operator", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    operator: str
    value: str
    def __init__(self, key: _Optional[str] = ..., operator: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class CreateIndexRequest(_message.Message):
    __slots__ = ("boundary", "name", "fields", "conditions", "condition_combinator")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_COMBINATOR_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    name: str
    fields: _containers.RepeatedCompositeFieldContainer[IndexField]
    conditions: _containers.RepeatedCompositeFieldContainer[IndexCondition]
    condition_combinator: ConditionCombinator
    def __init__(self, boundary: _Optional[str] = ..., name: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[IndexField, _Mapping]]] = ..., conditions: _Optional[_Iterable[_Union[IndexCondition, _Mapping]]] = ..., condition_combinator: _Optional[_Union[ConditionCombinator, str]] = ...) -> None: ...

class CreateIndexResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropIndexRequest(_message.Message):
    __slots__ = ("boundary", "name")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    name: str
    def __init__(self, boundary: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DropIndexResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IndexDefinition(_message.Message):
    __slots__ = ("name", "fields", "conditions", "condition_combinator", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_COMBINATOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: _containers.RepeatedCompositeFieldContainer[IndexField]
    conditions: _containers.RepeatedCompositeFieldContainer[IndexCondition]
    condition_combinator: ConditionCombinator
    state: IndexState
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[IndexField, _Mapping]]] = ..., conditions: _Optional[_Iterable[_Union[IndexCondition, _Mapping]]] = ..., condition_combinator: _Optional[_Union[ConditionCombinator, str]] = ..., state: _Optional[_Union[IndexState, str]] = ...) -> None: ...

class ListIndexesRequest(_message.Message):
    __slots__ = ("boundary",)
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    def __init__(self, boundary: _Optional[str] = ...) -> None: ...

class ListIndexesResponse(_message.Message):
    __slots__ = ("indexes",)
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedCompositeFieldContainer[IndexDefinition]
    def __init__(self, indexes: _Optional[_Iterable[_Union[IndexDefinition, _Mapping]]] = ...) -> None: ...

class GetIndexRequest(_message.Message):
    __slots__ = ("boundary", "name")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    name: str
    def __init__(self, boundary: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetIndexResponse(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: IndexDefinition
    def __init__(self, index: _Optional[_Union[IndexDefinition, _Mapping]] = ...) -> None: ...

class BoundaryPlacementInput(_message.Message):
    __slots__ = ("backend", "namespace")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    backend: str
    namespace: str
    def __init__(self, backend: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class BoundaryInfo(_message.Message):
    __slots__ = ("name", "description", "placement", "status", "existed_before_catalog", "last_error", "definition_position", "status_position")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EXISTED_BEFORE_CATALOG_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_POSITION_FIELD_NUMBER: _ClassVar[int]
    STATUS_POSITION_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    placement: BoundaryPlacementInput
    status: BoundaryLifecycleStatus
    existed_before_catalog: bool
    last_error: str
    definition_position: Position
    status_position: Position
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., placement: _Optional[_Union[BoundaryPlacementInput, _Mapping]] = ..., status: _Optional[_Union[BoundaryLifecycleStatus, str]] = ..., existed_before_catalog: _Optional[bool] = ..., last_error: _Optional[str] = ..., definition_position: _Optional[_Union[Position, _Mapping]] = ..., status_position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class CreateBoundaryRequest(_message.Message):
    __slots__ = ("name", "description", "placement", "existed_before_catalog")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    EXISTED_BEFORE_CATALOG_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    placement: BoundaryPlacementInput
    existed_before_catalog: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., placement: _Optional[_Union[BoundaryPlacementInput, _Mapping]] = ..., existed_before_catalog: _Optional[bool] = ...) -> None: ...

class CreateBoundaryResponse(_message.Message):
    __slots__ = ("boundary",)
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    boundary: BoundaryInfo
    def __init__(self, boundary: _Optional[_Union[BoundaryInfo, _Mapping]] = ...) -> None: ...

class ListBoundariesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBoundariesResponse(_message.Message):
    __slots__ = ("boundaries",)
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    boundaries: _containers.RepeatedCompositeFieldContainer[BoundaryInfo]
    def __init__(self, boundaries: _Optional[_Iterable[_Union[BoundaryInfo, _Mapping]]] = ...) -> None: ...

class GetBoundaryRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetBoundaryResponse(_message.Message):
    __slots__ = ("boundary",)
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    boundary: BoundaryInfo
    def __init__(self, boundary: _Optional[_Union[BoundaryInfo, _Mapping]] = ...) -> None: ...

class AdminUser(_message.Message):
    __slots__ = ("user_id", "name", "username", "roles", "created_at", "updated_at")
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    USERNAME_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    name: str
    username: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    created_at: _timestamp_pb2.Timestamp
    updated_at: _timestamp_pb2.Timestamp
    def __init__(self, user_id: _Optional[str] = ..., name: _Optional[str] = ..., username: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., updated_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CreateUserRequest(_message.Message):
    __slots__ = ("name", "username", "password", "roles")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USERNAME_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    username: str
    password: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., username: _Optional[str] = ..., password: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateUserResponse(_message.Message):
    __slots__ = ("user",)
    USER_FIELD_NUMBER: _ClassVar[int]
    user: AdminUser
    def __init__(self, user: _Optional[_Union[AdminUser, _Mapping]] = ...) -> None: ...

class DeleteUserRequest(_message.Message):
    __slots__ = ("user_id",)
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    def __init__(self, user_id: _Optional[str] = ...) -> None: ...

class DeleteUserResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class ChangePasswordRequest(_message.Message):
    __slots__ = ("user_id", "current_password", "new_password")
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    CURRENT_PASSWORD_FIELD_NUMBER: _ClassVar[int]
    NEW_PASSWORD_FIELD_NUMBER: _ClassVar[int]
    user_id: str
    current_password: str
    new_password: str
    def __init__(self, user_id: _Optional[str] = ..., current_password: _Optional[str] = ..., new_password: _Optional[str] = ...) -> None: ...

class ChangePasswordResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class ListUsersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListUsersResponse(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[AdminUser]
    def __init__(self, users: _Optional[_Iterable[_Union[AdminUser, _Mapping]]] = ...) -> None: ...

class ValidateCredentialsRequest(_message.Message):
    __slots__ = ("username", "password")
    USERNAME_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    username: str
    password: str
    def __init__(self, username: _Optional[str] = ..., password: _Optional[str] = ...) -> None: ...

class ValidateCredentialsResponse(_message.Message):
    __slots__ = ("success", "user")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    success: bool
    user: AdminUser
    def __init__(self, success: _Optional[bool] = ..., user: _Optional[_Union[AdminUser, _Mapping]] = ...) -> None: ...

class GetUserCountRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUserCountResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class GetEventCountRequest(_message.Message):
    __slots__ = ("boundary",)
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    def __init__(self, boundary: _Optional[str] = ...) -> None: ...

class GetEventCountResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...
