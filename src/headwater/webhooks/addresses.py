"""Which addresses webhooks may reach.

A name is looked up once for a connection; every address is judged, and one that passed is connected to: a name that
means something else a moment later leads nowhere.
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

# Public by its number, and yet where a cloud answers its own machines.
_METADATA: Final = IPv4Address("168.63.129.16")
_NAT64: Final = IPv6Network("64:ff9b::/96")
# Set aside for protocols. Which of it is public, versions of Python tell differently.
_PROTOCOLS: Final = IPv4Network("192.0.0.0/24")
# Of a name with more addresses, the first are tried.
_MOST_ADDRESSES: Final = 4


class AddressRefused(Exception):
    """A name has no address that webhooks may reach."""


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks as somebody typed them: 10.0.0.0/8, 127.0.0.1, fd00::/8."""
    try:
        return tuple(ip_network(text, strict=False) for text in texts)
    except ValueError as error:
        raise InvalidRequest(f"that is no network: {error}", hint="Write 10.0.0.0/8 or 127.0.0.1.") from None


def real_address(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, if it does; else the address."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        # The last 32 bits after 96 of zero were a way to write IPv4 once; :: and ::1 are themselves.
        if int(address) >> 32 == 0 and int(address) > 1:
            return IPv4Address(int(address))
        return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)
    return address


def may_reach(address: Address, allowed: Sequence[Network]) -> bool:
    """Whether webhooks may connect there: the public internet, and what is allowed besides."""
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


class Lookup:
    """Finds the addresses of one webhook's host that it may reach. It waits for no other webhook's lookup."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        # A lookup cannot be called off: in a thread of its own it can at most keep its own webhook waiting.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="webhook-lookup")
        self._under_way: asyncio.Future[list[Any]] | None = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def permitted(self, host: str, port: int) -> list[str]:
        """Addresses as numbers, which nobody looks up again; AddressRefused if there is none."""
        found = await self._addresses(host, port)
        permitted = [one for one in found if may_reach(ip_address(one), self._allowed)]
        if not permitted:
            raise AddressRefused(
                f"{host} is {', '.join(found[:_MOST_ADDRESSES])}: private, loopback and link-local addresses are "
                "refused unless whoever delivers allows their network"
            )
        return permitted[:_MOST_ADDRESSES]

    async def _addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a name, asked for once however many wait for it."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        try:
            found = await asyncio.shield(self._under_way)
        except (OSError, UnicodeError) as error:
            raise ConnectionError(f"{host} cannot be resolved: {error}") from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
