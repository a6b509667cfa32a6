"""`headwater webhook`: make webhooks, look at them, steer them, try them, deliver them."""

from __future__ import annotations

import asyncio
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from headwater import aio
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, examples, header, json_object, past_instant
from headwater.cli.audited import acting
from headwater.cli.connection import connect, session, translated
from headwater.cli.exit_codes import NotThere
from headwater.cli.optional_packages import needs
from headwater.cli.signals import stop_on_signals
from headwater.errors import InvalidRequest
from headwater.model import GroupOverview, Webhook, WebhookTest

app = typer.Typer(help="Webhooks: groups whose events are sent to a URL.", no_args_is_help=True)


class Body(StrEnum):
    """What is sent of an event."""

    envelope = "envelope"
    raw = "raw"


class ClientErrors(StrEnum):
    """What an answer of 4xx means."""

    retry = "retry"
    dead = "dead"


class NotAccepted(InvalidRequest):
    """The receiver did not take a test."""


Name = Annotated[str, typer.Argument(metavar="WEBHOOK", help="The webhook's name.", show_default=False)]
Url = Annotated[str, typer.Argument(metavar="URL", help="Where to: https://...", show_default=False)]
Headers = Annotated[
    list[Any] | None,
    typer.Option("--header", parser=header, metavar="NAME=VALUE", help="Send this too; again for more."),
]
BodyOption = Annotated[Body | None, typer.Option(help="JSON with everything about an event, or its payload alone.")]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="How long an answer may take.")]
Concurrency = Annotated[int | None, typer.Option(help="How many requests at a time, over all processes.")]
Rate = Annotated[float | None, typer.Option(help="How many requests a second, over all processes; 0: no limit.")]
Gzip = Annotated[int | None, typer.Option(metavar="BYTES", help="Compress larger bodies; 0: never.")]
ClientErrorsOption = Annotated[
    ClientErrors | None, typer.Option(help="What 4xx means. 408, 425 and 429 are retried, 422 is dead, 410 disables.")
]
AllowNetwork = Annotated[
    list[str] | None,
    typer.Option(metavar="NETWORK", help="Receivers may be here besides the internet: 10.0.0.0/8; again for more."),
]


