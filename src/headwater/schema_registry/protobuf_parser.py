"""A parser of .proto files: from text to a descriptor that Protobuf's runtime links and checks. Pure.

The runtime cannot parse such texts, and the compiler that can is a developer tool that works on files. This module only
checks the grammar, within limits; the runtime checks names, numbers and types.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    OneofDescriptorProto,
    UninterpretedOption,
)

from headwater.schema_registry.protobuf_tokens import Tokens

MAX_NESTING: Final = 30
_SCALARS: Final = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in (
        "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
        "sfixed64", "bool", "string", "bytes",
    )
}  # fmt: skip
_LABELS: Final = {
    "optional": FieldDescriptorProto.LABEL_OPTIONAL,
    "required": FieldDescriptorProto.LABEL_REQUIRED,
    "repeated": FieldDescriptorProto.LABEL_REPEATED,
}
MAX_NUMBER: Final = 536_870_911


def parse(text: str, name: str) -> FileDescriptorProto:
    """Parse a file; returns its descriptor. Raises InvalidSchema with the line of the error."""
    return _FileParser(text).file(name)


class _FileParser(Tokens):
    """A recursive-descent parser."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._proto3 = False

    def _number(self) -> int:
        number = self.whole()
        if not 1 <= number <= MAX_NUMBER or 19_000 <= number <= 19_999:
            raise self.error(f"invalid field number {number}: expected 1 to {MAX_NUMBER}, except 19000 to 19999")
        return number

    # The file

    def file(self, name: str) -> FileDescriptorProto:
        file = FileDescriptorProto(name=name)
        if self.at("edition"):
            raise self.error("editions are not supported; use syntax proto2 or proto3")
        if self.took("syntax"):
            self.next("=")
            file.syntax = self.plain()
            if file.syntax not in ("proto2", "proto3"):
                raise self.error(f"invalid syntax {file.syntax!r}: expected proto2 or proto3")
            self.next(";")
        self._proto3 = file.syntax == "proto3"
        if not self._proto3:
            file.ClearField("syntax")
        while self.kind != "end":
            self._statement(file)
        return file

    def _statement(self, file: FileDescriptorProto) -> None:
        word = self.next()
        if word == "package":
            file.package = self.name()
            self.next(";")
        elif word == "import":
            self._import(file)
        elif word == "option":
            self._option(file.options)
            self.next(";")
        elif word == "message":
            self._message(file.message_type.add(), 0)
        elif word == "enum":
            self._enum(file.enum_type.add())
        elif word == "service":
            self._service(file.service.add())
        elif word == "extend":
            self._extend(file.extension.add, file.message_type.add)
        elif word != ";":
            self.back()
            raise self.error(f"unexpected {word!r} at the top level of a file")

    def _import(self, file: FileDescriptorProto) -> None:
        kind = self.next() if self.at("public", "weak") else ""
        if kind:
            (file.public_dependency if kind == "public" else file.weak_dependency).append(len(file.dependency))
        file.dependency.append(self.plain())
        self.next(";")

    # Messages

    def _message(self, message: DescriptorProto, depth: int) -> None:
        message.name = self.word()
        self._body(message, depth)

    def _body(self, message: DescriptorProto, depth: int) -> None:
        if depth > MAX_NESTING:
            raise self.error(f"messages nest deeper than {MAX_NESTING} levels")
        self.next("{")
        optional: list[FieldDescriptorProto] = []
        while not self.took("}"):
            if self.took(";"):
                continue
            word = self.next()
            # Each of these words may also be the name of a type: then a name follows instead of a bracket.
            if word in ("message", "enum") and self.ahead(1) == "{":
                if word == "message":
                    self._message(message.nested_type.add(), depth + 1)
                else:
                    self._enum(message.enum_type.add())
            elif word == "oneof" and self.ahead(1) == "{":
                self._oneof(message, depth)
            elif word == "option" and not self.at("."):
                self._option(message.options)
                self.next(";")
            elif word == "reserved" and not self.at("."):
                self._reserved(message, last=1)
            elif word == "extensions" and not self.at("."):
                self._ranges(message.extension_range.add, last=1)
                if self.at("["):
                    self._options(_IgnoredOptions())
                self.next(";")
            elif word == "extend" and not self.at("."):
                self._extend(message.extension.add, message.nested_type.add)
            else:
                self.back()
                self._field(message.field.add(), message.nested_type.add, optional, depth)
        self._refuse_reserved(message)
        # Protobuf requires these after all declared ones.
        for field in optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.append(OneofDescriptorProto(name=f"_{field.name}"))

    def _refuse_reserved(self, message: DescriptorProto) -> None:
        """Raise InvalidSchema for fields with a reserved number or name."""
        names = set(message.reserved_name)
        ranges = sorted((one.start, one.end) for one in message.reserved_range)
        starts = [start for start, _ in ranges]
        # The highest end up to each range, since ranges may overlap.
        ends = list(accumulate((end for _, end in ranges), max))
        for field in message.field:
            before = bisect_right(starts, field.number)
            if field.name in names or (before and field.number < ends[before - 1]):
                raise self.error(f"field {field.name} = {field.number} of message {message.name} is reserved")

    def _field(
        self,
        field: FieldDescriptorProto,
        nest: Callable[[], DescriptorProto],
        optional: list[FieldDescriptorProto] | None,
        depth: int,
    ) -> None:
        field.label = FieldDescriptorProto.LABEL_OPTIONAL
        if self.at(*_LABELS) and self.ahead(1) != "=":
            label = self.next()
            field.label = _LABELS[label]
            if label == "required" and self._proto3:
                raise self.error("required is not allowed in proto3")
            if label == "optional" and self._proto3 and optional is not None:
                field.proto3_optional = True
                optional.append(field)
        if self.at("map") and self.ahead(1) == "<":
            self._map(field, nest)
            return
        if self.at("group") and self.ahead(2) == "=":
            self._group(field, nest, depth)
            return
        self._type(field)
        field.name = self.word()
        self.next("=")
        field.number = self._number()
        self._field_options(field)
        self.next(";")

    def _type(self, field: FieldDescriptorProto) -> None:
        name = self.name()
        if name in _SCALARS:
            field.type = _SCALARS[name]
        else:
            field.type_name = name

    def _map(self, field: FieldDescriptorProto, nest: Callable[[], DescriptorProto]) -> None:
        self.next("map")
        self.next("<")
        entry = nest()
        entry.options.map_entry = True
        for number, name in ((1, "key"), (2, "value")):
            part = entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            self._type(part)
            self.next("," if number == 1 else ">")
        field.label = FieldDescriptorProto.LABEL_REPEATED
        field.name = self.word()
        entry.name = "".join(part[:1].upper() + part[1:] for part in field.name.split("_")) + "Entry"
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = entry.name
        self.next("=")
        field.number = self._number()
        self._field_options(field)
        self.next(";")

    def _group(self, field: FieldDescriptorProto, nest: Callable[[], DescriptorProto], depth: int) -> None:
        self.next("group")
        message = nest()
        message.name = self.word()
        field.name = message.name.lower()
        field.type = FieldDescriptorProto.TYPE_GROUP
        field.type_name = message.name
        self.next("=")
        field.number = self._number()
        self._field_options(field)
        self._body(message, depth + 1)

    def _oneof(self, message: DescriptorProto, depth: int) -> None:
        index = len(message.oneof_decl)
        oneof = message.oneof_decl.add(name=self.word())
        self.next("{")
        while not self.took("}"):
            if self.took(";"):
                continue
            if self.at("option") and self.ahead(2) in ("=", "."):
                self.next()
                self._option(oneof.options)
                self.next(";")
                continue
            field = message.field.add()
            self._field(field, message.nested_type.add, None, depth)
            field.oneof_index = index

    def _extend(self, add: Callable[[], FieldDescriptorProto], nest: Callable[[], DescriptorProto]) -> None:
        extendee = self.name()
        self.next("{")
        while not self.took("}"):
            if self.took(";"):
                continue
            field = add()
            self._field(field, nest, None, 0)
            field.extendee = extendee

    # Enums and services

    def _enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self.word()
        self.next("{")
        while not self.took("}"):
            if self.took(";"):
                continue
            word = self.word()
            if word == "option" and not self.at("="):
                self._option(enum.options)
            elif word == "reserved" and not self.at("="):
                self._reserved(enum, last=0)
                continue
            else:
                self.next("=")
                value = enum.value.add(name=word, number=self._enum_number())
                if self.at("["):
                    self._options(value.options)
            self.next(";")

    def _enum_number(self) -> int:
        number = self.whole()
        if not -(2**31) <= number < 2**31:
            raise self.error(f"{number} exceeds 32 bits")
        return number

    def _service(self, service: Any) -> None:
        service.name = self.word()
        self.next("{")
        while not self.took("}"):
            word = self.next("rpc", "option", ";")
            if word == "option":
                self._option(service.options)
                self.next(";")
            elif word == "rpc":
                method = service.method.add(name=self.word())
                method.client_streaming, method.input_type = self._in_brackets()
                self.next("returns")
                method.server_streaming, method.output_type = self._in_brackets()
                if not self.took(";"):
                    self.next("{")
                    while not self.took("}"):
                        if self.next("option", ";") == "option":
                            self._option(method.options)
                            self.next(";")

    def _in_brackets(self) -> tuple[bool, str]:
        self.next("(")
        streaming = self.at("stream") and self.ahead(1) not in (")", ".")
        if streaming:
            self.next()
        name = self.name()
        self.next(")")
        return streaming, name

    # Numbers and names that are set aside

    def _reserved(self, holder: Any, *, last: int) -> None:
        if self.kind == "number" or self.at("-"):
            self._ranges(holder.reserved_range.add, last=last)
        else:
            while True:
                text = self.kind == "text"
                holder.reserved_name.append(self.plain() if text else self.word())
                if not self.took(","):
                    break
        self.next(";")

    def _ranges(self, add: Callable[..., Any], *, last: int) -> None:
        # In a message, the end of a range is exclusive; in an enum, inclusive.
        while True:
            first = self._enum_number()
            end = first
            if self.took("to"):
                end = (MAX_NUMBER if last else 2**31 - 1) if self.took("max") else self._enum_number()
            if end < first or end + last >= 2**31:
                raise self.error(f"invalid range {first} to {end}")
            add(start=first, end=end + last)
            if not self.took(","):
                break

    # Options: those that matter for payloads are interpreted, the others are kept as they are.

    def _field_options(self, field: FieldDescriptorProto) -> None:
        if self.at("["):
            self._options(field.options)
            kept = []
            for option in field.options.uninterpreted_option:
                name = option.name[0].name_part if not option.name[0].is_extension else ""
                if name == "default" and len(option.name) == 1:
                    field.default_value = _default_of(option)
                elif name == "json_name" and len(option.name) == 1:
                    field.json_name = option.string_value.decode(errors="replace")
                elif name in ("packed", "deprecated") and option.identifier_value in ("true", "false"):
                    setattr(field.options, name, option.identifier_value == "true")
                else:
                    kept.append(option)
            del field.options.uninterpreted_option[:]
            field.options.uninterpreted_option.extend(kept)
            if not kept and not field.options.ListFields():
                field.ClearField("options")

    def _options(self, options: Any) -> None:
        self.next("[")
        while True:
            self._option(options)
            if not self.took(","):
                break
        self.next("]")

    def _option(self, options: Any) -> None:
        option = UninterpretedOption()
        while True:
            if self.took("("):
                option.name.add(name_part=self.name(), is_extension=True)
                self.next(")")
            else:
                option.name.add(name_part=self.word(), is_extension=False)
            if not self.took("."):
                break
        self.next("=")
        self._value(option)
        if isinstance(options, _IgnoredOptions):
            return
        name = option.name[0].name_part
        if name == "allow_alias" and option.identifier_value in ("true", "false"):
            options.allow_alias = option.identifier_value == "true"
        else:
            options.uninterpreted_option.append(option)

    def _value(self, option: UninterpretedOption) -> None:
        kind, token = self.kind, self.ahead()
        if kind == "text":
            option.string_value = self.string()
        elif token == "{":
            option.aggregate_value = self._aggregate()
        elif kind == "word":
            option.identifier_value = self.name()
        else:
            negative = self.took("-") or (self.took("+") and False)
            kind, token = self.kind, self.ahead()
            self.next()
            if kind == "word" and token in ("inf", "nan"):
                option.double_value = -float(token) if negative else float(token)
            elif kind != "number":
                self.back()
                raise self.error(f"found {token!r}, expected a value")
            elif len(token) > 40:
                raise self.error(f"a number of {len(token)} digits is too long")
            elif token.isdecimal() and int(token) < 2**63:
                if negative:
                    option.negative_int_value = -int(token)
                else:
                    option.positive_int_value = int(token)
            else:
                number = float(int(token, 16)) if token[:2] in ("0x", "0X") else float(token)
                option.double_value = -number if negative else number

    def _aggregate(self) -> str:
        self.next("{")
        depth = 1
        tokens = []
        while depth:
            token = self.next()
            depth += (token == "{") - (token == "}")
            tokens.append(token)
        return " ".join(tokens[:-1])


class _IgnoredOptions:
    """Discards options."""


def _default_of(option: UninterpretedOption) -> str:
    for name in ("identifier_value", "positive_int_value", "negative_int_value", "double_value"):
        if option.HasField(name):
            return str(getattr(option, name))
    return str(option.string_value.decode("latin-1"))
