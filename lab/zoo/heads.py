"""Heads: drafters of one layer that read the hidden states of the target they belong to.

A head's row at position p takes the target's state at p - 1 (zeros before the first) and the
embedding of token p, attends to its own rows, and tells token p + 1. From there it goes on alone,
with its own state and the token just drafted. Two layouts:

- MTP, as Qwen3.5's (`mtp.*`): the state is the target's behind its final norm; embedding and
  state, each normed, go through `fc` into a layer of the target's kind; what is passed on is the
  head's state behind its own norm; the target's output matrix. As llama.cpp and vLLM compute it.
- EAGLE-3, as SafeAILab's checkpoints: `fc` joins the inputs of three of the target's layers; the
  layer attends by [embedding, state], each normed, and adds to the state; what is passed on is not
  normed. An output matrix of its own over the commonest tokens: `d2t` is a token's number in the
  target less its number in the draft, `t2d` says which tokens of the target there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from penstock.config import ConfigError
from penstock.engine.models.checkpoint import SINGLE_FILE
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.decoder import Decoder, after_attention
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.models.rope_table import RopeTable
from penstock.engine.models.variant import LLAMA
from penstock.engine.models.weights import load_weights

_LAYERS_READ = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class States:
    """What a target computes on its way: [rows, length, hidden].

    inputs: of each layer; final: behind the final norm."""

    inputs: list[Tensor]
    final: Tensor


class Reader:
    """A target in PyTorch, for whole rows of text: what heads learn from and are compared with.

    dtype: in which it computes.

    Raises: ConfigError for a target whose layers heads are not made of."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.dtype = DecoderConfig.from_pretrained(path), dtype
        if replace(self.config.variant, bias="none") != LLAMA or self.config.variant.o_bias:
            raise ConfigError(
                f"{path}: heads are made for Llamas, with or without biases of queries, keys and "
                f"values; {self.config.architecture} has other layers"
            )
        self.content: dict[str, Any] = open_checkpoint(path).description().content
        weights = load_weights(path, self.config, dtype)
        last = f"layers.{self.config.num_layers - 1}."
        self.last_layer = {
            name.removeprefix(last): tensor.float()
            for name, tensor in weights.items()
            if name.startswith(last)
        }
        self.final_norm = weights["norm"].float()
        positions = self.config.max_position_embeddings
        self.decoder = Decoder(self.config, weights, positions, torch.device("cpu"))
        self.embeddings = self.decoder.embed_tokens
        self.lm_head = self.decoder.lm_head

    @torch.no_grad()
    def read(self, ids: Tensor) -> States:
        """Compute the states of `ids`, [rows, length]."""
        rows, length = ids.shape
        inputs: list[Tensor] = []
        final: list[Tensor] = []

        def compute(index: int, hidden: Tensor, rotations: Tensor) -> Tensor:
            inputs.append(hidden)
            layer = self.decoder.layers[index]
            q, kv, _ = self.decoder.before_attention(layer, hidden, rotations)
            q, kv = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in (q, kv))
            keys, values = kv.chunk(2, dim=1)
            attended = functional.scaled_dot_product_attention(
                q, keys, values, is_causal=True, enable_gqa=True
            )
            attended = attended.transpose(1, 2).reshape(rows * length, -1)
            hidden = after_attention(layer, hidden, attended)
            if index < self.config.num_layers - 1:
                return hidden
            final.append(self.decoder.norm(hidden))
            return hidden[:0]  # the logits are computed where they are needed

        places = torch.arange(length).repeat(rows)
        self.decoder.run(ids.flatten(), places, compute)
        whole = [x.view(rows, length, -1).float() for x in (*inputs, *final)]
        return States(whole[:-1], whole[-1])

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.embeddings).float()


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig, inputs: int) -> None:
        super().__init__()
        sizes, bias = (config.q_size, config.kv_size), config.variant.qkv_bias
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(inputs, size, bias) for size in (*sizes, config.kv_size)
        )
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=False)
        self._heads = (config.num_kv_heads, -1, config.head_dim)
        table = RopeTable.build(config, config.max_position_embeddings)
        self._cos, self._sin = table.cos, table.sin

    def _rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """`x` is [..., kv heads, group, head_dim], `places` [...]."""
        cos, sin = (table[places][..., None, None, :] for table in (self._cos, self._sin))
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    def queries(self, given: Tensor, places: Tensor) -> Tensor:
        return self._rotate(self.q_proj(given).unflatten(-1, self._heads), places)

    def keys_values(self, given: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._rotate(self.k_proj(given).unflatten(-1, self._heads), places)
        values: Tensor = self.v_proj(given).unflatten(-1, self._heads)
        return keys.squeeze(-2), values.squeeze(-2)


class _Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(gated)
        return out


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, streams: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, streams * config.hidden_size)
        self.mlp = _Mlp(config)
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)


