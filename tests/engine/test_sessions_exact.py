"""`ratio` verification of truncated drafts, many of them made ahead, keeps the distribution.

The joint distribution of three positions over a vocabulary of six, 50,000 samples, chi-square.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.core.drafting.lines import SessionOrder, TopWeights
from penstock.core.drafting.sessions import DraftingSessions, SessionDraft
from penstock.core.types import SamplingParams
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.proposers import ModelProposer
from penstock.engine.eager import EagerRunner
from penstock.engine.runner import RaggedBatch
from penstock.engine.sampling import SamplingRows, VerifyBatch, verify

pytestmark = pytest.mark.slow

VOCAB = 6
PROMPT = (2, 5)
NUM_POSITIONS = 3
BATCH = 1000
NUM_SAMPLES = 50_000
WEIGHT_SUM = 1 << 16

Cut = Callable[[SessionDraft], int]
"""How much of a draft is sent."""


def write_model(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[EagerRunner, EagerRunner]:
    """Target and drafter."""
    runners = []
    for seed in (1, 2):
        path = tmp_path_factory.mktemp(f"model{seed}")
        write_model(path, seed)
        runners.append(EagerRunner.load(path, torch.float32, torch.device("cpu"), 2 * BATCH, 16))
    return runners[0], runners[1]


def quantise(probs: torch.Tensor) -> list[TopWeights]:
    """The four likeliest tokens of six."""
    rows = []
    for row in probs:
        top = row.topk(4)
        weights = (top.values / top.values.sum() * WEIGHT_SUM).floor().long()
        weights[0] += WEIGHT_SUM - weights.sum()
        rows.append(TopWeights(tuple(top.indices.tolist()), tuple(weights.tolist())))
    return rows


def target_logits(target: EagerRunner, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of every position of the texts, end to end."""
    lengths = np.array([len(t) for t in texts], dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return target.forward(
        RaggedBatch(
            token_ids=np.concatenate([np.array(t, dtype=np.int32) for t in texts]),
            positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
            query_start=query_start,
            seq_lens=lengths,
            block_tables=np.arange(len(texts), dtype=np.int32)[:, None],
            logits_rows=np.arange(query_start[-1], dtype=np.int32),
        )
    )


def verify_drafts(
    target: EagerRunner,
    texts: Sequence[list[int]],
    drafts: Sequence[tuple[Sequence[int], Sequence[TopWeights]]],
    params: Sequence[SamplingParams],
) -> tuple[list[list[int]], np.ndarray]:
    """New tokens of each text, and how many of them were drafted."""
    logits = target_logits(target, [[*t, *d] for t, (d, _) in zip(texts, drafts, strict=True)])
    ends = np.cumsum([len(t) + len(d) for t, (d, _) in zip(texts, drafts, strict=True)])
    rows = [
        np.arange(end - len(tokens) - 1, end) for end, (tokens, _) in zip(ends, drafts, strict=True)
    ]
    sources = [s for _, row in drafts for s in row]
    probs = torch.zeros(len(sources), VOCAB)
    for row, source in zip(probs, sources, strict=True):
        row[list(source.token_ids)] = torch.tensor(source.weights).float() / WEIGHT_SUM
    result = verify(
        VerifyBatch(
            logits=logits[np.concatenate(rows)],
            row_start=np.concatenate(([0], np.cumsum([len(r) for r in rows]))),
            positions=np.array([len(t) for t in texts]),
            params=SamplingRows(
                np.array([p.temperature for p in params]),
                np.ones(len(params)),
                np.zeros(len(params), dtype=np.int64),
                np.array([p.seed for p in params], dtype=np.uint64),
            ),
            ratio=np.ones(len(params), dtype=bool),
            draft_tokens=np.array([t for d, _ in drafts for t in d], dtype=np.int64),
            draft_probs=probs,
            draft_prob_row=np.arange(len(sources)),
        )
    )
    return [result.tokens(i) for i in range(len(texts))], result.num_accepted


def sample(models: tuple[EagerRunner, EagerRunner], first_seed: int, cut: Cut) -> np.ndarray:
    """[BATCH, NUM_POSITIONS] tokens, each row by a seed of its own."""
    target, drafter = models
    sessions = DraftingSessions(ModelProposer(ModelDrafter("small", drafter, 32), quantise), 8)
    params = [SamplingParams(1.0, seed=first_seed + i, verification="ratio") for i in range(BATCH)]
    texts = [list(PROMPT) for _ in range(BATCH)]
    for i in range(BATCH):
        sessions.begin(str(i), PROMPT, params[i])
    number = 0
    while live := [i for i, t in enumerate(texts) if len(t) < len(PROMPT) + NUM_POSITIONS]:
        number += 1
        made: dict[int, SessionDraft] = {}
        for i in live:
            # Every fifth round of a request is verified without a draft, as when it is late.
            sessions.order(str(i), SessionOrder(number, len(texts[i]), 1 + (i + number) % 3))
        while len(made) < len(live):
            made.update((int(d.key), d) for d in sessions.step())
        for _ in range(3):  # ahead, but not always to the end
            sessions.step()
        used = [(i + number) % 5 > 0 for i in live]
        drafts = [
            (made[i].token_ids[: cut(made[i])], made[i].sources[: cut(made[i])])
            if use
            else ((), ())
            for i, use in zip(live, used, strict=True)
        ]
        news, accepted = verify_drafts(
            target, [texts[i] for i in live], drafts, [params[i] for i in live]
        )
        for i, tokens, num_accepted in zip(live, news, accepted, strict=True):
            sessions.extend(str(i), tokens, int(num_accepted))
            texts[i] += tokens
    begin, end = len(PROMPT), len(PROMPT) + NUM_POSITIONS
    return np.array([t[begin:end] for t in texts])


def expected_joint(target: EagerRunner) -> np.ndarray:
    """[VOCAB] * NUM_POSITIONS probabilities."""
    joint = np.ones((VOCAB,) * NUM_POSITIONS)
    for depth in range(NUM_POSITIONS):
        for prefix in product(range(VOCAB), repeat=depth):
            text = [*PROMPT, *prefix]
            probs = target_logits(target, [text])[-1].softmax(dim=-1).double().numpy()
            shape = (VOCAB,) + (1,) * (NUM_POSITIONS - depth - 1)
            joint[prefix] *= probs.reshape(shape)
    return joint


def p_value(models: tuple[EagerRunner, EagerRunner], num_samples: int, cut: Cut) -> float:
    counts = np.zeros((VOCAB,) * NUM_POSITIONS)
    for first_seed in range(0, num_samples, BATCH):
        np.add.at(counts, tuple(sample(models, first_seed, cut).T), 1)
    return judge(models[0], counts)


def judge(target: EagerRunner, counts: np.ndarray) -> float:
    """The p-value of so many samples of each text."""
    expected = expected_joint(target).ravel() * counts.sum()
    observed = counts.ravel()
    rare = expected < 5
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    observed = np.append(observed[~rare], observed[rare].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(expected) - 1))


def test_the_output_has_the_targets_distribution(models) -> None:
    assert p_value(models, NUM_SAMPLES, lambda draft: len(draft.token_ids)) > 1e-4


def test_cutting_a_draft_by_its_own_tokens_is_found_out(models) -> None:
    """Control: whoever drops a sampled token because it was unlikely changes the output."""

    def cherry_pick(draft: SessionDraft) -> int:
        for size, (token, source) in enumerate(zip(draft.token_ids, draft.sources, strict=True)):
            if source.weights[source.token_ids.index(token)] < WEIGHT_SUM / 4:
                return size
        return len(draft.token_ids)

    assert p_value(models, NUM_SAMPLES // 5, cherry_pick) < 1e-6
