"""A minimal client: the methods of a service on a blocking or asyncio channel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from google.protobuf.message_factory import GetMessageClass

from headwater.servers.grpc.generated import eventstore_pb2, headwater_pb2

_FILES: Final = {"headwater.v1": headwater_pb2.DESCRIPTOR, "orisun": eventstore_pb2.DESCRIPTOR}


def service(channel: Any, name: str) -> Any:
    """The methods of a service, for example `headwater.v1.EventStore`, under their names in the proto file."""
    package, _, short_name = name.rpartition(".")
    methods = SimpleNamespace()
    for method in _FILES[package].services_by_name[short_name].methods:
        request_kind = "stream" if method.client_streaming else "unary"
        response_kind = "stream" if method.server_streaming else "unary"
        call = getattr(channel, f"{request_kind}_{response_kind}")(
            f"/{name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        setattr(methods, method.name, call)
    return methods
