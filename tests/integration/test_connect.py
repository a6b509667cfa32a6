"""Does a program find its database, and does a password stay out of messages?"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import headwater
from headwater import aio, errors
from headwater.cli.connection import prepare_database
from headwater.embedded import Postgres
from headwater.eventstore import SqliteStores

SECRET = "s3cret"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADWATER_DSN", raising=False)
    monkeypatch.setenv("HEADWATER_HOME", str(tmp_path))


def test_connect_finds_the_database_of_the_environment(dsn: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_DSN", dsn)
    with headwater.connect() as log:
        assert log.topic(topic).name == topic
    opened = headwater.open()
    assert isinstance(opened, headwater.Headwater)
    opened.close()

    async def check() -> None:
        async with await aio.connect() as log:
            assert (await log.topic(topic)).name == topic

    asyncio.run(check())


def test_a_lazy_log_connects_when_it_needs_a_connection(dsn: str, topic: str) -> None:
    sessions = "select count(*) from pg_stat_activity where application_name = 'a lazy log'"
    with (
        headwater.connect(dsn, lazy=True, application_name="a lazy log") as log,
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        log.publish(topic, {"id": 1}, connection=connection)
        assert connection.execute(sessions).fetchone() == (0,)
        assert [event.data for event in log.read(topic)] == [{"id": 1}]
        assert connection.execute(sessions).fetchone() == (1,)


def test_connect_finds_the_server_of_headwater_up(tmp_path: Path) -> None:
    server = Postgres(tmp_path / "postgres")
    server.start()
    try:
        prepare_database(server)
        with headwater.connect() as log:
            assert log.create_topic("here").name == "here"
    finally:
        server.stop(mode="immediate")


def test_without_a_database_the_error_says_what_to_do() -> None:
    with pytest.raises(errors.LogUnavailable, match="set HEADWATER_DSN or run `headwater up`"):
        headwater.connect()


def forms(dsn: str) -> list[str]:
    given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
    url = f"//{given['user']}@/{given['dbname']}?host={given['host']}&port={given['port']}"
    return [dsn, f"postgresql:{url}", f"postgres:{url}", f"postgresql+psycopg:{url}", f"postgresql+asyncpg:{url}"]


@pytest.mark.parametrize("number", range(5))
def test_every_form_of_a_dsn_works(dsn: str, topic: str, number: int) -> None:
    form = forms(dsn)[number]
    with headwater.connect(form) as log:
        assert log.topic(topic).name == topic
    opened = headwater.open(form)
    assert isinstance(opened, headwater.Headwater)
    opened.close()


def test_a_directory_of_sqlite_files_opens(tmp_path: Path) -> None:
    assert isinstance(headwater.open(f"sqlite:///{tmp_path}"), SqliteStores)


BAD = [
    f"mysql://user:{SECRET}@localhost/app",
    f"postgresql:/user:{SECRET}@localhost/app",
    f"postgresql://user:{SECRET}@localhost/app?nonsense={SECRET}",
    f"postgresql://user:a@{SECRET}@localhost:1/app",
    f"host=localhost password='{SECRET}",
    f"user:{SECRET}@localhost",
    f"host=localhost {SECRET}=1",
]


@pytest.mark.parametrize("address", BAD)
@pytest.mark.parametrize("function", [headwater.connect, headwater.open], ids=["connect", "open"])
def test_an_invalid_dsn_is_refused_without_its_password(function: Any, address: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        function(address)
    everything = repr(caught.value) + str(caught.value) + repr(caught.value.detail)
    assert SECRET not in everything
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert caught.value.hint is not None


def test_no_error_and_no_log_line_of_a_failed_connection_has_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    # Commands that ran in this process before may have set it.
    caplog.set_level(logging.DEBUG, logger="psycopg.pool")
    for address in (f"postgresql://user:{SECRET}@127.0.0.1:1/app", f"host=127.0.0.1 port=1 password={SECRET}"):
        with pytest.raises(errors.LogUnavailable) as caught:
            headwater.connect(address, connect_timeout_seconds=0.5)
        assert SECRET not in repr(caught.value) + str(caught.value)
    assert caplog.records
    assert SECRET not in caplog.text


def test_the_repr_of_a_log_has_no_password(dsn: str) -> None:
    with headwater.connect(conninfo.make_conninfo(dsn, password=SECRET)) as log:
        assert SECRET not in repr(log) + repr(log._pool) + str(log)
