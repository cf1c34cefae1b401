"""The noise is the same everywhere, and looks like noise."""

import numpy as np
import pytest
import torch
from scipy import stats

from penstock.engine.sampling.noise import (
    Salt,
    _gumbel_in_place,
    gumbel_noise,
    row_keys,
    token_hash,
    token_hash_of_words,
)
from penstock.engine.sampling.noise import uniform as uniform_draws

WORD = 2**32
GOLDEN_64 = 0x9E3779B97F4A7C15
NUM_ROWS = 4096
VOCAB_SIZE = 256
CHANCE = 1e-4  # for each of the several dozen p-values below; keys are fixed


def keys_of(seed: int, salt: Salt = Salt.TARGET, num_rows: int = NUM_ROWS) -> np.ndarray:
    return row_keys(np.full(num_rows, seed, dtype=np.uint64), np.arange(num_rows), salt)


def mix64(z: int) -> int:
    mask = 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def reference_hash(seed: int, position: int, salt: int, token: int) -> int:
    """The head of the module again, in Python's unbounded integers."""
    mask = 2**64 - 1
    key = mix64((mix64((seed + GOLDEN_64) & mask) + GOLDEN_64 * (4 * position + salt + 1)) & mask)
    low, high = key % WORD, key >> 32
    x = (token * 0x9E3779B1 + low) % WORD
    x = ((x ^ (x >> 16)) * 0x21F0AAAD + high) % WORD
    x = (x ^ (x >> 15)) * 0x735A2D97 % WORD
    return x ^ (x >> 16)


def test_hash_equals_its_definition() -> None:
    seeds = np.array([0, 1, 12345, 2**63 + 17, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 1, 77, 4095, 2**31])
    for salt in Salt:
        hashed = token_hash(row_keys(seeds, positions, salt), 70)
        expected = [
            [reference_hash(int(s), int(p), salt, token) for token in range(70)]
            for s, p in zip(seeds, positions, strict=True)
        ]
        assert hashed.tolist() == expected


def test_pinned_values() -> None:
    """A change of the noise changes every seeded output: it must be seen."""
    key = row_keys(np.array([42], dtype=np.uint64), np.array([7]), Salt.TARGET)
    assert token_hash(key, 4).tolist() == [[3755663603, 3746823324, 2991759145, 3009440527]]


def test_torch_computes_the_same_integers() -> None:
    keys = keys_of(3, num_rows=64)
    on_torch = token_hash_of_words(torch.from_numpy(keys.view(np.int32)), 5000)
    assert (on_torch.numpy() == token_hash(keys, 5000)).all()
    noise = on_torch.to(torch.float32)
    _gumbel_in_place(noise)
    assert torch.equal(noise, gumbel_noise(keys, 5000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_computes_the_same_integers_and_nearly_the_same_noise() -> None:
    keys = keys_of(3, num_rows=64)
    device = torch.device("cuda")
    words = torch.from_numpy(keys.view(np.int32)).to(device)
    assert (token_hash_of_words(words, 5000).cpu().numpy() == token_hash(keys, 5000)).all()
    noise = gumbel_noise(keys, 5000, device).cpu()
    torch.testing.assert_close(noise, gumbel_noise(keys, 5000), rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_the_others() -> None:
    keys = keys_of(5, num_rows=40)
    together = gumbel_noise(keys, 4096)
    alone = torch.cat([gumbel_noise(keys[row : row + 1], 4096) for row in range(40)])
    assert torch.equal(together, alone)


def test_salts_may_differ_by_row() -> None:
    seeds, positions = np.full(4, 9, dtype=np.uint64), np.full(4, 3)
    mixed = row_keys(seeds, positions, np.arange(4))
    single = [row_keys(seeds[:1], positions[:1], salt)[0] for salt in Salt]
    assert (mixed == np.stack(single)).all()


@pytest.mark.parametrize("shift", [0, 4, 8, 12, 16, 20, 24])
def test_every_byte_of_the_hash_is_uniform(shift: int) -> None:
    byte = (token_hash(keys_of(11), VOCAB_SIZE) >> np.uint32(shift)) & np.uint32(255)
    assert stats.chisquare(np.bincount(byte.ravel(), minlength=256)).pvalue > CHANCE


def pair_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Chi-square on a 64 by 64 table of the high bits of two hashes that should be independent."""
    cell = (first >> np.uint32(26)).astype(np.int64) * 64 + (second >> np.uint32(26))
    return float(stats.chisquare(np.bincount(cell.ravel(), minlength=64 * 64)).pvalue)


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 64, 128])
def test_neighbouring_tokens_are_independent(distance: int) -> None:
    hashed = token_hash(keys_of(1), VOCAB_SIZE)
    assert pair_p_value(hashed[:, :-distance], hashed[:, distance:]) > CHANCE


KEY_PAIRS = {
    **{f"positions {n} apart": (keys_of(2)[:-n], keys_of(2)[n:]) for n in (1, 2, 16, 1024)},
    **{f"seeds {n} apart": (keys_of(7), keys_of(7 + n)) for n in (1, 2**31, 2**32, 2**63)},
    **{
        f"{salt.name} and TARGET": (keys_of(4), keys_of(4, salt))
        for salt in (Salt.DRAFT, Salt.ACCEPT, Salt.RESIDUAL)
    },
}


@pytest.mark.parametrize("keys", KEY_PAIRS.values(), ids=KEY_PAIRS)
def test_neighbouring_keys_are_independent(keys: tuple[np.ndarray, np.ndarray]) -> None:
    assert pair_p_value(*(token_hash(each, VOCAB_SIZE) for each in keys)) > CHANCE


def test_gumbel_moments_and_shape() -> None:
    noise = gumbel_noise(keys_of(21), VOCAB_SIZE).double().numpy().ravel()
    deviation = np.pi / np.sqrt(6.0)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=4 * deviation / np.sqrt(noise.size))
    assert noise.var() == pytest.approx(deviation**2, rel=0.01)
    assert stats.skew(noise) == pytest.approx(1.13955, abs=0.03)
    assert stats.kstest(noise[::16], "gumbel_r").pvalue > CHANCE
    assert np.isfinite(noise).all()


def test_the_extremes_of_the_hash_stay_finite() -> None:
    edges = torch.tensor([0.0, 1.0, 2.0**31, 2.0**32 - 256, 2.0**32], dtype=torch.float32)
    _gumbel_in_place(edges)
    assert torch.isfinite(edges).all()
    assert (edges.diff() <= 0).all()
    assert float(edges[0]) == pytest.approx(33 * np.log(2.0), rel=1e-6)


def test_argmax_frequencies_are_the_softmax() -> None:
    num_rows = 200_000
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(12, generator=generator)
    winners = (logits + gumbel_noise(keys_of(31, num_rows=num_rows), 12)).argmax(dim=-1)
    expected = logits.double().softmax(dim=-1).numpy() * num_rows
    observed = np.bincount(winners.numpy(), minlength=12)
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > CHANCE


def test_uniforms_are_uniform_and_inside_the_unit_interval() -> None:
    draws = uniform_draws(keys_of(41, Salt.ACCEPT, num_rows=100_000))
    assert draws.dtype == np.float32
    assert draws.min() > 0.0
    assert draws.max() < 1.0
    assert stats.kstest(draws, "uniform").pvalue > CHANCE
