"""Which addresses webhooks may connect to (protection against SSRF and DNS rebinding).

A host name is resolved once for a connection. Every address is checked, and the connection is made to an address that
passed the check, so a DNS record that changes in between has no effect.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final

from headwater.errors import InvalidRequest

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# A public address, but the metadata service of a cloud.
_METADATA: Final = IPv4Address("168.63.129.16")
_NAT64: Final = IPv6Network("64:ff9b::/96")
# Reserved for protocol assignments. Python versions differ in which of it they treat as public.
_PROTOCOLS: Final = IPv4Network("192.0.0.0/24")
# If a name has more addresses, only the first are tried.
_MAX_ADDRESSES: Final = 4


class AddressNotAllowed(Exception):
    """The host has no address that webhooks may connect to."""


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse networks such as 10.0.0.0/8, 127.0.0.1 or fd00::/8."""
    try:
        return tuple(ip_network(text, strict=False) for text in texts)
    except ValueError as error:
        raise InvalidRequest(
            f"invalid network: {error}", hint="Write a network such as 10.0.0.0/8 or 127.0.0.1."
        ) from None


def real_address(address: Address) -> Address:
    """The IPv4 address that an IPv6 address maps to, if any; else the address itself."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        # IPv4-compatible addresses (deprecated): 96 zero bits and an IPv4 address; :: and ::1 are not among them.
        if int(address) >> 32 == 0 and int(address) > 1:
            return IPv4Address(int(address))
        return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)
    return address


def may_reach(address: Address, allowed: Sequence[Network]) -> bool:
    """Whether webhooks may connect to this address: the public internet and the allowed networks."""
    real = real_address(address)
    if any(real in network or address in network for network in allowed):
        return True
    if real == _METADATA or real.is_multicast or real.is_reserved or real.is_link_local:
        return False
    if isinstance(real, IPv4Address) and real in _PROTOCOLS:
        return False
    if isinstance(real, IPv6Address) and real.is_site_local:
        return False
    return real.is_global


class AddressLookup:
    """Resolves the host of one webhook to addresses that it may connect to."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        # A lookup cannot be cancelled: in its own thread it delays only its own webhook.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="webhook-lookup")
        self._pending: asyncio.Future[list[Any]] | None = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def resolve(self, host: str, port: int) -> list[str]:
        """The allowed addresses in numeric form, which are not resolved again; AddressNotAllowed if there are none."""
        found = await self._addresses(host, port)
        permitted = [one for one in found if may_reach(ip_address(one), self._allowed)]
        if not permitted:
            raise AddressNotAllowed(
                f"{host} resolves to {', '.join(found[:_MAX_ADDRESSES])}: private, loopback and link-local addresses "
                "are not allowed unless the server allows their network"
            )
        return permitted[:_MAX_ADDRESSES]

    async def _addresses(self, host: str, port: int) -> list[str]:
        """Resolve a name, once for all requests that wait for it."""
        if self._pending is None or self._pending.done():
            self._pending = asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        try:
            found = await asyncio.shield(self._pending)
        except (OSError, UnicodeError) as error:
            raise ConnectionError(f"{host} cannot be resolved: {error}") from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
