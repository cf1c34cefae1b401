"""Drafts on the wire: bytes a draft token, and what truncation costs in acceptance.

    python -m lab.bench.wire [--quick] [--json]

Bytes are of real messages (`penstock.v1.Up` with a `Draft`) at a vocabulary of 151,936, whole: ids
of request and round, prefix digest and all. gRPC and HTTP/2 add 14 bytes a message. Acceptance is
measured at temperature 1 in two ways:

- the bundled target and two bundled drafters on the bundled prompts of all domains, along the
  target's own samples (4,096 tokens);
- made-up distributions over 151,936 tokens: Zipf-Mandelbrot with a random exponent and noise on the
  logits, the drafter's being the target's with more noise. Top-32 depends on how flat they are, so
  there are three kinds, and the table says how flat.

`ratio` acceptance is the mean of the sum of min(target, draft), the draft truncated and rounded to
integer weights as it is sent; `coupled` is how often drafter and target sample the same token with
the same noise. Intervals are of the loss against whole distributions, at 95%.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from transformers import LlamaForCausalLM

from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, ResultTable, parser, table, tell
from lab.zoo.evidence import answer_logits, target_texts
from lab.zoo.tokenizer import load_tokenizer
from penstock.engine.sampling.noise import Salt, gumbel_noise, row_keys
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import (
    WEIGHT_SUM,
    PrefixDigest,
    encode_weights,
    truncate,
    weight_rows,
)
from penstock.zoo.registry import DOMAINS, load_prompts, model_path

VOCAB = 151_936
BARS = {"coupled": 8, "top-32": 200, "top-64": 400}
DRAFT_TOKENS = (4, 8)
FRAMING_BYTES = 14
"""gRPC's prefix (5) and the header of an HTTP/2 DATA frame (9)."""

TARGET, DRAFTERS = "target-large", ("draft-base", "draft-tiny")
SEEDS_PER_CONTEXT = 24

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """Made-up distributions: exponents uniform in `exponents`; sd of the drafter's own noise."""

    name: str
    exponents: tuple[float, float]
    drafter_noise: float


KINDS = (
    Kind("peaked", (2.5, 5.0), 0.5),
    Kind("mixed", (1.5, 5.0), 0.5),
    Kind("flat", (1.2, 2.0), 0.5),
)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one drafter on one kind of text. Losses are against `full`; `interval` of top-32's."""

    what: str
    positions: int
    entropy: float
    outside_32: float
    full: float
    top_64: float
    top_32: float
    interval_32: float
    coupled: float


# --- distributions ------------------------------------------------------------------------------


def made_up(kind: Kind, contexts: int) -> Iterator[tuple[Floats, Floats]]:
    """Logits [VOCAB] of target and drafter, one pair a context."""
    rng = np.random.default_rng(5)
    ranks = np.arange(VOCAB, dtype=np.float32)
    for _ in range(contexts):
        exponent, shift = rng.uniform(*kind.exponents), rng.uniform(1.0, 4.0)
        logits = -exponent * np.log(ranks + shift) + 0.5 * rng.standard_normal(VOCAB)
        target = rng.permutation(logits.astype(np.float32))
        noise = kind.drafter_noise * rng.standard_normal(VOCAB, dtype=np.float32)
        yield target, target + noise


def softmax(logits: Floats) -> Floats:
    probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
    normal: Floats = probs / probs.sum(axis=-1, keepdims=True)
    return normal


def overlap(target: Floats, draft: Floats, k: int | None) -> Floats:
    """Sum of min(target, draft) for each row [rows, V]; with `k` of the draft as it is sent."""
    if k is None:
        whole: Floats = np.minimum(target, draft).sum(axis=1)
        return whole
    token_ids, weights = truncate(draft, k)
    kept = np.take_along_axis(target, token_ids, axis=1)
    cut: Floats = np.minimum(kept, weights / np.float32(WEIGHT_SUM)).sum(axis=1)
    return cut


