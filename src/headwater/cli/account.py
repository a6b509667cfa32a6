"""`headwater account`: who may come in by the doors that listen, and what they may do there."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Annotated, Any

import typer

from headwater.access import permissions as access_permissions
from headwater.access.permissions import Permission
from headwater.calls import access as calls
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, duration, examples
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere
from headwater.errors import InvalidRequest

app = typer.Typer(no_args_is_help=True, help="Who may come in by the doors that listen, and what they may do there.")

keys = typer.Typer(no_args_is_help=True, help="Keys with which programs come in as an account, by HTTP and gRPC.")
app.add_typer(keys, name="key")

Name = Annotated[str, typer.Argument(metavar="ACCOUNT", help="The account's name; * is everybody.", show_default=False)]
Action = Annotated[str, typer.Argument(metavar="ACTION", help=f"One of {', '.join(access_permissions.ACTIONS)}.")]
Kind = Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(access_permissions.KINDS)}.")]
Of = Annotated[str, typer.Argument(metavar="[NAME]", help="Of what; a* is all that begin with a, * is all.")]


@app.command(epilog=examples("headwater account create shop", "headwater account create root --administrator"))
def create(
    context: typer.Context,
    name: Name,
    password: Annotated[
        str, typer.Option(prompt=True, hide_input=True, confirmation_prompt=True, help="Asked for if not given.")
    ],
    administrator: Annotated[
        bool | None, typer.Option("--administrator/--no-administrator", help="May do everything.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Make an account, or give one that there is a new password."""
    if name == access_permissions.EVERYBODY:
        raise InvalidRequest("* stands for everybody and is no account")
    if not password:
        raise InvalidRequest("a password has at least one character")
    kept = access_permissions.verifiers(password, os.urandom(16))
    with session(context).log(dsn) as log, acting(log, "account.create", name, {"administrator": administrator}) as log:
        log.run(calls.set_account(name, kept, administrator=administrator))
    _said({"account": name}, f"account {name} is there", as_json=as_json)


@app.command(epilog=examples("headwater account delete shop"))
def delete(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Delete an account and what it was allowed to do."""
    with session(context).log(dsn) as log, acting(log, "account.delete", name) as log:
        if not log.run(calls.delete_account(name)):
            raise NotThere(f"there is no account {name}", hint="See headwater account list.")
    _said({"deleted": name}, f"account {name} is gone", as_json=as_json)


@app.command(
    epilog=examples(
        "headwater account allow shop write topic orders", "headwater account allow shop read group 'shop-*'"
    )
)
def allow(
    context: typer.Context,
    name: Name,
    action: Action,
    kind: Kind,
    of: Of = "*",
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Allow an account to do something. What nobody allowed is denied."""
    permission = _permission(name, action, kind, of)
    with session(context).log(dsn) as log, acting(log, "account.allow", name, permission._asdict()) as log:
        log.run(calls.allow(permission))
    _said({"allowed": permission._asdict()}, f"{name} may {action} {kind} {of}", as_json=as_json)


@app.command(epilog=examples("headwater account disallow shop write topic orders"))
def disallow(
    context: typer.Context,
    name: Name,
    action: Action,
    kind: Kind,
    of: Of = "*",
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Take back what was allowed."""
    permission = _permission(name, action, kind, of)
    with session(context).log(dsn) as log, acting(log, "account.disallow", name, permission._asdict()) as log:
        if not log.run(calls.disallow(permission)):
            raise NotThere("that was not allowed", hint="See headwater account list.")
    _said({"disallowed": permission._asdict()}, f"{name} may no longer {action} {kind} {of}", as_json=as_json)


@app.command("list", epilog=examples("headwater account list"))
def list_accounts(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show accounts and what they may do."""
    with session(context).log(dsn) as log:
        accounts = log.run(calls.accounts())
        permissions = log.run(calls.permissions())
    if as_json:
        output.emit(
            {
                "accounts": [{"name": name, "administrator": administrator} for name, administrator in accounts],
                "permissions": [permission._asdict() for permission in permissions],
            }
        )
        return
    rows = [(name, "everything", "", "") for name, administrator in accounts if administrator]
    rows += [(p.account, p.action, p.kind, p.name + "*" * p.prefix) for p in permissions]
    held = {row[0] for row in rows}
    rows += [(name, "nothing", "", "") for name, _ in accounts if name not in held]
    output.table(("account", "may", "of", "name"), sorted(rows))


@keys.command(
    "create",
    epilog=examples(
        "headwater account key create shop", "headwater account key create shop --label ci --expires-in 90d"
    ),
)
def create_key(
    context: typer.Context,
    name: Name,
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    expires_in: Annotated[
        timedelta | None,
        typer.Option(parser=duration, metavar="DURATION", help="How long it is good, as 90d. Default: until deleted."),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Make a key of an account. It is shown this once; only its hash is kept."""
    key = access_permissions.key_of(os.urandom(32))
    hashed = access_permissions.key_hash(key)
    detail: dict[str, Any] = {"hash": hashed.hex()[:16], "label": label, "expires_in": expires_in}
    with session(context).log(dsn) as log, acting(log, "key.create", name, detail) as log:
        log.run(calls.create_api_key(hashed, name, label=label, expires_in=expires_in))
    _said({"key": key, "hash": hashed.hex()}, key, as_json=as_json)


@keys.command("list", epilog=examples("headwater account key list", "headwater account key list shop"))
def list_keys(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[ACCOUNT]", help="Only those of this account.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show keys, as far as they are kept: their hashes."""
    with session(context).log(dsn) as log:
        found = log.run(calls.api_keys(name))
    if as_json:
        output.emit({"keys": [key._asdict() for key in found]})
        return
    rows = [(key.account, key.hash[:12], key.label, key.created_at, key.expires_at or "never") for key in found]
    output.table(("account", "hash", "label", "made", "ends"), rows)


@keys.command("delete", epilog=examples("headwater account key delete shop 1f2e3d4c5b6a"))
def delete_key(
    context: typer.Context,
    name: Name,
    hash: Annotated[str, typer.Argument(metavar="HASH", help="The first digits of its hash, 8 or more.")],
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Take a key back. Doors that have seen it lately forget it within seconds."""
    with session(context).log(dsn) as log, acting(log, "key.delete", name, {"hash": hash.lower()[:16]}) as log:
        if not log.run(calls.delete_api_key(name, hash.lower())):
            raise NotThere(f"{name} has no such key", hint=f"See headwater account key list {name}.")
    _said({"deleted": hash}, "the key is gone", as_json=as_json)


def _permission(account: str, action: str, kind: str, of: str) -> Permission:
    if action not in access_permissions.ACTIONS:
        raise typer.BadParameter(f"{action!r} is none of {', '.join(access_permissions.ACTIONS)}", param_hint="ACTION")
    if kind not in access_permissions.KINDS:
        raise typer.BadParameter(f"{kind!r} is none of {', '.join(access_permissions.KINDS)}", param_hint="KIND")
    prefix = of.endswith("*") and of != "*"
    return Permission(account, action, kind, of.removesuffix("*") if prefix else of, prefix)


def _said(told: dict[str, object], text: str, *, as_json: bool) -> None:
    if as_json:
        output.emit(told)
    else:
        output.say(text)
