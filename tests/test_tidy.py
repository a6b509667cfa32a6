"""Are the rules of the code kept? Rooms, pure files, names, one home for SQL."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headwater"
MIGRATIONS = SOURCE / "database" / "schema" / "migrations"

# What every room may use. `aio` and `client` are the whole API, put together from the API of each room.
FOUNDATION = {"", "aio", "bounded_dict", "calls", "client", "database", "errors", "lazy_attributes", "observability"}
FOUNDATION |= {"setting_definitions", "settings", "supervisor", "version"}
# What is started: it uses rooms, and no room uses it. Each with those of its kind that it may use.
PROGRAMS = {
    "servers": set(),
    "spark": set(),
    "testing": set(),
    "trials": {"servers"},
    "cli": {"servers", "spark", "trials"},
}
# Rooms, and the rooms that each is built on.
ROOMS: dict[str, set[str]] = {
    "access": set(),
    "capture": set(),
    "embedded": set(),
    "eventstore": {"log"},
    "integrations": {"log", "queue"},
    "lake": set(),
    "log": set(),
    "nats": {"capture"},
    "queue": {"log", "sql_subscriptions"},
    "schema_registry": set(),
    "sql_subscriptions": {"log"},
    "webhooks": {"log", "queue", "sql_subscriptions"},
}
# Pure by name; a file is pure too if it says so in its docstring ("Pure" or "No I/O"). Pure files hold values and
# decisions: they touch neither clock nor network, and anything may use them.
PURE_NAMES = {"model", "steps", "calls", "errors", "settings", "query", "permissions", "cron"}
SAYS_PURE = re.compile(r"\bPure\b|\bNo I/O\b")
# Not pure, since it takes a lock, but it holds the values of decisions that `calls` names.
VALUES = {"headwater.eventstore.decider"}
DRIVERS = {"psycopg", "psycopg_pool", "adbc_driver_manager", "adbc_driver_postgresql"}
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


def is_pure(path: Path) -> bool:
    named = PURE_NAMES & {path.stem, path.parent.name}
    inside = path.is_relative_to(SOURCE) and not {"generated", "cli", "servers"} & set(
        path.relative_to(SOURCE).parts[:-1]
    )
    return bool(named and inside) or says_pure(path)


def says_pure(path: Path) -> bool:
    return SAYS_PURE.search(ast.get_docstring(ast.parse(path.read_text())) or "") is not None


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in python_files("src")
    }


def our_imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports, wherever in it."""
    found = set()
    for name in imports(ast.parse(path.read_text())):
        if name.partition(".")[0] == "headwater":
            while name not in known:
                name = name.rpartition(".")[0]
            found.add(name)
    return found


def room_of(module: str) -> str:
    return [*module.split("."), ""][1]


def forbidden(path: Path, known: dict[str, Path]) -> list[str]:
    """The imports of a file that the rooms do not allow."""
    own = module_of(path)
    found = []
    for module in sorted(our_imports(path, known)):
        room = room_of(module)
        if room == own or own in ("", "aio", "client"):
            allowed = room == own or room in FOUNDATION | ROOMS.keys()
        elif own in PROGRAMS:
            allowed = room in FOUNDATION | ROOMS.keys() | PROGRAMS[own]
        elif own in ROOMS:
            allowed = room in FOUNDATION | ROOMS[own] or (room in ROOMS and is_pure(known[module]))
        else:
            # The foundation stands on itself and on what is pure; it does not use the API that is built on it.
            allowed = room in FOUNDATION - {"", "aio", "client"} or module in VALUES
            allowed = allowed or (room in ROOMS and is_pure(known[module]))
        if not allowed:
            found.append(module)
    return found


