"""Does a Django project publish, work and migrate as the integration promises? A real one, by its manage.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import headwater
from databases import database
from patience import PATIENCE_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "django.md"

MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""

JOBS = """
import headwater
from django.db import connection
from headwater.integrations import django as log
from headwater.integrations.tasks import Tasks

app = headwater.App()
tasks = Tasks("orders", app=app, log=log.log)

def note(kind):
    was_closed = connection.connection is None
    with connection.cursor() as cursor:
        cursor.execute("insert into handled values (%s, %s)", [kind, was_closed])
        cursor.execute("notify handled, '" + kind + "'")

@app.worker("orders", queue="worker")
def worker(event):
    note("worker")

@tasks.task(queue="task")
def count(number: int):
    note("task")
"""

# More than threads of the executor, so that threads run several handlers.
TASKS = 40

TESTS = """
from django.db import connection, transaction
from django.test import TestCase
from headwater.integrations.django import log, publish

class OrderTest(TestCase):
    @classmethod
    def setUpTestData(cls):
        connection.cursor().execute("select headwater.create_topic('orders')")

    def test_publish(self):
        publish("orders", {"id": 1})
        self.assertEqual([event.data for event in log().read("orders", connection=connection)], [])
        with connection.cursor() as cursor:
            cursor.execute("select count(*) from headwater_internal.event")
            self.assertEqual(cursor.fetchone(), (1,))
