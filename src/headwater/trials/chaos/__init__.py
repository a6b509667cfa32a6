"""A trial of the log by disaster: producers publish and readers of every kind read while everything is killed.

What was published and what each reader got is noted in files outside of the database, so that even a commit that the
database forgets is found missing. `headwater chaos` runs it; read `trial.py` first.
"""

from typing import Final

from headwater.trials.chaos.cast import READERS
from headwater.trials.chaos.faults import DISASTERS
from headwater.trials.chaos.trial import Outcome, Plan, Progress, run
from headwater.trials.chaos.verdict import ReaderVerdict, Verdict

KINDS: Final = tuple(DISASTERS)
ROLES: Final = tuple(dict.fromkeys(reader.role for reader in READERS))

__all__ = ["KINDS", "ROLES", "Outcome", "Plan", "Progress", "ReaderVerdict", "Verdict", "run"]
