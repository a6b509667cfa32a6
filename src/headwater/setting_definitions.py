"""What a setting is: meaning, type, default, unit and limits, defined once. Pure.

A noun with settings has one frozen dataclass: `TopicSettings`, `QueueSettings`, `WebhookSettings`, each in the file
`settings.py` of its room. A field is a setting and is annotated with a `Setting`. Everything that takes or shows
settings reads `definitions(noun)`: calls of SQL functions, keyword arguments, command-line options, HTTP models, forms
of the console, the reference. Only the database has its own copy, because any program may call it: a column with its
default and a constraint whose name is the `rule` of the setting, and parameters of the functions that create and change
the noun. `tests/integration/test_settings.py` compares all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from headwater.errors import InvalidRequest

# The largest integer of the database.
MAX_INTEGER: Final = 2_147_483_647
# A duration in JSON is bounded, since larger ones may be no valid timedelta.
MAX_JSON_SECONDS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The annotation of a field that is a setting.

    `help` is a sentence without the default and the limits, which are added where it is shown. `rule` says what a valid
    value is: it is the message of the error, and in the database the name of the constraint.
    """

    help: str
    rule: str
    label: str = ""
    minimum: float | None = None
    maximum: float | None = None
    # The smallest value is above this one.
    above: float | None = None
    unit: str = ""
    # For a setting that can be set to None: what None means. It is set to None by 0.
    none: str = ""
    # Given when the noun is created, and never changed.
    fixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDefinition(Setting):
    """A setting with its name, type and default."""

    name: str
    # bool, int, float, str, timedelta, or dict for a mapping of text to text.
    type: type
    choices: tuple[str, ...] = ()
    nullable: bool = False
    default: Any = None

    @property
    def json_name(self) -> str:
        """The name in JSON, where a duration is a number of seconds."""
        return f"{self.name}_seconds" if self.type is timedelta else self.name

    @property
    def removable(self) -> bool:
        """Whether 0 removes the limit that it sets; of a duration None, since no duration is 0."""
        return bool(self.none)

    @property
    def limits(self) -> str:
        """The limits as text; empty if there are none."""
        if self.choices:
            return " or ".join(self.choices)
        if self.above is not None:
            return f"more than {format_number(self.above)}"
        if self.minimum is None:
            return ""
        if self.maximum is None or self.maximum == MAX_INTEGER:
            return f"at least {format_number(self.minimum)}"
        return f"{format_number(self.minimum)} to {format_number(self.maximum)} {self.unit}".rstrip()

    @property
    def default_text(self) -> str:
        match self.default:
            case None:
                return self.none
            case bool():
                return "true" if self.default else "false"
            case int() | float():
                return format_number(self.default)
            case Mapping():
                return "none"
            case _:
                return str(self.default)

    def check(self, value: Any) -> Any:
        """The value, if it is one that can be set; otherwise InvalidRequest."""
        if not self._is_valid(value):
            raise InvalidRequest(self.rule, detail={"setting": self.name})
        return float(value) if self.type is float else value

    def from_json(self, value: Any) -> Any:
        """The value of a JSON document, checked. null is 0: it removes a limit."""
        if value is None and self.removable:
            return None if self.type is timedelta else 0
        if self.type is timedelta:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            value = timedelta(seconds=value) if is_number and abs(value) <= MAX_JSON_SECONDS else None
        return self.check(value)

    def _is_valid(self, value: Any) -> bool:
        if self.type is bool:
            return isinstance(value, bool)
        if self.type is str:
            return isinstance(value, str) and value in self.choices
        if self.type is dict:
            # The database checks the entries.
            return isinstance(value, Mapping)
        if self.type is timedelta:
            return isinstance(value, timedelta) and self._is_within(value.total_seconds())
        if isinstance(value, bool) or not isinstance(value, int if self.type is int else (int, float)):
            return False
        return self._is_within(value) or (self.removable and value == 0)

    def _is_within(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
        )


def format_number(number: float) -> str:
    """A number without a fraction that is zero."""
    return str(int(number)) if float(number).is_integer() else str(number)


@cache
def definitions(noun: type) -> tuple[SettingDefinition, ...]:
    """The settings of a noun, in their order."""
    hints = get_type_hints(noun, include_extras=True)
    defaults = noun()
    found = []
    for field in fields(noun):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        hint, setting = get_args(hints[field.name])
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        (kind,) = (option for option in options if option is not NoneType)
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        found.append(
            SettingDefinition(
                **{**asdict(setting), "label": setting.label or field.name.replace("_", " ").capitalize()},
                name=field.name,
                type=str if choices else dict if get_origin(kind) is Mapping else kind,
                choices=choices,
                nullable=NoneType in options,
                default=getattr(defaults, field.name),
            )
        )
    return tuple(found)


def definition(noun: type, name: str) -> SettingDefinition:
    """One setting of a noun."""
    (found,) = (one for one in definitions(noun) if one.name == name)
    return found


def changeable(noun: type) -> tuple[SettingDefinition, ...]:
    """The settings of a noun that can be changed."""
    return tuple(one for one in definitions(noun) if not one.fixed)


def checked(allowed: tuple[SettingDefinition, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are given: not None. InvalidRequest for an invalid value, TypeError for an unknown name."""
    known = {one.name: one for one in allowed}
    for name in given:
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}; the settings are {', '.join(known)}")
    return {name: known[name].check(value) for name, value in given.items() if value is not None}


def values(noun: type, holder: object) -> dict[str, Any]:
    """The settings of a noun that an object has as attributes, by name."""
    return {one.name: getattr(holder, one.name) for one in definitions(noun)}
