"""A limit on the work of comparing schemas. Pure."""

from __future__ import annotations

from typing import Final

from headwater.errors import InvalidSchema

MAX_STEPS: Final = 100_000
MAX_PROBLEMS: Final = 50


class WorkLimit:
    """Counts the steps of one or more comparisons and collects the problems, both up to a limit."""

    def __init__(self) -> None:
        self._steps = 0
        self.problems: list[str] = []

    def step(self) -> None:
        """Count a step. Raises InvalidSchema above the limit."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise InvalidSchema(
                "the schemas are too large to be compared",
                hint="Set the subject's compatibility to one that is not transitive, or to NONE.",
            )

    def take_problems(self) -> list[str]:
        """Return and clear the collected problems."""
        found, self.problems = self.problems, []
        return found

    def found(self, where: str, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{where or 'the root'}: {problem}")
