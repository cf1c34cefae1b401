"""What is trained: shapes, mixtures and lengths of the seven models and of two heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["target", "drafter"]

_DOMAINS = ("instruction", "roleplay", "summary", "qa", "chat", "math", "sql", "entropy")
EVEN = dict.fromkeys(_DOMAINS, 1.0) | {"instruction": 1.5, "summary": 1.5, "entropy": 0.8}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama model; the vocabulary and the positions are the family's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of the family and how it is trained."""

    name: str
    role: Role
    shape: Shape
    description: str
    mixture: dict[str, float]
    steps: int
    rows_per_step: int = 8
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 20
    prompt_share: float = 0.2
    """Share of the prompt's positions that enter the loss; answers enter wholly."""
    grown_from: str | None = None
    teacher: str | None = None
    distil_from: float = 0.35
    """Share of the steps after which the loss is the teacher's, not the text's."""
    offset: int = 0
    """Where in every domain's pool this model starts to read."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head of a trained target (:mod:`lab.zoo.heads`) and how it is trained.

    reads:       of EAGLE-3: the layers whose inputs it reads; none in an MTP head
    ffn, tokens: of EAGLE-3: its MLP's size and how many tokens it can tell, else the target's"""

    name: str
    target: str
    description: str
    steps: int
    ffn: int | None = None
    tokens: int | None = None
    reads: tuple[int, ...] = ()
    rows_per_step: int = 2
    muon_lr: float = 0.006
    adam_lr: float = 1e-3
    warmup: int = 10
    answers_alone: bool = True
    """Of the text, not the prompts."""
    chained: int = 3
    """Drafts in a row that are trained, each behind the head's own state."""
    fading: float = 0.6
    """Weight of a draft over that of the one before it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole training run."""

    models: tuple[ModelSpec, ...]
    heads: tuple[HeadSpec, ...] = ()
    pool_rows: int = 1600
    """Rows of training text per domain."""
    held_rows: int = 12
    """Rows of held-back text per domain for the losses."""
    teacher_prompts: int = 200
    """Training prompts per domain that a target answers to teach its drafters, and its heads."""
    held_prompts: int = 32
    """Held-back prompts per domain that it answers to measure the drafters."""
    seed: int = 0


_LARGE = "target-large"


def _only(*domains: str) -> dict[str, float]:
    return {d: EVEN[d] for d in domains}


def _drafter(
    name: str, shape: Shape, description: str, mixture: dict[str, float], steps: int
) -> ModelSpec:
    return ModelSpec(
        name,
        "drafter",
        shape,
        description,
        mixture,
        steps,
        rows_per_step=4,
        muon_lr=0.008,
        adam_lr=3e-3,
        prompt_share=0.05,
        teacher=_LARGE,
        offset=100,
    )


_SPECIALIST = Shape(160, 2, 5, 1, 32, 448)

FULL = Recipe(
    models=(
        ModelSpec(
            "target-small",
            "target",
            Shape(384, 2, 6, 2, 64, 1152),
            "small target, all domains",
            EVEN,
            steps=680,
            rows_per_step=4,
            muon_lr=0.005,
            adam_lr=2e-3,
            warmup=20,
        ),
        ModelSpec(
            _LARGE,
            "target",
            Shape(384, 6, 6, 2, 64, 1152),
            "large target, all domains, grown from target-small",
            EVEN,
            steps=180,
            rows_per_step=4,
            muon_lr=0.004,
            adam_lr=1.5e-3,
            grown_from="target-small",
            offset=690,
        ),
        _drafter("draft-tiny", Shape(128, 1, 4, 1, 32, 384), "generalist, one layer", EVEN, 1500),
        _drafter(
            "draft-code",
            _SPECIALIST,
            "specialist: instructions with code, SQL",
            _only("instruction", "sql"),
            1000,
        ),
        _drafter(
            "draft-data",
            _SPECIALIST,
            "specialist: numbers and structured text",
            _only("math", "sql", "entropy"),
            1000,
        ),
        _drafter(
            "draft-lang",
            _SPECIALIST,
            "specialist: role-play, chat, questions, prose",
            _only("roleplay", "chat", "qa"),
            1000,
        ),
        _drafter("draft-base", Shape(192, 4, 6, 2, 32, 640), "generalist, four layers", EVEN, 900),
    ),
    heads=(
        HeadSpec("target-large-mtp", _LARGE, "MTP head of target-large", steps=400),
        HeadSpec(
            "target-large-eagle3",
            _LARGE,
            "EAGLE-3 head of target-large",
            steps=400,
            ffn=768,
            tokens=1024,
            reads=(1, 3, 5),
        ),
    ),
)


def quick(recipe: Recipe = FULL) -> Recipe:
    """A smoke version of `recipe`: the same models, a few steps each, little text."""
    models = tuple(
        replace(spec, steps=12, warmup=3, rows_per_step=4, offset=0) for spec in recipe.models
    )
    heads = tuple(replace(spec, steps=6, warmup=2) for spec in recipe.heads)
    recipe = replace(recipe, models=models, heads=heads)
    return replace(recipe, pool_rows=24, held_rows=2, teacher_prompts=24, held_prompts=8)
