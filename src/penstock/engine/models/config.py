"""Decoder configuration, read from a checkpoint, checked once and immutable."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from penstock.engine.models.checkpoint import (
    ASSISTANTS,
    EAGLE3,
    HEAD_PROJECTION,
    CheckpointError,
    one_line,
)
from penstock.engine.models.dtypes import DTYPES
from penstock.engine.models.families import FAMILIES, MISSING, TEXT_PARTS, rope_of
from penstock.engine.models.fields import are_ids, check_fields, in_words, token_ids
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.models.ordinary import ordinary_config
from penstock.engine.models.rope import WHOLE_HEADS, Rope
from penstock.engine.models.variant import LLAMA, HeadShape, LayerShape, Variant

_ASSISTANT = "Gemma4ForCausalLM"
"""Architecture of an assistant's text model."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and arithmetic of a decoder.

    intermediate_size: of one expert, where there are experts
    head_dim:       even; need not be hidden_size / num_heads
    max_position_embeddings: positions the model can distinguish, in tokens
    variant:        differences from Llama
    eos_token_ids:  end-of-text ids (config.json, then generation_config.json)
    dtype:          the checkpoint's own
    architecture:   a key of FAMILIES, which names a checkpoint's tensors
    head:           it drafts with one layer more (`models.head`), behind the others
    assistant:      a small model drafts from its states, keys and values (`models.assistant`)"""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: Rope = WHOLE_HEADS
    variant: Variant = LLAMA
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    architecture: str = "LlamaForCausalLM"
    head: HeadShape | None = None
    assistant: DecoderConfig | None = None

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in fields(self)[:9]}
        for name, value in {**sizes, "rope_theta": self.rope.theta}.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; must be above 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; must be even")
        _check_rope(self.rope, self.head_dim)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}; allowed: {', '.join(map(str, DTYPES))}")

    @property
    def q_size(self) -> int:
        """Rows of the query projection: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def gives_states(self) -> bool:
        """True if a drafter reads the hidden states behind its layers."""
        return self.head is not None or self.assistant is not None

    @property
    def num_all_layers(self) -> int:
        """Layers, with that of the head."""
        return self.num_layers + (self.head is not None)

    @property
    def kv_layers(self) -> list[int]:
        """Numbers of the layers with keys and values of their own."""
        layers, is_recurrent = range(self.num_all_layers), self.variant.is_recurrent
        return [i for i in layers if self.shape(i).kv_layer == i and not is_recurrent(i)]

    def shape(self, index: int) -> LayerShape:
        """Return the sizes of a layer."""
        experts, inner = self.variant.experts, self.intermediate_size
        if index == self.num_layers and self.head is not None:
            inner = self.head.intermediate_size
        elif self.variant.shapes:
            return self.variant.shapes[index]
        elif experts is not None and index in experts.dense:
            inner = experts.dense_size
        return LayerShape(self.head_dim, self.num_kv_heads, inner, index)

    def at(self, index: int) -> DecoderConfig:
        """Return the configuration of a layer alone; scores have one scale in all."""
        if index == self.num_layers and self.head is not None and self.head.reads:
            return replace(self, variant=LLAMA)  # as all EAGLE-3 heads
        if not self.variant.shapes:
            return replace(self, rope=self.layer_rope(index) or self.rope)
        shape = self.shape(index)
        scale = self.variant.query_scale * math.sqrt(shape.head_dim / self.head_dim)
        return replace(
            self,
            head_dim=shape.head_dim,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.inner_size,
            rope=self.layer_rope(index) or self.rope,
            variant=replace(self.variant, query_scale=scale, shapes=()),
        )

    def layer_rope(self, index: int) -> Rope | None:
        """Return the rotary embedding of a layer, if any."""
        if index in self.variant.unrotated:
            return None
        window = self.variant.window
        if window is None or window.rope is None or index not in window.layers:
            return self.rope
        return window.rope

    def within(self, max_model_len: int | None, head: Path | None = None) -> DecoderConfig:
        """Return it for shorter texts, and with a checkpoint's head. Raises: CheckpointError."""
        most = self.max_position_embeddings
        least = min(most, max_model_len or most)
        own = replace(self, max_position_embeddings=least)
        content = None if head is None else open_checkpoint(head).head()
        if head is None:
            return own
        if content is None:
            some = f"{HEAD_PROJECTION}, {EAGLE3} or {ASSISTANTS[0]}"
            raise CheckpointError(f"{head}: has no head ({some})")
        if content.get("architectures") in [[name] for name in ASSISTANTS]:
            return replace(own, assistant=_assistant(head, content, own))
        return replace(own, head=_head_shape(head, content, own))

    @classmethod
    def from_pretrained(cls, path: Path) -> DecoderConfig:
        """Read a checkpoint: a folder in Hugging Face layout, or a GGUF file.

        Raises CheckpointError where it is unreadable or asks for something unsupported."""
        described = open_checkpoint(path).description()
        architecture = _architecture(described.file, described.content)
        try:
            check_fields(described.content)
            if not are_ids(described.eos_token_ids):
                raise ValueError(f"token ids that end a text are {described.eos_token_ids}")
            hf_config = ordinary_config(architecture, described.content)
            if hf_config is None:
                hf_config = _in_transformers(described.content)
            return _from_transformers(architecture, hf_config, described.eos_token_ids)
        except Exception as error:
            raise CheckpointError(f"{described.file}: {one_line(error)}") from error


