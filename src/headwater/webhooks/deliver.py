"""Delivers webhooks: sends the events of each webhook's queue to its URL.

`Dispatcher` runs one `_WebhookDelivery` for each active webhook and reads the list again every second. All state is in
the log, so any number of dispatchers can run and any can be killed: delivery is at-least-once, and an event that is
sent again has the same message id.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import psycopg

from headwater import aio
from headwater.calls import webhooks as calls
from headwater.errors import HeadwaterError, QueueNotFound
from headwater.log.model import Event
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, QUEUE, WEBHOOK, WEBHOOK_REQUESTS, logger
from headwater.queue.model import ClaimedEvent, Outcome, Retry, Snooze
from headwater.queue.worker import Worker, WorkerProcess, reap_queues
from headwater.sql_subscriptions.reader import QueueReader, Subscriber
from headwater.supervisor import supervise
from headwater.webhooks.addresses import Network
from headwater.webhooks.model import WebhookRoute, WebhookTest
from headwater.webhooks.requests import ReceiverGone, judge, message_id, request_for
from headwater.webhooks.sender import Sender

# Larger payloads are encoded in a thread, so that they do not block the event loop.
LARGE_BYTES: Final = 1_048_576
# A Retry-After of the receiver pauses all events of the webhook, for at most this time.
MAX_HOLD_SECONDS: Final = 60.0
DEFAULT_CONCURRENCY: Final = 10
# The handler name in retries and dead letters of a webhook with a filter, and how long one event may take in all:
# waiting for the rate limit, and for the receiver, which has its own timeout.
HANDLER: Final = "webhook"
MAX_DELIVERY_SECONDS: Final = 3600.0
# How long a webhook waits after its delivery ended with an error.
RESTART_SECONDS: Final = 5.0


@dataclass(slots=True, eq=False)
class _WebhookDelivery:
    """Delivers one webhook until stopped."""

    log: aio.AsyncHeadwater
    route: WebhookRoute
    sender: Sender
    name: str
    grace_seconds: float
    cloud_events_source: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    held_until: float = 0.0

    async def run(self) -> None:
        """Claim, send and settle until stopped: then finished events are settled and the others released."""
        webhook = self.route.webhook
        concurrency = webhook.max_concurrency or DEFAULT_CONCURRENCY
        if self.route.kind == "subscriptions":
            try:
                await self._reader(concurrency).run()
            finally:
                self.sender.close()
            return
        worker = Worker(
            handler=self.deliver,
            queue=webhook.queue,
            topics=(),
            concurrency=concurrency,
            # Two leases, each for half of the concurrency: a slow response delays at most half of the events, and
            # neither lease waits for capacity that the other has.
            prefetch=math.ceil(concurrency / 2),
            leases=min(concurrency, 2),
            batch=False,
            transactional=False,
            timeout_seconds=None,
            ordered_keys=self.route.ordered_keys,
            queue_settings={},
        )
        process = WorkerProcess(
            log=self.log,
            blocking=None,
            stopping=self.stop,
            grace_seconds=self.grace_seconds,
            name=self.name,
            middleware=(),
            lease_seconds={webhook.queue: self.route.lease_seconds},
            # One dispatcher does it for all of its webhooks.
            maintains=False,
        )
        try:
            await process.run([worker], [])
        finally:
            self.sender.close()

    def _reader(self, concurrency: int) -> QueueReader:
        """A reader that sends the events that the subscriptions of the queue match."""
        webhook = self.route.webhook
        subscriber = Subscriber(
            name=HANDLER,
            handler=self.send,
            queue=webhook.queue,
            filter="",
            params={},
            concurrency=concurrency,
            timeout_seconds=MAX_DELIVERY_SECONDS,
            takes_all=True,
        )
        return QueueReader(
            log=self.log,
            queue=webhook.queue,
            subscribers=[subscriber],
            reader=f"{self.name}/{webhook.name}"[:200],
            stopping=self.stop,
            grace_seconds=self.grace_seconds,
            read_ahead=2,
            batch_size=max(100, concurrency),
        )

    async def deliver(self, event: ClaimedEvent) -> Outcome:
        return await self.send(event.event)

    async def send(self, event: Event) -> Outcome:
        webhook = self.route.webhook
        if not await self._wait_for_turn():
            return Snooze()
        now = datetime.now(UTC)
        make = partial(
            request_for,
            webhook,
            event,
            message_id(webhook, event.position),
            now=now,
            cloud_events_source=self.cloud_events_source,
        )
        large = len(event.payload or b"") > LARGE_BYTES
        response = await self.sender.send(await asyncio.to_thread(make) if large else make())
        COUNTERS.add(
            WEBHOOK_REQUESTS, webhook.name, "none" if response.status is None else f"{response.status // 100}xx"
        )
        outcome = judge(webhook, response, now=now)
        if isinstance(outcome, ReceiverGone):
            disable = calls.set_webhook_state(
                webhook.name, "disabled", reason=outcome.reason, seen_version=webhook.version
            )
            # The webhook may have been deleted meanwhile.
            with suppress(QueueNotFound):
                await self.log.run(disable)
            logger.warning("webhook disabled", extra={WEBHOOK: webhook.name, ERROR: outcome.reason})
            self.stop.set()
            return Snooze()
        if isinstance(outcome, Retry) and outcome.after is not None:
            seconds = outcome.after.total_seconds()
            self.held_until = asyncio.get_running_loop().time() + min(seconds, MAX_HOLD_SECONDS)
            # Jitter: not all events at the exact moment that the receiver named.
            return Retry(after=timedelta(seconds=seconds * random.uniform(1.0, 1.1)), reason=outcome.reason)
        return outcome

    async def _wait_for_turn(self) -> bool:
        """Wait for Retry-After and the rate limit; False if the delivery stops first."""
        loop = asyncio.get_running_loop()
        while (seconds := self.held_until - loop.time()) > 0:
            if await self._stops_within(seconds):
                return False
        if self.route.webhook.rate_per_second is None:
            return not self.stop.is_set()
        wait = await self.log.run(calls.next_webhook_turn(self.route.webhook))
        return wait is not None and not await self._stops_within(wait)

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.stop.wait()
        except TimeoutError:
            return False
        return True


@dataclass(slots=True, eq=False)
class Dispatcher:
    """Delivers every active webhook, each in its own task."""

    log: aio.AsyncHeadwater
    name: str
    allowed: Sequence[Network]
    tls: ssl.SSLContext
    grace_seconds: float
    refresh_seconds: float
    cloud_events_source: str
    running: dict[int, tuple[_WebhookDelivery, asyncio.Task[None]]] = field(default_factory=dict)
    restart_at: dict[int, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Start and stop deliveries as webhooks change, until cancelled."""
        while True:
            try:
                routes = await self.log.run(calls.webhook_routes())
                self.refresh({one.webhook.id: one for one in routes})
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("the list of webhooks could not be read", extra={ERROR: str(error)})
            await self.log.run_maintenance()
            await reap_queues(self.log, [delivery.route.webhook.queue for delivery, _ in self.running.values()])
            await asyncio.sleep(self.refresh_seconds)

    def refresh(self, wanted: Mapping[int, WebhookRoute]) -> None:
        now = asyncio.get_running_loop().time()
        self.restart_at = {webhook_id: until for webhook_id, until in self.restart_at.items() if until > now}
        for webhook_id, (route, task) in list(self.running.items()):
            if task.done():
                del self.running[webhook_id]
                # A deleted queue is not a failure.
                if (error := task.exception()) and webhook_id in wanted:
                    self.restart_at[webhook_id] = now + RESTART_SECONDS
                    logger.warning(
                        "webhook delivery failed",
                        extra={
                            WEBHOOK: route.route.webhook.name,
                            QUEUE: route.route.webhook.queue,
                            ERROR: _describe(error),
                        },
                    )
            elif route.route != wanted.get(webhook_id):
                route.stop.set()
        for one in wanted.values():
            # A changed webhook is restarted when its requests in progress are finished.
            if one.webhook.id not in self.running and one.webhook.id not in self.restart_at:
                route = _WebhookDelivery(
                    log=self.log,
                    route=one,
                    sender=Sender(one.webhook, allowed=self.allowed, tls=self.tls),
                    name=self.name,
                    grace_seconds=self.grace_seconds,
                    cloud_events_source=self.cloud_events_source,
                )
                self.running[one.webhook.id] = (route, asyncio.create_task(route.run()))

    async def finish(self) -> None:
        """Stop all deliveries; those that exceed the grace period are cancelled."""
        for route, _ in self.running.values():
            route.stop.set()
        tasks = [task for _, task in self.running.values()]
        if tasks:
            # A little longer than the grace period, to settle.
            _, late = await asyncio.wait(tasks, timeout=self.grace_seconds + 10.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@asynccontextmanager
async def dispatching(
    log: aio.AsyncHeadwater,
    *,
    allowed: Sequence[Network] = (),
    tls: ssl.SSLContext | None = None,
    grace_seconds: float = 20.0,
    name: str | None = None,
    refresh_seconds: float = 1.0,
    cloud_events_source: str = "",
) -> AsyncIterator[Dispatcher]:
    """Deliver the webhooks of a log until the block is left.

    `allowed`: networks that receivers may be in besides the public internet. At the end, requests in progress have
    `grace_seconds` to finish; the events of the others are released. `cloud_events_source` begins the source of events
    that are sent as CloudEvents.
    """
    dispatcher = Dispatcher(
        log=log,
        name=name or f"{socket.gethostname()}:{os.getpid()}/webhooks",
        allowed=allowed,
        tls=tls or ssl.create_default_context(),
        grace_seconds=grace_seconds,
        refresh_seconds=refresh_seconds,
        cloud_events_source=cloud_events_source,
    )
    task = supervise("webhooks", dispatcher.run)
    try:
        yield dispatcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await dispatcher.finish()


async def send_test(
    log: aio.AsyncHeadwater,
    name: str,
    *,
    allowed: Sequence[Network] = (),
    tls: ssl.SSLContext | None = None,
    cloud_events_source: str = "",
) -> WebhookTest:
    """Send a signed test event once, whatever the webhook's state, and report the response. It is in no topic."""
    webhook = await log.webhook(name)
    now = datetime.now(UTC)
    test_id = f"{webhook.uid}-test-{secrets.token_hex(8)}"
    event = Event(
        position=0,
        topic="headwater.test",
        partition=0,
        topic_offset=None,
        key=None,
        type="headwater.webhook.test",
        routing_key=None,
        headers=None,
        content_type="application/json",
        payload=b'{"test":true}',
        event_id=None,
        published_at=now,
    )
    sender = Sender(webhook, allowed=allowed, tls=tls or ssl.create_default_context())
    began = asyncio.get_running_loop().time()
    try:
        request = request_for(webhook, event, test_id, now=now, cloud_events_source=cloud_events_source)
        response = await sender.send(request)
        latency_ms = (asyncio.get_running_loop().time() - began) * 1000
    finally:
        sender.close()
    return WebhookTest(
        webhook=name,
        accepted=response.accepted,
        message_id=test_id,
        status=response.status,
        latency_ms=round(latency_ms, 1),
        response=response.excerpt,
        error=response.failure,
    )
