"""Do old and new programs work side by side through an upgrade and a restart of each, with nothing lost?"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

import headwater
from databases import database
from headwater.database import schema
from headwater.trials.chaos import evidence, journal, participants, setup
from headwater.trials.chaos.config import CONFIG_VARIABLE, EXACT, FOLLOW, PLAIN, PROCESS, TrialConfig, quiet_and_busy
from headwater.trials.chaos.processes import PROCESS_MAIN
from headwater.trials.chaos.verdict import judge
from patience import PATIENCE_SECONDS

SOURCE = Path(headwater.__file__).parent

pytestmark = pytest.mark.crash


@pytest.fixture
def old_dsn(admin_dsn: str, template: str) -> Iterator[str]:
    """A log of the present version, for this test alone."""
    with database(admin_dsn, template) as dsn:
        yield dsn


@pytest.fixture
def next_release(tmp_path: Path) -> Path:
    """A copy of the package as its next version: tables and functions changed, a function with another signature."""
    root = tmp_path / "next"
    package = root / "headwater"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    last = schema.migrations()[-1].number
    (package / "database" / "schema" / "migrations" / f"{last + 1:04}_next.sql").write_text(
        f"-- What the next version adds.\n-- oldest program: {last}\n"
        "alter table headwater_internal.event add column shade text;\n"
        "alter table headwater_internal.queue add column colour text not null default 'red';\n"
        "create table headwater.next_thing (id integer primary key);\n"
    )
    edit(package / "version.py", f'VERSION = "{headwater.__version__}"', 'VERSION = "99.0.0"')
    functions = package / "database" / "schema" / "functions"
    edit(
        functions / "lease.sql", "language plpgsql\nas $$\n", "language plpgsql\nas $$\n-- as the next version has it\n"
    )
    # A function with a further parameter, and one that the next version does without.
    edit(
        functions / "cursor.sql",
        "from_position bigint, to_position bigint, epoch integer default null\n",
        "from_position bigint, to_position bigint, epoch integer default null, why text default null\n",
    )
    edit(functions / "stable_position.sql", "function headwater.head()\n", "function headwater.top()\n")
    for path in functions.glob("*.sql"):
        path.write_text(
            path.read_text().replace("headwater.head()", "headwater.top()").replace("'head'", "'head', 'top'")
        )
    edit(package / "calls" / "log.py", "headwater.head()", "headwater.top()")
    return root


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text, f"{path.name} is not what this test was written for"
    path.write_text(text.replace(before, after))


class Programs:
    """Processes of both versions with one configuration."""

    def __init__(self, config: TrialConfig, next_release: Path) -> None:
        self.config, self.paths = config, {"old": SOURCE.parent, "next": next_release}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, version: str, role: str, *, number: int = 1) -> None:
        name = f"{role}-{version}-{number}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        with Path(self.config.directory, f"{name}.stderr").open("wb") as stderr:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-c", PROCESS_MAIN, role, name, "7"],
                env={**kept, CONFIG_VARIABLE: self.config.as_json(), "PYTHONPATH": str(self.paths[version])},
                stdin=subprocess.PIPE,
                stderr=stderr,
            )

    def end(self, name: str, *, by: int | None = signal.SIGTERM) -> int:
        process = self.running.pop(name)
        if by is not None:
            process.send_signal(by)
        return process.wait(PATIENCE_SECONDS)

    def refuse_fallen(self) -> None:
        for name, process in self.running.items():
            if process.poll() is not None:
                said = Path(self.config.directory, f"{name}.stderr").read_text()
                pytest.fail(f"{name} ended with {process.returncode}: {said[-2000:]}")

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait(PATIENCE_SECONDS)


def test_old_and_new_programs_work_side_by_side_through_an_upgrade(
    old_dsn: str, next_release: Path, tmp_path: Path, until: Callable[[Callable[[], bool]], bool]
) -> None:
    directory = tmp_path / "trial"
    directory.mkdir()
    readers = participants.choose(["worker", "follow", "process"])
    config = setup.make_config(readers, directory, dsn=old_dsn, events_per_second=300)
    programs = Programs(config, next_release)
    _, busy_follower = quiet_and_busy(FOLLOW)
    _, busy_processor = quiet_and_busy(PROCESS)

    def acknowledged(producer: str) -> int:
        lines = [
            line for line in journal.read_all(directory) if line.kind == "acknowledged" and line.producer == producer
        ]
        return sum(len(line.numbers) for line in lines)

    def handled(worker: str) -> int:
        notes = journal.DeliveryLogReader(directory, PLAIN).new_by_process()
        return sum(len(events) for process, events in notes if process == worker)

    def done(name: str) -> int:
        """How many events a process has published, handled or read."""
        programs.refuse_fallen()
        match name.split("-")[0]:
            case "producer":
                return acknowledged(name)
            case "worker":
                return handled(name)
            case "follow":
                return len(journal.read_delivered(directory, busy_follower))
            case _:
                with psycopg.connect(old_dsn) as connection:
                    row = connection.execute(evidence.EFFECT_COUNT, (busy_processor,)).fetchone()
                return row[0] if row else 0

    old = ("producer-old-1", "worker-old-1", "follow-old-1", "process-old-1")
    with setup.set_up(readers, config, lambda: old_dsn):
        try:
            for role in ("producer", "worker", "follow", "process"):
                programs.start("old", role)
            until(lambda: all(done(name) > 50 for name in old))

            upgrade = subprocess.run(
                [sys.executable, "-c", "from headwater.cli import main; main()", "migrate", "--dsn", old_dsn],
                env={**os.environ, "PYTHONPATH": str(next_release)},
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
            assert upgrade.returncode == 0, upgrade.stderr
            assert "(Headwater 99.0.0)" in upgrade.stdout
            at_upgrade = {name: done(name) for name in old}

            # Those that run go on with the new functions under them, and those of the next version join.
            for role in ("producer", "worker"):
                programs.start("next", role)
            until(lambda: all(done(name) > count + 50 for name, count in at_upgrade.items()))
            until(lambda: done("producer-next-1") > 50 and done("worker-next-1") > 50)

            # A program of the old version may be started again until it is replaced.
            assert programs.end("worker-old-1") == 0
            programs.start("old", "worker", number=2)
            until(lambda: done("worker-old-2") > 20)
            assert programs.end("worker-old-2") == 0
            programs.start("next", "worker", number=2)
            until(lambda: done("worker-next-2") > 20)

            config.stop_file.touch()
            assert [programs.end(name, by=None) for name in ("producer-old-1", "producer-next-1")] == [0, 0]
            with headwater.connect(old_dsn) as log:
                events = list(evidence.read_events(log, config))
                outstanding = evidence.PendingDeliveries(readers, config, events)
                until(lambda: not any(outstanding.counts(log).values()))
            programs.refuse_fallen()
            assert [programs.end(name) for name in ("worker-next-1", "worker-next-2")] == [0, 0]
        finally:
            programs.stop()
        with headwater.connect(old_dsn) as log:
            ids = {event.position: event.id for event in events}
            got = [evidence.read_deliveries(log, config, kind, ids) for kind in readers.readers]
    verdict = judge(journal.read_all(directory), events, got)
    assert verdict.ok, verdict.examples
    assert verdict.produced == verdict.acknowledged > 500
    wanted = {reader.name: reader.wanted for reader in verdict.readers}
    assert all(wanted[name] > 500 for name in (PLAIN, EXACT, busy_follower, busy_processor)), wanted

    with psycopg.connect(old_dsn) as connection:
        retired = {name for (name,) in connection.execute("select signature from headwater_internal.retired_function")}
    assert retired == {"headwater.head()"}
