"""Is the log the same by gRPC? Publish, follow, queues, streams of appends, and what happens when something ends."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

import headwater
from headwater import errors
from headwater.cli import app, exit_codes
from headwater.eventstore import NewStoreEvent
from headwater.queue.model import Dead
from patience import PATIENCE_SECONDS

grpc = pytest.importorskip("grpc")
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # noqa: E402
from rpc_client import RpcStore  # noqa: E402
from rpc_servers import RpcServer, rpc_server  # noqa: E402

from headwater.servers.grpc.client import service  # noqa: E402
from headwater.servers.grpc.errors import MAX_DETAIL_BYTES, code_for, detail_bytes  # noqa: E402
from headwater.servers.grpc.generated import eventstore_pb2  # noqa: E402
from headwater.servers.grpc.generated import headwater_pb2 as pb  # noqa: E402

_numbers = itertools.count()
Until = Callable[[Callable[[], Any]], Any]


@pytest.fixture(scope="module")
def server(dsn: str) -> Iterator[RpcServer]:
    with rpc_server(dsn=dsn) as server:
        yield server


@pytest.fixture(scope="module")
def channel(server: RpcServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def events(channel: Any) -> Any:
    return service(channel, "headwater.v1.Log")


@pytest.fixture
def queue(channel: Any) -> Any:
    return service(channel, "headwater.v1.Queue")


@pytest.fixture
def stores(channel: Any) -> Any:
    return service(channel, "headwater.v1.EventStore")


@pytest.fixture
def store(log: headwater.Headwater) -> str:
    """A fresh event store."""
    return log.create_store(f"store-{next(_numbers)}").topic


def refused(code: Any) -> Any:
    return pytest.raises(grpc.RpcError, match=f"StatusCode.{code.name}\\b")


# --- publish, read, follow ---------------------------------------------------------------------------------------


def test_what_is_published_is_in_the_log_as_it_was(events: Any, log: headwater.Headwater, topic: str) -> None:
    new = pb.NewEvent(
        payload=b'{"n": 1}',
        key=b"\x00k",
        type="placed",
        routing_key="a.b",
        headers='{"h": ["x"]}',
        event_id="e1",
        content_type="application/json",
    )
    first = events.Publish(pb.PublishRequest(topic=topic, event=new), timeout=PATIENCE_SECONDS).position
    assert events.Publish(pb.PublishRequest(topic=topic, event=new), timeout=PATIENCE_SECONDS).position == first
    (kept,) = log.read(topic)
    assert (kept.position, kept.data, kept.key, kept.type) == (first, {"n": 1}, b"\x00k", "placed")
    assert (kept.routing_key, kept.headers, kept.event_id) == ("a.b", {"h": ["x"]}, "e1")
    (read,) = events.Read(pb.ReadRequest(topics=[topic]), timeout=PATIENCE_SECONDS).events
    assert (read.position, read.topic, read.payload, read.key) == (first, topic, b'{"n": 1}', b"\x00k")
    assert (read.type, read.routing_key, json.loads(read.headers)) == ("placed", "a.b", {"h": ["x"]})
    assert (read.event_id, read.content_type) == ("e1", "application/json")
    assert read.published_at.ToDatetime(tzinfo=UTC) == kept.published_at
    bare = events.Publish(pb.PublishRequest(topic=topic, event=pb.NewEvent()), timeout=PATIENCE_SECONDS).position
    (read,) = events.Read(pb.ReadRequest(topics=[topic], after=first), timeout=PATIENCE_SECONDS).events
    assert read.position == bare
    given = ("payload", "key", "type", "routing_key", "headers", "event_id", "content_type", "topic_offset")
    assert not any(read.HasField(name) for name in given)


def test_an_event_for_later_has_no_position_yet(events: Any, log: headwater.Headwater, topic: str) -> None:
    later = datetime.now(UTC) + timedelta(days=9)
    request = pb.PublishRequest(topic=topic, event=pb.NewEvent(payload=b"x"), deliver_at=later)
    assert not events.Publish(request, timeout=PATIENCE_SECONDS).HasField("position")
    (waiting,) = [one for one in log.scheduled() if one.topic == topic]
    assert waiting.due_at == later


def test_a_batch_is_published_whole_or_not_at_all(events: Any, log: headwater.Headwater, topic: str) -> None:
    batch = [pb.NewEvent(payload=b"%d" % n) for n in range(5)]
    positions = events.PublishBatch(
        pb.PublishBatchRequest(topic=topic, events=batch), timeout=PATIENCE_SECONDS
    ).positions
    assert [event.position for event in log.read(topic)] == list(positions)
    for wrong in (
        pb.NewEvent(payload=b"x" * 2_000_000),
        pb.NewEvent(payload=b"{", content_type="application/json"),
        pb.NewEvent(payload=b"[" * 100_000, content_type="application/json"),
        pb.NewEvent(headers="[]"),
    ):
        with pytest.raises(grpc.RpcError, match=r"INVALID_ARGUMENT|RESOURCE_EXHAUSTED"):
            events.PublishBatch(pb.PublishBatchRequest(topic=topic, events=[*batch, wrong]), timeout=PATIENCE_SECONDS)
    assert len(log.read(topic)) == 5


def test_a_follower_catches_up_and_stays_live(events: Any, log: headwater.Headwater, topic: str) -> None:
    for n in range(10):
        log.publish(topic, n)
    answers = events.Follow(pb.FollowRequest(topics=[topic], batch_size=4), timeout=PATIENCE_SECONDS)
    got = [event for _ in range(3) for event in next(answers).events]
    assert [event.payload for event in got] == [b"%d" % n for n in range(10)]
    log.publish(topic, "live")
    assert [event.payload for event in next(answers).events] == [b'"live"']
    answers.cancel()
    rest = events.Follow(
        pb.FollowRequest(topics=[topic], after=got[-1].position, stop_when_caught_up=True), timeout=PATIENCE_SECONDS
    )
    assert [event.payload for answer in rest for event in answer.events] == [b'"live"']


def test_a_follower_that_does_not_read_is_waited_for_and_loses_nothing(
    server: RpcServer, events: Any, log: headwater.Headwater, topic: str
) -> None:
    def resident_bytes() -> int:
        return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    large = b"x" * 200_000
    for _ in range(4):
        log.publish_batch(topic, [headwater.NewEvent(large) for _ in range(100)])
    # Large batches, which come in messages that a client takes.
    request = pb.FollowRequest(topics=[topic], stop_when_caught_up=True)
    first = events.Follow(request, timeout=PATIENCE_SECONDS)
    next(first)
    before = resident_bytes()
    idle = [events.Follow(request, timeout=PATIENCE_SECONDS) for _ in range(10)]
    seen = [sum(len(answer.events) for answer in answers) for answers in idle[:2]]
    assert seen == [400, 400]
    # Eight have been served nothing but what fits on the way; all of it would be 640 MB.
    assert resident_bytes() - before < 200_000_000
    assert 400 - sum(len(answer.events) for answer in first) in range(1, 11)
    for answers in idle[2:]:
        answers.cancel()


def test_cursors_move_by_compare_and_set(events: Any, topic: str) -> None:
    name = f"cursor-{next(_numbers)}"
    opening = pb.OpenCursorRequest(cursor=name, topics=[topic], start_after=7)
    assert events.OpenCursor(opening, timeout=PATIENCE_SECONDS).position == 7
    events.AdvanceCursor(pb.AdvanceCursorRequest(cursor=name, from_position=7, to_position=9), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.ABORTED):
        events.AdvanceCursor(
            pb.AdvanceCursorRequest(cursor=name, from_position=7, to_position=11), timeout=PATIENCE_SECONDS
        )
    assert events.OpenCursor(opening, timeout=PATIENCE_SECONDS).position == 9


def test_topics_are_made_seen_and_deleted(events: Any, log: headwater.Headwater) -> None:
    name = f"made-{next(_numbers)}"
    request = pb.CreateTopicRequest(name=name, kind="sequenced", partitions=3, retention_seconds=3600)
    made = events.CreateTopic(request, timeout=PATIENCE_SECONDS)
    assert (made.kind, made.partitions, made.retention_seconds) == ("sequenced", 3, 3600)
    assert log.topic(name).retention == timedelta(hours=1)
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        events.CreateTopic(request, timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        events.CreateTopic(pb.CreateTopicRequest(name="x", kind="round"), timeout=PATIENCE_SECONDS)
    assert events.GetTopic(pb.GetTopicRequest(name=name), timeout=PATIENCE_SECONDS) == made
    assert made in events.ListTopics(pb.ListTopicsRequest(), timeout=PATIENCE_SECONDS).topics
    events.DeleteTopic(pb.DeleteTopicRequest(name=name), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.NOT_FOUND):
        events.GetTopic(pb.GetTopicRequest(name=name), timeout=PATIENCE_SECONDS)


# --- queues ------------------------------------------------------------------------------------------------------


def test_events_are_claimed_settled_tried_again_and_given_up(queue: Any, log: headwater.Headwater, topic: str) -> None:
    name = f"queue-{next(_numbers)}"
    queue.CreateQueue(pb.CreateQueueRequest(queue=name, topics=[topic], max_attempts=3), timeout=PATIENCE_SECONDS)
    positions = [log.publish(topic, n) for n in range(5)]
    claim = pb.ClaimRequest(queue=name, worker="w", batch_size=4)
    lease = queue.Claim(claim, timeout=PATIENCE_SECONDS).lease
    assert [one.event.position for one in lease.events] == positions[:4]
    assert {one.attempt for one in lease.events} == {1}
    outcomes = [
        pb.Outcome(position=positions[0], done=pb.Done()),
        pb.Outcome(position=positions[1], retry=pb.Retry(after_seconds=0, reason="later")),
        pb.Outcome(position=positions[2], dead=pb.Dead(reason="never")),
        pb.Outcome(position=positions[3], release=pb.Release()),
    ]
    settled = queue.Settle(
        pb.SettleRequest(
            queue=name, token=lease.token, outcomes=outcomes, rest_done=True, next=pb.ClaimRequest(worker="w")
        ),
        timeout=PATIENCE_SECONDS,
    )
    attempts = {}
    answer = settled.next
    while answer.events:
        attempts |= {one.event.position: one.attempt for one in answer.events}
        request = pb.SettleRequest(queue=name, token=answer.token, rest_done=True, next=claim)
        answer = queue.Settle(request, timeout=PATIENCE_SECONDS).next
    assert attempts == {positions[1]: 2, positions[3]: 1, positions[4]: 1}
    (dead,) = log.dead_letters(name)
    assert (dead.position, dead.last_error) == (positions[2], "never")
    assert not queue.Claim(claim, timeout=PATIENCE_SECONDS).HasField("lease")
    with refused(grpc.StatusCode.FAILED_PRECONDITION):
        queue.Settle(pb.SettleRequest(queue=name, token=lease.token, rest_done=True), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        queue.Settle(
            pb.SettleRequest(queue=name, token=lease.token, outcomes=[pb.Outcome(position=1)]), timeout=PATIENCE_SECONDS
        )
    with refused(grpc.StatusCode.NOT_FOUND):
        queue.Claim(pb.ClaimRequest(queue="missing", worker="w"), timeout=PATIENCE_SECONDS)


def test_a_claim_waits_for_events_and_a_lease_is_kept_for_longer(
    queue: Any, log: headwater.Headwater, topic: str
) -> None:
    name = f"queue-{next(_numbers)}"
    queue.CreateQueue(pb.CreateQueueRequest(queue=name, topics=[topic]), timeout=PATIENCE_SECONDS)
    waiting = queue.Claim.future(pb.ClaimRequest(queue=name, worker="w", wait_seconds=20), timeout=PATIENCE_SECONDS)
    position = log.publish(topic, "x")
    lease = waiting.result().lease
    assert [one.event.position for one in lease.events] == [position]
    extended = queue.Extend(
        pb.ExtendRequest(queue=name, token=lease.token, lease_seconds=3600), timeout=PATIENCE_SECONDS
    ).expires_at
    assert extended.ToDatetime() > lease.expires_at.ToDatetime() + timedelta(minutes=50)
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        queue.Claim(pb.ClaimRequest(queue=name, worker="w", wait_seconds=61), timeout=PATIENCE_SECONDS)


def test_what_a_dead_worker_had_goes_to_another(queue: Any, log: headwater.Headwater, topic: str) -> None:
    name = f"queue-{next(_numbers)}"
    queue.CreateQueue(pb.CreateQueueRequest(queue=name, topics=[topic]), timeout=PATIENCE_SECONDS)
    position = log.publish(topic, "x")
    dead = pb.ClaimRequest(queue=name, worker="dead", lease_seconds=0.1)
    assert queue.Claim(dead, timeout=PATIENCE_SECONDS).HasField("lease")
    other = pb.ClaimRequest(queue=name, worker="other", wait_seconds=20)
    (claimed,) = queue.Claim(other, timeout=PATIENCE_SECONDS).lease.events
    assert (claimed.event.position, claimed.attempt) == (position, 2)


def test_a_deadline_ends_a_call_that_waits(queue: Any, topic: str) -> None:
    name = f"queue-{next(_numbers)}"
    queue.CreateQueue(pb.CreateQueueRequest(queue=name, topics=[topic]), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        queue.Claim(pb.ClaimRequest(queue=name, worker="w", wait_seconds=50), timeout=0.2)


def test_an_append_that_waits_ends_at_its_deadline_and_says_so(
    stores: Any, store: str, connection: psycopg.Connection[Any]
) -> None:
    append = pb.AppendRequest(store=store, events=[pb.NewStoreEvent(type="A")])
    stores.Append(append, timeout=PATIENCE_SECONDS)
    with connection.transaction():
        # Whoever has appended and has not ended holds all others up.
        connection.execute("""select headwater.append(%s, '[{"type": "A"}]')""", (store,))
        waiting = [stores.Append.future(append, timeout=0.3) for _ in range(30)]
        assert {one.code() for one in waiting} == {grpc.StatusCode.DEADLINE_EXCEEDED}


def test_a_topic_that_is_no_event_store_is_not_found_as_one(stores: Any, channel: Any, topic: str) -> None:
    with refused(grpc.StatusCode.NOT_FOUND):
        stores.Append(pb.AppendRequest(store=topic, events=[pb.NewStoreEvent(type="A")]), timeout=PATIENCE_SECONDS)
    with refused(grpc.StatusCode.NOT_FOUND):
        service(channel, "orisun.EventStore").GetEvents(
            eventstore_pb2.GetEventsRequest(boundary=topic, count=1), timeout=PATIENCE_SECONDS
        )


# --- the stream of appends ---------------------------------------------------------------------------------------


def numbered(number: int, *tags: str, unless: str | None = None, event_id: str | None = None) -> pb.NumberedAppend:
    condition = pb.Condition(query=pb.Query(items=[pb.Item(tags=[unless])]), no_match_after=0) if unless else None
    event = pb.NewStoreEvent(type="A", tags=tags, event_id=event_id)
    return pb.NumberedAppend(number=number, events=[event], condition=condition)


def verdicts(answers: Any) -> list[Any]:
    return [verdict for answer in answers for verdict in answer.verdicts]


def test_every_append_of_a_stream_has_its_verdict_in_order(stores: Any, log: headwater.Headwater, store: str) -> None:
    def requests() -> Iterator[pb.AppendStreamRequest]:
        yield pb.AppendStreamRequest(store=store)
        for start in range(0, 1000, 40):
            # Of each ten, one takes the name that all want.
            appends = [
                numbered(-n, f"n{n // 10}", unless=f"n{n // 10}") if n % 2 else numbered(-n, f"free{n}")
                for n in range(start, start + 40)
            ]
            yield pb.AppendStreamRequest(appends=appends)

    got = verdicts(stores.AppendStream(requests(), timeout=PATIENCE_SECONDS))
    assert [verdict.number for verdict in got] == [-n for n in range(1000)]
    for n, verdict in enumerate(got):
        wanted = "appended" if n % 2 == 0 or n % 10 == 1 else "refused"
        assert verdict.WhichOneof("outcome") == wanted, n
    refusal = got[3].refused
    assert (refusal.code, refusal.error) == (grpc.StatusCode.ALREADY_EXISTS.value[0], "AppendConflict")
    assert json.loads(refusal.detail)["actual_position"] == got[1].appended.positions[0]
    kept = log.store(store)
    assert kept.count() == 600
    appended = [position for verdict in got for position in verdict.appended.positions]
    assert appended == sorted(appended) == [event.position for event in kept.read_all()]


def test_a_stream_answers_while_it_is_open_and_repeats_are_known(stores: Any, store: str) -> None:
    go_on = threading.Event()

    def requests() -> Iterator[pb.AppendStreamRequest]:
        yield pb.AppendStreamRequest(store=store, appends=[numbered(1, event_id="e")])
        assert go_on.wait(PATIENCE_SECONDS)
        yield pb.AppendStreamRequest(store=store, appends=[numbered(2, event_id="e"), numbered(3)])

    answers = stores.AppendStream(requests(), timeout=PATIENCE_SECONDS)
    (first,) = next(answers).verdicts
    go_on.set()
    second, third = verdicts(answers)
    assert (first.appended.repeated, second.appended.repeated, third.appended.repeated) == (False, True, False)
    assert second.appended.positions == first.appended.positions


def test_more_than_the_window_waits_with_its_sender(stores: Any, log: headwater.Headwater, store: str) -> None:
    large = b"x" * 900_000

    def requests() -> Iterator[pb.AppendStreamRequest]:
        for n in range(40):
            event = pb.NewStoreEvent(type="A", payload=large)
            appends = [pb.NumberedAppend(number=n, events=[event])]
            yield pb.AppendStreamRequest(store=store, appends=appends)
        yield pb.AppendStreamRequest(appends=[numbered(n) for n in range(40, 1040)])

    got = verdicts(stores.AppendStream(requests(), timeout=PATIENCE_SECONDS))
    assert [verdict.number for verdict in got if verdict.HasField("appended")] == list(range(1040))


def test_a_stream_that_goes_wrong_ends_after_the_verdicts_before(
    stores: Any, log: headwater.Headwater, store: str
) -> None:
    other = log.create_store(f"store-{next(_numbers)}").topic
    wrong = [
        pb.AppendStreamRequest(store=store, appends=[numbered(1), pb.NumberedAppend(number=2)]),
        pb.AppendStreamRequest(store=other, appends=[numbered(3)]),
        pb.AppendStreamRequest(store=store, appends=[numbered(4)]),
    ]
    answers = stores.AppendStream(iter(wrong), timeout=PATIENCE_SECONDS)
    got: list[Any] = []
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        for answer in answers:
            got += answer.verdicts
    assert [(verdict.number, verdict.WhichOneof("outcome")) for verdict in got] == [(1, "appended"), (2, "refused")]
    assert (log.store(store).count(), log.store(other).count()) == (1, 0)
    with refused(grpc.StatusCode.NOT_FOUND):
        verdicts(stores.AppendStream(iter([pb.AppendStreamRequest(store="nowhere")]), timeout=PATIENCE_SECONDS))


def competition(store: str, queue: str, **options: Any) -> pb.CompeteRequest:
    return pb.CompeteRequest(**{"store": store, "queue": queue, "worker": "w", "stop_when_caught_up": True, **options})


def rest(stores: Any, store: str, queue: str) -> list[int]:
    """What one more competitor gets now; all of it is done."""
    batches = RpcStore(stores, store).compete(queue, worker="rest", stop_when_caught_up=True)
    return [event.position for batch in batches for event in batch]


def test_a_batch_in_parts_is_done_when_more_is_asked_for_after_the_last(
    stores: Any, log: headwater.Headwater, store: str, until: Until
) -> None:
    # Two do not fit into one message.
    large = NewStoreEvent("A", b"x" * 600_000)
    positions = [position for _ in range(3) for position in log.store(store).append(large).positions]
    queue = f"queue-{next(_numbers)}"
    doomed = RpcStore(stores, store).compete(queue, worker="w", lease_seconds=0.05, stop_when_caught_up=True)
    assert [len(next(doomed)) for _ in range(3)] == [1, 1, 1]
    doomed.close()
    got: list[int] = []
    until(lambda: got.extend(rest(stores, store, queue)) or len(got) >= 3)
    assert got == positions
    parts = RpcStore(stores, store).compete(f"{queue}-b", worker="w", stop_when_caught_up=True)
    assert [len(part) for part in parts] == [1, 1, 1]
    assert [one.position for one in log.deliveries(f"{queue}-b", status="done")] == positions


def test_who_only_stops_asking_has_done_nothing(
    stores: Any, log: headwater.Headwater, store: str, until: Until
) -> None:
    positions = list(log.store(store).append([NewStoreEvent("A"), NewStoreEvent("A")]).positions)
    queue = f"queue-{next(_numbers)}"
    request = competition(store, queue, lease_seconds=0.05)
    (answer,) = stores.Compete(iter([request]), timeout=PATIENCE_SECONDS)
    assert [event.position for event in answer.events] == positions
    got: list[int] = []
    until(lambda: got.extend(rest(stores, store, queue)) or len(got) >= 2)
    assert got == positions
    assert list(stores.Compete(iter([]), timeout=PATIENCE_SECONDS)) == []


@pytest.mark.parametrize("other", [{"store": "another"}, {"queue": "another"}])
def test_a_stream_competes_in_one_queue_of_one_store(
    stores: Any, log: headwater.Headwater, store: str, until: Until, other: dict[str, str]
) -> None:
    positions = [log.store(store).append(NewStoreEvent("A")).position]
    queue = f"queue-{next(_numbers)}"
    first = competition(store, queue, lease_seconds=0.05)
    answers = stores.Compete(iter([first, pb.CompeteRequest(**other)]), timeout=PATIENCE_SECONDS)
    assert len(next(answers).events) == 1
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        next(answers)
    got: list[int] = []
    until(lambda: got.extend(rest(stores, store, queue)) or got)
    assert got == positions
    # The same again is no other.
    later = log.store(store).append([NewStoreEvent("A"), NewStoreEvent("A")]).positions
    same = competition(store, queue, batch_size=1)
    answers = stores.Compete(iter([same, same, same]), timeout=PATIENCE_SECONDS)
    assert [event.position for answer in answers for event in answer.events] == list(later)


def test_dead_letters_are_told_of_and_redriven_by_name_or_all_and_that_is_noted(
    stores: Any, log: headwater.Headwater, store: str
) -> None:
    first, second = log.store(store).append([NewStoreEvent("A"), NewStoreEvent("B")]).positions
    queue = f"queue-{next(_numbers)}"
    log.create_queue(queue, [store])
    lease = log.claim(queue, worker="w", batch_size=2)
    assert lease is not None
    log.settle(lease, {first: Dead("no"), second: Dead("never")})

    def letters(**asked: Any) -> list[tuple[int, str, str]]:
        answer = stores.DeadLetters(pb.DeadLettersRequest(store=store, queue=queue, **asked), timeout=PATIENCE_SECONDS)
        return [(one.position, one.type, one.last_error) for one in answer.letters]

    def redrive(**meant: Any) -> int:
        return stores.Redrive(pb.RedriveRequest(store=store, queue=queue, **meant), timeout=PATIENCE_SECONDS).count

    assert letters() == [(first, "A", "no"), (second, "B", "never")]
    assert letters(batch_size=1) == letters(positions=[first]) == letters()[:1]
    assert letters(after=first) == letters()[1:]
    # What was forgotten to be said must not mean all.
    for unclear in ({}, {"positions": [first], "all": True}):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            redrive(**unclear)
    assert redrive(positions=[second]) == 1
    assert letters() == [(first, "A", "no")]
    assert redrive(all=True) == 1
    assert letters() == []
    told = [event.data for event in log.read("headwater.audit") if event.data["subject"] == queue]
    assert [(one["action"], one["detail"]) for one in told] == [
        ("queue.redrive", {"positions": [second], "count": 1}),
        ("queue.redrive", {"positions": "all", "count": 1}),
    ]


# --- errors, limits, health --------------------------------------------------------------------------------------

# What a caller of this server can never meet: pipelines, capture, lakes, the registry, settings, bugs of ours.
NEVER_MET = {
    "PipelineNotFound",
    "PipelineBusy",
    "StagedEventsLost",
    "ProjectionRebuilt",
    "SlotBusy",
    "SlotLost",
    "LakeBusy",
    "InvalidSettings",
    "OrderBroken",
    "IncompatibleSchema",
    "SchemaNotFound",
    "SchemaInUse",
    "SchemaNotDeleted",
}


def test_every_error_that_a_caller_can_meet_has_a_status_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    without = {kind.__name__ for kind in kinds if code_for(kind) is grpc.StatusCode.INTERNAL} - {"HeadwaterError"}
    assert without == NEVER_MET


def test_an_error_comes_beside_the_status_and_is_never_too_large(stores: Any, store: str) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as error:
        stores.Append(pb.AppendRequest(store=store), timeout=PATIENCE_SECONDS)
    told = json.loads(dict(error.value.trailing_metadata())["headwater-error-bin"])
    assert told["error"] == "InvalidRequest"
    assert told["message"] in error.value.details()
    for large in (
        errors.InvalidRequest("m", detail={"d": "x" * 10_000}),
        errors.InvalidRequest("m" * 10_000, hint="ä" * 10_000),
    ):
        encoded = detail_bytes(large)
        assert len(encoded) <= MAX_DETAIL_BYTES
        assert json.loads(encoded)["error"] == "InvalidRequest"


def test_a_message_that_is_too_large_is_refused(events: Any, topic: str) -> None:
    huge = pb.PublishRequest(topic=topic, event=pb.NewEvent(payload=b"x" * 70_000_000))
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        events.Publish(huge, timeout=PATIENCE_SECONDS)


def test_a_bad_number_is_refused_with_what_it_may_be(events: Any, stores: Any, store: str) -> None:
    for call, request in (
        (events.Read, pb.ReadRequest(batch_size=10_001)),
        (events.Read, pb.ReadRequest(batch_size=-1)),
        (events.Read, pb.ReadRequest(max_bytes=1 << 30)),
        (stores.ReadMatching, pb.ReadMatchingRequest(store=store, batch_size=10_001)),
        (stores.Append, pb.AppendRequest(store=store, events=[pb.NewStoreEvent(type="A")], condition=pb.Condition())),
    ):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            call(request, timeout=PATIENCE_SECONDS)


def test_health_and_reflection_tell_of_the_services(channel: Any) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    names = ["headwater.v1.Log", "headwater.v1.Queue", "headwater.v1.EventStore", "orisun.EventStore", "orisun.Admin"]
    for name in ("", *names):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([asked]), timeout=PATIENCE_SECONDS
    )
    listed = [service.name for service in next(iter(reflected)).list_services_response.service]
    assert set(names) <= set(listed)


# --- ends --------------------------------------------------------------------------------------------------------


def node_of(address: str) -> str:
    """Which process answers on a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        info = service(channel, "orisun.EventStore").GetServerInfo(
            eventstore_pb2.GetServerInfoRequest(), timeout=PATIENCE_SECONDS, wait_for_ready=True
        )
        return str(info.node_id)


