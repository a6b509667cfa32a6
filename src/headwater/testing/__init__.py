"""What tests of an application need: databases, a clock, captured events, draining, and simulated faults."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from headwater.queue.drain import Drained
    from headwater.testing.clock import advance_clock
    from headwater.testing.databases import DatabasePool
    from headwater.testing.drain import drain
    from headwater.testing.faults import FaultReport, Finding, simulate_faults
    from headwater.testing.published import PublishedEvents

__all__ = [
    "DatabasePool",
    "Drained",
    "FaultReport",
    "Finding",
    "PublishedEvents",
    "advance_clock",
    "drain",
    "simulate_faults",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "headwater.testing.clock": ("advance_clock",),
            "headwater.testing.databases": ("DatabasePool",),
            "headwater.queue.drain": ("Drained",),
            "headwater.testing.drain": ("drain",),
            "headwater.testing.faults": ("FaultReport", "Finding", "simulate_faults"),
            "headwater.testing.published": ("PublishedEvents",),
        },
    )

    def __dir__() -> list[str]:
        return __all__
