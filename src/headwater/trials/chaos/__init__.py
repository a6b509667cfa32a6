"""Fault-injection test of the log (`headwater chaos`): producers publish and readers read while faults are injected.

Producers and readers record what was published and delivered in files outside the database, so that a commit that the
database loses is detected. Start reading at `trial.py`.
"""

from typing import Final

from headwater.trials.chaos.faults import FAULTS
from headwater.trials.chaos.participants import READERS
from headwater.trials.chaos.trial import TrialPlan, TrialProgress, TrialResult, run
from headwater.trials.chaos.verdict import ReaderVerdict, Verdict

KINDS: Final = tuple(FAULTS)
ROLES: Final = tuple(dict.fromkeys(reader.role for reader in READERS))

__all__ = ["KINDS", "ROLES", "ReaderVerdict", "TrialPlan", "TrialProgress", "TrialResult", "Verdict", "run"]
