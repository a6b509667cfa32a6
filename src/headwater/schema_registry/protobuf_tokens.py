"""The tokenizer of .proto files. Pure."""

from __future__ import annotations

import re
from typing import Final

from headwater.errors import InvalidSchema

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)"""
    r"""|(?P<text>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')"""
    r"""|(?P<number>0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"""
    r"""|(?P<word>[A-Za-z_]\w*)"""
    r"""|(?P<sign>[;{}=\[\](),.<>:/+-])""",
    re.ASCII,
)
_ESCAPES: Final = {"n": 10, "r": 13, "t": 9, "a": 7, "b": 8, "f": 12, "v": 11, "\\": 92, "'": 39, '"': 34, "?": 63}
_ESCAPE: Final = re.compile(r"\\(?:([xX][0-9a-fA-F]{1,2})|([0-7]{1,3})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")


class Tokens:
    """The tokens of a text and the present position among them."""

    def __init__(self, text: str) -> None:
        # Kind, text and offset.
        self._tokens: list[tuple[str, str, int]] = []
        self._text = text
        self._at = 0
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                raise self.error(f"unexpected character {text[place]!r}", place)
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found[0], place))
            place = found.end()
        # One more than the lookahead.
        self._tokens += [("end", "the end", place)] * 3

    def error(self, message: str, place: int | None = None) -> InvalidSchema:
        where = self._tokens[self._at][2] if place is None else place
        return InvalidSchema(f"invalid .proto file, line {self._text.count(chr(10), 0, where) + 1}: {message}")

    @property
    def kind(self) -> str:
        """The kind of the next token."""
        return self._tokens[self._at][0]

    def ahead(self, count: int = 0) -> str:
        """The next token, or one of the two after it."""
        return self._tokens[self._at + count][1]

    def back(self) -> None:
        """Undo the last step."""
        self._at -= 1

    def next(self, *wanted: str) -> str:
        kind, token, _ = self._tokens[self._at]
        if wanted and token not in wanted:
            raise self.error(f"found {token!r}, expected {' or '.join(map(repr, wanted))}")
        if kind == "end":
            raise self.error("the file ends too early")
        self._at += 1
        return token

    def at(self, *wanted: str) -> bool:
        return self._tokens[self._at][1] in wanted and self._tokens[self._at][0] != "text"

    def took(self, wanted: str) -> bool:
        if self.at(wanted):
            self._at += 1
            return True
        return False

    def word(self) -> str:
        if self._tokens[self._at][0] != "word":
            raise self.error(f"{self._tokens[self._at][1]!r} where a name should be")
        return self.next()

    def name(self) -> str:
        """A name with dots."""
        name = "." if self.took(".") else ""
        name += self.word()
        while self.took("."):
            name += f".{self.word()}"
        return name

    def whole(self) -> int:
        negative = self.took("-")
        kind, token, _ = self._tokens[self._at]
        try:
            if kind != "number":
                raise ValueError
            octal = token.startswith("0") and token.isdecimal() and len(token) > 1
            number = int(token, 8 if octal else 0)
        except ValueError:
            raise self.error(f"{token!r} where a whole number should be") from None
        self._at += 1
        return -number if negative else number

    def string(self) -> bytes:
        if self._tokens[self._at][0] != "text":
            raise self.error(f"{self._tokens[self._at][1]!r} where a text in quotes should be")
        parts = []
        while self._tokens[self._at][0] == "text":
            parts.append(_unescaped(self.next()[1:-1]))
        return b"".join(parts)

    def plain(self) -> str:
        try:
            return self.string().decode()
        except UnicodeDecodeError:
            raise self.error("a text is not UTF-8") from None


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
