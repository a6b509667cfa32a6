"""Fields of request and response models that are settings: built from the definitions of the settings.

In the OpenAPI document such a field has `x-headwater-setting`, by which the console finds it for its forms.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from headwater.errors import InvalidRequest
from headwater.setting_definitions import MAX_JSON_SECONDS, SettingDefinition

M = TypeVar("M", bound=BaseModel)


def new_settings(definitions: tuple[SettingDefinition, ...]) -> Callable[[type[M]], type[M]]:
    """Add optional fields for the settings of something new, with their defaults."""
    return _adding({one.json_name: (_given(one, _default(one)), Field(default=_default(one))) for one in definitions})


def changed_settings(definitions: tuple[SettingDefinition, ...]) -> Callable[[type[M]], type[M]]:
    """Add optional fields for settings to change; those that are omitted stay unchanged."""
    return _adding({one.json_name: (_given(one, None), Field(default=None)) for one in definitions})


def shown_settings(definitions: tuple[SettingDefinition, ...]) -> Callable[[type[M]], type[M]]:
    """Add fields for the settings in a response."""
    return _adding({one.json_name: (_shown(one), ...) for one in definitions})


def settings_of(body: BaseModel, definitions: tuple[SettingDefinition, ...]) -> dict[str, Any]:
    """The settings that a request gives, by name. null removes a limit."""
    return {
        one.name: one.from_json(getattr(body, one.json_name))
        for one in definitions
        if one.json_name in body.model_fields_set
    }


def settings_json(holder: object, definitions: tuple[SettingDefinition, ...]) -> dict[str, Any]:
    """The settings of an object for a response."""
    found = {one.json_name: getattr(holder, one.name) for one in definitions}
    return {name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in found.items()}


def _adding(fields: dict[str, Any]) -> Callable[[type[M]], type[M]]:
    def add(model: type[M]) -> type[M]:
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )

    return add


def _given(one: SettingDefinition, default: Any) -> Any:
    def check(value: Any) -> Any:
        try:
            one.from_json(value)
        except InvalidRequest as error:
            raise PydanticCustomError("setting", "{rule}", {"rule": error.message}) from None
        return value

    return Annotated[Any, PlainValidator(check), WithJsonSchema(_schema(one, given=True))]


def _shown(one: SettingDefinition) -> Any:
    return Annotated[Any, WithJsonSchema(_schema(one, given=False))]


def _default(one: SettingDefinition) -> Any:
    return one.default.total_seconds() if isinstance(one.default, timedelta) else one.default


def _schema(one: SettingDefinition, *, given: bool) -> dict[str, Any]:
    """The JSON schema of a setting in a request, where 0 removes a limit, or in a response."""
    schema: dict[str, Any] = {"type": _TYPES[one.type]}
    if one.choices:
        schema["enum"] = list(one.choices)
    if one.type is dict:
        schema["additionalProperties"] = {"type": "string"}
    longest = MAX_JSON_SECONDS if one.type is timedelta else one.maximum
    bounds = {"minimum": one.minimum, "maximum": longest, "exclusiveMinimum": one.above}
    schema |= {key: bound for key, bound in bounds.items() if bound is not None}
    if one.removable if given else one.nullable:
        zero = [{"const": 0}] if given and one.type is not timedelta else []
        schema = {"anyOf": [schema, *zero, {"type": "null"}]}
    description = one.help if not one.none else f"{one.help} null: {one.none}."
    return {
        "title": one.label,
        "description": description,
        **schema,
        "x-headwater-setting": {
            "unit": one.unit or ("seconds" if one.type is timedelta else ""),
            "none": one.none or ("none" if one.nullable else ""),
        },
    }


_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    timedelta: "number",
}
