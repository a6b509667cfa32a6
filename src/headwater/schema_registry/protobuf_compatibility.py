"""Compatibility of Protobuf schemas. Fields are identified by number. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from headwater.schema_registry.work_limit import WorkLimit

_F: Final = FieldDescriptorProto
# Types of one group have the same wire format.
_GROUPS: Final = {
    kind: number
    for number, kinds in enumerate(
        (
            (_F.TYPE_INT32, _F.TYPE_UINT32, _F.TYPE_INT64, _F.TYPE_UINT64, _F.TYPE_BOOL, _F.TYPE_ENUM),
            (_F.TYPE_SINT32, _F.TYPE_SINT64),
            (_F.TYPE_STRING, _F.TYPE_BYTES),
            (_F.TYPE_FIXED32, _F.TYPE_SFIXED32),
            (_F.TYPE_FIXED64, _F.TYPE_SFIXED64),
            (_F.TYPE_FLOAT,),
            (_F.TYPE_DOUBLE,),
            (_F.TYPE_MESSAGE,),
            (_F.TYPE_GROUP,),
        )
    )
    for kind in kinds
}
_IN_MESSAGES: Final = (_F.TYPE_MESSAGE, _F.TYPE_GROUP)


def compare(reader: FileDescriptorProto, writer: FileDescriptorProto, work: WorkLimit) -> None:
    """Collect the reasons why the reader cannot read what the writer writes."""
    packages = (reader.package, writer.package)
    _compare_all(reader.message_type, writer.message_type, "", packages, work)


def _compare_all(
    reader: Iterable[DescriptorProto],
    writer: Iterable[DescriptorProto],
    where: str,
    packages: tuple[str, str],
    work: WorkLimit,
) -> None:
    known = {message.name: message for message in reader}
    for message in writer:
        inside = f"{where}.{message.name}" if where else message.name
        if message.name in known:
            _compare(known[message.name], message, inside, packages, work)
        elif not message.options.map_entry:
            work.found(inside, "the message is gone")


def _compare(
    reader: DescriptorProto, writer: DescriptorProto, where: str, packages: tuple[str, str], work: WorkLimit
) -> None:
    written = {one.number: one for one in writer.field}
    numbers = {one.name: one.number for one in writer.field}
    read = {one.number for one in reader.field}
    for one in reader.field:
        work.step()
        inside = f"{where}.{one.name}"
        found = written.get(one.number)
        if found is None:
            if one.label == _F.LABEL_REQUIRED:
                work.found(inside, "is required and was not written")
            elif one.name in numbers and numbers[one.name] not in read:
                work.found(inside, f"had the number {numbers[one.name]} and has {one.number}: what was written is lost")
            continue
        _compare_fields(one, found, inside, packages, work)
    _compare_oneofs(reader, writer, where, work)
    _compare_all(reader.nested_type, writer.nested_type, where, packages, work)


def _compare_fields(
    one: FieldDescriptorProto, found: FieldDescriptorProto, where: str, packages: tuple[str, str], work: WorkLimit
) -> None:
    if _GROUPS[one.type] != _GROUPS[found.type]:
        work.found(where, f"{_describe(found)} was written and {_describe(one)} is read")
    elif one.type in _IN_MESSAGES and _relative(one, packages[0]) != _relative(found, packages[1]):
        work.found(where, f"{found.type_name} was written and {one.type_name} is read")
    if one.label == _F.LABEL_REQUIRED and found.label != _F.LABEL_REQUIRED:
        work.found(where, "is required and was not")
    lists = (one.label == _F.LABEL_REPEATED, found.label == _F.LABEL_REPEATED)
    packable = one.type not in (_F.TYPE_STRING, _F.TYPE_BYTES, *_IN_MESSAGES)
    if lists[0] != lists[1] and packable:
        work.found(where, "was repeated and is not any more" if lists[1] else "is repeated and was not")


def _compare_oneofs(reader: DescriptorProto, writer: DescriptorProto, where: str, work: WorkLimit) -> None:
    now, before = _oneofs(reader), _oneofs(writer)
    written = {one.number for one in writer.field}
    for name, numbers in now.items():
        moved = (numbers & written) - before.get(name, set())
        if len(moved) > 1 or (moved and name in before):
            work.found(f"{where}.{name}", "fields that could be together moved into one oneof")
    for name, numbers in before.items():
        if name in now and (gone := numbers - {one.number for one in reader.field}):
            work.found(f"{where}.{name}", f"fields are gone from the oneof: {', '.join(map(str, sorted(gone)))}")


def _oneofs(message: DescriptorProto) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for one in message.field:
        if one.HasField("oneof_index") and not one.proto3_optional:
            found.setdefault(message.oneof_decl[one.oneof_index].name, set()).add(one.number)
    return found


def _relative(one: FieldDescriptorProto, package: str) -> str:
    """The name of a type without the package of its file, which may change."""
    name = str(one.type_name).lstrip(".")
    return name.removeprefix(f"{package}.") if package else name


def _describe(one: FieldDescriptorProto) -> str:
    return str(one.type_name.lstrip(".") or _F.Type.Name(one.type).removeprefix("TYPE_").lower())
