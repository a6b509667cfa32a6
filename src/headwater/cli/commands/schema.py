"""`headwater schema`: register, list, show, check and delete schemas, and set their compatibility."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import psycopg
import typer

from headwater.calls import Call
from headwater.calls import registry as calls
from headwater.calls.registry import SchemaVersion
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.options import Dsn, Json, Yes, examples
from headwater.errors import IncompatibleSchema, InvalidRequest, SchemaNotFound
from headwater.schema_registry import registry
from headwater.schema_registry.registry import LEVELS, run_steps
from headwater.schema_registry.schemas import TYPES, Reference, Schema

app = typer.Typer(help="Manage schemas of payloads and their compatibility.", no_args_is_help=True)

_TYPE_BY_EXTENSION: Final = {".avsc": "AVRO", ".json": "JSON", ".proto": "PROTOBUF"}

Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="Name of the subject.", show_default=False)]
File = Annotated[Path, typer.Argument(metavar="FILE", help="File with the schema; - reads standard input.")]
Type = Annotated[
    str | None,
    typer.Option("--type", metavar="TYPE", help="AVRO, JSON or PROTOBUF. Default: from the file extension."),
]
References = Annotated[
    list[str] | None,
    typer.Option(
        "--reference",
        metavar="NAME=SUBJECT:VERSION",
        help="A schema that this schema references by NAME. Repeat for several.",
    ),
]
Version = Annotated[int | None, typer.Option(min=1, metavar="NUMBER", help="Version. Default: the latest.")]


@app.command(
    epilog=examples(
        "headwater schema register orders-value order.avsc",
        "headwater schema register orders-value order.proto --reference money.proto=money:1",
    )
)
def register(
    context: typer.Context,
    subject: Subject,
    file: File,
    type: Type = None,
    reference: References = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Register a schema under a subject if it is compatible with earlier versions. Idempotent."""
    schema = _read(file, type, reference)
    with session(context).log(dsn) as log:

        def write(call: Call[Any]) -> Any:
            with audit(log, "schema.register", subject, {"type": schema.type}) as acted:
                if (registered := acted.run(call)) is None:
                    # The subject changed concurrently: nothing was registered, so there is nothing to audit.
                    raise psycopg.Rollback
            return registered

        registered = run_steps(registry.register(subject, schema), log.run, write)
    output.print_result(
        {"subject": subject, "version": registered.version, "id": registered.id},
        f"registered version {registered.version} of {subject} (id {registered.id})",
        as_json=as_json,
    )


