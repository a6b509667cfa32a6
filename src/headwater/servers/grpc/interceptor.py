"""Turns the methods of our services into gRPC handlers.

Each handler authenticates the call, runs the method and converts errors to a status. `CallAuthenticator` also tracks
open streams, so that the server can end them when it stops: a stream ends after the message that is being written,
since no status can be sent in between.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from headwater.bounded_dict import BoundedDict
from headwater.errors import HeadwaterError, LogUnavailable
from headwater.observability.metrics import ERROR, logger
from headwater.servers.authentication import Authenticator, NotAuthenticated, Principal
from headwater.servers.grpc.errors import abort_with

# How long a call waits for an unavailable database, unless its deadline is earlier.
PATIENCE_SECONDS: Final = 30.0
TOKEN_KEY: Final = "x-auth-token"
# How long clients that authenticate by password repeatedly get the same session token.
SESSION_SECONDS: Final = 3600.0
MAX_SESSIONS: Final = 1000
_UNAUTHENTICATED: Final = Principal(None, None)
_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")


class GrpcCall:
    """One call in progress."""

    __slots__ = ("_authenticator", "_context", "_task", "_writing", "ended_by", "principal")

    def __init__(self, principal: Principal, context: Any, authenticator: Authenticator | None) -> None:
        self.principal = principal
        self._context = context
        self._authenticator = authenticator
        self._task: asyncio.Task[Any] | None = None
        self._writing = False
        self.ended_by: HeadwaterError | None = None

    def require(self, action: str, kind: str, name: str) -> None:
        """Raise NotAllowed unless the principal has the permission."""
        self.principal.need(action, kind, name)

    def require_now(self, action: str, kind: str, name: str) -> None:
        """The same with the current permissions, for streams, whose permissions may change while they run."""
        if self._authenticator is not None:
            self.principal = self._authenticator.revalidate(self.principal)
        self.principal.need(action, kind, name)

    def patience_seconds(self) -> float:
        """How long to wait for an unavailable database: past the deadline of the call, so that the deadline ends it."""
        left = self._context.time_remaining()
        return PATIENCE_SECONDS if left is None or left > PATIENCE_SECONDS else left + 1.0

    def end(self, error: HeadwaterError) -> None:
        """End a stream from the server, after the message that is being written: no status can be sent in between."""
        if self._task is not None and self.ended_by is None:
            self.ended_by = error
            if not self._writing:
                self._task.cancel()

    async def write(self, message: Any) -> None:
        """Send a message of a stream and wait until it is written, so that slow clients do not fill the memory."""
        self._writing = True
        try:
            await self._context.write(message)
        finally:
            self._writing = False
        if self.ended_by is not None:
            raise self.ended_by


Unary = Callable[[Any, GrpcCall], Awaitable[Any]]
Streaming = Callable[[Any, GrpcCall], AsyncIterator[Any]]


class CallAuthenticator:
    """Authenticates calls and tracks open streams. Without `authenticator`, authentication is off."""

    def __init__(self, authenticator: Authenticator | None) -> None:
        self._authenticator = authenticator
        self._secret = secrets.token_bytes(32)
        # Hash of name and password -> session token, and until when it is reused.
        self._sessions: BoundedDict[bytes, tuple[str, float]] = BoundedDict(MAX_SESSIONS)
        self._streams: set[GrpcCall] = set()
        self._stopping = False

    async def call(self, context: Any) -> GrpcCall:
        """Authenticate a call."""
        if self._authenticator is None:
            return GrpcCall(_UNAUTHENTICATED, context, None)
        return GrpcCall(await self._principal(self._authenticator, context), context, self._authenticator)

    @contextmanager
    def streaming(self, call: GrpcCall) -> Iterator[None]:
        """Register a stream, so that it ends when the server stops."""
        call._task = asyncio.current_task()
        self._streams.add(call)
        if self._authenticator is not None:
            self._authenticator.watch(call.principal)
        try:
            if self._stopping:
                call.end(_stopping())
            yield
        finally:
            self._streams.discard(call)
            call._task = None

    async def stop(self, seconds: float) -> None:
        """End all streams and wait until their status is sent."""
        self._stopping = True
        tasks = [call._task for call in self._streams if call._task is not None]
        for call in tuple(self._streams):
            call.end(_stopping())
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def _principal(self, authenticator: Authenticator, context: Any) -> Principal:
        token = authorization = None
        for key, value in context.invocation_metadata():
            if key == TOKEN_KEY:
                token = value
            elif key == "authorization":
                authorization = value
        if token is not None:
            try:
                return await authenticator.by_key(token)
            except NotAuthenticated:
                if authorization is None:
                    raise
        if authorization is None:
            return authenticator.anonymous()
        scheme, _, credentials = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return await authenticator.by_key(credentials.strip())
        if scheme.lower() != "basic":
            raise NotAuthenticated("unsupported authorization: expected Basic (name and password) or Bearer (API key)")
        name, password = _decoded(credentials)
        # "ipv4:127.0.0.1:1234" without the port, which differs for each connection.
        address = context.peer().rpartition(":")[0]
        principal = await authenticator.by_password(name, password, address=address)
        # A client with an invalid token needs a new one.
        session = await self._session(authenticator, principal, f"{name}\0{password}", renew=token is not None)
        if session is not None:
            await context.send_initial_metadata(((TOKEN_KEY, session),))
        return principal

    async def _session(
        self, authenticator: Authenticator, principal: Principal, credentials: str, *, renew: bool
    ) -> str | None:
        hashed = hmac.digest(self._secret, credentials.encode(), "sha256")
        known, until = self._sessions.get(hashed, ("", 0.0))
        if known and not renew and time.monotonic() < until:
            return known
        session = await authenticator.open_session(principal)
        if session is not None:
            self._sessions[hashed] = (session, time.monotonic() + SESSION_SECONDS)
        return session


def _decoded(credentials: str) -> tuple[str, str]:
    try:
        name, colon, password = base64.b64decode(credentials.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise NotAuthenticated("invalid Basic authorization: expected name:password in base64")
    return name, password


def _stopping() -> HeadwaterError:
    return LogUnavailable("the server is stopping", hint="Retry with another server, or when it is back.")


def make_handlers(file: FileDescriptor, services: Mapping[str, object], authenticator: CallAuthenticator) -> list[Any]:
    """The handlers of the services of a proto file. Each method maps to the Python method of its name in snake_case."""
    generic = []
    for name, service in services.items():
        descriptor = file.services_by_name[name]
        methods = {
            method.name: _handler(method, getattr(service, _CAPITAL.sub("_", method.name).lower()), authenticator)
            for method in descriptor.methods
        }
        generic.append(grpc.method_handlers_generic_handler(descriptor.full_name, methods))
    return generic


def _handler(method: MethodDescriptor, function: Any, authenticator: CallAuthenticator) -> Any:
    kinds: dict[tuple[bool, bool], tuple[Any, Any]] = {
        (False, False): (grpc.unary_unary_rpc_method_handler, _unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, _streaming),
        (True, True): (grpc.stream_stream_rpc_method_handler, _streaming),
    }
    make, around = kinds[method.client_streaming, method.server_streaming]
    return make(
        around(authenticator, function),
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _unary(authenticator: CallAuthenticator, function: Unary) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await function(request, await authenticator.call(context))
        except HeadwaterError as error:
            await abort_with(context, error)
        except BaseException as error:
            await _abort_internal(context, error)
            raise

    return handle


def _streaming(authenticator: CallAuthenticator, function: Streaming) -> Callable[[Any, Any], Awaitable[None]]:
    async def handle(request: Any, context: Any) -> None:
        try:
            call = await authenticator.call(context)
            await _stream(authenticator, function, request, call)
        except HeadwaterError as error:
            await abort_with(context, error)
        except BaseException as error:
            await _abort_internal(context, error)
            raise

    return handle


async def _stream(authenticator: CallAuthenticator, function: Streaming, request: Any, call: GrpcCall) -> None:
    try:
        with authenticator.streaming(call):
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


async def _abort_internal(context: Any, error: BaseException) -> None:
    """Log an unexpected exception and abort with INTERNAL. Cancellation and aborts are passed on."""
    if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
        return
    logger.error("grpc call failed", extra={ERROR: str(error)}, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the log of the server")
