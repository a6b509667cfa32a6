"""Routes of who may come in: sessions, accounts, their rights and keys."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from fastapi import Path, Query, Request
from starlette.responses import Response

from headwater.access import permissions as access_permissions
from headwater.access.permissions import Permission
from headwater.calls import access as calls
from headwater.errors import InvalidRequest
from headwater.servers.authentication import AccountExists, NotAuthenticated
from headwater.servers.http import responses
from headwater.servers.http.authorization import caller_of, decides, needs
from headwater.servers.http.dependencies import answer, problems, router, served
from headwater.servers.http.errors import NotThere
from headwater.servers.http.middleware import SESSION_COOKIE, session_cookie, session_of
from headwater.servers.http.requests import (
    AccountChanges,
    AccountToCreate,
    Action,
    KeyToMake,
    Kind,
    PermissionToGive,
    SignIn,
    seconds,
)

routes = router("accounts")

Account = Annotated[str, Path(min_length=1, max_length=200, description="the account's name; * is everybody")]


@routes.get("/v1/me", dependencies=[decides("none")], response_model=responses.Me, responses=problems())
async def me(request: Request) -> Response:
    """Who is asking, and what they may do."""
    caller, here = caller_of(request), served(request)
    if not here.opening.authenticate:
        return answer({"account": None, "administrator": True, "authenticated": False, "permissions": []})
    accounts = await _accounts(request)
    given = [
        one._asdict()
        for one in await here.log.run(calls.permissions(), patience_seconds=5)
        if one.account in (caller.account, access_permissions.EVERYBODY)
    ]
    administrator = accounts.get(caller.account or "", False)
    return answer(
        {"account": caller.account, "administrator": administrator, "authenticated": True, "permissions": given}
    )


@routes.post(
    "/v1/sessions",
    status_code=201,
    dependencies=[decides("none: the name and password of an account")],
    response_model=responses.Me,
    responses=problems(),
)
async def sign_in(request: Request, body: SignIn) -> Response:
    """Get a session for a browser, as a cookie."""
    here = served(request)
    address = request.client.host if request.client else "nobody"
    caller = await here.callers.by_password(body.name, body.password, address=address)
    key = await here.callers.open_session(caller)
    response = answer(
        {"account": caller.account, "administrator": False, "authenticated": key is not None, "permissions": []},
        status=201,
    )
    if key is not None:
        response.headers["set-cookie"] = session_cookie(key, secure=request.url.scheme == "https")
    return response


@routes.delete(
    "/v1/sessions",
    dependencies=[decides("none: the session itself")],
    response_model=responses.Gone,
    responses=problems(),
)
async def sign_out(request: Request) -> Response:
    """End the session that the request came with."""
    here = served(request)
    key = session_of(dict(request.scope["headers"]))
    if key is None and here.opening.authenticate:
        raise NotAuthenticated("there is no session to end")
    if key is not None and here.opening.authenticate:
        caller = await here.callers.by_key(key)
        call = calls.delete_api_key(caller.account or "", access_permissions.key_hash(key).hex())
        await here.log.run(call, patience_seconds=5)
        here.callers.forget(access_permissions.key_hash(key).hex())
    response = answer({"deleted": key is not None})
    response.delete_cookie(SESSION_COOKIE, path="/")
    return response


@routes.get(
    "/v1/accounts", dependencies=[needs("describe", "log")], response_model=responses.Accounts, responses=problems()
)
async def list_accounts(request: Request) -> Response:
    """Accounts and what they may do."""
    log = served(request).log
    accounts = await log.run(calls.accounts(), patience_seconds=5)
    permissions = await log.run(calls.permissions(), patience_seconds=5)
    return answer(
        {
            "accounts": [{"name": name, "administrator": administrator} for name, administrator in accounts],
            "permissions": [one._asdict() for one in permissions],
        }
    )


@routes.post(
    "/v1/accounts",
    status_code=201,
    dependencies=[needs("alter", "log")],
    response_model=responses.Account,
    responses=problems(409),
)
async def create_account(request: Request, body: AccountToCreate) -> Response:
    """Make an account. One that is there is left as it is."""
    log = served(request).log
    _refuse_everybody(body.name)
    kept = await asyncio.to_thread(access_permissions.verifiers, body.password, os.urandom(16))
    detail = {"administrator": body.administrator}
    async with log.audited(caller_of(request).account, "account.create", body.name, detail) as connection:
        if not await log.run(calls.account_is_free(body.name), connection=connection):
            raise AccountExists(f"there is an account {body.name} already", hint="PATCH changes its password.")
        call = calls.set_account(body.name, kept, administrator=body.administrator)
        await log.run(call, connection=connection)
    await _refreshed(request)
    return answer({"name": body.name, "administrator": body.administrator}, status=201)


@routes.patch(
    "/v1/accounts/{name}",
    dependencies=[needs("alter", "log")],
    response_model=responses.Account,
    responses=problems(404),
)
async def change_account(request: Request, name: Account, body: AccountChanges) -> Response:
    """Give an account a new password, or say whether it administers. Its sessions end."""
    log = served(request).log
    kept = await log.run(calls.find_account(name), patience_seconds=5)
    if kept is None:
        raise _no_account(name)
    if body.password is not None:
        kept = await asyncio.to_thread(access_permissions.verifiers, body.password, os.urandom(16))
    detail = {"password": "changed"} if body.password is not None else {}
    async with log.audited(
        caller_of(request).account, "account.alter", name, {**detail, **body.model_dump(include={"administrator"})}
    ) as connection:
        await log.run(calls.set_account(name, kept, administrator=body.administrator), connection=connection)
    await _refreshed(request)
    return answer({"name": name, "administrator": (await _accounts(request)).get(name, False)})


@routes.delete(
    "/v1/accounts/{name}",
    dependencies=[needs("alter", "log")],
    response_model=responses.Gone,
    responses=problems(404),
)
async def delete_account(request: Request, name: Account) -> Response:
    """Delete an account with its rights, keys and sessions."""
    log = served(request).log
    async with log.audited(caller_of(request).account, "account.delete", name, {}) as connection:
        if not await log.run(calls.delete_account(name), connection=connection):
            raise _no_account(name)
    await _refreshed(request)
    return answer({"deleted": True})


@routes.post(
    "/v1/accounts/{name}/permissions",
    status_code=201,
    dependencies=[needs("alter", "log")],
    response_model=responses.Permission,
    responses=problems(404),
)
async def allow(request: Request, name: Account, body: PermissionToGive) -> Response:
    """Allow an account to do something. What nobody allowed is denied."""
    log = served(request).log
    if name != access_permissions.EVERYBODY and await log.run(calls.find_account(name), patience_seconds=5) is None:
        raise _no_account(name)
    permission = Permission(name, body.action, body.kind, body.name, body.prefix)
    async with log.audited(caller_of(request).account, "account.allow", name, body.model_dump()) as connection:
        await log.run(calls.allow(permission), connection=connection)
    await _refreshed(request)
    return answer(permission._asdict(), status=201)


@routes.delete(
    "/v1/accounts/{name}/permissions",
    dependencies=[needs("alter", "log")],
    response_model=responses.Gone,
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
    """Take back what was allowed."""
    log = served(request).log
    permission = Permission(name, action, kind, of, prefix)
    async with log.audited(caller_of(request).account, "account.disallow", name, permission._asdict()) as connection:
        if not await log.run(calls.disallow(permission), connection=connection):
            raise NotThere("that was not allowed", hint="See GET /v1/accounts.")
    await _refreshed(request)
    return answer({"deleted": True})


@routes.get(
    "/v1/accounts/{name}/keys",
    dependencies=[needs("describe", "log")],
    response_model=responses.Keys,
    responses=problems(404),
)
async def list_keys(request: Request, name: Account) -> Response:
    """The API keys of an account, as far as they are kept: their hashes."""
    found = await served(request).log.run(calls.api_keys(name), patience_seconds=5)
    return answer({"keys": [{k: v for k, v in one._asdict().items() if k != "account"} for one in found]})


@routes.post(
    "/v1/accounts/{name}/keys",
    status_code=201,
    dependencies=[needs("alter", "log")],
    response_model=responses.NewKey,
    responses=problems(404),
)
async def create_key(request: Request, name: Account, body: KeyToMake) -> Response:
    """Make an API key. It is shown this once."""
    log = served(request).log
    if await log.run(calls.find_account(name), patience_seconds=5) is None:
        raise _no_account(name)
    key = access_permissions.key_of(os.urandom(32))
    hashed = access_permissions.key_hash(key)
    detail: dict[str, Any] = {"hash": hashed.hex()[:16], "label": body.label}
    async with log.audited(caller_of(request).account, "key.create", name, detail) as connection:
        call = calls.create_api_key(hashed, name, label=body.label, expires_in=seconds(body.expires_in_seconds))
        await log.run(call, connection=connection)
    return answer({"key": key, "hash": hashed.hex()}, status=201)


@routes.delete(
    "/v1/accounts/{name}/keys/{hash_prefix}",
    dependencies=[needs("alter", "log")],
    response_model=responses.Gone,
    responses=problems(404),
)
async def delete_key(
    request: Request, name: Account, hash_prefix: Annotated[str, Path(pattern="^[0-9a-f]{8,64}$")]
) -> Response:
    """Take an API key back: the one whose hash begins so."""
    log = served(request).log
    async with log.audited(caller_of(request).account, "key.delete", name, {"hash": hash_prefix[:16]}) as connection:
        if not await log.run(calls.delete_api_key(name, hash_prefix), connection=connection):
            raise NotThere("there is no such key", hint="See its hash in GET /v1/accounts/{name}/keys.")
    served(request).callers.forget(hash_prefix)
    return answer({"deleted": True})


async def _accounts(request: Request) -> dict[str, bool]:
    """Every account, and whether it administers."""
    found = await served(request).log.run(calls.accounts(), patience_seconds=5)
    return dict(found)


async def _refreshed(request: Request) -> None:
    """What was changed here holds here at once; elsewhere within seconds."""
    here = served(request)
    if here.opening.authenticate:
        await here.callers.refresh()


def _refuse_everybody(name: str) -> None:
    if name == access_permissions.EVERYBODY:
        raise InvalidRequest("* stands for everybody and is no account")


def _no_account(name: str) -> NotThere:
    return NotThere(f"there is no account {name}", hint="See GET /v1/accounts.", detail={"account": name})
