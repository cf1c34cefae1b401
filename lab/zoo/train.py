"""Training of the bundled family: ``penstock zoo train``."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from lab.zoo.corpora import GENERATORS, Split
from lab.zoo.data import Ids, Mixture, answer_mask, batch_of, cached_pack
from lab.zoo.distil import TeacherRows, distil_loss, overlap, student_logits, teach
from lab.zoo.manifest import write_manifest
from lab.zoo.modeling import (
    build,
    grow,
    hidden_states,
    load_model,
    parameter_count,
    save_model,
    sharpen,
)
from lab.zoo.optim import Optimizers, cosine_factor
from lab.zoo.owntext import own_rows, writer
from lab.zoo.recipe import FULL, ModelSpec, Recipe
from lab.zoo.recipe import quick as quick_recipe
from lab.zoo.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

LONG_EVERY = 8
"""Every so many steps the rows of a batch are joined into rows four times as long."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Packed text by domain: [rows, ROW] each."""

    train: dict[str, Ids]
    held: dict[str, Ids]


def prepare(work: Path, recipe: Recipe) -> Pools:
    """Train or reuse the tokenizer, then pack or reuse every domain's text, under `work`."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(), folder)
    tokenizer, packs = load_tokenizer(folder), work / "packs"
    train = {
        d: cached_pack(packs, tokenizer, d, "train", recipe.pool_rows, recipe.seed)
        for d in GENERATORS
    }
    held = {
        d: cached_pack(packs, tokenizer, d, "held_back", recipe.held_rows, recipe.seed)
        for d in GENERATORS
    }
    return Pools(train, held)


def select(ids: Ids, prompt_share: float, rng: np.random.Generator) -> Tensor:
    """[rows, length] which positions enter the loss: all of the answers, some of the prompts."""
    keep = answer_mask(ids)
    if prompt_share > 0:
        extra = rng.random(ids.shape) < prompt_share
        extra[:, -1] = False
        keep = keep | extra
    return torch.from_numpy(keep)


def as_tensor(ids: Ids) -> Tensor:
    """Token ids as torch wants them."""
    return torch.from_numpy(ids.astype(np.int64))


def data_loss(model: LlamaForCausalLM, ids: Tensor, keep: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the positions of `keep`; both are [rows, length]."""
    hidden = hidden_states(model, ids)[keep]
    logits = functional.linear(hidden, model.lm_head.weight)
    return functional.cross_entropy(logits, ids.roll(-1, dims=1)[keep])


@torch.no_grad()
def held_losses(model: LlamaForCausalLM, held: dict[str, Ids]) -> dict[str, float]:
    """Cross-entropy of the answers of held-back text, by domain, in nats per token."""
    model.train(False)
    result = {}
    for domain, ids in held.items():
        keep = torch.from_numpy(answer_mask(ids))
        result[domain] = float(data_loss(model, as_tensor(ids), keep))
    model.train()
    return result


@dataclass(frozen=True, slots=True)
class Lessons:
    """The teacher's distributions along its answers to training and to held-back prompts."""

    train: dict[str, TeacherRows]
    held: dict[str, TeacherRows]


def prepare_lessons(work: Path, out: Path, recipe: Recipe, teacher: str) -> Lessons:
    """Let the trained `teacher` answer prompts of every domain and keep its distributions along
    its own text, or reuse what is in `work`. `out` holds the teacher in bfloat16."""
    train: dict[str, TeacherRows] = {}
    held: dict[str, TeacherRows] = {}
    folder = work / "lessons"
    parts: tuple[tuple[dict[str, TeacherRows], Split, int], ...] = (
        (held, "held_back", recipe.held_prompts),
        (train, "train", recipe.teacher_prompts),
    )
    jobs = [(found, d, split, count) for found, split, count in parts for d in GENERATORS]
    paths = [folder / f"{domain}-{split}.npz" for _, domain, split, _ in jobs]
    if not all(path.exists() for path in paths):
        tokenizer = load_tokenizer(work / "tokenizer")
        engine = writer(out / teacher, torch.get_num_threads())
        model = load_model(out / teacher)
    for (found, domain, split, count), path in zip(jobs, paths, strict=True):
        if not path.exists():
            rows = own_rows(engine, tokenizer, domain, split, count, recipe.seed + 1)
            teach(model, rows).save(path)
        found[domain] = TeacherRows.load(path)
    return Lessons(train, held)


