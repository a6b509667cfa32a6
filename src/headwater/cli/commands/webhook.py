"""`headwater webhook`: create, change, pause, test, deliver and delete webhooks."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any, Unpack

import typer

from headwater import aio
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import connect, session, translate_errors
from headwater.cli.exit_codes import NotFound
from headwater.cli.optional_packages import require_extras
from headwater.cli.options import (
    AllowNetwork,
    Dsn,
    Json,
    Yes,
    examples,
    parse_json_object,
    parse_past_time,
)
from headwater.cli.setting_options import audited, setting_options
from headwater.cli.signals import stop_on_signals
from headwater.errors import InvalidRequest
from headwater.queue.model import QueueOverview
from headwater.setting_definitions import changeable
from headwater.webhooks.model import Webhook, WebhookTest
from headwater.webhooks.settings import NEW_WEBHOOK_SETTINGS, NewWebhookSettings, WebhookChanges, WebhookSettings

app = typer.Typer(help="Manage webhooks, which send the events of a queue to a URL.", no_args_is_help=True)


class WebhookTestFailed(InvalidRequest):
    """The receiver did not accept a test event."""


Name = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Name of the webhook.", show_default=False)]
Url = Annotated[str, typer.Argument(metavar="URL", help="URL of the receiver: https://...", show_default=False)]


@app.command(
    epilog=examples(
        "headwater webhook create shop https://shop.example/hooks --topic orders",
        "headwater webhook create audit https://audit.example/in --topic orders --body raw --rate-per-second 20",
        "headwater webhook create mail https://mail.example/in --queue mailer",
        "headwater webhook create big https://audit.example/in --filter \"(e.data ->> 'cents')::int > 500\"",
    )
)
@setting_options(NEW_WEBHOOK_SETTINGS)
def create(
    context: typer.Context,
    name: Name,
    url: Url,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPIC", help="Send the events of this topic. Repeat for several.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Send the events of this existing queue.")] = None,
    filter: Annotated[
        str | None, typer.Option(metavar="SQL", help="Send new events that match this SQL filter over e and s.")
    ] = None,
    params: Annotated[
        Any,
        typer.Option(parser=parse_json_object, metavar="JSON", help="Parameters of the filter, available as s.params."),
    ] = None,
    after: Annotated[int | None, typer.Option(metavar="POSITION", min=0, help="Start after this position.")] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=parse_past_time, metavar="TIME", help="Start at this time: ISO 8601, or 5m for five minutes ago."
        ),
    ] = None,
    from_end: Annotated[bool, typer.Option("--from-end", help="Start with new events.")] = False,
    secret: Annotated[str | None, typer.Option(help="Secret: whsec_ and base64. Default: generated.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
    **settings: Unpack[NewWebhookSettings],
) -> None:
    """Create a webhook, and a queue of the same name with the events of these topics. Prints the secret.

    By default the queue starts at the beginning of the log. `headwater queue bind` selects events more precisely.
    """
    detail: dict[str, Any] = {
        "url": url,
        "topics": topic or None,
        "queue": queue,
        "filter": filter,
        **audited(settings),
    }
    with session(context).log(dsn) as log, audit(log, "webhook.create", name, detail) as log:
        created = log.create_webhook(
            name,
            url,
            topic or None,
            queue=queue,
            filter=filter,
            params=params,
            after=after,
            since=since,
            from_end=from_end,
            secret=secret,
            **settings,
        )
        bound = filter is not None or queue is not None or bool(log.bindings(created.queue))
    if as_json:
        output.emit({**_document(created), "secret": created.secrets[0]})
        return
    output.print_line(f"created webhook {name} (queue {created.queue}, URL {created.url})")
    output.print_line(f"secret  {created.secrets[0]}")
    if not bound:
        output.print_status(f"the queue has no bindings yet; run headwater queue bind {created.queue} --topic TOPIC")


@app.command("list", epilog=examples("headwater webhook list"))
def list_webhooks(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List webhooks and their progress."""
    with session(context).log(dsn) as log:
        found = log.webhooks()
        queues = {one.name: one for one in log.queues()}
    if as_json:
        output.emit([{**_document(one), "progress": queues.get(one.queue)} for one in found])
        return
    output.print_table(
        ("webhook", "queue", "url", "state", "ready", "sending", "retrying", "dead", "done"),
        ((one.name, one.queue, one.url, one.state, *_progress(queues.get(one.queue))) for one in found),
        empty="no webhooks; create one with headwater webhook create",
    )


