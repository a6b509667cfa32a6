"""The principal of a request, and the permission that each route requires, declared with the route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fastapi import Depends, Request

from headwater.servers.authentication import Principal

PRINCIPAL: Final = "headwater.principal"


def principal_of(request: Request) -> Principal:
    """The principal that sent this request. The middleware authenticates it before it reads the body."""
    principal: Principal = request.scope[PRINCIPAL]
    return principal


@dataclass(frozen=True)
class RequiredPermission:
    """The permission that a route requires: an action on a resource named in its path, or on the log as a whole."""

    action: str
    kind: str
    # The path parameter that holds the name; None: the name is *.
    parameter: str | None

    async def __call__(self, request: Request) -> None:
        name = "*" if self.parameter is None else request.path_params[self.parameter]
        principal_of(request).need(self.action, self.kind, name)

    def __str__(self) -> str:
        return f"{self.action} {self.kind}" + ("" if self.parameter is None else f" {{{self.parameter}}}")


@dataclass(frozen=True)
class RouteCheckedPermission:
    """For a route that checks permissions itself, because they depend on the request. The text documents them."""

    text: str

    async def __call__(self) -> None:
        """Nothing to check here: the route does it."""

    def __str__(self) -> str:
        return self.text


def requires(action: str, kind: str, parameter: str | None = None) -> Any:
    """Require a permission before the route runs."""
    return Depends(RequiredPermission(action, kind, parameter))


def checked_in_route(text: str) -> Any:
    """Document the permissions that the route checks itself."""
    return Depends(RouteCheckedPermission(text))


def permission_of(route: Any) -> RequiredPermission | RouteCheckedPermission:
    """The permission that a route declares. Every route declares exactly one."""
    declared = [
        one.dependency
        for one in route.dependencies
        if isinstance(one.dependency, (RequiredPermission, RouteCheckedPermission))
    ]
    if len(declared) != 1:
        raise AssertionError(f"{route.path} must declare one permission, not {len(declared)}")
    permission: RequiredPermission | RouteCheckedPermission = declared[0]
    return permission
