"""Posts to the URL of one webhook: connections that are kept for a while, bounds on everything that comes back."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import h11

from headwater.model import Webhook
from headwater.webhooks.addresses import AddressRefused, Lookup, Network
from headwater.webhooks.requests import Answer, Request

# Of an answer's body no more is read, and for no longer: the status has said it all.
ANSWER_BYTES: Final = 16_384
ANSWER_BODY_SECONDS: Final = 1.0
# How long a connection is kept for the next request.
IDLE_SECONDS: Final = 15.0
_READ_BYTES: Final = 16_384

_FAILURES = (OSError, h11.ProtocolError, AddressRefused)


@dataclass(slots=True, eq=False)
class _Connection:
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
            # The end of what has begun may be the end of a body.
            if not data and self.http.their_state is h11.SEND_RESPONSE:
                raise ConnectionResetError("the receiver closed the connection without an answer")
            self.http.receive_data(data)
        return event

    async def ask(self, request: h11.Request, body: bytes) -> h11.Response:
        """Send a request and wait for the head of its answer."""
        # Not waited for: a receiver may answer before it has read everything, and never read the rest.
        self.writer.write(
            b"".join(self.http.send(part) or b"" for part in (request, h11.Data(data=body), h11.EndOfMessage()))
        )
        while True:
            event = await self.next_event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("that is no answer")

    async def next_data(self) -> bytes | None:
        """More of the body; None at its end."""
        event = await self.next_event()
        return bytes(event.data) if isinstance(event, h11.Data) else None


class Sender:
    """Sends requests to the URL of one webhook. How many at a time is its caller's to say."""

    def __init__(self, webhook: Webhook, *, allowed: Sequence[Network], tls: ssl.SSLContext) -> None:
        url = urlsplit(webhook.url)
        self._seconds = webhook.timeout_seconds
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = tls if url.scheme == "https" else None
        self._target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._authority = url.netloc
        self._lookup = Lookup(allowed)
        self._idle: list[_Connection] = []
        self._sweep: asyncio.TimerHandle | None = None

    def close(self) -> None:
        self._lookup.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def send(self, request: Request) -> Answer:
        """The receiver's answer, or why there was none, within the webhook's timeout. Redirects are answers."""
        answer: Answer | None = None
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._seconds) as limit:
                head = h11.Request(
                    method="POST",
                    target=self._target,
                    headers=[("host", self._authority), ("content-length", str(len(request.body))), *request.headers],
                )
                connection = self._kept() or await self._connect()
                try:
                    response = await connection.ask(head, request.body)
                except ConnectionError:
                    # A kept one that was closed just now says nothing about the receiver.
                    if not connection.used:
                        raise
                    connection.writer.transport.abort()
                    connection = await self._connect()
                    response = await connection.ask(head, request.body)
                retry_after = [value for name, value in response.headers if name == b"retry-after"]
                answer = Answer(response.status_code, retry_after[0].decode("latin-1") if retry_after else None)
                soon = asyncio.get_running_loop().time() + ANSWER_BODY_SECONDS
                limit.reschedule(min(limit.when() or soon, soon))
                while len(answer.body) < ANSWER_BYTES and (data := await connection.next_data()) is not None:
                    answer = answer._replace(body=(answer.body + data)[:ANSWER_BYTES])
        except TimeoutError:
            return answer or Answer(failure=f"no answer within {self._seconds:g} s")
        except _FAILURES as error:
            return answer or Answer(failure=str(error) or type(error).__name__)
        finally:
            if connection is not None:
                self._leave(connection)
        return answer

    async def _connect(self) -> _Connection:
        addresses = await self._lookup.permitted(self._host, self._port)
        failure: OSError | None = None
        for address in addresses:
            try:
                async with asyncio.timeout(self._seconds / len(addresses)):
                    reader, writer = await asyncio.open_connection(
                        address,
                        self._port,
                        limit=_READ_BYTES,
                        ssl=self._tls,
                        # The certificate is for the name, whatever its address.
                        server_hostname=self._host if self._tls is not None else None,
                    )
                return _Connection(reader, writer, h11.Connection(h11.CLIENT))
            except TimeoutError:
                failure = ConnectionError(f"{address} did not answer")
            except OSError as error:
                failure = error
            except ValueError as error:
                failure = ConnectionError(f"{self._host} cannot be connected to: {error}")
        assert failure is not None
        raise failure

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.writer.close()
        return None

    def _leave(self, connection: _Connection) -> None:
        """Keep a connection for the next request, if it can take one."""
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
