"""Who calls, and which right a route needs: said once, where the route is declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fastapi import Depends, Request

from headwater.servers.authentication import Caller

CALLER: Final = "headwater.caller"


def caller_of(request: Request) -> Caller:
    """Who sent this request; found out before anything of it was read."""
    caller: Caller = request.scope[CALLER]
    return caller


@dataclass(frozen=True)
class Right:
    """What a route needs: an action on something that its path names, or on the log as a whole."""

    action: str
    kind: str
    # The parameter of the path that holds the name; None: all of them.
    parameter: str | None

    async def __call__(self, request: Request) -> None:
        name = "*" if self.parameter is None else request.path_params[self.parameter]
        caller_of(request).need(self.action, self.kind, name)

    def __str__(self) -> str:
        return f"{self.action} {self.kind}" + ("" if self.parameter is None else f" {{{self.parameter}}}")


@dataclass(frozen=True)
class Decided:
    """For a route that finds out what it needs from what it is asked for. The text says what that is."""

    text: str

    async def __call__(self) -> None:
        """The route itself asks."""

    def __str__(self) -> str:
        return self.text


def needs(action: str, kind: str, parameter: str | None = None) -> Any:
    """Let only those in who have this right."""
    return Depends(Right(action, kind, parameter))


def decides(text: str) -> Any:
    """The route asks for rights by itself: these."""
    return Depends(Decided(text))


def right_of(route: Any) -> Right | Decided:
    """The right that a route states. Every route states one."""
    stated = [one.dependency for one in route.dependencies if isinstance(one.dependency, (Right, Decided))]
    if len(stated) != 1:
        raise AssertionError(f"{route.path} must state one right, not {len(stated)}")
    found: Right | Decided = stated[0]
    return found
