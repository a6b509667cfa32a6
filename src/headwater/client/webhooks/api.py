"""Webhooks: making them, looking at them, steering them. Sending is the server's part."""
# Generated from webhooks/api.py by tools/unasync.py: write there.

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from psycopg import Connection

from headwater import calls
from headwater.calls import overview
from headwater.calls import webhooks as webhook_calls
from headwater.client.database.connection import Shell, Topics, as_names
from headwater.errors import GroupExists, InvalidRequest
from headwater.model import Webhook

# A receiver may be away for a day: tries after 5 s, 20 s, 80 s, ..., at last every 10 hours, 27 hours in all.
MAX_ATTEMPTS = 10
BACKOFF_SECONDS = 5.0
BACKOFF_FACTOR = 4.0
BACKOFF_MAX_SECONDS = 36_000.0
MAX_CONCURRENCY = 10


def new_secret() -> str:
    """A secret to sign with, as receivers keep it."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"


class Webhooks(Shell):
    """Webhooks: groups whose events are sent to a URL."""

    def create_webhook(
        self,
        name: str,
        url: str,
        topics: Topics = None,
        *,
        group: str | None = None,
        filter: str | None = None,
        params: Mapping[str, Any] | None = None,
        after: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        secret: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
        timeout_seconds: float | None = None,
        max_concurrency: int | None = None,
        rate_per_second: float | None = None,
        gzip_above_bytes: int | None = None,
        client_errors: str | None = None,
        max_attempts: int | None = None,
        backoff_seconds: float | None = None,
        backoff_max_seconds: float | None = None,
        ordered_keys: bool | None = None,
        connection: Connection[Any] | None = None,
    ) -> Webhook:
        """Send the events of topics to a URL: a group of the webhook's name is made for it, at the beginning of the
        log, after a position, since a time, or at the end. Or send those of a group that is there. Or send those that
        a SQL filter with its parameters matches (see subscribe): from now on, after a position, or since a time.

        `secret` (made if not given) signs what is sent. `body`: 'envelope' is JSON with everything about the event,
        'raw' is its payload alone. `client_errors`: whether an answer of 4xx means 'retry' or 'dead'.
        """
        ours = group is None
        if not ours and (topics is not None or after is not None or since is not None or from_end or ordered_keys):
            raise InvalidRequest(
                "a group that is there has its topics and its place already",
                hint="Leave out the group to have one made, or bind the group itself.",
            )
        if filter is not None and (not ours or ordered_keys):
            raise InvalidRequest(
                "a webhook by filter has a group of its own, without ordered keys",
                hint="Leave out group and ordered_keys, or bind a queue.",
            )
        if filter is None and params is not None:
            raise InvalidRequest("params belong to a filter: give one")
        start_position, _ = self._start(topics, after, since, from_end)
        with self.transaction() if connection is None else nullcontext(connection) as inside:
            if filter is not None:
                self._make_filter_group(name, filter, params, as_names(topics), start_position, inside)
                made = calls.alter_group(
                    name,
                    max_attempts=MAX_ATTEMPTS if max_attempts is None else max_attempts,
                    backoff_seconds=BACKOFF_SECONDS if backoff_seconds is None else backoff_seconds,
                    backoff_factor=BACKOFF_FACTOR,
                    backoff_max_seconds=BACKOFF_MAX_SECONDS if backoff_max_seconds is None else backoff_max_seconds,
                    max_in_flight=MAX_CONCURRENCY if max_concurrency is None else max_concurrency,
                    must_not_lose=True,
                )
            elif ours:
                made = calls.create_group(
                    name,
                    topics=as_names(topics),
                    start_position=start_position,
                    max_attempts=MAX_ATTEMPTS if max_attempts is None else max_attempts,
                    backoff_seconds=BACKOFF_SECONDS if backoff_seconds is None else backoff_seconds,
                    backoff_factor=BACKOFF_FACTOR,
                    backoff_max_seconds=BACKOFF_MAX_SECONDS if backoff_max_seconds is None else backoff_max_seconds,
                    ordered_keys=ordered_keys,
                    max_in_flight=MAX_CONCURRENCY if max_concurrency is None else max_concurrency,
                )
            else:
                made = calls.alter_group(
                    group or name,
                    max_attempts=max_attempts,
                    backoff_seconds=backoff_seconds,
                    backoff_max_seconds=backoff_max_seconds,
                    max_in_flight=max_concurrency,
                )
            self._run(made, inside)
            call = webhook_calls.create_webhook(
                name,
                group=group or name,
                url=url,
                secret=new_secret() if secret is None else secret,
                headers=headers,
                body=body,
                timeout_seconds=timeout_seconds,
                rate_per_second=rate_per_second,
                gzip_above_bytes=gzip_above_bytes,
                client_errors=client_errors,
            )
            return self._run(call, inside)

    def _make_filter_group(
        self,
        name: str,
        filter: str,
        params: Mapping[str, Any] | None,
        topics: list[str] | None,
        start_position: int | None,
        connection: Connection[Any],
    ) -> None:
        """A group that reads for one subscription, from now on or after a position."""
        if self._run(overview.group_exists(name), connection):
            raise GroupExists(
                f'there is a group "{name}" already', hint="Give the webhook another name: it has a group of its own."
            )
        subscribed = calls.subscribe(name, filter, params, from_position=start_position, topics=topics)
        self._run(subscribed, connection)
        if start_position is not None:
            move = calls.set_reading(name, start_position, reader="headwater webhook", release=True)
            self._run(move, connection)

    def alter_webhook(
        self,
        name: str,
        *,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
        timeout_seconds: float | None = None,
        max_concurrency: int | None = None,
        rate_per_second: float | None = None,
        gzip_above_bytes: int | None = None,
        client_errors: str | None = None,
        connection: Connection[Any] | None = None,
    ) -> Webhook:
        """Change settings; None leaves one as it is, 0 removes the rate and turns compression off. Whoever delivers
        notices within seconds. Retries are the group's: see alter_group."""
        with self.transaction() if connection is None else nullcontext(connection) as inside:
            if max_concurrency is not None:
                found = self._run(webhook_calls.find_webhook(name), inside)
                self._run(calls.alter_group(found.group, max_in_flight=max_concurrency), inside)
            call = webhook_calls.alter_webhook(
                name,
                url=url,
                headers=headers,
                body=body,
                timeout_seconds=timeout_seconds,
                rate_per_second=rate_per_second,
                gzip_above_bytes=gzip_above_bytes,
                client_errors=client_errors,
            )
            return self._run(call, inside)

    def webhook(self, name: str) -> Webhook:
        """One webhook, secrets included."""
        return self._run(webhook_calls.find_webhook(name))

    def webhooks(self) -> list[Webhook]:
        """Every webhook, secrets included. How far each has come its group says."""
        return self._run(webhook_calls.webhooks())

    def pause_webhook(self, name: str, *, reason: str | None = None) -> Webhook:
        """Send nothing until resumed. What is under way is finished."""
        return self._run(webhook_calls.set_webhook_state(name, "paused", reason=reason))

    def resume_webhook(self, name: str) -> Webhook:
        """Send again, from where it was; also after its receiver had it disabled."""
        return self._run(webhook_calls.set_webhook_state(name, "active"))

    def rotate_webhook_secret(self, name: str, *, secret: str | None = None, keep: int = 1) -> Webhook:
        """Sign with another secret (made if not given), and with the `keep` newest of those before it too."""
        call = webhook_calls.rotate_webhook_secret(name, new_secret() if secret is None else secret, keep=keep)
        return self._run(call)

    def delete_webhook(self, name: str, *, with_group: bool = False) -> bool:
        """Forget a webhook, and with `with_group` its group and what was not sent; False if there was none."""
        if with_group:
            found = [one for one in self.webhooks() if one.name == name]
            return bool(found) and self._run(calls.delete_group(found[0].group))
        return self._run(webhook_calls.delete_webhook(name))
