"""OpenVINO GenAI: its continuous-batching pipeline, with a draft model or prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from gguf_file import cached, readable
from worker import Prompts, WorkerLoad, serve

READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""Formats that its reader of GGUF files knows."""


class OpenVino:
    """settings: precision (of arithmetic), kv (precision of the cache), both as hints."""

    def load(self, what: WorkerLoad) -> dict[str, Any]:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = what.settings["batched_tokens"]
        scheduler.max_num_seqs = what.batch
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = what.settings["split_fuse"]
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": what.settings["precision"],
            "KV_CACHE_PRECISION": what.settings["kv"],
            "INFERENCE_NUM_THREADS": 2,
            "PERFORMANCE_HINT": "LATENCY",
        }
        self.ngram = what.is_ngram
        if self.ngram:
            properties["prompt_lookup"] = True
        elif what.drafter is not None:
            properties["draft_model"] = openvino_genai.draft_model(
                self._converted(what.drafter, what.work), "CPU", **properties
            )
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            self._converted(what.target, what.work), scheduler, "CPU", properties
        )
        return {"version": openvino_genai.get_version()}

    def _converted(self, checkpoint: str, work: str) -> str:
        """The checkpoint as OpenVINO's own files, made from GGUF by its own reader: of a quantised
        file, weights of int8 or int4 in the same groups."""
        path, folder = Path(checkpoint), Path(work)
        is_gguf = path.suffix == ".gguf"
        file = readable(path, READABLE, folder) if is_gguf else cached(path, "f16", folder)
        if not (file.parent / "openvino_tokenizer.xml").exists():
            openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
        return str(file.parent)

    def run(self, prompts: Prompts, new_tokens: int, draft_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        if draft_tokens:
            config.num_assistant_tokens = draft_tokens
        if self.ngram:
            config.max_ngram_size = 3
        tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self.pipeline.generate(tensors, [config] * len(tensors))
        return [list(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    serve(OpenVino())
