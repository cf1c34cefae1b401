"""Step-time profile files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock.config.model import ConfigError
from penstock.fluid.step_profile import DrafterProfile, StepProfile


class _DrafterTimes(BaseModel):
    """JSON form of a `DrafterProfile`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    batch_counts: tuple[int, ...]
    batch_seconds: tuple[float, ...]
    per_catch_up_token: float = 0.0
    slowdown: float = 1.0
    target_slowdown: float = 1.0


class _ProfileFile(BaseModel):
    """JSON form of a `StepProfile`, in seconds."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    origin: str = ""
    kv_tokens: int
    granularity: int = 1
    token_counts: tuple[int, ...]
    token_seconds: tuple[float, ...]
    decode_fixed: float = 0.0
    per_decode: float = 0.0
    per_kv_token: float = 0.0
    per_prefill_token: float = 0.0
    per_prefill_context: float = 0.0
    drafters: tuple[_DrafterTimes, ...] = ()


def read_profile(path: Path) -> StepProfile:
    """Read a step-time profile. Raises OSError, or ConfigError for an invalid file."""
    try:
        fields = _ProfileFile.model_validate_json(path.read_bytes()).model_dump()
        drafters = tuple(DrafterProfile(**times) for times in fields.pop("drafters"))
        return StepProfile(**fields, drafters=drafters)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"profile {path}: {where}{': ' if where else ''}{first['msg']}"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _readable_profile(profile: Path) -> Path:
    try:
        read_profile(profile)
    except OSError as error:
        raise ValueError(f"cannot read {profile}: {error.strerror}") from error
    return profile


ProfilePath = Annotated[Path, AfterValidator(_readable_profile)]
