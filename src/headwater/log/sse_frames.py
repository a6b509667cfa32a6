"""The frames of an SSE stream and the ids at which it can be resumed, for every server that sends one. Pure."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from headwater.log.cloud_events import cloud_event, structured
from headwater.log.event_json import event_json
from headwater.log.model import Event

# Event names with another meaning in an SSE stream.
_RESERVED: Final = frozenset({"end", "error", "open", "message"})


class FrameStyle(NamedTuple):
    """What a client wants in the frames of events: `event:` lines, and CloudEvents from this source."""

    named: bool = True
    # None: the JSON of an event instead of a CloudEvent.
    cloud_events_source: str | None = None


def frame(event: Event, *, style: FrameStyle, epoch: int | None = None) -> bytes:
    """An event as an SSE frame. `epoch` is the epoch of its position."""
    named, source = style
    kind = ""
    if named:
        plain = event.type is not None and event.type not in _RESERVED and not {"\n", "\r"} & set(event.type)
        kind = f"event: {event.type if plain else 'event'}\n"
    data = event_json(event) if source is None else structured(cloud_event(event, source))
    return f"id: {ResumePoint(event.position, epoch=epoch)}\n{kind}data: {data}\n\n".encode()


class ResumePoint(NamedTuple):
    """Where an SSE stream can be resumed: its `id:` and the client's Last-Event-ID.

    `position` is the last event that the stream delivered, or the last one before it began; the stream resumes after
    it. `seen` is how far the log was searched for this stream without another match: events up to there that retention
    removed are not missing. It may be beyond what survives a crash, so reading never resumes from it.
    `epoch` is the epoch of both; None: unknown, as for a position that a user typed.

    Written `17.28150123`, or `17.28150123/90` with `seen`.
    """

    position: int
    seen: int = 0
    epoch: int | None = None

    def __str__(self) -> str:
        text = str(self.position) if self.epoch is None else f"{self.position}.{self.epoch}"
        return f"{text}/{self.seen}" if self.seen > self.position else text

    @classmethod
    def parse(cls, text: str) -> ResumePoint | None:
        """Parse an id of a stream; None if it is invalid."""
        match = _RESUME_POINT.fullmatch(text)
        if match is None:
            return None
        position, epoch, seen = match.groups()
        return cls(int(position), int(seen or 0), None if epoch is None else int(epoch))


RESUME_POINT_PATTERN: Final = r"^([0-9]{1,19})(?:\.([0-9]{1,9}))?(?:/([0-9]{1,19}))?$"
_RESUME_POINT: Final = re.compile(RESUME_POINT_PATTERN)


def opening_frame(point: ResumePoint, *, retry_ms: int) -> bytes:
    """The first frame: a client that is disconnected before its first event resumes where it began."""
    return f"retry: {retry_ms}\nid: {point}\n\n".encode()


def heartbeat_frame(point: ResumePoint | None) -> bytes:
    """A keep-alive comment, with the resume point if it has moved, for streams whose filter rarely matches."""
    return b":\n\n" if point is None else f":\nid: {point}\n\n".encode()


def closing_frame(reason: str, point: ResumePoint, *, retry_ms: int) -> bytes:
    """The last frame: why the stream ends, and where it can be resumed."""
    data = json.dumps({"reason": reason, "after": point.position, "epoch": point.epoch}, separators=(",", ":"))
    return f"id: {point}\nevent: end\nretry: {retry_ms}\ndata: {data}\n\n".encode()