def summary(what: str, rows: Sequence[Floats], coupled: float) -> Acceptance:
    """rows: entropy, mass outside the drafter's top 32, and overlaps (full, 64, 32), [n] each."""
    entropy, outside, full, top_64, top_32 = (np.asarray(r, dtype=np.float64) for r in rows)
    half = 1.96 * float((full - top_32).std(ddof=1)) / len(full) ** 0.5
    return Acceptance(
        what,
        len(full),
        float(entropy.mean()),
        float(outside.mean()),
        float(full.mean()),
        float(top_64.mean()),
        float(top_32.mean()),
        half,
        coupled,
    )


def measures(target: Floats, draft: Floats) -> list[Floats]:
    """The rows of `summary`; probabilities [rows, V]."""
    entropy = -(target * np.log(np.maximum(target, 1e-30))).sum(axis=1)
    top = -np.partition(-draft, 31, axis=1)[:, :32].sum(axis=1)
    overlaps = [overlap(target, draft, k) for k in (None, 64, 32)]
    return [entropy, 1 - top, *overlaps]


def of_made_up(kind: Kind, contexts: int) -> Acceptance:
    """Acceptance on made-up distributions."""
    found: list[list[Floats]] = []
    equal = 0
    positions = np.arange(SEEDS_PER_CONTEXT)
    for number, (target, draft) in enumerate(made_up(kind, contexts)):
        found.append(measures(softmax(target[None]), softmax(draft[None])))
        seeds = np.full(SEEDS_PER_CONTEXT, number, dtype=np.uint64)
        noise = gumbel_noise(row_keys(seeds, positions, Salt.TARGET), VOCAB).numpy()
        equal += int(((noise + target).argmax(axis=1) == (noise + draft).argmax(axis=1)).sum())
    rows = [np.concatenate(column) for column in zip(*found, strict=True)]
    return summary(f"made up, {kind.name}", rows, equal / (contexts * SEEDS_PER_CONTEXT))


@torch.inference_mode()
def of_bundled(per_domain: int, limit: int) -> list[Acceptance]:
    """Acceptance of the bundled drafters, along texts sampled by the bundled target."""
    tokenizer = load_tokenizer(model_path(TARGET))
    target, *drafters = (
        LlamaForCausalLM.from_pretrained(model_path(name), dtype=torch.float32)
        for name in (TARGET, *DRAFTERS)
    )
    vocab = int(target.config.vocab_size)
    found: dict[str, list[list[Floats]]] = {name: [] for name in DRAFTERS}
    equal = dict.fromkeys(DRAFTERS, 0)
    for domain in DOMAINS:
        prompts = [tokenizer.encode(p.prompt).ids for p in load_prompts(domain)[:per_domain]]
        noises = [_noise(n, len(p), limit, vocab) for n, p in enumerate(prompts)]
        texts = target_texts(target, prompts, noises, limit)
        for prompt, text, noise in zip(prompts, texts, noises, strict=True):
            probs = answer_logits(target, prompt, text).softmax(-1).numpy()
            for name, drafter in zip(DRAFTERS, drafters, strict=True):
                logits = answer_logits(drafter, prompt, text)
                found[name].append(measures(probs, logits.softmax(-1).numpy()))
                guesses = (logits + noise[: len(text)]).argmax(-1)
                equal[name] += int((guesses == torch.tensor(text)).sum())
    results = []
    for name in DRAFTERS:
        rows = [np.concatenate(column) for column in zip(*found[name], strict=True)]
        results.append(summary(f"{TARGET}, {name}", rows, equal[name] / len(rows[0])))
    return results


def _noise(seed: int, start: int, limit: int, vocab: int) -> torch.Tensor:
    """[limit, vocab]: the noise of positions from `start` on."""
    seeds = np.full(limit, seed, dtype=np.uint64)
    return gumbel_noise(row_keys(seeds, start + np.arange(limit), Salt.TARGET), vocab)


# --- bytes --------------------------------------------------------------------------------------


