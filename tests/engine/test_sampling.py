"""Filters, `coupled` sampling and verification, mixed batches, log-probabilities."""

import numpy as np
import pytest
import torch
from tests.engine.sampling_toys import (
    DraftStep,
    Loop,
    draft_by_sampling,
    draft_coupled,
    draft_greedily,
    generate_alone,
    joint_p_value,
    sampling_rows,
    toy_table,
)
from tests.products import covering
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.engine.sampling import (
    SamplingRows,
    VerifyBatch,
    VerifyResult,
    sample_coupled,
    token_logprobs,
    verify,
)
from penstock.engine.sampling.filters import filter_logits, filtered_probs


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn((num_rows, vocab_size), generator=generator)


def random_rows(num_rows: int, seed: int = 0) -> SamplingRows:
    """Greedy and sampled rows, with and without filters."""
    rng = np.random.default_rng(seed)
    return SamplingRows(
        temperature=rng.choice([0.0, 0.4, 1.0, 1.6], num_rows),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5], num_rows),
        top_k=rng.choice(np.array([0, 0, 5, 40]), num_rows),
        seed=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 7), (0.6, 20), (0.05, 3)])
def test_filters_agree_with_transformers(temperature: float, top_p: float, top_k: int) -> None:
    logits = random_logits(30, 200)
    expected = TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    probs = filtered_probs(logits, sampling_rows(30, temperature, top_p, top_k))
    torch.testing.assert_close(probs, expected.softmax(dim=-1), rtol=1e-4, atol=1e-7)


def test_ties_at_the_edge_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    kept = filter_logits(logits, sampling_rows(1, top_k=3)).isfinite()
    assert kept.tolist() == [[True, True, False, True, False, False]]
    flat = torch.zeros(1, 10)
    kept = filter_logits(flat, sampling_rows(1, top_p=0.35)).isfinite()
    assert kept[0].tolist() == [True] * 4 + [False] * 6
    greedy = filtered_probs(logits, sampling_rows(1, temperature=0.0))
    assert greedy.tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]]


def test_filters_leave_masked_tokens_masked_and_large_k_alone() -> None:
    logits = random_logits(4, 20)
    logits[:, 5:] = -torch.inf
    for rows in (sampling_rows(4, top_p=0.99), sampling_rows(4, top_k=10), sampling_rows(4)):
        assert (filtered_probs(logits, rows)[:, 5:] == 0).all()
    assert torch.equal(
        filter_logits(logits, sampling_rows(4, top_k=20)), filter_logits(logits, sampling_rows(4))
    )


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = random_logits(50, 300)
    rows = sampling_rows(50, temperature=1e-30)
    assert torch.equal(sample_coupled(logits, rows, np.arange(50)), logits.argmax(dim=-1))


@pytest.mark.parametrize(
    ("draft_step", "drafter_seed", "filters"),
    covering(
        [draft_coupled, draft_greedily, draft_by_sampling],
        [0, 1],
        [(0.0, 1.0, 0), (0.3, 1.0, 0), (1.0, 1.0, 0), (1.0, 0.8, 12), (2.5, 0.95, 0)],
        strength=1,
    ),
)
def test_coupled_output_is_the_same_with_and_without_speculation(
    draft_step: DraftStep, drafter_seed: int, filters: tuple[float, float, int]
) -> None:
    params = sampling_rows(200, *filters, first_seed=2**63)
    target = toy_table(40, seed=0)
    loop = Loop(
        target=target,
        drafter=toy_table(40, seed=drafter_seed),
        params=params,
        draft_params=params,
        ratio=False,
        draft_step=draft_step,
    )
    assert (loop.generate(30) == generate_alone(target, params, 30)).all()


