"""`ratio` verification is exact, and the test that says so rejects what is not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine.sampling_toys import (
    MAX_DRAFT,
    Drafts,
    DraftStep,
    Loop,
    draft_by_sampling,
    draft_greedily,
    joint_p_value,
    sampling_rows,
    toy_table,
)

from penstock.engine.sampling import SamplingRows, VerifyBatch, VerifyResult, sample_coupled, verify
from penstock.engine.sampling.filters import filtered_probs
from penstock.engine.sampling.params import FloatArray, IntArray

NUM_SAMPLES = 50_000
VOCAB_SIZE = 6
FORBIDDEN = (3, 5)
EXACT = 1e-3  # p-value above which an exact sampler passes; seeds are fixed
REJECTED = 1e-9  # p-value below which a broken one is caught


def make_loop(
    draft_step: DraftStep = draft_by_sampling,
    drafter_seed: int = 1,
    draft_temperature: float | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Loop:
    params = sampling_rows(NUM_SAMPLES, temperature, top_p, top_k)
    return Loop(
        target=toy_table(VOCAB_SIZE, seed=0),
        drafter=toy_table(VOCAB_SIZE, seed=drafter_seed),
        params=params,
        draft_params=params
        if draft_temperature is None
        else sampling_rows(NUM_SAMPLES, draft_temperature),
        ratio=True,
        draft_step=draft_step,
    )


def p_value(loop: Loop) -> float:
    return joint_p_value(loop.generate(3), loop.target, loop.params)


def close_drafter(loop: Loop) -> Loop:
    return replace(loop, drafter=loop.target + 0.3 * loop.drafter)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(close_drafter(make_loop(drafter_seed=2)), id="good drafter"),
        pytest.param(make_loop(drafter_seed=0), id="the target as drafter"),
        pytest.param(make_loop(temperature=1.7, draft_temperature=0.5), id="other temperature"),
        pytest.param(make_loop(), id="unrelated drafter", marks=pytest.mark.slow),
        pytest.param(make_loop(temperature=0.6), id="temperature 0.6", marks=pytest.mark.slow),
        pytest.param(make_loop(top_p=0.8), id="top-p", marks=pytest.mark.slow),
        pytest.param(make_loop(top_k=3), id="top-k", marks=pytest.mark.slow),
        pytest.param(make_loop(top_p=0.9, top_k=4, temperature=1.3), id="top-p and top-k"),
        pytest.param(make_loop(top_k=2, draft_temperature=1.0), id="unfiltered drafter"),
        pytest.param(make_loop(draft_greedily), id="greedy drafter"),
        pytest.param(
            make_loop(draft_greedily, drafter_seed=0, temperature=0.7),
            id="greedy self",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_joint_of_three_positions_is_the_targets(loop: Loop) -> None:
    assert p_value(loop) > EXACT


def bonus_in_place_of_recovered(batch: VerifyBatch) -> VerifyResult:
    result = verify(batch)
    row = batch.row_start[:-1] + result.num_accepted
    bonus = sample_coupled(
        batch.logits[row], batch.params, batch.positions + result.num_accepted
    ).numpy()
    result.token_ids[result.token_start[1:] - 1] = bonus
    return result


def lengths_before(cut: np.ndarray, lengths: IntArray) -> IntArray:
    """Draft lengths up to the first cut position; ``cut`` is [n, MAX_DRAFT]."""
    first = np.where(cut.any(axis=1), cut.argmax(axis=1), MAX_DRAFT)
    return np.minimum(lengths, first)


def drop_by_own_probability(drafts: Drafts, lengths: IntArray) -> IntArray:
    own = drafts.probs.gather(-1, torch.from_numpy(drafts.tokens)[..., None])[..., 0].numpy()
    return lengths_before(own < 0.25, lengths)


def cut_by_grammar(drafts: Drafts, lengths: IntArray) -> IntArray:
    return lengths_before(np.isin(drafts.tokens, FORBIDDEN), lengths)


def masked(table: torch.Tensor) -> torch.Tensor:
    allowed = table.clone()
    allowed[..., list(FORBIDDEN)] = -torch.inf
    return allowed


def test_bonus_in_place_of_recovered_is_caught() -> None:
    loop = close_drafter(make_loop())
    assert p_value(loop) > EXACT
    assert p_value(replace(loop, verify=bonus_in_place_of_recovered)) < REJECTED


def test_dropping_a_sampled_token_by_its_own_probability_is_caught() -> None:
    loop = close_drafter(make_loop())
    assert p_value(replace(loop, shorten=drop_by_own_probability)) < REJECTED


def none_where_the_last_was_bad(active: IntArray, emitted: IntArray, share: FloatArray) -> IntArray:
    """Allocation by evidence over all positions, as `goodspeed` does it, only more abruptly."""
    return np.where(share > 0.5, 2, 0)


def draft_with_old_noise(
    logits: torch.Tensor, rows: SamplingRows, positions: IntArray, starts: IntArray
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A position has the same noise in every draft that reaches it."""
    return draft_by_sampling(logits, rows, positions, np.zeros_like(starts))


