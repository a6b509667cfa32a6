"""Generated from proto/headwater/v1/headwater.proto by tools/protos.py: change that."""
import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Event(_message.Message):
    __slots__ = ("position", "topic", "partition", "topic_offset", "key", "type", "routing_key", "headers", "content_type", "payload", "event_id", "published_at")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_OFFSET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ROUTING_KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    position: int
    topic: str
    partition: int
    topic_offset: int
    key: bytes
    type: str
    routing_key: str
    headers: str
    content_type: str
    payload: bytes
    event_id: str
    published_at: _timestamp_pb2.Timestamp
    def __init__(self, position: _Optional[int] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., topic_offset: _Optional[int] = ..., key: _Optional[bytes] = ..., type: _Optional[str] = ..., routing_key: _Optional[str] = ..., headers: _Optional[str] = ..., content_type: _Optional[str] = ..., payload: _Optional[bytes] = ..., event_id: _Optional[str] = ..., published_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class NewEvent(_message.Message):
    __slots__ = ("payload", "key", "type", "routing_key", "headers", "event_id", "content_type", "partition")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ROUTING_KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    key: bytes
    type: str
    routing_key: str
    headers: str
    event_id: str
    content_type: str
    partition: int
    def __init__(self, payload: _Optional[bytes] = ..., key: _Optional[bytes] = ..., type: _Optional[str] = ..., routing_key: _Optional[str] = ..., headers: _Optional[str] = ..., event_id: _Optional[str] = ..., content_type: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("topic", "event", "deliver_at")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    event: NewEvent
    deliver_at: _timestamp_pb2.Timestamp
    def __init__(self, topic: _Optional[str] = ..., event: _Optional[_Union[NewEvent, _Mapping]] = ..., deliver_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class PublishBatchRequest(_message.Message):
    __slots__ = ("topic", "events")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    events: _containers.RepeatedCompositeFieldContainer[NewEvent]
    def __init__(self, topic: _Optional[str] = ..., events: _Optional[_Iterable[_Union[NewEvent, _Mapping]]] = ...) -> None: ...

class PublishBatchResponse(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, positions: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("topics", "after", "batch_size", "max_bytes", "skip_expired", "epoch")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    SKIP_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    after: int
    batch_size: int
    max_bytes: int
    skip_expired: bool
    epoch: int
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., after: _Optional[int] = ..., batch_size: _Optional[int] = ..., max_bytes: _Optional[int] = ..., skip_expired: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("events", "epoch")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    epoch: int
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("topics", "after", "from_end", "batch_size", "skip_expired", "stop_when_caught_up", "epoch")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FROM_END_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SKIP_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    STOP_WHEN_CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    after: int
    from_end: bool
    batch_size: int
    skip_expired: bool
    stop_when_caught_up: bool
    epoch: int
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., after: _Optional[int] = ..., from_end: _Optional[bool] = ..., batch_size: _Optional[int] = ..., skip_expired: _Optional[bool] = ..., stop_when_caught_up: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("events", "epoch")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    epoch: int
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class OpenCursorRequest(_message.Message):
    __slots__ = ("cursor", "topics", "start_after", "epoch")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    START_AFTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    start_after: int
    epoch: int
    def __init__(self, cursor: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., start_after: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class OpenCursorResponse(_message.Message):
    __slots__ = ("position", "epoch")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    position: int
    epoch: int
    def __init__(self, position: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class AdvanceCursorRequest(_message.Message):
    __slots__ = ("cursor", "from_position", "to_position", "epoch")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    TO_POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    from_position: int
    to_position: int
    epoch: int
    def __init__(self, cursor: _Optional[str] = ..., from_position: _Optional[int] = ..., to_position: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class AdvanceCursorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Topic(_message.Message):
    __slots__ = ("name", "kind", "partitions", "retention_seconds", "max_payload_bytes", "max_header_bytes", "created_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    partitions: int
    retention_seconds: float
    max_payload_bytes: int
    max_header_bytes: int
    created_at: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., partitions: _Optional[int] = ..., retention_seconds: _Optional[float] = ..., max_payload_bytes: _Optional[int] = ..., max_header_bytes: _Optional[int] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CreateTopicRequest(_message.Message):
    __slots__ = ("name", "kind", "partitions", "retention_seconds", "max_payload_bytes", "max_header_bytes", "if_missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    IF_MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    partitions: int
    retention_seconds: float
    max_payload_bytes: int
    max_header_bytes: int
    if_missing: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., partitions: _Optional[int] = ..., retention_seconds: _Optional[float] = ..., max_payload_bytes: _Optional[int] = ..., max_header_bytes: _Optional[int] = ..., if_missing: _Optional[bool] = ...) -> None: ...

class GetTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[Topic]
    def __init__(self, topics: _Optional[_Iterable[_Union[Topic, _Mapping]]] = ...) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateQueueRequest(_message.Message):
    __slots__ = ("queue", "topics", "after", "from_end", "lease_seconds", "max_attempts", "ordered_keys", "if_missing")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FROM_END_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ORDERED_KEYS_FIELD_NUMBER: _ClassVar[int]
    IF_MISSING_FIELD_NUMBER: _ClassVar[int]
    queue: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    after: int
    from_end: bool
    lease_seconds: float
    max_attempts: int
    ordered_keys: bool
    if_missing: bool
    def __init__(self, queue: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., after: _Optional[int] = ..., from_end: _Optional[bool] = ..., lease_seconds: _Optional[float] = ..., max_attempts: _Optional[int] = ..., ordered_keys: _Optional[bool] = ..., if_missing: _Optional[bool] = ...) -> None: ...

class CreateQueueResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("queue", "worker", "batch_size", "lease_seconds", "wait_seconds")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    worker: str
    batch_size: int
    lease_seconds: float
    wait_seconds: float
    def __init__(self, queue: _Optional[str] = ..., worker: _Optional[str] = ..., batch_size: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class ClaimedEvent(_message.Message):
    __slots__ = ("event", "attempt")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    event: Event
    attempt: int
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("queue", "token", "expires_at", "events", "isolated")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_FIELD_NUMBER: _ClassVar[int]
    queue: str
    token: int
    expires_at: _timestamp_pb2.Timestamp
    events: _containers.RepeatedCompositeFieldContainer[ClaimedEvent]
    isolated: bool
    def __init__(self, queue: _Optional[str] = ..., token: _Optional[int] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., events: _Optional[_Iterable[_Union[ClaimedEvent, _Mapping]]] = ..., isolated: _Optional[bool] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("position", "done", "retry", "dead", "release")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    position: int
    done: Done
    retry: Retry
    dead: Dead
    release: Release
    def __init__(self, position: _Optional[int] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., retry: _Optional[_Union[Retry, _Mapping]] = ..., dead: _Optional[_Union[Dead, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Retry(_message.Message):
    __slots__ = ("after_seconds", "reason")
    AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    after_seconds: float
    reason: str
    def __init__(self, after_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Dead(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("after_seconds",)
    AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    after_seconds: float
    def __init__(self, after_seconds: _Optional[float] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("queue", "token", "outcomes", "rest_done", "next")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REST_DONE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    token: int
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    rest_done: bool
    next: ClaimRequest
    def __init__(self, queue: _Optional[str] = ..., token: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., rest_done: _Optional[bool] = ..., next: _Optional[_Union[ClaimRequest, _Mapping]] = ...) -> None: ...

class SettleResponse(_message.Message):
    __slots__ = ("next",)
    NEXT_FIELD_NUMBER: _ClassVar[int]
    next: Lease
    def __init__(self, next: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("queue", "token", "lease_seconds")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    token: int
    lease_seconds: float
    def __init__(self, queue: _Optional[str] = ..., token: _Optional[int] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("expires_at",)
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    expires_at: _timestamp_pb2.Timestamp
    def __init__(self, expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CreateStoreRequest(_message.Message):
    __slots__ = ("store", "if_missing")
    STORE_FIELD_NUMBER: _ClassVar[int]
    IF_MISSING_FIELD_NUMBER: _ClassVar[int]
    store: str
    if_missing: bool
    def __init__(self, store: _Optional[str] = ..., if_missing: _Optional[bool] = ...) -> None: ...

class CreateStoreResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListStoresRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListStoresResponse(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stores: _Optional[_Iterable[str]] = ...) -> None: ...

class NewStoreEvent(_message.Message):
    __slots__ = ("type", "payload", "content_type", "tags", "metadata", "event_id")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    type: str
    payload: bytes
    content_type: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    metadata: str
    event_id: str
    def __init__(self, type: _Optional[str] = ..., payload: _Optional[bytes] = ..., content_type: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ..., metadata: _Optional[str] = ..., event_id: _Optional[str] = ...) -> None: ...

class StoreEvent(_message.Message):
    __slots__ = ("position", "topic_offset", "event_id", "type", "tags", "metadata", "content_type", "payload", "published_at")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    position: int
    topic_offset: int
    event_id: str
    type: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    metadata: str
    content_type: str
    payload: bytes
    published_at: _timestamp_pb2.Timestamp
    def __init__(self, position: _Optional[int] = ..., topic_offset: _Optional[int] = ..., event_id: _Optional[str] = ..., type: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ..., metadata: _Optional[str] = ..., content_type: _Optional[str] = ..., payload: _Optional[bytes] = ..., published_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("types", "tags", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TYPES_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    types: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.RepeatedScalarFieldContainer[str]
    fields: _containers.ScalarMap[str, str]
    def __init__(self, types: _Optional[_Iterable[str]] = ..., tags: _Optional[_Iterable[str]] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("query", "no_match_after", "latest_match_is", "epoch")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    NO_MATCH_AFTER_FIELD_NUMBER: _ClassVar[int]
    LATEST_MATCH_IS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    query: Query
    no_match_after: int
    latest_match_is: int
    epoch: int
    def __init__(self, query: _Optional[_Union[Query, _Mapping]] = ..., no_match_after: _Optional[int] = ..., latest_match_is: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("store", "events", "condition")
    STORE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    store: str
    events: _containers.RepeatedCompositeFieldContainer[NewStoreEvent]
    condition: Condition
    def __init__(self, store: _Optional[str] = ..., events: _Optional[_Iterable[_Union[NewStoreEvent, _Mapping]]] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("positions", "repeated")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    repeated: bool
    def __init__(self, positions: _Optional[_Iterable[int]] = ..., repeated: _Optional[bool] = ...) -> None: ...

class NumberedAppend(_message.Message):
    __slots__ = ("number", "events", "condition")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    number: int
    events: _containers.RepeatedCompositeFieldContainer[NewStoreEvent]
    condition: Condition
    def __init__(self, number: _Optional[int] = ..., events: _Optional[_Iterable[_Union[NewStoreEvent, _Mapping]]] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ...) -> None: ...

class AppendStreamRequest(_message.Message):
    __slots__ = ("store", "appends")
    STORE_FIELD_NUMBER: _ClassVar[int]
    APPENDS_FIELD_NUMBER: _ClassVar[int]
    store: str
    appends: _containers.RepeatedCompositeFieldContainer[NumberedAppend]
    def __init__(self, store: _Optional[str] = ..., appends: _Optional[_Iterable[_Union[NumberedAppend, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "error", "message", "hint", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: int
    error: str
    message: str
    hint: str
    detail: str
    def __init__(self, code: _Optional[int] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("number", "appended", "refused")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    number: int
    appended: AppendResponse
    refused: Refusal
    def __init__(self, number: _Optional[int] = ..., appended: _Optional[_Union[AppendResponse, _Mapping]] = ..., refused: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class AppendStreamResponse(_message.Message):
    __slots__ = ("verdicts",)
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ...) -> None: ...

class ReadMatchingRequest(_message.Message):
    __slots__ = ("store", "query", "after", "before", "backwards", "batch_size", "max_bytes", "epoch")
    STORE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    BACKWARDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    store: str
    query: Query
    after: int
    before: int
    backwards: bool
    batch_size: int
    max_bytes: int
    epoch: int
    def __init__(self, store: _Optional[str] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., after: _Optional[int] = ..., before: _Optional[int] = ..., backwards: _Optional[bool] = ..., batch_size: _Optional[int] = ..., max_bytes: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReadMatchingResponse(_message.Message):
    __slots__ = ("events", "epoch")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[StoreEvent]
    epoch: int
    def __init__(self, events: _Optional[_Iterable[_Union[StoreEvent, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class LatestRequest(_message.Message):
    __slots__ = ("store", "query")
    STORE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    store: str
    query: Query
    def __init__(self, store: _Optional[str] = ..., query: _Optional[_Union[Query, _Mapping]] = ...) -> None: ...

class LatestOfItem(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: StoreEvent
    def __init__(self, event: _Optional[_Union[StoreEvent, _Mapping]] = ...) -> None: ...

class LatestResponse(_message.Message):
    __slots__ = ("items", "position", "epoch")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[LatestOfItem]
    position: int
    epoch: int
    def __init__(self, items: _Optional[_Iterable[_Union[LatestOfItem, _Mapping]]] = ..., position: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class CountRequest(_message.Message):
    __slots__ = ("store", "query", "after", "before")
    STORE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    store: str
    query: Query
    after: int
    before: int
    def __init__(self, store: _Optional[str] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., after: _Optional[int] = ..., before: _Optional[int] = ...) -> None: ...

class CountResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class HeadRequest(_message.Message):
    __slots__ = ("store",)
    STORE_FIELD_NUMBER: _ClassVar[int]
    store: str
    def __init__(self, store: _Optional[str] = ...) -> None: ...

class HeadResponse(_message.Message):
    __slots__ = ("position", "epoch")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    position: int
    epoch: int
    def __init__(self, position: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("store", "query", "after", "from_end", "batch_size", "stop_when_caught_up", "subscriber_name", "epoch")
    STORE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FROM_END_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    STOP_WHEN_CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    store: str
    query: Query
    after: int
    from_end: bool
    batch_size: int
    stop_when_caught_up: bool
    subscriber_name: str
    epoch: int
    def __init__(self, store: _Optional[str] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., after: _Optional[int] = ..., from_end: _Optional[bool] = ..., batch_size: _Optional[int] = ..., stop_when_caught_up: _Optional[bool] = ..., subscriber_name: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("events", "epoch")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[StoreEvent]
    epoch: int
    def __init__(self, events: _Optional[_Iterable[_Union[StoreEvent, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class CompeteRequest(_message.Message):
    __slots__ = ("store", "queue", "query", "worker", "batch_size", "lease_seconds", "stop_when_caught_up")
    STORE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STOP_WHEN_CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    store: str
    queue: str
    query: Query
    worker: str
    batch_size: int
    lease_seconds: float
    stop_when_caught_up: bool
    def __init__(self, store: _Optional[str] = ..., queue: _Optional[str] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., worker: _Optional[str] = ..., batch_size: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., stop_when_caught_up: _Optional[bool] = ...) -> None: ...

class CompeteResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[StoreEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[StoreEvent, _Mapping]]] = ...) -> None: ...

class DeadLettersRequest(_message.Message):
    __slots__ = ("store", "queue", "positions", "after", "batch_size")
    STORE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    store: str
    queue: str
    positions: _containers.RepeatedScalarFieldContainer[int]
    after: int
    batch_size: int
    def __init__(self, store: _Optional[str] = ..., queue: _Optional[str] = ..., positions: _Optional[_Iterable[int]] = ..., after: _Optional[int] = ..., batch_size: _Optional[int] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("position", "type", "attempts", "last_error", "history", "died_at")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    DIED_AT_FIELD_NUMBER: _ClassVar[int]
    position: int
    type: str
    attempts: int
    last_error: str
    history: str
    died_at: _timestamp_pb2.Timestamp
    def __init__(self, position: _Optional[int] = ..., type: _Optional[str] = ..., attempts: _Optional[int] = ..., last_error: _Optional[str] = ..., history: _Optional[str] = ..., died_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class DeadLettersResponse(_message.Message):
    __slots__ = ("letters",)
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    letters: _containers.RepeatedCompositeFieldContainer[DeadLetter]
    def __init__(self, letters: _Optional[_Iterable[_Union[DeadLetter, _Mapping]]] = ...) -> None: ...

class RedriveRequest(_message.Message):
    __slots__ = ("store", "queue", "positions", "all")
    STORE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    store: str
    queue: str
    positions: _containers.RepeatedScalarFieldContainer[int]
    all: bool
    def __init__(self, store: _Optional[str] = ..., queue: _Optional[str] = ..., positions: _Optional[_Iterable[int]] = ..., all: _Optional[bool] = ...) -> None: ...

class RedriveResponse(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class OpenStoreCursorRequest(_message.Message):
    __slots__ = ("store", "cursor", "start_after", "epoch")
    STORE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    START_AFTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    store: str
    cursor: str
    start_after: int
    epoch: int
    def __init__(self, store: _Optional[str] = ..., cursor: _Optional[str] = ..., start_after: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class AdvanceStoreCursorRequest(_message.Message):
    __slots__ = ("store", "cursor", "from_position", "to_position", "epoch")
    STORE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    TO_POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    store: str
    cursor: str
    from_position: int
    to_position: int
    epoch: int
    def __init__(self, store: _Optional[str] = ..., cursor: _Optional[str] = ..., from_position: _Optional[int] = ..., to_position: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...
