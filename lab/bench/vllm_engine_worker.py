"""A process that continues prompts on vLLM's engine, for `lab.bench.vllm_engine`: a JSON line in,
a JSON line out. Runs where vLLM is installed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from lab.bench.peers.workers.worker import (
    Prompts,
    answer_commands,
    continued_by_penstock,
    continued_by_vllm,
    measure,
)

_MAX_MODEL_LEN = 1024
_LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
"""Of `vllm serve` on a CPU (0.32, `engine/arg_utils.py`)."""


class Vllm:
    """vLLM's own engine. args: further arguments of it."""

    drafter = "none"

    def __init__(self, target: str, prefix_caching: bool, args: dict[str, Any]) -> None:
        import vllm

        self._llm = vllm.LLM(
            model=target,
            dtype="bfloat16",
            max_model_len=_MAX_MODEL_LEN,
            enable_prefix_caching=prefix_caching,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=2**28,
            **_LIMITS,
            **args,
        )

    def run(self, prompts: Prompts, num_tokens: int, draft_tokens: int) -> list[list[int]]:
        """Continue all prompts at once, greedily, by exactly `num_tokens` each; drafts are as was
        said at the start."""
        return continued_by_vllm(self._llm, prompts, num_tokens)


class Penstock:
    """Penstock's engine over vLLM's workers. args: `drafters`, by name; one is asked for."""

    drafter = "none"

    def __init__(self, target: str, prefix_caching: bool, args: dict[str, Any]) -> None:
        from penstock.config import EngineConfig, VllmConfig
        from penstock.engine.build import load_engine

        config = EngineConfig(
            target=Path(target),
            dtype="bfloat16",
            max_model_len=_MAX_MODEL_LEN,
            kv_tokens=8192,
            prefix_caching=prefix_caching,
            vllm=VllmConfig(args=_LIMITS),
            **args,
        )
        self._engine = load_engine(config)
        gc.collect()
        gc.freeze()  # as the engine process does, and vLLM's

    def run(self, prompts: Prompts, num_tokens: int, draft_tokens: int) -> list[list[int]]:
        """The same, with drafts of `drafter`."""
        return continued_by_penstock(self._engine, prompts, num_tokens, self.drafter)


KINDS = {"vllm": Vllm, "penstock": Penstock}


def main() -> None:
    engine: Vllm | Penstock | None = None

    def answer(do: str, command: dict[str, Any]) -> dict[str, Any]:
        nonlocal engine
        if do == "load":
            engine = KINDS[command.pop("kind")](**command)
            return {}
        assert engine is not None
        engine.drafter = command.pop("drafter")
        return measure(engine, command)

    answer_commands(answer)


if __name__ == "__main__":
    main()
