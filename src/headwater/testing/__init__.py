"""What tests of an application need: databases, a clock, captured events, draining, and simulated faults."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from headwater.queue.drain import Drained as Drained
    from headwater.testing.clock import advance_clock as advance_clock
    from headwater.testing.databases import DatabasePool as DatabasePool
    from headwater.testing.drain import drain as drain
    from headwater.testing.faults import (
        FaultReport as FaultReport,
    )
    from headwater.testing.faults import (
        Finding as Finding,
    )
    from headwater.testing.faults import (
        simulate_faults as simulate_faults,
    )
    from headwater.testing.published import PublishedEvents as PublishedEvents

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "headwater.queue.drain": ("Drained",),
            "headwater.testing.clock": ("advance_clock",),
            "headwater.testing.databases": ("DatabasePool",),
            "headwater.testing.drain": ("drain",),
            "headwater.testing.faults": ("FaultReport", "Finding", "simulate_faults"),
            "headwater.testing.published": ("PublishedEvents",),
        },
    )