def message_bytes(probs: Floats, k: int | None, rng: np.random.Generator) -> int:
    """Bytes of one draft with a token a row of `probs` [tokens, VOCAB]; k None: coupled."""
    if k is None:
        ids, weights = [int(rng.choice(VOCAB, p=p / p.sum())) for p in probs.astype(float)], []
    else:
        token_ids, integers = truncate(probs, k)
        rows = weight_rows(token_ids, integers)
        ids = [int(rng.choice(row, p=np.array(w) / WEIGHT_SUM)) for row, w in rows]
        weights = encode_weights(rows)
    prefix_len = int(rng.integers(200, 16_000))
    draft = pb.DraftTokens(
        request_id=f"{rng.integers(1, 4096):x}",
        epoch=int(rng.integers(1, 4)),
        round=int(rng.integers(1, 4096)),
        prefix_len=prefix_len,
        prefix_digest=PrefixDigest([prefix_len]).digest(),
        token_ids=ids,
        weights=weights,
    )
    return len(pb.Up(draft=draft).SerializeToString())


def bytes_per_token(messages: int) -> dict[str, dict[int, float]]:
    """Mean bytes a draft token by form and by length of the draft, without framing."""
    rng = np.random.default_rng(6)
    forms = {"coupled": None, "top-32": 32, "top-64": 64}
    totals = {form: dict.fromkeys(DRAFT_TOKENS, 0.0) for form in forms}
    draws = made_up(KINDS[1], messages * sum(DRAFT_TOKENS))
    for length in DRAFT_TOKENS:
        for _ in range(messages):
            probs = softmax(np.stack([next(draws)[1] for _ in range(length)]))
            for form, k in forms.items():
                totals[form][length] += message_bytes(probs, k, rng) / length / messages
    # float32 probabilities of the whole vocabulary, beside what a coupled draft takes
    totals["full"] = {n: 4 * VOCAB + totals["coupled"][n] for n in DRAFT_TOKENS}
    return totals


# --- report -------------------------------------------------------------------------------------


def verdicts(sizes: dict[str, dict[int, float]]) -> list[ClaimVerdict]:
    """For each bar and length of draft."""
    return [
        bar(
            f"{form}, drafts of {n}",
            f"{sizes[form][n]:.1f} bytes a token "
            f"({sizes[form][n] + FRAMING_BYTES / n:.1f} with framing; bar {most})",
            sizes[form][n] <= most,
        )
        for form, most in BARS.items()
        for n in DRAFT_TOKENS
    ]


def tables(sizes: dict[str, dict[int, float]], found: Sequence[Acceptance]) -> list[ResultTable]:
    few, many = DRAFT_TOKENS
    rows = [
        {"form": form, "few": by[few], "many": by[many]}
        | {"further": (many * by[many] - few * by[few]) / (many - few)}
        for form, by in sizes.items()
    ]
    lengths = {f"drafts of {few}": "{few:,.1f}", f"drafts of {many}": "{many:,.1f}"}
    columns = {"form": "{form}", **lengths, "a further token": "{further:,.1f}"}
    acceptance = {
        "": "{what}",
        "positions": "{positions}",
        "entropy": "{entropy:.2f}",
        "mass outside 32": "{outside_32:.4f}",
        "full": "{full:.4f}",
        "top-64": "{top_64:.4f}",
        "top-32": "{top_32:.4f}",
        "loss of top-32": "{loss:.4f} ± {interval_32:.4f}",
        "coupled": "{coupled:.3f}",
    }
    accepted = [{**asdict(a), "loss": a.full - a.top_32} for a in found]
    return [
        table(f"bytes a draft token, vocabulary {VOCAB:,}", rows, columns),
        table("acceptance at temperature 1", accepted, acceptance),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser(__doc__, quick="fewer prompts and contexts").parse_args(arguments)
    torch.set_num_threads(1)
    contexts, per_domain, limit, messages = (20, 1, 24, 5) if args.quick else (200, 8, 64, 30)
    console = Console(file=sys.stderr)
    found = [of_made_up(k, contexts) for k in track(KINDS, "made-up texts", console=console)]
    found += of_bundled(per_domain, limit)
    sizes = bytes_per_token(messages)
    runs = {"bytes_per_token": sizes, "acceptance": [asdict(a) for a in found]}
    return tell(args, Results(runs, verdicts(sizes), tables(sizes, found)))


if __name__ == "__main__":
    sys.exit(main())
