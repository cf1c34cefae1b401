"""Base of all request bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """A strictly typed JSON object, in which null means that a field is absent."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data
