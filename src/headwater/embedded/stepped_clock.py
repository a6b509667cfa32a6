"""A clock for one embedded Postgres that can be set back and forth while the server runs, by libfaketime.

`Postgres(directory, environment=clock.environment)` starts a server under it; `clock.set_offset(-3600.0)` lets that
server, all its processes included, believe that it is an hour earlier. Other programs keep the real clock. Waits of
the server are not changed: the monotonic clock stays as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headwater.embedded.failure import EmbeddedError

_LIBRARIES: Final = (
    "/usr/lib/*/faketime/libfaketime.so.1",
    "/usr/lib/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
    "/usr/local/lib/faketime/libfaketime.so.1",
)


def find_libfaketime() -> Path | None:
    """The library, if it is installed (Debian: `apt-get install faketime`)."""
    for pattern in _LIBRARIES:
        for path in sorted(Path("/").glob(pattern.removeprefix("/"))):
            return path
    return None


class SteppedClock:
    """An offset to the real clock, kept in a file that the server's processes read."""

    def __init__(self, file: Path, *, library: Path | None = None) -> None:
        found = library or find_libfaketime()
        if found is None:
            raise EmbeddedError("libfaketime is not installed. On Debian: apt-get install faketime.")
        self._file: Final = file
        self._library: Final = found
        self.set_offset(0.0)

    @property
    def environment(self) -> dict[str, str]:
        """What the server's environment needs."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set_offset(self, seconds: float) -> None:
        """Let the server's clock be that many seconds ahead of the real one; below zero: behind it."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{seconds:+f}s\n")
        fresh.chmod(0o644)
        fresh.replace(self._file)
