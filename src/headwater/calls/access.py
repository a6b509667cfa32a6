"""Calls about accounts of the doors that listen, and what they may do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from headwater.access.permissions import ApiKey, Credential, Permission, Verifiers
from headwater.calls.call import Call, nothing, only_value
from headwater.calls.encoding import checked_text

_VERIFIERS = (
    "salt_256, iterations_256, stored_key_256, server_key_256, salt_512, iterations_512, stored_key_512, server_key_512"
)
_NO_CREDENTIAL = (None,) * 4


def _verifiers(row: Any) -> Verifiers:
    first, second = row[:4], row[4:8]
    return Verifiers(
        None if first[0] is None else Credential(*first), None if second[0] is None else Credential(*second)
    )


def set_account(name: str, verifiers: Verifiers, *, administrator: bool | None = None) -> Call[None]:
    """Make an account, or give it a new password. None leaves as it is whether it administers."""
    return Call(
        "select headwater.set_account(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            checked_text(name, "account name"),
            *(verifiers.sha_256 or _NO_CREDENTIAL),
            *(verifiers.sha_512 or _NO_CREDENTIAL),
            administrator,
        ),
        nothing,
    )


def set_credential(name: str, mechanism: str, credential: Credential | None) -> Call[bool]:
    """Give an account, which is made if missing, another password for one mechanism; None takes that away.

    False: there was none to take away.
    """
    return Call(
        "select headwater.set_credential(%s, %s, %s, %s, %s, %s)",
        (checked_text(name, "account name"), mechanism, *(credential or _NO_CREDENTIAL)),
        only_value,
    )


def account_is_free(name: str) -> Call[bool]:
    """Whether no account has the name, and nobody else can give it to one until the transaction ends."""
    return Call("select headwater.account_is_free(%s)", (checked_text(name, "account name"),), only_value)


def delete_account(name: str) -> Call[bool]:
    return Call("select headwater.delete_account(%s)", (checked_text(name, "account name"),), only_value)


def find_account(name: str) -> Call[Verifiers | None]:
    return Call(
        f"select {_VERIFIERS} from headwater.account where name = %s",
        (checked_text(name, "account name"),),
        lambda rows: _verifiers(rows[0]) if rows else None,
    )


def accounts() -> Call[list[tuple[str, bool]]]:
    """The names of all accounts, and whether each administers."""
    return Call(
        "select name, administrator from headwater.account order by name",
        (),
        lambda rows: [(name, administrator) for name, administrator in rows],
    )


def credentials() -> Call[dict[str, Verifiers]]:
    """What is kept of the passwords of all accounts, by name."""
    return Call(
        f"select {_VERIFIERS}, name from headwater.account order by name",
        (),
        lambda rows: {row[8]: _verifiers(row) for row in rows},
    )


def account_times() -> Call[dict[str, datetime]]:
    """When each account was made, by its name."""
    return Call("select name, created_at from headwater.account order by name", (), lambda rows: dict(rows))


def permissions() -> Call[list[Permission]]:
    return Call(
        "select account, action, kind, name, prefix from headwater.permission order by account, kind, name, action",
        (),
        lambda rows: [Permission(*row) for row in rows],
    )


def allow(permission: Permission) -> Call[None]:
    return Call("select headwater.allow(%s, %s, %s, %s, %s)", tuple(permission), nothing)


def disallow(permission: Permission) -> Call[bool]:
    return Call("select headwater.disallow(%s, %s, %s, %s, %s)", tuple(permission), only_value)


def create_api_key(
    hash: bytes, account: str, *, label: str = "", expires_in: timedelta | None = None, session: bool = False
) -> Call[None]:
    """Keep a key of an account, by its hash. Of sessions, the oldest make room."""
    return Call(
        "select headwater.create_api_key(%s, %s, %s, %s, %s)",
        (hash, checked_text(account, "account name"), checked_text(label, "label"), expires_in, session),
        nothing,
    )


def living_keys(hashes: Sequence[bytes]) -> Call[frozenset[bytes]]:
    """Which of these keys are still good."""
    return Call(
        "select k.hash from headwater.api_key k where k.hash = any (%s::bytea[]) "
        "and (k.expires_at is null or k.expires_at > clock_timestamp())",
        (list(hashes),),
        lambda rows: frozenset(bytes(hashed) for (hashed,) in rows),
    )


def account_of_key(hash: bytes) -> Call[str | None]:
    """Whose key has this hash; None: nobody's."""
    return Call("select headwater.account_of_key(%s)", (hash,), only_value)


def delete_api_key(account: str, hash_prefix: str) -> Call[int]:
    """Take back the keys of an account whose hash begins so, in hex. How many there were."""
    return Call(
        "select headwater.delete_api_key(%s, %s)", (checked_text(account, "account name"), hash_prefix), only_value
    )


def api_keys(account: str | None = None) -> Call[list[ApiKey]]:
    """Keys of an account, or of all, without sessions."""
    return Call(
        "select account, encode(hash, 'hex'), label, created_at, expires_at from headwater.api_key"
        " where not session and (%s::text is null or account = %s) order by account, created_at",
        (account, account),
        lambda rows: [ApiKey(*row) for row in rows],
    )
