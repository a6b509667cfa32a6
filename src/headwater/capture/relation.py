"""A table as pgoutput describes it. No I/O."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from headwater.capture.json_text import Form, form_of


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, as its Relation message describes it."""

    name: str
    type_oid: int
    type_name: str
    type_modifier: int
    in_identity: bool

    @property
    def form(self) -> Form:
        return form_of(self.type_name)


@dataclass(frozen=True, slots=True)
class Relation:
    """A version of a table: it applies to the changes that follow its Relation message."""

    oid: int
    schema: str
    table: str
    identity: str  # d: default, n: nothing, f: full, i: index
    columns: tuple[Column, ...]
    key: tuple[int, ...]  # indexes of the columns that identify a row; empty if there is no key
    description: str = field(init=False)
    columns_hash: str = field(init=False)

    def __post_init__(self) -> None:
        described = [
            {"name": column.name, "type": column.type_name, "modifier": column.type_modifier, "key": number in self.key}
            for number, column in enumerate(self.columns)
        ]
        description = json.dumps(described, ensure_ascii=False, separators=(",", ":"))
        named = f"{self.schema}\0{self.table}\0{self.identity}\0{description}"
        object.__setattr__(self, "description", description)
        object.__setattr__(self, "columns_hash", hashlib.sha256(named.encode()).hexdigest()[:16])
