"""Who comes in by a door, and what they may do there: one model for every door that listens. Pure.

Passwords are never stored: an account has the verifiers of SCRAM, from which neither the password nor what a client
proves can be made. Whoever has none and no permission may do nothing; there are no denials, so order means nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable
from datetime import datetime
from typing import Final, NamedTuple

# As many as make a guess costly today, for the weaker of the two hashes.
ITERATIONS: Final = 600_000
EVERYBODY: Final = "*"
# Tells a key from a password, for people and for scanners of secrets.
KEY_PREFIX: Final = "hw_"
ACTIONS: Final = ("read", "write", "create", "delete", "alter", "describe", "all")
KINDS: Final = ("topic", "group", "transaction", "log")
# What was done, for good: by no door is it written to, changed or deleted.
AUDIT_TOPIC: Final = "headwater.audit"
MECHANISMS: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


class Credential(NamedTuple):
    """What one mechanism keeps of a password."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes


class Verifiers(NamedTuple):
    """What is kept of a password. None: that mechanism cannot be used."""

    sha_256: Credential | None
    sha_512: Credential | None

    def credential(self, mechanism: str) -> Credential | None:
        return self.sha_256 if mechanism == "SCRAM-SHA-256" else self.sha_512


class Permission(NamedTuple):
    """One thing that an account may do, to one name, to all that begin with it, or, for `*`, to all."""

    account: str
    action: str
    kind: str
    name: str
    prefix: bool = False


class ApiKey(NamedTuple):
    """A key with which a program comes in as an account, as far as it is kept: its hash, in hex."""

    account: str
    hash: str
    label: str
    created_at: datetime
    expires_at: datetime | None


def is_kept_from_all(action: str, kind: str, name: str) -> bool:
    """Whether nobody may do this by a door, not even an administrator."""
    return kind == "topic" and name == AUDIT_TOPIC and action in ("write", "alter", "delete")


class Access:
    """What all accounts may do, as of one moment."""

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
        """Whether the account may do this. Who may do anything at all to something may also look at it."""
        if account in self._administrators:
            return True
        actions = ACTIONS if action == "describe" else (action, "all")
        return any(self._given(holder, one, kind, name) for holder in (account, EVERYBODY) for one in actions)

    def _given(self, account: str, action: str, kind: str, name: str) -> bool:
        return (
            (account, action, kind, name) in self._exact
            or (account, action, kind, "*") in self._exact
            or any(name.startswith(prefix) for prefix in self._prefixes.get((account, action, kind), ()))
        )


def key_of(secret: bytes) -> str:
    """An API key, as its owner keeps it. The secret is random: 32 bytes."""
    return KEY_PREFIX + base64.urlsafe_b64encode(secret).decode().rstrip("=")


def key_hash(key: str) -> bytes:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode()).digest()


def verifiers(password: str, salt: bytes, iterations: int = ITERATIONS) -> Verifiers:
    """What is kept of a password; the salt is random, for each account its own."""
    return Verifiers(*(_of_password(algorithm, password, salt, iterations) for algorithm in MECHANISMS.values()))


def _of_password(algorithm: str, password: str, salt: bytes, iterations: int) -> Credential:
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), salt, iterations)
    return credential_of(algorithm, salted, salt, iterations)


def credential_of(algorithm: str, salted_password: bytes, salt: bytes, iterations: int) -> Credential:
    """What is kept, made from a password that was salted elsewhere."""
    client_key = hmac.digest(salted_password, b"Client Key", algorithm)
    stored_key = hashlib.new(algorithm, client_key).digest()
    return Credential(salt, iterations, stored_key, hmac.digest(salted_password, b"Server Key", algorithm))


def password_fits(password: str, kept: Verifiers) -> bool:
    """Whether this is the password. Takes as long for a wrong one."""
    for algorithm, known in zip(MECHANISMS.values(), kept, strict=True):
        if known is not None:
            found = _of_password(algorithm, password, known.salt, known.iterations)
            return hmac.compare_digest(found.stored_key, known.stored_key)
    return False


class AuthenticationFailed(Exception):
    """The client is not who it says, or does not speak the mechanism."""


class Scram:
    """The server's side of one SCRAM exchange: two messages of the client, two of ours."""

    def __init__(self, mechanism: str, nonce: str) -> None:
        self._algorithm = MECHANISMS[mechanism]
        self._nonce = nonce
        self._first_bare = ""
        self._server_first = ""
        self.account = ""

    def name_of(self, first: bytes) -> str:
        """The account that the client's first message is for."""
        try:
            text = first.decode()
            header, authorized, bare = text.split(",", 2)
            fields = dict(part.split("=", 1) for part in bare.split(","))
            name, client_nonce = fields["n"], fields["r"]
        except (UnicodeDecodeError, ValueError, KeyError):
            raise AuthenticationFailed("the first message is not SCRAM") from None
        if header not in ("n", "y") or authorized.startswith("a=") or not client_nonce or not name:
            raise AuthenticationFailed("channel binding and acting for others are not offered")
        self._first_bare = bare
        self._nonce = client_nonce + self._nonce
        self.account = name.replace("=2C", ",").replace("=3D", "=")
        return self.account

    def challenge(self, kept: Credential) -> bytes:
        """Our answer to it."""
        salt = base64.b64encode(kept.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={kept.iterations}"
        return self._server_first.encode()

    def finish(self, final: bytes, kept: Credential) -> bytes:
        """Our proof to the client, once it has given its own; or AuthenticationFailed."""
        stored_key, server_key = kept.stored_key, kept.server_key
        try:
            text = final.decode()
            without_proof, _, encoded = text.rpartition(",p=")
            fields = dict(part.split("=", 1) for part in without_proof.split(","))
            proof = base64.b64decode(encoded, validate=True)
            binding = base64.b64decode(fields["c"], validate=True)
        except (UnicodeDecodeError, ValueError, KeyError):
            raise AuthenticationFailed("the last message is not SCRAM") from None
        if fields.get("r") != self._nonce or binding not in (b"n,,", b"y,,") or len(proof) != len(stored_key):
            raise AuthenticationFailed("the last message does not belong to the first")
        signed = f"{self._first_bare},{self._server_first},{without_proof}".encode()
        signature = hmac.digest(stored_key, signed, self._algorithm)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        if not hmac.compare_digest(hashlib.new(self._algorithm, client_key).digest(), stored_key):
            raise AuthenticationFailed("the name or the password is wrong")
        return b"v=" + base64.b64encode(hmac.digest(server_key, signed, self._algorithm))


def stranger(name: str, secret: bytes) -> Verifiers:
    """Verifiers for a name that nobody has: always the same, so that a challenge does not tell who exists."""
    salt = hmac.digest(secret, name.encode(), "sha256")[:16]
    nothing = bytes(32)
    return Verifiers(
        Credential(salt, ITERATIONS, nothing, nothing), Credential(salt, ITERATIONS, nothing * 2, nothing * 2)
    )
