"""Does `headwater chaos` find that nothing is lost, and does it find out when something is?"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psycopg
import pytest

from headwater import chaos

# Longer for a soak.
SECONDS = float(os.environ.get("CHAOS_SECONDS", "6.5"))
PATIENCE_SECONDS = 240.0

pytestmark = [pytest.mark.crash, pytest.mark.slow]


def test_a_trial_by_every_disaster_loses_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    command = [sys.executable, "-c", "from headwater.cli import main; main()", "chaos", "--json", "--no-kafka"]
    done = subprocess.run(
        [*command, "--seconds", f"{SECONDS:g}", "--rate", "300", "--copy-events", "2000"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS + PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    verdict = outcome["verdict"]
    assert (verdict["lost"], verdict["duplicates"], verdict["torn"], verdict["invented"], verdict["gaps"]) == (0,) * 5
    assert verdict["produced"] >= verdict["acknowledged"] > 0
    # Five consumers, one of which reads one of the two topics.
    assert verdict["processed"] + verdict["dead"] > 4 * verdict["acknowledged"] // 2
    assert outcome["disasters"]["Postgres killed"] >= 1
    assert outcome["processes_killed"] >= 1
    assert outcome["failures"] == []


def test_a_log_that_loses_events_is_found_out(dsn: str, connection: psycopg.Connection) -> None:
    # Publishers that do not advertise, so that readers pass over what is in flight; and a commit that drops events.
    connection.execute(
        "create or replace function headwater.advertise_on_insert() returns trigger language plpgsql "
        "as $$ begin return null; end $$; "
        "create function forget() returns trigger language plpgsql as $$ begin return null; end $$; "
        "create trigger forget before insert on headwater.event for each row when (new.key = 'k7') "
        "execute function forget();"
    )
    plan = chaos.Plan(seconds=3, seed=3, events_per_second=200, pause_seconds=0.3, kinds=("publishers held open",))
    outcome = chaos.run(plan, dsn, server=None)
    assert outcome.disasters["publishers held open"] >= 2
    kinds = {example.partition(":")[0] for example in outcome.verdict.examples}
    assert "acknowledged and not in the log" in kinds
    # By which of its readers an event in flight is passed over depends on who looks when.
    assert {"never came to follower", "never came to plain", "never came to processor"} & kinds
    assert outcome.verdict.lost >= 3
    assert not outcome.verdict.ok
