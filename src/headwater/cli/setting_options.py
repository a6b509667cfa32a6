"""Options of commands that create or change something with settings: built from the definitions of the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any, TypeVar

import typer

from headwater.cli.options import parse_duration, parse_header
from headwater.setting_definitions import SettingDefinition

C = TypeVar("C", bound=Callable[..., None])


def setting_options(
    definitions: tuple[SettingDefinition, ...], *, before: str = "dsn", change: bool = False
) -> Callable[[C], C]:
    """Give a command an option for each setting, in place of its `**settings`, which gets those that were given.

    In the help they come before the option `before`. `change`: the command changes settings, so there is no default.
    """

    def add_options(command: C) -> C:
        signature = inspect.signature(command, eval_str=True)
        parameters = []
        for parameter in signature.parameters.values():
            if parameter.name == before:
                parameters += [_option(one, change=change) for one in definitions]
            if parameter.kind is not parameter.VAR_KEYWORD:
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
        names = {one.name for one in definitions}

        def run(**arguments: Any) -> None:
            given = {
                name: _plain(value)
                for name, value in arguments.items()
                if name not in names or (value is not None and value != [])
            }
            command(**given)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run  # type: ignore[return-value]

    return add_options


def option_name(one: SettingDefinition) -> str:
    """The option of a setting. That of a mapping is given once for each entry."""
    name = one.name.removesuffix("s") if one.type is dict else one.name
    return f"--{name.replace('_', '-')}"


def audited(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, as they are audited: of a mapping only the names, since values may be secret."""
    return {name: sorted(value) if isinstance(value, Mapping) else value for name, value in settings.items()}


def _option(one: SettingDefinition, *, change: bool) -> inspect.Parameter:
    help = one.help
    if one.limits and not one.choices:
        help += f" {one.limits.capitalize()}."
    if change and one.removable and one.type is not timedelta:
        help += f" 0: {one.none}."
    if not change and one.default_text:
        help += f" Default: {one.default_text}."
    kind: Any = one.type
    names = [option_name(one)]
    more: dict[str, Any] = {}
    if one.type is bool:
        names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
    elif one.type is timedelta:
        more = {"parser": parse_duration, "metavar": "DURATION"}
    elif one.type is dict:
        kind = list[Any]
        more = {"parser": parse_header, "metavar": "NAME=VALUE"}
        help = f"{one.help} Repeat for several."
    elif one.choices:
        # Not Literal, which is known to typer only from 0.19.
        kind = _choice_type(one.name, one.choices)
    elif one.unit:
        more = {"metavar": one.unit.upper()}
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer.Option(*names, help=help, show_default=False, **more)],
    )


def _choice_type(name: str, choices: tuple[str, ...]) -> Any:
    make: Any = Enum
    return make(name, {choice: choice for choice in choices})


def _plain(value: Any) -> Any:
    """A value as the API takes it: the text of a choice, a mapping of pairs."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):
        return dict(value)
    return value
