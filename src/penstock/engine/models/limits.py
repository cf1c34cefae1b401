"""Limits of the compiled kernels; the eager decoder has none."""

from __future__ import annotations

from penstock.engine.models.config import DecoderConfig


def beyond_kernels(config: DecoderConfig) -> str | None:
    """Return a feature that the native kernels do not support; None without one."""
    return None if config.variant.experts is None else "experts"
