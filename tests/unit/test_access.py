"""Does only the right password prove anything, and is only what was allowed allowed?"""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.access.permissions import AccessPolicy, Permission
from headwater.access.scram import (
    MECHANISMS,
    AuthenticationFailed,
    ScramExchange,
    Verifiers,
    credential_of,
    decoy_verifiers,
    verifiers,
    verify_password,
)

SALT = b"0123456789abcdef"
KEPT = verifiers("pencil", SALT, 4096)
assert KEPT.sha_256 is not None
KEPT_256 = KEPT.sha_256


def client_final(mechanism: str, password: str, challenge: bytes, first_bare: str) -> tuple[bytes, bytes]:
    """The last message of an honest client with this password, and what it expects to hear."""
    algorithm = MECHANISMS[mechanism]
    fields = dict(part.split("=", 1) for part in challenge.decode().split(","))
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), base64.b64decode(fields["s"]), int(fields["i"]))
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    without_proof = f"c=biws,r={fields['r']}"
    signed = f"{first_bare},{challenge.decode()},{without_proof}".encode()
    signature = hmac.digest(hashlib.new(algorithm, client_key).digest(), signed, algorithm)
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(client_key, signature, strict=True))).decode()
    expected = hmac.digest(hmac.digest(salted, b"Server Key", algorithm), signed, algorithm)
    return f"{without_proof},p={proof}".encode(), b"v=" + base64.b64encode(expected)


def exchange(mechanism: str, password: str, known: Verifiers = KEPT) -> bytes:
    scram = ScramExchange(mechanism, "server")
    kept = known.credential(mechanism)
    assert kept is not None
    bare = "n=us=2Cer,r=client"
    assert scram.name_of(f"n,,{bare}".encode()) == "us,er"
    final, expected = client_final(mechanism, password, scram.challenge(kept), bare)
    answer = scram.finish(final, kept)
    assert answer == expected
    return answer


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_right_password_proves_the_client_and_the_server(mechanism: str) -> None:
    assert exchange(mechanism, "pencil").startswith(b"v=")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password_proves_nothing(mechanism: str) -> None:
    with pytest.raises(AuthenticationFailed):
        exchange(mechanism, "pen")
    with pytest.raises(AuthenticationFailed):
        exchange(mechanism, "pencil", decoy_verifiers("missing", b"secret"))


def test_the_example_of_the_standard_is_understood() -> None:
    # RFC 7677, section 3.
    kept = verifiers("pencil", base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), 4096).sha_256
    assert kept is not None
    scram = ScramExchange("SCRAM-SHA-256", "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    assert scram.name_of(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO") == "user"
    assert scram.challenge(kept) == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    final = (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    assert scram.finish(final, kept) == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_invalid_scram_messages_are_rejected(first: bytes, final: bytes) -> None:
    scram = ScramExchange("SCRAM-SHA-256", "server")
    with pytest.raises(AuthenticationFailed):
        scram.name_of(first)
        scram.finish(final, KEPT_256)
    scram = ScramExchange("SCRAM-SHA-256", "server")
    scram.name_of(b"n,,n=user,r=client")
    scram.challenge(KEPT_256)
    with pytest.raises(AuthenticationFailed):
        scram.finish(final, KEPT_256)


def test_a_proof_for_another_exchange_is_refused() -> None:
    scram = ScramExchange("SCRAM-SHA-256", "server")
    scram.name_of(b"n,,n=user,r=client")
    final, _ = client_final("SCRAM-SHA-256", "pencil", scram.challenge(KEPT_256), "n=user,r=client")
    another = ScramExchange("SCRAM-SHA-256", "other")
    another.name_of(b"n,,n=user,r=client")
    another.challenge(KEPT_256)
    with pytest.raises(AuthenticationFailed):
        another.finish(final, KEPT_256)


def test_a_password_in_clear_is_checked_against_the_same_verifiers() -> None:
    assert verify_password("pencil", KEPT)
    assert not verify_password("Pencil", KEPT)
    assert not verify_password("", decoy_verifiers("missing", b"secret"))
    # Also where there is only the other, and where there is none.
    assert verify_password("pencil", KEPT._replace(sha_256=None))
    assert not verify_password("Pencil", KEPT._replace(sha_256=None))
    assert not verify_password("", Verifiers(None, None))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_password_that_was_salted_elsewhere_proves_the_same(mechanism: str) -> None:
    algorithm = MECHANISMS[mechanism]
    salted = hashlib.pbkdf2_hmac(algorithm, b"pencil", SALT, 4096)
    assert credential_of(algorithm, salted, SALT, 4096) == KEPT.credential(mechanism)


def test_what_nobody_allowed_is_denied() -> None:
    access = AccessPolicy(
        ["root"],
        [
            Permission("clerk", "read", "topic", "orders"),
            Permission("clerk", "write", "topic", "shop-", prefix=True),
            Permission("clerk", "all", "consumer", "*"),
            Permission("*", "read", "topic", "news"),
        ],
    )
    for account, action, kind, name, allowed in (
        ("clerk", "read", "topic", "orders", True),
        ("clerk", "write", "topic", "orders", False),
        ("clerk", "describe", "topic", "orders", True),
        ("clerk", "read", "topic", "orders2", False),
        ("clerk", "write", "topic", "shop-1", True),
        ("clerk", "write", "topic", "shop", False),
        ("clerk", "delete", "consumer", "any", True),
        ("clerk", "read", "transaction", "any", False),
        ("anybody", "read", "topic", "news", True),
        ("anybody", "write", "topic", "news", False),
        ("root", "alter", "log", "*", True),
        ("clerk", "alter", "log", "*", False),
    ):
        assert access.allows(account, action, kind, name) is allowed, (account, action, kind, name)
