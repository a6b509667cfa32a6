"""Names in NATS: tokens of tables, subjects, message ids and keys. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from headwater.nats.errors import InvalidMessage

CDC_STREAM: Final = "CDC"
INIT_STREAM: Final = "INIT"
SCHEMAS_BUCKET: Final = "schemas"
DICTIONARIES_BUCKET: Final = "dictionaries"
SNAPSHOTS_BUCKET: Final = "snapshots"

REQUESTS: Final = "snapshot.request"
DEFAULT_SCHEMA: Final = "public"

# Allowed characters of bucket keys, without those with a meaning here: = escapes, / separates the schema, . tokens.
_ESCAPED: Final = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPE: Final = re.compile(rb"=([0-9A-F]{2})")
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")


@dataclass(frozen=True, slots=True)
class Table:
    """A table by its schema and name, and its encoding as one token of a subject."""

    schema: str
    name: str

    @property
    def token(self) -> str:
        """`orders` for public.orders, `sales/orders` for sales.orders; other characters as =XX."""
        if self.schema == DEFAULT_SCHEMA:
            return _escape(self.name)
        return f"{_escape(self.schema)}/{_escape(self.name)}"

    @property
    def full_name(self) -> str:
        """`public.orders`, as in texts and message ids."""
        return f"{_escape(self.schema)}.{_escape(self.name)}"

    @staticmethod
    def of_token(token: str) -> Table:
        """Parse a token; InvalidMessage if it is invalid."""
        schema, divided, name = token.rpartition("/")
        if not _NAME.fullmatch(name) or (divided and not _NAME.fullmatch(schema)):
            raise InvalidMessage(f"invalid table token {token[:200]!r}")
        try:
            return Table(_unescape(schema) if divided else DEFAULT_SCHEMA, _unescape(name))
        except UnicodeDecodeError as error:
            raise InvalidMessage(f"invalid table token {token[:200]!r}") from error

    @staticmethod
    def parse(text: str) -> Table:
        """Parse `orders` or `public.orders`."""
        schema, divided, name = text.partition(".")
        if not divided:
            schema, name = DEFAULT_SCHEMA, text
        if not schema or not name:
            raise InvalidMessage(f"invalid table {text!r}: expected schema.table, such as public.orders")
        return Table(schema, name)


def change_subject(table: Table, operation: str) -> str:
    """The subject of a single change of a table."""
    return f"cdc.{table.token}.{operation}"


def packed_subject(table: Table, operation: str) -> str:
    """The subject of several changes of one transaction; `operation` is `mixed` unless all are the same."""
    return f"cdc.{table.token}.{operation}.batch"


def changes_filter(table: Table) -> str:
    """The filter for all changes of a table."""
    return f"cdc.{table.token}.>"


def chunk_subject(table: Table, snapshot_id: str, chunk: int) -> str:
    return f"init.snap.{table.token}.{snapshot_id}.{chunk}"


def chunks_filter(table: Table, snapshot_id: str) -> str:
    return f"init.snap.{table.token}.{snapshot_id}.*"


def meta_subject(table: Table) -> str:
    return f"init.meta.{table.token}"


def error_subject(table: Table) -> str:
    """The subject for failures of a table's snapshots."""
    return f"init.error.{table.token}"


def range_key(table: Table, snapshot_id: str, number: int) -> str:
    """The key of the record that a range of a running snapshot is complete."""
    return f"{table.token}.{snapshot_id}.{number}"


def request_subject(table: Table) -> str:
    return f"{REQUESTS}.{table.token}"


def requested_table(subject: str) -> Table:
    """The table that a snapshot request is for."""
    return Table.of_token(subject.removeprefix(f"{REQUESTS}."))


def change_id(commit_lsn: int, sequence: int) -> str:
    """The id of a change: ids sort in the order of the changes."""
    return f"{commit_lsn:016x}-{sequence:08x}"


def dictionary_key(table: Table, dictionary_id: int) -> str:
    return f"{table.token}.{dictionary_id}"


def _escape(name: str) -> str:
    if not name:
        raise InvalidMessage("empty name of a schema or table")
    return _ESCAPED.sub(lambda found: b"=%02X" % found.group()[0], name.encode()).decode()


def _unescape(name: str) -> str:
    return _ESCAPE.sub(lambda found: bytes([int(found.group(1), 16)]), name.encode()).decode()
