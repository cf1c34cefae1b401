"""vLLM's V1 rule: running requests first, mixed batches, chunked prefill, newest preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission.parts.token_budget import TokenBudget
from penstock.core.policies.options import Share


class VllmV1(TokenBudget):
    """vLLM's present rule."""

    name: ClassVar[str] = "vllm_v1"

    @dataclass(frozen=True, slots=True)
    class Options(TokenBudget.Options):
        watermark: Share = TokenBudget.watermark  # share of KV blocks that admission leaves free
        # Memory must hold all of a prompt, not only its first chunk. False is vLLM before 0.19,
        # which preempts and restarts long prompts when memory is full.
        reserve_full_prompt: bool = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.watermark = options.watermark
        self.admits_whole = options.reserve_full_prompt


POLICY = VllmV1
