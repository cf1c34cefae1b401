"""transformers: `generate` on left-padded batches, and assisted generation for single prompts."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig
from worker import Prompts, WorkerLoad, serve

PAD = 0


class Transformers:
    """settings: dtype; compiled (with a static cache, which that needs)."""

    def load(self, what: WorkerLoad) -> dict[str, Any]:
        warnings.filterwarnings("ignore")
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(2)
        self.dtype = getattr(torch, what.settings["dtype"])
        self.compiled = what.settings["compiled"]
        self.model = self._model(what.target)
        self.ngram = what.is_ngram
        self.drafter = None if what.drafter is None or self.ngram else self._model(what.drafter)
        return {"version": f"{transformers.__version__}, torch {torch.__version__}"}

    def _model(self, path: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
        return model

    def run(self, prompts: Prompts, new_tokens: int, draft_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        how: dict[str, Any] = {}
        if draft_tokens and self.ngram:
            how["prompt_lookup_num_tokens"] = draft_tokens
        elif draft_tokens:
            config = self.drafter.generation_config
            config.num_assistant_tokens = draft_tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            how["assistant_model"] = self.drafter
        elif self.compiled:
            how["cache_implementation"] = "static"
            # Without the private flag it compiles on accelerators only.
            how["compile_config"] = CompileConfig(mode="default", fullgraph=False)
            how["compile_config"]._compile_all_devices = True
        with torch.inference_mode():
            made = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                **how,
            )
        return made[:, longest:].tolist()


if __name__ == "__main__":
    serve(Transformers())
