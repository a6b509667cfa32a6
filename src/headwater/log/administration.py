"""Administration of the log: topics, settings, maintenance, metrics and health."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar, Unpack

from psycopg import AsyncConnection

from headwater.calls import Call
from headwater.calls import log as log_calls
from headwater.calls import metrics as metric_calls
from headwater.calls.audit import audit
from headwater.calls.metrics import LogHealth, Sample
from headwater.database.caller_connection import AsyncCallerConnection
from headwater.database.connection import CallRunner, Topics, as_names
from headwater.log.model import LogSettings, LogState, MaintenanceResult, Publisher, Topic, TopicOverview
from headwater.log.settings import NewTopicSettings, TopicChanges

T = TypeVar("T")


class AdministrationApi(CallRunner):
    """Topics, settings and maintenance."""

    async def create_topic(
        self,
        name: str,
        *,
        if_missing: bool = False,
        connection: AsyncCallerConnection | None = None,
        **settings: Unpack[NewTopicSettings],
    ) -> Topic:
        """Create a topic. With `if_missing`, an existing topic is returned unchanged."""
        return await self._run(log_calls.create_topic(name, if_missing=if_missing, **settings), connection)

    async def alter_topic(
        self,
        name: str,
        *,
        keep_forever: bool = False,
        connection: AsyncCallerConnection | None = None,
        **changes: Unpack[TopicChanges],
    ) -> Topic:
        """Change settings of a topic; None leaves a setting unchanged, `keep_forever` removes the retention."""
        return await self._run(log_calls.alter_topic(name, keep_forever=keep_forever, **changes), connection)

    async def delete_topic(self, name: str, *, connection: AsyncCallerConnection | None = None) -> None:
        """Delete a topic with its events."""
        await self._run(log_calls.delete_topic(name), connection)

    async def topic(self, name: str) -> Topic:
        """A topic and its settings."""
        return await self._run(log_calls.find_topic(name))

    async def topics(self) -> list[TopicOverview]:
        """All topics, with their first and last events."""
        return await self._run(log_calls.topics())

    async def state(self, topics: Topics = None) -> LogState:
        """The head, the stable position for readers of these topics (None: of the whole log), and the epoch."""
        return await self._run(log_calls.log_state(as_names(topics)))

    async def publishers_in_flight(self) -> list[Publisher]:
        """Open transactions that have published. Readers wait for them."""
        return await self._run(log_calls.publishers_in_flight())

    async def settings(self) -> LogSettings:
        """The settings of the whole log."""
        return await self._run(log_calls.log_settings())

    async def change_settings(
        self,
        *,
        segment_interval: timedelta | None = None,
        segments_ahead: int | None = None,
        auto_create_topics: bool | None = None,
        kafka_offsets_kept: timedelta | None = None,
        max_publisher_seconds: float | None = None,
    ) -> LogSettings:
        """Change settings of the whole log; None leaves a setting unchanged; 0 for max_publisher_seconds removes the
        limit."""
        call = log_calls.change_log_settings(
            segment_interval=segment_interval,
            segments_ahead=segments_ahead,
            auto_create_topics=auto_create_topics,
            kafka_offsets_kept=kafka_offsets_kept,
            max_publisher_seconds=max_publisher_seconds,
        )
        return await self._run(call)

    async def maintain(self) -> MaintenanceResult:
        """Run maintenance once: publish due events, create segments in advance, and remove expired events."""
        return await self._run(log_calls.maintain())

    async def metrics(self, *, most: int = 200) -> list[Sample]:
        """Metrics of the log, with at most `most` topics, queues, cursors and pipelines each."""
        return await self._run(metric_calls.metrics(most=most))

    async def health(self) -> LogHealth:
        """The health of the log: whether it can be read and written."""
        return await self._run(metric_calls.log_health())

    @asynccontextmanager
    async def audited(
        self, actor: str | None, action: str, subject: str, detail: Mapping[str, Any]
    ) -> AsyncIterator[AsyncConnection[Any]]:
        """A transaction for an administrative action and its event in the topic `headwater.audit`: they commit
        together. The block may add to `detail`, but nothing secret."""
        async with self.transaction() as connection:
            yield connection
            await self._run(audit(actor or "everybody", action, subject, detail), connection)

    async def run_audited(
        self, call: Call[T], actor: str | None, action: str, subject: str, detail: Mapping[str, Any]
    ) -> T:
        """Run an administrative call together with its audit event."""
        async with self.audited(actor, action, subject, detail) as connection:
            return await self._run(call, connection)
