"""The language of .proto files: from text to a descriptor that Protobuf's runtime links and checks. Pure.

The runtime cannot read such texts, and the compiler that can is a program for developers that reads and writes files.
What can be wrong with names, numbers and types is left to the runtime: here is grammar only, and a bound on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    OneofDescriptorProto,
    UninterpretedOption,
)

from headwater.errors import InvalidSchema

MAX_NESTING: Final = 30
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)"""
    r"""|(?P<text>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')"""
    r"""|(?P<number>0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"""
    r"""|(?P<word>[A-Za-z_]\w*)"""
    r"""|(?P<sign>[;{}=\[\](),.<>:/+-])""",
    re.ASCII,
)
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
_ESCAPES: Final = {"n": 10, "r": 13, "t": 9, "a": 7, "b": 8, "f": 12, "v": 11, "\\": 92, "'": 39, '"': 34, "?": 63}
_ESCAPE: Final = re.compile(r"\\(?:([xX][0-9a-fA-F]{1,2})|([0-7]{1,3})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
MAX_NUMBER: Final = 536_870_911


def parse(text: str, name: str) -> FileDescriptorProto:
    """The descriptor of a file of that name, or InvalidSchema with the line where it stops being one."""
    return _Parsing(text).file(name)


class _Parsing:
    """Reads token after token."""

    def __init__(self, text: str) -> None:
        # Kind, what it is, and where it begins.
        self._tokens: list[tuple[str, str, int]] = []
        self._text = text
        self._at = 0
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                raise self._error(f"{text[place]!r} is not of the language", place)
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found[0], place))
            place = found.end()
        # As many as are looked ahead, and one.
        self._tokens += [("end", "the end", place)] * 3
        self._proto3 = False

    # Tokens

    def _error(self, message: str, place: int | None = None) -> InvalidSchema:
        where = self._tokens[self._at][2] if place is None else place
        return InvalidSchema(f"no .proto file, line {self._text.count(chr(10), 0, where) + 1}: {message}")

    def _next(self, *wanted: str) -> str:
        kind, token, _ = self._tokens[self._at]
        if wanted and token not in wanted:
            raise self._error(f"{token!r} where {' or '.join(map(repr, wanted))} should be")
        if kind == "end":
            raise self._error("the file ends too early")
        self._at += 1
        return token

    def _is(self, *wanted: str) -> bool:
        return self._tokens[self._at][1] in wanted and self._tokens[self._at][0] != "text"

    def _took(self, wanted: str) -> bool:
        if self._is(wanted):
            self._at += 1
            return True
        return False

    def _word(self) -> str:
        if self._tokens[self._at][0] != "word":
            raise self._error(f"{self._tokens[self._at][1]!r} where a name should be")
        return self._next()

    def _name(self) -> str:
        """A name with dots."""
        name = "." if self._took(".") else ""
        name += self._word()
        while self._took("."):
            name += f".{self._word()}"
        return name

    def _whole(self) -> int:
        negative = self._took("-")
        kind, token, _ = self._tokens[self._at]
        try:
            if kind != "number":
                raise ValueError
            octal = token.startswith("0") and token.isdecimal() and len(token) > 1
            number = int(token, 8 if octal else 0)
        except ValueError:
            raise self._error(f"{token!r} where a whole number should be") from None
        self._at += 1
        return -number if negative else number

    def _number(self) -> int:
        number = self._whole()
        if not 1 <= number <= MAX_NUMBER or 19_000 <= number <= 19_999:
            raise self._error(f"a number of a field is 1 to {MAX_NUMBER} without 19000 to 19999, not {number}")
        return number

    def _string(self) -> bytes:
        if self._tokens[self._at][0] != "text":
            raise self._error(f"{self._tokens[self._at][1]!r} where a text in quotes should be")
        parts = []
        while self._tokens[self._at][0] == "text":
            parts.append(_unescaped(self._next()[1:-1]))
        return b"".join(parts)

    def _plain(self) -> str:
        try:
            return self._string().decode()
        except UnicodeDecodeError:
            raise self._error("a text is not UTF-8") from None

    # The file

    def file(self, name: str) -> FileDescriptorProto:
        file = FileDescriptorProto(name=name)
        if self._is("edition"):
            raise self._error("editions are not offered; syntax is proto2 or proto3")
        if self._took("syntax"):
            self._next("=")
            file.syntax = self._plain()
            if file.syntax not in ("proto2", "proto3"):
                raise self._error(f"syntax is proto2 or proto3, not {file.syntax!r}")
            self._next(";")
        self._proto3 = file.syntax == "proto3"
        if not self._proto3:
            file.ClearField("syntax")
        while self._tokens[self._at][0] != "end":
            self._statement(file)
        return file

    def _statement(self, file: FileDescriptorProto) -> None:
        word = self._next()
        if word == "package":
            file.package = self._name()
            self._next(";")
        elif word == "import":
            self._import(file)
        elif word == "option":
            self._option(file.options)
            self._next(";")
        elif word == "message":
            self._message(file.message_type.add(), 0)
        elif word == "enum":
            self._enum(file.enum_type.add())
        elif word == "service":
            self._service(file.service.add())
        elif word == "extend":
            self._extend(file.extension.add, file.message_type.add)
        elif word != ";":
            self._at -= 1
            raise self._error(f"{word!r} begins nothing that a file holds")

    def _import(self, file: FileDescriptorProto) -> None:
        kind = self._next() if self._is("public", "weak") else ""
        if kind:
            (file.public_dependency if kind == "public" else file.weak_dependency).append(len(file.dependency))
        file.dependency.append(self._plain())
        self._next(";")

    # Messages

    def _message(self, message: DescriptorProto, depth: int) -> None:
        message.name = self._word()
        self._body(message, depth)

    def _body(self, message: DescriptorProto, depth: int) -> None:
        if depth > MAX_NESTING:
            raise self._error(f"messages nest deeper than {MAX_NESTING} levels")
        self._next("{")
        optional: list[FieldDescriptorProto] = []
        while not self._took("}"):
            if self._took(";"):
                continue
            before = self._at
            word = self._next()
            # Each of these words may also be the name of a type: then a name follows where a bracket would.
            if word in ("message", "enum") and self._tokens[self._at + 1][1] == "{":
                if word == "message":
                    self._message(message.nested_type.add(), depth + 1)
                else:
                    self._enum(message.enum_type.add())
            elif word == "oneof" and self._tokens[self._at + 1][1] == "{":
                self._oneof(message, depth)
            elif word == "option" and not self._is("."):
                self._option(message.options)
                self._next(";")
            elif word == "reserved" and not self._is("."):
                self._reserved(message, last=1)
            elif word == "extensions" and not self._is("."):
                self._ranges(message.extension_range.add, last=1)
                if self._is("["):
                    self._options(_Nowhere())
                self._next(";")
            elif word == "extend" and not self._is("."):
                self._extend(message.extension.add, message.nested_type.add)
            else:
                self._at = before
                self._field(message.field.add(), message.nested_type.add, optional, depth)
        self._refuse_reserved(message)
        # Protobuf wants these behind all that are written out.
        for field in optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.append(OneofDescriptorProto(name=f"_{field.name}"))

    def _refuse_reserved(self, message: DescriptorProto) -> None:
        """Refuse fields that take a number or a name that the message has set aside, as after they were removed."""
        names = set(message.reserved_name)
        for field in message.field:
            if field.name in names or any(one.start <= field.number < one.end for one in message.reserved_range):
                raise self._error(f"field {field.name} = {field.number} of message {message.name} is reserved")

    def _field(
        self,
        field: FieldDescriptorProto,
        nest: Callable[[], DescriptorProto],
        optional: list[FieldDescriptorProto] | None,
        depth: int,
    ) -> None:
        field.label = FieldDescriptorProto.LABEL_OPTIONAL
        if self._is(*_LABELS) and self._tokens[self._at + 1][1] != "=":
            label = self._next()
            field.label = _LABELS[label]
            if label == "required" and self._proto3:
                raise self._error("nothing is required in proto3")
            if label == "optional" and self._proto3 and optional is not None:
                field.proto3_optional = True
                optional.append(field)
        if self._is("map") and self._tokens[self._at + 1][1] == "<":
            self._map(field, nest)
            return
        if self._is("group") and self._tokens[self._at + 2][1] == "=":
            self._group(field, nest, depth)
            return
        self._type(field)
        field.name = self._word()
        self._next("=")
        field.number = self._number()
        self._field_options(field)
        self._next(";")

    def _type(self, field: FieldDescriptorProto) -> None:
        name = self._name()
        if name in _SCALARS:
            field.type = _SCALARS[name]
        else:
            field.type_name = name

    def _map(self, field: FieldDescriptorProto, nest: Callable[[], DescriptorProto]) -> None:
        self._next("map")
        self._next("<")
        entry = nest()
        entry.options.map_entry = True
        for number, name in ((1, "key"), (2, "value")):
            part = entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            self._type(part)
            self._next("," if number == 1 else ">")
        field.label = FieldDescriptorProto.LABEL_REPEATED
        field.name = self._word()
        entry.name = "".join(part[:1].upper() + part[1:] for part in field.name.split("_")) + "Entry"
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = entry.name
        self._next("=")
        field.number = self._number()
        self._field_options(field)
        self._next(";")

    def _group(self, field: FieldDescriptorProto, nest: Callable[[], DescriptorProto], depth: int) -> None:
        self._next("group")
        message = nest()
        message.name = self._word()
        field.name = message.name.lower()
        field.type = FieldDescriptorProto.TYPE_GROUP
        field.type_name = message.name
        self._next("=")
        field.number = self._number()
        self._field_options(field)
        self._body(message, depth + 1)

    def _oneof(self, message: DescriptorProto, depth: int) -> None:
        index = len(message.oneof_decl)
        oneof = message.oneof_decl.add(name=self._word())
        self._next("{")
        while not self._took("}"):
            if self._took(";"):
                continue
            if self._is("option") and self._tokens[self._at + 2][1] in ("=", "."):
                self._next()
                self._option(oneof.options)
                self._next(";")
                continue
            field = message.field.add()
            self._field(field, message.nested_type.add, None, depth)
            field.oneof_index = index

    def _extend(self, add: Callable[[], FieldDescriptorProto], nest: Callable[[], DescriptorProto]) -> None:
        extendee = self._name()
        self._next("{")
        while not self._took("}"):
            if self._took(";"):
                continue
            field = add()
            self._field(field, nest, None, 0)
            field.extendee = extendee

    # Enums and services

    def _enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self._word()
        self._next("{")
        while not self._took("}"):
            if self._took(";"):
                continue
            word = self._word()
            if word == "option" and not self._is("="):
                self._option(enum.options)
            elif word == "reserved" and not self._is("="):
                self._reserved(enum, last=0)
                continue
            else:
                self._next("=")
                value = enum.value.add(name=word, number=self._enum_number())
                if self._is("["):
                    self._options(value.options)
            self._next(";")

    def _enum_number(self) -> int:
        number = self._whole()
        if not -(2**31) <= number < 2**31:
            raise self._error(f"{number} is above 32 bits")
        return number

    def _service(self, service: Any) -> None:
        service.name = self._word()
        self._next("{")
        while not self._took("}"):
            word = self._next("rpc", "option", ";")
            if word == "option":
                self._option(service.options)
                self._next(";")
            elif word == "rpc":
                method = service.method.add(name=self._word())
                method.client_streaming, method.input_type = self._in_brackets()
                self._next("returns")
                method.server_streaming, method.output_type = self._in_brackets()
                if not self._took(";"):
                    self._next("{")
                    while not self._took("}"):
                        if self._next("option", ";") == "option":
                            self._option(method.options)
                            self._next(";")

    def _in_brackets(self) -> tuple[bool, str]:
        self._next("(")
        streaming = self._is("stream") and self._tokens[self._at + 1][1] not in (")", ".")
        if streaming:
            self._next()
        name = self._name()
        self._next(")")
        return streaming, name

    # Numbers and names that are set aside

    def _reserved(self, holder: Any, *, last: int) -> None:
        if self._tokens[self._at][0] == "number" or self._is("-"):
            self._ranges(holder.reserved_range.add, last=last)
        else:
            while True:
                text = self._tokens[self._at][0] == "text"
                holder.reserved_name.append(self._plain() if text else self._word())
                if not self._took(","):
                    break
        self._next(";")

    def _ranges(self, add: Callable[..., Any], *, last: int) -> None:
        # In a message a range ends before its end, in an enum with it.
        while True:
            first = self._enum_number()
            end = first
            if self._took("to"):
                end = (MAX_NUMBER if last else 2**31 - 1) if self._took("max") else self._enum_number()
            if end < first or end + last >= 2**31:
                raise self._error(f"{first} to {end} is no range")
            add(start=first, end=end + last)
            if not self._took(","):
                break

    # Options: those of the language that matter for payloads are read, the others are kept as they are.

    def _field_options(self, field: FieldDescriptorProto) -> None:
        if self._is("["):
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
        self._next("[")
        while True:
            self._option(options)
            if not self._took(","):
                break
        self._next("]")

    def _option(self, options: Any) -> None:
        option = UninterpretedOption()
        while True:
            if self._took("("):
                option.name.add(name_part=self._name(), is_extension=True)
                self._next(")")
            else:
                option.name.add(name_part=self._word(), is_extension=False)
            if not self._took("."):
                break
        self._next("=")
        self._value(option)
        if isinstance(options, _Nowhere):
            return
        name = option.name[0].name_part
        if name == "allow_alias" and option.identifier_value in ("true", "false"):
            options.allow_alias = option.identifier_value == "true"
        else:
            options.uninterpreted_option.append(option)

    def _value(self, option: UninterpretedOption) -> None:
        kind, token, _ = self._tokens[self._at]
        if kind == "text":
            option.string_value = self._string()
        elif token == "{":
            option.aggregate_value = self._aggregate()
        elif kind == "word":
            option.identifier_value = self._name()
        else:
            negative = self._took("-") or (self._took("+") and False)
            kind, token, _ = self._tokens[self._at]
            self._next()
            if kind == "word" and token in ("inf", "nan"):
                option.double_value = -float(token) if negative else float(token)
            elif kind != "number":
                self._at -= 1
                raise self._error(f"{token!r} where a value should be")
            elif len(token) > 40:
                raise self._error(f"a number of {len(token)} digits")
            elif token.isdecimal() and int(token) < 2**63:
                if negative:
                    option.negative_int_value = -int(token)
                else:
                    option.positive_int_value = int(token)
            else:
                number = float(int(token, 16)) if token[:2] in ("0x", "0X") else float(token)
                option.double_value = -number if negative else number

    def _aggregate(self) -> str:
        self._next("{")
        depth = 1
        tokens = []
        while depth:
            token = self._next()
            depth += (token == "{") - (token == "}")
            tokens.append(token)
        return " ".join(tokens[:-1])


class _Nowhere:
    """Options that nobody keeps."""


def _default_of(option: UninterpretedOption) -> str:
    for name in ("identifier_value", "positive_int_value", "negative_int_value", "double_value"):
        if option.HasField(name):
            return str(getattr(option, name))
    return str(option.string_value.decode("latin-1"))


def _unescaped(text: str) -> bytes:
    parts: list[bytes] = []
    place = 0
    for found in _ESCAPE.finditer(text):
        parts.append(text[place : found.start()].encode(errors="replace"))
        in_hex, octal, short, long, letter = found.groups()
        if in_hex:
            parts.append(bytes((int(in_hex[1:], 16),)))
        elif octal:
            parts.append(bytes((int(octal, 8) & 255,)))
        elif short or long:
            number = int(short or long, 16)
            parts.append(chr(number).encode(errors="replace") if number < 0x110000 else b"?")
        else:
            parts.append(bytes((_ESCAPES[letter],)) if letter in _ESCAPES else letter.encode(errors="replace"))
        place = found.end()
    parts.append(text[place:].encode(errors="replace"))
    return b"".join(parts)
