"""GoodSpeed's α̂ on the real engine, with a drafter whose acceptance is known."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.small_family import VOCAB
from tests.engine.test_exactness import SAMPLINGS, load, make_loop, make_requests, run

from penstock.core.policies.allocation.papers.goodspeed import GoodSpeed
from penstock.core.state import Outcome
from penstock.engine.build import Engine

DRAFT_TOKENS = 64  # of 32 requests together
TOKENS = 20_000
WARM_UP = 40  # steps until α̂(0) is forgotten


class Watched(GoodSpeed):
    """Keeps the estimate after every step."""

    def __init__(self, options: GoodSpeed.Options) -> None:
        super().__init__(options)
        self.seen: list[float] = []

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        super().on_step(outcomes, now)
        self.seen.append(self.acceptance("default"))


@pytest.fixture(scope="module")
def engine(family: dict[str, Path]) -> Engine:
    return load(family, "native")


def make_wrong(monkeypatch: pytest.MonkeyPatch, engine: Engine, rate: float) -> None:
    """Let the target's copy draft another token than the target's with probability 1 - rate.

    The draft goes on behind that token, so every position is right with the same probability."""
    drafter: Any = engine.executor.drafters["same"]
    sample, rng = drafter.runner.sample, np.random.default_rng(5)

    def mistaken(*args: Any) -> torch.Tensor:
        tokens = sample(*args)
        return (tokens + torch.from_numpy(rng.random(len(tokens)) >= rate)) % VOCAB

    monkeypatch.setattr(drafter.runner, "propose", lambda *_: None)  # token by token
    monkeypatch.setattr(drafter.runner, "sample", mistaken)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("output_len", [16, 50, 150])
def test_acceptance_is_learned_live(engine, monkeypatch, rate, output_len) -> None:
    make_wrong(monkeypatch, engine, rate)
    policy = Watched(GoodSpeed.Options(total=DRAFT_TOKENS))
    made = make_requests(SAMPLINGS["greedy"], TOKENS // output_len, "same")
    run(
        make_loop(engine, allocation=policy, look_up=False),
        [dataclasses.replace(r, max_tokens=output_len) for r in made],
    )
    assert np.mean(policy.seen[WARM_UP:]) == pytest.approx(rate, abs=0.01)
