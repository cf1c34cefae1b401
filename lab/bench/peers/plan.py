"""Which cells are measured, and how far a run has come."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lab.bench.peers.checkpoints import PeerCheckpoint
from lab.bench.peers.engines import PeerEngine
from lab.bench.peers.passes import MIN_REQUESTS, PeerCell
from lab.bench.peers.tuning import PeerTuner, near_the_best
from lab.bench.peers.verdict import Bar


def planned(
    tuner: PeerTuner,
    engines: Sequence[PeerEngine],
    model: PeerCheckpoint,
    batch: int,
    bars: Collection[Bar],
) -> list[PeerCell]:
    """Every engine target-only and with its best drafter; of a large model, what its bars compare,
    by each engine's better mode, without the peers that trials show to be behind."""
    able = [engine for engine in engines if engine.settings_for(model)]
    targets = [tuner.target_cell(engine, model, batch) for engine in able]
    asked = {bar.mode for bar in bars if (bar.model, bar.batch) == (model.name, batch)}
    if model.is_gguf and asked == {"target"} and not tuner.quick:
        return near_the_best(targets)
    drafts = [tuner.draft_cell(engine, model, batch) for engine in able]
    if not model.is_gguf or tuner.quick or not asked:
        return targets + [draft for draft in drafts if draft is not None]
    better = [
        max(target, draft or target, key=_trial)
        for target, draft in zip(targets, drafts, strict=True)
    ]
    chosen = near_the_best(targets) if "target" in asked else []
    known = [cell.setup for cell in chosen]
    return chosen + [cell for cell in near_the_best(better) if cell.setup not in known]


def _trial(cell: PeerCell) -> float:
    return cell.trial


def _weight(model: PeerCheckpoint, batch: int) -> int:
    file = model.target if model.is_gguf else model.target / "model.safetensors"
    return file.stat().st_size * max(batch, MIN_REQUESTS)


@dataclass
class Progress:
    """Of a run over models and batch sizes; what is left is taken to go as fast as what is done."""

    left: dict[tuple[str, int], int]
    done: int = 0
    num_done: int = 0
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, models: Sequence[PeerCheckpoint], batches: Sequence[int]) -> Progress:
        return cls({(m.name, b): _weight(m, b) for m in models for b in batches})

    def finish(self, model: PeerCheckpoint, batch: int, *, kept: bool) -> None:
        """kept: from an earlier run, in no time."""
        weight = self.left.pop((model.name, batch))
        self.num_done += 1
        self.done += 0 if kept else weight

    def __str__(self) -> str:
        number = f"{self.num_done} of {self.num_done + len(self.left)} done"
        if not self.done:
            return number
        minutes = (time.monotonic() - self.began) / self.done * sum(self.left.values()) / 60
        return f"{number}, about {minutes:.0f} min left"
