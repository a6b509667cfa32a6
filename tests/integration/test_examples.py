"""Does every example do what it says, as a program of its own?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

FOLDER = Path(__file__).parents[2] / "examples"

LAST_LINES = {
    "transaction.py": "events: [1]",
    "follow.py": "after a rewind: [19, 20, 21, 22]",
    "exactly_once.py": "{'/': 2, '/about': 1}",
    "asynchronous.py": "seen: [0, 1, 2]",
    "later.py": "three tries, 1 event",
    "worker.py": "mailer: done 3, dead 1",
    "transactional_worker.py": "{'ada': 700, 'bob': 300}",
    "routing.py": "complaints: ['parcel.us.ny.late', 'parcel.eu.fr.sent']",
    "sql_subscription.py": "{'kitchen': ['soup?', 'yes'], 'garden': ['rain']}",
    "watched_table.py": "table.public.stock: ['insert', 'update', 'delete']",
}


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("*.py")))
def test_the_example_ends_with_what_it_promises(name: str, dsn: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADWATER_")}
    result = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        env={**environment, "HEADWATER_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == LAST_LINES[name]
