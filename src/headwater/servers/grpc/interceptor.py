"""How a method of ours becomes one of gRPC: who calls, what they are answered, and how a stream ends."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from headwater.errors import HeadwaterError, LogUnavailable
from headwater.observability.metrics import ERROR, logger
from headwater.servers.authentication import Caller, Callers, NotAuthenticated
from headwater.servers.grpc.errors import refuse

# How long a call waits for a lost database, if its own deadline does not come first.
PATIENCE_SECONDS: Final = 30.0
TOKEN_KEY: Final = "x-auth-token"
# For how long who comes with a password again and again is told of the same session.
SESSION_SECONDS: Final = 3600.0
MAX_SESSIONS: Final = 1000
_EVERYBODY: Final = Caller(None, None)
_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")


class Call:
    """One call that is under way."""

    __slots__ = ("_callers", "_context", "_task", "_writing", "caller", "ended_by")

    def __init__(self, caller: Caller, context: Any, callers: Callers | None) -> None:
        self.caller = caller
        self._context = context
        self._callers = callers
        self._task: asyncio.Task[Any] | None = None
        self._writing = False
        self.ended_by: HeadwaterError | None = None

    def need(self, action: str, kind: str, name: str) -> None:
        """Raise NotAllowed, unless the caller may do this."""
        self.caller.need(action, kind, name)

    def need_still(self, action: str, kind: str, name: str) -> None:
        """The same, as rights are by now: in a call that goes on."""
        if self._callers is not None:
            self.caller = self._callers.still(self.caller)
        self.caller.need(action, kind, name)

    def patience_seconds(self) -> float:
        """How long it is worth to wait for a lost database. Where the call has a deadline, that comes first, always."""
        left = self._context.time_remaining()
        return PATIENCE_SECONDS if left is None or left > PATIENCE_SECONDS else left + 1.0

    def end(self, error: HeadwaterError) -> None:
        """End a stream from our side, after the message that is on its way: no status can be told beside it."""
        if self._task is not None and self.ended_by is None:
            self.ended_by = error
            if not self._writing:
                self._task.cancel()

    async def write(self, message: Any) -> None:
        """Send a message of a stream, and wait until it is on its way: what is slow is waited for, not kept."""
        self._writing = True
        try:
            await self._context.write(message)
        finally:
            self._writing = False
        if self.ended_by is not None:
            raise self.ended_by


Unary = Callable[[Any, Call], Awaitable[Any]]
Streaming = Callable[[Any, Call], AsyncIterator[Any]]


class Gate:
    """Lets callers in, and knows the streams that are under way. Without `callers` nobody is asked."""

    def __init__(self, callers: Callers | None) -> None:
        self._callers = callers
        self._secret = secrets.token_bytes(32)
        # The name and password that somebody came with, hashed -> the key of their session and how long it is told.
        self._sessions: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._streams: set[Call] = set()
        self._stopping = False

    async def call(self, context: Any) -> Call:
        """A call of somebody who may come in."""
        if self._callers is None:
            return Call(_EVERYBODY, context, None)
        return Call(await self._caller(self._callers, context), context, self._callers)

    @contextmanager
    def streaming(self, call: Call) -> Iterator[None]:
        """Around a stream, which ends when the server stops."""
        call._task = asyncio.current_task()
        self._streams.add(call)
        if self._callers is not None:
            self._callers.watch(call.caller)
        try:
            if self._stopping:
                call.end(_stopping())
            yield
        finally:
            self._streams.discard(call)
            call._task = None

    async def stop(self, seconds: float) -> None:
        """End all streams, which would never end by themselves, and wait for them to have told so."""
        self._stopping = True
        tasks = [call._task for call in self._streams if call._task is not None]
        for call in tuple(self._streams):
            call.end(_stopping())
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def _caller(self, callers: Callers, context: Any) -> Caller:
        token = authorization = None
        for key, value in context.invocation_metadata():
            if key == TOKEN_KEY:
                token = value
            elif key == "authorization":
                authorization = value
        if token is not None:
            try:
                return await callers.by_key(token)
            except NotAuthenticated:
                if authorization is None:
                    raise
        if authorization is None:
            return callers.everybody()
        scheme, _, shown = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return await callers.by_key(shown.strip())
        if scheme.lower() != "basic":
            raise NotAuthenticated("authorization is Basic, with a name and a password, or Bearer, with an API key")
        name, password = _decoded(shown)
        # Of "ipv4:127.0.0.1:1234" all but the port, which is another for each connection.
        address = context.peer().rpartition(":")[0]
        caller = await callers.by_password(name, password, address=address)
        # Whoever shows a token that does not hold needs another one.
        session = await self._session(callers, caller, f"{name}\0{password}", renew=token is not None)
        if session is not None:
            await context.send_initial_metadata(((TOKEN_KEY, session),))
        return caller

    async def _session(self, callers: Callers, caller: Caller, shown: str, *, renew: bool) -> str | None:
        hashed = hmac.digest(self._secret, shown.encode(), "sha256")
        known, until = self._sessions.get(hashed, ("", 0.0))
        if known and not renew and time.monotonic() < until:
            return known
        session = await callers.open_session(caller)
        if session is not None:
            self._sessions[hashed] = (session, time.monotonic() + SESSION_SECONDS)
            self._sessions.move_to_end(hashed)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return session


def _decoded(shown: str) -> tuple[str, str]:
    try:
        name, colon, password = base64.b64decode(shown.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise NotAuthenticated("after Basic comes name:password in base64")
    return name, password


def _stopping() -> HeadwaterError:
    return LogUnavailable("the server is stopping", hint="Go on with another one, or with the next.")


def handlers(file: FileDescriptor, services: Mapping[str, object], gate: Gate) -> list[Any]:
    """The services of a file; each method is the one of ours that has its name, in small letters."""
    made = []
    for name, service in services.items():
        descriptor = file.services_by_name[name]
        methods = {
            method.name: _handler(method, getattr(service, _CAPITAL.sub("_", method.name).lower()), gate)
            for method in descriptor.methods
        }
        made.append(grpc.method_handlers_generic_handler(descriptor.full_name, methods))
    return made


def _handler(method: MethodDescriptor, function: Any, gate: Gate) -> Any:
    kinds: dict[tuple[bool, bool], tuple[Any, Any]] = {
        (False, False): (grpc.unary_unary_rpc_method_handler, _unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, _streaming),
        (True, True): (grpc.stream_stream_rpc_method_handler, _streaming),
    }
    make, around = kinds[method.client_streaming, method.server_streaming]
    return make(
        around(gate, function),
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _unary(gate: Gate, function: Unary) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await function(request, await gate.call(context))
        except HeadwaterError as error:
            await refuse(context, error)
        except BaseException as error:
            await _refuse_unknown(context, error)
            raise

    return handle


def _streaming(gate: Gate, function: Streaming) -> Callable[[Any, Any], Awaitable[None]]:
    async def handle(request: Any, context: Any) -> None:
        try:
            call = await gate.call(context)
            await _stream(gate, function, request, call)
        except HeadwaterError as error:
            await refuse(context, error)
        except BaseException as error:
            await _refuse_unknown(context, error)
            raise

    return handle


async def _stream(gate: Gate, function: Streaming, request: Any, call: Call) -> None:
    try:
        with gate.streaming(call):
            async with aclosing(function(request, call)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    await call.write(message)
    except asyncio.CancelledError:
        if call.ended_by is None:
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        raise call.ended_by from None


async def _refuse_unknown(context: Any, error: BaseException) -> None:
    """Tell of a bug of ours that it is one. What only ends the task is none."""
    if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
        return
    logger.error("a call failed", extra={ERROR: str(error)}, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "something unexpected; it is in the server's log")
