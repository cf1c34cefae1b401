"""Honest drafts pass their audits, on another machine's rounding too; false ones do not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_family import VOCAB

from penstock.core.types import Request, SamplingParams
from penstock.engine.audit import Audit, Auditor
from penstock.engine.eager import EagerRunner
from penstock.engine.runner import RaggedBatch
from penstock.engine.sampling import SamplingRows, draw_draft, sample_coupled
from penstock.engine.sampling.filters import filtered_probs
from penstock.engine.sequences import TokenBuffer
from penstock.engine.steps import Weights
from penstock.transport.wire import truncate, weight_rows

TEXT = tuple(b"an honest day's work ")
SAMPLING = SamplingParams(temperature=0.9, seed=4, verification="ratio")


def drafted(
    path: Path, num_tokens: int, k: int | None, dtype: torch.dtype = torch.float32
) -> tuple[tuple[int, ...], tuple[Weights, ...] | None]:
    """What an honest draft server makes of TEXT, token by token; k: None compares with samples."""
    runner = EagerRunner.load(path, dtype, torch.device("cpu"), 8, 16)
    tokens: list[int] = []
    weights: list[Weights] = []
    for _ in range(num_tokens):
        known = np.array((*TEXT, *tokens), dtype=np.int32)
        length = len(known)
        logits = runner.forward(
            RaggedBatch(
                token_ids=known,
                positions=np.arange(length, dtype=np.int32),
                query_start=np.array([0, length], dtype=np.int32),
                seq_lens=np.array([length], dtype=np.int32),
                block_tables=np.arange(8, dtype=np.int32)[None],
                logits_rows=np.array([length - 1], dtype=np.int32),
            )
        )
        one = [SAMPLING.temperature], [1.0], [0], [SAMPLING.seed]
        rows = SamplingRows(*map(np.array, one[:3]), np.array(one[3], dtype=np.uint64))
        position = np.array([length])
        if k is None:
            tokens.append(int(sample_coupled(logits, rows, position)))
            continue
        cut = truncate(filtered_probs(logits, rows).numpy(), k)
        weights += weight_rows(*cut)
        scores = torch.full((1, VOCAB), -torch.inf)
        ids, values = weights[-1]
        scores[0, list(ids)] = torch.tensor(values, dtype=torch.float32).log()
        tokens.append(int(draw_draft(scores, rows, position, np.array([len(TEXT)]))))
    return tuple(tokens), None if k is None else tuple(weights)


def audit(tokens: tuple[int, ...], weights: tuple[Weights, ...] | None) -> Audit:
    return Audit("far away", "near", TEXT, SAMPLING, tokens, weights)


@pytest.mark.parametrize("k", [None, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_honest_draft(family: dict[str, Path], k: int | None, dtype: torch.dtype) -> None:
    finding = Auditor(family).check(audit(*drafted(family["near"], 6, k, dtype)))
    assert finding.num_tokens == 6
    assert finding.weighted == (k is not None)
    assert finding.distance < 0.05
    if k is not None or dtype is torch.float32:
        assert finding.num_false_draws == 0


def test_another_model(family: dict[str, Path]) -> None:
    finding = Auditor(family).check(audit(*drafted(family["far"], 6, 8)))
    assert finding.num_false_draws == 0
    assert finding.distance > 0.3
    assert Auditor(family).check(audit(*drafted(family["far"], 6, None))).num_false_draws > 0


def test_cherry_picked_tokens(family: dict[str, Path]) -> None:
    """Honest distributions, but the likeliest token in the place of the one that was drawn."""
    tokens, weights = drafted(family["near"], 6, 8)
    assert weights is not None
    picked = tuple(ids[int(np.argmax(values))] for ids, values in weights)
    assert picked != tokens
    first = next(i for i in range(6) if picked[i] != tokens[i])
    chosen = (*tokens[:first], picked[first])
    finding = Auditor(family).check(audit(chosen, weights[: first + 1]))
    assert finding.num_false_draws == 1
    assert finding.distance < 0.05


def test_tokens_that_the_model_does_not_have(family: dict[str, Path]) -> None:
    finding = Auditor(family).check(audit((300,), (((300,), (65536,)),)))
    assert finding.num_false_draws == 1
    assert finding.distance == 1


def test_in_a_thread_and_not_for_ever(family: dict[str, Path]) -> None:
    auditor = Auditor({"near": family["near"]})
    request = Request("r", len(TEXT), 9, prompt_token_ids=TEXT, sampling=SAMPLING)
    text = TokenBuffer(request)
    tokens, weights = drafted(family["near"], 3, 8)
    auditor.submit("far away", "unknown", text, tokens, weights)
    auditor.submit("far away", "near", text, (), ())
    for _ in range(40):
        auditor.submit("far away", "near", text, tokens, weights)
    found = []
    while not found:
        found = auditor.findings()
    assert found[0] == auditor.check(audit(tokens, weights))
