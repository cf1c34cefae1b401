"""Timed passes, which of them count, and how the engines take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.bench.peers.workers_pool import Pool, Worker, WorkerError, WorkerSetup

NEW_TOKENS = 64
MIN_SHARE = 1.85
QUIET = 0.1
"""CPU seconds per second of all other programs, up to which a low share is an engine's own."""
MIN_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass computes. requests: at least; tokens: new ones of each."""

    requests: int
    tokens: int


FULL, SHORT = Work(MIN_REQUESTS, NEW_TOKENS), Work(4, 32)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all calls of a cell.

    share: CPU time over wall time. other: the same of all other programs on the machine.
    """

    tokens_per_s: float
    share: float
    other: float

    @property
    def is_clean(self) -> bool:
        return self.share >= MIN_SHARE

    @property
    def is_idle_by_itself(self) -> bool:
        """Too little CPU time, and nobody else took it."""
        return not self.is_clean and self.other <= QUIET


def is_finished(passes: Sequence[Pass], wanted: int) -> bool:
    """Whether `passes` are enough: `wanted` clean ones, or none clean and `wanted` in which the
    engine left the cores idle by itself, or twice as many as wanted of whatever kind."""
    clean = sum(p.is_clean for p in passes)
    idle = sum(p.is_idle_by_itself for p in passes)
    return clean >= wanted or (not clean and idle >= wanted) or len(passes) >= 2 * wanted


def kept(passes: Sequence[Pass], wanted: int) -> tuple[list[Pass], str]:
    """The passes that count, and what must be said about them; "" if they are clean.

    Passes under `MIN_SHARE` are thrown out. Where too few are left, those come back in which no
    other program was to blame, and only where there is none of these either, the disturbed ones.
    """
    clean = [p for p in passes if p.is_clean]
    if len(clean) >= wanted:
        return clean, ""
    undisturbed = [p for p in passes if p.is_clean or p.is_idle_by_itself]
    if len(undisturbed) >= wanted:
        return undisturbed, "leaves cores idle"
    if undisturbed:
        return undisturbed, "too few undisturbed passes"
    return list(passes), "disturbed"


@dataclass
class PeerCell:
    """One setup at one batch size, and what came of it. `mode`: target or speculative.

    trial: tokens per second when settings were tried; 0 if they were not.
    """

    setup: WorkerSetup
    batch: int
    trial: float = 0.0
    passes: list[Pass] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def mode(self) -> str:
        return "speculative" if self.setup.draft_tokens else "target"

    @property
    def is_ours(self) -> bool:
        return self.setup.engine.name == "penstock"

    @property
    def best(self) -> float:
        return max((p.tokens_per_s for p in self.passes), default=self.trial)

    def warm_up(self, worker: Worker) -> None:
        """A pass that does not count; of a large model, whose kernels know no shapes, one request.
        Raises: WorkerError."""
        if self.setup.model.is_gguf:
            self._ask(worker, [self.setup.model.prompts[:1]], SHORT.tokens // 4)
        else:
            self.play(worker)

    def play(self, worker: Worker, work: Work = FULL) -> Pass:
        """One pass. Raises: WorkerError."""
        prompts = self.setup.model.prompts[: max(self.batch, work.requests)]
        calls = [prompts[i : i + self.batch] for i in range(0, len(prompts), self.batch)]
        answer = self._ask(worker, calls, work.tokens)
        self.token_ids = answer["token_ids"]
        wall = answer["wall_s"]
        num_tokens = sum(len(ids) for ids in self.token_ids)
        return Pass(num_tokens / wall, answer["cpu_s"] / wall, answer["other_s"] / wall)

    def _ask(
        self, worker: Worker, calls: Sequence[Sequence[Sequence[int]]], new_tokens: int
    ) -> dict[str, Any]:
        draft_tokens = self.setup.draft_tokens
        return worker.ask(do="run", calls=calls, new_tokens=new_tokens, draft_tokens=draft_tokens)


def take_turns(
    cells: Sequence[PeerCell], wanted: int, pool: Pool, on_pass: Callable[[PeerCell], None]
) -> None:
    """Passes over `cells` in turn until each has enough; the first of each warms up."""
    for cell in cells:
        try:
            worker = pool.worker(cell.setup)
            cell.facts = worker.facts
            cell.warm_up(worker)
        except WorkerError as error:
            cell.error = str(error)
        on_pass(cell)
    while unfinished := [c for c in cells if not c.error and not is_finished(c.passes, wanted)]:
        for cell in unfinished:
            try:
                cell.passes.append(cell.play(pool.worker(cell.setup)))
            except WorkerError as error:
                cell.error = str(error)
            on_pass(cell)


def shown(tokens_per_s: float) -> str:
    """In words, as exactly as it is known."""
    return f"{tokens_per_s:.1f}" if tokens_per_s < 100 else f"{tokens_per_s:.0f}"


def median(passes: Sequence[Pass]) -> float:
    return statistics.median(p.tokens_per_s for p in passes)
