"""A process that serves stretches of requests, for `lab.bench.vllm_arrivals` and
`lab.bench.vllm_prediction`: a JSON line in, a JSON line out. Runs where vLLM is installed."""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.workers import answer_commands
from lab.common.step_recorder import StepRecorder
from penstock.core.learn.times import step_work
from penstock.core.types import TARGET, StepPlan, VerifyItem
from penstock.fluid.step_profile import StepWork

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}

_DEFAULT = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
"""Of `vllm serve` on a CPU (0.32, `engine/arg_utils.py`)."""

_LONGEST_NAP_S = 0.01


class Server(ABC):
    """Serves requests that arrive by the clock."""

    def serve(self, requests: list[tuple[float, int, int]], seed: int) -> dict[str, Any]:
        """requests: (arrival in seconds, prompt tokens, tokens to make). Returns each one's seconds
        to the first token and to the last, the seconds in which requests were added, and the steps:
        the fields of `StepWork`, and seconds since the turn before has ended, or since the arrival
        that an idle server waited for."""
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(8, self.vocab_size, n).tolist() for _, n, _ in requests]
        first, last = [0.0] * len(requests), [0.0] * len(requests)
        coming, num_left, adding = deque(enumerate(requests)), len(requests), 0.0
        seconds: list[float] = []
        begin, ended = time.monotonic(), 0.0
        while num_left:
            now = time.monotonic() - begin
            while coming and coming[0][1][0] <= now:
                i, (_, _, num_tokens) = coming.popleft()
                self.add(i, prompts[i], num_tokens)
            adding += time.monotonic() - begin - now
            if num_left == len(coming):
                ended = coming[0][1][0]
                time.sleep(min(_LONGEST_NAP_S, ended - now))
                continue
            made = self.step()
            now = time.monotonic() - begin
            if len(self.noted) > len(seconds):
                seconds.append(now - ended)
            ended = now
            for i, num_tokens in made.items():
                arrival, _, most = requests[i]
                first[i] = first[i] or now - arrival
                if num_tokens == most:
                    last[i] = now - arrival
                    num_left -= 1
        took = time.monotonic() - begin
        found = {"ttft": first, "latency": last, "seconds": took, "adding": adding}
        noted = zip(self.noted, seconds, strict=True)
        return found | {"steps": [(*self.work(step), round(s, 6)) for step, s in noted]}

    vocab_size: int
    noted: list[Any]
    """Of the steps since `prepare`, what `work` needs."""

    @abstractmethod
    def prepare(self, settings: dict[str, Any]) -> None:
        """Another scheduler."""

    @abstractmethod
    def add(self, i: int, prompt: list[int], num_tokens: int) -> None:
        """A request arrives."""

    @abstractmethod
    def step(self) -> dict[int, int]:
        """Tokens so far of those that got any."""

    @abstractmethod
    def work(self, noted: Any) -> StepWork:
        """What a step computed."""


class VllmServer(Server):
    """vLLM's own engine."""

    def __init__(self, target: Path, kv_tokens: int, block_size: int) -> None:
        import vllm

        self._vllm = vllm
        llm = vllm.LLM(
            model=str(target),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            block_size=block_size,
            num_gpu_blocks_override=kv_tokens // block_size + 1,
            kv_cache_memory_bytes=2**30,
            enable_prefix_caching=False,
            max_model_len=2048,
            **_DEFAULT,
        )
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self.vocab_size = self._engine.model_config.get_vocab_size()

    def prepare(self, settings: dict[str, Any]) -> None:
        """settings: vLLM's limits, if not its defaults."""
        from vllm.v1.core.sched.scheduler import Scheduler

        core, old = self._core, self._core.scheduler
        config = core.vllm_config
        for name, default in _DEFAULT.items():
            setattr(config.scheduler_config, name, settings.get(name, default))
        core.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=old.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            block_size=old.block_size,
        )
        self.noted = []
        schedule = core.scheduler.schedule
        core.scheduler.schedule = lambda *args: self._noted(schedule(*args))

    def _noted(self, output: Any) -> Any:
        requests, scheduled = self._core.scheduler.requests, output.num_scheduled_tokens
        if scheduled:
            # Start and number of each request's tokens, which count as computed by then.
            starts = ((requests[i].num_computed_tokens - n, n) for i, n in scheduled.items())
            self.noted.append(tuple(starts))
        return output

    def work(self, noted: tuple[tuple[int, int], ...]) -> StepWork:
        items = tuple(VerifyItem("", 0, 0, start, num, samples=True) for start, num in noted)
        return step_work(StepPlan(0, TARGET, 0.0, items))

    def add(self, i: int, prompt: list[int], num_tokens: int) -> None:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[int, int]:
        made = self._engine.step()
        return {int(m.request_id): len(m.outputs[0].token_ids) for m in made}


