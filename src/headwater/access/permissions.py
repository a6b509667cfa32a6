"""Accounts, permissions and API keys: one access model for every protocol. Pure.

An account may do only what a permission grants; administrators may do everything. There are no denials, so the order of
permissions does not matter. Any permission on a resource implies `describe` on it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from datetime import datetime
from typing import Final, NamedTuple

# The account name in a permission that applies to every account.
ALL_ACCOUNTS: Final = "*"
# Distinguishes API keys from passwords, for people and for secret scanners.
KEY_PREFIX: Final = "hw_"
ACTIONS: Final = ("read", "write", "create", "delete", "alter", "describe", "all")
KINDS: Final = ("topic", "consumer", "transaction", "log")
# The audit log. No server writes to it, changes it or deletes it on behalf of a client.
AUDIT_TOPIC: Final = "headwater.audit"


class Permission(NamedTuple):
    """Allows one action on one name, on all names with a prefix, or, for `*`, on all names."""

    account: str
    action: str
    kind: str
    name: str
    prefix: bool = False


class StoredApiKey(NamedTuple):
    """An API key of an account as it is stored: its hash, in hex."""

    account: str
    hash: str
    label: str
    created_at: datetime
    expires_at: datetime | None


def is_always_denied(action: str, kind: str, name: str) -> bool:
    """Whether the servers deny this to every account, including administrators."""
    return kind == "topic" and name == AUDIT_TOPIC and action in ("write", "alter", "delete")


class AccessPolicy:
    """The permissions of all accounts at one moment."""

    def __init__(self, administrators: Iterable[str], permissions: Iterable[Permission]) -> None:
        self._administrators = frozenset(administrators)
        self._exact: set[tuple[str, str, str, str]] = set()
        self._prefixes: dict[tuple[str, str, str], list[str]] = {}
        for account, action, kind, name, prefix in permissions:
            if prefix:
                self._prefixes.setdefault((account, action, kind), []).append(name)
            else:
                self._exact.add((account, action, kind, name))

    def allows(self, account: str, action: str, kind: str, name: str) -> bool:
        """Whether the account may do this. Any permission on a resource implies `describe`."""
        if account in self._administrators:
            return True
        actions = ACTIONS if action == "describe" else (action, "all")
        return any(self._grants(holder, one, kind, name) for holder in (account, ALL_ACCOUNTS) for one in actions)

    def _grants(self, account: str, action: str, kind: str, name: str) -> bool:
        return (
            (account, action, kind, name) in self._exact
            or (account, action, kind, "*") in self._exact
            or any(name.startswith(prefix) for prefix in self._prefixes.get((account, action, kind), ()))
        )


def encode_api_key(secret: bytes) -> str:
    """The API key for a secret of 32 random bytes."""
    return KEY_PREFIX + base64.urlsafe_b64encode(secret).decode().rstrip("=")


def hash_api_key(key: str) -> bytes:
    """The hash under which an API key is stored."""
    return hashlib.sha256(key.encode()).digest()
