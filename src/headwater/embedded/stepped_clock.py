"""An adjustable clock for one embedded Postgres, implemented with libfaketime.

`Postgres(directory, environment=clock.environment)` starts a server with this clock; `clock.set_offset(-3600.0)` sets
the clock of all its processes back by an hour. Other programs and the monotonic clock are not affected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headwater.embedded.errors import EmbeddedError

_LIBRARIES: Final = (
    "/usr/lib/*/faketime/libfaketime.so.1",
    "/usr/lib/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
    "/usr/local/lib/faketime/libfaketime.so.1",
)


def find_libfaketime() -> Path | None:
    """Return the path of the library if it is installed (Debian: `apt-get install faketime`)."""
    for pattern in _LIBRARIES:
        for path in sorted(Path("/").glob(pattern.removeprefix("/"))):
            return path
    return None


class SteppedClock:
    """An offset to the real clock, stored in a file that the server's processes read."""

    def __init__(self, file: Path, *, library: Path | None = None) -> None:
        found = library or find_libfaketime()
        if found is None:
            raise EmbeddedError("libfaketime is not installed. On Debian, run: apt-get install faketime.")
        self._file: Final = file
        self._library: Final = found
        self.set_offset(0.0)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for the server."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set_offset(self, seconds: float) -> None:
        """Set the offset of the server's clock from the real one in seconds; negative values set it back."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{seconds:+f}s\n")
        fresh.chmod(0o644)
        fresh.replace(self._file)
