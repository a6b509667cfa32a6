"""`headwater status`: which database commands use, whether it answers, and which embedded server is running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer
from psycopg import ProgrammingError, conninfo

import headwater
from headwater.calls import log as log_calls
from headwater.cli import output
from headwater.cli.connection import Session, connect, session, translate_errors
from headwater.cli.options import Dsn, Json, examples
from headwater.errors import HeadwaterError, LogUnavailable

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class _Database:
    # Without a password.
    dsn: str | None
    chosen_by: str | None
    answers: bool
    # The program version that installed the schema; None without a schema.
    schema: str | None
    problem: str | None


@app.command(epilog=examples("headwater status", "headwater status --json"))
def status(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show the database that commands use, and the embedded Postgres if it is running.

    `headwater doctor` checks the log itself.
    """
    run = session(context)
    database = _database(run, dsn)
    server = run.embedded()
    embedded: dict[str, Any] = {
        "running": server.running,
        "pid": server.pid,
        "port": server.port,
        "data_dir": str(server.data_dir),
    }
    if as_json:
        document = {name: getattr(database, name) for name in _Database.__slots__}
        output.emit({"version": headwater.__version__, "database": document, "embedded_postgres": embedded})
        return
    output.print_line(f"version            {headwater.__version__}")
    output.print_line(f"database           {_describe(database)}")
    if not server.running:
        output.print_line("embedded Postgres  not running; start it with headwater up")
        return
    where = f"port {server.port}" if server.port is not None else "a Unix socket"
    output.print_line(
        f"embedded Postgres  running (process {server.pid}, {where}, {server.data_dir}); stop it with headwater down"
    )


def _database(run: Session, given: str | None) -> _Database:
    chosen_by = "--dsn" if given else "HEADWATER_DSN" if run.settings.dsn else "headwater up"
    try:
        dsn = run.dsn(given)
        with translate_errors(), connect(dsn) as connection:
            version = None
            if connection.execute("select to_regclass('headwater_internal.installed')").fetchone() != (None,):
                call = log_calls.installed()
                installed = call.decode(connection.execute(call.sql, call.params).fetchall())
                version = installed.version if installed is not None else None
            return _Database(_without_password(dsn), chosen_by, True, version, None)
    except HeadwaterError as error:
        shown = given or run.settings.dsn
        known = shown is not None or not isinstance(error, LogUnavailable)
        return _Database(
            _without_password(shown) if shown else None, chosen_by if known else None, False, None, error.message
        )


def _describe(database: _Database) -> str:
    if not database.answers:
        return f"{database.dsn or 'none'}: {database.problem}"
    schema = f"schema of version {database.schema}" if database.schema else "no schema; run headwater migrate"
    return f"{database.dsn} (from {database.chosen_by}): answers; {schema}"


def _without_password(dsn: str) -> str:
    try:
        parts = conninfo.conninfo_to_dict(dsn)
    except ProgrammingError:
        return "(invalid DSN)"
    shown: dict[str, Any] = {name: part for name, part in parts.items() if "password" not in name}
    return conninfo.make_conninfo(**shown)
