"""A training that is cut and goes on: its state, checkpoints and what is measured meanwhile."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.zoo.optim import Optimizers, cosine_factor
from lab.zoo.recipe import HeadSpec, ModelSpec
from penstock.cli.terminal import progress


class Run(ABC):
    """The training of one model: state, step, checkpoint."""

    def __init__(self, spec: ModelSpec | HeadSpec, model: nn.Module, folder: Path) -> None:
        self.name, self.steps, self.warmup = spec.name, spec.steps, spec.warmup
        self.folder, self.model = folder, model
        self.optimizers = Optimizers(model, spec.muon_lr, spec.adam_lr)
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []

    @abstractmethod
    def loss(self) -> Tensor:
        """Return the loss of the present step."""

    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """What held-back text says of the model now."""

    def advance(self) -> float:
        """One optimiser step; returns its loss."""
        loss = self.loss()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step(cosine_factor(self.step, self.steps, self.warmup))
        self.step += 1
        return float(loss.detach())

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write a checkpoint; an interrupted write leaves the old one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)

    def resume(self) -> bool:
        """Continue from the checkpoint, if there is one."""
        if not self._checkpoint.exists():
            return False
        state = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.history = state["history"]
        return True

    def evaluate(self) -> dict[str, Any]:
        """What is measured now, noted in the history."""
        found = self.measured()
        note = {"step": self.step, "seconds": round(self.seconds), **found}
        self.history.append(note)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "history.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        return found

    def tell_done(self) -> None:
        """Note that the model is trained and written."""
        done = {"seconds": self.seconds, "steps": self.step, "history": self.history}
        (self.folder / "done.json").write_text(json.dumps(done))


def run_to_end(
    run: Run, *, checkpoint_s: float, evaluate_every: int, log: Path | None = None
) -> None:
    """Train until the last step, with checkpoints and held-back losses at intervals."""
    saved = time.monotonic()
    run.folder.mkdir(parents=True, exist_ok=True)
    with progress(run.steps, run.name) as advance:
        advance(run.step)
        while run.step < run.steps:
            began = time.monotonic()
            loss = run.advance()
            run.seconds += time.monotonic() - began
            advance(1)
            if log is not None and run.step % 10 == 0:
                with log.open("a") as file:
                    file.write(f"{run.name} {run.step} {loss:.4f} {run.seconds:.0f}s\n")
            if run.step % evaluate_every == 0 or run.step == run.steps:
                run.evaluate()
            if time.monotonic() - saved > checkpoint_s:
                run.save()
                saved = time.monotonic()
    run.save()
