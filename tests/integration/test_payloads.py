"""Do payloads of the application's own types come back as they were published?"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import pickle
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pydantic
import pytest
from pydantic.dataclasses import dataclass as pydantic_dataclass
from sqlalchemy.orm import Session

import headwater
from headwater import App, Dead, NewEvent, NewStoreEvent, TypedTopic, aio, errors
from headwater.calls.encoding import encode_payload


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


class Line(pydantic.BaseModel):
    sku: str
    price: Decimal


class Order(pydantic.BaseModel):
    id: UUID
    placed_at: datetime
    lines: list[Line]
    colour: Colour = Colour.RED
    customer_name: str = pydantic.Field(default="Ada", alias="customerName")


@dataclasses.dataclass(frozen=True)
class Parcel:
    id: int
    order: UUID
    due: date
    at: time
    weight: Decimal
    lead_time: timedelta
    size: Size
    colours: tuple[Colour, ...] = ()
    inside: list[Parcel] = dataclasses.field(default_factory=list)


@pydantic_dataclass
class Refund:
    id: UUID
    amount: Decimal


ID = UUID("5f6c0a37-5c3f-4b0c-9a55-0a7f8a7e2f11")
ORDER = Order(id=ID, placed_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), lines=[Line(sku="a", price=Decimal("1.10"))])
SMALL = Parcel(1, ID, date(2026, 1, 2), time(3, 4), Decimal("0.10"), timedelta(minutes=1.5), Size.SMALL, (Colour.RED,))
PARCEL = dataclasses.replace(SMALL, id=2, inside=[SMALL])


def encoded(payload: Any) -> Any:
    body, content_type = encode_payload(payload, None)
    assert (content_type, body is not None) == ("application/json", True)
    return json.loads(body or b"")


def test_values_of_python_have_one_json_form_each() -> None:
    assert encoded(ORDER) == {
        "id": str(ID),
        "placed_at": "2026-01-02T03:04:05Z",
        "lines": [{"sku": "a", "price": "1.10"}],
        "colour": "red",
        "customerName": "Ada",
    }
    assert encoded(SMALL) == {
        "id": 1,
        "order": str(ID),
        "due": "2026-01-02",
        "at": "03:04:00",
        "weight": "0.10",
        "lead_time": 90.0,
        "size": 1,
        "colours": ["red"],
        "inside": [],
    }
    assert encoded(Refund(ID, Decimal("2"))) == {"id": str(ID), "amount": "2"}
    assert encoded([datetime(2026, 1, 2, tzinfo=UTC)]) == ["2026-01-02T00:00:00+00:00"]


@pytest.mark.parametrize("payload", [object(), Order, {"a": {1}}, float("nan"), lambda: 1])
def test_a_value_without_a_json_form_is_refused(payload: Any) -> None:
    with pytest.raises(errors.InvalidEvent, match="cannot be encoded as JSON"):
        encode_payload(payload, None)


@pytest.mark.parametrize("value", [ORDER, PARCEL, Refund(ID, Decimal("1.0"))], ids=lambda value: type(value).__name__)
def test_a_typed_topic_returns_what_was_published(log: headwater.Headwater, topic: str, value: Any, dsn: str) -> None:
    values = log.typed(TypedTopic(topic, type(value)))
    with psycopg.connect(dsn) as connection:
        first = values.publish(value, key="k", connection=connection)
        connection.commit()
    second, third = values.publish_batch([value, value])
    events = values.read()
    assert [event.data for event in events] == [value] * 3
    assert [event.position for event in events] == [first, second, third]
    assert {event.type for event in events} == {type(value).__name__}
    assert events[0].key_text == "k"
    assert [event.data for event in values.follow(after=first, stop_when_caught_up=True)] == [value] * 2
    assert pickle.loads(pickle.dumps(events[0]))[:12] == tuple(events[0])


def test_a_typed_topic_works_with_asyncio(dsn: str, topic: str) -> None:
    async def check() -> list[Order]:
        async with await aio.connect(dsn) as log:
            orders = log.typed(TypedTopic(topic, Order))
            await orders.publish(ORDER)
            return [event.data async for event in orders.follow(stop_when_caught_up=True)]

    assert asyncio.run(check()) == [ORDER]


def test_a_payload_that_does_not_fit_the_model_is_reported_where_it_is_read(
    log: headwater.Headwater, topic: str
) -> None:
    log.publish(topic, {"sku": "a"})
    log.publish(topic, None)
    log.publish(topic, {"sku": "a", "price": 1})
    unfit, empty, good = log.typed(TypedTopic(topic, Line)).read()
    with pytest.raises(errors.InvalidEvent, match=f"(?s)an event of topic {topic} is no Line: .*price"):
        _ = unfit.data
    with pytest.raises(errors.InvalidEvent, match="without a payload is no Line"):
        _ = empty.data
    assert good.data == Line(sku="a", price=Decimal(1))


def test_load_replaces_the_validation(log: headwater.Headwater, topic: str) -> None:
    shouts = TypedTopic(topic, str, load=lambda payload: str(json.loads(payload)).upper())
    log.typed(shouts).publish("hello")
    assert [event.data for event in log.typed(shouts).read()] == ["HELLO"]


def dumps(value: Any) -> bytes:
    return b"~" + repr(value).encode()


def loads(payload: bytes) -> Any:
    return ("loaded", payload)


def test_dumps_encodes_every_payload_that_is_published(dsn: str, topic: str) -> None:
    with headwater.connect(dsn, dumps=lambda value: json.dumps({"v": value})) as log:
        log.publish(topic, 1)
        log.publish_batch(topic, [NewEvent(2), NewEvent(b"\x00"), NewEvent(None)])
        log.publish_many(topic, [NewEvent(3)])
        store = log.create_store(f"store-{topic}")
        store.append(NewStoreEvent("A", 4))
        assert [event.payload for event in store.read()] == [b'{"v": 4}']
        events = log.read(topic)
    assert [event.payload for event in events] == [b'{"v": 1}', b'{"v": 2}', b"\x00", None, b'{"v": 3}']
    assert [event.content_type for event in events] == ["application/json"] * 2 + [None, None, "application/json"]


def test_dumps_may_encode_as_something_else_than_json(dsn: str, topic: str) -> None:
    with headwater.connect(dsn, dumps=dumps) as log:
        log.publish(topic, {1}, content_type="text/plain")
        assert [event.payload for event in log.read(topic)] == [b"~{1}"]
        with pytest.raises(errors.InvalidEvent, match="not valid JSON"):
            log.publish(topic, {1})


def test_an_error_of_dumps_is_an_invalid_event(dsn: str, topic: str) -> None:
    with headwater.connect(dsn, dumps=json.dumps) as log, pytest.raises(errors.InvalidEvent, match=r"dumps\(\)"):
        log.publish(topic, {1})


def test_loads_decodes_the_data_of_every_event(dsn: str, topic: str) -> None:
    with headwater.connect(dsn, loads=loads) as log:
        log.publish(topic, 1)
        wanted = ("loaded", b"1")
        (event,) = log.read(topic)
        assert (event.data, event) == (wanted, headwater.Event(*event))
        assert [event.data for event in log.follow(topic, stop_when_caught_up=True)] == [wanted]
        handled: list[Any] = []
        log.process(topic, lambda _, events: handled.extend(events), cursor=topic, stop_when_caught_up=True)
        assert [event.data for event in handled] == [wanted]
        log.create_queue(topic, topic)
        lease = log.claim(topic, worker="w")
        assert lease is not None
        assert [event.data for event in lease.events] == [wanted]
        subscription = log.subscribe(f"sql-{topic}", f"e.topic = '{topic}'")
        log.publish(topic, 1)
        (matched,) = log.read_next(f"sql-{topic}", reader="r").events
        assert (matched.event.data, matched.subscription_ids) == (wanted, (subscription,))
        store = log.create_store(f"store-{topic}")
        store.append(NewStoreEvent("A", 1))
        assert [event.data for event in store.read()] == [wanted]
        log.publish(topic, None)
        assert log.read(topic)[-1].data is None
        assert pickle.loads(pickle.dumps(event)) == event


def test_a_worker_decodes_with_the_hooks_of_its_app(dsn: str, log: headwater.Headwater, topic: str) -> None:
    app = App(dumps=lambda value: json.dumps({"v": value}), loads=loads)
    orders = TypedTopic(topic, int)
    handled: list[Any] = []

    async def check() -> None:
        stop = asyncio.Event()

        @app.worker(topic, queue=topic)
        async def handle(event: headwater.ClaimedEvent) -> Dead | None:
            handled.extend([event.data, orders.load(event)])
            stop.set()
            return None

        await app.run(dsn, stop=stop)

    log.publish(topic, 1)
    asyncio.run(check())
    assert handled == [("loaded", b"1"), 1]


def test_a_session_publishes_objects(log: headwater.Headwater, topic: str, dsn: str) -> None:
    import sqlalchemy

    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    orders = log.typed(TypedTopic(topic, Order))
    with Session(engine) as session, session.begin():
        orders.publish(ORDER, connection=session)
    engine.dispose()
    assert [event.data for event in orders.read()] == [ORDER]