class TrainingRun:
    """The training of one model: state, step, checkpoint."""

    def __init__(
        self, spec: ModelSpec, pools: Pools, folder: Path, seed: int, lessons: Lessons | None = None
    ) -> None:
        if spec.teacher is not None and lessons is None:
            raise ValueError(f"{spec.name} needs the distributions of {spec.teacher}")
        self.spec, self.pools, self.folder, self.seed = spec, pools, folder, seed
        self.lessons = lessons
        self.model = self._initial()
        self.optimizers = Optimizers(self.model, spec.muon_lr, spec.adam_lr)
        mixture = Mixture(spec.mixture, spec.offset)
        self.plan = mixture.plan(spec.steps, spec.rows_per_step, seed)
        self.lesson_plan = Mixture(spec.mixture).plan(spec.steps, spec.rows_per_step, seed + 1)
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []

    def _initial(self) -> LlamaForCausalLM:
        if self.spec.grown_from is None:
            return build(self.spec.shape, self.seed)
        path = self.folder.parent / self.spec.grown_from / "float32"
        small = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        return grow(small, self.spec.shape)

    def _joined(self, tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(tokens)
        if self.step % LONG_EVERY == LONG_EVERY - 1 and rows % 4 == 0:
            return tokens.view(rows // 4, -1), keep.view(rows // 4, -1)
        return tokens, keep

    def _text_loss(self) -> Tensor:
        ids = batch_of(self.pools.train, self.plan[self.step])
        rng = np.random.default_rng((self.seed, self.step))
        keep = select(ids, self.spec.prompt_share, rng)
        return data_loss(self.model, *self._joined(as_tensor(ids), keep))

    def _teacher_loss(self, lessons: Lessons) -> Tensor:
        rows = self.lesson_plan[self.step]
        parts = [lessons.train[name].batch([row]) for name, row in rows]
        ids = np.concatenate([part[0] for part in parts])
        keep = torch.from_numpy(answer_mask(ids))
        logits = student_logits(self.model, *self._joined(as_tensor(ids), keep))
        tokens = torch.cat([part[1] for part in parts])
        probs = torch.cat([part[2] for part in parts])
        begin = self.spec.distil_from
        done = (self.step / self.spec.steps - begin) / (1 - begin)
        return distil_loss(logits, tokens, probs, min(0.8, 1.6 * done))

    def advance(self) -> float:
        """One optimiser step; returns its loss."""
        teaching = self.step >= self.spec.distil_from * self.spec.steps
        if self.lessons is not None and teaching:
            loss = self._teacher_loss(self.lessons)
        else:
            loss = self._text_loss()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step(cosine_factor(self.step, self.spec.steps, self.spec.warmup))
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

    def evaluate(self) -> dict[str, float]:
        """Held-back losses now, noted in the history."""
        losses = held_losses(self.model, self.pools.held)
        note: dict[str, Any] = {"step": self.step, "seconds": round(self.seconds), "held": losses}
        if self.lessons is not None:
            held = self.lessons.held
            note["overlap"] = {d: overlap(self.model, held[d]) for d in held}
        self.history.append(note)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "history.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        return losses

    def finish(self, out: Path, tokenizer: Path) -> None:
        """Write the trained model to `out`, in bfloat16, with the tokenizer; a target is sharpened,
        but not the float32 copy from which another may be grown."""
        self.model.save_pretrained(self.folder / "float32")
        if self.spec.role == "target":
            sharpen(self.model)
        save_model(self.model, out / self.spec.name)
        for path in tokenizer.iterdir():
            (out / self.spec.name / path.name).write_bytes(path.read_bytes())
        (self.folder / "done.json").write_text(
            json.dumps({"seconds": self.seconds, "steps": self.step, "history": self.history})
        )


@contextlib.contextmanager
def _bar(name: str, steps: int, show: bool) -> Iterator[Any]:
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns, disable=not show) as progress:
        task = progress.add_task(name, total=steps, loss=float("nan"))
        yield lambda step, loss: progress.update(task, completed=step, loss=loss)


def run_to_end(
    run: TrainingRun,
    *,
    checkpoint_s: float,
    evaluate_every: int,
    show: bool,
    log: Path | None = None,
) -> None:
    """Train until the last step, with checkpoints and held-back losses at intervals."""
    saved = time.monotonic()
    run.folder.mkdir(parents=True, exist_ok=True)
    with _bar(run.spec.name, run.spec.steps, show) as update:
        while run.step < run.spec.steps:
            began = time.monotonic()
            loss = run.advance()
            run.seconds += time.monotonic() - began
            update(run.step, loss)
            if log is not None and run.step % 10 == 0:
                with log.open("a") as file:
                    file.write(f"{run.spec.name} {run.step} {loss:.4f} {run.seconds:.0f}s\n")
            if run.step % evaluate_every == 0 or run.step == run.spec.steps:
                run.evaluate()
            if time.monotonic() - saved > checkpoint_s:
                run.save()
                saved = time.monotonic()
    run.save()


def train(
    out: Path,
    only: list[str] | None = None,
    quick: bool = False,
    *,
    work: Path | None = None,
    threads: int | None = None,
    checkpoint_s: float = 120.0,
    show: bool = True,
    recipe: Recipe | None = None,
) -> None:
    """Train the family, or the models named in `only`, and write them to `out`.

    Work in progress (packed text, checkpoints, float32 weights) is kept in `work`, from which an
    interrupted run continues. Models that are done there are not trained again. `quick` is a smoke
    version of a few minutes. The manifest of `out` is written at the end.
    """
    recipe = recipe or (quick_recipe() if quick else FULL)
    name = "zoo-train-quick" if quick else "zoo-train"
    work = work or Path.home() / ".cache" / "penstock" / name
    if threads is not None:
        torch.set_num_threads(threads)
    pools = prepare(work, recipe)
    for spec in recipe.models:
        if only is not None and spec.name not in only:
            continue
        folder = work / spec.name
        if (folder / "done.json").exists():
            continue
        lessons = None
        if spec.teacher is not None:
            lessons = prepare_lessons(work, out, recipe, spec.teacher)
        run = TrainingRun(spec, pools, folder, recipe.seed, lessons)
        run.resume()
        run_to_end(
            run, checkpoint_s=checkpoint_s, evaluate_every=240, show=show, log=work / "log.txt"
        )
        run.finish(out, work / "tokenizer")
    write_cards(out, recipe)


def write_cards(out: Path, recipe: Recipe) -> None:
    """Write the manifest of the models that are in `out`."""
    cards = {}
    for spec in recipe.models:
        if (out / spec.name / "model.safetensors").exists():
            model = load_model(out / spec.name)
            cards[spec.name] = {
                "role": spec.role,
                "parameters": parameter_count(model),
                "description": spec.description,
            }
    write_manifest(out, cards)
