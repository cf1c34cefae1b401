"""A copying circuit as a starting point for three layers of a grown model.

Attention that copies ("induction", arXiv 2209.11895) needs two layers to agree, and appears only
after far more text than this family is trained on. So layers that growing leaves without an
effect are given it by least squares, and training takes it from there:

- the first layer notes at every position the tokens one and two places before it;
- the second looks for positions that follow the present token (one head group) or the present
  pair of tokens (the other), and notes what stands there;
- a late one turns that note into a logit.
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

    look: float = 40.0
    """Sharpness of looking a fixed number of places back."""
    write: float = 1.0
    """Size of what is written, relative to the stream's own root mean square there."""
    match: float = 20.0
    """Attention logit of a perfect match."""
    say: float = 8.0
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


def _bottom(stream: Tensor, count: int) -> Tensor:
    """[hidden, count] directions in which `stream` [positions, hidden] varies least."""
    vectors = torch.linalg.eigh(stream.T @ stream)[1]
    return vectors[:, :count]


def _group(model: LlamaForCausalLM, group: int) -> tuple[slice, slice]:
    """Rows of a key-value group's first query head, and of its keys and values."""
    config = model.config
    dim, per_group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    head = group * per_group
    return slice(head * dim, (head + 1) * dim), slice(group * dim, (group + 1) * dim)


def _fix_look(
    model: LlamaForCausalLM, layer: int, inputs: Tensor, places: tuple[int, ...], gain: float
) -> None:
    """Make the first head of each group look `places` back; nothing else writes."""
    constant = _readout(inputs, torch.ones(len(inputs), 1))
    attention = model.model.layers[layer].self_attn
    attention.o_proj.weight.zero_()
    for group, back in enumerate(places):
        query, key = _look_back(model.config.head_dim, back, gain)
        heads, kv = _group(model, group)
        attention.q_proj.weight[heads] = query[:, None] * constant
        attention.k_proj.weight[kv] = key[:, None] * constant


def _note_previous(
    model: LlamaForCausalLM, layer: int, ids: Tensor, codes: Tensor, gains: Gains
) -> None:
    dim, attention = model.config.head_dim, model.model.layers[layer].self_attn
    inputs, stream = _layer_input(model, layer, ids)
    _fix_look(model, layer, inputs, (1, 2), gains.look)
    free = _bottom(stream, 2 * codes.size(1))
    scale = gains.write * stream.pow(2).mean().sqrt() / codes[ids].pow(2).mean().sqrt()
    for group in range(2):
        heads, kv = _group(model, group)
        part = slice(group * codes.size(1), (group + 1) * codes.size(1))
        value = torch.zeros(dim, inputs.size(1))
        value[: codes.size(1)] = _readout(inputs, codes[ids.flatten()])
        attention.v_proj.weight[kv] = value
        attention.o_proj.weight[:, heads][:, : codes.size(1)] = free[:, part] * scale


def _match(
    model: LlamaForCausalLM, layer: int, ids: Tensor, codes: Tensor, notes: Tensor, gains: Gains,
    free: Tensor,
) -> None:
    dim, attention = model.config.head_dim, model.model.layers[layer].self_attn
    inputs, stream = _layer_input(model, layer, ids)
    slow = _slow_dims(dim, codes.size(1))
    attention.o_proj.weight.zero_()
    note = notes[ids.flatten()]
    value = _readout(inputs, note)
    scale = gains.write * stream.pow(2).mean().sqrt() / note.pow(2).mean().sqrt()
    for group in range(2):
        heads, kv = _group(model, group)
        now = codes[ids.flatten()].clone()
        before = _shifted(now, len(ids), 1)
        if group:
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
        attention.v_proj.weight[kv] = value
        attention.o_proj.weight[:, heads] = free * scale


def _say(
    model: LlamaForCausalLM, layer: int, ids: Tensor, free: Tensor, back: Tensor, gains: Gains
) -> None:
    attention = model.model.layers[layer].self_attn
    inputs, stream = _layer_input(model, layer, ids)
    _fix_look(model, layer, inputs, (0,), gains.look)
    noted = stream @ free
    noted = noted - noted.mean(0)
    heads, kv = _group(model, 0)
    size = stream.pow(2).mean(-1).sqrt().mean()
    attention.v_proj.weight[kv] = _readout(inputs, noted)
    gain = gains.say * size / noted.pow(2).sum(-1).mean().sqrt() / free.size(1) ** 0.5
    attention.o_proj.weight[:, heads] = gain * back / model.model.norm.weight[:, None]


@torch.no_grad()
def install(
    model: LlamaForCausalLM,
    ids: Ids,
    layers: tuple[int, int, int],
    gains: Gains | None = None,
) -> None:
    """Set the attention of three `layers` of `model` to copy; `ids` [rows, ROW] is sample text.

    The layers must have no effect yet, the first two must be the model's first two, and the
    model must have two key-value groups.
    """
    gains = gains or Gains()
    sample = torch.from_numpy(ids.astype("int64"))
    dim = model.config.head_dim
    codes, back = _whitened(model.model.embed_tokens.weight.detach(), sample)
    late = _layer_input(model, layers[2], sample)[1]
    free = _bottom(late, dim)
    short, notes = codes[:, : dim * 3 // 8], codes[:, -dim:]
    _note_previous(model, layers[0], sample, short, gains)
    _match(model, layers[1], sample, short, notes, gains, free)
    _say(model, layers[2], sample, free, back[:, -dim:], gains)
