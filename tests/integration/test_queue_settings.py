"""Does a queue get exactly the events that it is bound to, from where it starts?"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwater
from effort import effort
from headwater import NewEvent

_numbers = itertools.count()


@pytest.fixture
def queue() -> str:
    return f"queue-{next(_numbers)}"


@pytest.fixture
def other(log: headwater.Headwater, topic: str) -> str:
    """A second topic."""
    return log.create_topic(f"{topic}-other").name


def batches(log: headwater.Headwater, queue: str, batch_size: int = 100) -> Iterator[tuple[int, ...]]:
    """The positions of each batch, which is done when the next one is asked for."""
    while lease := log.claim(queue, worker="w", batch_size=batch_size):
        yield tuple(event.position for event in lease.events)
        log.ack(lease)


def drain(log: headwater.Headwater, queue: str, batch_size: int = 100) -> list[int]:
    return [position for batch in batches(log, queue, batch_size) for position in batch]


# --- the life of a queue ---------------------------------------------------------------------------------------


def test_a_queue_has_the_settings_that_it_was_given(log: headwater.Headwater, topic: str, queue: str) -> None:
    created = log.create_queue(
        queue,
        topic,
        after=7,
        lease_seconds=12.5,
        max_attempts=9,
        backoff_seconds=0.5,
        backoff_factor=3,
        backoff_max_seconds=77,
        backoff_jitter=0.1,
        ordered_keys=True,
        max_in_flight=11,
        holds_retention=False,
    )
    assert log.queue(queue) == created
    assert (created.name, created.start_position, created.lease_seconds, created.max_attempts) == (queue, 7, 12.5, 9)
    assert (created.backoff_seconds, created.backoff_factor, created.backoff_max_seconds) == (0.5, 3, 77)
    assert (created.backoff_jitter, created.ordered_keys, created.max_in_flight) == (0.1, True, 11)
    assert (created.holds_retention, created.paused) == (False, False)


def test_altering_changes_what_is_named_and_nothing_else(log: headwater.Headwater, topic: str, queue: str) -> None:
    log.create_queue(queue, topic, max_in_flight=5, backoff_seconds=4)
    altered = log.alter_queue(queue, max_attempts=2, lease_seconds=3)
    assert (altered.max_attempts, altered.lease_seconds, altered.max_in_flight, altered.backoff_seconds) == (2, 3, 5, 4)
    assert log.alter_queue(queue, max_in_flight=0).max_in_flight is None
    assert log.queue(queue).max_attempts == 2


def test_a_queue_is_made_once(log: headwater.Headwater, topic: str, queue: str) -> None:
    log.create_queue(queue, topic, max_attempts=3)
    with pytest.raises(headwater.QueueExists, match=queue):
        log.create_queue(queue, topic)
    assert log.create_queue(queue, topic, max_attempts=8, if_missing=True).max_attempts == 3
    assert len(log.bindings(queue)) == 1


def test_what_cannot_be_is_refused(log: headwater.Headwater, topic: str, queue: str) -> None:
    with pytest.raises(headwater.TopicNotFound):
        log.create_queue(queue, "nowhere")
    with pytest.raises(headwater.InvalidRequest, match="attempts"):
        log.create_queue(queue, topic, max_attempts=0)
    with pytest.raises(headwater.QueueNotFound):
        log.queue(queue)
    for call in (log.pause_queue, log.resume_queue, log.bindings, log.reap):
        with pytest.raises(headwater.QueueNotFound, match=queue):
            call(queue)
    with pytest.raises(headwater.QueueNotFound, match=queue):
        log.claim(queue, worker="w")
    log.create_queue(queue, topic)
    with pytest.raises(headwater.InvalidRequest, match="batch"):
        log.claim(queue, worker="w", batch_size=0)
    with pytest.raises(headwater.QueueNotFound, match="binding"):
        log.unbind(queue, 2_000_000_000)


def test_a_paused_queue_claims_nothing_but_settles_what_it_has(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    positions = log.publish_batch(topic, [NewEvent(n) for n in range(3)])
    log.create_queue(queue, topic)
    lease = log.claim(queue, worker="w")
    assert lease is not None
    log.pause_queue(queue)
    assert log.queue(queue).paused
    assert log.claim(queue, worker="w", batch_size=10) is None
    log.ack(lease)
    assert log.deliveries(queue)[0].status == "done"
    log.resume_queue(queue)
    assert drain(log, queue) == positions[1:]


def test_a_deleted_queue_leaves_nothing_behind(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(4)])
    log.create_queue(queue, topic)
    lease = log.claim(queue, worker="w", batch_size=3)
    assert lease is not None
    log.nack(lease, lease.events[0], error="x")
    log.nack(lease, lease.events[1], error="x", dead=True)
    assert log.delete_queue(queue)
    assert not log.delete_queue(queue)
    left = connection.execute(
        "select count(*) from (select queue_id from headwater_internal.ledger union all "
        "select queue_id from headwater_internal.redelivery union all select queue_id from "
        "headwater_internal.dead_letter union all "
        "select queue_id from headwater_internal.binding) as l "
        "where not exists (select from headwater_internal.queue g where g.id = l.queue_id)"
    ).fetchone()
    assert left == (0,)
    with pytest.raises(headwater.QueueNotFound):
        log.ack(lease)


def test_a_new_queue_of_an_old_name_starts_anew(log: headwater.Headwater, topic: str, queue: str) -> None:
    positions = log.publish_batch(topic, [NewEvent(n) for n in range(3)])
    log.create_queue(queue, topic)
    assert drain(log, queue) == positions
    log.delete_queue(queue)
    log.create_queue(queue, topic)
    assert drain(log, queue) == positions


# --- where it starts -------------------------------------------------------------------------------------------


def test_a_queue_starts_where_it_was_told(log: headwater.Headwater, topic: str, connection: psycopg.Connection) -> None:
    positions = log.publish_batch(topic, [NewEvent(n) for n in range(4)])
    connection.execute(
        "update headwater_internal.event set published_at = now() - interval '1 hour' where position <= %s",
        (positions[1],),
    )
    log.create_queue("from-beginning", topic)
    log.create_queue("from-position", topic, after=positions[2])
    log.create_queue("from-time", topic, since=datetime.now(UTC) - timedelta(minutes=30))
    log.create_queue("from-end", topic, from_end=True)
    later = log.publish(topic, "later")
    assert drain(log, "from-beginning") == [*positions, later]
    assert drain(log, "from-position") == [positions[3], later]
    assert drain(log, "from-time") == [*positions[2:], later]
    assert drain(log, "from-end") == [later]


@pytest.mark.parametrize("ordered_keys", [False, True])
def test_a_rewound_queue_begins_anew_after_the_position(
    log: headwater.Headwater, topic: str, queue: str, ordered_keys: bool
) -> None:
    positions = log.publish_batch(topic, [NewEvent(n, key="k") for n in range(6)])
    log.create_queue(queue, topic, from_end=True, ordered_keys=ordered_keys)
    assert drain(log, queue) == []
    log.rewind_queue(queue, position=positions[1])
    assert drain(log, queue) == positions[2:]
    log.rewind_queue(queue, position=0)
    assert drain(log, queue, batch_size=2) == positions
    log.rewind_queue(queue, position=0)
    log.rewind_queue(queue, position=positions[3])
    assert drain(log, queue) == positions[4:]
    assert log.rewind_queue(queue, since=datetime.now(UTC) + timedelta(hours=1)) >= positions[-1]
    assert drain(log, queue) == []
    assert log.rewind_queue(queue, since=datetime.now(UTC) - timedelta(hours=1)) < positions[0]
    assert drain(log, queue) == positions


@pytest.mark.parametrize("ordered_keys", [False, True])
def test_a_rewind_loses_nothing_of_what_was_not_done(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection, ordered_keys: bool
) -> None:
    p = log.publish_batch(topic, [NewEvent(n, key=str(n)) for n in range(12)])
    log.create_queue(queue, topic, ordered_keys=ordered_keys, backoff_seconds=0)
    tried = log.claim(queue, worker="w", batch_size=4)
    assert tried is not None
    log.nack(tried, *tried.events[:2], error="once")
    log.nack(tried, tried.events[2], error="never", dead=True)
    log.ack(tried)
    again = log.claim(queue, worker="w", batch_size=1)
    assert again is not None
    leased = log.claim(queue, worker="w", batch_size=1), log.claim(queue, worker="w", batch_size=4)
    assert leased[0] is not None
    assert leased[1] is not None
    log.ack(leased[1], leased[1].events[0])
    # Done: 3 and 4. Dead: 2. Waiting: 0 and 1, both leased again. Leased: 5, 6, 7. The rest was never claimed.
    assert [e.position for e in leased[1].events] == p[4:8]
    log.rewind_queue(queue, position=p[6])
    for lease in (again, *leased):
        with pytest.raises(headwater.LeaseLost):
            log.ack(lease)
    states = {d.position: d.status for d in log.deliveries(queue)}
    assert states == {p[0]: "ready", p[1]: "ready", p[2]: "dead", p[5]: "ready", p[6]: "ready"} | dict.fromkeys(
        p[7:], "ready"
    )
    assert sorted(drain(log, queue)) == [p[0], p[1], p[5], p[6], *p[7:]]
    (overview,) = (o for o in log.queues() if o.name == queue)
    assert (overview.ready, overview.processing, overview.retrying, overview.dead) == (0, 0, 0, 1)
    assert overview.done == 5
    assert connection.execute(
        "select count(*) from headwater_internal.redelivery where visible_at = 'infinity'"
    ).fetchone() == (0,)


def test_queues_do_not_know_of_each_other(log: headwater.Headwater, topic: str) -> None:
    positions = log.publish_batch(topic, [NewEvent(n) for n in range(30)])
    names = [f"independent-{n}" for n in range(3)]
    for name in names:
        log.create_queue(name, topic)
    lease = log.claim(names[0], worker="w", batch_size=5)
    assert lease is not None
    log.nack(lease, *lease.events, error="x", dead=True)
    log.pause_queue(names[0])
    assert drain(log, names[1], batch_size=7) == positions
    assert drain(log, names[2]) == positions
    assert [len(log.dead_letters(name)) for name in names] == [5, 0, 0]


# --- bindings --------------------------------------------------------------------------------------------------


def words_fit(pattern: list[str], words: list[str]) -> bool:
    """What AMQP says a pattern means."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return words_fit(pattern[1:], words) or (bool(words) and words_fit(pattern, words[1:]))
    return bool(words) and pattern[0] in ("*", words[0]) and words_fit(pattern[1:], words[1:])


