"""Base of all settings: unknown ones are refused, and a mistake is one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

_Parsed = TypeVar("_Parsed", bound=BaseModel)
_Value = TypeVar("_Value")

_UNKNOWN = "unknown_setting"


class ConfigError(ValueError):
    """One line: the mistake, and the allowed values. where: path of the setting as far as known."""

    def __init__(self, message: str, where: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.where = where


def each_once(
    pairs: Iterable[tuple[str, _Value]],
    where: str,
    error: Callable[[str], Exception] = ConfigError,
) -> dict[str, _Value]:
    """Return names and values as a mapping.

    Raises `error` for a repeated name; a mapping would silently keep the last."""
    made: dict[str, _Value] = {}
    for name, value in pairs:
        if name in made:
            raise error(f"{where}: {name!r} is given twice")
        made[name] = value
    return made


class Model(BaseModel):
    """Base model of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _known(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Name the allowed settings for an unknown one, and report the other mistakes too."""
        unknown = set(data if isinstance(data, dict) else ()) - set(cls.model_fields)
        if not unknown:
            return handler(data)
        mistakes = [
            _mistake(unknown_setting(str(name), [*cls.model_fields]), name=str(name))
            for name in data
            if name in unknown
        ]
        try:
            handler({name: value for name, value in data.items() if name not in unknown})
        except ValidationError as error:
            for e in error.errors(include_url=False):
                mistakes.append(_mistake(e["msg"], e["loc"], _name_in(e)))
        raise ValidationError.from_exception_data(cls.__name__, mistakes, hide_input=True)


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """Return the message on an unknown setting."""
    close = "".join(f" (did you mean {like!r}?)" for like in get_close_matches(name, known, 1))
    return f"unknown setting {name!r}{close}; settings: {', '.join(known)}"


def address_in(text: str) -> str:
    """Return HOST:PORT as given. Raises ValueError for other forms."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8100 or [::]:8100")
    return text


def _mistake(message: str, loc: tuple[int | str, ...] = (), name: str = "") -> InitErrorDetails:
    kind = _UNKNOWN if name else "setting"
    error = PydanticCustomError(kind, "{message}", {"message": message, "name": name})
    return InitErrorDetails(type=error, loc=loc, input=None)


def _name_in(details: Any) -> str:
    """Return the name of the unknown setting that a mistake is about."""
    return str(details["ctx"]["name"]) if details["type"] == _UNKNOWN else ""


def mistakes_in(model: type[BaseModel], data: Any) -> list[ConfigError]:
    """Return the mistakes in settings.

    Rules across several settings are checked once each setting by itself is right."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        return [_as_config_error(e) for e in error.errors(include_url=False, include_input=False)]
    return []


def _as_config_error(details: Any) -> ConfigError:
    where = tuple(str(part) for part in details["loc"])
    message = details["msg"].removeprefix("Value error, ")
    named = _name_in(details)
    return ConfigError(
        f"{'.'.join(where)}: {message}" if where else message, (*where, named) if named else where
    )


def parsed(model: type[_Parsed], data: Any) -> _Parsed:
    """Validate settings. Raises ConfigError with one line for the first mistake."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _as_config_error(error.errors(include_url=False)[0]) from error
