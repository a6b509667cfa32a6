"""Topics, and the log as a whole."""
# Generated from log/administration.py by tools/unasync.py: write there.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from psycopg import Connection

from headwater import calls
from headwater.calls import Call
from headwater.calls.audit import audit
from headwater.client.database.connection import Shell, Topics, as_names
from headwater.model import (
    LogHealth,
    LogSettings,
    LogState,
    Publisher,
    Sample,
    Topic,
    TopicKind,
    TopicOverview,
    Upkeep,
)

T = TypeVar("T")


class Administration(Shell):
    """Topics, settings and upkeep."""

    def create_topic(
        self,
        name: str,
        *,
        kind: TopicKind = "open",
        partitions: int = 1,
        retention: timedelta | None = None,
        max_payload_bytes: int | None = None,
        max_header_bytes: int | None = None,
        if_missing: bool = False,
        connection: Connection[Any] | None = None,
    ) -> Topic:
        """Create a topic. With `if_missing`, one that is there is returned as it is."""
        call = calls.create_topic(
            name,
            kind=kind,
            partitions=partitions,
            retention=retention,
            max_payload_bytes=max_payload_bytes,
            max_header_bytes=max_header_bytes,
            if_missing=if_missing,
        )
        return self._run(call, connection)

    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        retention: timedelta | None = None,
        keep_forever: bool = False,
        max_payload_bytes: int | None = None,
        max_header_bytes: int | None = None,
        connection: Connection[Any] | None = None,
    ) -> Topic:
        """Change settings of a topic; None leaves one as it is."""
        call = calls.alter_topic(
            name,
            partitions=partitions,
            retention=retention,
            keep_forever=keep_forever,
            max_payload_bytes=max_payload_bytes,
            max_header_bytes=max_header_bytes,
        )
        return self._run(call, connection)

    def delete_topic(self, name: str, *, connection: Connection[Any] | None = None) -> None:
        """Delete a topic with its events."""
        self._run(calls.delete_topic(name), connection)

    def topic(self, name: str) -> Topic:
        """One topic's settings."""
        return self._run(calls.find_topic(name))

    def topics(self) -> list[TopicOverview]:
        """Every topic with what it holds."""
        return self._run(calls.topics())

    def state(self, topics: Topics = None) -> LogState:
        """How far the log goes, how far readers of these topics may read, or of the whole log, and in which epoch."""
        return self._run(calls.log_state(as_names(topics)))

    def publishers_in_flight(self) -> list[Publisher]:
        """The open transactions that have published: what readers wait for."""
        return self._run(calls.publishers_in_flight())

    def settings(self) -> LogSettings:
        """The settings of the whole log."""
        return self._run(calls.log_settings())

    def change_settings(
        self,
        *,
        segment_interval: timedelta | None = None,
        segments_ahead: int | None = None,
        auto_create_topics: bool | None = None,
        kafka_offsets_kept: timedelta | None = None,
        max_publisher_seconds: float | None = None,
    ) -> LogSettings:
        """Change settings of the whole log; None leaves one as it is; 0 for max_publisher_seconds removes the limit."""
        call = calls.change_log_settings(
            segment_interval=segment_interval,
            segments_ahead=segments_ahead,
            auto_create_topics=auto_create_topics,
            kafka_offsets_kept=kafka_offsets_kept,
            max_publisher_seconds=max_publisher_seconds,
        )
        return self._run(call)

    def maintain(self) -> Upkeep:
        """One round of upkeep: due events enter, segments are made ahead and dropped behind."""
        return self._run(calls.maintain())

    def metrics(self, *, most: int = 200) -> list[Sample]:
        """The log in figures; of topics, groups, cursors and pipelines at most so many each."""
        return self._run(calls.metrics(most=most))

    def health(self) -> LogHealth:
        """What tells whether the log can be worked with."""
        return self._run(calls.log_health())

    @contextmanager
    def audited(
        self, actor: str | None, action: str, subject: str, detail: Mapping[str, Any]
    ) -> Iterator[Connection[Any]]:
        """A transaction for what an administrator does, and for the event of `headwater.audit` that tells of it:
        neither is there without the other. The block may add to `detail` what it finds out; nothing secret."""
        with self.transaction() as connection:
            yield connection
            self._run(audit(actor or "everybody", action, subject, detail), connection)

    def run_audited(self, call: Call[T], actor: str | None, action: str, subject: str, detail: Mapping[str, Any]) -> T:
        """Carry out a call of an administrator, with the event that tells of it."""
        with self.audited(actor, action, subject, detail) as connection:
            return self._run(call, connection)
