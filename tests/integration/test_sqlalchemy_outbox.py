"""Does a flush of SQLAlchemy publish the events of its objects, in its transaction?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import headwater
from headwater import NewEvent, aio, errors
from headwater.integrations.sqlalchemy import Change, Outbox


class Base(DeclarativeBase):
    """The tables of the application."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]
    kind: Mapped[str] = mapped_column(default="order")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "order"}  # noqa: RUF012


class Gift(Order):
    """An order of a subclass."""

    __mapper_args__ = {"polymorphic_identity": "gift"}  # noqa: RUF012


class Note(Base):
    """A table without events."""

    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)


def events_of(order: Order, change: Change) -> Iterable[NewEvent]:
    yield NewEvent({"id": order.id, "cents": order.cents}, key=str(order.id), type=f"{type(order).__name__} {change}")


@pytest.fixture
def engine(dsn: str) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def published(log: headwater.Headwater, topic: str) -> list[tuple[str | None, Any]]:
    return [(event.type, event.data) for event in log.read(topic)]


def test_a_flush_publishes_in_its_transaction(log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine) -> None:
    outbox = Outbox(log)
    outbox.source(Order, topic)(events_of)
    sessions = sessionmaker(engine, expire_on_commit=False)
    outbox.listen(sessions)
    with sessions() as session:
        order = Order(cents=100)
        session.add_all([order, Note()])
        session.commit()
        order.cents = 200
        session.flush()
        session.rollback()
        assert published(log, topic) == [("Order insert", {"id": order.id, "cents": 100})]
        order.cents = 300
        session.commit()
        # No change.
        order.cents = 300
        session.add(Gift(cents=5))
        session.commit()
        session.delete(order)
        session.commit()
    assert [kind for kind, _ in published(log, topic)] == [
        "Order insert",
        "Order update",
        "Gift insert",
        "Order delete",
    ]


def test_other_sessions_do_not_publish(log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine) -> None:
    outbox = Outbox(log)
    outbox.source(Order, topic)(events_of)
    outbox.listen(sessionmaker(engine))
    with Session(engine) as session:
        session.add(Order(cents=100))
        session.commit()
    assert published(log, topic) == []


def test_an_asyncio_session_publishes(
    dsn: str, log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine
) -> None:
    class OurSession(Session):
        pass

    async def connect() -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(dsn)

    async def check() -> None:
        async_engine = create_async_engine("postgresql+psycopg://", async_creator=connect)
        async with await aio.connect(dsn) as own:
            outbox = Outbox(own)
            outbox.source(Order, topic)(events_of)
            outbox.listen(OurSession)
            async with AsyncSession(async_engine, sync_session_class=OurSession) as session:
                session.add(Order(cents=100))
                await session.flush()
                await session.rollback()
                session.add(Order(cents=200))
                await session.commit()
            with OurSession(engine) as session, pytest.raises(errors.InvalidRequest, match="needs an AsyncSession"):
                session.add(Order(cents=100))
                session.commit()
        await async_engine.dispose()

    asyncio.run(check())
    assert [data["cents"] for _, data in published(log, topic)] == [200]


def test_an_error_of_publishing_ends_the_transaction(log: headwater.Headwater, engine: sqlalchemy.Engine) -> None:
    outbox = Outbox(log)
    outbox.source(Order, "no-such-topic")(events_of)
    sessions = sessionmaker(engine)
    outbox.listen(sessions)
    with sessions() as session:
        session.add(Order(cents=100))
        with pytest.raises(errors.TopicNotFound):
            session.commit()
        session.rollback()
        assert session.scalar(sqlalchemy.select(sqlalchemy.func.count()).select_from(Order)) == 0
