"""Are the rules of the code kept? Layers, pure files, names, one home for SQL."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headwater"
MIGRATIONS = SOURCE / "schema" / "migrations"

# Imports point down: a module may import from its own layer's package and from lower layers.
LAYERS = {
    "model": 0,
    "errors": 0,
    "telemetry": 0,
    "counters": 1,
    "supervisor": 1.5,
    "tracing": 1,
    "visibility": 1,
    "access": 1,
    "admission": 0,
    "buckets": 0,
    "password_checks": 1.5,
    "query": 1,
    "schemas": 1,
    "window": 1.5,
    "deciding": 1.5,
    "field_index": 1.5,
    "tail": 2,
    "turns": 1,
    "settings": 1,
    "cron": 1,
    "embedded": 1,
    "schema": 1,
    "calls": 2,
    "subscription": 3,
    "registry": 3,
    "competing": 3,
    "wires": 3,
    "aio": 4,
    "client": 4,
    "registering": 5,
    "subscriber": 5,
    "store": 5,
    "worker": 6,
    "": 7,
    **dict.fromkeys(("kafka", "server", "cdc", "nats", "lake"), 8),
    "spark": 9,
    "chaos": 9,
    "cli": 10,
}
DOORS = {"kafka", "server", "cdc", "nats", "lake", "spark"}
# Spark moves what these know how to read and to write.
NEIGHBOURS = {("spark", "cdc"), ("spark", "nats"), ("spark", "lake")}
PURE = (
    "model",
    "errors",
    "settings",
    "calls",
    "subscription",
    "cron",
    "visibility",
    "query",
    "tail",
    "access",
    "schemas",
    "registry",
    "window",
    "competing",
)
PURE_FILES = tuple(f"cdc/{name}.py" for name in ("images", "json_text", "pgoutput", "relation")) + tuple(
    f"kafka/{name}.py" for name in ("assignment", "compression", "configs", "coordinator", "events", "records", "wire")
)
PURE_FILES += ("server/webhook_requests.py",)
IMPURE = {"asyncio", "socket", "time", "threading", "os", "subprocess", "selectors", "multiprocessing", "random"}
NO_NAMES = {"util", "utils", "common", "helper", "helpers", "base", "manager", "managers", "misc"}


def python_files(*folders: str) -> list[Path]:
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def sql_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.sql"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    """The top module or package that a file belongs to; empty for the package's own __init__."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py").replace("__init__", "")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, with what is taken from it, in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text in the code that is no docstring."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


@pytest.mark.parametrize("path", python_files("src", "tests", "tools"), ids=shown)
def test_a_file_says_in_its_first_line_what_it_is_for(path: Path) -> None:
    first, *_ = path.read_text().splitlines()
    assert re.match(r'"""[A-Z`].*[^"\s]', first), first


@pytest.mark.parametrize("path", sql_files(), ids=shown)
def test_an_sql_file_says_in_its_first_line_what_it_is_for(path: Path) -> None:
    assert re.match(r"-- [A-Z].+", path.read_text().splitlines()[0])


def test_no_name_of_a_constraint_is_cut() -> None:
    """Postgres keeps 63 bytes of a name, and these are sentences that people read."""
    names = [name for path in sql_files() for name in re.findall(r'constraint "([^"]+)"', path.read_text())]
    assert names
    assert [name for name in names if len(name.encode()) > 63] == []


def test_no_file_is_a_drawer_for_everything() -> None:
    named = [*python_files("src", "tests", "tools"), *sql_files()]
    assert [shown(path) for path in named if NO_NAMES & {path.stem, *path.relative_to(ROOT).parts}] == []


@pytest.mark.parametrize("path", python_files("src"), ids=shown)
def test_imports_point_down(path: Path) -> None:
    own = module_of(path)
    assert own in LAYERS, f"say in LAYERS where {own} belongs"
    for imported in imports(ast.parse(path.read_text())):
        if imported != "headwater" and not imported.startswith("headwater."):
            continue
        rest = imported.removeprefix("headwater").lstrip(".").split(".")[0]
        other = rest if rest in LAYERS else ""
        assert other == own or LAYERS[other] < LAYERS[own], f"{own} may not import {imported}"
        strangers = own != other and (own, other) not in NEIGHBOURS
        assert not (own in DOORS and other in DOORS and strangers), f"the door {own} may not import the door {other}"


