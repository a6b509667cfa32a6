"""`headwater archive`: which archives there are, how far they are, and how to give one up."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater import calls
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, examples
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere

app = typer.Typer(help="Archives: where events go before retention takes them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="ARCHIVE", help="The archive: its pipeline's name.", show_default=False)]


@app.command("list", epilog=examples("headwater archive list", "headwater archive list --json"))
def list_archives(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List every archive with what it has yet to get. Retention of its topics waits for it."""
    with session(context).log(dsn) as log:
        archives = log.run(calls.archives())
    if as_json:
        output.emit(archives)
        return
    output.table(
        ("archive", "archived to", "behind", "oldest unarchived", "noted", "holds back", "topics", "location"),
        (
            (
                a.name,
                a.archived_to,
                output.at_least(a.lag_events, a.lag_is_more),
                a.oldest_unarchived_age,
                a.updated_at,
                a.held_topics or "-",
                a.topics or "all",
                a.location,
            )
            for a in archives
        ),
        empty="no archives: a pipeline with archive: true makes one",
    )


@app.command(epilog=examples("headwater archive forget archive --yes"))
def forget(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Give an archive up: retention waits no longer, and readers do not look there. Its files stay. Asks first.

    A pipeline that writes it registers it anew when it starts, as an archive of what comes from then on.
    """
    with session(context).log(dsn) as log:
        found = [archive for archive in log.run(calls.archives()) if archive.name == name]
        if not found:
            raise NotThere(f'there is no archive "{name}"', hint="See headwater archive list.")
        output.confirm(
            f"give up archive {name}? what only its files at {found[0].location} have is then read no more", yes=yes
        )
        with acting(log, "archive.forget", name, {"location": found[0].location}) as log:
            log.run(calls.forget_archive(name))
    if as_json:
        output.emit({"forgotten": name, "location": found[0].location})
    else:
        output.say(f"archive {name} is forgotten; its files stay at {found[0].location}")
