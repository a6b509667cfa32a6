"""`headwater topic`: create, list, describe, alter, clean and delete topics."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Unpack

import typer

from headwater.calls import kafka_admin
from headwater.calls import registry as calls
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.options import Dsn, Json, Yes, examples
from headwater.cli.setting_options import audited, setting_options
from headwater.log.settings import NewTopicSettings, TopicChanges, TopicSettings
from headwater.setting_definitions import changeable, definitions

app = typer.Typer(help="Manage topics, the named streams of events in the log.", no_args_is_help=True)


Name = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.", show_default=False)]


@app.command(
    epilog=examples(
        "headwater topic create orders --retention 7d",
        "headwater topic create ledger --kind sequenced --partitions 8",
    )
)
@setting_options(definitions(TopicSettings), before="if_missing")
def create(
    context: typer.Context,
    name: Name,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing if the topic already exists.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
    **settings: Unpack[NewTopicSettings],
) -> None:
    """Create a topic. Without --retention, events are kept forever."""
    with session(context).log(dsn) as log, audit(log, "topic.create", name, audited(settings)) as log:
        created = log.create_topic(name, if_missing=if_missing, **settings)
    if as_json:
        output.emit(created)
    else:
        output.print_line(
            f"created topic {created.name} ({created.kind}, retention {_format_retention(created.retention)})"
        )


@app.command("list", epilog=examples("headwater topic list"))
def list_topics(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List topics and their events."""
    with session(context).log(dsn) as log:
        topics = log.topics()
    if as_json:
        output.emit(topics)
        return
    output.print_table(
        ("topic", "kind", "partitions", "retention", "first", "last", "last published"),
        (
            (
                t.name,
                t.kind,
                t.partitions,
                _format_retention(t.retention),
                t.first_position,
                t.last_position,
                t.last_published_at,
            )
            for t in topics
        ),
        empty="no topics; create one with headwater topic create NAME",
    )


@app.command(epilog=examples("headwater topic describe orders --json"))
def describe(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show the settings and positions of a topic."""
    with session(context).log(dsn) as log:
        log.topic(name)
        (found,) = [topic for topic in log.topics() if topic.name == name]
    if as_json:
        output.emit(found)
    else:
        output.print_fields(found)


@app.command(
    epilog=examples(
        "headwater topic alter orders --retention 30d",
        "headwater topic alter orders --keep-forever",
        "headwater topic alter orders --value-schema orders-value",
    )
)
@setting_options(changeable(TopicSettings), before="keep_forever", change=True)
def alter(
    context: typer.Context,
    name: Name,
    keep_forever: Annotated[
        bool, typer.Option("--keep-forever", help="Remove the retention, so that events are kept forever.")
    ] = False,
    value_schema: Annotated[
        str | None,
        typer.Option(metavar="SUBJECT", help="Require values from Kafka producers to match a schema of this subject."),
    ] = None,
    key_schema: Annotated[
        str | None,
        typer.Option(
            metavar="SUBJECT",
            help="Require keys from Kafka producers to match a schema of this subject.",
            show_default=False,
        ),
    ] = None,
    no_value_schema: Annotated[bool, typer.Option("--no-value-schema", help="Remove the schema of values.")] = False,
    no_key_schema: Annotated[bool, typer.Option("--no-key-schema", help="Remove the schema of keys.")] = False,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
    **changes: Unpack[TopicChanges],
) -> None:
    """Change the settings of a topic. Asks for confirmation before it shortens the retention."""
    retention = changes.get("retention")
    if keep_forever and retention is not None:
        raise typer.BadParameter("give only one of --retention and --keep-forever")
    if (no_value_schema and value_schema) or (no_key_schema and key_schema):
        raise typer.BadParameter(
            "give only one of --value-schema and --no-value-schema, and of --key-schema and --no-key-schema"
        )
    schemas = _schemas(key=(key_schema, no_key_schema), value=(value_schema, no_value_schema))
    with session(context).log(dsn) as log:
        before = log.topic(name).retention
        if retention is not None and (before is None or retention < before):
            output.confirm(
                f"reduce the retention of {name} to {output.format_value(retention)}? older events will be removed",
                yes=yes,
            )
        detail = {**audited(changes), "keep_forever": keep_forever or None, "schemas": schemas or None}
        with audit(log, "topic.alter", name, detail) as log:
            if schemas:
                log.run(calls.set_topic_schemas(name, schemas))
            altered = log.alter_topic(name, keep_forever=keep_forever, **changes)
    if as_json:
        output.emit(altered)
    else:
        output.print_fields(altered)


@app.command(epilog=examples("headwater topic clean orders"))
def clean(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Apply retention and compaction now: remove events that are too old, exceed the size limit or are superseded.

    Events that an archive, or a cursor or queue with --holds-retention, still needs are kept.
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
        output.print_line(f"cleaned topic {name} ({compacted} superseded and {expired} expired events removed)")


@app.command(epilog=examples("headwater topic delete orders --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Delete a topic with all of its events, including scheduled ones. Asks for confirmation."""
    with session(context).log(dsn) as log:
        log.topic(name)
        output.confirm(f"delete topic {name} and all of its events?", yes=yes)
        with audit(log, "topic.delete", name) as log:
            log.delete_topic(name)
    if as_json:
        output.emit({"deleted": name})
    else:
        output.print_line(f"deleted topic {name}")


def _schemas(**parts: tuple[str | None, bool]) -> dict[str, dict[str, str | bool]]:
    """The schema settings to change. An empty subject removes the schema and the requirement of a schema id."""
    found: dict[str, dict[str, str | bool]] = {}
    for part, (subject, none) in parts.items():
        if none:
            found[part] = {"subject": "", "framed": False, "strategy": "TopicNameStrategy"}
        elif subject is not None:
            found[part] = {"subject": subject}
    return found


def _format_retention(retention: timedelta | None) -> str:
    return "forever" if retention is None else output.format_duration(retention)
