"""Which addresses webhooks may reach, and connections to no other.

A name is resolved once for a connection; every address is looked at, and the one that passed is connected to: a name
that means something else a moment later leads nowhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final

import httpcore

from headwater.errors import InvalidRequest

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Public by its number, and yet where a cloud answers its own machines.
_METADATA: Final = IPv4Address("168.63.129.16")
_NAT64: Final = IPv6Network("64:ff9b::/96")
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
    if isinstance(real, IPv6Address) and real.is_site_local:
        return False
    return real.is_global


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Connects for one webhook, to addresses that it may reach. Its lookups wait for no other webhook's."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        self._network = httpcore.AnyIOBackend()
        # A lookup cannot be called off: of its own thread it can at most keep its own webhook waiting.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="webhook-lookup")
        self._lookup: asyncio.Future[list[Any]] | None = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._addresses(host, port)
        permitted = [one for one in addresses if may_reach(ip_address(one), self._allowed)][:_MOST_ADDRESSES]
        if not permitted:
            raise AddressRefused(
                f"{host} is {', '.join(addresses[:_MOST_ADDRESSES])}: private, loopback and link-local addresses are "
                "refused unless whoever delivers allows their network"
            )
        failure: Exception | None = None
        for one in permitted:
            try:
                return await self._network.connect_tcp(
                    one,
                    port,
                    timeout=None if timeout is None else timeout / len(permitted),
                    local_address=local_address,
                    socket_options=socket_options,
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise AddressRefused("webhooks are not sent to sockets of this machine")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a name, asked for once however many wait for it."""
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            )
        try:
            found = await asyncio.shield(self._lookup)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
