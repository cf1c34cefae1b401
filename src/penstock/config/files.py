"""Configuration from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from penstock.config.model import ConfigError


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises: ConfigError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings")
    return data
