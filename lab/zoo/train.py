"""Training of the bundled family: ``penstock zoo train``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from lab.zoo.corpora import GENERATORS, Split
from lab.zoo.data import Ids, Mixture, answer_mask, batch_of, cached_pack
from lab.zoo.distil import TeacherRows, as_tensor, distil_loss, overlap, student_logits, teach
from lab.zoo.head_training import HeadRun
from lab.zoo.heads import load_head
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
from lab.zoo.owntext import own_rows, writer
from lab.zoo.recipe import FULL, HeadSpec, ModelSpec, Recipe
from lab.zoo.recipe import quick as quick_recipe
from lab.zoo.run import Run, run_to_end
from lab.zoo.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from penstock.engine.models.dtypes import resolve_dtype

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


def prepare_own_text(
    work: Path, target: Path, split: Split, count: int, seed: int
) -> dict[str, Ids]:
    """Let the trained `target` answer `count` prompts of every domain, or reuse what is there."""
    folder, engine, tokenizer = work / f"{target.name}-text", None, load_tokenizer(target)
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for domain in GENERATORS:
        path = folder / f"{domain}-{split}-{count}-{seed}.npy"
        if not path.exists():
            engine = engine or writer(target, torch.get_num_threads())
            np.save(path, own_rows(engine, tokenizer, domain, split, count, seed))
        found[domain] = np.load(path)
    return found


def prepare_lessons(work: Path, out: Path, recipe: Recipe, teacher: str) -> Lessons:
    """Keep the distributions of the trained `teacher` along its own answers to prompts of every
    domain, or reuse what is in `work`. `out` holds the teacher in bfloat16."""

    def taught(split: Split, count: int) -> dict[str, TeacherRows]:
        paths = {domain: work / "lessons" / f"{domain}-{split}.npz" for domain in GENERATORS}
        if not all(path.exists() for path in paths.values()):
            rows = prepare_own_text(work, out / teacher, split, count, recipe.seed + 1)
            model = load_model(out / teacher)
            for domain, path in paths.items():
                teach(model, rows[domain]).save(path)
        return {domain: TeacherRows.load(path) for domain, path in paths.items()}

    held = taught("held_back", recipe.held_prompts)
    return Lessons(taught("train", recipe.teacher_prompts), held)


def _initial(spec: ModelSpec, work: Path, seed: int) -> LlamaForCausalLM:
    if spec.grown_from is None:
        return build(spec.shape, seed)
    path = work / spec.grown_from / "float32"
    small = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    return grow(small, spec.shape)


class TrainingRun(Run):
    """The training of a model of the family."""

    model: LlamaForCausalLM

    def __init__(
        self, spec: ModelSpec, pools: Pools, folder: Path, seed: int, lessons: Lessons | None = None
    ) -> None:
        if spec.teacher is not None and lessons is None:
            raise ValueError(f"{spec.name} needs the distributions of {spec.teacher}")
        self.spec, self.pools, self.seed, self.lessons = spec, pools, seed, lessons
        super().__init__(spec, _initial(spec, folder.parent, seed), folder)
        mixture = Mixture(spec.mixture, spec.offset)
        self.plan = mixture.plan(spec.steps, spec.rows_per_step, seed)
        self.lesson_plan = Mixture(spec.mixture).plan(spec.steps, spec.rows_per_step, seed + 1)

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

    def loss(self) -> Tensor:
        teaching = self.step >= self.spec.distil_from * self.spec.steps
        if self.lessons is not None and teaching:
            return self._teacher_loss(self.lessons)
        return self._text_loss()

    def measured(self) -> dict[str, Any]:
        """Held-back losses, and a drafter's overlap with its teacher."""
        found: dict[str, Any] = {"held": held_losses(self.model, self.pools.held)}
        if self.lessons is not None:
            held = self.lessons.held
            found["overlap"] = {d: overlap(self.model, held[d]) for d in held}
        return found

    def finish(self, out: Path, tokenizer: Path) -> None:
        """Write the trained model to `out`, in bfloat16, with the tokenizer; a target is sharpened,
        but not the float32 copy from which another may be grown."""
        self.model.save_pretrained(self.folder / "float32")
        if self.spec.role == "target":
            sharpen(self.model)
        save_model(self.model, out / self.spec.name)
        for path in tokenizer.iterdir():
            (out / self.spec.name / path.name).write_bytes(path.read_bytes())
        self.tell_done()


def train(
    out: Path,
    only: list[str] | None = None,
    quick: bool = False,
    *,
    work: Path | None = None,
    threads: int | None = None,
    checkpoint_s: float = 120.0,
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

    def is_asked(spec: ModelSpec | HeadSpec) -> bool:
        done = (work / spec.name / "done.json").exists()
        return not done and (only is None or spec.name in only)

    def to_end(run: Run) -> None:
        run.resume()
        log = work / "log.txt"
        run_to_end(run, checkpoint_s=checkpoint_s, evaluate_every=240, log=log)

    models = [spec for spec in recipe.models if is_asked(spec)]
    pools = prepare(work, recipe) if models else None
    for spec in models:
        assert pools is not None
        lessons = None
        if spec.teacher is not None:
            lessons = prepare_lessons(work, out, recipe, spec.teacher)
        run = TrainingRun(spec, pools, work / spec.name, recipe.seed, lessons)
        to_end(run)
        run.finish(out, work / "tokenizer")
    for head in filter(is_asked, recipe.heads):
        path, num, seed = out / head.target, recipe.teacher_prompts, recipe.seed + 2
        train_rows = prepare_own_text(work, path, "train", num, seed)
        held = prepare_own_text(work, path, "held_back", recipe.held_prompts, seed)
        target = load_model(path, resolve_dtype("auto", torch.device("cpu")))
        beside = HeadRun(head, target, train_rows, held, work / head.name)
        to_end(beside)
        beside.finish(out / head.name, json.loads((path / "config.json").read_text()))
    write_cards(out, recipe)


def write_cards(out: Path, recipe: Recipe) -> None:
    """Write the manifest of the models that are in `out`."""
    cards = {}
    specs: tuple[ModelSpec | HeadSpec, ...] = recipe.models + recipe.heads
    for spec in specs:
        folder = out / spec.name
        if (folder / "model.safetensors").exists():
            role = spec.role if isinstance(spec, ModelSpec) else "head"
            model = load_head(folder) if role == "head" else load_model(folder)
            cards[spec.name] = {
                "role": role,
                "parameters": parameter_count(model),
                "description": spec.description,
            }
    write_manifest(out, cards)