@pytest.mark.parametrize("module", PURE)
def test_decisions_touch_neither_clock_nor_network(module: str) -> None:
    files = [path for path in python_files("src") if module_of(path) == module]
    assert files
    imported = {name.split(".")[0] for path in files for name in imports(ast.parse(path.read_text()))}
    assert not imported & IMPURE


@pytest.mark.parametrize("name", PURE_FILES)
def test_the_pure_part_of_a_door_touches_neither_clock_nor_network(name: str) -> None:
    imported = {module.split(".")[0] for module in imports(ast.parse((SOURCE / name).read_text()))}
    assert not imported & (IMPURE | {"psycopg", "adbc_driver_manager", "adbc_driver_postgresql"})


def sql_names() -> re.Pattern[str]:
    """Every function, table, view and sequence of the schema, as Python would name it."""
    created = re.compile(
        r"create (?:or replace )?(?:unlogged )?(?:function|table|view|sequence) (?:if not exists )?headwater\.(\w+)"
    )
    names = {name for path in sql_files() for name in created.findall(path.read_text())}
    assert {"publish_batch", "settled", "event", "cursor_lag", "position"} <= names
    return re.compile(rf"\bheadwater\.(?:{'|'.join(sorted(names))})\b(?!\s*import)")


def test_python_names_what_is_in_the_database_in_one_place() -> None:
    pattern = sql_names()
    found = [
        f"{shown(path)}: {text!r}"
        for path in python_files("src")
        if path.parent.name not in ("calls", "schema")
        for text in texts(ast.parse(path.read_text()))
        # What is called is SQL; a sentence that names a function with brackets behind it is help for a person.
        if pattern.search(text) and re.search(r"\b(select|insert|update|delete|copy|from|call)\b", text)
    ]
    assert found == []


def test_only_the_schema_holds_definitions() -> None:
    definition = re.compile(
        r"\b(create|alter|drop)\s+(or replace\s+)?(table|function|schema|sequence|view|type|index|trigger)\s+"
        r"(if (not )?exists )?headwater\b(?!_)",
        re.IGNORECASE,
    )
    found = [
        f"{shown(path)}: {text!r}"
        for path in python_files("src")
        if path.parent.name != "schema"
        for text in texts(ast.parse(path.read_text()))
        if definition.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("path", python_files("src", "tests", "tools"), ids=shown)
def test_no_error_is_swallowed_by_kind_of_everything(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"line {node.lineno}: a bare except"
        caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
        assert "Exception" not in caught, f"line {node.lineno}: except Exception"
        if "BaseException" in caught:
            # Only to clean up on the way out.
            assert isinstance(node.body[-1], ast.Raise), f"line {node.lineno}: it must raise again"


def test_migrations_that_were_released_are_as_they_were() -> None:
    lines = (ROOT / "tests" / "released_migrations.txt").read_text().splitlines()
    for line in lines:
        if not line.startswith("#"):
            checksum, name = line.split()
            assert hashlib.sha256((MIGRATIONS / name).read_bytes()).hexdigest() == checksum, name


def test_migrations_are_numbered_without_a_gap() -> None:
    names = sorted(path.name for path in MIGRATIONS.iterdir())
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    assert all(re.fullmatch(r"\d{4}_\w+\.sql", name) for name in names)


def test_every_function_file_is_installed() -> None:
    from headwater import schema

    assert sorted(path.name for path in (SOURCE / "schema" / "functions").iterdir()) == sorted(schema.FUNCTION_FILES)


def test_the_blocking_shell_is_made_from_the_asynchronous_one() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "unasync.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert check.returncode == 0, check.stdout


def test_the_modules_of_messages_are_made_from_the_files_of_the_protocol() -> None:
    pytest.importorskip("grpc_tools")
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "protos.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert check.returncode == 0, check.stdout


def test_there_is_a_changelog_with_a_place_for_what_is_new() -> None:
    assert re.search(r"^## ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.lock")), ids=shown)
def test_locks_hold_versions_and_hashes_and_no_address(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    assert not re.search(r"^\s*(-i|-f|--\w*index|--find-links|--trusted)", text, re.MULTILINE)
    pinned = re.findall(r"^[A-Za-z0-9].*", text, re.MULTILINE)
    assert pinned
    assert all("==" in line for line in pinned)
    assert text.count("--hash=sha256:") >= len(pinned)
