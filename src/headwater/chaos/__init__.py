"""A trial of the log by disaster: it is produced to and consumed while everything around it is killed and cut off.

What was produced and what was done with it is noted in files outside of the database, so that even a commit that the
database forgets is found missing. `headwater chaos` runs it; read `trial.py` first.
"""

from headwater.chaos.trial import Outcome, Plan, Progress, run
from headwater.chaos.verdict import Verdict

__all__ = ["Outcome", "Plan", "Progress", "Verdict", "run"]
