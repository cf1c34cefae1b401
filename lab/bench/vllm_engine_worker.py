"""A process that continues prompts on vLLM's engine, for `lab.bench.vllm_engine`: a JSON line in,
a JSON line out. Runs where vLLM is installed."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.bench.workers import answer_commands

Prompts = Sequence[Sequence[int]]

_MAX_MODEL_LEN = 1024
_LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
"""Of `vllm serve` on a CPU (0.32, `engine/arg_utils.py`)."""

_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Vllm:
    """vLLM's own engine. args: further arguments of it."""

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

    def run(self, prompts: Prompts, new_tokens: int, drafter: str) -> list[list[int]]:
        """Continue all prompts at once, greedily, by exactly `new_tokens` each; drafts are as was
        said at the start."""
        import vllm

        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        done = self._llm.generate(asked, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]


class Penstock:
    """Penstock's engine over vLLM's workers. args: `drafters`, by name; one is asked for."""

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
        self._ids = (f"request-{i}" for i in itertools.count())
        gc.collect()
        gc.freeze()  # as the engine process does, and vLLM's

    def run(self, prompts: Prompts, new_tokens: int, drafter: str) -> list[list[int]]:
        """The same, with drafts of `drafter`. Raises: RuntimeError."""
        from penstock.core.types import Request, SamplingParams
        from penstock.serving.offline import complete

        requests = [
            Request(
                id=next(self._ids),
                prompt_len=len(prompt),
                prompt_token_ids=tuple(prompt),
                max_tokens=new_tokens,
                sampling=SamplingParams(temperature=0.0),
                drafter=drafter,
            )
            for prompt in prompts
        ]
        done = complete(self._engine.loop, requests, len(requests))
        if error := next((one.error for one in done if one.error), None):
            raise RuntimeError(error)
        return [one.token_ids for one in done]


KINDS = {"vllm": Vllm, "penstock": Penstock}


def children_cpu_s(pid: int) -> float:
    """CPU seconds of all living descendants of a process."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) * _TICK + children_cpu_s(int(child))
            except FileNotFoundError:
                continue
    return total


def own_cpu_s() -> float:
    """CPU seconds of this process, all threads, and of its descendants."""
    return time.process_time() + children_cpu_s(os.getpid())


def machine_cpu_s() -> float:
    """CPU seconds that the whole machine has spent, with those stolen by its host."""
    fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) * _TICK


def measure(
    engine: Vllm | Penstock, calls: Sequence[Prompts], new_tokens: int, drafter: str
) -> dict[str, Any]:
    """Run every call, a batch; its whole time counts: prefill, drafts and the making of the answer.
    Times are sums over the calls. Raises: RuntimeError."""
    token_ids: list[list[int]] = []
    machine, cpu, wall = machine_cpu_s(), own_cpu_s(), time.perf_counter()
    for prompts in calls:
        token_ids += engine.run(prompts, new_tokens, drafter)
    wall, cpu = time.perf_counter() - wall, own_cpu_s() - cpu
    other = max(0.0, machine_cpu_s() - machine - cpu)
    short = [len(ids) for ids in token_ids if len(ids) != new_tokens]
    if short:
        raise RuntimeError(f"{len(short)} answers are not {new_tokens} tokens: {short}")
    return {"wall_s": wall, "cpu_s": cpu, "other_s": other, "token_ids": token_ids}


def main() -> None:
    engine: Vllm | Penstock | None = None

    def answer(do: str, command: dict[str, Any]) -> dict[str, Any]:
        nonlocal engine
        if do == "load":
            engine = KINDS[command.pop("kind")](**command)
            return {}
        assert engine is not None
        return measure(engine, **command)

    answer_commands(answer)


if __name__ == "__main__":
    main()
