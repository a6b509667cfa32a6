"""Does an event store do what a list in memory would, whatever is appended, alone or in queues?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import headwater
from effort import effort
from headwater.calls import store as store_calls
from headwater.client.eventstore.group_commit import new_event_ids
from headwater.eventstore import Item, LatestMatchIs, NewStoreEvent, NoMatchAfter, Query, SqliteStores, StoreEvent

_numbers = itertools.count()
RELAXED = settings(
    max_examples=effort(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=["postgres", "sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "postgres":
        yield request.getfixturevalue("log")
    else:
        with SqliteStores(tmp_path / "stores") as stores:
            yield stores


types = st.sampled_from("AB")
tags = st.sets(st.sampled_from("xyz"), max_size=3).map(sorted)
fields = st.dictionaries(st.just("k"), st.sampled_from(["0", "1"]), max_size=1)
items = st.builds(Item, st.lists(types, max_size=2), tags, fields)
queries = st.builds(Query, st.lists(items, max_size=3))
new_events = st.builds(
    lambda type, data, tags, event_id: NewStoreEvent(type, data, tags, event_id=event_id),
    types,
    st.sampled_from([None, {"k": 0}, {"k": "1"}, {"other": 0}]),
    tags,
    st.one_of(st.none(), st.none(), st.sampled_from(["id1", "id2", "id3"])),
)


@dataclass(frozen=True)
class Wish:
    """An append before it is known where anything is: `seen` is how many of the events were looked at."""

    events: list[NewStoreEvent]
    query: Query | None
    exact: bool
    seen: int


wishes = st.builds(
    Wish,
    st.lists(new_events, min_size=1, max_size=3, unique_by=lambda event: event.event_id or object()),
    st.one_of(st.none(), queries),
    st.booleans(),
    st.integers(0, 8),
)


def matched(query: Query, type: str, tags: list[str], data: Any) -> bool:
    """What a query means, said in the plainest way."""
    if not query.items:
        return True
    for item in query.items:
        if item.types and type not in item.types:
            continue
        if any(tag not in tags for tag in item.tags):
            continue
        if any(not isinstance(data, dict) or str(data.get(name)) != value for name, value in item.fields.items()):
            continue
        return True
    return False


@dataclass
class Model:
    """An event store as a list."""

    events: list[tuple[int, NewStoreEvent]] = field(default_factory=list)

    def matches(self, query: Query, after: int = 0) -> list[int]:
        return [p for p, e in self.events if p > after and matched(query, e.type, list(e.tags), e.data)]

    def judge(self, wish: Wish, seen: int) -> tuple[str, Any]:
        """What must become of an append: repeated, taken, moved, or appended."""
        known = {event.event_id: n for n, (_, event) in enumerate(self.events) if event.event_id}
        found = [known.get(event.event_id) for event in wish.events]
        if any(place is not None for place in found):
            if found == list(range(found[0] or 0, (found[0] or 0) + len(found))):
                return "repeated", [self.events[n][0] for n in found if n is not None]
            return "taken", None
        if wish.query is None:
            return "appended", None
        after = self.matches(wish.query, 0)
        latest = max(after, default=0)
        true = latest == seen if wish.exact else latest <= seen
        return ("appended", None) if true else ("moved", latest)


@given(
    queues=st.lists(st.lists(wishes, min_size=1, max_size=4), max_size=6),
    index_after=st.one_of(st.none(), st.integers(0, 3)),
)
@RELAXED
def test_every_verdict_and_every_read_is_what_the_model_says(
    stores: Any, queues: list[list[Wish]], index_after: int | None
) -> None:
    store = stores.create_store(f"model-{next(_numbers)}")
    model = Model()
    for number, queue in enumerate(queues):
        if number == index_after:
            # An index changes nothing but the way.
            store.create_index("by_k", ["k"])
        # A position that was seen is one of an event, 0, or above them all.
        positions = [0, *(position for position, _ in model.events)]
        seen = [positions[min(wish.seen, len(positions) - 1)] for wish in queue]
        appends = []
        for wish, position in zip(queue, seen, strict=True):
            condition: Any = None
            if wish.query is not None:
                condition = (LatestMatchIs if wish.exact else NoMatchAfter)(wish.query, position)
            appends.append(store_calls.encode_append(wish.events, condition, new_event_ids(len(wish.events))))
        last = model.events[-1][0] if model.events else 0
        for wish, position, verdict in zip(queue, seen, store._send(appends), strict=True):
            kind, detail = model.judge(wish, position)
            if kind == "appended":
                assert verdict.positions is not None
                assert not verdict.repeated
                assert len(verdict.positions) == len(wish.events)
                assert list(verdict.positions) == sorted(verdict.positions)
                assert verdict.positions[0] > last
                model.events += zip(verdict.positions, wish.events, strict=True)
            elif kind == "repeated":
                assert (list(verdict.positions), verdict.repeated) == (detail, True)
            elif kind == "taken":
                assert verdict.positions is None
                assert verdict.duplicate_id is not None
            else:
                assert verdict == (None, False, detail, None, None, None)
        # Of a queue, those that are not about each other may change places.
        model.events.sort(key=lambda stored: stored[0])
    stored = store.read(batch_size=1000)
    assert [(e.position, e.type, list(e.tags)) for e in stored] == [(p, e.type, list(e.tags)) for p, e in model.events]
    assert [event.topic_offset for event in stored] == list(range(len(stored)))
    for query in (wish.query for queue in queues for wish in queue if wish.query is not None):
        expected = model.matches(query)
        assert [event.position for event in store.read(query, batch_size=1000)] == expected
        assert [event.position for event in store.read(query, batch_size=1000, backwards=True)] == expected[::-1]
        assert [event.position for event in stored if query.matches(event)] == expected
        assert store.count(query) == len(expected)
        assert store.latest(query).position == (max(expected) if expected and query.items else 0)
        if isinstance(stores, headwater.Headwater):
            assert _latest_as_others_write_it(stores, store.topic, query) == (max(expected) if expected else None)


def _latest_as_others_write_it(log: headwater.Headwater, topic: str, query: Query) -> int | None:
    """What a condition is checked by, given a query that names what it does not ask for, too."""
    items = [{"types": list(i.types), "tags": list(i.tags), "fields": dict(i.fields)} for i in query.items]
    with log.transaction() as connection:
        row = connection.execute(
            "select headwater_internal.latest_match((headwater_internal.find_event_store(%s)).id, %s::jsonb, 0)",
            (topic, json.dumps(items)),
        ).fetchone()
    assert row is not None
    return None if row[0] is None else int(row[0])


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=4),
)
ODD_JSON = [
    b'{"k": 1e2}', b'{"k": 1E-3}', b'{"k": -0}', b'{"k": -0.0}', b'{"k": 1.50}', b'{"k": "\\u0041"}',
    b'{"k": "a", "k": "b"}', b'{"k": "\\u0000"}', b'{"k": 1, "o": "\\u0000"}', b'{"k": "\\ud800"}',
    b'{"k": "\\\\u0000"}',
    b'{"k": NaN}', b'{"k": Infinity}', b'{"k": 1e400000}', b'{"k": 0e131072}', b'{"k": 0e400000}', b'{"k": -0e7}',
    b'{"k": 0e-16383}', b'{"k": 0e-16384}', b'{"k": 0e1073741824}', b'{"k": 1e99999999999999999999}',
    b'{"k": 01}', b'{"k": .5}', b'{"k": +1}', b'{"k": 1e+5}',
    b'{"k": 100000000000000000000000000000.10}', b"{k: 1}", b"", b"\xff", b' {"k" : "v"} ', b'{"k": 1e-20000}',
    b'{"k": "\\ud83d\\ude00"}', b'\xef\xbb\xbf{"k": 1}', b'{"k": tru}', b'[{"k": 1}]', b'{"k": "v"} x', b"{'k': 1}",
]  # fmt: skip
ODD_TEXTS = ["100", "0.001", "0", "1.50", "A", "b", "a", "\\u0000", "1", "😀", "v", "true", "100000"]


@given(
    payloads=st.lists(
        st.one_of(
            st.sampled_from(ODD_JSON),
            st.builds(
                lambda value: json.dumps({"k": value}).encode(), st.one_of(scalars, st.lists(scalars, max_size=2))
            ),
        ),
        min_size=1,
        max_size=20,
    ),
    texts=st.lists(
        st.one_of(
            st.sampled_from(ODD_TEXTS),
            scalars.filter(lambda value: value is not None),
        ),
        max_size=5,
    ),
)
@example(payloads=ODD_JSON, texts=ODD_TEXTS)
@RELAXED
def test_a_field_means_the_same_in_the_database_and_in_memory(
    log: headwater.Headwater, payloads: list[bytes], texts: list[Any]
) -> None:
    store = log.create_store(f"fields-{next(_numbers)}")
    # As another language may publish it: whatever the bytes are.
    store.append([NewStoreEvent("A", payload) for payload in payloads])
    stored: list[StoreEvent] = store.read(batch_size=100)
    asked = [*texts, *(_value_in(payload) for payload in payloads)]
    for value in asked:
        if not isinstance(value, (str, int, float, bool)):
            continue
        query = Query.of(fields={"k": value})
        found = [event.position for event in store.read(query, batch_size=100)]
        assert found == [event.position for event in stored if query.matches(event)], value


def _value_in(payload: bytes) -> Any:
    try:
        value = json.loads(payload)["k"]
        return value if not isinstance(value, str) or (value.encode() and "\x00" not in value) else None
    except (ValueError, KeyError, TypeError):
        return None
