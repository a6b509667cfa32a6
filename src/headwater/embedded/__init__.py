"""An embedded Postgres server: find its binaries, start it, attach to it, stop it."""

from typing import TYPE_CHECKING

from headwater.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from headwater.embedded.binaries import Binaries as Binaries, find_binaries as find_binaries
    from headwater.embedded.errors import EmbeddedError as EmbeddedError
    from headwater.embedded.postgres import Postgres as Postgres

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "headwater.embedded.binaries": ("Binaries", "find_binaries"),
            "headwater.embedded.errors": ("EmbeddedError",),
            "headwater.embedded.postgres": ("Postgres",),
        },
    )