class _EagleLayer(_Layer):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 2)
        self.hidden_norm = _norm(config)


def _norm(config: DecoderConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Head(nn.Module):
    """A head in PyTorch, of either layout; its parameters have a checkpoint's names.

    config: the target's, with the head's own size of the MLP
    reads:  of EAGLE-3: the target's layers whose inputs it joins; none in an MTP head
    tokens: of EAGLE-3: the numbers of those that it can tell, ascending
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: DecoderConfig, reads: Sequence[int] = (), tokens: Tensor | None = None
    ) -> None:
        super().__init__()
        self.config, self.reads, hidden = config, tuple(reads), config.hidden_size
        self.fc = nn.Linear((len(reads) or 2) * hidden, hidden, bias=False)
        self.norm = _norm(config)
        if tokens is None:
            self.prefix = "mtp."
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = _norm(config), _norm(config)
            self.layers = nn.ModuleList([_Layer(config, 1)])
            return
        self.prefix = ""
        self.midlayer = _EagleLayer(config)
        self.lm_head = nn.Linear(hidden, len(tokens), bias=False)
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))
        there = torch.zeros(config.vocab_size, dtype=torch.bool)
        self.register_buffer("t2d", there.index_fill(0, tokens, True))

    @property
    def layer(self) -> _Layer:
        layer = self.midlayer if self.reads else self.layers[0]
        assert isinstance(layer, _Layer)
        return layer

    @property
    def tokens(self) -> Tensor | None:
        """The numbers of those that it can tell, if not all."""
        return self.d2t + torch.arange(len(self.d2t)) if self.reads else None

    def before(self, states: States) -> Tensor:
        """What a row is given of the target's states before it: [rows, length, hidden]."""
        own = states.final
        if self.reads:
            own = self.fc(torch.cat([states.inputs[index] for index in self.reads], dim=-1))
        return functional.pad(own[:, :-1], (0, 0, 1, 0))

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and what it is added to."""
        if self.reads:
            norms = self.midlayer.input_layernorm, self.midlayer.hidden_norm
            return torch.cat((norms[0](embedded), norms[1](state)), dim=-1), state
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(state)
        mixed = self.fc(torch.cat(both, dim=-1))
        return self.layer.input_layernorm(mixed), mixed

    def chain(self, embedded: Tensor, states: States, starts: Tensor, steps: int) -> list[Tensor]:
        """What the output matrix reads at each of `steps` chained drafts.

        embedded: [rows, length, hidden], of the tokens that are there
        starts:   [rows, length], whether a chain starts at p: its step k reads token p + k of the
                  row, which must be there, and tells the one behind it
        Returns [chains, hidden] for each step, in the order of `starts.nonzero()`.
        """
        attention = self.layer.self_attn
        row, place = starts.nonzero(as_tuple=True)
        before = self.before(states)
        given, _ = self.enter(embedded, before)
        keys, values = attention.keys_values(given, torch.arange(given.shape[1]))
        state, own = before[row, place], list[tuple[Tensor, Tensor]]()
        counts, told = starts.sum(dim=1).tolist(), list[Tensor]()
        for step in range(steps):
            given, base = self.enter(embedded[row, place + step], state)
            if step:
                own.append(attention.keys_values(given, place + step))
            queries = attention.queries(given, place + step)
            attended = _attend(queries, keys, values, own, place, counts)
            hidden = base + attention.o_proj(attended)
            state = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
            told.append(self.norm(state))
            state = state if self.reads else told[-1]
        return told

    def logits(self, final: Tensor, lm_head: Tensor) -> Tensor:
        """Logits of all tokens of the target; those that the head cannot tell are -inf.

        lm_head: the target's, [hidden, tokens]"""
        if self.tokens is None:
            return final @ lm_head
        whole = torch.full((*final.shape[:-1], lm_head.shape[1]), -torch.inf)
        return whole.index_copy(-1, self.tokens, self.lm_head(final))

    @torch.no_grad()
    def begin_like(self, target: Reader) -> None:
        """Take over what the target's last layer knows."""
        one = torch.eye(self.config.hidden_size)
        zeros = [torch.zeros_like(one)] * (len(self.reads) - 1)
        self.fc.weight.copy_(torch.cat((*zeros, one) if self.reads else (one / 2, one), dim=1))
        self.norm.weight.copy_(target.final_norm)
        _take_layer(self.layer, target)
        if self.tokens is not None:
            self.midlayer.hidden_norm.weight.copy_(target.last_layer["input_norm"])
            self.midlayer.input_layernorm.weight.fill_(1.0)
            self.lm_head.weight.copy_(target.lm_head.t()[self.tokens])

    def checkpoint(self) -> dict[str, Tensor]:
        """Its tensors in bfloat16."""
        return {
            self.prefix + name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in self.state_dict().items()
        }

    def description(self, target: dict[str, Any]) -> dict[str, Any]:
        """Its config.json, from the target's."""
        if self.tokens is None:
            return target | {"mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
        return target | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "intermediate_size": self.config.intermediate_size,
            "draft_vocab_size": len(self.tokens),
            _LAYERS_READ: list(self.reads),
            "target_hidden_size": self.config.hidden_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    place: Tensor,
    counts: list[int],
) -> Tensor:
    """Chains' queries [chains, kv heads, group, head_dim] to the rows up to where they started,
    and to the chains' own steps."""
    queries = queries * queries.shape[-1] ** -0.5
    mine = [torch.einsum("nkgd,nkd->nkg", queries, key) for key, _ in own]
    attended = []
    rows = zip(torch.split(queries, counts), torch.split(place, counts), strict=True)
    for row, (some, at) in enumerate(rows):
        scores = torch.einsum("nkgd,tkd->nkgt", some, keys[row])
        hidden = torch.arange(keys.shape[1]) > at[:, None, None, None]
        attended.append(scores.masked_fill(hidden, -torch.inf))
    num = keys.shape[1]
    weights = torch.cat((torch.cat(attended), *(s[..., None] for s in mine)), dim=-1).softmax(-1)
    parts = zip(torch.split(weights[..., :num], counts), values, strict=True)
    result = torch.cat([torch.einsum("nkgt,tkd->nkgd", w, v) for w, v in parts])
    for step, (_, value) in enumerate(own):
        result = result + weights[..., num + step, None] * value[:, :, None]
    return result.flatten(1)


def _take_layer(layer: _Layer, target: Reader) -> None:
    """Its last layer's weights, for the last of the streams that are read; of the MLP the first
    channels."""
    config, last = target.config, target.last_layer
    attention, mlp = layer.self_attn, layer.mlp
    rows = (config.q_size, config.kv_size, config.kv_size)
    weights, bias = torch.split(last["qkv"], rows), last.get("qkv_bias")
    biases = (None,) * 3 if bias is None else torch.split(bias, rows)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    for projection, weight, bias in zip(projections, weights, biases, strict=True):
        projection.weight.zero_()
        projection.weight[:, -config.hidden_size :] = weight
        if bias is not None and projection.bias is not None:
            projection.bias.copy_(bias)
    channels = mlp.gate_proj.weight.shape[0]
    gate, up = last["gate_up"].chunk(2)
    attention.o_proj.weight.copy_(last["o"])
    mlp.gate_proj.weight.copy_(gate[:channels])
    mlp.up_proj.weight.copy_(up[:channels])
    mlp.down_proj.weight.copy_(last["down"][:, :channels])
    layer.input_layernorm.weight.copy_(last["input_norm"])
    layer.post_attention_layernorm.weight.copy_(last["post_norm"])


def save_head(folder: Path, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write a head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    text = json.dumps(description, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n")


def load_head(folder: Path, target: DecoderConfig) -> Head:
    """A saved head in float32, beside a target of that configuration."""
    content = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / SINGLE_FILE)
    config, offsets = (
        replace(target, intermediate_size=content["intermediate_size"]),
        tensors.get("d2t"),
    )
    tokens = None if offsets is None else offsets + torch.arange(len(offsets))
    head = Head(config, content.get(_LAYERS_READ, ()), tokens)
    head.load_state_dict({n.removeprefix(head.prefix): t for n, t in tensors.items()})
    return head