def without_context(table: torch.Tensor) -> torch.Tensor:
    """The same distribution behind every text, so that the old noise gives the old token again."""
    return table[0, 0].expand_as(table).contiguous()


@pytest.mark.slow
def test_lengths_by_evidence_behind_a_rejection_are_exact_with_fresh_noise_only() -> None:
    """With old noise the next draft would be made just where its tokens are good."""
    plain = make_loop()
    loop = replace(
        plain,
        target=without_context(plain.target),
        drafter=without_context(plain.drafter),
        allocate=none_where_the_last_was_bad,
    )
    assert p_value(loop) > EXACT
    assert p_value(replace(loop, draft_step=draft_with_old_noise)) < REJECTED
    even = replace(loop, allocate=Loop.allocate)
    assert p_value(replace(even, draft_step=draft_with_old_noise)) > EXACT, "lengths betray nothing"


def test_cutting_by_a_grammar_after_sampling_is_caught() -> None:
    plain = make_loop()
    loop = replace(plain, target=masked(plain.target))
    assert p_value(loop) > EXACT, "probability 0 at the target and a recovered token is exact"
    assert p_value(replace(loop, drafter=masked(loop.drafter))) > EXACT, "so is a masked drafter"
    assert p_value(replace(loop, shorten=cut_by_grammar)) < REJECTED


def one_request(
    logits: torch.Tensor,
    draft_tokens: list[int],
    draft_probs: torch.Tensor | None,
    num_copies: int,
    temperature: float = 1.0,
) -> VerifyBatch:
    """``num_copies`` requests with one draft each, alike but for their seeds."""
    num_rows = logits.shape[0]
    num_drafts = num_copies * len(draft_tokens)
    own_rows = np.tile(np.arange(len(draft_tokens)), num_copies)
    return VerifyBatch(
        logits=logits.repeat(num_copies, 1),
        row_start=np.arange(num_copies + 1) * num_rows,
        positions=np.full(num_copies, 7),
        params=sampling_rows(num_copies, temperature),
        ratio=np.ones(num_copies, dtype=np.bool_),
        draft_tokens=np.tile(np.array(draft_tokens, dtype=np.int64), num_copies),
        draft_probs=draft_probs,
        draft_prob_row=np.full(num_drafts, -1) if draft_probs is None else own_rows,
    )


def test_evidence_is_the_overlap_up_to_the_first_rejection() -> None:
    target = toy_table(VOCAB_SIZE, 0)[0, :3]
    draft_probs = torch.softmax(toy_table(VOCAB_SIZE, 1)[0, :2], dim=-1)
    ratio = target[:2].softmax(dim=-1) / draft_probs
    often_rejected = (ratio - 0.5).abs().argmin(dim=-1).tolist()
    batch = one_request(target, often_rejected, draft_probs, num_copies=500)
    overlap = torch.minimum(target[:2].softmax(-1), draft_probs).sum(-1).double().numpy()
    result = verify(batch)
    assert set(result.num_accepted.tolist()) == {0, 1, 2}
    assert (result.num_decided == np.minimum(result.num_accepted + 1, 2)).all()
    np.testing.assert_allclose(
        result.evidence.reshape(500, 2),
        np.where(np.arange(2) < result.num_decided[:, None], overlap, 0.0),
        rtol=1e-5,
    )


def test_evidence_over_all_positions_is_that_of_equation_3() -> None:
    target = toy_table(VOCAB_SIZE, 0)[0, :4]
    draft_probs = torch.softmax(toy_table(VOCAB_SIZE, 1)[0, :3], dim=-1)
    tokens = [0, 3, 5]
    result = verify(one_request(target, tokens, draft_probs, num_copies=200))
    assert set(result.num_accepted.tolist()) > {0}, "some end at their first token"
    own = target[:3].softmax(-1)[range(3), tokens] / draft_probs[range(3), tokens]
    expected = np.tile(own.clamp(max=1).numpy(), 200)
    np.testing.assert_allclose(result.evidence_all, expected, rtol=1e-5)


