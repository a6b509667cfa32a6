"""Do programs load only the modules that they need? Looked at in a new interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

# What a program that publishes and reads does not need: the other clients and stores, workers, servers and trials.
NOT_FOR_PUBLISHING = {
    "headwater.aio",
    "headwater.calls.store",
    "headwater.client.eventstore.postgres",
    "headwater.database.connection",
    "headwater.embedded",
    "headwater.eventstore.decider",
    "headwater.eventstore.postgres",
    "headwater.eventstore.query",
    "headwater.eventstore.sqlite",
    "headwater.client.eventstore.sqlite",
    "headwater.queue.worker",
    "headwater.sql_subscriptions.reader",
    "sqlite3",
    "typer",
}
# What only commands that print tables, use the database or run trials need.
NOT_FOR_THE_VERSION = {
    "headwater.cli.connection",
    "headwater.client",
    "headwater.database.schema",
    "headwater.embedded.postgres",
    "psycopg",
    "psycopg_pool",
    "rich.console",
}
NEVER = ("headwater.cli.commands.bench", "headwater.cli.commands.chaos", "headwater.cli.commands.demo")
PROGRAMS = ("headwater.servers", "headwater.spark", "headwater.trials", "headwater.lake", "headwater.nats.publisher")

LAZY_PACKAGES = ("headwater", "headwater.embedded", "headwater.eventstore")


def loaded_by(program: str) -> set[str]:
    """The modules that are loaded when the program ends."""
    code = f"import atexit, json, sys\natexit.register(lambda: print(json.dumps(list(sys.modules))))\n{program}"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        env={"HOME": "/nowhere"},
    )
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout.splitlines()[-1]))


def programs_in(loaded: set[str]) -> set[str]:
    return {name for name in loaded if name.startswith((*PROGRAMS, *NEVER))}


def test_a_program_that_publishes_loads_no_store_no_worker_and_no_trial() -> None:
    loaded = loaded_by("import headwater\nheadwater.connect, headwater.NewEvent, headwater.TopicNotFound")
    assert "headwater.client.log.publish" in loaded
    assert loaded & NOT_FOR_PUBLISHING == set()
    assert programs_in(loaded) == set()


def test_importing_the_package_does_not_load_the_database_driver() -> None:
    loaded = loaded_by("import headwater\nheadwater.__version__")
    assert {name for name in loaded if name.startswith("headwater.")} <= {
        "headwater.lazy_attributes",
        "headwater.version",
    }
    assert loaded & (NOT_FOR_PUBLISHING | NOT_FOR_THE_VERSION) == set()


def test_the_version_is_printed_without_loading_the_database_driver() -> None:
    loaded = loaded_by("import sys\nfrom headwater.cli import main\nsys.argv[1:] = ['--version']\nmain()")
    assert loaded & (NOT_FOR_PUBLISHING - {"typer", "headwater.embedded"} | NOT_FOR_THE_VERSION) == set()
    assert programs_in(loaded) == set()


def test_a_command_loads_neither_stores_nor_other_commands() -> None:
    loaded = loaded_by(
        "import headwater, headwater.cli\nheadwater.connect, headwater.cli.app\n"
        "import headwater.cli.connection, headwater.cli.commands.topic"
    )
    assert loaded & (NOT_FOR_PUBLISHING - {"typer", "headwater.embedded"} | {"rich.console"}) == set()
    assert programs_in(loaded) == set()


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_the_names_for_type_checkers_are_those_that_are_loaded_on_use(package: str) -> None:
    module = import_module(package)
    (for_checkers,) = [
        node
        for node in ast.parse(Path(str(module.__file__)).read_text()).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    seen = {
        name.asname or name.name: (node.module, name.name)
        for node in for_checkers.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen.keys() == set(module.__all__) - {"__version__"}
    for name, (home, original) in seen.items():
        assert getattr(module, name) is getattr(import_module(str(home)), original)


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_a_package_lists_its_names_and_refuses_others(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