@app.command(epilog=examples("headwater webhook show shop", "headwater webhook show shop --secrets --json"))
def show(
    context: typer.Context,
    name: Name,
    secrets: Annotated[bool, typer.Option("--secrets", help="Include the secrets.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show the settings and progress of a webhook."""
    with session(context).log(dsn) as log:
        found = log.webhook(name)
        queues = {one.name: one for one in log.queues()}
    shown = {"secrets": found.secrets} if secrets else {}
    if as_json:
        output.emit({**_document(found), **shown, "progress": queues.get(found.queue)})
        return
    progress = dict(
        zip(("ready", "sending", "retrying", "dead", "done"), _progress(queues.get(found.queue)), strict=True)
    )
    pairs = {**{k: getattr(found, k) for k in _document(found)}, **shown, **progress}
    width = max(map(len, pairs))
    for label, value in pairs.items():
        output.print_line(f"{label.replace('_', ' '):<{width}}  {output.format_value(value)}")


@app.command(
    epilog=examples(
        "headwater webhook update shop --url https://shop.example/v2/hooks",
        "headwater webhook update shop --rate-per-second 0 --client-errors dead",
    )
)
@setting_options(changeable(WebhookSettings), before="no_headers", change=True)
def update(
    context: typer.Context,
    name: Name,
    url: Annotated[str | None, typer.Option(help="URL of the receiver: https://...")] = None,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Remove all additional headers.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
    **changes: Unpack[WebhookChanges],
) -> None:
    """Change a webhook. Options that are not given stay unchanged; --header replaces all headers.

    Change retries on its queue: headwater queue alter.
    """
    if changes.get("headers") and no_headers:
        raise typer.BadParameter("give only one of --header and --no-headers")
    if no_headers:
        changes["headers"] = {}
    with (
        session(context).log(dsn) as log,
        audit(log, "webhook.alter", name, {"url": url, **audited(changes)}) as log,
    ):
        altered = log.alter_webhook(name, url=url, **changes)
    output.print_result(_document(altered), f"updated webhook {name}", as_json=as_json)


@app.command(epilog=examples("headwater webhook pause shop --reason 'their migration'"))
def pause(
    context: typer.Context,
    name: Name,
    reason: Annotated[str | None, typer.Option(help="Reason, shown in the state of the webhook.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Stop sending until the webhook is resumed. Requests in progress finish; events wait in the queue."""
    with session(context).log(dsn) as log, audit(log, "webhook.pause", name, {"reason": reason}) as log:
        paused = log.pause_webhook(name, reason=reason)
    output.print_result(_document(paused), f"paused webhook {name}", as_json=as_json)


@app.command(epilog=examples("headwater webhook resume shop"))
def resume(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Continue sending, also after a 410 response disabled the webhook."""
    with session(context).log(dsn) as log, audit(log, "webhook.resume", name) as log:
        resumed = log.resume_webhook(name)
    output.print_result(_document(resumed), f"resumed webhook {name}", as_json=as_json)


@app.command(epilog=examples("headwater webhook delete shop --yes", "headwater webhook delete shop --with-queue --yes"))
def delete(
    context: typer.Context,
    name: Name,
    with_queue: Annotated[
        bool, typer.Option("--with-queue", help="Also delete its queue with the unsent events.")
    ] = False,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete a webhook. Its queue keeps the unsent events unless --with-queue is given. Asks for confirmation."""
    with session(context).log(dsn) as log:
        found = log.webhook(name)
        (progress,) = log.queues([found.queue])
        unsent = f"{progress.ready}{'+' * progress.ready_is_more} events are not sent"
        what = f"webhook {name} and queue {found.queue}" if with_queue else f"webhook {name}"
        output.confirm(f"delete {what}? {unsent}", yes=yes)
        with audit(log, "webhook.delete", name, {"with_queue": with_queue}) as log:
            if not log.delete_webhook(name, with_queue=with_queue):
                raise NotFound(f'webhook "{name}" was deleted concurrently')
    output.print_result({"deleted": name, "queue_deleted": with_queue}, f"deleted {what}", as_json=as_json)
    if not with_queue and not as_json:
        output.print_status(f"queue {found.queue} still exists; delete it with headwater queue delete {found.queue}")


@app.command(
    "rotate-secret",
    epilog=examples("headwater webhook rotate-secret shop", "headwater webhook rotate-secret shop --end-old"),
)
def rotate_secret(
    context: typer.Context,
    name: Name,
    secret: Annotated[str | None, typer.Option(help="Secret: whsec_ and base64. Default: generated.")] = None,
    keep: Annotated[int, typer.Option(min=0, max=4, help="Number of previous secrets that also sign.")] = 1,
    end_old: Annotated[
        bool, typer.Option("--end-old", help="Create no secret; remove all but the newest.", show_default=False)
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Add a new secret. Requests are signed with it and with the previous one. Prints the new secret."""
    with (
        session(context).log(dsn) as log,
        audit(log, "webhook.rotate_secret", name, {"end_old": end_old or None}) as log,
    ):
        if end_old:
            rotated = log.rotate_webhook_secret(name, secret=log.webhook(name).secrets[0], keep=0)
        else:
            rotated = log.rotate_webhook_secret(name, secret=secret, keep=keep)
    document = {**_document(rotated), "secret": rotated.secrets[0], "secrets_in_use": len(rotated.secrets)}
    output.print_result(document, f"secret  {rotated.secrets[0]}", as_json=as_json)
    if len(rotated.secrets) > 1 and not as_json:
        output.print_status(f"after updating the receiver, run headwater webhook rotate-secret {name} --end-old")


@app.command(
    "test", epilog=examples("headwater webhook test shop", "headwater webhook test local --allow-network 127.0.0.1")
)
def send_test_event(
    context: typer.Context,
    name: Name,
    allow_network: AllowNetwork = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Send one signed test event and show the response. Exits with 3 if it was not accepted."""
    with require_extras("webhooks"):
        from headwater.webhooks.addresses import networks
        from headwater.webhooks.deliver import send_test
    allowed = networks(allow_network or ())
    source = session(context).settings.cloud_events_source
    database = session(context).dsn(dsn)
    with translate_errors():
        connect(database).close()

    async def send() -> WebhookTest:
        async with await aio.connect(database, pool_size=1, application_name="headwater cli") as log:
            return await send_test(log, name, allowed=allowed, cloud_events_source=source)

    tested = asyncio.run(send())
    if as_json:
        output.emit(tested)
    else:
        output.print_fields(tested)
    if not tested.accepted:
        raise WebhookTestFailed(
            f"the receiver of webhook {name} did not accept the test event: {tested.error or tested.status}"
        )


@app.command(
    epilog=examples(
        "headwater webhook deliver", "headwater webhook deliver --allow-network 10.0.0.0/8 --grace-seconds 5"
    )
)
def deliver(
    context: typer.Context,
    allow_network: AllowNetwork = None,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that requests in progress have to finish after Ctrl-C or SIGTERM.")
    ] = 20.0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Deliver the events of all active webhooks until Ctrl-C or SIGTERM.

    Several processes on several machines share the work. They pick up new and changed webhooks automatically.
    """
    with require_extras("webhooks"):
        from headwater.webhooks.addresses import networks
        from headwater.webhooks.deliver import dispatching
    allowed = networks(allow_network or ())
    found = session(context)
    source = found.settings.cloud_events_source
    database = found.dsn(dsn)
    with translate_errors():
        connect(database).close()

    async def run() -> None:
        stop = stop_on_signals()
        log = await aio.connect(database, pool_size=found.settings.pool_size, application_name="headwater webhooks")
        async with (
            log,
            dispatching(log, allowed=allowed, grace_seconds=grace_seconds, cloud_events_source=source),
        ):
            if as_json:
                output.emit({"delivering": True})
            else:
                output.print_status("delivering webhooks; press Ctrl-C to stop")
            await stop.wait()

    asyncio.run(run())
    if as_json:
        output.emit({"stopped": True})
    else:
        output.print_status("stopped; unanswered events were returned to their queues")


def _document(webhook: Webhook) -> dict[str, Any]:
    """A webhook as a JSON object, without its secrets."""
    return {name: value for name, value in output.to_json_value(webhook).items() if name != "secrets"}


def _progress(queue: QueueOverview | None) -> tuple[Any, ...]:
    if queue is None:
        return ("-",) * 5
    return (
        output.format_count(queue.ready, queue.ready_is_more),
        queue.processing,
        queue.retrying,
        queue.dead,
        queue.done,
    )