@app.command(
    epilog=examples(
        "headwater webhook create shop https://shop.example/hooks --topic orders",
        "headwater webhook create audit https://audit.example/in --topic orders --body raw --rate-per-second 20",
        "headwater webhook create mail https://mail.example/in --group mailer",
        "headwater webhook create big https://audit.example/in --filter \"(e.data ->> 'cents')::int > 500\"",
    )
)
def create(
    context: typer.Context,
    name: Name,
    url: Url,
    topic: Annotated[list[str] | None, typer.Option(metavar="TOPIC", help="Send these events; again for more.")] = None,
    group: Annotated[str | None, typer.Option(help="Send the events of a group that is there.")] = None,
    filter: Annotated[
        str | None, typer.Option(metavar="SQL", help="Send what this SQL filter over e and s matches, from now on.")
    ] = None,
    params: Annotated[
        Any, typer.Option(parser=json_object, metavar="JSON", help="What the filter sees as s.params.")
    ] = None,
    after: Annotated[int | None, typer.Option(metavar="POSITION", min=0, help="Start after this position.")] = None,
    since: Annotated[
        datetime | None, typer.Option(parser=past_instant, metavar="TIME", help="Start at this time.")
    ] = None,
    from_end: Annotated[bool, typer.Option("--from-end", help="Only events from now on.")] = False,
    secret: Annotated[str | None, typer.Option(help="whsec_ and base64; made if not given.")] = None,
    headers: Headers = None,
    body: BodyOption = None,
    timeout_seconds: Timeout = None,
    max_concurrency: Concurrency = None,
    rate_per_second: Rate = None,
    gzip_above_bytes: Gzip = None,
    client_errors: ClientErrorsOption = None,
    max_attempts: Annotated[int | None, typer.Option(help="Tries until an event is dead.")] = None,
    backoff_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The wait after the first failed try.")
    ] = None,
    backoff_max_seconds: Annotated[float | None, typer.Option(metavar="SECONDS", help="The longest wait.")] = None,
    ordered_keys: Annotated[bool, typer.Option("--ordered-keys", help="One event of a key at a time.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Make a webhook, with a group of its name that gets the events of these topics. Prints its secret.

    The group is made at the beginning of the log unless told otherwise; `headwater group bind` narrows what it gets.
    """
    detail: dict[str, Any] = {
        "url": url,
        "topics": topic or None,
        "group": group,
        "filter": filter,
        "headers": sorted(name for name, _ in headers) if headers else None,
        "timeout_seconds": timeout_seconds,
        "max_concurrency": max_concurrency,
        "rate_per_second": rate_per_second,
        "gzip_above_bytes": gzip_above_bytes,
    }
    with session(context).log(dsn) as log, acting(log, "webhook.create", name, detail) as log:
        created = log.create_webhook(
            name,
            url,
            topic or None,
            group=group,
            filter=filter,
            params=params,
            after=after,
            since=since,
            from_end=from_end,
            secret=secret,
            headers=dict(headers) if headers else None,
            body=body and body.value,
            timeout_seconds=timeout_seconds,
            max_concurrency=max_concurrency,
            rate_per_second=rate_per_second,
            gzip_above_bytes=gzip_above_bytes,
            client_errors=client_errors and client_errors.value,
            max_attempts=max_attempts,
            backoff_seconds=backoff_seconds,
            backoff_max_seconds=backoff_max_seconds,
            ordered_keys=ordered_keys,
        )
        bound = filter is not None or group is not None or bool(log.bindings(created.group))
    if as_json:
        output.emit({**_document(created), "secret": created.secrets[0]})
        return
    output.say(f"webhook {name} sends the events of group {created.group} to {created.url}")
    output.say(f"secret  {created.secrets[0]}")
    if not bound:
        output.note(f"it is bound to nothing yet: headwater group bind {created.group} --topic ...")


@app.command("list", epilog=examples("headwater webhook list"))
def list_webhooks(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show all webhooks with what they have yet to send."""
    with session(context).log(dsn) as log:
        found = log.webhooks()
        groups = {one.name: one for one in log.groups()}
    if as_json:
        output.emit([{**_document(one), "progress": groups.get(one.group)} for one in found])
        return
    output.table(
        ("webhook", "group", "url", "state", "ready", "sending", "retrying", "dead", "done"),
        ((one.name, one.group, one.url, one.state, *_figures(groups.get(one.group))) for one in found),
        empty="no webhooks: headwater webhook create",
    )


@app.command(epilog=examples("headwater webhook show shop", "headwater webhook show shop --secrets --json"))
def show(
    context: typer.Context,
    name: Name,
    secrets: Annotated[bool, typer.Option("--secrets", help="Show its secrets too.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show one webhook."""
    with session(context).log(dsn) as log:
        found = log.webhook(name)
        groups = {one.name: one for one in log.groups()}
    shown = {"secrets": found.secrets} if secrets else {}
    if as_json:
        output.emit({**_document(found), **shown, "progress": groups.get(found.group)})
        return
    progress = dict(
        zip(("ready", "sending", "retrying", "dead", "done"), _figures(groups.get(found.group)), strict=True)
    )
    pairs = {**{k: getattr(found, k) for k in _document(found)}, **shown, **progress}
    width = max(map(len, pairs))
    for label, value in pairs.items():
        output.say(f"{label.replace('_', ' '):<{width}}  {output.shown(value)}")


@app.command(
    epilog=examples(
        "headwater webhook update shop --url https://shop.example/v2/hooks",
        "headwater webhook update shop --rate-per-second 0 --client-errors dead",
    )
)
def update(
    context: typer.Context,
    name: Name,
    url: Annotated[str | None, typer.Option(help="Where to: https://...")] = None,
    headers: Headers = None,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Send no headers of its own any more.")] = False,
    body: BodyOption = None,
    timeout_seconds: Timeout = None,
    max_concurrency: Concurrency = None,
    rate_per_second: Rate = None,
    gzip_above_bytes: Gzip = None,
    client_errors: ClientErrorsOption = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Change a webhook; what is not named stays. --header replaces all of its headers.

    Retries are changed on its group: headwater group alter.
    """
    if headers and no_headers:
        raise typer.BadParameter("--header and --no-headers exclude each other")
    changes: dict[str, Any] = {
        "url": url,
        "headers": [] if no_headers else sorted(name for name, _ in headers) if headers else None,
        "timeout_seconds": timeout_seconds,
        "max_concurrency": max_concurrency,
        "rate_per_second": rate_per_second,
        "gzip_above_bytes": gzip_above_bytes,
    }
    with session(context).log(dsn) as log, acting(log, "webhook.alter", name, changes) as log:
        altered = log.alter_webhook(
            name,
            url=url,
            headers={} if no_headers else dict(headers) if headers else None,
            body=body and body.value,
            timeout_seconds=timeout_seconds,
            max_concurrency=max_concurrency,
            rate_per_second=rate_per_second,
            gzip_above_bytes=gzip_above_bytes,
            client_errors=client_errors and client_errors.value,
        )
    _tell(_document(altered), f"webhook {name} is changed", as_json=as_json)


@app.command(epilog=examples("headwater webhook pause shop --reason 'their migration'"))
def pause(
    context: typer.Context,
    name: Name,
    reason: Annotated[str | None, typer.Option(help="Why, for whoever looks at it.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Send nothing until resumed; what is under way is finished. Events wait in the group."""
    with session(context).log(dsn) as log, acting(log, "webhook.pause", name, {"reason": reason}) as log:
        paused = log.pause_webhook(name, reason=reason)
    _tell(_document(paused), f"webhook {name} is paused", as_json=as_json)


@app.command(epilog=examples("headwater webhook resume shop"))
def resume(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Send again from where it was, also after its receiver had it disabled."""
    with session(context).log(dsn) as log, acting(log, "webhook.resume", name) as log:
        resumed = log.resume_webhook(name)
    _tell(_document(resumed), f"webhook {name} goes on", as_json=as_json)


@app.command(epilog=examples("headwater webhook delete shop --yes", "headwater webhook delete shop --with-group --yes"))
def delete(
    context: typer.Context,
    name: Name,
    with_group: Annotated[
        bool, typer.Option("--with-group", help="Forget its group too, with what was not sent.")
    ] = False,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Forget a webhook. Its group stays, and keeps what was not sent. Asks first."""
    with session(context).log(dsn) as log:
        found = log.webhook(name)
        (progress,) = log.groups([found.group])
        unsent = f"{progress.ready}{'+' * progress.ready_is_more} events are not sent yet"
        what = f"webhook {name} and group {found.group}" if with_group else f"webhook {name}"
        output.confirm(f"forget {what}? {unsent}", yes=yes)
        with acting(log, "webhook.delete", name, {"with_group": with_group}) as log:
            if not log.delete_webhook(name, with_group=with_group):
                raise NotThere(f'webhook "{name}" was deleted just now')
    sentence = f"{what} {'are' if with_group else 'is'} deleted"
    _tell({"deleted": name, "group_deleted": with_group}, sentence, as_json=as_json)
    if not with_group and not as_json:
        output.note(f"group {found.group} stays: headwater group delete {found.group}")


@app.command(
    "rotate-secret",
    epilog=examples("headwater webhook rotate-secret shop", "headwater webhook rotate-secret shop --end-old"),
)
def rotate_secret(
    context: typer.Context,
    name: Name,
    secret: Annotated[str | None, typer.Option(help="whsec_ and base64; made if not given.")] = None,
    keep: Annotated[int, typer.Option(min=0, max=4, help="So many of the secrets before sign as well.")] = 1,
    end_old: Annotated[
        bool, typer.Option("--end-old", help="Make none: from now on only the newest signs.", show_default=False)
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Sign with another secret, and for now with the one before too. Prints the new one."""
    with (
        session(context).log(dsn) as log,
        acting(log, "webhook.rotate_secret", name, {"end_old": end_old or None}) as log,
    ):
        if end_old:
            rotated = log.rotate_webhook_secret(name, secret=log.webhook(name).secrets[0], keep=0)
        else:
            rotated = log.rotate_webhook_secret(name, secret=secret, keep=keep)
    document = {**_document(rotated), "secret": rotated.secrets[0], "secrets_in_use": len(rotated.secrets)}
    _tell(document, f"secret  {rotated.secrets[0]}", as_json=as_json)
    if len(rotated.secrets) > 1 and not as_json:
        output.note(f"when the receiver knows it: headwater webhook rotate-secret {name} --end-old")


@app.command(
    "test", epilog=examples("headwater webhook test shop", "headwater webhook test local --allow-network 127.0.0.1")
)
def try_out(
    context: typer.Context,
    name: Name,
    allow_network: AllowNetwork = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Send a signed test event, once, and show what came of it. Ends with 3 if it was not accepted."""
    with needs("webhooks"):
        from headwater.webhooks.addresses import networks
        from headwater.webhooks.deliver import send_test
    allowed = networks(allow_network or ())
    database = session(context).dsn(dsn)
    with translated():
        connect(database).close()

    async def send() -> WebhookTest:
        async with await aio.connect(database, pool_size=1, application_name="headwater cli") as log:
            return await send_test(log, name, allowed=allowed)

    tested = asyncio.run(send())
    if as_json:
        output.emit(tested)
    else:
        output.facts(tested)
    if not tested.accepted:
        raise NotAccepted(f"webhook {name} was not accepted: {tested.error or tested.status}")


@app.command(
    epilog=examples(
        "headwater webhook deliver", "headwater webhook deliver --allow-network 10.0.0.0/8 --grace-seconds 5"
    )
)
def deliver(
    context: typer.Context,
    allow_network: AllowNetwork = None,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="How long requests under way may take after Ctrl-C or SIGTERM.")
    ] = 20.0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Deliver all webhooks that are active, until Ctrl-C or SIGTERM.

    Run as many as you like, on as many machines: they share the work. New and changed webhooks are noticed.
    """
    with needs("webhooks"):
        from headwater.webhooks.addresses import networks
        from headwater.webhooks.deliver import dispatching
    allowed = networks(allow_network or ())
    found = session(context)
    database = found.dsn(dsn)
    with translated():
        connect(database).close()

    async def run() -> None:
        stop = stop_on_signals()
        log = await aio.connect(database, pool_size=found.settings.pool_size, application_name="headwater webhooks")
        async with log, dispatching(log, allowed=allowed, grace_seconds=grace_seconds):
            if as_json:
                output.emit({"delivering": True})
            else:
                output.note("delivering webhooks; Ctrl-C stops")
            await stop.wait()

    asyncio.run(run())
    if as_json:
        output.emit({"stopped": True})
    else:
        output.note("stopped; what was not answered was given back")


def _document(webhook: Webhook) -> dict[str, Any]:
    """A webhook for programs, without its secrets."""
    return {name: value for name, value in output.plain(webhook).items() if name != "secrets"}


def _figures(group: GroupOverview | None) -> tuple[Any, ...]:
    if group is None:
        return ("-",) * 5
    return output.at_least(group.ready, group.ready_is_more), group.processing, group.retrying, group.dead, group.done


def _tell(document: Any, sentence: str, *, as_json: bool) -> None:
    if as_json:
        output.emit(document)
    else:
        output.say(sentence)
