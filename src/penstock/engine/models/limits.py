"""Limits of the compiled kernels; the eager decoder has none."""

from __future__ import annotations

from penstock.engine.models.config import DecoderConfig


def beyond_kernels(config: DecoderConfig) -> str | None:
    """Return a feature that the native kernels do not support; None without one."""
    variant = config.variant
    reasons = {
        "sliding windows with a rotary embedding of their own": (
            variant.window is not None and variant.window.rope is not None
        ),
        "norms behind attention and MLP": variant.post_norms,
        f"activation {variant.activation}": variant.activation != "silu",
        "scaled embeddings": variant.embedding_scale != 1,
        "scaled queries": variant.query_scale != 1,
    }
    return next((reason for reason, found in reasons.items() if found), None)
