"""Group commit for event-store appends.

Appends that arrive while a commit is in flight are queued and sent as one transaction; each gets its own result. The
first waiter becomes the leader and sends the group, its own append included; there is no background task that could
die. Several processes do this independently; the database serializes them.

Invariant: an append is in at most one group in flight, and always has the same event ids, so a retry cannot duplicate
it.
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

from headwater.calls.store import EncodedAppend
from headwater.errors import HeadwaterError, InvalidRequest, LogUnavailable
from headwater.eventstore.leader_lock import LeaderLock, SplitTuner
from headwater.eventstore.query import AppendResult

MAX_GROUP_APPENDS = 256
MAX_GROUP_EVENTS = 2048
MAX_GROUP_BYTES = 8_388_608
MAX_WAITING = 4096

AppendResults = list[AppendResult]
Send = Callable[[Sequence[EncodedAppend]], AppendResults]


def new_event_ids(count: int) -> list[str]:
    """New unique ids: UUIDs of version 7, so that ids created one after the other are close in an index."""
    ids = []
    for _ in range(count):
        value = bytearray((time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10))
        value[6] = value[6] & 0x0F | 0x70
        value[8] = value[8] & 0x3F | 0x80
        text = value.hex()
        ids.append(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")
    return ids


class PendingAppend:
    """An append that waits for its result or its error."""

    __slots__ = ("append", "error", "is_under_way", "result")

    def __init__(self, append: EncodedAppend) -> None:
        self.append = append
        self.is_under_way = False
        self.result: AppendResult | None = None
        self.error: HeadwaterError | psycopg.Error | None = None

    def is_done(self) -> bool:
        return self.result is not None or self.error is not None

    def waits(self) -> bool:
        """Whether it is not being sent, or its sender was cancelled."""
        return not self.is_under_way


class GroupCommit:
    """The appends of this process to one event store: one group in flight at a time, or two if they overlap."""

    def __init__(self, send: Send, *, overlaps: bool = False) -> None:
        self._send = send
        self._overlaps = overlaps
        self._waiting: deque[PendingAppend] = deque()
        # The appends in flight, and the recent number of concurrent appends.
        self._under_way = 0
        self._busy = 1
        self._pace = SplitTuner()
        self._leader = LeaderLock(self._is_enough, lambda: 2 if self.overlaps else 1)

    @property
    def overlaps(self) -> bool:
        """Whether a group is sent before the result of the one ahead arrives."""
        return self._overlaps and self._pace.in_halves

    def append(self, append: EncodedAppend, *, timeout_seconds: float) -> AppendResult:
        """Append together with concurrent appends; returns the result of this one."""
        deadline = time.monotonic() + timeout_seconds
        if len(self._waiting) >= MAX_WAITING and not self._leader.wait_until(
            lambda: len(self._waiting) < MAX_WAITING, timeout_seconds
        ):
            raise LogUnavailable(
                f"{MAX_WAITING} appends are waiting, and none was finished within {timeout_seconds:g} s"
            )
        pending = PendingAppend(append)
        self._waiting.append(pending)
        try:
            while not pending.is_done():
                left = max(deadline - time.monotonic(), 0.0)
                if self._leader.acquire_unless(pending.is_done, left, pending.waits):
                    try:
                        self._send_next()
                    finally:
                        self._leader.release()
                elif not pending.is_done():
                    raise LogUnavailable(
                        f"an append got no response within {timeout_seconds:g} s",
                        hint="The events may have been appended. Repeat it with the same event ids to find out.",
                    )
        finally:
            if not pending.is_done() and pending in self._waiting:
                self._waiting.remove(pending)
        if pending.error is not None:
            raise pending.error
        assert pending.result is not None
        return pending.result

    def _is_enough(self) -> bool:
        """Whether to send the waiting appends, or to wait for the callers that just got their results."""
        return len(self._waiting) * (2 if self._pace.in_halves else 1) >= self._busy

    def _send_next(self) -> None:
        group = self._next_group()
        if not group:
            return
        try:
            error = self._answer(group)
            if len(group) > 1 and isinstance(error, InvalidRequest):
                # One append is invalid, and the others must not fail with it.
                for pending in group:
                    pending.error = self._answer([pending])
            elif error is not None:
                for pending in group:
                    pending.error = _copy_error(error)
        finally:
            # If the leader was cancelled, the others keep their place in the queue. They are sent again with the same
            # ids, so nothing is appended twice.
            self._busy = self._under_way + len(self._waiting)
            self._pace.note(len(group), time.monotonic(), alone=self._busy == 1)
            self._under_way -= len(group)
            for pending in reversed(group):
                pending.is_under_way = False
                if not pending.is_done():
                    self._waiting.appendleft(pending)

    def _answer(self, group: Sequence[PendingAppend]) -> HeadwaterError | psycopg.Error | None:
        """Send a group and store the results; returns the error if it failed."""
        try:
            results = self._send([pending.append for pending in group])
        except (HeadwaterError, psycopg.Error) as error:
            return error
        for pending, result in zip(group, results, strict=True):
            pending.result = result
        return None

    def _next_group(self) -> list[PendingAppend]:
        group: list[PendingAppend] = []
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


def _copy_error(error: HeadwaterError | psycopg.Error) -> HeadwaterError | psycopg.Error:
    """A copy of an error for each waiter: one exception raised in two threads would mix up their tracebacks."""
    if isinstance(error, HeadwaterError):
        return type(error)(error.message, hint=error.hint, detail=error.detail)
    return error
