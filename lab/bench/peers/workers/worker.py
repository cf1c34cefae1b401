"""What every worker shares: JSON lines on standard input and output, and the measuring of time.

A worker is a script that runs by the Python of its own environment, knows one `WorkerEngine`, and
answers

    {"do": "load", ...}  the fields of `WorkerLoad`         -> {"facts": {...}}
    {"do": "run", "calls": [[prompt, ...], ...], "new_tokens": n, "draft_tokens": k}
                                                      -> {"wall_s", "cpu_s", "other_s", "token_ids"}

A failed command is answered by {"error": "..."}. Every call of "calls" is one batch, and its whole
time counts: prefill, drafts and the making of the answer.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]
NGRAM = "ngram"
_PR_SET_PDEATHSIG = 1
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_ids = (f"request-{i}" for i in itertools.count())


@dataclass(frozen=True)
class WorkerLoad:
    """What an engine is to make ready for.

    target, drafter: checkpoint folders or GGUF files; the drafter `NGRAM` is look-up in the
    request's text. chained: look-up first, and the drafter where it finds nothing.
    draft_tokens: draft length, 0 without a drafter, for engines that must know it so early. batch:
    most prompts of a call. work: folder for files converted from the checkpoints. settings: the
    engine's own.
    """

    target: str
    drafter: str | None
    draft_tokens: int
    batch: int
    work: str
    settings: dict[str, Any]
    chained: bool = False

    @property
    def is_ngram(self) -> bool:
        return self.drafter == NGRAM


class WorkerEngine(Protocol):
    """One program with one target and at most one drafter in memory."""

    def load(self, what: WorkerLoad) -> dict[str, Any]:
        """Make ready for calls; returns facts for the report."""
        ...

    def run(self, prompts: Prompts, new_tokens: int, draft_tokens: int) -> list[list[int]]:
        """Continue all prompts at once, greedily, by exactly `new_tokens` each.

        draft_tokens: draft length; 0 is target-only."""
        ...


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


def measure(engine: WorkerEngine, command: dict[str, Any]) -> dict[str, Any]:
    """Run every call; times are sums over the calls."""
    token_ids: list[list[int]] = []
    machine, cpu, wall = machine_cpu_s(), own_cpu_s(), time.perf_counter()
    for prompts in command["calls"]:
        token_ids += engine.run(prompts, command["new_tokens"], command["draft_tokens"])
    wall, cpu = time.perf_counter() - wall, own_cpu_s() - cpu
    other = max(0.0, machine_cpu_s() - machine - cpu)
    short = [len(ids) for ids in token_ids if len(ids) != command["new_tokens"]]
    if short:
        raise RuntimeError(f"{len(short)} answers are not {command['new_tokens']} tokens: {short}")
    return {"wall_s": wall, "cpu_s": cpu, "other_s": other, "token_ids": token_ids}


def continued_by_penstock(
    engine: Any, prompts: Prompts, new_tokens: int, drafter: str
) -> list[list[int]]:
    """`WorkerEngine.run` of Penstock's engine. Raises: RuntimeError."""
    from penstock.core.types import Request, SamplingParams
    from penstock.serving.offline import complete

    requests = [
        Request(
            id=next(_ids),
            prompt_len=len(prompt),
            prompt_token_ids=tuple(prompt),
            max_tokens=new_tokens,
            sampling=SamplingParams(temperature=0.0),
            drafter=drafter,
        )
        for prompt in prompts
    ]
    done = complete(engine.loop, requests, len(requests))
    if error := next((one.error for one in done if one.error), None):
        raise RuntimeError(error)
    return [one.token_ids for one in done]


def continued_by_vllm(llm: Any, prompts: Prompts, new_tokens: int) -> list[list[int]]:
    """`WorkerEngine.run` of vLLM's `LLM`."""
    import vllm

    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    done = llm.generate(asked, params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done]


def answer_commands(answer: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """A JSON line out for each JSON line in, until the end of standard input. answer: of
    what a command wants done, and its other fields; raises any Exception, which is told."""
    # A worker stands still between commands, so it would not notice that its master is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print to standard output; only answers may appear there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            told = answer(do, command)
        except Exception as error:
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(told) + "\n")
        answers.flush()
    # Some libraries hang or crash in their destructors, when everything is measured already.
    os._exit(0)


def serve(engine: WorkerEngine) -> None:
    """Answer what a master asks of an engine."""

    def answer(do: str, command: dict[str, Any]) -> dict[str, Any]:
        if do == "load":
            return {"facts": engine.load(WorkerLoad(**command))}
        return measure(engine, command)

    answer_commands(answer)