@pytest.mark.parametrize("path", python_files("src"), ids=shown)
def test_a_room_imports_only_what_it_is_built_on(path: Path) -> None:
    assert module_of(path) in FOUNDATION | ROOMS.keys() | PROGRAMS.keys(), "say in which room it belongs"
    assert forbidden(path, modules()) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Looks at what is imported when a module is loaded; an import inside a function may point back."""
    known = modules()
    edges = {
        name: {
            target
            for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for target in our_imports_of(node, known)
        }
        for name, path in known.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*way, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


def our_imports_of(node: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    for name in imports(node):
        if name.partition(".")[0] == "headwater":
            while name not in known:
                name = name.rpartition(".")[0]
            yield name


@pytest.mark.parametrize("path", [path for path in python_files("src") if is_pure(path)], ids=shown)
def test_what_is_pure_touches_neither_clock_nor_network(path: Path) -> None:
    imported = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
    assert not imported & (IMPURE | (DRIVERS if says_pure(path) else set()))


def test_files_are_known_as_pure() -> None:
    """Or the test above would look at nothing."""
    found = {shown(path).removeprefix("src/headwater/") for path in python_files("src") if is_pure(path)}
    assert {
        "log/model.py",
        "queue/model.py",
        "calls/log.py",
        "log/steps.py",
        "eventstore/query.py",
        "capture/pgoutput.py",
        "servers/kafka/coordinator.py",
        "servers/kafka/wire.py",
        "webhooks/requests.py",
    } <= found


def sql_names() -> re.Pattern[str]:
    """Every function, table, view and sequence of the schema, as Python would name it."""
    created = re.compile(
        r"create (?:or replace )?(?:unlogged )?(?:function|table|view|sequence) (?:if not exists )?"
        r"headwater(?:_internal)?\.(\w+)"
    )
    names = {name for path in sql_files() for name in created.findall(path.read_text())}
    assert {"publish_batch", "stable_position", "event", "cursor_lag", "position"} <= names
    return re.compile(rf"\bheadwater(?:_internal)?\.(?:{'|'.join(sorted(names))})\b(?!\s*import)")


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
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            suppressed = {ast.unparse(kind) for kind in node.args}
            assert not suppressed & {"Exception", "BaseException"}, f"line {node.lineno}: suppress(Exception)"
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
    from headwater.database import schema

    assert sorted(path.name for path in (SOURCE / "database" / "schema" / "functions").iterdir()) == sorted(
        schema.FUNCTION_FILES
    )


# Calls that wait, with the place of their timeout among the positional arguments.
WAITS = {"wait": 0, "join": 0, "result": 0, "timeout": 0, "settimeout": 0, "wait_for": 1, "communicate": 1}
# A wait this short is a step of a loop that has a deadline.
STEP_SECONDS = 5


def deadlines_of_their_own(tree: ast.Module) -> Iterator[int]:
    """Lines with a wait, or a constant that is called patience, that is bounded by a number."""

    def is_deadline(value: ast.expr) -> bool:
        return isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value > STEP_SECONDS

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                place = WAITS.get(name)
                bounds = [one.value for one in node.keywords if one.arg in ("timeout", "connect_timeout")]
                bounds += node.args[place : place + 1] if place is not None else []
            case ast.BinOp(op=ast.Add(), left=ast.Call(func=ast.Attribute(attr="monotonic"))):
                bounds = [node.right]
            case ast.Assign(targets=[ast.Name(id=name)]) if "PATIENCE" in name:
                bounds = [node.value]
            case _:
                continue
        if any(is_deadline(bound) for bound in bounds):
            yield node.lineno


def test_waits_of_tests_have_the_deadline_that_scales() -> None:
    """`patience.py` says how long tests wait; a number of seconds of its own makes a test depend on the machine."""
    # Its clock is a number that the test passes.
    simulated = {"test_kafka_coordinator.py"}
    wrong = {
        (shown(path), line)
        for path in python_files("tests")
        if path.name not in simulated
        for line in deadlines_of_their_own(ast.parse(path.read_text()))
    }
    assert wrong == set()


LOCKS = SOURCE / "database" / "schema" / "functions" / "locks.sql"
LOCK_TAG = re.compile(r"\b29[23]\d\d\b")


def test_every_tag_of_an_advisory_lock_is_in_the_registry() -> None:
    """A tag is a literal from 29200 to 29399, as in `29287::bigint << 48`; locks.sql says what each protects."""
    rows = re.findall(r"^--   (29\d{3})(?: to (29\d{3}))?  ", LOCKS.read_text(), re.MULTILINE)
    listed = {tag for low, high in rows for tag in range(int(low), int(high or low) + 1)}
    used = {
        (int(tag), shown(path))
        for path in [*sql_files(), *python_files("src")]
        if path != LOCKS
        for tag in LOCK_TAG.findall(path.read_text())
    }
    assert {29287, 29289, 29299, 29300} <= {tag for tag, _ in used}, "the search found too little"
    assert {(tag, path) for tag, path in used if tag not in listed} == set()


def test_the_blocking_shell_is_made_from_the_asynchronous_one() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "unasync.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert check.returncode == 0, check.stdout


def test_the_modules_of_messages_are_made_from_the_files_of_the_protocol() -> None:
    pytest.importorskip("grpc_tools")
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "protos.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
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


# Words that the project does not use, each with what to write instead. STYLE: the standard term, the actor named.
UNUSED_WORDS = {
    "whoever": "the actor: the caller, the holder, the publisher",
    "somebody": "the actor",
    "nobody": "the actor, negated: no process",
    "anew": "again",
    "told": "returned, reported, named",
    "upkeep": "maintenance",
    "periodics": "cron schedules",
    "frontier": "claimed position",
    "door": "server, protocol",
    "doors": "servers, protocols",
    "lane": "partition",
    "lanes": "partitions",
    "must_not_lose": "holds_retention",
    "suspect": "isolated",
    "oftener": "more often",
    "lately": "recently",
}


def test_texts_use_the_words_of_the_field() -> None:
    unused = re.compile(rf"\b({'|'.join(UNUSED_WORDS)})\b", re.IGNORECASE)
    kinds = {".py", ".sql", ".md", ".js", ".html", ".json", ".proto", ".yml"}
    files = [path for folder in ("src", "docs", "proto") for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    files += [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    wrong = [
        f"{shown(path)}:{number}: {word!r}: write {UNUSED_WORDS[word.lower()]}"
        for path in sorted(files)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in unused.findall(line)
        # The system user of that name.
        if '"nobody"' not in line
    ]
    assert not wrong, "\n".join(wrong[:50])
