"""Group commit: appends that come while another is under way go out together, each with its own verdict.

Whoever finds nobody at work sends what is waiting, its own append included: one that is alone waits for nobody, and
no thread or task is needed that could die. Several processes do so independently; the database puts them in order.
"""
# Generated from eventstore/group_commit.py by tools/unasync.py: write there.

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import (
    Callable,
    Sequence,
)

import psycopg

from headwater.calls import EncodedAppend
from headwater.errors import HeadwaterError, InvalidRequest, LogUnavailable
from headwater.eventstore.leader_lock import Pace, Turn
from headwater.eventstore.query import Verdict

MAX_GROUP_APPENDS = 256
MAX_GROUP_EVENTS = 2048
MAX_GROUP_BYTES = 8_388_608
MAX_WAITING = 4096

Verdicts = list[Verdict]
Send = Callable[[Sequence[EncodedAppend]], Verdicts]


def new_event_ids(count: int) -> list[str]:
    """Ids that nobody else makes, as UUIDs of version 7: those made one after the other are near in an index."""
    ids = []
    for _ in range(count):
        value = bytearray((time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10))
        value[6] = value[6] & 0x0F | 0x70
        value[8] = value[8] & 0x3F | 0x80
        text = value.hex()
        ids.append(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")
    return ids


class Ticket:
    """An append that waits for its verdict, or for the reason why there is none."""

    __slots__ = ("append", "error", "is_under_way", "verdict")

    def __init__(self, append: EncodedAppend) -> None:
        self.append = append
        self.is_under_way = False
        self.verdict: Verdict | None = None
        self.error: HeadwaterError | psycopg.Error | None = None

    def is_done(self) -> bool:
        return self.verdict is not None or self.error is not None

    def waits(self) -> bool:
        """Whether nobody has sent it, or whoever did was stopped."""
        return not self.is_under_way


class Lane:
    """The appends of this process to one event store: one group at a time, or a second one while one is under way."""

    def __init__(self, send: Send, *, overlaps: bool = False) -> None:
        self._send = send
        self._overlaps = overlaps
        self._waiting: deque[Ticket] = deque()
        # How many are under way, and how many appended at a time of late.
        self._under_way = 0
        self._busy = 1
        self._pace = Pace()
        self._turn = Turn(self._is_enough, lambda: 2 if self.overlaps else 1)

    @property
    def overlaps(self) -> bool:
        """Whether groups go out before those ahead of them are answered."""
        return self._overlaps and self._pace.in_halves

    def append(self, append: EncodedAppend, *, timeout_seconds: float) -> Verdict:
        """Append with whoever else is appending; returns the verdict on this one."""
        deadline = time.monotonic() + timeout_seconds
        if len(self._waiting) >= MAX_WAITING and not self._turn.wait_until(
            lambda: len(self._waiting) < MAX_WAITING, timeout_seconds
        ):
            raise LogUnavailable(f"{MAX_WAITING} appends wait already, and none was done in {timeout_seconds:g} s")
        ticket = Ticket(append)
        self._waiting.append(ticket)
        try:
            while not ticket.is_done():
                left = max(deadline - time.monotonic(), 0.0)
                if self._turn.take_unless(ticket.is_done, left, ticket.waits):
                    try:
                        self._send_next()
                    finally:
                        self._turn.give()
                elif not ticket.is_done():
                    raise LogUnavailable(
                        f"an append had no answer within {timeout_seconds:g} s",
                        hint="It may have been appended. Repeat it with the same event ids to find out.",
                    )
        finally:
            if not ticket.is_done() and ticket in self._waiting:
                self._waiting.remove(ticket)
        if ticket.error is not None:
            raise ticket.error
        assert ticket.verdict is not None
        return ticket.verdict

    def _is_enough(self) -> bool:
        """Whether to send what waits, or to wait for those who were just answered."""
        return len(self._waiting) * (2 if self._pace.in_halves else 1) >= self._busy

    def _send_next(self) -> None:
        group = self._next_group()
        if not group:
            return
        try:
            error = self._answer(group)
            if len(group) > 1 and isinstance(error, InvalidRequest):
                # One of them cannot be, and the others must not fail with it.
                for ticket in group:
                    ticket.error = self._answer([ticket])
            elif error is not None:
                for ticket in group:
                    ticket.error = _copied(error)
        finally:
            # Whoever was stopped in the middle of it leaves the others their place. They are sent again under the
            # same ids, so what was appended already is not appended twice.
            self._busy = self._under_way + len(self._waiting)
            self._pace.note(len(group), time.monotonic(), alone=self._busy == 1)
            self._under_way -= len(group)
            for ticket in reversed(group):
                ticket.is_under_way = False
                if not ticket.is_done():
                    self._waiting.appendleft(ticket)

    def _answer(self, group: Sequence[Ticket]) -> HeadwaterError | psycopg.Error | None:
        """Send these, and note the verdicts; returns why there are none."""
        try:
            verdicts = self._send([ticket.append for ticket in group])
        except (HeadwaterError, psycopg.Error) as error:
            return error
        for ticket, verdict in zip(group, verdicts, strict=True):
            ticket.verdict = verdict
        return None

    def _next_group(self) -> list[Ticket]:
        group: list[Ticket] = []
        events = size = 0
        while self._waiting and len(group) < MAX_GROUP_APPENDS:
            append = self._waiting[0].append
            events += len(append.events)
            size += append.payload_bytes
            if group and (events > MAX_GROUP_EVENTS or size > MAX_GROUP_BYTES):
                break
            group.append(self._waiting.popleft())
            group[-1].is_under_way = True
        self._under_way += len(group)
        return group


def _copied(error: HeadwaterError | psycopg.Error) -> HeadwaterError | psycopg.Error:
    """An error of ours for each who gets it: one that is raised in two threads would mix up their traces."""
    if isinstance(error, HeadwaterError):
        return type(error)(error.message, hint=error.hint, detail=error.detail)
    return error
