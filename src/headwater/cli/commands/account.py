"""`headwater account`: accounts of the HTTP, Kafka and gRPC servers, their permissions and API keys."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Annotated, Any

import typer

from headwater.access import permissions as access_permissions
from headwater.access import scram
from headwater.access.permissions import Permission
from headwater.calls import access as calls
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Dsn, Json, examples, parse_duration
from headwater.errors import InvalidRequest

app = typer.Typer(
    no_args_is_help=True, help="Manage accounts, permissions and API keys of the HTTP, Kafka and gRPC servers."
)

keys = typer.Typer(no_args_is_help=True, help="Manage API keys, with which programs authenticate to HTTP and gRPC.")
app.add_typer(keys, name="key")

Name = Annotated[
    str, typer.Argument(metavar="ACCOUNT", help="Name of the account; * means every account.", show_default=False)
]
Action = Annotated[str, typer.Argument(metavar="ACTION", help=f"One of {', '.join(access_permissions.ACTIONS)}.")]
Kind = Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(access_permissions.KINDS)}.")]
Of = Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the resource; a* matches a prefix, * matches all.")]


@app.command(epilog=examples("headwater account create shop", "headwater account create root --administrator"))
def create(
    context: typer.Context,
    name: Name,
    password: Annotated[
        str,
        typer.Option(
            prompt=True, hide_input=True, confirmation_prompt=True, help="Password. Prompted for if not given."
        ),
    ],
    administrator: Annotated[
        bool | None, typer.Option("--administrator/--no-administrator", help="Grant all permissions.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Create an account, or set a new password for an existing one."""
    if name == access_permissions.ALL_ACCOUNTS:
        raise InvalidRequest("invalid account name *: it stands for every account")
    if not password:
        raise InvalidRequest("the password is empty: expected at least one character")
    credentials = scram.verifiers(password, os.urandom(16))
    with session(context).log(dsn) as log, audit(log, "account.create", name, {"administrator": administrator}) as log:
        log.run(calls.set_account(name, credentials, administrator=administrator))
    output.print_result({"account": name}, f"created account {name}", as_json=as_json)


@app.command(epilog=examples("headwater account delete shop"))
def delete(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Delete an account with its permissions and API keys."""
    with session(context).log(dsn) as log, audit(log, "account.delete", name) as log:
        if not log.run(calls.delete_account(name)):
            raise NotFound(f"account {name} does not exist", hint="See headwater account list.")
    output.print_result({"deleted": name}, f"deleted account {name}", as_json=as_json)


@app.command(
    epilog=examples(
        "headwater account allow shop write topic orders", "headwater account allow shop read consumer 'shop-*'"
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
    """Grant a permission to an account. Actions without a permission are denied."""
    permission = _permission(name, action, kind, of)
    with session(context).log(dsn) as log, audit(log, "account.allow", name, permission._asdict()) as log:
        log.run(calls.allow(permission))
    output.print_result(
        {"allowed": permission._asdict()}, f"granted {action} on {kind} {of} to {name}", as_json=as_json
    )


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
    """Revoke a permission."""
    permission = _permission(name, action, kind, of)
    with session(context).log(dsn) as log, audit(log, "account.disallow", name, permission._asdict()) as log:
        if not log.run(calls.disallow(permission)):
            raise NotFound(f"account {name} does not have this permission", hint="See headwater account list.")
    output.print_result(
        {"disallowed": permission._asdict()}, f"revoked {action} on {kind} {of} from {name}", as_json=as_json
    )


@app.command("list", epilog=examples("headwater account list"))
def list_accounts(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List accounts and their permissions."""
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
    listed = {row[0] for row in rows}
    rows += [(name, "nothing", "", "") for name, _ in accounts if name not in listed]
    output.print_table(("account", "action", "kind", "name"), sorted(rows))


@keys.command(
    "create",
    epilog=examples(
        "headwater account key create shop", "headwater account key create shop --label ci --expires-in 90d"
    ),
)
def create_key(
    context: typer.Context,
    name: Name,
    label: Annotated[str, typer.Option(help="A label that describes the purpose of the key.")] = "",
    expires_in: Annotated[
        timedelta | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Expire the key after this time, such as 90d. Default: never.",
        ),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Create an API key of an account. The key is printed only once; the database stores its hash."""
    key = access_permissions.encode_api_key(os.urandom(32))
    hashed = access_permissions.hash_api_key(key)
    detail: dict[str, Any] = {"hash": hashed.hex()[:16], "label": label, "expires_in": expires_in}
    with session(context).log(dsn) as log, audit(log, "key.create", name, detail) as log:
        log.run(calls.create_api_key(hashed, name, label=label, expires_in=expires_in))
    output.print_result({"key": key, "hash": hashed.hex()}, key, as_json=as_json)


@keys.command("list", epilog=examples("headwater account key list", "headwater account key list shop"))
def list_keys(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[ACCOUNT]", help="Only keys of this account.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List API keys by their hashes."""
    with session(context).log(dsn) as log:
        found = log.run(calls.api_keys(name))
    if as_json:
        output.emit({"keys": [key._asdict() for key in found]})
        return
    rows = [(key.account, key.hash[:12], key.label, key.created_at, key.expires_at or "never") for key in found]
    output.print_table(("account", "hash", "label", "created", "expires"), rows)


@keys.command("delete", epilog=examples("headwater account key delete shop 1f2e3d4c5b6a"))
def delete_key(
    context: typer.Context,
    name: Name,
    hash: Annotated[str, typer.Argument(metavar="HASH", help="The first digits of the key's hash, at least 8.")],
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete an API key. Running servers reject it within seconds."""
    with session(context).log(dsn) as log, audit(log, "key.delete", name, {"hash": hash.lower()[:16]}) as log:
        if not log.run(calls.delete_api_key(name, hash.lower())):
            raise NotFound(f"account {name} has no key with this hash", hint=f"See headwater account key list {name}.")
    output.print_result({"deleted": hash}, f"deleted key {hash} of account {name}", as_json=as_json)


def _permission(account: str, action: str, kind: str, of: str) -> Permission:
    if action not in access_permissions.ACTIONS:
        raise typer.BadParameter(
            f"invalid action {action!r}: expected one of {', '.join(access_permissions.ACTIONS)}", param_hint="ACTION"
        )
    if kind not in access_permissions.KINDS:
        raise typer.BadParameter(
            f"invalid kind {kind!r}: expected one of {', '.join(access_permissions.KINDS)}", param_hint="KIND"
        )
    prefix = of.endswith("*") and of != "*"
    return Permission(account, action, kind, of.removesuffix("*") if prefix else of, prefix)