WORD = st.text(alphabet="abÄ-_ +?[](){}|\\^$'\n1", max_size=2)


def words(of: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    """One to four of them, and not only the empty one: no pattern and no routing key is empty."""
    return st.lists(of, min_size=1, max_size=4).filter(lambda found: found != [""])


@settings(
    max_examples=effort(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(words(WORD | st.sampled_from(["*", "#", "a"])), min_size=1, max_size=6),
    st.lists(words(WORD | st.just("a")), min_size=1, max_size=12),
)
def test_a_pattern_means_what_amqp_says(
    connection: psycopg.Connection, patterns: list[list[str]], keys: list[list[str]]
) -> None:
    rows = connection.execute(
        "select p.ordinal, k.ordinal, '.' || k.key ~ headwater_internal.pattern_regex(p.pattern) "
        "from unnest(%s::text[]) with ordinality as p (pattern, ordinal), "
        "unnest(%s::text[]) with ordinality as k (key, ordinal)",
        ([".".join(pattern) for pattern in patterns], [".".join(key) for key in keys]),
    ).fetchall()
    for pattern, key, fits in rows:
        assert fits == words_fit(patterns[pattern - 1], keys[key - 1]), (patterns[pattern - 1], keys[key - 1])


def test_a_pattern_chooses_by_routing_key(log: headwater.Headwater, topic: str, queue: str) -> None:
    keys = ["orders.eu.placed", "orders.eu.paid", "orders.us.placed", "orders", "orders.eu", "x.orders.eu.placed", None]
    log.publish_batch(topic, [NewEvent(key, routing_key=key) for key in keys])
    for pattern, expected in {
        "orders.eu.placed": keys[:1],
        "orders.*.placed": [keys[0], keys[2]],
        "orders.#": keys[:5],
        "#.placed": [keys[0], keys[2], keys[5]],
        "*": ["orders"],
        "#": keys,
        "*.#.*": [*keys[:3], *keys[4:6]],
    }.items():
        log.create_queue(f"{queue}-{pattern}")
        log.bind(f"{queue}-{pattern}", topic=topic, pattern=pattern)
        lease = log.claim(f"{queue}-{pattern}", worker="w", batch_size=100)
        assert lease is not None
        assert [event.data for event in lease.events] == expected, pattern


@pytest.mark.parametrize("pattern", ["a*", "a.b#", "##", "*a.b", ""])
def test_wildcards_are_whole_words(log: headwater.Headwater, topic: str, queue: str, pattern: str) -> None:
    log.create_queue(queue)
    with pytest.raises(headwater.InvalidRequest, match="words between dots"):
        log.bind(queue, topic=topic, pattern=pattern)


def test_type_and_headers_choose_and_all_parts_must_fit(log: headwater.Headwater, topic: str, queue: str) -> None:
    events = [
        NewEvent("a", type="A", headers={"tenant": "x", "tags": ["p", "q"], "n": {"deep": 1}}),
        NewEvent("b", type="B", headers={"tenant": "x"}),
        NewEvent("c", type="A", headers={"tenant": "y"}),
        NewEvent("d", type="A"),
        NewEvent("e", headers={"tenant": "x", "tags": ["q"]}),
    ]
    log.publish_batch(topic, events)
    for number, (parts, expected) in enumerate(
        (
            ({"type": "A"}, "acd"),
            ({"headers": {"tenant": "x"}}, "abe"),
            ({"headers": {"tags": ["q"]}}, "ae"),
            ({"headers": {"n": {"deep": 1}}}, "a"),
            ({"headers": {}}, "abce"),
            ({"type": "A", "headers": {"tenant": "x"}}, "a"),
            ({"type": "C"}, ""),
        )
    ):
        log.create_queue(f"{queue}-{number}")
        log.bind(f"{queue}-{number}", topic=topic, **parts)
        lease = log.claim(f"{queue}-{number}", worker="w", batch_size=100)
        assert "".join(event.data for event in (lease.events if lease else ())) == expected


def test_an_event_that_fits_two_bindings_comes_once(
    log: headwater.Headwater, topic: str, other: str, queue: str
) -> None:
    positions = [
        log.publish(topic, 1, type="A", routing_key="a.b"),
        log.publish(other, 2, type="A"),
        log.publish(other, 3, type="B"),
    ]
    log.create_queue(queue, topic)
    log.bind(queue, topic=topic)
    assert drain(log, queue) == positions[:1]
    log.rewind_queue(queue, position=positions[0] - 1)
    log.bind(queue, topic=topic, pattern="a.#", from_position=0)
    log.bind(queue, type="A", from_position=0)
    log.bind(queue, topic=topic, type="A", from_position=0)
    assert drain(log, queue) == positions[:2]
    assert [d.position for d in log.deliveries(queue)] == positions[:2]


def test_a_binding_without_a_topic_is_the_whole_log(
    log: headwater.Headwater, topic: str, other: str, queue: str
) -> None:
    start = log.state().stable
    log.create_queue(queue, after=start)
    log.bind(queue)
    positions = [log.publish(name, 1) for name in (topic, other, topic)]
    assert drain(log, queue) == positions
    newborn = log.create_topic(f"{topic}-newborn").name
    assert [log.publish(newborn, 1)] == drain(log, queue)


@pytest.mark.parametrize("ordered_keys", [False, True])
def test_a_queue_may_have_many_topics(log: headwater.Headwater, topic: str, queue: str, ordered_keys: bool) -> None:
    names = [log.create_topic(f"{topic}-{n}").name for n in range(7)]
    log.create_queue(queue, names, ordered_keys=ordered_keys)
    expected = []
    for n in range(40):
        expected += log.publish_batch(names[n * 3 % 7], [NewEvent(n, key=f"{n}-{m}") for m in range(n % 5)])
        log.publish(topic, "not ours")
    found = list(batches(log, queue, batch_size=9))
    assert [position for batch in found for position in batch] == expected
    assert max(map(len, found)) == 9
    assert [d.position for d in log.deliveries(queue, status="done", batch_size=1000)] == expected


def test_rare_events_are_found_among_many(log: headwater.Headwater, topic: str, queue: str) -> None:
    rare = {0, 2999, 3000, 9_500, 21_999}
    log.publish_many(topic, (NewEvent(n, type="rare" if n in rare else "common") for n in range(22_000)))
    log.create_queue(queue)
    log.bind(queue, topic=topic, type="rare")
    events = []
    for batch in batches(log, queue, batch_size=2):
        assert len(batch) <= 2
        events += batch
    assert len(events) == len(rare)
    assert [log.read(topic, after=p - 1, batch_size=1)[0].data for p in events] == sorted(rare)
    # Where it looked once it does not look again.
    (overview,) = log.queues([queue])
    assert log.state().head - overview.claimed_position < 100


def test_a_claim_gives_up_after_a_while_of_nothing_and_goes_on_from_there(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    log.publish_many(topic, (NewEvent(None) for _ in range(25_000)))
    wanted = log.publish(topic, None, type="rare")
    log.create_queue(queue)
    log.bind(queue, topic=topic, type="rare")
    assert log.claim(queue, worker="w") is None
    lease = log.claim(queue, worker="w")
    assert lease is not None
    assert lease.events[0].position == wanted


def test_a_binding_begins_and_ends_at_its_stated_positions(
    log: headwater.Headwater, topic: str, other: str, queue: str
) -> None:
    first = log.publish_batch(other, [NewEvent(n) for n in range(3)])
    log.create_queue(queue, topic)
    mine = log.publish(topic, 1)
    assert drain(log, queue) == [mine]
    later = log.publish_batch(other, [NewEvent(n) for n in range(6)])
    binding = log.bind(queue, topic=other, from_position=later[1])
    assert (binding.from_position, binding.to_position, binding.topic) == (later[1], None, other)
    assert log.unbind(queue, binding.id, to_position=later[4]) == later[4]
    assert drain(log, queue, batch_size=2) == later[2:5]
    assert [d.position for d in log.deliveries(queue)] == [mine, *later[2:5]]
    assert first[0] not in {d.position for d in log.deliveries(queue)}
    assert [b.to_position for b in log.bindings(queue)] == [None, later[4]]
    with pytest.raises(headwater.QueueNotFound):
        log.unbind(queue, binding.id)


def test_a_binding_comes_and_goes_exactly_at_its_positions_while_events_flow(
    dsn: str,
    log: headwater.Headwater,
    topic: str,
    other: str,
    queue: str,
    until: Callable[[Callable[[], bool]], bool],
) -> None:
    log.create_queue(queue, topic, from_end=True)
    stop = threading.Event()
    handled: list[int] = []

    def publish(name: str) -> None:
        with headwater.connect(dsn) as mine:
            while not stop.is_set():
                mine.publish_batch(name, [NewEvent(1) for _ in range(3)])

    def work() -> None:
        with headwater.connect(dsn) as mine:
            while True:
                at_end = stop.is_set()
                before = len(handled)
                for positions in batches(mine, queue, batch_size=5):
                    handled.extend(positions)
                if at_end and len(handled) == before:
                    return

    publishers = [threading.Thread(target=publish, args=(name,)) for name in (topic, other)]
    worker = threading.Thread(target=work)
    for thread in (*publishers, worker):
        thread.start()
    try:
        spans = []
        for _ in range(4):
            seen = len(handled)
            until(lambda: len(handled) > seen + 10)  # noqa: B023
            binding = log.bind(queue, topic=other)
            seen = len(handled)
            until(lambda: len(handled) > seen + 10)  # noqa: B023
            spans.append((binding.from_position, log.unbind(queue, binding.id)))
    finally:
        stop.set()
        for thread in publishers:
            thread.join()
        worker.join()
    events = [e for e in log.read(batch_size=100_000) if e.topic in (topic, other)]
    expected = [e.position for e in events if e.topic == topic or any(low < e.position <= high for low, high in spans)]
    assert all(low < high for low, high in spans)
    assert handled == expected


def test_a_binding_set_back_leaves_leases_as_they_are_and_is_replayed_by_a_rewind(
    log: headwater.Headwater, topic: str, other: str, queue: str, connection: psycopg.Connection
) -> None:
    p = [log.publish(name, 1) for name in (topic, other, topic, other, topic)]
    log.create_queue(queue, topic)
    lease = log.claim(queue, worker="w", batch_size=2)
    assert lease is not None
    log.bind(queue, topic=other, from_position=0)
    connection.execute(
        "update headwater_internal.ledger set expires_at = now() - interval '1 second' where not settled"
    )
    assert log.reap(queue) == 2
    assert sorted(drain(log, queue)) == [p[0], *p[2:]]
    log.rewind_queue(queue, position=0)
    assert drain(log, queue) == p


def test_an_ended_binding_still_counts_for_what_was_claimed(log: headwater.Headwater, topic: str, queue: str) -> None:
    p = log.publish_batch(topic, [NewEvent(n) for n in range(6)])
    log.create_queue(queue, topic, backoff_seconds=0)
    lease = log.claim(queue, worker="w", batch_size=3)
    assert lease is not None
    (binding,) = log.bindings(queue)
    assert log.unbind(queue, binding.id, to_position=0) == p[2]
    log.nack(lease, lease.events[1], error="x")
    log.ack(lease)
    assert drain(log, queue) == [p[1]]
    assert [(d.position, d.status) for d in log.deliveries(queue)] == [(position, "done") for position in p[:3]]


@pytest.mark.parametrize("ordered_keys", [False, True])
def test_a_deleted_topic_goes_and_the_others_go_on(
    log: headwater.Headwater, topic: str, other: str, queue: str, ordered_keys: bool
) -> None:
    p = [log.publish(name, 1, key="k") for name in (other, topic, other, other, topic)]
    log.create_queue(queue, [topic, other], ordered_keys=ordered_keys, backoff_seconds=0)
    lease = log.claim(queue, worker="w", batch_size=3)
    assert lease is not None
    log.nack(lease, lease.events[0], error="x")
    log.delete_topic(other)
    # An event that went with its topic is no reason to refuse the rest of a batch.
    if not ordered_keys:
        log.ack(lease, *lease.events[1:])
    log.reap(queue)
    expected = [p[1], p[4]] if ordered_keys else [p[4]]
    assert drain(log, queue) == expected
    assert [(d.position, d.status) for d in log.deliveries(queue)] == [(p[1], "done"), (p[4], "done")]
    assert [b.topic for b in log.bindings(queue)] == [topic]


def test_a_claim_is_refused_where_it_could_miss_events(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    log.create_queue(queue, topic)
    log.publish_batch(topic, [NewEvent(n) for n in range(5)])
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select 1")
        # The log grows and settles behind the back of this transaction's snapshot.
        log.publish_batch(topic, [NewEvent(n) for n in range(45)])
        log.create_queue(f"{queue}-busy", topic)
        drain(log, f"{queue}-busy")
        with pytest.raises(headwater.WrongTransaction):
            log.claim(queue, worker="w", batch_size=10, connection=connection)
        raise psycopg.Rollback
    assert len(drain(log, queue)) == 50


# --- bind, then rewind -----------------------------------------------------------------------------------------


def routed(log: headwater.Headwater, topic: str, *routing_keys: str) -> list[int]:
    return log.publish_batch(topic, [NewEvent(None, routing_key=key) for key in routing_keys])


def test_a_rewind_brings_past_events_of_a_binding_that_came_later(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    log.create_queue(queue)
    log.bind(queue, topic=topic, pattern="a.*")
    a, b = routed(log, topic, "a.1", "b.1")
    assert drain(log, queue) == [a]
    log.bind(queue, topic=topic, pattern="b.*")
    assert drain(log, queue) == []
    log.rewind_queue(queue, position=0)
    assert drain(log, queue) == [a, b]


def test_a_rewind_brings_what_lies_above_it_of_every_binding_and_nothing_below(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    log.create_queue(queue)
    log.bind(queue, topic=topic, pattern="a.*")
    a1, _, a2, b2 = routed(log, topic, "a.1", "b.1", "a.2", "b.2")
    assert drain(log, queue) == [a1, a2]
    log.bind(queue, topic=topic, pattern="b.*")
    log.rewind_queue(queue, position=a2 - 1)
    assert drain(log, queue) == [a2, b2]
    # Back further: the binding goes back with it again.
    log.rewind_queue(queue, position=a1)
    assert drain(log, queue) == [a1 + 1, a2, b2]
    log.rewind_queue(queue, position=b2)
    assert drain(log, queue) == []


def test_a_from_position_that_was_given_is_a_bound_that_no_rewind_goes_below(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    log.create_queue(queue)
    log.bind(queue, topic=topic, pattern="a.*")
    a1, b1, a2, b2 = routed(log, topic, "a.1", "b.1", "a.2", "b.2")
    assert drain(log, queue) == [a1, a2]
    log.bind(queue, topic=topic, pattern="b.*", from_position=b1)
    log.rewind_queue(queue, position=0)
    assert drain(log, queue) == [a1, a2, b2]


@pytest.mark.parametrize(("pattern", "meant"), [("orders.>", "orders.#"), (">", "#"), ("a.>.b", "a.#.b")])
def test_a_pattern_of_nats_is_refused_with_the_one_that_is_meant(
    log: headwater.Headwater, topic: str, queue: str, pattern: str, meant: str
) -> None:
    log.create_queue(queue)
    with pytest.raises(headwater.InvalidRequest, match="not a wildcard") as refused:
        log.bind(queue, topic=topic, pattern=pattern)
    assert f'"{meant}"' in (refused.value.hint or "")
    log.bind(queue, topic=topic, pattern="orders.a>b")
