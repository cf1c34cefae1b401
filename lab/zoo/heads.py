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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from penstock.engine.models.checkpoint import SINGLE_FILE

_LAYERS_READ = "eagle_aux_hidden_state_layer_ids"

RIDGE = 1e-3
"""Of the mean square of what `fc` reads, against which its first weights are small."""

States = Sequence[Tensor]
"""A target's, [rows, length, hidden]: the inputs of its layers, then what its final norm makes."""


@torch.no_grad()
def read(target: LlamaForCausalLM, ids: Tensor) -> States:
    """The states of `ids`, [rows, length], in float32."""
    states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return [state.float() for state in states]


def embed(target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    return functional.embedding(ids, target.model.embed_tokens.weight).detach().float()


class Head(nn.Module):
    """A head in PyTorch, of either layout; its parameters have a checkpoint's names.

    config: the target's, with the head's own size of the MLP
    reads:  of EAGLE-3: the target's layers whose inputs it joins; none in an MTP head
    tokens: of EAGLE-3: the numbers of those that it can tell, ascending
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: LlamaConfig, reads: Sequence[int] = (), tokens: Tensor | None = None
    ) -> None:
        super().__init__()
        self.config, self.reads, hidden = config, tuple(reads), config.hidden_size
        self.fc = nn.Linear((len(reads) or 2) * hidden, hidden, bias=False)
        self.norm = _norm(config)
        self._rotations = LlamaRotaryEmbedding(config)
        self.layer = LlamaDecoderLayer(config, 0)
        if tokens is None:
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = _norm(config), _norm(config)
            return
        attention = self.layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * hidden, rows, bias=False))
        self.hidden_norm = _norm(config)
        self.lm_head = nn.Linear(hidden, len(tokens), bias=False)
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))
        there = torch.zeros(config.vocab_size, dtype=torch.bool)
        self.register_buffer("t2d", there.index_fill(0, tokens, True))

    @property
    def tokens(self) -> Tensor | None:
        """The numbers of those that it can tell, if not all."""
        return self.d2t + torch.arange(len(self.d2t)) if self.reads else None

    def before(self, states: States) -> Tensor:
        """What a row is given of the target's states before it: [rows, length, hidden]."""
        own = states[-1]
        if self.reads:
            own = self.fc(torch.cat([states[index] for index in self.reads], dim=-1))
        return functional.pad(own[:, :-1], (0, 0, 1, 0))

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and what it is added to."""
        norm = self.layer.input_layernorm
        if self.reads:
            return torch.cat((norm(embedded), self.hidden_norm(state)), dim=-1), state
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(state)
        mixed = self.fc(torch.cat(both, dim=-1))
        return norm(mixed), mixed

    def _heads(self, given: Tensor, projection: str, places: Tensor | None) -> Tensor:
        """[..., key heads, query heads of one, head_dim], rotated to `places`."""
        attention = self.layer.self_attn
        made = getattr(attention, projection)(given)
        x: Tensor = made.unflatten(-1, (self.config.num_key_value_heads, -1, attention.head_dim))
        if places is None:
            return x
        cos, sin = (r[0][..., None, None, :] for r in self._rotations(x, places[None]))
        low, high = x.chunk(2, dim=-1)
        rotated: Tensor = x * cos + torch.cat((-high, low), dim=-1) * sin
        return rotated

    def queries(self, given: Tensor, places: Tensor) -> Tensor:
        return self._heads(given, "q_proj", places)

    def keys_values(self, given: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._heads(given, "k_proj", places), self._heads(given, "v_proj", None)
        return keys.squeeze(-2), values.squeeze(-2)

    def leave(self, base: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The state that is passed on, and what the output matrix reads."""
        hidden = base + self.layer.self_attn.o_proj(attended)
        hidden = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
        final = self.norm(hidden)
        return (hidden if self.reads else final), final

    def chain(self, embedded: Tensor, states: States, starts: Tensor, steps: int) -> list[Tensor]:
        """What the output matrix reads at each of `steps` chained drafts.

        embedded: [rows, length, hidden], of the tokens that are there
        starts:   [rows, length], whether a chain starts at p: its step k reads token p + k of the
                  row, which must be there, and tells the one behind it
        Returns [chains, hidden] for each step, in the order of `starts.nonzero()`.
        """
        row, place = starts.nonzero(as_tuple=True)
        before = self.before(states)
        given, _ = self.enter(embedded, before)
        keys, values = self.keys_values(given, torch.arange(given.shape[1]))
        state, own = before[row, place], list[tuple[Tensor, Tensor]]()
        counts, told = starts.sum(dim=1).tolist(), list[Tensor]()
        for step in range(steps):
            given, base = self.enter(embedded[row, place + step], state)
            if step:
                own.append(self.keys_values(given, place + step))
            queries = self.queries(given, place + step)
            attended = _attend(queries, keys, values, own, place, counts)
            state, final = self.leave(base, attended)
            told.append(final)
        return told

    def logits(self, final: Tensor, lm_head: Tensor) -> Tensor:
        """Logits of all tokens of the target; those that the head cannot tell are -inf.

        lm_head: the target's, [tokens, hidden]"""
        if self.tokens is None:
            return functional.linear(final, lm_head)
        whole = torch.full((*final.shape[:-1], len(lm_head)), -torch.inf)
        return whole.index_copy(-1, self.tokens, self.lm_head(final))

    @torch.no_grad()
    def begin_like(self, target: LlamaForCausalLM) -> None:
        """Take over what the target's last layer reads, for the last of the streams it reads; its
        layer adds nothing at first."""
        self.norm.weight.copy_(target.model.norm.weight)
        last = target.model.layers[-1].state_dict()
        for name, own in self.layer.state_dict().items():
            # An MLP of fewer channels has the first.
            theirs = last[name][: own.shape[0], ...]
            own.zero_()
            if name not in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                own[..., -theirs.shape[-1] :] = theirs
        if self.tokens is not None:
            self.hidden_norm.weight.copy_(last["input_layernorm.weight"])
            self.layer.input_layernorm.weight.fill_(1.0)
            self.lm_head.weight.copy_(target.lm_head.weight[self.tokens])

    @torch.no_grad()
    def fit(self, embedded: Tensor, states: States, places: Tensor) -> None:
        """Let `fc` alone tell the target's next state as well as it can, by least squares, at
        `places`, [rows, length]."""
        row, place = places.nonzero(as_tuple=True)
        read = [states[index][row, place - 1] for index in self.reads]
        if not self.reads:
            read.append(self.pre_fc_norm_embedding(embedded[row, place]))
            read.append(self.pre_fc_norm_hidden(states[-1][row, place - 1]))
        given, wanted = torch.cat(read, dim=-1), states[-1][row, place] / self.norm.weight
        gram = given.t() @ given
        gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
        self.fc.weight.copy_(torch.linalg.solve(gram, given.t() @ wanted).t())

    def checkpoint(self) -> dict[str, Tensor]:
        """Its tensors in bfloat16, under a checkpoint's names."""
        return {
            _saved_name(name, bool(self.reads)): (
                tensor.bfloat16() if tensor.is_floating_point() else tensor
            )
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


def _norm(config: LlamaConfig) -> LlamaRMSNorm:
    return LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


def _saved_name(name: str, is_eagle: bool) -> str:
    if is_eagle:
        in_layer = name.startswith(("layer.", "hidden_norm."))
        return f"midlayer.{name.removeprefix('layer.')}" if in_layer else name
    return f"mtp.{name}".replace("mtp.layer.", "mtp.layers.0.")


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


def save_head(folder: Path, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write a head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    text = json.dumps(description, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n")


def load_head(folder: Path) -> Head:
    """A saved head in float32."""
    content = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / SINGLE_FILE)
    reads, offsets = content.get(_LAYERS_READ, ()), tensors.get("d2t")
    tokens = None if offsets is None else offsets + torch.arange(len(offsets))
    head = Head(LlamaConfig(**content), reads, tokens)
    saved = {name: tensors[_saved_name(name, bool(reads))] for name in head.state_dict()}
    head.load_state_dict(saved)
    return head
