"""Delivers webhooks: the events of each one's group, posted to its URL, until told to stop.

Nothing is kept here: what is to be sent, retried or given up on is in the log. Run as many of it as you like; any may
be killed at any time, and what it was at is sent again under the same id.
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
from headwater.errors import GroupNotFound, HeadwaterError
from headwater.model import ClaimedEvent, Event, Outcome, Retry, Snooze, WebhookRoute, WebhookTest
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, GROUP, WEBHOOK, WEBHOOK_REQUESTS, logger
from headwater.queue.worker import Process, Worker
from headwater.sql_subscriptions.reader import GroupReader, Subscriber
from headwater.supervisor import supervise
from headwater.webhooks.addresses import Network
from headwater.webhooks.requests import Gone, judged, message_id, request_for
from headwater.webhooks.sender import Sender

# Packing more than this is left to a thread, so that nobody else waits for it.
LARGE_BYTES: Final = 1_048_576
# A receiver that asks for a pause is given one for all events, up to so long at a time.
LONGEST_HOLD_SECONDS: Final = 60.0
DEFAULT_CONCURRENCY: Final = 10
# How its retries and dead letters name the handler of a webhook by filter, and how long one event may take in all:
# waiting for its turn, and for the receiver, which has a timeout of its own.
HANDLER: Final = "webhook"
LONGEST_SECONDS: Final = 3600.0
# Ended by an error, a route is not taken up again at once.
REST_SECONDS: Final = 5.0
# Each webhook asks the log for its events; with many of them each asks less often.
POLL_SECONDS: Final = 0.05
UNHURRIED_FROM: Final = 10


@dataclass(slots=True, eq=False)
class _Route:
    """One webhook that is being delivered."""

    log: aio.AsyncHeadwater
    route: WebhookRoute
    sender: Sender
    name: str
    grace_seconds: float
    poll_seconds: float
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    held_until: float = 0.0

    async def run(self) -> None:
        """Claim, send and settle until told to stop: then what was answered is settled, and the rest given back."""
        webhook = self.route.webhook
        concurrency = webhook.max_concurrency or DEFAULT_CONCURRENCY
        if self.route.kind == "cursor":
            try:
                await self._reader(concurrency).run()
            finally:
                self.sender.close()
            return
        worker = Worker(
            handler=self.deliver,
            group=webhook.group,
            topics=(),
            concurrency=concurrency,
            # Two leases, each of half of what may be under way: a slow answer holds up half of it at most, and neither
            # waits for room that the other has.
            prefetch=math.ceil(concurrency / 2),
            leases=min(concurrency, 2),
            batch=False,
            transactional=False,
            timeout_seconds=None,
            ordered_keys=self.route.ordered_keys,
            group_settings={},
        )
        process = Process(
            log=self.log,
            blocking=None,
            stopping=self.stop,
            grace_seconds=self.grace_seconds,
            name=self.name,
            middleware=(),
            lease_seconds={webhook.group: self.route.lease_seconds},
            poll_seconds=self.poll_seconds,
            look_seconds=max(self.poll_seconds, 0.5),
        )
        try:
            await process.run([worker], [])
        finally:
            self.sender.close()

    def _reader(self, concurrency: int) -> GroupReader:
        """Sends what the subscriptions of the group match."""
        webhook = self.route.webhook
        subscriber = Subscriber(
            name=HANDLER,
            handler=self.send,
            group=webhook.group,
            condition="",
            params={},
            concurrency=concurrency,
            timeout_seconds=LONGEST_SECONDS,
            takes_all=True,
        )
        return GroupReader(
            log=self.log,
            group=webhook.group,
            subscribers=[subscriber],
            reader=f"{self.name}/{webhook.name}"[:200],
            stopping=self.stop,
            grace_seconds=self.grace_seconds,
            read_ahead=2,
            batch_size=max(100, concurrency),
            poll_seconds=self.poll_seconds,
        )

    async def deliver(self, event: ClaimedEvent) -> Outcome:
        return await self.send(event.event)

    async def send(self, event: Event) -> Outcome:
        webhook = self.route.webhook
        if not await self._turn():
            return Snooze()
        now = datetime.now(UTC)
        make = partial(request_for, webhook, event, message_id(webhook, event.position), now=now)
        large = len(event.payload or b"") > LARGE_BYTES
        answer = await self.sender.send(await asyncio.to_thread(make) if large else make())
        COUNTERS.add(WEBHOOK_REQUESTS, webhook.name, "none" if answer.status is None else f"{answer.status // 100}xx")
        outcome = judged(webhook, answer, now=now)
        if isinstance(outcome, Gone):
            disable = calls.set_webhook_state(
                webhook.name, "disabled", reason=outcome.reason, seen_version=webhook.version
            )
            # One that was deleted meanwhile need not be disabled.
            with suppress(GroupNotFound):
                await self.log.run(disable)
            logger.warning("webhook disabled", extra={WEBHOOK: webhook.name, ERROR: outcome.reason})
            self.stop.set()
            return Snooze()
        if isinstance(outcome, Retry) and outcome.after is not None:
            seconds = outcome.after.total_seconds()
            self.held_until = asyncio.get_running_loop().time() + min(seconds, LONGEST_HOLD_SECONDS)
            # Not all at the very moment that the receiver named.
            return Retry(after=timedelta(seconds=seconds * random.uniform(1.0, 1.1)), reason=outcome.reason)
        return outcome

    async def _turn(self) -> bool:
        """Wait until the receiver may be sent something; False: it is time to stop."""
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
    """Delivers every webhook that is active, each by itself."""

    log: aio.AsyncHeadwater
    name: str
    allowed: Sequence[Network]
    tls: ssl.SSLContext
    grace_seconds: float
    refresh_seconds: float
    running: dict[int, tuple[_Route, asyncio.Task[None]]] = field(default_factory=dict)
    resting: dict[int, float] = field(default_factory=dict)

    async def keep(self) -> None:
        """Take up webhooks that are new, leave those that are not to be sent any more, until cancelled."""
        while True:
            try:
                routes = await self.log.run(calls.webhook_routes())
                self.refresh({one.webhook.id: one for one in routes})
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("webhooks not looked at", extra={ERROR: str(error)})
            await asyncio.sleep(self.refresh_seconds)

    def refresh(self, wanted: Mapping[int, WebhookRoute]) -> None:
        now = asyncio.get_running_loop().time()
        self.resting = {webhook_id: until for webhook_id, until in self.resting.items() if until > now}
        for webhook_id, (route, task) in list(self.running.items()):
            if task.done():
                del self.running[webhook_id]
                # That its group was deleted is no failure.
                if (error := task.exception()) and webhook_id in wanted:
                    self.resting[webhook_id] = now + REST_SECONDS
                    logger.warning(
                        "webhook delivery failed",
                        extra={
                            WEBHOOK: route.route.webhook.name,
                            GROUP: route.route.webhook.group,
                            ERROR: _told(error),
                        },
                    )
            elif route.route != wanted.get(webhook_id):
                route.stop.set()
        for one in wanted.values():
            # One that has changed is taken up again when what it was at is finished.
            if one.webhook.id not in self.running and one.webhook.id not in self.resting:
                route = _Route(
                    log=self.log,
                    route=one,
                    sender=Sender(one.webhook, allowed=self.allowed, tls=self.tls),
                    name=self.name,
                    grace_seconds=self.grace_seconds,
                    poll_seconds=POLL_SECONDS * max(1.0, len(wanted) / UNHURRIED_FROM),
                )
                self.running[one.webhook.id] = (route, asyncio.create_task(route.run()))

    async def finish(self) -> None:
        """Stop all: what runs has its grace, then it is called off."""
        for route, _ in self.running.values():
            route.stop.set()
        tasks = [task for _, task in self.running.values()]
        if tasks:
            # A little longer than its grace, to settle.
            _, late = await asyncio.wait(tasks, timeout=self.grace_seconds + 10.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _told(error: BaseException) -> str:
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
) -> AsyncIterator[Dispatcher]:
    """Deliver the webhooks of a log for as long as this is entered.

    `allowed`: networks besides the public internet that receivers may be in. At the end requests under way have
    `grace_seconds` for their answer; what has none is given back.
    """
    dispatcher = Dispatcher(
        log=log,
        name=name or f"{socket.gethostname()}:{os.getpid()}/webhooks",
        allowed=allowed,
        tls=tls or ssl.create_default_context(),
        grace_seconds=grace_seconds,
        refresh_seconds=refresh_seconds,
    )
    keeping = supervise("webhooks", dispatcher.keep)
    try:
        yield dispatcher
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await dispatcher.finish()


async def send_test(
    log: aio.AsyncHeadwater, name: str, *, allowed: Sequence[Network] = (), tls: ssl.SSLContext | None = None
) -> WebhookTest:
    """Send a signed event that is in no topic, now and once, whatever the webhook's state; says what came of it."""
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
        answer = await sender.send(request_for(webhook, event, test_id, now=now))
        latency_ms = (asyncio.get_running_loop().time() - began) * 1000
    finally:
        sender.close()
    return WebhookTest(
        webhook=name,
        accepted=answer.accepted,
        message_id=test_id,
        status=answer.status,
        latency_ms=round(latency_ms, 1),
        response=answer.excerpt,
        error=answer.failure,
    )
