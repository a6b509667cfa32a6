"""SCRAM (RFC 5802): password verifiers and the server side of an exchange. Pure.

Passwords are never stored. An account has SCRAM verifiers, from which neither the password nor a client's proof can be
computed. HTTP and gRPC check a password against them (`verify_password`); Kafka runs the exchange (`ScramExchange`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final, NamedTuple

# The recommended PBKDF2 cost for SHA-256, the weaker of the two hashes.
ITERATIONS: Final = 600_000
MECHANISMS: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


class ScramCredential(NamedTuple):
    """The stored verifier of a password for one mechanism."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes


class Verifiers(NamedTuple):
    """The stored verifiers of a password. None: the account cannot use that mechanism."""

    sha_256: ScramCredential | None
    sha_512: ScramCredential | None

    def credential(self, mechanism: str) -> ScramCredential | None:
        return self.sha_256 if mechanism == "SCRAM-SHA-256" else self.sha_512


def verifiers(password: str, salt: bytes, iterations: int = ITERATIONS) -> Verifiers:
    """Compute the verifiers of a password. The salt must be random and differ for each account."""
    return Verifiers(*(_from_password(algorithm, password, salt, iterations) for algorithm in MECHANISMS.values()))


def _from_password(algorithm: str, password: str, salt: bytes, iterations: int) -> ScramCredential:
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), salt, iterations)
    return credential_of(algorithm, salted, salt, iterations)


def credential_of(algorithm: str, salted_password: bytes, salt: bytes, iterations: int) -> ScramCredential:
    """Compute the verifier of a password that the client has already salted."""
    client_key = hmac.digest(salted_password, b"Client Key", algorithm)
    stored_key = hashlib.new(algorithm, client_key).digest()
    return ScramCredential(salt, iterations, stored_key, hmac.digest(salted_password, b"Server Key", algorithm))


def verify_password(password: str, stored: Verifiers) -> bool:
    """Whether this is the password. Takes the same time for a wrong password."""
    for algorithm, credential in zip(MECHANISMS.values(), stored, strict=True):
        if credential is not None:
            computed = _from_password(algorithm, password, credential.salt, credential.iterations)
            return hmac.compare_digest(computed.stored_key, credential.stored_key)
    return False


class AuthenticationFailed(Exception):
    """The client's proof is wrong, or its messages do not follow the mechanism."""


class ScramExchange:
    """The server side of one SCRAM exchange. Call `name_of`, `challenge` and `finish` in this order."""

    def __init__(self, mechanism: str, nonce: str) -> None:
        self._algorithm = MECHANISMS[mechanism]
        self._nonce = nonce
        self._first_bare = ""
        self._server_first = ""
        self.account = ""

    def name_of(self, first: bytes) -> str:
        """The account named in the client's first message."""
        try:
            text = first.decode()
            header, authorized, bare = text.split(",", 2)
            fields = dict(part.split("=", 1) for part in bare.split(","))
            name, client_nonce = fields["n"], fields["r"]
        except (UnicodeDecodeError, ValueError, KeyError):
            raise AuthenticationFailed("invalid SCRAM client-first message") from None
        if header not in ("n", "y") or authorized.startswith("a=") or not client_nonce or not name:
            raise AuthenticationFailed("channel binding and authorization identities are not supported")
        self._first_bare = bare
        self._nonce = client_nonce + self._nonce
        self.account = name.replace("=2C", ",").replace("=3D", "=")
        return self.account

    def challenge(self, stored: ScramCredential) -> bytes:
        """The server-first message."""
        salt = base64.b64encode(stored.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={stored.iterations}"
        return self._server_first.encode()

    def finish(self, final: bytes, stored: ScramCredential) -> bytes:
        """Verify the client-final message and return the server-final message; AuthenticationFailed if it is wrong."""
        stored_key, server_key = stored.stored_key, stored.server_key
        try:
            text = final.decode()
            without_proof, _, encoded = text.rpartition(",p=")
            fields = dict(part.split("=", 1) for part in without_proof.split(","))
            proof = base64.b64decode(encoded, validate=True)
            binding = base64.b64decode(fields["c"], validate=True)
        except (UnicodeDecodeError, ValueError, KeyError):
            raise AuthenticationFailed("invalid SCRAM client-final message") from None
        if fields.get("r") != self._nonce or binding not in (b"n,,", b"y,,") or len(proof) != len(stored_key):
            raise AuthenticationFailed("the SCRAM client-final message does not match the client-first message")
        signed = f"{self._first_bare},{self._server_first},{without_proof}".encode()
        signature = hmac.digest(stored_key, signed, self._algorithm)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        if not hmac.compare_digest(hashlib.new(self._algorithm, client_key).digest(), stored_key):
            raise AuthenticationFailed("wrong account name or password")
        return b"v=" + base64.b64encode(hmac.digest(server_key, signed, self._algorithm))


def decoy_verifiers(name: str, secret: bytes) -> Verifiers:
    """Verifiers for an account that does not exist: always the same for a name, so a challenge does not reveal it."""
    salt = hmac.digest(secret, name.encode(), "sha256")[:16]
    nothing = bytes(32)
    return Verifiers(
        ScramCredential(salt, ITERATIONS, nothing, nothing), ScramCredential(salt, ITERATIONS, nothing * 2, nothing * 2)
    )
