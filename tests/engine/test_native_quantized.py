"""Quantised weights in the native kernels: what the products are, and the same bits anyhow."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.engine.random_blocks import SCALES, random_matrix
from tests.engine.small_models import Paging, in_pieces
from tests.products import first_fast

from penstock.engine.eager import EagerRunner
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.quantized import QuantizedMatrix
from penstock.engine.models.variant import Experts
from penstock.engine.native.packing import Weight
from penstock.engine.native.runner import NativeRunner

KINDS = tuple(SCALES)
SOME = first_fast(["mixed", "Q8_0", "Q4_1", "Q6_K", "IQ4_NL", "INT8_ROWS", *KINDS[4:]], 6)
CONFIG = DecoderConfig(
    vocab_size=97,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
NUM_BLOCKS, BLOCK_SIZE = 100, 8


def tokens(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(CONFIG.vocab_size, size=count)


def model(kinds: dict[str, tuple[str, ...]], seed: int = 0) -> dict[str, Weight]:
    """Random weights of CONFIG. kinds: of each matrix; one for all its rows, or one for each part.

    Sizes are such that every layer matters to the logits.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    c = CONFIG
    shapes = {
        "qkv": ((c.q_size, c.kv_size, c.kv_size), c.hidden_size),
        "o": ((c.hidden_size,), c.q_size),
        "gate_up": ((c.intermediate_size,) * 2, c.hidden_size),
        "down": ((c.hidden_size,), c.intermediate_size),
        "embed_tokens": ((c.vocab_size,), c.hidden_size),
    }

    def matrix(name: str) -> Weight:
        parts, columns = shapes[name]
        of_parts = kinds[name]
        rows = [sum(parts)] if len(of_parts) == 1 else parts
        made = [
            random_matrix(kind, n, columns, rng, 3 * columns**-0.5)
            for kind, n in zip(of_parts, rows, strict=True)
        ]
        return made[0] if len(made) == 1 else tuple(made)

    weights: dict[str, Weight] = {"embed_tokens": matrix("embed_tokens")}
    for i in range(c.num_layers):
        for name in ("qkv", "o", "gate_up", "down"):
            weights[f"layers.{i}.{name}"] = matrix(name)
        for name in ("input_norm", "post_norm"):
            weights[f"layers.{i}.{name}"] = torch.empty(c.hidden_size).uniform_(0.5, 1.5)
    weights["norm"] = torch.ones(c.hidden_size)
    return weights


