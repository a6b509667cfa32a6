"""Does the `eventsourcing` library find in Headwater the recorder that it expects? Its own test cases say so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

eventsourcing = pytest.importorskip("eventsourcing.dcb.tests")

from eventsourcing.dcb.api import DCBAppendCondition, DCBEvent, DCBQuery, DCBQueryItem  # noqa: E402
from eventsourcing.dcb.application import DCBApplication  # noqa: E402
from eventsourcing.persistence import IntegrityError, OperationalError, ProgrammingError  # noqa: E402

from headwater.eventstore import open as open_stores  # noqa: E402
from headwater.eventstore.eventsourcing import HeadwaterRecorder  # noqa: E402

Cases = eventsourcing.DCBRecorderTestCase


@pytest.fixture(params=["postgres", "sqlite"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place of this test's own: the library counts positions from 1 and without gaps."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/stores"
        return
    admin_dsn = request.getfixturevalue("admin_dsn")
    template = request.getfixturevalue("template")
    name = f"headwater_recorder_{os.getpid()}"
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template)))
    parts = conninfo.conninfo_to_dict(admin_dsn)
    host, port, user = (str(parts.get(part, "")) for part in ("host", "port", "user"))
    password = f":{parts['password']}" if parts.get("password") else ""
    yield f"postgresql://{user}{password}@/{name}?host={host}&port={port}"
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def recorder(address: str) -> Iterator[HeadwaterRecorder]:
    with open_stores(address) as stores:
        yield HeadwaterRecorder(stores.create_store("events"))


def test_its_cases_of_append_and_read_pass(recorder: HeadwaterRecorder) -> None:
    Cases()._test_append_read(recorder)


def test_its_cases_of_append_and_subscribe_pass(recorder: HeadwaterRecorder) -> None:
    Cases()._test_append_subscribe(recorder)


def test_refusals_are_errors_of_the_library(recorder: HeadwaterRecorder) -> None:
    recorder.append([DCBEvent("A", b"", ["x"])])
    with pytest.raises(IntegrityError):
        recorder.append([DCBEvent("A", b"")], DCBAppendCondition(DCBQuery([DCBQueryItem(tags=["x"])])))
    with pytest.raises(ProgrammingError):
        recorder.append([])
    with pytest.raises(ProgrammingError):
        recorder.append([DCBEvent("", b"")])


def test_a_stopped_subscription_ends(recorder: HeadwaterRecorder) -> None:
    with recorder.subscribe() as subscription:
        recorder.append([DCBEvent("A", b"1")])
        assert next(subscription).event.data == b"1"
        subscription.stop()
        assert list(subscription) == []


def test_an_application_of_the_library_runs_on_it(address: str) -> None:
    settings: dict[str, Any] = {
        "PERSISTENCE_MODULE": "headwater.eventstore.eventsourcing",
        "HEADWATER_STORE_ADDRESS": address,
        "HEADWATER_STORE": "application",
    }
    with DCBApplication(settings) as application:
        application.recorder.append([DCBEvent("A", b"1", ["x"])])
        assert [event.event.tags for event in application.recorder.read()] == [["x"]]
    with DCBApplication(settings) as application:
        assert len(list(application.recorder.read())) == 1


def test_a_missing_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((OSError, OperationalError), match="HEADWATER_STORE_ADDRESS"):
        DCBApplication({"PERSISTENCE_MODULE": "headwater.eventstore.eventsourcing"})
