"""Does `connection=` work on every connection that applications have, and refuse the others by name?"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio
from psycopg import conninfo
from psycopg.adapt import Dumper, Loader
from psycopg.rows import class_row, dict_row, namedtuple_row, scalar_row
from psycopg.types.json import set_json_dumps, set_json_loads
from psycopg.types.string import StrBinaryDumper
from sqlalchemy import orm, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker

import headwater
from headwater import NewEvent, NewStoreEvent, NoMatchAfter, Query, aio, errors
from patience import PATIENCE_SECONDS

numbers = itertools.count()

# --- connections of psycopg ------------------------------------------------------------------------------------------


class Nonsense(Loader):
    """Loads everything as nonsense."""

    def load(self, data: Any) -> Any:
        return "nonsense"


class BinaryNonsense(Nonsense):
    format = psycopg.pq.Format.BINARY


class ShoutingDumper(StrBinaryDumper):
    """Changes every text that is sent."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.upper())


class LostDumper(Dumper):
    """Loses every value."""

    def dump(self, obj: Any) -> None:
        return None


def with_adapters(connection: Any) -> None:
    for name in ("json", "jsonb", "bytea", "int4", "int8", "bool", "text", "timestamptz", "interval", "text[]"):
        array = name.endswith("[]")
        info = psycopg.adapters.types[name.removesuffix("[]")]
        oid = info.array_oid if array else info.oid
        connection.adapters.register_loader(oid, Nonsense)
        connection.adapters.register_loader(oid, BinaryNonsense)
    connection.adapters.register_dumper(str, ShoutingDumper)
    for cls in (bytes, int, bool, list, datetime):
        connection.adapters.register_dumper(cls, LostDumper)


def with_json(connection: Any) -> None:
    set_json_loads(lambda _: "nonsense", connection)
    set_json_dumps(lambda _: "{}", connection)


def only_named_cursors(connection: Any) -> None:
    """A connection whose `cursor()` makes server-side cursors."""
    cls = psycopg.AsyncServerCursor if isinstance(connection, psycopg.AsyncConnection) else psycopg.ServerCursor
    connection.cursor = lambda *args, **kwargs: cls(connection, f"cursor {next(numbers)}", *args, **kwargs)


def changed(**attributes: Any) -> Callable[[Any], None]:
    def change(connection: Any) -> None:
        for name, value in attributes.items():
            setattr(connection, name, value)

    return change


def cursor_of(name: str) -> Callable[[Any], None]:
    def change(connection: Any) -> None:
        prefix = "Async" if isinstance(connection, psycopg.AsyncConnection) else ""
        connection.cursor_factory = getattr(psycopg, prefix + name)

    return change


CONNECTIONS: dict[str, Callable[[Any], None]] = {
    "plain": lambda connection: None,
    "dict_row": changed(row_factory=dict_row),
    "namedtuple_row": changed(row_factory=namedtuple_row),
    "class_row": changed(row_factory=class_row(SimpleNamespace)),
    "scalar_row": changed(row_factory=scalar_row),
    "ClientCursor": cursor_of("ClientCursor"),
    "RawCursor": cursor_of("RawCursor"),
    "ServerCursor": only_named_cursors,
    "adapters": with_adapters,
    "json": with_json,
    "never prepared": changed(prepare_threshold=None),
    "always prepared": changed(prepare_threshold=0),
}