def test_coupled_output_has_the_targets_distribution() -> None:
    params = sampling_rows(50_000, temperature=0.9, top_p=0.9)
    target = toy_table(6, seed=3)
    assert joint_p_value(generate_alone(target, params, 3), target, params) > 1e-3


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("vocab_size", [5, 400])
def test_shared_noise_is_accepted_at_least_as_often_as_promised(noise, vocab_size) -> None:
    """(1 - TV) / (1 + TV), less four standard errors."""
    num_rows = 8_000
    rows, positions = sampling_rows(num_rows), np.arange(num_rows)
    target = random_logits(1, vocab_size)
    drafter = target + noise * random_logits(1, vocab_size, seed=1) / 3.0
    total_variation = 0.5 * float((target.softmax(-1) - drafter.softmax(-1)).abs().sum())
    samples, drafts = (
        sample_coupled(logits.repeat(num_rows, 1), rows, positions) for logits in (target, drafter)
    )
    accepted = float((samples == drafts).float().mean())
    assert accepted > (1 - total_variation) / (1 + total_variation) - 2.0 / np.sqrt(num_rows)
    assert accepted < 1 - total_variation + 2.0 / np.sqrt(num_rows)


def mixed_batch(vocab_size: int, num_requests: int = 24) -> VerifyBatch:
    """Both modes, every kind of parameters, drafts of 0 to 5 tokens, good, bad and looked up."""
    rng = np.random.default_rng(0)
    num_draft = rng.integers(0, 6, num_requests)
    row_start = np.concatenate(([0], np.cumsum(num_draft + 1)))
    owner = np.repeat(np.arange(num_requests), num_draft)
    params = random_rows(num_requests)
    positions = rng.integers(1, 1000, num_requests)
    logits = random_logits(int(row_start[-1]), vocab_size)
    first = row_start[:-1] - np.arange(num_requests)
    row_of_draft = np.arange(owner.size) + owner
    draft_positions = positions[owner] + np.arange(owner.size) - first[owner]
    draft_logits = logits[row_of_draft] + 0.2 * random_logits(owner.size, vocab_size, seed=5)
    draft_params = params.select(owner)
    ratio = rng.random(num_requests) < 0.5
    sampled, probs = draft_by_sampling(draft_logits, draft_params, draft_positions, draft_positions)
    foreseen = sample_coupled(draft_logits, draft_params, draft_positions)
    point_mass = (rng.random(num_requests) < 0.3) | ~ratio
    return VerifyBatch(
        logits=logits,
        row_start=row_start,
        positions=positions,
        params=params,
        ratio=ratio,
        draft_tokens=np.where(ratio[owner], sampled.numpy(), foreseen.numpy()),
        draft_probs=probs,
        draft_prob_row=np.where(point_mass[owner], -1, np.arange(owner.size)),
    )


def assert_same_request(
    one: VerifyResult, request: int, other: VerifyResult, other_request: int
) -> None:
    assert one.tokens(request) == other.tokens(other_request)
    for name in ("num_accepted", "num_decided"):
        assert getattr(one, name)[request] == getattr(other, name)[other_request]
    drafts, others = (
        slice(*result.draft_start[i : i + 2])
        for result, i in ((one, request), (other, other_request))
    )
    for name in ("evidence", "evidence_all"):
        assert (getattr(one, name)[drafts] == getattr(other, name)[others]).all()


@pytest.mark.parametrize("vocab_size", [30, 4096])
def test_a_result_does_not_depend_on_the_rest_of_the_batch(vocab_size: int) -> None:
    batch = mixed_batch(vocab_size)
    together = verify(batch)
    assert len({*together.num_accepted.tolist()}) > 3
    for request in range(batch.num_requests):
        alone = verify(batch.select(np.array([request])))
        assert_same_request(together, request, alone, 0)
    rng = np.random.default_rng(1)
    for _ in range(5):
        chosen = np.flatnonzero(rng.random(batch.num_requests) < 0.5)
        part = verify(batch.select(chosen))
        for place, request in enumerate(chosen):
            assert_same_request(together, request, part, place)


