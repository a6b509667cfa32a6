"""`headwater topic`: create, list, describe, alter, clean and delete topics."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import typer

from headwater.calls import kafka_admin
from headwater.calls import registry as calls
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, duration, examples
from headwater.cli.audited import acting
from headwater.cli.connection import session

app = typer.Typer(help="Topics: the named parts of the log.", no_args_is_help=True)


class Kind(StrEnum):
    """What a topic can be."""

    open = "open"
    sequenced = "sequenced"


Name = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.", show_default=False)]
Retention = Annotated[
    timedelta | None,
    typer.Option(parser=duration, metavar="DURATION", help="How long events are kept at least, such as 7d."),
]
MaxPayload = Annotated[int | None, typer.Option(metavar="BYTES", help="The largest payload it takes.")]
MaxHeader = Annotated[int | None, typer.Option(metavar="BYTES", help="The largest headers it takes.")]


@app.command(
    epilog=examples(
        "headwater topic create orders --retention 7d",
        "headwater topic create ledger --kind sequenced --partitions 8",
    )
)
def create(
    context: typer.Context,
    name: Name,
    kind: Annotated[
        Kind, typer.Option(help="open: writers never wait for each other; sequenced: dense offsets per partition.")
    ] = Kind.open,
    partitions: Annotated[int, typer.Option(help="Lanes by hash of the key.")] = 1,
    retention: Retention = None,
    max_payload_bytes: MaxPayload = None,
    max_header_bytes: MaxHeader = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="One that is there is fine as it is.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Create a topic. Without --retention its events are kept for ever."""
    detail = {
        "kind": kind.value,
        "partitions": partitions,
        "retention": retention,
        "max_payload_bytes": max_payload_bytes,
        "max_header_bytes": max_header_bytes,
    }
    with session(context).log(dsn) as log, acting(log, "topic.create", name, detail) as log:
        created = log.create_topic(
            name,
            kind=kind.value,
            partitions=partitions,
            retention=retention,
            max_payload_bytes=max_payload_bytes,
            max_header_bytes=max_header_bytes,
            if_missing=if_missing,
        )
    if as_json:
        output.emit(created)
    else:
        output.say(f"topic {created.name} is there: {created.kind}, kept {_kept(created.retention)}")


@app.command("list", epilog=examples("headwater topic list"))
def list_topics(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List every topic with what it holds."""
    with session(context).log(dsn) as log:
        topics = log.topics()
    if as_json:
        output.emit(topics)
        return
    output.table(
        ("topic", "kind", "partitions", "kept", "first", "last", "last published"),
        (
            (t.name, t.kind, t.partitions, _kept(t.retention), t.first_position, t.last_position, t.last_published_at)
            for t in topics
        ),
        empty="no topics: headwater topic create NAME",
    )


@app.command(epilog=examples("headwater topic describe orders --json"))
def describe(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show one topic's settings and what it holds."""
    with session(context).log(dsn) as log:
        log.topic(name)
        (found,) = [topic for topic in log.topics() if topic.name == name]
    if as_json:
        output.emit(found)
    else:
        output.facts(found)


@app.command(
    epilog=examples(
        "headwater topic alter orders --retention 30d",
        "headwater topic alter orders --keep-forever",
        "headwater topic alter orders --value-schema orders-value",
    )
)
def alter(
    context: typer.Context,
    name: Name,
    partitions: Annotated[int | None, typer.Option(help="More lanes; never fewer.")] = None,
    retention: Retention = None,
    keep_forever: Annotated[bool, typer.Option("--keep-forever", help="Remove the retention.")] = False,
    max_payload_bytes: MaxPayload = None,
    max_header_bytes: MaxHeader = None,
    value_schema: Annotated[
        str | None,
        typer.Option(metavar="SUBJECT", help="What clients of Kafka produce must fit this subject's schema."),
    ] = None,
    key_schema: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="And their keys this one's.", show_default=False)
    ] = None,
    no_value_schema: Annotated[bool, typer.Option("--no-value-schema", help="Values need to fit no more.")] = False,
    no_key_schema: Annotated[bool, typer.Option("--no-key-schema", help="Keys need to fit no more.")] = False,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Change a topic's settings. A shorter retention takes events at the next maintenance, so it asks."""
    if keep_forever and retention is not None:
        raise typer.BadParameter("say either --retention or --keep-forever")
    if (no_value_schema and value_schema) or (no_key_schema and key_schema):
        raise typer.BadParameter("say either which schema, or that there is none")
    schemas = _schemas(key=(key_schema, no_key_schema), value=(value_schema, no_value_schema))
    with session(context).log(dsn) as log:
        before = log.topic(name).retention
        if retention is not None and (before is None or retention < before):
            output.confirm(f"keep the events of {name} for {output.shown(retention)} only?", yes=yes)
        changes = {
            "partitions": partitions,
            "retention": retention,
            "keep_forever": keep_forever or None,
            "max_payload_bytes": max_payload_bytes,
            "max_header_bytes": max_header_bytes,
            "schemas": schemas or None,
        }
        with acting(log, "topic.alter", name, changes) as log:
            if schemas:
                log.run(calls.set_topic_schemas(name, schemas))
            altered = log.alter_topic(
                name,
                partitions=partitions,
                retention=retention,
                keep_forever=keep_forever,
                max_payload_bytes=max_payload_bytes,
                max_header_bytes=max_header_bytes,
            )
    if as_json:
        output.emit(altered)
    else:
        output.facts(altered)


@app.command(epilog=examples("headwater topic clean orders"))
def clean(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Take now what retention or compaction would take later: events that are too old, too many, or superseded.

    What a reader who must not lose an event, or an archive, still needs stays.
    """
    compacted = expired = 0
    with session(context).log(dsn) as log:
        done = False
        while not done:
            cleaned = log.run(kafka_admin.clean_up(name))
            compacted += cleaned.compacted
            expired += cleaned.expired
            done = cleaned.done
    if as_json:
        output.emit({"topic": name, "compacted": compacted, "expired": expired})
    else:
        output.say(f"{name}: {compacted} events were superseded, {expired} expired")


@app.command(epilog=examples("headwater topic delete orders --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Delete a topic with its events, scheduled ones included. Asks first."""
    with session(context).log(dsn) as log:
        log.topic(name)
        output.confirm(f"delete topic {name} and all of its events?", yes=yes)
        with acting(log, "topic.delete", name) as log:
            log.delete_topic(name)
    if as_json:
        output.emit({"deleted": name})
    else:
        output.say(f"topic {name} is deleted")


def _schemas(**parts: tuple[str | None, bool]) -> dict[str, dict[str, str | bool]]:
    """What changes of the schemas of a topic: an empty subject is none, and then no id is asked for either."""
    found: dict[str, dict[str, str | bool]] = {}
    for part, (subject, none) in parts.items():
        if none:
            found[part] = {"subject": "", "framed": False, "strategy": "TopicNameStrategy"}
        elif subject is not None:
            found[part] = {"subject": subject}
    return found


def _kept(retention: timedelta | None) -> str:
    return "for ever" if retention is None else output.shown_duration(retention)