def test_coupled_evidence_over_all_positions_counts_what_equals_the_samples() -> None:
    """Also behind the first draft token that does not."""
    target = toy_table(VOCAB_SIZE, 0)[0, :4]
    batch = one_request(target, [0, 3, 5], None, num_copies=400)
    batch = replace(batch, ratio=np.zeros(400, dtype=np.bool_))
    result = verify(batch)
    rows = batch.params.select(batch.request_of_row)
    samples = sample_coupled(batch.logits, rows, batch.row_positions).numpy().reshape(400, 4)
    equal = samples[:, :3] == [0, 3, 5]
    np.testing.assert_array_equal(result.evidence_all.reshape(400, 3), equal)
    assert (equal.sum(axis=1) > result.num_accepted).any()


def test_acceptance_rate_is_the_overlap() -> None:
    """Over drafts that are sampled as reported, P(accepted) = 1 - TV."""
    loop = make_loop()
    rows = loop.params
    positions = np.full(NUM_SAMPLES, 7)
    logits = loop.drafter[0, 1].expand(NUM_SAMPLES, -1).contiguous()
    tokens, draft_probs = draft_by_sampling(logits, rows, positions, positions)
    batch = VerifyBatch(
        logits=loop.target[0, :2].repeat(NUM_SAMPLES, 1),
        row_start=2 * np.arange(NUM_SAMPLES + 1),
        positions=positions,
        params=rows,
        ratio=np.ones(NUM_SAMPLES, dtype=np.bool_),
        draft_tokens=tokens.numpy(),
        draft_probs=draft_probs,
        draft_prob_row=np.arange(NUM_SAMPLES),
    )
    result = verify(batch)
    assert result.num_accepted.mean() == pytest.approx(result.evidence.mean(), abs=0.007)


def test_identical_distributions_accept_everything_and_never_divide_by_nothing() -> None:
    logits = toy_table(VOCAB_SIZE, 0)[0, :3]
    draft_probs = filtered_probs(logits, sampling_rows(3))[:2].clone()
    result = verify(one_request(logits, [1, 0], draft_probs, num_copies=300))
    assert (result.num_accepted == 2).all()


def test_a_vanished_residual_falls_back_to_the_target() -> None:
    """A draft whose reported probabilities exceed the target's everywhere leaves no residual."""
    logits = toy_table(VOCAB_SIZE, 0)[0, :2]
    draft_probs = 2.0 * logits[:1].softmax(dim=-1)
    result = verify(one_request(logits, [1], draft_probs, num_copies=4000))
    rejected = result.num_accepted == 0
    recovered = result.token_ids[result.token_start[:-1][rejected]]
    frequency = np.bincount(recovered, minlength=VOCAB_SIZE) / rejected.sum()
    assert rejected.mean() == pytest.approx(0.5, abs=0.03)
    np.testing.assert_allclose(frequency, logits[0].softmax(dim=-1).numpy(), atol=0.04)


def test_a_token_that_its_drafter_calls_impossible_is_never_accepted() -> None:
    logits = toy_table(VOCAB_SIZE, 0)[0, :2]
    draft_probs = torch.zeros(1, VOCAB_SIZE)
    draft_probs[0, 2] = 1.0
    result = verify(one_request(logits, [1], draft_probs, num_copies=200))
    assert (result.num_accepted == 0).all()


def test_greedy_ignores_draft_probabilities() -> None:
    logits = toy_table(VOCAB_SIZE, 0)[0, :4]
    best = logits.argmax(dim=-1).tolist()
    draft_probs = torch.full((3, VOCAB_SIZE), 1.0 / VOCAB_SIZE)
    right = verify(one_request(logits, best[:3], draft_probs, 1, temperature=0.0))
    assert right.tokens(0) == best
    wrong = [best[0], (best[1] + 1) % VOCAB_SIZE, best[2]]
    cut = verify(one_request(logits, wrong, draft_probs, 1, temperature=0.0))
    assert cut.tokens(0) == best[:2]
    assert cut.num_accepted.tolist() == [1]
