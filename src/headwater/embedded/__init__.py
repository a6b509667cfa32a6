"""An embedded Postgres server: find its binaries, start it, attach to it, stop it."""

from headwater.embedded.binaries import Binaries, find_binaries
from headwater.embedded.failure import EmbeddedError
from headwater.embedded.postgres import Postgres

__all__ = ["Binaries", "EmbeddedError", "Postgres", "find_binaries"]
