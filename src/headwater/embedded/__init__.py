"""An embedded Postgres server: find its binaries, start it, attach to it, stop it."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from headwater.embedded.binaries import Binaries, find_binaries
    from headwater.embedded.errors import EmbeddedError
    from headwater.embedded.postgres import Postgres

__all__ = ["Binaries", "EmbeddedError", "Postgres", "find_binaries"]

if not TYPE_CHECKING:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "headwater.embedded.binaries": ("Binaries", "find_binaries"),
            "headwater.embedded.errors": ("EmbeddedError",),
            "headwater.embedded.postgres": ("Postgres",),
        },
    )

    def __dir__() -> list[str]:
        return __all__
