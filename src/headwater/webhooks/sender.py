"""Sends requests to the URL of one webhook, with keep-alive connections and limits on the response."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import h11

from headwater.webhooks.addresses import AddressLookup, AddressNotAllowed, Network
from headwater.webhooks.model import Webhook
from headwater.webhooks.requests import WebhookRequest, WebhookResponse

# Only this much of a response body is read, and only for this long: the status is what counts.
MAX_RESPONSE_BYTES: Final = 16_384
MAX_RESPONSE_BODY_SECONDS: Final = 1.0
# How long an idle connection is kept for the next request.
IDLE_SECONDS: Final = 15.0
_READ_BYTES: Final = 16_384

_FAILURES = (OSError, h11.ProtocolError, AddressNotAllowed)


@dataclass(slots=True, eq=False)
class _SenderConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection
    used: bool = False
    idle_since: float = 0.0

    @property
    def is_open(self) -> bool:
        return not self.writer.is_closing() and not self.reader.at_eof()

    async def next_event(self) -> object:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            data = await self.reader.read(_READ_BYTES)
            # Once the response has begun, the end of the connection may be the end of its body.
            if not data and self.http.their_state is h11.SEND_RESPONSE:
                raise ConnectionResetError("the receiver closed the connection without a response")
            self.http.receive_data(data)
        return event

    async def send(self, request: h11.Request, body: bytes) -> h11.Response:
        """Send a request and wait for the head of the response."""
        # Not drained: a receiver may respond before it has read everything, and never read the rest.
        self.writer.write(
            b"".join(self.http.send(part) or b"" for part in (request, h11.Data(data=body), h11.EndOfMessage()))
        )
        while True:
            event = await self.next_event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("invalid HTTP response")

    async def next_data(self) -> bytes | None:
        """More of the body; None at its end."""
        event = await self.next_event()
        return bytes(event.data) if isinstance(event, h11.Data) else None


class Sender:
    """Sends requests to the URL of one webhook. The caller limits the concurrency."""

    def __init__(self, webhook: Webhook, *, allowed: Sequence[Network], tls: ssl.SSLContext) -> None:
        url = urlsplit(webhook.url)
        self._seconds = webhook.timeout_seconds
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = tls if url.scheme == "https" else None
        self._target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._authority = url.netloc
        self._lookup = AddressLookup(allowed)
        self._idle: list[_SenderConnection] = []
        self._sweep: asyncio.TimerHandle | None = None

    def close(self) -> None:
        self._lookup.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def send(self, request: WebhookRequest) -> WebhookResponse:
        """The response, or the reason why there is none, within the webhook's timeout. Redirects are not followed."""
        result: WebhookResponse | None = None
        connection: _SenderConnection | None = None
        try:
            async with asyncio.timeout(self._seconds) as limit:
                head = h11.Request(
                    method="POST",
                    target=self._target,
                    headers=[("host", self._authority), ("content-length", str(len(request.body))), *request.headers],
                )
                connection = self._reuse() or await self._connect()
                try:
                    response = await connection.send(head, request.body)
                except ConnectionError:
                    # A reused connection may have just been closed; that says nothing about the receiver.
                    if not connection.used:
                        raise
                    connection.writer.transport.abort()
                    connection = await self._connect()
                    response = await connection.send(head, request.body)
                retry_after = [value for name, value in response.headers if name == b"retry-after"]
                result = WebhookResponse(
                    response.status_code, retry_after[0].decode("latin-1") if retry_after else None
                )
                soon = asyncio.get_running_loop().time() + MAX_RESPONSE_BODY_SECONDS
                limit.reschedule(min(limit.when() or soon, soon))
                while len(result.body) < MAX_RESPONSE_BYTES and (data := await connection.next_data()) is not None:
                    result = result._replace(body=(result.body + data)[:MAX_RESPONSE_BYTES])
        except TimeoutError:
            return result or WebhookResponse(failure=f"no response within {self._seconds:g} s")
        except _FAILURES as error:
            return result or WebhookResponse(failure=str(error) or type(error).__name__)
        finally:
            if connection is not None:
                self._release(connection)
        return result

    async def _connect(self) -> _SenderConnection:
        addresses = await self._lookup.resolve(self._host, self._port)
        failure: OSError | None = None
        for address in addresses:
            try:
                async with asyncio.timeout(self._seconds / len(addresses)):
                    reader, writer = await asyncio.open_connection(
                        address,
                        self._port,
                        limit=_READ_BYTES,
                        ssl=self._tls,
                        # The certificate is checked against the host name.
                        server_hostname=self._host if self._tls is not None else None,
                    )
                return _SenderConnection(reader, writer, h11.Connection(h11.CLIENT))
            except TimeoutError:
                failure = ConnectionError(f"{address} did not respond")
            except OSError as error:
                failure = error
            except ValueError as error:
                failure = ConnectionError(f"cannot connect to {self._host}: {error}")
        assert failure is not None
        raise failure

    def _reuse(self) -> _SenderConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.writer.close()
        return None

    def _release(self, connection: _SenderConnection) -> None:
        """Keep a connection for the next request if it is reusable, else close it."""
        http = connection.http
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE or http.trailing_data[0]:
            connection.writer.transport.abort()
            return
        http.start_next_cycle()
        loop = asyncio.get_running_loop()
        connection.used = True
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_SECONDS, self._drop_old)

    def _drop_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_SECONDS
        for connection in self._idle:
            if connection.idle_since <= oldest:
                connection.writer.close()
        self._idle = [one for one in self._idle if one.idle_since > oldest]
        self._sweep = loop.call_later(IDLE_SECONDS, self._drop_old) if self._idle else None
