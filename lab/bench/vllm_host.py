"""What does a step cost the host: in vLLM's own scheduler, and in the engine?

    python -m lab.bench.vllm_host [--batches 1,32,256]

Needs a Python that has vLLM. No model is computed: workers answer at once, which is not counted.
All requests decode on, with prefix caches; blocks fill evenly. CPU time of the thread, medians of a
pass's steps; the least of the passes, which alternate: other programs only add to it.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch
from vllm import SamplingParams as VllmSampling
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.structured_output import StructuredOutputManager

from lab.bench.vllm_arrivals import write_model
from lab.common.results import Results, parser, table, tell
from penstock.config import EngineConfig
from penstock.core.kv import BlockPool
from penstock.core.loop import Loop
from penstock.core.scheduler import Scheduler
from penstock.core.types import Arrive, Request, SamplingParams
from penstock.engine.build import MonotonicClock
from penstock.engine.verifier import Decided
from penstock.engine.vllm.executor import VllmExecutor
from penstock.engine.vllm.target import VllmTarget

PROMPT, WARM, STEPS = 64, 24, 160
"""Tokens of a prompt, and steps before and within the measurement: a multiple of a block's 16."""
LONGEST = 1024
Step = Callable[[], tuple[float, float]]
"""Takes a step; returns the seconds of planning it and of taking it in."""


def vllm_alone(folder: Path, batch: int) -> Step:
    args = {"max_num_seqs": 256, "max_num_batched_tokens": 16_384, "async_scheduling": False}
    config = EngineArgs(
        model=str(write_model(folder)), max_model_len=LONGEST, skip_tokenizer_init=True, **args
    ).create_engine_config()
    num_blocks = config.cache_config.num_gpu_blocks = 256 * LONGEST // 16
    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    scheduler = VllmScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(16, hash_fn)
    sampling = VllmSampling(temperature=0.0, max_tokens=LONGEST - PROMPT - 16, stop_token_ids=[2])
    for i in range(batch):
        prompt = [i + 3] * (PROMPT + i % 16)
        scheduler.add_request(VllmRequest(f"r{i}", prompt, sampling, None, block_hasher=hasher))

    def step() -> tuple[float, float]:
        started_at = time.thread_time()
        output = scheduler.schedule()
        planned_at = time.thread_time()
        ids = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(ids, {r: n for n, r in enumerate(ids)}, [[5] for _ in ids])
        answered_at = time.thread_time()
        scheduler.update_from_output(output, made)
        return planned_at - started_at, time.thread_time() - answered_at

    return step


class Pretending:
    """Stands for vLLM's executor. asked_at, answered_at: when a step came and its answer went."""

    asked_at = answered_at = 0.0

    def execute_model(self, output: Any) -> None:
        self.asked_at = time.thread_time()
        self._output = output

    def sample_tokens(self, grammar: None) -> tuple[list[Decided], list[int]]:
        decided = [Decided([5], 0, 0) for _ in self._output.asked]
        tokens = [5] * (len(self._output.num_scheduled_tokens) - len(decided))
        self.answered_at = time.thread_time()
        return decided, tokens


def engine(batch: int) -> Step:
    target = VllmTarget.__new__(VllmTarget)
    target._executor = workers = Pretending()
    target._sampling = VllmSampling(temperature=0.0)
    target.max_num_rows, target.max_num_seqs = 16_384, 256
    config = EngineConfig(target=Path())
    clock = MonotonicClock()
    scheduler = Scheduler(
        BlockPool(256 * LONGEST // 16, 16),
        [],
        admission=config.admission.make("admission"),
        selection=config.selection.make("selection"),
        allocation=config.allocation.make("allocation"),
        max_model_len=LONGEST,
        groups_decodes=True,
    )
    loop = Loop(scheduler, VllmExecutor(target, [], clock, LONGEST), clock)
    sampling, stops = SamplingParams(temperature=0.0), frozenset([2])
    length = LONGEST - PROMPT - 16
    loop.turn(
        Arrive(
            Request(
                f"r{i}",
                PROMPT + i % 16,
                length,
                prompt_token_ids=(i + 3,) * (PROMPT + i % 16),
                stop_token_ids=stops,
                sampling=sampling,
            )
        )
        for i in range(batch)
    )

    def step() -> tuple[float, float]:
        started_at = time.thread_time()
        loop.turn(())
        return workers.asked_at - started_at, time.thread_time() - workers.answered_at

    return step


def measure(step: Step) -> tuple[float, float]:
    """Medians in milliseconds."""
    for _ in range(WARM):
        step()
    gc.collect()
    gc.freeze()  # as the engine process does
    plan, take_in = zip(*[step() for _ in range(STEPS)], strict=True)
    gc.unfreeze()
    return 1e3 * median(plan), 1e3 * median(take_in)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--batches", default="1,32,256")
    options.add_argument("--passes", type=int, default=5)
    args = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        ways: dict[str, Callable[[int], Step]] = {
            "vLLM alone": lambda batch: vllm_alone(Path(name), batch),
            "engine": engine,
        }
        for batch in map(int, args.batches.split(",")):
            passes = [{w: measure(m(batch)) for w, m in ways.items()} for _ in range(args.passes)]
            for way in ways:
                plan, take_in = min((found[way] for found in passes), key=sum)
                both = plan + take_in
                rows.append(dict(way=way, batch=batch, plan=plan, take_in=take_in, both=both))
    columns = {"way": "{way}", "requests": "{batch}", "plan": "{plan:.3f}"}
    columns |= {"take in": "{take_in:.3f}", "both": "{both:.3f}"}
    return tell(
        args, Results(rows, tables=[table("a decoding step on the host, ms", rows, columns)])
    )


if __name__ == "__main__":
    sys.exit(main())