def test_several_processes_share_a_port_and_one_that_dies_is_started_again(dsn: str, until: Until) -> None:
    nodes: set[str] = set()
    with rpc_server("--processes", "2", dsn=dsn) as server:
        until(lambda: nodes.add(node_of(server.address)) or len(nodes) == 2)
        os.kill(int(min(nodes).rpartition("-")[2]), signal.SIGKILL)
        until(lambda: node_of(server.address) not in nodes)


def test_a_server_that_stops_ends_its_streams_and_says_so(dsn: str, log: headwater.Headwater, store: str) -> None:
    log.store(store).append(NewStoreEvent("A"))
    with rpc_server(dsn=dsn) as server, grpc.insecure_channel(server.address) as channel:
        stores = service(channel, "headwater.v1.EventStore")
        answers = stores.Subscribe(pb.SubscribeRequest(store=store), timeout=PATIENCE_SECONDS)
        assert len(next(answers).events) == 1
        first = competition(store, "stopped", stop_when_caught_up=False)
        competing = stores.Compete(iter([first, pb.CompeteRequest()]), timeout=PATIENCE_SECONDS)
        assert len(next(competing).events) == 1
        server.process.terminate()
        for stream in (answers, competing):
            with refused(grpc.StatusCode.UNAVAILABLE) as ended:
                next(stream)
            assert "stopping" in ended.value.details()
        assert server.process.wait(PATIENCE_SECONDS) == 0


