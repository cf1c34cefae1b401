"""`LLM.generate` with the plug-in and without, on a real model, in a process of its own.

python -m tests.engine.vllm_target.plugin_scenes TARGET NUM_REQUESTS [--drafts]
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import vllm
from tests.engine.test_exactness import SAMPLINGS, make_requests
from vllm.v1.core.sched.scheduler import Scheduler

from penstock.engine.vllm import make_scheduler
from penstock.engine.vllm.plugin import GuidedScheduler

BLOCK_SIZE = 32
TIGHT = 11
"""Blocks, the null block among them: for a few of the requests."""

FLUID = {"name": "fluid_guided"}
CHUNKS = {"max_num_batched_tokens": 24}
NUM_DRAFT_TOKENS = 4
NUM_TOKENS = 64


class Forgetful(GuidedScheduler):
    """The control: who is preempted is taken to have kept its KV."""

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        computed = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)
        request.num_computed_tokens = computed


class Model:
    """One model of vLLM's, that is given another scheduler for each scene."""

    def __init__(self, target: Path, num: int, *, drafts: bool) -> None:
        spec = {
            "method": "ngram",
            "num_speculative_tokens": NUM_DRAFT_TOKENS,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
        self._llm = vllm.LLM(
            model=str(target),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=2**28,
            block_size=BLOCK_SIZE,
            speculative_config=spec if drafts else None,
            scheduler_cls="penstock.engine.vllm.make_scheduler",
            additional_config={"penstock": {"admission": FLUID}},
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._caches = self._core.scheduler.kv_cache_config
        self._num = num
        self.outputs: dict[str, list[list[int]]] = {}
        self.facts: dict[str, dict[str, int]] = {}

    def play(
        self,
        name: str,
        settings: dict[str, Any] | None = None,
        *,
        kind: Any = make_scheduler,
        num_blocks: int | None = None,
        prefix_caching: bool = False,
        warm_up: bool = False,
        extra_args: dict[str, Any] | None = None,
    ) -> None:
        """warm_up: many requests of one token come first, so that outputs seem to be short."""
        self.install(settings, kind, num_blocks, prefix_caching=prefix_caching)
        if warm_up:
            self._generate(64, 1, None)
        requests, self.outputs[name] = self._generate(self._num, None, extra_args)
        self.facts[name] = {
            "preemptions": sum(r.num_preemptions for r in requests),
            "longest_draft": self._longest_draft,
        }

    def install(
        self, settings: Any, kind: Any, num_blocks: int | None, *, prefix_caching: bool
    ) -> None:
        core, caches = self._core, self._caches
        core.vllm_config.cache_config.enable_prefix_caching = prefix_caching
        core.vllm_config.additional_config = {"penstock": settings or {}}
        if num_blocks is not None:
            caches = dataclasses.replace(caches, num_blocks=num_blocks)
        core.scheduler = kind(
            vllm_config=core.vllm_config,
            kv_cache_config=caches,
            structured_output_manager=core.structured_output_manager,
            block_size=BLOCK_SIZE,
        )

    def _generate(
        self, num: int, max_tokens: int | None, extra_args: dict[str, Any] | None
    ) -> tuple[list[Any], list[list[int]]]:
        seen: dict[str, Any] = {}
        scheduler, self._longest_draft = self._core.scheduler, 0
        really = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = really(*args, **kwargs)
            seen.update(scheduler.requests)
            drafts = map(len, output.scheduled_spec_decode_tokens.values())
            self._longest_draft = max(self._longest_draft, *drafts, 0)
            return output

        scheduler.schedule = watched
        requests = make_requests(SAMPLINGS["greedy"], num, "none", NUM_TOKENS)
        made = self._llm.generate(
            [{"prompt_token_ids": list(r.prompt_token_ids or ())} for r in requests],
            [
                vllm.SamplingParams(
                    temperature=0.0,
                    max_tokens=max_tokens or r.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=extra_args,
                )
                for r in requests
            ],
            use_tqdm=False,
        )
        return list(seen.values()), [list(m.outputs[0].token_ids) for m in made]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("num", type=int)
    parser.add_argument("--drafts", action="store_true")
    arguments = parser.parse_args()
    model = Model(arguments.target, arguments.num, drafts=arguments.drafts)
    fluid = {"admission": FLUID}
    chunks = {"admission": {**FLUID, "options": CHUNKS}}
    model.play("fluid_guided", fluid)
    model.play("default")
    model.play("chunks", chunks)
    model.play("default, preemption", num_blocks=TIGHT)
    model.play("fluid_guided, preemption", fluid, num_blocks=TIGHT, warm_up=True)
    model.play("prefixes", fluid, prefix_caching=True, warm_up=True)
    if arguments.drafts:
        model.play("short drafts", fluid, extra_args={"penstock_max_draft_tokens": 2})
        model.play("priced", {"allocation": {"name": "priced"}})
    else:
        model.play("stock", kind=Scheduler)
        model.play("control", kind=Forgetful, num_blocks=TIGHT)
    print(json.dumps({"outputs": model.outputs, "facts": model.facts}))


if __name__ == "__main__":
    main()
