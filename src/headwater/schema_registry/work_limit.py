"""A bound on the work that comparing two schemas may make. Pure."""

from __future__ import annotations

from typing import Final

from headwater.errors import InvalidSchema

MAX_STEPS: Final = 100_000
MAX_PROBLEMS: Final = 50


class Work:
    """Counts the steps of one or more comparisons and collects what was found, up to a limit of both."""

    def __init__(self) -> None:
        self._steps = 0
        self.problems: list[str] = []

    def step(self) -> None:
        """Refuse to go on without an end."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise InvalidSchema(
                "the schemas are too large to be compared",
                hint="Set the subject's compatibility to one that is not transitive, or to NONE.",
            )

    def told(self) -> list[str]:
        """What was found since it was last asked."""
        found, self.problems = self.problems, []
        return found

    def found(self, where: str, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{where or 'the root'}: {problem}")
