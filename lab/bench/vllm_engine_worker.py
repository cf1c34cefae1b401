"""A process that continues prompts on vLLM's engine, for `lab.bench.vllm_engine`: a JSON line in,
a JSON line out. Runs where vLLM is installed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.bench.peers.workers.worker import answer_commands, measure

Prompts = Sequence[Sequence[int]]

_MAX_MODEL_LEN = 1024
_LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
"""Of `vllm serve` on a CPU (0.32, `engine/arg_utils.py`)."""


class Vllm:
    """vLLM's own engine. args: further arguments of it."""

    drafter = "none"

    def __init__(self, target: str, prefix_caching: bool, args: dict[str, Any]) -> None:
        import vllm

        self._sampling = vllm.SamplingParams
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
        params = self._sampling(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        done = self._llm.generate(asked, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]


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
        self._ids = map(str, itertools.count())

    def run(self, prompts: Prompts, num_tokens: int, draft_tokens: int) -> list[list[int]]:
        """The same, with drafts of `drafter`."""
        from penstock.core.types import Request, SamplingParams
        from penstock.serving.offline import complete

        requests = [
            Request(
                id=next(self._ids),
                prompt_len=len(prompt),
                prompt_token_ids=tuple(prompt),
                max_tokens=num_tokens,
                sampling=SamplingParams(temperature=0.0),
                drafter=self.drafter,
            )
            for prompt in prompts
        ]
        done = complete(self._engine.loop, requests, len(requests))
        for one in done:
            if one.error is not None:
                raise RuntimeError(one.error)
        return [one.token_ids for one in done]


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