@app.command("list", epilog=examples("headwater schema list"))
def list_subjects(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List subjects and the topics that they apply to."""
    with session(context).log(dsn) as log:
        found = log.run(calls.subject_overview())
    if as_json:
        output.emit(found)
        return
    output.print_table(
        ("subject", "type", "versions", "latest", "compatibility", "topics"),
        ((s.name, s.type, s.versions, s.latest, s.compatibility, ", ".join(s.topics)) for s in found),
        empty="no schemas; register one with headwater schema register SUBJECT FILE",
    )


@app.command(epilog=examples("headwater schema show orders-value", "headwater schema show orders-value --version 1"))
def show(
    context: typer.Context, subject: Subject, version: Version = None, dsn: Dsn = None, as_json: Json = False
) -> None:
    """Print a schema as it was registered."""
    with session(context).log(dsn) as log:
        found: SchemaVersion | None = log.run(calls.find_version(subject, version))
    if found is None:
        raise SchemaNotFound(
            f'subject "{subject}" does not exist'
            if version is None
            else f'subject "{subject}" has no version {version}',
            hint="See headwater schema list.",
        )
    output.print_result(
        {
            "subject": found.subject,
            "version": found.version,
            "id": found.id,
            "type": found.schema.type,
            "schema": found.schema.text,
            "references": [one._asdict() for one in found.schema.references],
        },
        found.schema.text,
        as_json=as_json,
    )


@app.command(epilog=examples("headwater schema check orders-value order.avsc"))
def check(
    context: typer.Context,
    subject: Subject,
    file: File,
    type: Type = None,
    reference: References = None,
    version: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Compare only with this version.", show_default=False)
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Check whether a schema is compatible, and list all incompatibilities. Registers nothing."""
    schema = _read(file, type, reference)
    with session(context).log(dsn) as log:
        problems = run_steps(registry.check(subject, version, schema), log.run)
    if problems:
        raise IncompatibleSchema(
            f"the schema is not compatible with subject {subject}",
            hint="\n  ".join(problems),
            detail={"subject": subject, "problems": problems},
        )
    output.print_result(
        {"subject": subject, "compatible": True}, f"the schema is compatible with subject {subject}", as_json=as_json
    )


@app.command(
    epilog=examples(
        "headwater schema delete orders-value --version 2", "headwater schema delete orders-value --for-good --yes"
    )
)
def delete(
    context: typer.Context,
    subject: Subject,
    version: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="NUMBER", help="Delete only this version. Default: all versions.", show_default=False
        ),
    ] = None,
    for_good: Annotated[
        bool,
        typer.Option("--for-good", help="Delete permanently what was already deleted softly. Asks for confirmation."),
    ] = False,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete versions softly, so that payloads with their ids can still be read; then permanently with --for-good."""
    what = subject if version is None else f"version {version} of {subject}"
    with session(context).log(dsn) as log:
        if for_good:
            output.confirm(f"delete {what} permanently? payloads with its id can no longer be read", yes=yes)
        with audit(log, "schema.delete", subject, {"version": version, "for_good": for_good}) as log:
            deleted = log.run(calls.delete_schema(subject, version, for_good=for_good))
    output.print_result(
        {"subject": subject, "deleted": deleted, "for_good": for_good},
        f"deleted version{'' if len(deleted) == 1 else 's'} {', '.join(map(str, deleted))} of {subject}",
        as_json=as_json,
    )


@app.command(
    epilog=examples(
        "headwater schema config",
        "headwater schema config --compatibility FULL",
        "headwater schema config orders-value --compatibility NONE",
        "headwater schema config orders-value --reset",
    )
)
def config(
    context: typer.Context,
    subject: Annotated[
        str | None, typer.Argument(metavar="[SUBJECT]", help="Name of the subject. Default: the global setting.")
    ] = None,
    compatibility: Annotated[
        str | None, typer.Option(metavar="LEVEL", help=f"One of {', '.join(LEVELS)}.", show_default=False)
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Remove the subject's own level, so that the global one applies.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show or change the compatibility level of a subject, or the global one."""
    if compatibility is not None and compatibility.upper() not in LEVELS:
        raise typer.BadParameter(
            f"invalid level {compatibility!r}: expected one of {', '.join(LEVELS)}", param_hint="--compatibility"
        )
    if reset and compatibility is not None:
        raise typer.BadParameter("give only one of --compatibility and --reset")
    with session(context).log(dsn) as log:
        if compatibility is not None or reset:
            level = compatibility.upper() if compatibility else None
            with audit(log, "schema.config", subject or "*", {"compatibility": level or "reset"}) as acted:
                acted.run(calls.set_compatibility(subject, level))
        everywhere = log.run(calls.compatibility())
        own = None if subject is None else log.run(calls.compatibility(subject))
    level = own or everywhere
    output.print_result(
        {"subject": subject, "compatibility": level, "own": own is not None},
        f"{level}" if own is not None or subject is None else f"{level} (global)",
        as_json=as_json,
    )


def _read(file: Path, type: str | None, references: list[str] | None) -> Schema:
    kind = (type or _TYPE_BY_EXTENSION.get(file.suffix.lower(), "")).upper()
    if kind not in TYPES:
        raise typer.BadParameter(f"unknown schema type: expected one of {', '.join(TYPES)}", param_hint="--type")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {file}: {error}", hint="Give a file, or - for standard input.") from None
    return Schema(kind, text, tuple(map(_reference, references or ())))


def _reference(text: str) -> Reference:
    name, _, rest = text.partition("=")
    subject, _, version = rest.rpartition(":")
    found: Any = (name, subject, version)
    if not all(found) or not version.isdecimal():
        raise typer.BadParameter(f"invalid reference {text!r}: expected NAME=SUBJECT:VERSION", param_hint="--reference")
    return Reference(name, subject, int(version))
