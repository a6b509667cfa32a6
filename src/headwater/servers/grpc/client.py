"""What a client of the door calls: the methods of its services on a channel, blocking or of asyncio."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from google.protobuf.message_factory import GetMessageClass

from headwater.servers.grpc.generated import eventstore_pb2, headwater_pb2

_FILES: Final = {"headwater.v1": headwater_pb2.DESCRIPTOR, "orisun": eventstore_pb2.DESCRIPTOR}


def service(channel: Any, name: str) -> Any:
    """The methods of a service, as `headwater.v1.EventStore`, each under its name in the protocol."""
    package, _, own = name.rpartition(".")
    methods = SimpleNamespace()
    for method in _FILES[package].services_by_name[own].methods:
        asked = "stream" if method.client_streaming else "unary"
        answered = "stream" if method.server_streaming else "unary"
        call = getattr(channel, f"{asked}_{answered}")(
            f"/{name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        setattr(methods, method.name, call)
    return methods
