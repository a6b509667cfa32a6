"""`headwater schema`: register, list, show, check and delete schemas, and what may follow what."""

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
from headwater.cli.arguments import Dsn, Json, Yes, examples
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.errors import IncompatibleSchema, InvalidRequest, SchemaNotFound
from headwater.schema_registry import registry
from headwater.schema_registry.registry import LEVELS, carry_out
from headwater.schema_registry.schemas import TYPES, Reference, Schema

app = typer.Typer(help="Schemas: what payloads must fit, and what may follow what.", no_args_is_help=True)

_BY_ENDING: Final = {".avsc": "AVRO", ".json": "JSON", ".proto": "PROTOBUF"}

Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject's name.", show_default=False)]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The schema; - reads it from standard input.")]
Type = Annotated[
    str | None,
    typer.Option("--type", metavar="TYPE", help="AVRO, JSON or PROTOBUF. By default the file's ending says it."),
]
References = Annotated[
    list[str] | None,
    typer.Option(
        "--reference", metavar="NAME=SUBJECT:VERSION", help="A schema that it refers to by that name; may come again."
    ),
]
Version = Annotated[int | None, typer.Option(min=1, metavar="NUMBER", help="Which version. Default: the latest.")]


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
    """Register a schema under a subject, unless it may not follow what is there. Once is as good as twice."""
    schema = _read(file, type, reference)
    with session(context).log(dsn) as log:

        def write(call: Call[Any]) -> Any:
            with acting(log, "schema.register", subject, {"type": schema.type}) as acted:
                if (registered := acted.run(call)) is None:
                    # The subject changed meanwhile: nothing was done that could be told of.
                    raise psycopg.Rollback
            return registered

        registered = carry_out(registry.register(subject, schema), log.run, write)
    if as_json:
        output.emit({"subject": subject, "version": registered.version, "id": registered.id})
    else:
        output.say(f"version {registered.version} of {subject} is there, with the id {registered.id}")


@app.command("list", epilog=examples("headwater schema list"))
def list_subjects(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List subjects, and the topics that must fit them."""
    with session(context).log(dsn) as log:
        found = log.run(calls.subject_overview())
    if as_json:
        output.emit(found)
        return
    output.table(
        ("subject", "type", "versions", "latest", "compatibility", "topics"),
        ((s.name, s.type, s.versions, s.latest, s.compatibility, ", ".join(s.topics)) for s in found),
        empty="no schemas: headwater schema register SUBJECT FILE",
    )


@app.command(epilog=examples("headwater schema show orders-value", "headwater schema show orders-value --version 1"))
def show(
    context: typer.Context, subject: Subject, version: Version = None, dsn: Dsn = None, as_json: Json = False
) -> None:
    """Show a schema as it was registered."""
    with session(context).log(dsn) as log:
        found: SchemaVersion | None = log.run(calls.find_version(subject, version))
    if found is None:
        raise SchemaNotFound(
            f'there is no subject "{subject}"' if version is None else f'subject "{subject}" has no version {version}',
            hint="See headwater schema list.",
        )
    if as_json:
        output.emit(
            {
                "subject": found.subject,
                "version": found.version,
                "id": found.id,
                "type": found.schema.type,
                "schema": found.schema.text,
                "references": [one._asdict() for one in found.schema.references],
            }
        )
    else:
        output.say(found.schema.text)


@app.command(epilog=examples("headwater schema check orders-value order.avsc"))
def check(
    context: typer.Context,
    subject: Subject,
    file: File,
    type: Type = None,
    reference: References = None,
    version: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Compare with this one only.", show_default=False)
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Say whether a schema may follow, and if not, all that stands against it. Registers nothing."""
    schema = _read(file, type, reference)
    with session(context).log(dsn) as log:
        problems = carry_out(registry.check(subject, version, schema), log.run)
    if problems:
        raise IncompatibleSchema(
            f"the schema may not follow under {subject}",
            hint="\n  ".join(problems),
            detail={"subject": subject, "problems": problems},
        )
    if as_json:
        output.emit({"subject": subject, "compatible": True})
    else:
        output.say(f"the schema may follow under {subject}")


@app.command(
    epilog=examples(
        "headwater schema delete orders-value --version 2", "headwater schema delete orders-value --for-good --yes"
    )
)
def delete(
    context: typer.Context,
    subject: Subject,
    version: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Only this one. Default: all.", show_default=False)
    ] = None,
    for_good: Annotated[
        bool, typer.Option("--for-good", help="Also from those that can still be read by their id. Asks first.")
    ] = False,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete versions softly: payloads with their ids can still be read. Or, after that, for good."""
    what = subject if version is None else f"version {version} of {subject}"
    with session(context).log(dsn) as log:
        if for_good:
            output.confirm(f"delete {what} for good? Payloads with its id cannot be read any more.", yes=yes)
        with acting(log, "schema.delete", subject, {"version": version, "for_good": for_good}) as log:
            gone = log.run(calls.delete_schema(subject, version, for_good=for_good))
    if as_json:
        output.emit({"subject": subject, "deleted": gone, "for_good": for_good})
    else:
        output.say(f"deleted of {subject}: {', '.join(map(str, gone))}")


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
        str | None, typer.Argument(metavar="[SUBJECT]", help="Of this subject; without one, of all that say nothing.")
    ] = None,
    compatibility: Annotated[
        str | None, typer.Option(metavar="LEVEL", help=f"One of {', '.join(LEVELS)}.", show_default=False)
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="The subject says nothing of its own any more.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show or change what may follow what."""
    if compatibility is not None and compatibility.upper() not in LEVELS:
        raise typer.BadParameter(f"{compatibility!r} is none of {', '.join(LEVELS)}", param_hint="--compatibility")
    if reset and compatibility is not None:
        raise typer.BadParameter("say either --compatibility or --reset")
    with session(context).log(dsn) as log:
        if compatibility is not None or reset:
            level = compatibility.upper() if compatibility else None
            with acting(log, "schema.config", subject or "*", {"compatibility": level or "reset"}) as acted:
                acted.run(calls.set_compatibility(subject, level))
        everywhere = log.run(calls.compatibility())
        own = None if subject is None else log.run(calls.compatibility(subject))
    level = own or everywhere
    if as_json:
        output.emit({"subject": subject, "compatibility": level, "own": own is not None})
    else:
        output.say(f"{level}" if own is not None or subject is None else f"{level}, as everywhere")


def _read(file: Path, type: str | None, references: list[str] | None) -> Schema:
    kind = (type or _BY_ENDING.get(file.suffix.lower(), "")).upper()
    if kind not in TYPES:
        raise typer.BadParameter(f"say which type the schema is of: {', '.join(TYPES)}", param_hint="--type")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", hint="Name a file, or - for standard input.") from None
    return Schema(kind, text, tuple(map(_reference, references or ())))


def _reference(text: str) -> Reference:
    name, _, rest = text.partition("=")
    subject, _, version = rest.rpartition(":")
    found: Any = (name, subject, version)
    if not all(found) or not version.isdecimal():
        raise typer.BadParameter(f"{text!r} is no reference: write NAME=SUBJECT:VERSION", param_hint="--reference")
    return Reference(name, subject, int(version))
