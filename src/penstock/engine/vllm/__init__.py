"""vLLM as the target's engine, and Penstock's policies in vLLM's own server."""

from __future__ import annotations

from typing import Any


def make_scheduler(**settings: Any) -> Any:
    """Scheduler for `vllm serve --scheduler-cls`. Raises: ConfigError."""
    from penstock.engine.vllm.plugin import make_guided_scheduler

    return make_guided_scheduler(**settings)
