"""vLLM's V1 rule: running requests first, mixed batches, chunked prefill, newest preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission.parts.token_budget import TokenBudget
from penstock.core.policies.options import Share


class VllmV1(TokenBudget):
    """vLLM's rule of today."""

    name: ClassVar[str] = "vllm_v1"

    @dataclass(frozen=True, slots=True)
    class Options(TokenBudget.Options):
        """As `TokenBudget`, and watermark: share of the KV blocks that admission leaves free.
        reserve_full_prompt: whether memory must hold all of a prompt, not
        only its first chunk. Without it a long prompt that meets a full memory is begun, preempted
        and begun again, as it was in vLLM before 0.19."""

        watermark: Share = TokenBudget.watermark
        reserve_full_prompt: bool = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.watermark = options.watermark
        self.admits_whole = options.reserve_full_prompt


POLICY = VllmV1
