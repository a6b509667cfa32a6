"""Attributes of a package that are loaded on first use (PEP 562).

A package imports its public names under `TYPE_CHECKING`, for type checkers (with `as`, since it exports them), and
states here where each is. So importing the package is quick, and a program loads only the modules whose names it uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module


def lazy_attributes(
    package: str, names_by_module: Mapping[str, Collection[str]], *, submodules: Collection[str] = ()
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """The `__all__`, `__getattr__` and `__dir__` of a package."""
    modules = {name: module for module, names in names_by_module.items() for name in names}

    def get_attribute(name: str) -> object:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        # The next access does not call this function.
        setattr(sys.modules[package], name, value)
        return value

    public = sorted([*modules, *submodules])
    return public, get_attribute, lambda: public