"""


class Project:
    """A Django project in a directory."""

    def __init__(self, folder: Path, dsn: str, settings: str = "") -> None:
        self.folder = folder
        given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
        names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD", "dbname": "NAME"}
        options = {name: str(given[key]) for key, name in names.items() if key in given}
        default = {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": 0, **options}
        (folder / "settings.py").write_text(
            f"SECRET_KEY = 'x'\nUSE_TZ = True\nINSTALLED_APPS = ['headwater.integrations.django']\n"
            f"DATABASES = {{'default': {default!r}, 'files': "
            f"{{'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}}}\n{settings}\n"
        )
        (folder / "manage.py").write_text(MANAGE)
        (folder / "jobs.py").write_text(JOBS)
        (folder / "test_orders.py").write_text(TESTS)

    @property
    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith(("HEADWATER_", "DJANGO_"))}

    def run(self, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=self.folder,
            env=self.environment,
            input=None if given is None else textwrap.dedent(given),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def succeed(self, *arguments: str, given: str | None = None) -> str:
        done = self.run(*arguments, given=given)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def empty_dsn(admin_dsn: str) -> Iterator[str]:
    with database(admin_dsn) as dsn:
        yield dsn


@pytest.fixture
def project(tmp_path: Path, dsn: str) -> Project:
    return Project(tmp_path, dsn)


def test_migrate_installs_the_schema(tmp_path: Path, empty_dsn: str) -> None:
    project = Project(tmp_path, empty_dsn)
    # Another database of the project is not that of the log.
    project.succeed("migrate", "--database", "files")
    with pytest.raises(headwater.SchemaMismatch):
        headwater.connect(empty_dsn)
    assert "Upgraded the schema of Headwater" in project.succeed("migrate")
    assert "Upgraded" not in project.succeed("migrate")
    headwater.connect(empty_dsn).close()


def test_the_schema_has_a_command_of_its_own(tmp_path: Path, empty_dsn: str) -> None:
    project = Project(tmp_path, empty_dsn, "HEADWATER = {'MIGRATE': False}")
    project.succeed("migrate")
    with pytest.raises(headwater.SchemaMismatch):
        headwater.connect(empty_dsn)
    assert "the database is at migration" in project.succeed("headwater_migrate")
    headwater.connect(empty_dsn).close()


def test_an_event_has_the_fate_of_its_transaction(log: headwater.Headwater, topic: str, project: Project) -> None:
    project.succeed(
        "shell",
        given=f"""
        from django.db import transaction
        from headwater.integrations.django import publish
        with transaction.atomic():
            publish("{topic}", {{"id": 1}}, key="ada", type="placed")

        try:
            with transaction.atomic():
                publish("{topic}", {{"id": 2}})
                raise KeyError
        except KeyError:
            pass

        publish("{topic}", {{"id": 3}})
        """,
    )
    assert [(event.data["id"], event.key_text, event.type) for event in log.read(topic)] == [
        (1, "ada", "placed"),
        (3, None, None),
    ]


def test_workers_and_tasks_use_the_connections_of_django(
    log: headwater.Headwater, connection: psycopg.Connection, project: Project
) -> None:
    log.create_topic("orders")
    connection.execute("create table handled (kind text, was_closed boolean)")
    connection.execute("listen handled")
    project.succeed("shell", given=f"from jobs import count\n[count.defer(n) for n in range({TASKS})]\n")
    command = [sys.executable, "manage.py", "headwater_work", "jobs:app"]
    with subprocess.Popen(
        command, cwd=project.folder, env=project.environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            # Each event is in both queues.
            kinds = [told.payload for told in connection.notifies(timeout=PATIENCE_SECONDS, stop_after=2 * TASKS)]
        finally:
            process.terminate()
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert "stopped" in printed
    assert sorted(kinds) == ["task"] * TASKS + ["worker"] * TASKS
    # CONN_MAX_AGE is 0: the connection of each handler is closed before the next one in its thread.
    assert connection.execute("select count(*) from handled where not was_closed").fetchone() == (0,)


def test_the_tests_of_a_project_have_a_log_that_rolls_back(project: Project) -> None:
    done = project.run("test", "--noinput")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 1 test" in done.stderr


def test_the_blocks_of_the_page_work_in_a_project(tmp_path: Path, empty_dsn: str) -> None:
    installed, settings, publishing, workers, tasks = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    backend = "EMAIL_BACKEND = 'django.core.mail.backends.console.EmailBackend'"
    project = Project(tmp_path, empty_dsn, f"{installed}\n{settings}\n{backend}")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "workers.py").write_text(workers)
    (tmp_path / "shop" / "tasks.py").write_text(tasks)
    project.succeed("migrate")
    # As a file, since a shell takes an empty line for the end of a block.
    (tmp_path / "publishing.py").write_text(publishing)
    project.succeed("shell", "-c", "import publishing")
    with headwater.connect(empty_dsn) as log:
        log.create_topic("tasks")
        project.succeed("shell", "-c", "import shop.tasks")
        assert [event.data for event in log.read("tasks")] == [{"order_id": 42}]
    command = [sys.executable, "-u", "manage.py", "headwater_work", "shop.workers:app"]
    with subprocess.Popen(command, cwd=tmp_path, env=project.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        killing = threading.Timer(PATIENCE_SECONDS, process.kill)
        killing.start()
        try:
            assert any("Subject: Order 42" in line for line in process.stdout)
        finally:
            killing.cancel()
            process.terminate()
        process.stdout.read()
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("HEADWATER = {'DATABSE': 'default'}", "unknown in HEADWATER: DATABSE"),
        ("HEADWATER = {'DATABASE': 'files'}", "is not Postgres"),
    ],
    ids=["name", "database"],
)
def test_wrong_settings_are_refused(tmp_path: Path, dsn: str, settings: str, expected: str) -> None:
    done = Project(tmp_path, dsn, settings).run("headwater_migrate")
    assert done.returncode != 0
    assert expected in done.stderr


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("jobs", "expected MODULE:APP"),
        ("nothing:app", "module nothing not found"),
        ("jobs:nothing", "no attribute nothing"),
        ("jobs:count", "expected headwater.App"),
    ],
)
def test_a_wrong_target_of_the_workers_is_refused(project: Project, target: str, expected: str) -> None:
    done = project.run("headwater_work", target)
    assert done.returncode == 1
    assert expected in done.stderr
