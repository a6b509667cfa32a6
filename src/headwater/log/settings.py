"""The settings of a topic. To add one: here, the column in `0001_log.sql`, `create_topic` and `alter_topic` in
`topic.sql`, and what it does. Everything else follows: see `setting_definitions.py`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal, TypedDict

from headwater.setting_definitions import Setting

TopicKind = Literal["open", "sequenced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """How a topic stores events and how long."""

    kind: Annotated[
        TopicKind,
        Setting(
            help="open: writers never wait for each other; sequenced: dense offsets per partition.",
            rule="a topic is open or sequenced",
            fixed=True,
        ),
    ] = "open"
    partitions: Annotated[
        int,
        Setting(
            help="Number of partitions, which can only grow; an event is assigned to one by the hash of its key.",
            rule="partitions are 1 to 1024",
            minimum=1,
            maximum=1024,
        ),
    ] = 1
    retention: Annotated[
        timedelta | None,
        Setting(
            label="Retention in seconds",
            help="Minimum time to keep events.",
            rule="retention is above zero",
            above=0,
            none="forever",
        ),
    ] = None
    max_payload_bytes: Annotated[
        int,
        Setting(
            label="Maximum payload in bytes",
            help="Maximum size of a payload.",
            rule="the payload limit is 1 byte to 64 MiB",
            minimum=1,
            maximum=67_108_864,
            unit="bytes",
        ),
    ] = 1_048_576
    max_header_bytes: Annotated[
        int,
        Setting(
            label="Maximum headers in bytes",
            help="Maximum size of the headers of an event.",
            rule="the header limit is 2 bytes to 1 MiB",
            minimum=2,
            maximum=1_048_576,
            unit="bytes",
        ),
    ] = 65_536


class TopicChanges(TypedDict, total=False):
    """The settings of `alter_topic`. None: unchanged."""

    partitions: int | None
    retention: timedelta | None
    max_payload_bytes: int | None
    max_header_bytes: int | None


class NewTopicSettings(TopicChanges, total=False):
    """The settings of `create_topic`. None: the default."""

    kind: TopicKind | None
