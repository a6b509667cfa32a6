"""Does `headwater chaos` find that nothing is lost, and does it find out when something is?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from effort import EFFORT
from headwater.database import schema
from headwater.embedded import Postgres
from headwater.embedded.stepped_clock import find_libfaketime
from headwater.trials import chaos
from patience import PATIENCE_SECONDS, TEST_SECONDS

# Less is too short for every disaster.
SECONDS = 6.5 * max(1.0, EFFORT)
PROGRAM = [sys.executable, "-c", "from headwater.cli import main; main()", "chaos"]
HERE = Path(__file__).parent

pytestmark = pytest.mark.crash


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}


@pytest.mark.parametrize(
    "readers",
    [
        "worker,follow,follow-bare,process,webhook",
        pytest.param(",".join(chaos.ROLES), marks=pytest.mark.long),
    ],
    ids=["readers whose place is in the log", "every reader"],
)
def test_a_trial_by_every_disaster_loses_nothing(readers: str) -> None:
    command = [*PROGRAM, "--json", "--seconds", f"{SECONDS:g}", "--rate", "100", "--copy-events", "1000"]
    done = subprocess.run(
        [*command, "--readers", readers],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS + TEST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    verdict = outcome["verdict"]
    wrong = ("lost", "duplicates", "torn", "invented", "gaps", "out_of_order")
    assert {name: verdict[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert verdict["produced"] > 0
    assert verdict["acknowledged"] - verdict["lost_with_old_primary"] <= verdict["produced"]
    assert all(reader["delivered"] > 0 for reader in verdict["readers"])
    # Steps of the clock need libfaketime.
    skipped = {"clock steps"} if find_libfaketime() is None else set()
    assert set(outcome["skipped"]) == skipped
    assert set(outcome["faults"]) == set(chaos.KINDS) - skipped
    assert outcome["processes_killed"] >= 1
    assert outcome["failures"] == []


def test_an_interrupted_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "--minutes", "5", "--kinds", "connections cut", "--readers", "follow"],
        env={**environment(), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    # Its first line comes when the trial is under way.
    assert process.stderr.readline()
    session = f"TMPDIR={tmp_path}".encode()
    assert processes_with(session)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=TEST_SECONDS)[1]
    assert process.returncode == 130, said
    assert processes_with(session) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("headwater-")] == []


def processes_with(variable: bytes) -> list[int]:
    """Processes that have a variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if variable in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def server() -> Iterator[Postgres]:
    """A server that may be killed, with a log on it."""
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        server = Postgres(Path(directory, "postgres"))
        server.start()
        try:
            server.ensure_database("headwater")
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                schema.upgrade(connection)
            yield server
        finally:
            server.stop(mode="immediate")


def prelude(break_it: str) -> str:
    return f"import sys; sys.path.insert(0, {str(HERE)!r}); import broken_builds; broken_builds.{break_it}()"


SHORT = chaos.TrialPlan(seconds=2, seed=3, events_per_second=100, pause_seconds=0.3, patience_seconds=8)


def lost_by(outcome: chaos.TrialResult) -> set[str]:
    return {reader.name for reader in outcome.verdict.readers if reader.lost}


def test_a_log_that_forgets_what_it_acknowledged_is_found_out(dsn: str, connection: psycopg.Connection) -> None:
    connection.execute(
        "create function forget() returns trigger language plpgsql as $$ begin return null; end $$; "
        "create trigger forget before insert on headwater_internal.event for each row when (new.key = 'k1') "
        "execute function forget();"
    )
    try:
        outcome = chaos.run(replace(SHORT, kinds=("sessions ended",), roles=("follow",)), dsn, server=None)
    finally:
        connection.execute("drop trigger forget on headwater_internal.event")
    assert any(one.startswith("acknowledged but not in the log") for one in outcome.verdict.examples)
    assert outcome.verdict.lost > 0


def test_a_build_without_the_publisher_lock_is_found_out(server: Postgres) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        found = connection.execute(
            "select pg_get_function_arguments(oid) from pg_proc where proname = 'advertise_publisher' "
            "and pronamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace) and prorettype = "
            "'void'::regtype"
        ).fetchall()
        assert found
        for (arguments,) in found:
            connection.execute(
                f"create or replace function headwater_internal.advertise_publisher({arguments}) returns void "
                "language plpgsql as $$ begin end $$"
            )
    plan = replace(SHORT, seconds=4, kinds=("publishers held open",), roles=("follow", "follow-bare", "process"))
    outcome = chaos.run(plan, server.dsn(), server=server)
    assert outcome.faults["publishers held open"] >= 2
    assert lost_by(outcome)
    assert not outcome.verdict.ok


def test_a_build_that_acknowledges_before_it_handles_is_found_out(dsn: str) -> None:
    plan = replace(
        SHORT, kinds=("processes killed",), roles=("worker",), prelude=prelude("acknowledge_before_handling")
    )
    outcome = chaos.run(plan, dsn, server=None)
    # The poisonous event alone does it: it is acknowledged, and then ends its worker.
    assert lost_by(outcome)
    assert not outcome.verdict.ok


@pytest.mark.long
def test_a_build_whose_followers_move_to_the_stable_position_is_found_out(server: Postgres) -> None:
    plan = replace(
        SHORT, kinds=("Postgres stopped at once",), roles=("follow", "process"), prelude=prelude("move_to_stable")
    )
    outcome = chaos.run(plan, server.dsn(), server=server)
    assert outcome.head_went_back >= 1
    assert lost_by(outcome) >= {"follow cursor quiet", "process quiet"}


@pytest.mark.long
def test_a_build_without_an_epoch_is_found_out(server: Postgres) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(
            "create or replace function headwater.current_epoch() returns integer language plpgsql volatile "
            "as $$ begin return 1; end $$"
        )
    plan = replace(SHORT, kinds=("failovers",), roles=("follow", "follow-bare", "process"))
    outcome = chaos.run(plan, server.dsn(), server=server)
    assert outcome.head_went_back >= 1
    assert lost_by(outcome)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Postgres stopped at once", "failovers"])
def test_positions_that_are_issued_again_are_skipped_by_no_follower(server: Postgres, kind: str) -> None:
    plan = replace(
        SHORT, kinds=(kind,), roles=("follow", "follow-bare", "process", "worker"), patience_seconds=PATIENCE_SECONDS
    )
    outcome = chaos.run(plan, server.dsn(), server=server)
    assert outcome.head_went_back >= 1
    assert outcome.verdict.ok, outcome.verdict.examples
