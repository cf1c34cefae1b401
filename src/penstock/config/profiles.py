"""Step-time profile files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter, ValidationError

from penstock.config.model import ConfigError
from penstock.fluid.step_profile import StepProfile

# A file has the fields of a profile, and no others.
_PROFILE = TypeAdapter(StepProfile)


def read_profile(path: Path) -> StepProfile:
    """Read a step-time profile. Raises OSError, or ConfigError for an invalid file."""
    try:
        profile = _PROFILE.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        is_unknown = first["type"] == "unexpected_keyword_argument"
        message = "unknown field" if is_unknown else first["msg"].removeprefix("Value error, ")
        told = [".".join(map(str, first["loc"])), message]
        raise ConfigError(f"profile {path}: {': '.join(filter(None, told))}") from error
    if not all([profile.name, *(d.name for d in profile.drafters)]):
        raise ConfigError(f"profile {path}: a profile needs a name, as do its drafters")
    return profile


def _readable_profile(profile: Path) -> Path:
    try:
        read_profile(profile)
    except OSError as error:
        raise ValueError(f"cannot read {profile}: {error.strerror}") from error
    return profile


ProfilePath = Annotated[Path, AfterValidator(_readable_profile)]