class PenstockServer(Server):
    """Penstock's scheduler over vLLM's workers."""

    def __init__(self, target: Path, kv_tokens: int, block_size: int) -> None:
        from penstock.config import EngineConfig, PolicyConfig, VllmConfig
        from penstock.engine.build import load_engine

        config = EngineConfig(
            target=target,
            dtype="bfloat16",
            kv_tokens=kv_tokens,
            block_size=block_size,
            prefix_caching=False,
            max_model_len=2048,
            vllm=VllmConfig(),
            admission=PolicyConfig.from_name("fluid_guided"),
        )
        self._engine = load_engine(config)
        gc.collect()
        gc.freeze()  # as the engine process does, and vLLM's
        self.vocab_size = self._engine.vocab_size
        self._loop = self._engine.loop
        self._measured = self._engine.scheduler.learn.times.profile
        self._events: list[Any] = []
        self._made: dict[int, int] = {}

    def prepare(self, settings: dict[str, Any]) -> None:
        from penstock.core.kv import BlockPool
        from penstock.core.learn import Estimators
        from penstock.core.loop import Loop
        from penstock.core.policies.registry import make_policy
        from penstock.core.scheduler import Scheduler

        self._loop.turn(())  # so that the workers are told of the last ends
        old, learn = self._engine.scheduler, Estimators(self._measured)
        learn.times.target.learns_profile = True
        scheduler = Scheduler(
            BlockPool(old.pool.num_blocks, old.pool.block_size, prefix_caching=False),
            [],
            admission=make_policy("admission", "fluid_guided", settings),
            selection=make_policy("selection", "single"),
            allocation=make_policy("allocation", "fixed"),
            max_model_len=self._engine.max_model_len,
            learn=learn,
            groups_decodes=True,
        )
        recorder = StepRecorder(self._engine.clock)
        self.noted = recorder.steps
        self._loop = Loop(scheduler, self._engine.executor, self._engine.clock, (recorder,))
        self._made = {}

    def add(self, i: int, prompt: list[int], num_tokens: int) -> None:
        from penstock.core.types import Arrive, Request, SamplingParams

        request = Request(
            str(i),
            len(prompt),
            num_tokens,
            self._engine.clock.now(),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
        )
        self._events.append(Arrive(request))
        self._made[i] = 0

    def step(self) -> dict[int, int]:
        events, self._events = self._events, []
        turn, got = self._loop.turn(events), {}
        for output in turn.outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            i = int(output.request_id)
            self._made[i] += len(output.token_ids)
            got[i] = self._made[i]
        return got

    def work(self, noted: tuple[StepWork, float]) -> StepWork:
        return noted[0]


def main() -> None:
    server: Server | None = None

    def answer(do: str, command: dict[str, Any]) -> dict[str, Any]:
        nonlocal server
        if do == "load":
            kind = {"vllm": VllmServer, "penstock": PenstockServer}[command.pop("kind")]
            server = kind(Path(command.pop("target")), **command)
            return {}
        assert server is not None
        server.prepare(command["settings"])
        return server.serve(command["requests"], command["seed"])

    answer_commands(answer)


if __name__ == "__main__":
    main()
