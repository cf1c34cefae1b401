"""vLLM's CPU build, its engine core in this process."""

from __future__ import annotations

from typing import Any

import vllm
from vllm import LLM
from worker import Prompts, WorkerLoad, continued_by_vllm, serve


class Vllm:
    """settings: dtype; eager (without torch.compile)."""

    def load(self, what: WorkerLoad) -> dict[str, Any]:
        speculation: dict[str, Any] | None = None
        if what.is_ngram:
            speculation = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        elif what.drafter is not None:
            speculation = {"method": "draft_model", "model": what.drafter}
        if speculation is not None:
            speculation["num_speculative_tokens"] = what.draft_tokens
        self.llm = LLM(
            model=what.target,
            dtype=what.settings["dtype"],
            enforce_eager=what.settings["eager"],
            max_model_len=1024,
            max_num_seqs=what.batch,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            speculative_config=speculation,
        )
        return {"version": vllm.__version__}

    def run(self, prompts: Prompts, new_tokens: int, draft_tokens: int) -> list[list[int]]:
        return continued_by_vllm(self.llm, prompts, new_tokens)


if __name__ == "__main__":
    serve(Vllm())
