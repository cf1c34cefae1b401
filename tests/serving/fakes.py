"""An engine without models: every request's output is its own prompt, over and over."""

import os
import signal
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.config import EngineConfig
from penstock.core.kv import BlockPool
from penstock.core.loop import Loop
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter
from penstock.core.types import (
    PhaseTimes,
    Request,
    StepPlan,
    StepResult,
    TokenLogprob,
    Verdict,
    VerifyItem,
)
from penstock.engine.ends import LazyTokenizer, OutputEnd
from penstock.engine.lanes import Wakeup
from penstock.engine.memory import MemoryNeed
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.messages import Ready
from penstock.serving.planning import EnginePlan

TOKENIZER = Path(__file__).parents[2] / "src/penstock/zoo/weights/target-large"
EOS = 2
VOCAB = 4096
FACTORY = "tests.serving.fakes:toy_engine"
SLOW_FACTORY = "tests.serving.fakes:slow_engine"
STEP_S = 0.001
SLOW_STEP_S = 0.02


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    """What the toy engine says to a prompt without stop tokens."""
    return [prompt[k % len(prompt)] for k in range(max_tokens)]


class Clock:
    def now(self) -> float:
        return time.perf_counter()


class EchoExecutor:
    """Carries out plans at a fixed price a step; some drafts are accepted, by position."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._requests: dict[str, Request] = {}
        self._ends: dict[str, OutputEnd] = {}
        self._queue: deque[StepPlan] = deque()
        self.remote = SimpleNamespace(connect=lambda sink: None)
        self.servers: dict[str, Any] = {}
        self.grammars = None
        self.tokenizer = LazyTokenizer(partial(load_tokenizer, TOKENIZER))
        # Plain, since what has PyTorch imported takes seconds to start.
        self.totals = SimpleNamespace(
            num_target_steps=0,
            phases=PhaseTimes(),
            drafter_seconds={},
            plan_s=0.0,
            steps_by_tokens=[0] * 14,
            num_step_tokens=0,
        )
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def wake(self) -> None:
        self._wakeup.give()

    def close(self) -> None:
        """Nothing computes elsewhere."""

    def take_broken(self) -> list[str]:
        return []

    def ready(self, lane: str) -> bool:
        return not self._queue

    def submit(self, plan: StepPlan) -> None:
        for request in plan.new_requests:
            self._requests[request.id] = request
            self._ends[request.id] = OutputEnd(request, self.tokenizer)
        for request_id in plan.forgotten:
            del self._requests[request_id], self._ends[request_id]
        if not plan.is_empty:
            self._queue.append(plan)

    def collect(self) -> list[StepResult]:
        self._wakeup.clear()
        results = []
        while self._queue:
            plan = self._queue.popleft()
            started_at = time.perf_counter()
            time.sleep(self._step_s)
            verdicts = tuple(self._verdict(item) for item in plan.items)
            results.append(
                StepResult(
                    plan_id=plan.id,
                    lane=plan.lane,
                    started_at=started_at,
                    finished_at=time.perf_counter(),
                    verdicts=verdicts,
                    phases=PhaseTimes(verify=self._step_s),
                    num_rows=plan.num_rows,
                )
            )
        return results

    def _verdict(self, item: VerifyItem) -> Verdict:
        request = self._requests[item.request_id]
        prompt = request.prompt_token_ids
        assert prompt is not None
        if not item.samples:
            embedding = array("f", [len(prompt), prompt[0], prompt[-1]]).tobytes()
            return Verdict(item.request_id, item.epoch, item.round, embedding=embedding)
        first = item.start + item.num_scheduled_tokens - request.prompt_len
        num_accepted = min(item.num_draft_tokens, first % 4)
        tokens = tuple(prompt[k % len(prompt)] for k in range(first, first + num_accepted + 1))
        num_logprobs = request.sampling.num_logprobs
        end = self._ends[item.request_id].follow(tokens)
        tokens = tokens if end is None else tokens[: end.num_tokens]
        num_proposed = item.num_draft_tokens
        if end is not None:
            num_proposed = min(num_proposed, len(tokens))
        num_accepted = min(num_accepted, num_proposed)
        return Verdict(
            item.request_id,
            item.epoch,
            item.round,
            token_ids=tokens,
            drafter=item.drafter if item.num_draft_tokens else None,
            num_proposed=num_proposed,
            num_accepted=num_accepted,
            num_decided=min(num_accepted + 1, num_proposed),
            evidence=float(num_accepted),
            logprobs=() if num_logprobs is None else self._logprobs(tokens, num_logprobs),
            prompt_logprobs=()
            if first or request.sampling.num_prompt_logprobs is None
            else self._logprobs(prompt[1:], request.sampling.num_prompt_logprobs),
            finish_reason=None if end is None else end.reason,
            num_stop_chars=0 if end is None else end.num_stop_chars,
        )

    def _logprobs(self, tokens: tuple[int, ...], num: int) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(-0.25, tuple(((t + i) % VOCAB, -0.25 - i) for i in range(num)))
            for t in tokens
        )


@dataclass(frozen=True)
class ToyEngine:
    loop: Loop
    scheduler: Scheduler
    executor: EchoExecutor
    clock: Clock
    auditor: Any = field(default_factory=lambda: SimpleNamespace(findings=list))
    tokenizer_path: Path = TOKENIZER
    max_model_len: int = 512
    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = (EOS,)
    scores_prompts: bool = True
    pooling: str = "last"
    generates: bool = True
    num_slots: None = None
    state_bytes: int = 0
    state: None = None

    def describe(self) -> dict[str, Any]:
        return {
            "target": "toy",
            "drafters": ["toy-drafter"],
            "dtype": "none",
            "backend": "echo",
            "instruction_set": None,
            "num_threads": 1,
            "kv_tokens": self.scheduler.pool.capacity_tokens,
            "kv_bytes": 0,
            "kv_dtype": "float32",
            "max_model_len": 512,
        }


def build(config: EngineConfig, step_s: float) -> ToyEngine:
    clock = Clock()
    pool = BlockPool(-(-(config.kv_tokens or 65536) // 16), 16)
    drafters = [Drafter("toy-drafter", BlockPool(8192, 16))]
    scheduler = Scheduler(
        pool,
        drafters,
        admission=config.admission.make("admission"),
        selection=config.selection.make("selection"),
        allocation=config.allocation.make("allocation"),
        max_model_len=512,
    )
    executor = EchoExecutor(step_s)
    return ToyEngine(Loop(scheduler, executor, clock), scheduler, executor, clock)


def toy_engine(config: EngineConfig) -> ToyEngine:
    return build(config, STEP_S)


def slow_engine(config: EngineConfig) -> ToyEngine:
    return build(config, SLOW_STEP_S)


def toy_plan(config: EngineConfig, num_engines: int) -> EnginePlan:
    """Says that an engine takes `kv_tokens` bytes."""
    need = MemoryNeed(0, config.kv_tokens or 1000, free=0)
    ready = Ready(
        TOKENIZER,
        512,
        VOCAB,
        frozenset({EOS}),
        ("toy-drafter",),
        {"kv_tokens": 65536},
        pooling="last",
    )
    return EnginePlan(config, need, ready)


def refused_engine(config: EngineConfig) -> ToyEngine:
    raise ValueError(f"{config.target}: not a checkpoint,\nreally")


def killed_engine(config: EngineConfig) -> ToyEngine:
    """Killed while it is loaded, as a system does that is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def buggy_engine(config: EngineConfig) -> ToyEngine:
    raise RuntimeError("out of luck")


def fragile_engine(config: EngineConfig) -> ToyEngine:
    """Can be loaded until there is a file called `broken` in the target's folder."""
    if (config.target / "broken").exists():
        raise ValueError("the checkpoint is broken")
    return build(config, SLOW_STEP_S)