def _assistant(path: Path, content: dict[str, Any], model: DecoderConfig) -> DecoderConfig:
    """Return the configuration of an assistant beside a model. Raises: CheckpointError."""
    text = {**(content.get("text_config") or {}), "num_kv_shared_layers": 0}
    text |= {key: content[key] for key in ("dtype", "torch_dtype") if key in content}
    text["tie_word_embeddings"] = content.get("tie_word_embeddings", True)
    try:
        check_fields(text)
        own = _from_transformers(_ASSISTANT, _in_transformers(text), ())
        size, variant = content.get("backbone_hidden_size"), own.variant
        fits = size == model.hidden_size and own.vocab_size == model.vocab_size
        if not fits or not model.variant.shapes:
            raise ValueError(
                f"it assists a Gemma 4 of hidden_size {size} with {own.vocab_size} tokens; this is "
                f"{model.architecture}, {model.hidden_size} with {model.vocab_size}"
            )
        if variant.ple_size or variant.experts is not None:
            raise ValueError("per-layer embeddings and experts of an assistant are not computed")
        shapes = tuple(_read_shape(own, i, model) for i in range(own.num_layers))
    except Exception as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from error
    scale = model.variant.embedding_scale  # its embeddings enter
    variant = replace(variant, embedding_scale=scale, softcap=0.0, shapes=shapes)
    if (window := variant.window) is not None:  # counts a row's own position, which has no key
        window = replace(window, size=max(1, window.size - 1))
    variant = replace(variant, window=window, assists=model.hidden_size)
    return replace(own, variant=variant, max_position_embeddings=model.max_position_embeddings)


def _read_shape(config: DecoderConfig, index: int, model: DecoderConfig) -> LayerShape:
    """Return an assistant's layer with the model's layer whose keys and values it reads.

    That is the last of the same kind that has its own. Raises ValueError where heads differ."""
    shape, is_windowed = config.shape(index), config.variant.is_windowed(index)
    same = [i for i in model.kv_layers if model.variant.is_windowed(i) == is_windowed]
    read = model.shape(same[-1]) if same else None
    own = (shape.num_kv_heads, shape.head_dim)
    if read is None or own != (read.num_kv_heads, read.head_dim):
        raise ValueError(f"layer {index} reads {own[0]} heads of {own[1]}; the target has {read}")
    return replace(shape, kv_layer=~same[-1])