@pytest.fixture(params=CONNECTIONS)
def change(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    return CONNECTIONS[request.param]


async def use_everything(
    log: aio.AsyncHeadwater, topic: str, connection: Any, commit: Callable[[], Awaitable[None]]
) -> None:
    """Call one method of each kind on the connection, and check what it returns."""
    await log.publish(topic, {"n": 1}, key="k", type="T", headers={"h": 1}, event_id="a", connection=connection)
    await log.publish_batch(
        topic, [NewEvent({"n": n}, key="k", headers={"h": n}) for n in (2, 3)], connection=connection
    )
    assert await log.publish_many(topic, (NewEvent({"n": n}) for n in range(4, 7)), connection=connection) == 3
    await commit()
    events = await log.read(topic, connection=connection)
    assert events == await log.read(topic)
    assert [event.data["n"] for event in events] == [1, 2, 3, 4, 5, 6]
    first = events[0]
    assert (first.topic, first.key, first.type, first.headers) == (topic, b"k", "T", {"h": 1})
    assert isinstance(first.published_at, datetime)

    queue = (await log.create_queue(f"queue-{topic}", topic, max_attempts=3, connection=connection)).name
    await commit()
    lease = await log.claim(queue, worker="w", batch_size=2, connection=connection)
    assert lease is not None
    assert [event.data["n"] for event in lease.events] == [1, 2]
    await log.ack(lease, connection=connection)
    await commit()

    start = await log.open_cursor(topic, topics=topic, start_after=first.position, connection=connection)
    await log.advance_cursor(topic, from_position=start, to_position=events[-1].position, connection=connection)
    await commit()
    assert await log.open_cursor(topic, connection=connection) == events[-1].position

    matching = await log.subscribe(f"sql-{topic}", "e.topic = s.params ->> 't'", {"t": topic}, connection=connection)
    await commit()
    await log.publish(topic, {"n": 7}, connection=connection)
    await commit()
    batch = await log.read_next(f"sql-{topic}", reader="r", connection=connection)
    assert [(m.event.data, m.subscription_ids) for m in batch.events] == [({"n": 7}, (matching,))]
    await commit()

    store = await log.create_store(f"store-{topic}")
    query = Query.of(tags=["a"])
    added = await store.append(NewStoreEvent("A", {"x": 1}, tags=["a"]), NoMatchAfter(query, 0), connection=connection)
    await commit()
    (stored,) = await store.read(query, connection=connection)
    assert (stored.data, stored.position) == ({"x": 1}, added.positions[0])
    with pytest.raises(errors.AppendConflict):
        await store.append(NewStoreEvent("A", {"x": 1}, tags=["a"]), NoMatchAfter(query, 0), connection=connection)
    await commit()


class Awaited:
    """The blocking API as the asyncio one, so that both go through the same checks."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return Awaited(result) if name == "create_store" else result

        return call


def use_everything_blocking(log: headwater.Headwater, topic: str, connection: Any, commit: Callable[[], Any]) -> None:
    async def committing() -> None:
        commit()

    asyncio.run(use_everything(Awaited(log), topic, connection, committing))  # type: ignore[arg-type]


@pytest.mark.parametrize("autocommit", [False, True])
def test_every_call_works_whatever_the_connection_is_set_to(
    log: headwater.Headwater, topic: str, dsn: str, change: Callable[[Any], None], autocommit: bool
) -> None:
    with psycopg.connect(dsn, autocommit=autocommit) as connection:
        change(connection)
        use_everything_blocking(log, topic, connection, connection.commit)


def test_every_call_works_on_every_asyncio_connection(dsn: str, topic: str, change: Callable[[Any], None]) -> None:
    async def check() -> None:
        async with (
            await aio.connect(dsn) as log,
            await psycopg.AsyncConnection.connect(dsn, autocommit=False) as connection,
        ):
            change(connection)
            await use_everything(log, topic, connection, connection.commit)

    asyncio.run(check())


def test_the_connection_is_left_as_it_was(log: headwater.Headwater, topic: str, dsn: str) -> None:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        with_json(connection)
        log.publish(topic, {"n": 1}, connection=connection)
        row = connection.execute("select '{}'::jsonb as value").fetchone()
        assert row == {"value": "nonsense"}


def test_a_pooled_connection_that_a_handler_has_changed_stays_right(dsn: str, topic: str) -> None:
    with headwater.connect(dsn, pool_size=1) as log:
        with log.transaction() as connection:
            connection.row_factory = dict_row
            with_adapters(connection)
        with log.transaction() as connection:
            assert connection.row_factory is dict_row
            log.publish(topic, {"n": 1}, connection=connection)
        assert [event.data for event in log.read(topic)] == [{"n": 1}]


def test_changes_of_all_connections_of_the_program_do_not_matter(dsn: str, topic: str) -> None:
    set_json_loads(lambda _: "nonsense")
    try:
        with headwater.connect(dsn) as log, psycopg.connect(dsn, autocommit=True) as connection:
            log.publish(topic, {"n": 1}, headers={"h": 1}, connection=connection)
            assert [event.headers for event in log.read(topic, connection=connection)] == [{"h": 1}]
            assert [event.headers for event in log.read(topic)] == [{"h": 1}]
    finally:
        set_json_loads(json.loads)


def test_a_call_in_a_pipeline_works(log: headwater.Headwater, topic: str, dsn: str) -> None:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        with connection.pipeline():
            connection.execute("create temporary table t (n int)")
            use_everything_blocking(log, topic, connection, connection.commit)
            found = connection.execute("select count(*) from t").fetchone()
        assert found == {"count": 0}


def test_a_stream_is_one_transaction_in_autocommit_mode_too(log: headwater.Headwater, topic: str, dsn: str) -> None:
    def events() -> Iterator[NewEvent]:
        yield NewEvent({"n": 1})
        # An event with an id ends a COPY.
        yield NewEvent({"n": 1}, event_id="one")
        raise KeyError("the file ends here")

    with psycopg.connect(dsn, autocommit=True) as connection:
        with pytest.raises(KeyError):
            log.publish_many(topic, events(), chunk_size=1, connection=connection)
        assert log.publish_many(topic, [NewEvent({"n": 2})], connection=connection) == 1
    assert [event.data for event in log.read(topic)] == [{"n": 2}]


def test_an_error_aborts_the_callers_transaction(log: headwater.Headwater, topic: str, dsn: str) -> None:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        log.publish(topic, {"n": 1}, connection=connection)
        with pytest.raises(errors.TopicNotFound):
            log.publish("no-such-topic", {"n": 1}, connection=connection)
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            connection.execute("select 1")
        connection.rollback()
        assert log.read(topic, connection=connection) == []


def test_a_savepoint_keeps_the_callers_transaction(log: headwater.Headwater, topic: str, dsn: str) -> None:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        log.publish(topic, {"n": 1}, connection=connection)
        with pytest.raises(errors.TopicNotFound), connection.transaction():
            log.publish("no-such-topic", {"n": 1}, connection=connection)
        connection.commit()
    assert [event.data for event in log.read(topic)] == [{"n": 1}]


def test_a_closed_connection_is_reported(log: headwater.Headwater, topic: str, dsn: str) -> None:
    connection = psycopg.connect(dsn)
    connection.close()
    with pytest.raises(errors.LogUnavailable, match="closed"):
        log.publish(topic, {"n": 1}, connection=connection)


def test_a_connection_with_another_encoding_is_refused(log: headwater.Headwater, topic: str, dsn: str) -> None:
    with psycopg.connect(dsn, client_encoding="latin1") as connection:
        with pytest.raises(errors.InvalidRequest, match="client_encoding LATIN1, expected UTF8"):
            log.publish(topic, {"n": "Ä"}, connection=connection)
        connection.execute("set client_encoding to 'UTF8'")
        log.publish(topic, {"n": "Ä"}, connection=connection)


# --- PgBouncer -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pgbouncer(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The database behind PgBouncer with transaction pooling on one server connection."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("needs pgbouncer (Debian: apt-get install pgbouncer)")
    folder = tmp_path_factory.mktemp("pgbouncer")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Path(folder, "pgbouncer.ini")
    target = conninfo.make_conninfo(
        **{k: v for k, v in conninfo.conninfo_to_dict(dsn).items() if k != "connect_timeout"}
    )
    settings.write_text(
        f"[databases]\nlog = {target}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        "auth_type = any\npool_mode = transaction\ndefault_pool_size = 1\n"
        "unix_socket_dir =\nignore_startup_parameters = extra_float_digits\n"
    )
    # PgBouncer does not run as root.
    prefix = ["unshare", "--user", "--map-user=65534"] if os.geteuid() == 0 else []
    process = subprocess.Popen([*prefix, program, str(settings)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "process up" in line:
                break
        else:
            pytest.fail("pgbouncer ended:\n" + "".join(lines))
        yield conninfo.make_conninfo(host="127.0.0.1", port=port, dbname="log", user="postgres")
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def test_every_call_works_through_pgbouncer(log: headwater.Headwater, topic: str, pgbouncer: str) -> None:
    with (
        psycopg.connect(pgbouncer, prepare_threshold=None, row_factory=dict_row) as connection,
        psycopg.connect(pgbouncer, prepare_threshold=None, autocommit=True) as other,
    ):

        def commit() -> None:
            connection.commit()
            # Both connections share one server connection, so no state of a session can carry over.
            other.execute("discard all")

        use_everything_blocking(log, topic, connection, commit)


# --- SQLAlchemy ------------------------------------------------------------------------------------------------------


def url(dsn: str, driver: str) -> sqlalchemy.URL:
    given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
    return sqlalchemy.URL.create(
        f"postgresql+{driver}",
        username=given["user"],
        password=given.get("password"),
        database=given["dbname"],
        query={"host": str(given["host"]), "port": str(given["port"])},
    )


@pytest.fixture
def engine(dsn: str) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    yield engine
    engine.dispose()


@contextlib.asynccontextmanager
async def async_engine(dsn: str, driver: str = "psycopg") -> AsyncIterator[Any]:
    engine = sqlalchemy.ext.asyncio.create_async_engine(url(dsn, driver))
    try:
        yield engine
    finally:
        await engine.dispose()


def test_every_call_works_on_a_session(log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine) -> None:
    with orm.Session(engine) as session:
        use_everything_blocking(log, topic, session, session.commit)


def test_every_call_works_on_a_scoped_session(log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine) -> None:
    session = orm.scoped_session(orm.sessionmaker(engine))
    try:
        use_everything_blocking(log, topic, session, session.commit)
    finally:
        session.remove()


def test_every_call_works_on_a_subclass_of_session(
    log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine
) -> None:
    class OurSession(orm.Session):
        pass

    with OurSession(engine) as session:
        use_everything_blocking(log, topic, session, session.commit)


def test_every_call_works_on_a_connection_of_sqlalchemy(
    log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine
) -> None:
    with engine.connect() as connection:
        use_everything_blocking(log, topic, connection, connection.commit)


def test_every_call_works_on_a_raw_connection_of_sqlalchemy(
    log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine
) -> None:
    connection = engine.raw_connection()
    try:
        use_everything_blocking(log, topic, connection, connection.commit)
    finally:
        connection.close()


def test_every_call_works_on_asyncio_sessions_and_connections(dsn: str, log: headwater.Headwater) -> None:
    async def check() -> None:
        async with await aio.connect(dsn) as log, async_engine(dsn) as engine:
            topics = [(await log.create_topic(f"async-{next(numbers)}")).name for _ in range(3)]
            async with AsyncSession(engine) as session:
                await use_everything(log, topics[0], session, session.commit)
            async with engine.connect() as connection:
                await use_everything(log, topics[1], connection, connection.commit)
            scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
            await use_everything(log, topics[2], scoped, scoped.commit)
            await scoped.remove()

    asyncio.run(check())


@pytest.mark.parametrize("kind", ["session", "connection"])
def test_rows_and_events_of_sqlalchemy_commit_together(
    log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine, kind: str
) -> None:
    table = f"t{next(numbers)}"
    with engine.begin() as connection:
        connection.execute(text(f"create table {table} (n int)"))
    with orm.Session(engine) if kind == "session" else engine.connect() as own:
        # The event first: the connection has no transaction yet.
        log.publish(topic, {"n": 1}, connection=own)
        own.execute(text(f"insert into {table} values (1)"))
        own.rollback()
        log.publish(topic, {"n": 2}, connection=own)
        own.commit()
        log.publish(topic, {"n": 3}, connection=own)
    assert [event.data for event in log.read(topic)] == [{"n": 2}]
    with engine.connect() as connection:
        assert connection.scalar(text(f"select count(*) from {table}")) == 0


def test_a_nested_transaction_of_sqlalchemy_rolls_its_events_back(
    log: headwater.Headwater, topic: str, engine: sqlalchemy.Engine
) -> None:
    with orm.Session(engine) as session, session.begin():
        log.publish(topic, {"n": 1}, connection=session)
        with contextlib.suppress(KeyError), session.begin_nested():
            log.publish(topic, {"n": 2}, connection=session)
            raise KeyError
    assert [event.data for event in log.read(topic)] == [{"n": 1}]


# --- Django ----------------------------------------------------------------------------------------------------------


def django_settings(dsn: str, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
    names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD", "dbname": "NAME"}
    return {
        "ENGINE": "django.db.backends.postgresql",
        **{name: str(given[key]) for key, name in names.items() if key in given},
        "OPTIONS": options,
    }


@pytest.fixture(scope="module")
def django_databases(dsn: str) -> Iterator[Any]:
    """Django's `connections` with one alias for each way to use psycopg."""
    import django
    from django.conf import settings
    from django.db import connections

    settings.configure(
        USE_TZ=True,
        TIME_ZONE="Europe/Berlin",
        DATABASES={
            "default": django_settings(dsn),
            "server_side": django_settings(dsn, server_side_binding=True),
            "pooled": django_settings(dsn, pool={"min_size": 1, "max_size": 1}),
            "sqlite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
        },
    )
    django.setup()
    yield connections
    for connection in connections.all():
        connection.close()
    connections["pooled"].close_pool()


@pytest.mark.parametrize("alias", ["default", "server_side", "pooled"])
def test_every_call_works_on_djangos_connection(
    log: headwater.Headwater, topic: str, django_databases: Any, alias: str
) -> None:
    connection = django_databases[alias]
    connection.set_autocommit(False)
    try:
        use_everything_blocking_in_thread(log, topic, connection)
    finally:
        connection.set_autocommit(True)


def use_everything_blocking_in_thread(log: headwater.Headwater, topic: str, connection: Any) -> None:
    # Django refuses to be used where an event loop runs.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    try:
        use_everything_blocking(log, topic, connection, connection.commit)
    finally:
        del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


def test_rows_and_events_of_django_commit_together(log: headwater.Headwater, topic: str, django_databases: Any) -> None:
    from django.db import connection, transaction

    with transaction.atomic():
        log.publish(topic, {"n": 1}, connection=connection)
    with contextlib.suppress(KeyError), transaction.atomic():
        log.publish(topic, {"n": 2}, connection=connection)
        raise KeyError
    with transaction.atomic():
        log.publish(topic, {"n": 3}, connection=connection)
        with contextlib.suppress(KeyError), transaction.atomic():
            log.publish(topic, {"n": 4}, connection=connection)
            raise KeyError
    log.publish(topic, {"n": 5}, connection=connection)
    assert [event.data["n"] for event in log.read(topic, connection=connection)] == [1, 3, 5]


def test_a_test_case_of_django_rolls_its_events_back(
    log: headwater.Headwater, topic: str, django_databases: Any
) -> None:
    from django.db import connection
    from django.test import TestCase

    class OrderTest(TestCase):
        def test_publish(self) -> None:
            log.publish(topic, {"n": 1}, connection=connection)

            assert connection.in_atomic_block

    result = unittest.TestResult()
    unittest.TestSuite([OrderTest("test_publish")]).run(result)
    assert result.testsRun == 1
    assert result.wasSuccessful(), result.errors
    assert log.read(topic) == []


def test_a_connection_to_another_kind_of_database_is_refused(
    log: headwater.Headwater, topic: str, django_databases: Any
) -> None:
    with pytest.raises(errors.InvalidRequest, match="not a connection to Postgres"):
        log.publish(topic, {}, connection=django_databases["sqlite"])


# --- refused ---------------------------------------------------------------------------------------------------------


def refusal(log: headwater.Headwater, topic: str, connection: Any) -> errors.InvalidRequest:
    with pytest.raises(errors.InvalidRequest) as caught:
        log.publish(topic, {}, connection=connection)
    return caught.value


async def async_refusal(dsn: str, topic: str, connection: Any) -> errors.InvalidRequest:
    async with await aio.connect(dsn) as log:
        with pytest.raises(errors.InvalidRequest) as caught:
            await log.publish(topic, {}, connection=connection)
        return caught.value


def sql_of(error: errors.InvalidRequest) -> str:
    """The line of SQL that the hint shows."""
    assert error.hint is not None
    shown, found, line = error.hint.partition("in the same transaction: ")
    assert (shown, found) == ("Publish with SQL ", "in the same transaction: ")
    return line


def test_an_asyncio_connection_is_refused_by_the_blocking_api(log: headwater.Headwater, topic: str, dsn: str) -> None:
    async def check() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection, async_engine(dsn) as engine:
            for own in (connection, AsyncSession(engine), engine.connect()):
                error = refusal(log, topic, own)
                assert "is an asyncio connection, and this log has the blocking API" in error.message
                assert error.hint is not None
                assert "headwater.aio.connect" in error.hint

            def of_a_session(session: orm.Session) -> None:
                assert "is an asyncio connection" in refusal(log, topic, session).message

            async with AsyncSession(engine) as session:
                await session.run_sync(of_a_session)

    asyncio.run(check())


def test_a_blocking_connection_is_refused_by_the_asyncio_api(
    topic: str, dsn: str, log: headwater.Headwater, engine: sqlalchemy.Engine, django_databases: Any
) -> None:
    async def check(connections: Sequence[Any]) -> None:
        for own in connections:
            error = await async_refusal(dsn, topic, own)
            assert "is a blocking connection, and this log has the asyncio API" in error.message
            assert error.hint is not None
            assert "headwater.connect(...)" in error.hint

    with psycopg.connect(dsn) as connection, engine.connect() as sa, orm.Session(engine) as session:
        asyncio.run(check([connection, sa, session, sa.connection, django_databases["default"]]))


def test_the_line_of_sql_for_psycopg2_works(log: headwater.Headwater, dsn: str) -> None:
    log.create_topic("orders", if_missing=True)
    before = len(log.read("orders"))
    connection = psycopg2.connect(dsn)
    error = refusal(log, "orders", connection)
    assert error.message.startswith("psycopg2.extensions.connection is not supported")
    exec(sql_of(error), {"connection": connection, "json": json})
    connection.commit()
    connection.close()
    assert [event.data for event in log.read("orders")[before:]] == [{"id": 42}]


def test_the_line_of_sql_for_sqlalchemy_on_psycopg2_works(log: headwater.Headwater, dsn: str) -> None:
    log.create_topic("orders", if_missing=True)
    before = len(log.read("orders"))
    engine = sqlalchemy.create_engine(url(dsn, "psycopg2"))
    with orm.Session(engine) as session:
        error = refusal(log, "orders", session)
        assert error.message.startswith("sqlalchemy.orm.session.Session on psycopg2 is not supported")
        exec(sql_of(error), {"session": session, "json": json, "text": text})
        session.commit()
    engine.dispose()
    assert [event.data for event in log.read("orders")[before:]] == [{"id": 42}]


def run_async(line: str, **names: Any) -> Any:
    exec(f"async def run():\n    {line}", names)
    return names["run"]()


def test_the_lines_of_sql_for_asyncpg_work(log: headwater.Headwater, dsn: str) -> None:
    log.create_topic("orders", if_missing=True)
    before = len(log.read("orders"))

    async def check() -> None:
        connection = await asyncpg.connect(
            **{
                {"dbname": "database"}.get(k, k): v
                for k, v in conninfo.conninfo_to_dict(dsn).items()
                if k != "connect_timeout"
            }
        )
        error = await async_refusal(dsn, "orders", connection)
        assert error.message.startswith("asyncpg.connection.Connection is not supported")
        await run_async(sql_of(error), connection=connection, json=json)
        # Applications often set a codec for JSON.
        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        await run_async(sql_of(error), connection=connection, json=json)
        await connection.close()
        async with async_engine(dsn, "asyncpg") as engine, AsyncSession(engine) as session:
            error = await async_refusal(dsn, "orders", session)
            assert error.message.startswith("sqlalchemy.ext.asyncio.session.AsyncSession on asyncpg is not supported")
            await run_async(sql_of(error), session=session, json=json, text=text)
            await session.commit()

    asyncio.run(check())
    assert [event.data for event in log.read("orders")[before:]] == [{"id": 42}] * 3


def test_the_line_of_sql_for_django_on_psycopg2_works(log: headwater.Headwater, dsn: str, tmp_path: Path) -> None:
    """In a process of its own: Django chooses psycopg 3 where it is installed."""
    log.create_topic("orders", if_missing=True)
    before = len(log.read("orders"))
    program = Path(tmp_path, "program.py")
    program.write_text(f"""
import json
import sys

psycopg = sys.modules["psycopg"] = None
import django
from django.conf import settings

settings.configure(DATABASES={{"default": {django_settings(dsn)!r}}})
django.setup()
from django.db import connection, transaction
connection.ensure_connection()
del sys.modules["psycopg"]
import headwater
from headwater.errors import InvalidRequest

with headwater.connect({dsn!r}) as log, transaction.atomic():
    try:
        log.publish("orders", {{}}, connection=connection)
    except InvalidRequest as error:
        print(error.message)
        exec(error.hint.partition("in the same transaction: ")[2])
""")
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.stdout.startswith("django.utils.connection.ConnectionProxy on psycopg2 is not supported"), done.stderr
    assert done.returncode == 0, done.stderr
    assert [event.data for event in log.read("orders")[before:]] == [{"id": 42}]


@pytest.mark.parametrize("other", ["postgresql://localhost/app", object(), 1])
def test_what_is_no_connection_is_refused(log: headwater.Headwater, topic: str, other: Any) -> None:
    error = refusal(log, topic, other)
    assert "is not supported as `connection`" in error.message
    assert error.hint is not None
    assert "psycopg 3 connection" in error.hint
