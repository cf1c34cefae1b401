"""vLLM as the target's engine, under Penstock's scheduler: its models, kernels and workers; and the
other way round, Penstock's policies inside vLLM's own server. Nothing outside knows it but
`penstock.engine.backends`, which imports it once it is chosen."""

from __future__ import annotations

from typing import Any


def make_scheduler(**settings: Any) -> Any:
    """For `vllm serve --scheduler-cls penstock.engine.vllm.make_scheduler`. Raises: ConfigError."""
    from penstock.engine.vllm.plugin import make_guided_scheduler

    return make_guided_scheduler(**settings)
