"""What all settings have in common: unknown ones are refused, mistakes are one line."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

_Parsed = TypeVar("_Parsed", bound=BaseModel)

_log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """One line: what was wrong, and what is allowed."""


class Model(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    renamed: ClassVar[dict[str, str]] = {}
    """Old names of settings, which are accepted for one release, and the new ones."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Says what is allowed, which `extra="forbid"` does not."""
        for old, new in cls.renamed.items():
            if isinstance(data, dict) and old in data and new not in data:
                _log.warning("the setting %s is now called %s; use that name", old, new)
                data = {new if name == old else name: value for name, value in data.items()}
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise ValueError(f"unknown setting {name!r}; settings: {known}")
        return data


def address_in(text: str) -> str:
    """Raises: ValueError where it is not HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8100 or [::]:8100")
    return text


def parsed(model: type[_Parsed], data: Any) -> _Parsed:
    """Settings, validated. Raises: ConfigError with one line for the first mistake."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {message}" if where else message) from error
