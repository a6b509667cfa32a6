"""Protobuf: parsing a .proto text or a descriptor, linked by the runtime, and validation of payloads. Pure."""

from __future__ import annotations

import base64
import binascii
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError

from headwater.errors import InvalidSchema
from headwater.schema_registry import protobuf_parser
from headwater.schema_registry.schemas import PayloadMismatch, shortened
from headwater.schema_registry.work_limit import WorkLimit

# Files that every compiler includes, so that they need not be registered.
_WELL_KNOWN: Final = {
    f"google/protobuf/{name}.proto": f"google.protobuf.{name}_pb2"
    for name in (
        "any", "api", "descriptor", "duration", "empty", "field_mask", "source_context", "struct", "timestamp", "type",
        "wrappers",
    )
}  # fmt: skip
MAX_INDEXES: Final = 32


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    """A parsed Protobuf schema."""

    file: FileDescriptorProto
    canonical: bytes
    _pool: Any = field(repr=False)

    def check(self, payload: bytes, *, framed: bool) -> str | None:
        indexes, place = _indexes(payload) if framed else ([0], 0)
        name = self._message_at(indexes)
        message = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))()
        try:
            message.ParseFromString(payload[place:])
        except DecodeError as error:
            raise PayloadMismatch(shortened(f"not a valid {name}: {error}")) from None
        if not message.IsInitialized():
            missing = ", ".join(message.FindInitializationErrors())
            raise PayloadMismatch(shortened(f"{name} lacks the required {missing}"))
        return name

    def _message_at(self, indexes: list[int]) -> str:
        holder: Any = self.file.message_type
        path = [self.file.package] if self.file.package else []
        for index in indexes:
            if not 0 <= index < len(holder):
                raise PayloadMismatch(f"the schema has no message {indexes}")
            found: DescriptorProto = holder[index]
            path.append(found.name)
            holder = found.nested_type
        return ".".join(path)

    @property
    def serialized(self) -> str:
        """The descriptor in base64, as some clients send and expect it."""
        return base64.b64encode(self.file.SerializeToString(deterministic=True)).decode()

    def compare(self, written: ProtobufSchema, work: WorkLimit) -> None:
        from headwater.schema_registry.protobuf_compatibility import compare

        compare(self.file, written.file, work)


def parse(text: str, dependencies: Sequence[tuple[str, str]] = ()) -> ProtobufSchema:
    """Parse a schema: a .proto text, or a descriptor in base64, as some clients send it."""
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    for name, other in dependencies:
        if name not in added:
            _link(pool, _read(other, name), added)
    name = "schema.proto"
    while name in added:
        name = f"_{name}"
    root = _read(text, name)
    if not root.message_type:
        raise InvalidSchema("a Protobuf schema needs at least one message")
    linked = FileDescriptorProto()
    _link(pool, root, added).CopyToProto(linked)
    linked.ClearField("source_code_info")
    return ProtobufSchema(linked, _canonical(linked, root), pool)


def _read(text: str, name: str) -> FileDescriptorProto:
    stripped = "".join(text.split())
    if (
        stripped.isascii()
        and len(stripped) % 4 == 0
        and stripped.rstrip("=").replace("+", "").replace("/", "").isalnum()
    ):
        try:
            file = FileDescriptorProto.FromString(base64.b64decode(stripped, validate=True))
        except (binascii.Error, DecodeError):
            raise InvalidSchema("neither a .proto file nor a descriptor in base64") from None
        file.name = name
        return file
    return protobuf_parser.parse(text, name)


def _link(pool: Any, file: FileDescriptorProto, added: set[str]) -> Any:
    for dependency in file.dependency:
        if dependency not in added and dependency in _WELL_KNOWN:
            _link_well_known(pool, dependency, added)
        if dependency not in added:
            raise InvalidSchema(f"unknown import {dependency}", hint="Register it, and add a reference with this name.")
    # The runtime rejects uninterpreted options; they do not matter for payloads.
    plain = FileDescriptorProto()
    plain.CopyFrom(file)
    _drop_options(plain)
    try:
        pool.AddSerializedFile(plain.SerializeToString())
        linked = pool.FindFileByName(file.name)
    except (TypeError, KeyError, ValueError) as error:
        raise InvalidSchema(shortened(f"invalid Protobuf schema: {error}", 400)) from None
    added.add(file.name)
    return linked


def _link_well_known(pool: Any, name: str, added: set[str]) -> None:
    file = FileDescriptorProto()
    importlib.import_module(_WELL_KNOWN[name]).DESCRIPTOR.CopyToProto(file)
    _link(pool, file, added)


def _drop_options(holder: Any) -> None:
    """Remove uninterpreted options from a descriptor and everything in it."""
    if "uninterpreted_option" in holder.DESCRIPTOR.fields_by_name:
        holder.ClearField("uninterpreted_option")
        return
    for descriptor, value in holder.ListFields():
        if descriptor.message_type is not None:
            # A repeated message field, or a single one.
            for one in [value] if hasattr(value, "DESCRIPTOR") else value:
                _drop_options(one)


def _canonical(linked: FileDescriptorProto, written: FileDescriptorProto) -> bytes:
    """The linked descriptor without its name and what compilers add, and with uninterpreted options unchanged."""
    plain = FileDescriptorProto()
    plain.CopyFrom(linked)
    plain.ClearField("name")
    _tidy(plain)
    return bytes(plain.SerializeToString(deterministic=True)) + b"".join(_options_of(written))


def _tidy(holder: Any) -> None:
    """Remove what some compilers write and others do not."""
    for descriptor, value in holder.ListFields():
        if descriptor.name == "json_name":
            holder.ClearField("json_name")
        elif descriptor.name == "options":
            if not value.ListFields():
                holder.ClearField("options")
        elif descriptor.message_type is not None:
            for one in value:
                _tidy(one)


def _options_of(holder: Any) -> list[bytes]:
    if "uninterpreted_option" in holder.DESCRIPTOR.fields_by_name:
        return [one.SerializeToString(deterministic=True) for one in holder.uninterpreted_option]
    found = []
    for descriptor, value in holder.ListFields():
        if descriptor.message_type is not None:
            for one in [value] if hasattr(value, "DESCRIPTOR") else value:
                found += _options_of(one)
    return found


def _indexes(payload: bytes) -> tuple[list[int], int]:
    """The index path of the message that follows, and its offset."""
    try:
        count, place = _varint(payload, 0)
        if count == 0:
            return [0], place
        if not 0 < count <= MAX_INDEXES:
            raise PayloadMismatch(f"invalid number of message indexes {count}")
        indexes = []
        for _ in range(count):
            index, place = _varint(payload, place)
            indexes.append(index)
    except IndexError:
        raise PayloadMismatch("the payload ends before the index of its message") from None
    return indexes, place


def _varint(payload: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = payload[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), place
        shift += 7
        if shift > 35:
            raise PayloadMismatch("the message index is not a valid number")
