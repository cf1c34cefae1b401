"""Attention that copies, from the first step: initial weights, which training then refines.

A head that looks a fixed number of places back needs queries and keys that do not depend on the
token. The embedding's first component is the same for all tokens and feeds them; rotary position
embedding does the rest, since the score of two constant vectors depends on their distance alone.
An induction head (Olsson et al., "In-context Learning and Induction Heads", 2022) in the second
layer then finds the place whose predecessor is the current token, and copies what stands there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from lab.zoo.recipe import Shape

EMBEDDING_STD = 0.08
CONSTANT = 0.5
"""The common component of all embeddings, as a share of the norm of the rest."""

OFFSET_SCORE = 4.5
"""Score that each rotary pair of an offset head adds at the right distance."""

WRITE_GAIN = 1.5
"""How much louder than the embedding an offset head writes what it saw."""

COPY_GAIN = 12.0
"""How much louder than the embedding the induction head writes what it found."""

MATCH_SCORE = 16.0
"""Score of the induction head where the tokens match."""

THETA = 10_000.0
FAST_SHARE = 0.35
"""The share of a head's rotary pairs, the fastest, that tell neighbouring places apart."""

SLOW_ANGLE = 0.01
"""Radians a place below which a rotary pair hardly turns over a prompt."""


def _frequencies(head_dim: int) -> Tensor:
    return THETA ** (-torch.arange(head_dim // 2) / (head_dim / 2))


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns] with orthonormal columns, none of them touching the first row."""
    q, _ = torch.linalg.qr(torch.randn(rows - 1, columns, generator=generator))
    return torch.cat((torch.zeros(1, columns), q))


@torch.no_grad()
def seed_copying(model: LlamaForCausalLM, shape: Shape, seed: int) -> None:
    """Give a fresh `model` heads that look one and two places back and, if it has two layers,
    an induction head on top of the first of them."""
    generator = torch.Generator().manual_seed(seed)
    hidden, dim = shape.hidden, shape.head_dim
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, EMBEDDING_STD, generator=generator)
    embedding[:, 0] = CONSTANT * EMBEDDING_STD * math.sqrt(hidden)
    model.model.norm.weight.fill_(1 / (EMBEDDING_STD * math.sqrt(hidden)))
    share = math.sqrt(hidden) * CONSTANT / math.sqrt(1 + CONSTANT**2)  # after the first norm

    first = model.model.layers[0].self_attn
    fast = max(3, round(FAST_SHARE * dim / 2))
    angles = _frequencies(dim)[:fast]
    amplitude = math.sqrt(OFFSET_SCORE * math.sqrt(dim)) / share
    first.k_proj.weight[:dim].mul_(0.1)
    first.k_proj.weight[:fast, 0] = amplitude
    for head in range(2):
        rows = first.q_proj.weight[head * dim : (head + 1) * dim]
        rows.mul_(0.1)
        rows[:fast, 0] = amplitude * torch.cos((head + 1) * angles)
        rows[dim // 2 : dim // 2 + fast, 0] = -amplitude * torch.sin((head + 1) * angles)
    basis = _orthonormal(hidden, (2 if shape.layers == 1 else 3) * dim, generator)
    write, read = basis[:, : 2 * dim], basis[:, -dim:]
    embedding -= embedding @ write[:, :dim] @ write[:, :dim].T  # room for what head 0 writes
    first.v_proj.weight[:dim] = read.T
    first.o_proj.weight[:, : 2 * dim] = WRITE_GAIN * EMBEDDING_STD * write
    if shape.layers > 1:
        _seed_induction(model, shape, read, write[:, :dim], generator)


def _seed_induction(
    model: LlamaForCausalLM, shape: Shape, read: Tensor, write: Tensor, generator: torch.Generator
) -> None:
    """Match the current token with what head 0 of the first layer wrote of the one before."""
    hidden, dim = shape.hidden, shape.head_dim
    second = model.model.layers[1].self_attn
    slow = int((_frequencies(dim) < SLOW_ANGLE).nonzero()[0])
    width = dim // 2 - slow
    places = [*range(slow, dim // 2), *range(dim // 2 + slow, dim)]
    scale = math.sqrt(MATCH_SCORE * math.sqrt(dim) / (2 * width))
    copied = _orthonormal(hidden, shape.kv_heads * dim, generator)
    second.v_proj.weight.copy_(copied.T)
    # The stream's norm has grown by what the first layer wrote, and the norm divides it out.
    grown = 1.6
    for group in range(shape.kv_heads):
        head = group * (shape.heads // shape.kv_heads)
        query = second.q_proj.weight[head * dim : (head + 1) * dim]
        key = second.k_proj.weight[group * dim : (group + 1) * dim]
        query.mul_(0.1)
        key.mul_(0.1)
        query[places] += scale * grown * read.T[: 2 * width]
        key[places] += scale * grown * write.T[: 2 * width]
        found = copied[:, group * dim : (group + 1) * dim]
        second.o_proj.weight[:, head * dim : (head + 1) * dim] = COPY_GAIN * EMBEDDING_STD * found
