"""`ratio` drafts that end where their own confidence falls keep the target's distribution.

The joint distribution of three positions over a vocabulary of six, 30,000 samples, chi-square.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.test_sessions_exact import (
    BATCH,
    NUM_POSITIONS,
    PROMPT,
    VOCAB,
    judge,
    target_logits,
    write_model,
)

from penstock.core.types import DraftOrder, Request, SamplingParams, Verdict
from penstock.engine.drafters import model as model_drafter
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.eager import EagerRunner
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import SamplingRows, VerifyBatch, verify
from penstock.engine.sequences import TokenBuffer

pytestmark = pytest.mark.slow

Models = tuple[EagerRunner, ModelRunner]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Models]:
    """Target and drafter."""
    paths: list[Path] = []
    for seed in (1, 2):
        paths.append(tmp_path_factory.mktemp(f"model{seed}"))
        write_model(paths[-1], seed)
    cpu = torch.device("cpu")

    def models(backend: str) -> Models:
        target = EagerRunner.load(paths[0], torch.float32, cpu, 2 * BATCH, 16)
        if backend == "native":
            return target, NativeRunner.load(paths[1], torch.float32, 2 * BATCH, 16, 1)
        return target, EagerRunner.load(paths[1], torch.float32, cpu, 2 * BATCH, 16)

    return models


def sample(models: Models, first_seed: int) -> tuple[np.ndarray, int]:
    """[BATCH, NUM_POSITIONS] tokens, each row by a seed of its own; drafts that ended early."""
    target, runner = models
    drafter = ModelDrafter("small", runner, 32)
    texts = []
    for i in range(BATCH):
        sampling = SamplingParams(1.0, seed=first_seed + i, verification="ratio")
        request = Request(f"{i}", len(PROMPT), 8, prompt_token_ids=PROMPT, sampling=sampling)
        texts.append(TokenBuffer(request))
    num_short = number = 0
    end = len(PROMPT) + NUM_POSITIONS
    while live := [i for i, t in enumerate(texts) if t.length < end]:
        number += 1
        mine = [texts[i] for i in live]
        orders = [
            DraftOrder(
                f"{i}", number, 0, "small", 0, t.length, 1 + (i + number) % 3, (i,), 0.3 + i % 3 / 5
            )
            for i, t in zip(live, mine, strict=True)
        ]
        drafts = drafter.draft(orders, mine)
        assert drafts.probs is not None
        lengths = [len(d.token_ids) for d in drafts.drafts]
        num_short += sum(n < o.max_draft_tokens for n, o in zip(lengths, orders, strict=True))
        whole = [
            [*t.tokens(0, t.length), *d.token_ids] for t, d in zip(mine, drafts.drafts, strict=True)
        ]
        ends = np.cumsum([len(w) for w in whole])
        rows = [np.arange(e - n - 1, e) for e, n in zip(ends, lengths, strict=True)]
        result = verify(
            VerifyBatch(
                logits=target_logits(target, whole)[np.concatenate(rows)],
                row_start=np.concatenate(([0], np.cumsum([len(r) for r in rows]))),
                positions=np.array([t.length for t in mine]),
                params=SamplingRows.from_params([t.request.sampling for t in mine]),
                ratio=np.ones(len(live), dtype=bool),
                draft_tokens=np.array([t for d in drafts.drafts for t in d.token_ids], dtype=int),
                draft_probs=drafts.probs,
                draft_prob_row=np.array([r for d in drafts.drafts for r in d.prob_rows], dtype=int),
            )
        )
        for n, (text, draft) in enumerate(zip(mine, drafts.drafts, strict=True)):
            accepted, decided = int(result.num_accepted[n]), int(result.num_decided[n])
            verdict = Verdict("", 0, 0, num_accepted=accepted, num_decided=decided)
            drafter.learn(text.request.sampling, draft, verdict)
            text.append(result.tokens(n))
    return np.array([t.tokens(len(PROMPT), end) for t in texts]), num_short


def p_value(models: Models, num_samples: int) -> float:
    counts = np.zeros((VOCAB,) * NUM_POSITIONS)
    for first_seed in range(0, num_samples, BATCH):
        tokens, num_short = sample(models, first_seed)
        assert num_short > BATCH / 4, "drafts must end early for this to say anything"
        np.add.at(counts, tuple(tokens.T), 1)
    return judge(models[0], counts)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_the_output_has_the_targets_distribution(make, backend: str) -> None:
    assert p_value(make(backend), 30_000) > 1e-4


def test_ending_by_the_drawn_tokens_probability_is_found_out(make, monkeypatch) -> None:
    """Control: confidence in a drawn token must not depend on which one was drawn."""
    honest = model_drafter._confidences
    monkeypatch.setattr(
        model_drafter, "_confidences", lambda *a: honest(*a[:3], np.zeros(len(a[2]), dtype=bool))
    )
    assert p_value(make("eager"), 10_000) < 1e-6
