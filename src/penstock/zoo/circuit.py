"""A copying circuit as a starting point for two layers of a grown model.

Attention that copies ("induction", arXiv 2209.11895) needs two layers to agree, and appears only
after far more text than this family is trained on. So two of the layers that growing leaves
without an effect are given it by least squares, and training takes it from there:

- the earlier one writes into every position the tokens one and two places before it;
- the later one looks for positions that follow the present token (one head group) or the present
  pair of tokens (the other), and raises the logit of what stands there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from penstock.zoo.data import Ids


@dataclass(frozen=True, slots=True)
class Gains:
    """Strengths of the circuit's parts."""

    previous: float = 40.0
    """Sharpness of looking one (or two) places back."""
    write: float = 1.0
    """Size of what is written, relative to the residual stream's own root mean square."""
    match: float = 16.0
    """Attention logit of a perfect match."""
    copy: float = 10.0
    """Logit that a copied token gains."""


def _layer_input(model: LlamaForCausalLM, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What attention of `layer` reads (after its norm) and the raw stream, [positions, hidden]."""
    seen: list[Tensor] = []
    norm = model.model.layers[layer].input_layernorm
    hook = norm.register_forward_hook(lambda _, args, out: seen.extend((out, args[0])))
    try:
        model.model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return seen[0].flatten(0, 1), seen[1].flatten(0, 1)


def _readout(inputs: Tensor, wanted: Tensor) -> Tensor:
    """[wanted, hidden] matrix that maps `inputs` to `wanted` with the least squared error."""
    gram = inputs.T @ inputs
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
    return torch.linalg.solve(gram + ridge, inputs.T @ wanted).T


def _shifted(codes: Tensor, rows: int, places: int) -> Tensor:
    """Each position's code of the token `places` before it, in its row."""
    shaped = codes.view(rows, -1, codes.size(-1))
    return shaped.roll(places, dims=1).flatten(0, 1)


def _whitened(embedding: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [vocab, hidden] in which the tokens of `ids` are spread evenly, and how to undo it.

    The second result maps a code back into the stream so that the tied head turns it into inner
    products of codes.
    """
    counts = torch.bincount(ids.flatten(), minlength=len(embedding)).float().sqrt()
    used = embedding * counts[:, None] / counts.norm()
    values, vectors = torch.linalg.eigh(used.T @ used)
    inverse = vectors * values.clamp_min(values.max() * 1e-4).rsqrt()
    codes = embedding @ inverse
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(inverse.shape, generator=generator))[0]
    return codes @ turn, inverse @ turn


def _look_back(head_dim: int, places: int, gain: float) -> tuple[Tensor, Tensor]:
    """Constant query and key whose rotated product is largest `places` positions back."""
    half = head_dim // 2
    theta = 10000.0 ** (-torch.arange(half) / half)
    used = (torch.arange(half) < half * 5 // 8).float() * gain**0.5
    query = torch.cat((used * torch.cos(places * theta), -used * torch.sin(places * theta)))
    return query, torch.cat((used, torch.zeros(half)))


def _slow_dims(head_dim: int, count: int) -> Tensor:
    """Indices of the `count` dimensions that rotate most slowly: content matches there."""
    half = head_dim // 2
    first = torch.arange(half - count // 2, half)
    return torch.cat((first, first + half))


@torch.no_grad()
def _write_previous(
    model: LlamaForCausalLM, layer: int, ids: Tensor, codes: Tensor, gains: Gains
) -> None:
    config, block = model.config, model.model.layers[layer]
    dim, groups = config.head_dim, config.num_key_value_heads
    per_group = config.num_attention_heads // groups
    inputs, stream = _layer_input(model, layer, ids)
    constant = _readout(inputs, torch.ones(len(inputs), 1))
    _, vectors = torch.linalg.eigh(stream.T @ stream / len(stream))
    scale = gains.write * stream.pow(2).mean().sqrt()
    attention = block.self_attn
    attention.o_proj.weight.zero_()
    for group in range(groups):
        places = 1 + group % 2
        query, key = _look_back(dim, places, gains.previous)
        head = group * per_group
        heads, kv = slice(head * dim, (head + 1) * dim), slice(group * dim, (group + 1) * dim)
        attention.q_proj.weight[heads] = query[:, None] * constant
        attention.k_proj.weight[kv] = key[:, None] * constant
        token = codes[ids.flatten()][:, :dim]
        attention.v_proj.weight[kv] = _readout(inputs, token)
        free = vectors[:, group * dim : (group + 1) * dim]
        attention.o_proj.weight[:, heads] = free * scale / token.pow(2).mean().sqrt()


@torch.no_grad()
def _match_and_copy(
    model: LlamaForCausalLM, layer: int, ids: Tensor, codes: Tensor, back: Tensor, gains: Gains
) -> None:
    config, block = model.config, model.model.layers[layer]
    dim, groups = config.head_dim, config.num_key_value_heads
    per_group = config.num_attention_heads // groups
    inputs, stream = _layer_input(model, layer, ids)
    token = codes[ids.flatten()]
    slow = _slow_dims(dim, dim * 3 // 8)
    attention = block.self_attn
    attention.o_proj.weight.zero_()
    norm_weight = model.model.norm.weight
    size = stream.pow(2).mean(-1).sqrt().mean()
    for group in range(groups):
        head = group * per_group
        heads, kv = slice(head * dim, (head + 1) * dim), slice(group * dim, (group + 1) * dim)
        now = token[:, : len(slow)].clone()
        before = _shifted(now, len(ids), 1)
        if group % 2:
            half = len(slow) // 2
            earlier = _shifted(now, len(ids), 2)
            now[:, half:] = before[:, :half]
            before[:, half:] = earlier[:, :half]
        strength = (gains.match * dim**0.5 / now.pow(2).sum(-1).mean()).sqrt()
        for weight, rows, wanted in (
            (attention.q_proj.weight, heads, now),
            (attention.k_proj.weight, kv, before),
        ):
            part = torch.zeros(dim, weight.size(1))
            part[slow] = _readout(inputs, wanted) * strength
            weight[rows] = part
        columns = slice(group * dim, (group + 1) * dim)
        value = token[:, columns]
        attention.v_proj.weight[kv] = _readout(inputs, value)
        gain = gains.copy * size / (groups * value.pow(2).sum(-1).mean())
        attention.o_proj.weight[:, heads] = gain * back[:, columns] / norm_weight[:, None]


def install(
    model: LlamaForCausalLM, ids: Ids, first: int, second: int, gains: Gains | None = None
) -> None:
    """Set the attention of layers `first` < `second` of `model` to copy; `ids` is sample text."""
    gains = gains or Gains()
    sample = torch.from_numpy(ids.astype("int64"))
    embedding = model.model.embed_tokens.weight.detach()
    codes, back = _whitened(embedding, sample)
    _write_previous(model, first, sample, codes, gains)
    _match_and_copy(model, second, sample, codes, back, gains)