def test_batches_may_be_empty_or_hold_no_drafts() -> None:
    batch = mixed_batch(30)
    nothing = verify(batch.select(np.array([], dtype=np.int64)))
    assert nothing.token_ids.size == nothing.num_accepted.size == 0
    assert nothing.token_start.tolist() == [0]
    undrafted = np.flatnonzero(batch.num_draft == 0)
    assert undrafted.size > 1
    result = verify(batch.select(undrafted))
    assert (result.num_accepted == 0).all()
    assert result.token_ids.size == undrafted.size


def test_coupled_emits_accepted_drafts_then_the_targets_own_token() -> None:
    logits = random_logits(4, 50)
    rows = sampling_rows(1)
    samples = sample_coupled(logits, rows.select(np.zeros(4, dtype=np.int64)), 9 + np.arange(4))
    own = samples.tolist()

    def outcome(draft: list[int]) -> tuple[list[int], int, int, float]:
        result = verify(
            VerifyBatch(
                logits=logits[: len(draft) + 1],
                row_start=np.array([0, len(draft) + 1]),
                positions=np.array([9]),
                params=rows,
                ratio=np.array([False]),
                draft_tokens=np.array(draft, dtype=np.int64),
                draft_probs=None,
                draft_prob_row=np.full(len(draft), -1),
            )
        )
        return (
            result.tokens(0),
            int(result.num_accepted[0]),
            int(result.num_decided[0]),
            float(result.evidence.sum()),
        )

    wrong = (own[1] + 1) % 50
    assert outcome([]) == (own[:1], 0, 0, 0.0)
    assert outcome(own[:3]) == (own, 3, 3, 3.0)
    assert outcome([own[0], wrong, own[2]]) == (own[:2], 1, 2, 1.0)


def broken(batch: VerifyBatch, **changes: object) -> dict[str, object]:
    fields = {name: getattr(batch, name) for name in VerifyBatch.__dataclass_fields__}
    return fields | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_start": np.array([0, 2, 2])}, "strictly increasing"),
        ({"row_start": np.array([0, 2])}, "2|3 strictly increasing offsets"),
        ({"row_start": np.array([0, 2, 5])}, "from 0 to the number of logits rows, 4"),
        ({"draft_tokens": np.array([1])}, "draft_tokens must have one entry a draft token, 2"),
        ({"draft_prob_row": np.array([0, 1, 1])}, "draft_prob_row must have one entry"),
        ({"draft_tokens": np.array([1, 20])}, "in the vocabulary, 0 to 19"),
        ({"draft_tokens": np.array([-1, 2])}, "in the vocabulary, 0 to 19"),
        ({"draft_prob_row": np.array([0, 2])}, "one of the 2 rows"),
        ({"draft_probs": None}, "one of the 0 rows"),
    ],
)
def test_a_malformed_batch_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    good = VerifyBatch(
        logits=random_logits(4, 20),
        row_start=np.array([0, 2, 4]),
        positions=np.array([3, 8]),
        params=sampling_rows(2),
        ratio=np.array([True, True]),
        draft_tokens=np.array([1, 2]),
        draft_probs=random_logits(2, 20).softmax(dim=-1),
        draft_prob_row=np.array([0, 1]),
    )
    with pytest.raises(ValueError, match=message) as refused:
        VerifyBatch(**broken(good, **changes))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_token_logprobs() -> None:
    logits = random_logits(3, 20)
    tokens = [4, 0, 19]
    found = token_logprobs(logits, tokens, top_n=5)
    expected = logits.log_softmax(dim=-1)
    assert [t.logprob for t in found] == expected[torch.arange(3), torch.tensor(tokens)].tolist()
    assert [t.top[0][0] for t in found] == logits.argmax(dim=-1).tolist()
    for values in ([value for _, value in t.top] for t in found):
        assert values == sorted(values, reverse=True)
        assert len(values) == 5
    assert [t.top for t in token_logprobs(logits, tokens, top_n=0)] == [()] * 3
