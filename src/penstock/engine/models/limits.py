"""Limits of the compiled kernels; the eager decoder has none."""

from __future__ import annotations

from penstock.engine.models.config import DecoderConfig


def beyond_kernels(config: DecoderConfig, max_model_len: int) -> str | None:
    """Return a feature that the native kernels do not support; None without one.

    Texts have up to max_model_len tokens."""
    variant = config.variant
    reasons = {
        "experts": variant.experts is not None,
        f"a sliding window of {variant.window and variant.window.size} tokens": (
            variant.window is not None
            and (variant.window.rope is not None or variant.window.size < max_model_len)
        ),
        "norms behind attention and MLP": variant.post_norms,
        f"activation {variant.activation}": variant.activation != "silu",
        "scaled embeddings": variant.embedding_scale != 1,
        "scaled queries": variant.query_scale != 1,
    }
    return next((reason for reason, found in reasons.items() if found), None)
