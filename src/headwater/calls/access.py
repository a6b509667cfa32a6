"""Calls for accounts, permissions and API keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from headwater.access.permissions import Permission, StoredApiKey
from headwater.access.scram import ScramCredential, Verifiers
from headwater.calls.call import Call, nothing, only_value
from headwater.calls.encoding import checked_text

_VERIFIERS = (
    "salt_256, iterations_256, stored_key_256, server_key_256, salt_512, iterations_512, stored_key_512, server_key_512"
)
_NO_CREDENTIAL = (None,) * 4


def _verifiers(row: Any) -> Verifiers:
    first, second = row[:4], row[4:8]
    return Verifiers(
        None if first[0] is None else ScramCredential(*first), None if second[0] is None else ScramCredential(*second)
    )


def set_account(name: str, verifiers: Verifiers, *, administrator: bool | None = None) -> Call[None]:
    """Create an account, or set its password. `administrator` None leaves that unchanged."""
    return Call(
        "select headwater_internal.set_account(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            checked_text(name, "account name"),
            *(verifiers.sha_256 or _NO_CREDENTIAL),
            *(verifiers.sha_512 or _NO_CREDENTIAL),
            administrator,
        ),
        nothing,
    )


def set_credential(name: str, mechanism: str, credential: ScramCredential | None) -> Call[bool]:
    """Set the password of an account for one mechanism; None removes it. A missing account is created.

    False: there was no password to remove.
    """
    return Call(
        "select headwater_internal.set_credential(%s, %s, %s, %s, %s, %s)",
        (checked_text(name, "account name"), mechanism, *(credential or _NO_CREDENTIAL)),
        only_value,
    )


def account_is_free(name: str) -> Call[bool]:
    """Whether no account has the name. Until the transaction ends, no other transaction can create one."""
    return Call("select headwater_internal.account_is_free(%s)", (checked_text(name, "account name"),), only_value)


def delete_account(name: str) -> Call[bool]:
    return Call("select headwater_internal.delete_account(%s)", (checked_text(name, "account name"),), only_value)


def find_account(name: str) -> Call[Verifiers | None]:
    return Call(
        f"select {_VERIFIERS} from headwater_internal.account where name = %s",
        (checked_text(name, "account name"),),
        lambda rows: _verifiers(rows[0]) if rows else None,
    )


def accounts() -> Call[list[tuple[str, bool]]]:
    """All accounts: their name, and whether they are administrators."""
    return Call(
        "select name, administrator from headwater_internal.account order by name",
        (),
        lambda rows: [(name, administrator) for name, administrator in rows],
    )


def credentials() -> Call[dict[str, Verifiers]]:
    """The password verifiers of all accounts, by name."""
    return Call(
        f"select {_VERIFIERS}, name from headwater_internal.account order by name",
        (),
        lambda rows: {row[8]: _verifiers(row) for row in rows},
    )


def account_times() -> Call[dict[str, datetime]]:
    """The creation time of each account, by name."""
    return Call("select name, created_at from headwater_internal.account order by name", (), lambda rows: dict(rows))


def permissions() -> Call[list[Permission]]:
    return Call(
        "select account, action, kind, name, prefix from headwater_internal.permission order by account, kind, "
        "name, action",
        (),
        lambda rows: [Permission(*row) for row in rows],
    )


def allow(permission: Permission) -> Call[None]:
    return Call("select headwater_internal.allow(%s, %s, %s, %s, %s)", tuple(permission), nothing)


def disallow(permission: Permission) -> Call[bool]:
    return Call("select headwater_internal.disallow(%s, %s, %s, %s, %s)", tuple(permission), only_value)


def create_api_key(
    hash: bytes, account: str, *, label: str = "", expires_in: timedelta | None = None, session: bool = False
) -> Call[None]:
    """Store an API key of an account, by its hash. Above a limit, the oldest sessions are deleted."""
    return Call(
        "select headwater_internal.create_api_key(%s, %s, %s, %s, %s)",
        (hash, checked_text(account, "account name"), checked_text(label, "label"), expires_in, session),
        nothing,
    )


def valid_keys(hashes: Sequence[bytes]) -> Call[frozenset[bytes]]:
    """Which of these keys exist and have not expired."""
    return Call(
        "select k.hash from headwater_internal.api_key k where k.hash = any (%s::bytea[]) "
        "and (k.expires_at is null or k.expires_at > clock_timestamp())",
        (list(hashes),),
        lambda rows: frozenset(bytes(hashed) for (hashed,) in rows),
    )


def account_of_key(hash: bytes) -> Call[str | None]:
    """The account of the key with this hash; None if there is none."""
    return Call("select headwater_internal.account_of_key(%s)", (hash,), only_value)


def delete_api_key(account: str, hash_prefix: str) -> Call[int]:
    """Delete the keys of an account whose hash has this prefix, in hex. Returns their number."""
    return Call(
        "select headwater_internal.delete_api_key(%s, %s)",
        (checked_text(account, "account name"), hash_prefix),
        only_value,
    )


def api_keys(account: str | None = None) -> Call[list[StoredApiKey]]:
    """The API keys of an account, or of all accounts, without sessions."""
    return Call(
        "select account, encode(hash, 'hex'), label, created_at, expires_at from headwater_internal.api_key"
        " where not session and (%s::text is null or account = %s) order by account, created_at",
        (account, account),
        lambda rows: [StoredApiKey(*row) for row in rows],
    )