def test_a_name_is_one_subscribers_among_servers_and_free_when_its_server_dies(
    dsn: str, log: headwater.Headwater, store: str, until: Until, server: RpcServer, stores: Any
) -> None:
    log.store(store).append(NewStoreEvent("A"))
    request = pb.SubscribeRequest(store=store, subscriber_name="me")
    with rpc_server(dsn=dsn) as other, grpc.insecure_channel(other.address) as channel:
        elsewhere = service(channel, "headwater.v1.EventStore")
        first = elsewhere.Subscribe(request, timeout=PATIENCE_SECONDS)
        assert len(next(first).events) == 1
        with refused(grpc.StatusCode.ALREADY_EXISTS):
            next(stores.Subscribe(request, timeout=PATIENCE_SECONDS))
        other.process.kill()
        other.process.wait()

        def taken_over() -> bool:
            try:
                return len(next(stores.Subscribe(request, timeout=PATIENCE_SECONDS)).events) == 1
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                    raise
                return False

        until(taken_over)


def test_whose_name_is_lost_with_its_session_ends(
    log: headwater.Headwater, connection: psycopg.Connection, store: str, stores: Any
) -> None:
    log.store(store).append(NewStoreEvent("A"))
    answers = stores.Subscribe(pb.SubscribeRequest(store=store, subscriber_name="me"), timeout=PATIENCE_SECONDS)
    assert len(next(answers).events) == 1
    connection.execute(
        "select pg_terminate_backend(pid) from pg_locks"
        " where locktype = 'advisory' and classid::bigint >> 16 = 29295 and database ="
        " (select oid from pg_database where datname = current_database())"
    )
    with refused(grpc.StatusCode.UNAVAILABLE):
        next(answers)


