"""What every drafter would have drafted along the target's own text, request by request."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from lab.zoo.heads import Head, embed, read
from lab.zoo.template import EOS_ID, PAD_ID
from penstock.core.lookup import TextIndex
from penstock.zoo.registry import Prompt

NGRAM = "n-gram"
"""Name of prompt lookup among the drafters."""

HEAD_DRAFT = 12
"""Chained drafts of a head that are followed."""

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AcceptanceTrace:
    """One request's text by the target, and each drafter's run of agreement along it.

    `runs[drafter][t]` is how many drafts in a row would be accepted from position t on, however
    long the draft; along the target's own text that is exact for `coupled` and greedy decoding.
    `overlaps[drafter]` is the mean of the sum of min(target, draft).
    """

    domain: str
    length: int
    runs: dict[str, Ints]
    overlaps: dict[str, float]
    matches: dict[str, float]


def noise(seed: int, request: int, length: int, vocab: int) -> Tensor:
    """[length, vocab] Gumbel noise of one request, the same for target and drafters."""
    key = hashlib.sha256(f"{seed} {request}".encode()).digest()[:7]
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    uniform = torch.rand((length, vocab), generator=generator).clamp_(1e-9, 1 - 1e-7)
    return -(-uniform.log()).log()


@torch.inference_mode()
def target_texts(
    target: LlamaForCausalLM, prompts: list[list[int]], noises: list[Tensor] | None, limit: int
) -> list[list[int]]:
    """Each prompt's continuation by the target: greedy, or sampled with the given noise.

    Ends with the end token or after `limit` tokens.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    cache, texts = DynamicCache(), [[] for _ in prompts]  # type: tuple[DynamicCache, list[list[int]]]
    place = (mask.cumsum(-1) - 1).clamp_min(0)
    for t in range(limit):
        output = target(
            input_ids=ids,
            attention_mask=mask,
            position_ids=place,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1].float()
        if noises is not None:
            logits = logits + torch.stack([n[t] for n in noises])
        chosen = logits.argmax(-1)
        for text, token in zip(texts, chosen.tolist(), strict=True):
            if not text or text[-1] != EOS_ID:
                text.append(token)
        if all(text[-1] == EOS_ID for text in texts):
            break
        ids, place = chosen[:, None], place[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
    return texts


@torch.inference_mode()
def answer_logits(model: LlamaForCausalLM, prompt: list[int], text: list[int]) -> Tensor:
    """[len(text), vocab] the model's logits for each token of `text` after `prompt`."""
    ids = torch.tensor([prompt + text[:-1]])
    logits: Tensor = model(input_ids=ids, logits_to_keep=len(text)).logits[0].float()
    return logits


def run_lengths(agrees: Bools) -> Ints:
    """For each position how many True follow in a row, itself included."""
    runs = np.zeros(len(agrees) + 1, dtype=np.int64)
    for t in range(len(agrees) - 1, -1, -1):
        runs[t] = runs[t + 1] + 1 if agrees[t] else 0
    return runs[:-1]


def lookup_runs(prompt: Sequence[int], text: Sequence[int]) -> Ints:
    """Accepted draft tokens of the engine's look-up from each position of `text`."""
    index = TextIndex(len(prompt) + len(text))
    index.append(prompt)
    runs = np.zeros(len(text), dtype=np.int64)
    for t, token in enumerate(text):
        pairs = zip(index.continued(len(text))[0], text[t:], strict=False)
        runs[t] = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        index.append([token])
    return runs


@torch.inference_mode()
def head_logits(
    head: Head, target: LlamaForCausalLM, prompt: list[int], text: list[int]
) -> list[Tensor]:
    """For each chained step: [len(text), vocab], the head's logits for the token that is so far
    behind each of `text`, which is known up to there."""
    ids = torch.tensor([prompt + text + [PAD_ID] * HEAD_DRAFT])
    starts = torch.zeros(ids.shape, dtype=torch.bool)
    starts[0, len(prompt) - 1 : -HEAD_DRAFT - 1] = True
    finals = head.chain(embed(target, ids), read(target, ids), starts, HEAD_DRAFT)
    return [head.logits(final, target.lm_head.weight) for final in finals]


def head_runs(logits: list[Tensor], text: list[int], gumbel: Tensor | float) -> Ints:
    """From each token of `text` on, how many chained drafts in a row are right."""
    agrees = np.zeros((len(logits), len(text)), dtype=np.bool_)
    for step, told in enumerate(logits[: len(text)]):
        # Of later tokens' noise: a draft meets that of its own place.
        moved = gumbel[step:] if isinstance(gumbel, Tensor) else gumbel
        chosen = (told[: len(text) - step] + moved).argmax(-1).numpy()
        agrees[step, : len(chosen)] = chosen == text[step:]
    runs: Ints = np.logical_and.accumulate(agrees).sum(axis=0)
    return runs


def trace(
    domain: str,
    prompt: list[int],
    text: list[int],
    target: LlamaForCausalLM,
    drafters: dict[str, LlamaForCausalLM],
    gumbel: Tensor | None,
    heads: Mapping[str, Head] = MappingProxyType({}),
) -> AcceptanceTrace:
    """Compare all drafters along `text`, sampled with the noise `gumbel` or greedy; heads along
    chains of at most HEAD_DRAFT."""
    added = 0.0 if gumbel is None else gumbel[: len(text)]
    truth = np.array(text)
    runs, overlaps, matches = {NGRAM: lookup_runs(prompt, text)}, {}, {}
    target_probs = answer_logits(target, prompt, text).softmax(-1)
    for name, model in drafters.items():
        logits = answer_logits(model, prompt, text)
        agrees = (logits + added).argmax(-1).numpy() == truth
        runs[name] = run_lengths(agrees)
        matches[name] = float(agrees.mean())
        both = torch.minimum(target_probs, logits.softmax(-1)).sum(-1)
        overlaps[name] = float(both.mean())
    for name, head in heads.items():
        told = head_logits(head, target, prompt, text)
        runs[name] = head_runs(told, text, added)
        both = torch.minimum(target_probs, told[0].softmax(-1)).sum(-1)
        overlaps[name], matches[name] = float(both.mean()), float((runs[name] > 0).mean())
    matches[NGRAM] = float((runs[NGRAM] > 0).mean())
    overlaps[NGRAM] = matches[NGRAM]  # a point mass: its acceptance is the estimate
    return AcceptanceTrace(domain, len(text), runs, overlaps, matches)


def collect(
    target: LlamaForCausalLM,
    drafters: dict[str, LlamaForCausalLM],
    tokenizer: Tokenizer,
    prompts: dict[str, list[Prompt]],
    *,
    limit: int,
    greedy: bool,
    seed: int,
    heads: Mapping[str, Head] = MappingProxyType({}),
) -> list[AcceptanceTrace]:
    """A trace for every prompt of every domain."""
    traces = []
    vocab = target.config.vocab_size
    for domain, group in prompts.items():
        ids = [tokenizer.encode(p.prompt).ids for p in group]
        noises = None
        if not greedy:
            noises = [noise(seed, i, limit, vocab) for i in range(len(ids))]
        texts = target_texts(target, ids, noises, limit)
        for i, (prompt, text) in enumerate(zip(ids, texts, strict=True)):
            gumbel = None if noises is None else noises[i]
            traces.append(trace(domain, prompt, text, target, drafters, gumbel, heads))
    return traces
