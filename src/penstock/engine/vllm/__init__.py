"""vLLM as the target's engine under Penstock's scheduler, and Penstock's policies in vLLM's server.

Only `penstock.engine.backends` imports it, when vLLM is chosen."""

from __future__ import annotations

from typing import Any


def make_scheduler(**settings: Any) -> Any:
    """Scheduler for `vllm serve --scheduler-cls penstock.engine.vllm.make_scheduler`.

    Raises: ConfigError."""
    from penstock.engine.vllm.plugin import make_guided_scheduler

    return make_guided_scheduler(**settings)
