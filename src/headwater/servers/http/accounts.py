"""Account routes: sessions, accounts, permissions, API keys."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from fastapi import Path, Query, Request
from starlette.responses import Response

from headwater.access import permissions as access_permissions
from headwater.access import scram
from headwater.access.permissions import Permission
from headwater.calls import access as calls
from headwater.errors import InvalidRequest
from headwater.servers.authentication import AccountExists, NotAuthenticated
from headwater.servers.http import responses
from headwater.servers.http.authorization import checked_in_route, principal_of, requires
from headwater.servers.http.dependencies import context_of, json_response, problems, router
from headwater.servers.http.errors import NotFound
from headwater.servers.http.middleware import SESSION_COOKIE, session_cookie, session_of
from headwater.servers.http.requests import (
    AccountCreate,
    AccountUpdate,
    Action,
    ApiKeyCreate,
    Kind,
    PermissionCreate,
    SignInRequest,
    seconds,
)

routes = router("accounts")

Account = Annotated[
    str, Path(min_length=1, max_length=200, description="the account's name; * stands for every account")
]


@routes.get(
    "/v1/me", dependencies=[checked_in_route("none")], response_model=responses.CurrentPrincipal, responses=problems()
)
async def me(request: Request) -> Response:
    """Show the principal of this request and its permissions."""
    principal, context = principal_of(request), context_of(request)
    if not context.options.authenticate:
        return json_response({"account": None, "administrator": True, "authenticated": False, "permissions": []})
    accounts = await _accounts(request)
    given = [
        one._asdict()
        for one in await context.log.run(calls.permissions())
        if one.account in (principal.account, access_permissions.ALL_ACCOUNTS)
    ]
    administrator = accounts.get(principal.account or "", False)
    return json_response(
        {"account": principal.account, "administrator": administrator, "authenticated": True, "permissions": given}
    )


@routes.post(
    "/v1/sessions",
    status_code=201,
    dependencies=[checked_in_route("none (the body contains an account name and password)")],
    response_model=responses.CurrentPrincipal,
    responses=problems(),
)
async def sign_in(request: Request, body: SignInRequest) -> Response:
    """Sign in: open a session for a browser, with a cookie."""
    context = context_of(request)
    address = request.client.host if request.client else "unknown"
    principal = await context.authenticator.by_password(body.name, body.password, address=address)
    key = await context.authenticator.open_session(principal)
    response = json_response(
        {"account": principal.account, "administrator": False, "authenticated": key is not None, "permissions": []},
        status=201,
    )
    if key is not None:
        response.headers["set-cookie"] = session_cookie(key, secure=request.url.scheme == "https")
    return response


@routes.delete(
    "/v1/sessions",
    dependencies=[checked_in_route("none (a session)")],
    response_model=responses.DeleteConfirmation,
    responses=problems(),
)
async def sign_out(request: Request) -> Response:
    """Sign out: end the session of this request."""
    context = context_of(request)
    key = session_of(dict(request.scope["headers"]))
    if key is None and context.options.authenticate:
        raise NotAuthenticated("the request has no session")
    if key is not None and context.options.authenticate:
        principal = await context.authenticator.by_key(key)
        call = calls.delete_api_key(principal.account or "", access_permissions.hash_api_key(key).hex())
        await context.log.run(call)
        context.authenticator.forget(access_permissions.hash_api_key(key).hex())
    response = json_response({"deleted": key is not None})
    response.delete_cookie(SESSION_COOKIE, path="/")
    return response


@routes.get(
    "/v1/accounts", dependencies=[requires("describe", "log")], response_model=responses.Accounts, responses=problems()
)
async def list_accounts(request: Request) -> Response:
    """List the accounts and their permissions."""
    log = context_of(request).log
    accounts = await log.run(calls.accounts())
    permissions = await log.run(calls.permissions())
    return json_response(
        {
            "accounts": [{"name": name, "administrator": administrator} for name, administrator in accounts],
            "permissions": [one._asdict() for one in permissions],
        }
    )


@routes.post(
    "/v1/accounts",
    status_code=201,
    dependencies=[requires("alter", "log")],
    response_model=responses.Account,
    responses=problems(409),
)
async def create_account(request: Request, body: AccountCreate) -> Response:
    """Create an account. An existing one is not changed (409)."""
    log = context_of(request).log
    _reject_wildcard(body.name)
    stored = await asyncio.to_thread(scram.verifiers, body.password, os.urandom(16))
    detail = {"administrator": body.administrator}
    async with log.audited(principal_of(request).account, "account.create", body.name, detail) as connection:
        if not await log.run(calls.account_is_free(body.name), connection=connection):
            raise AccountExists(f"account {body.name} already exists", hint="Use PATCH to change its password.")
        call = calls.set_account(body.name, stored, administrator=body.administrator)
        await log.run(call, connection=connection)
    await _refresh(request)
    return json_response({"name": body.name, "administrator": body.administrator}, status=201)


@routes.patch(
    "/v1/accounts/{name}",
    dependencies=[requires("alter", "log")],
    response_model=responses.Account,
    responses=problems(404),
)
async def change_account(request: Request, name: Account, body: AccountUpdate) -> Response:
    """Change the password of an account, or whether it is an administrator. Its sessions end."""
    log = context_of(request).log
    stored = await log.run(calls.find_account(name))
    if stored is None:
        raise _no_account(name)
    if body.password is not None:
        stored = await asyncio.to_thread(scram.verifiers, body.password, os.urandom(16))
    detail = {"password": "changed"} if body.password is not None else {}
    async with log.audited(
        principal_of(request).account, "account.alter", name, {**detail, **body.model_dump(include={"administrator"})}
    ) as connection:
        await log.run(calls.set_account(name, stored, administrator=body.administrator), connection=connection)
    await _refresh(request)
    return json_response({"name": name, "administrator": (await _accounts(request)).get(name, False)})


@routes.delete(
    "/v1/accounts/{name}",
    dependencies=[requires("alter", "log")],
    response_model=responses.DeleteConfirmation,
    responses=problems(404),
)
async def delete_account(request: Request, name: Account) -> Response:
    """Delete an account with its permissions, API keys and sessions."""
    log = context_of(request).log
    async with log.audited(principal_of(request).account, "account.delete", name, {}) as connection:
        if not await log.run(calls.delete_account(name), connection=connection):
            raise _no_account(name)
    await _refresh(request)
    return json_response({"deleted": True})


@routes.post(
    "/v1/accounts/{name}/permissions",
    status_code=201,
    dependencies=[requires("alter", "log")],
    response_model=responses.Permission,
    responses=problems(404),
)
async def allow(request: Request, name: Account, body: PermissionCreate) -> Response:
    """Grant a permission to an account. Everything that is not granted is denied."""
    log = context_of(request).log
    if name != access_permissions.ALL_ACCOUNTS and await log.run(calls.find_account(name)) is None:
        raise _no_account(name)
    permission = Permission(name, body.action, body.kind, body.name, body.prefix)
    async with log.audited(principal_of(request).account, "account.allow", name, body.model_dump()) as connection:
        await log.run(calls.allow(permission), connection=connection)
    await _refresh(request)
    return json_response(permission._asdict(), status=201)


@routes.delete(
    "/v1/accounts/{name}/permissions",
    dependencies=[requires("alter", "log")],
    response_model=responses.DeleteConfirmation,
    responses=problems(404),
)
async def disallow(
    request: Request,
    name: Account,
    action: Action,
    kind: Kind,
    of: Annotated[str, Query(alias="name", min_length=1, max_length=1000)] = "*",
    prefix: bool = False,
) -> Response:
    """Revoke a permission."""
    log = context_of(request).log
    permission = Permission(name, action, kind, of, prefix)
    async with log.audited(principal_of(request).account, "account.disallow", name, permission._asdict()) as connection:
        if not await log.run(calls.disallow(permission), connection=connection):
            raise NotFound("the account does not have this permission", hint="See GET /v1/accounts.")
    await _refresh(request)
    return json_response({"deleted": True})


@routes.get(
    "/v1/accounts/{name}/keys",
    dependencies=[requires("describe", "log")],
    response_model=responses.ApiKeys,
    responses=problems(404),
)
async def list_keys(request: Request, name: Account) -> Response:
    """List the API keys of an account, by their hashes."""
    found = await context_of(request).log.run(calls.api_keys(name))
    return json_response({"keys": [{k: v for k, v in one._asdict().items() if k != "account"} for one in found]})


@routes.post(
    "/v1/accounts/{name}/keys",
    status_code=201,
    dependencies=[requires("alter", "log")],
    response_model=responses.NewApiKey,
    responses=problems(404),
)
async def create_key(request: Request, name: Account, body: ApiKeyCreate) -> Response:
    """Create an API key. The key is shown only in this response."""
    log = context_of(request).log
    if await log.run(calls.find_account(name)) is None:
        raise _no_account(name)
    key = access_permissions.encode_api_key(os.urandom(32))
    hashed = access_permissions.hash_api_key(key)
    detail: dict[str, Any] = {"hash": hashed.hex()[:16], "label": body.label}
    async with log.audited(principal_of(request).account, "key.create", name, detail) as connection:
        call = calls.create_api_key(hashed, name, label=body.label, expires_in=seconds(body.expires_in_seconds))
        await log.run(call, connection=connection)
    return json_response({"key": key, "hash": hashed.hex()}, status=201)


@routes.delete(
    "/v1/accounts/{name}/keys/{hash_prefix}",
    dependencies=[requires("alter", "log")],
    response_model=responses.DeleteConfirmation,
    responses=problems(404),
)
async def delete_key(
    request: Request, name: Account, hash_prefix: Annotated[str, Path(pattern="^[0-9a-f]{8,64}$")]
) -> Response:
    """Revoke an API key, by the beginning of its hash."""
    log = context_of(request).log
    async with log.audited(principal_of(request).account, "key.delete", name, {"hash": hash_prefix[:16]}) as connection:
        if not await log.run(calls.delete_api_key(name, hash_prefix), connection=connection):
            raise NotFound("no API key has this hash", hint="See GET /v1/accounts/{name}/keys.")
    context_of(request).authenticator.forget(hash_prefix)
    return json_response({"deleted": True})


async def _accounts(request: Request) -> dict[str, bool]:
    """Every account, and whether it is an administrator."""
    found = await context_of(request).log.run(calls.accounts())
    return dict(found)


async def _refresh(request: Request) -> None:
    """Apply a change at once in this process; other processes apply it within seconds."""
    context = context_of(request)
    if context.options.authenticate:
        await context.authenticator.refresh()


def _reject_wildcard(name: str) -> None:
    if name == access_permissions.ALL_ACCOUNTS:
        raise InvalidRequest("* is not a valid account name: it stands for every account")


def _no_account(name: str) -> NotFound:
    return NotFound(f"account {name} does not exist", hint="See GET /v1/accounts.", detail={"account": name})