def of_kind(kind: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(("qkv", "o", "gate_up", "down", "embed_tokens"), (kind,))


# As a Q4_K_M file has them, and a gate and up that share neither format nor arithmetic.
MIXED = {
    "qkv": ("Q4_K", "Q4_K", "Q6_K"),
    "o": ("Q5_0",),
    "gate_up": ("Q4_K", "Q8_0"),
    "down": ("Q6_K",),
    "embed_tokens": ("Q8_0",),
}


def native(weights: dict[str, Weight], threads: int = 1, **changes: int) -> NativeRunner:
    config = replace(CONFIG, **changes)
    return NativeRunner(config, weights, torch.float32, NUM_BLOCKS, BLOCK_SIZE, threads)


def widened(weight: Weight) -> torch.Tensor:
    if isinstance(weight, tuple):
        return torch.cat([widened(part) for part in weight])
    return weight.dequantize() if isinstance(weight, QuantizedMatrix) else weight


def paging() -> Paging:
    return Paging(NUM_BLOCKS, BLOCK_SIZE)


def only_head(head: QuantizedMatrix, embedding: torch.Tensor) -> NativeRunner:
    """A model whose logits are its head times the normed embedding: its layer adds nothing."""
    weights = model(of_kind("Q8_0"))
    weights |= {"embed_tokens": embedding, "lm_head": head}
    weights |= {f"layers.0.{name}": torch.zeros(256, n) for name, n in (("o", 256), ("down", 512))}
    return native(weights, num_layers=1, rms_norm_eps=1e-30)


def rounded(x: npt.NDArray[np.float32], block: int) -> npt.NDArray[np.float64]:
    """Activations as the kernels see them: int8 in blocks, with a scale each."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / largest))
    return (codes.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_rounded_activations(kind: str) -> None:
    rng = np.random.default_rng(1)
    head = random_matrix(kind, 97, 256, rng)
    embedding = torch.from_numpy(rng.standard_normal((97, 256)).astype(np.float32))
    x = (embedding / embedding.square().mean(-1, keepdim=True).sqrt()).numpy()
    ids = np.arange(97)
    logits = only_head(head, embedding).forward(paging().batch(("a", ids, 0, 97))).numpy()
    weights = head.dequantize().double().numpy()
    shared = x.shape[1] if kind.endswith(("K", "XS", "ROWS")) else 32
    seen = rounded(x, shared)
    exact = seen @ weights.T
    # An integer sum is exact; over blocks and terms of a block float32 rounds, by 2^-24 of the
    # terms' sizes each time.
    terms = np.abs(seen) @ np.abs(weights).T
    # A minimum is as large as what it is taken from, which the weight itself does not show.
    terms += np.abs(seen).sum(-1, keepdims=True) * np.abs(weights).max()
    # A norm that rounds the other way moves an activation to the next code now and then.
    close = np.abs(logits - exact) < 40 * 2.0**-24 * terms
    assert close.mean() > 0.9
    steps = np.abs(x).max(-1, keepdims=True) / 127
    assert (
        np.abs(logits - x.astype(np.float64) @ weights.T) < steps * np.abs(weights).sum(-1)
    ).all()
    # Negative control: other activations, one step of the scale away, are not within the bound.
    wrong = np.where(rng.random(x.shape) < 0.5, seen, seen + steps) @ weights.T
    assert (np.abs(logits - wrong) < 40 * 2.0**-24 * terms).mean() < 0.1


@pytest.mark.parametrize("kind", SOME)
def test_near_the_dequantised_weights(kind: str) -> None:
    kinds = MIXED if kind == "mixed" else of_kind(kind)
    weights, ids = model(kinds), tokens(60)
    batch = paging().batch(("a", ids, 0, 60))
    logits = native(weights).forward(batch)

    def expected(seed: int, *changed: str) -> torch.Tensor:
        plain = {name: widened(weight) for name, weight in weights.items()}
        plain |= {name: widened(model(kinds, seed)[name]) for name in changed}
        eager = EagerRunner(CONFIG, plain, torch.device("cpu"), NUM_BLOCKS, BLOCK_SIZE)
        return eager.forward(batch)

    def error(other: torch.Tensor) -> float:
        return float((logits - other).abs().mean() / other.std())

    # Rounding moves an activation by 0.6% of their size at most on average (1 / 127 / sqrt(12) of
    # the block's largest), and eight matrices lie in a row.
    near = error(expected(0))
    assert near < 0.05
    # Negative control: any one matrix of another model is seen.
    for name in ("qkv", "o", "gate_up", "down"):
        assert error(expected(1, f"layers.1.{name}")) > 2 * near, name


@pytest.mark.parametrize("kind", SOME)
def test_logits_do_not_depend_on_the_batch(kind: str) -> None:
    weights = model(MIXED if kind == "mixed" else of_kind(kind))
    lengths = zip("abcd", [150, 40, 7, 1], strict=True)
    ids = {name: tokens(length, seed=length) for name, length in lengths}
    alone = {
        name: native(weights).forward(paging().batch((name, text, 0, len(text))))
        for name, text in ids.items()
    }
    for seed in range(3):
        pieces = in_pieces(native(weights, threads=1 + seed % 2), ids, seed)
        for name in ids:
            assert torch.equal(pieces[name], alone[name]), (seed, name)
    together = {str(i): tokens(5 + i, seed=i) for i in range(32)}
    spans = [(name, text, 0, len(text)) for name, text in together.items()]
    logits = native(weights, threads=2).forward(paging().batch(*spans))
    for (name, text, *_), rows in zip(spans, logits.split([len(s[1]) for s in spans]), strict=True):
        single = native(weights).forward(paging().batch((name, text, 0, len(text))))
        assert torch.equal(rows, single)


def of_experts(kinds: tuple[str, ...], count: int) -> tuple[dict[str, Weight], Experts]:
    """A model of CONFIG with experts of its MLP's size, one of them shared.

    kinds: of gate, up and down."""
    rng, c = np.random.default_rng(3), CONFIG
    sizes = [(c.intermediate_size, c.hidden_size)] * 2 + [(c.hidden_size, c.intermediate_size)]
    weights = model(of_kind("Q8_0"))
    for i in range(c.num_layers):
        gates, ups, downs = (
            [random_matrix(kind, *size, rng, 3 * size[1] ** -0.5) for _ in range(count)]
            for kind, size in zip(kinds, sizes, strict=True)
        )
        pairs = zip(gates, ups, strict=True)
        weights[f"layers.{i}.gate_up"] = tuple(matrix for pair in pairs for matrix in pair)
        weights[f"layers.{i}.down"] = tuple(downs)
        weights[f"layers.{i}.router"] = torch.randn(count + 1, c.hidden_size) * 0.1
        shared = [
            random_matrix(k, *s, rng, s[1] ** -0.5) for k, s in zip(kinds, sizes, strict=True)
        ]
        weights[f"layers.{i}.shared_gate_up"] = tuple(shared[:2])
        weights[f"layers.{i}.shared_down"] = shared[2]
    shape = {"shared_size": c.intermediate_size, "gates_shared": True}
    return weights, Experts(count, 2, norm_topk_prob=True, **shape)


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q8_0", "MXFP4")])
def test_experts(kinds: tuple[str, ...]) -> None:
    """As the eager decoder's, and the same bits in any batch. An expert of 250 rows has chunks."""
    weights, experts = of_experts(kinds, 3)
    config = replace(CONFIG, variant=replace(CONFIG.variant, experts=experts))

    def runner(threads: int = 1) -> NativeRunner:
        return NativeRunner(config, weights, torch.float32, NUM_BLOCKS, BLOCK_SIZE, threads)

    ids = {name: tokens(length, seed=length) for name, length in (("a", 250), ("b", 9), ("c", 1))}
    alone = {
        name: runner().forward(paging().batch((name, text, 0, len(text))))
        for name, text in ids.items()
    }
    plain = {name: widened(weight) for name, weight in weights.items()}
    for name, matrix in plain.items():
        if name.endswith((".gate_up", ".down")):
            plain[name] = matrix.unflatten(0, (experts.count, -1))
    eager = EagerRunner(config, plain, torch.device("cpu"), NUM_BLOCKS, BLOCK_SIZE)
    expected = eager.forward(paging().batch(("a", ids["a"], 0, 250)))
    error = (alone["a"] - expected).abs().mean() / expected.std()
    assert error < 0.1
    for seed in range(3):
        pieces = in_pieces(runner(1 + seed), ids, seed)
        for name in ids:
            assert torch.equal(pieces[name], alone[name]), (seed, name)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_no_numbers(kind: str) -> None:
    """A row with NaN or infinity is all NaN and changes no other; huge and tiny ones count."""
    rng = np.random.default_rng(2)
    head = random_matrix(kind, 97, 256, rng)
    embedding = torch.from_numpy(rng.standard_normal((97, 256)).astype(np.float32))
    batch = paging().batch(*((str(i), np.array([i]), 0, 1) for i in range(6)))
    clean = only_head(head, embedding).forward(batch)
    embedding[1, 7], embedding[2, 100] = torch.nan, torch.inf
    embedding[3] *= 1e12
    embedding[4] *= 1e-12
    embedding[5] = 0
    logits = only_head(head, embedding).forward(batch)
    assert torch.equal(logits[0], clean[0])
    assert logits[1].isnan().all()
    assert logits[2].isnan().all()
    torch.testing.assert_close(logits[3:5], clean[3:5], rtol=0.02, atol=0.02)
    assert (logits[5] == 0).all()