def test_calls_outlive_the_connections_of_the_server(
    log: headwater.Headwater, connection: psycopg.Connection, store: str, stores: Any
) -> None:
    append = pb.AppendRequest(store=store, events=[pb.NewStoreEvent(type="A")])
    subscribed = stores.Subscribe(pb.SubscribeRequest(store=store, after=0), timeout=PATIENCE_SECONDS)
    for n in range(3):
        stores.Append(append, timeout=PATIENCE_SECONDS)
        assert len(next(subscribed).events) == 1, n
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'headwater serve' and datname = current_database()"
        )
    stores.Append(append, timeout=PATIENCE_SECONDS)
    assert len(next(subscribed).events) == 1
    assert log.store(store).count() == 4


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments], env={"HEADWATER_DSN": None})


def test_a_directory_is_served_by_one_process_and_by_this_server_alone(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path / 'stores'}"
    for wrong in (
        ("--store", address),
        ("--store", address, "--http", "127.0.0.1:0"),
        ("--store", address, "--grpc", "127.0.0.1:0", "--kafka", "127.0.0.1:0"),
        ("--store", address, "--grpc", "127.0.0.1:0", "--processes", "2"),
        ("--store", address, "--grpc", "127.0.0.1:0", "--authenticate"),
    ):
        assert run(*wrong).exit_code == exit_codes.USAGE
    assert run("--store", "somewhere", "--grpc", "127.0.0.1:0").exit_code == exit_codes.REFUSED
    assert not (tmp_path / "stores").exists()
    with rpc_server("--store", address):
        assert run("--store", address, "--grpc", "127.0.0.1:0").exit_code == exit_codes.CONFLICT
    assert run("--store", address, "--grpc", "0.0.0.0:0").exit_code == exit_codes.REFUSED


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_program_that_the_page_shows_runs(dsn: str, server: RpcServer) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "grpc.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, Any] = {"__name__": "a page"}
    for block in blocks:
        exec(compile(block.replace("127.0.0.1:5005", server.address), str(page), "exec"), names)