def _head_shape(path: Path, content: dict[str, Any], config: DecoderConfig) -> HeadShape:
    """Return the shape of a head beside a model. Raises: CheckpointError."""
    inner, last = config.intermediate_size, config.num_layers
    if not content:
        return HeadShape(inner)
    reads = content.get("eagle_aux_hidden_state_layer_ids") or (2, last // 2, last - 3)
    vocab, inner = content.get("draft_vocab_size"), content.get("intermediate_size", inner)
    in_order = len(reads) == 3 and sorted({*reads, -1, last}) == [-1, *reads, last]
    if not in_order or not isinstance(vocab, int) or vocab < 1:
        raise CheckpointError(
            f"{path}: reads the inputs of layers {[*reads]} of {last} and tells {vocab!r} tokens; "
            "three are expected, ascending"
        )
    return HeadShape(inner, tuple(reads), vocab)


def _in_transformers(content: dict[str, Any]) -> Any:
    """Return transformers' configuration. Raises ValueError with a message of our own."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**content)
    except Exception as error:
        raise ValueError(in_words(error, content)) from error


def _check_rope(rope: Rope, head_dim: int) -> None:
    rotated = rope.rotary_dim(head_dim)
    if rotated < 2 or rotated % 2:
        raise ValueError(f"{rotated} of {head_dim} dimensions of a head are rotated; must be even")
    for name in ("short_factor", "long_factor") if rope.rope_type == "longrope" else ():
        if (found := len(getattr(rope, name))) != rotated // 2:
            raise ValueError(
                f"rope longrope: {name} has {found} numbers; {rotated // 2} are expected"
            )


def _architecture(file: Path, raw: dict[str, Any]) -> str:
    """Return the one named architecture. Raises CheckpointError for an unsupported one."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        if isinstance(names, list) and len(names) == 1 and names[0] in MISSING:
            raise CheckpointError(f"{file}: {names[0]} has {MISSING[names[0]]}; not computed yet")
        known = ", ".join([*FAMILIES, *TEXT_PARTS])
        raise CheckpointError(f"{file}: architectures is {names!r}; allowed: one of {known}")
    model_type = FAMILIES[names[0]].model_type
    if raw.get("model_type") != model_type:
        raise CheckpointError(
            f"{file}: model_type is {raw.get('model_type')!r}; {names[0]} needs {model_type!r}"
        )
    return str(names[0])


def _from_transformers(
    architecture: str, hf_config: Any, generation_eos: tuple[int, ...]
) -> DecoderConfig:
    if not getattr(hf_config, "is_causal", True):
        raise ValueError("is_causal is false; allowed: true")
    for name, value in FAMILIES[architecture].usual_fields(hf_config).items():
        setattr(hf_config, name, value)
    variant, rope = FAMILIES[architecture].variant(hf_config), rope_of(architecture, hf_config)
    inner = None if variant.experts is None else getattr(hf_config, "moe_intermediate_size", None)
    positions = hf_config.max_position_embeddings
    if not FAMILIES[architecture].counts_scaled:
        positions = rope.scaled_positions(positions)
    eos_token_ids = token_ids(hf_config.eos_token_id) + generation_eos
    first = hf_config.per_layer_config[0] if variant.shapes else hf_config
    head_dim = getattr(first, "head_dim", None)
    return DecoderConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=inner or hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=first.num_key_value_heads,
        head_dim=head_dim or hf_config.hidden_size // hf_config.num_attention_heads,
        # The residual lies here without residual_scale, which its norms would divide out again.
        rms_norm_eps=float(hf_config.rms_norm_eps) / variant.residual_scale**2,
        rope=rope,
        max_position_embeddings=positions,
        variant=variant,
        tie_word_embeddings=bool(hf_config.tie_word_embeddings),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        dtype=_dtype(hf_config) or FAMILIES[architecture].dtype,
        architecture=architecture,
    )


def _dtype(hf_config: Any) -> torch.dtype | None:
    dtype = hf_config.dtype if hasattr(hf_config, "dtype") else hf_config.torch_dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    return dtype
