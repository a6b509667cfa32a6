"""`headwater archive`: list and forget archives."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.calls import archives as archive_calls
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Dsn, Json, Yes, examples

app = typer.Typer(help="Manage archives, the copies of events that retention removes.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="ARCHIVE", help="Name of the archive: the name of its pipeline.", show_default=False)
]


@app.command("list", epilog=examples("headwater archive list", "headwater archive list --json"))
def list_archives(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List archives and how far behind they are. Retention waits until events are archived."""
    with session(context).log(dsn) as log:
        archives = log.run(archive_calls.archives())
    output.print_list(
        archives,
        {
            "archive": "name",
            "archived to": "archived_to",
            "behind": lambda a: output.format_count(a.lag_events, a.lag_is_more),
            "oldest unarchived": "oldest_unarchived_age",
            "updated": "updated_at",
            "holds retention of": lambda a: a.held_topics or "-",
            "topics": lambda a: a.topics or "all",
            "location": "location",
        },
        as_json=as_json,
        empty="no archives; create one with a pipeline that has archive: true",
    )


@app.command(epilog=examples("headwater archive forget archive --yes"))
def forget(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Forget an archive: retention no longer waits for it, and readers no longer use it. Asks for confirmation.

    Its files are not deleted. A pipeline that writes the archive registers it again when it starts, as an archive of
    the events from then on.
    """
    with session(context).log(dsn) as log:
        found = [archive for archive in log.run(archive_calls.archives()) if archive.name == name]
        if not found:
            raise NotFound(f'archive "{name}" does not exist', hint="See headwater archive list.")
        output.confirm(
            f"forget archive {name}? events that exist only in its files at {found[0].location} can no longer be read",
            yes=yes,
        )
        with audit(log, "archive.forget", name, {"location": found[0].location}) as log:
            log.run(archive_calls.forget_archive(name))
    output.print_result(
        {"forgotten": name, "location": found[0].location},
        f"forgot archive {name}; its files remain at {found[0].location}",
        as_json=as_json,
    )
