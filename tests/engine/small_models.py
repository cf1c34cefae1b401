"""Small random checkpoints in Hugging Face layout, and ragged batches over shuffled blocks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from penstock.engine.runner import ModelRunner, RaggedBatch

SHAPE: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _scaled(rope_type: str, **parameters: float) -> dict[str, Any]:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **parameters}
    return {"rope_parameters": rope}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of checkpoint: which transformers model, and what differs from SHAPE."""

    model: type[PreTrainedModel]
    config: type[Any]
    changes: dict[str, Any]


_LLAMA3_BANDS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 4.0],
}
_GEMMA = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention"],
}

_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
"""Sizes that fill no vector."""
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 56, "norm_topk_prob": True}
_GLM = {
    "num_hidden_layers": 3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}

_GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "sliding_window": 21,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1500.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}

_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.15,
    "logits_scaling": 0.3,
}
_HYBRID = _GRANITE | {
    "layer_types": ["attention", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 72,
    "mamba_n_heads": 6,
}
_CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}

_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 21,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
}
_SHARED_KV = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": 89,
}

CASES = {
    "llama": Case(LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": Case(LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-mha": Case(LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 6}),
    "llama-bias": Case(LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "llama-llama3": Case(LlamaForCausalLM, LlamaConfig, _scaled("llama3", **_LLAMA3_BANDS)),
    "llama-linear": Case(LlamaForCausalLM, LlamaConfig, _scaled("linear")),
    "llama-yarn": Case(
        LlamaForCausalLM, LlamaConfig, _scaled("yarn", original_max_position_embeddings=64)
    ),
    "llama-dynamic": Case(LlamaForCausalLM, LlamaConfig, _scaled("dynamic")),
    "qwen2": Case(Qwen2ForCausalLM, Qwen2Config, {"head_dim": 8, "rms_norm_eps": 1e-5}),
    "qwen3": Case(Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-bias": Case(Qwen3ForCausalLM, Qwen3Config, {"attention_bias": True}),
    "qwen3-window": Case(
        Qwen3ForCausalLM,
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3-moe": Case(Qwen3MoeForCausalLM, Qwen3MoeConfig, _EXPERTS),
    "qwen3-moe-norm": Case(
        Qwen3MoeForCausalLM, Qwen3MoeConfig, _EXPERTS | {"norm_topk_prob": True}
    ),
    "mistral": Case(MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-window": Case(MistralForCausalLM, MistralConfig, {"sliding_window": 13}),
    "phi3": Case(Phi3ForCausalLM, Phi3Config, {"head_dim": 8}),
    "phi3-partial": Case(
        Phi3ForCausalLM,
        Phi3Config,
        {"head_dim": 8, "rope_parameters": _PARTIAL, "tie_word_embeddings": True},
    ),
    "phi3-longrope": Case(
        Phi3ForCausalLM,
        Phi3Config,
        {
            "head_dim": 8,
            "original_max_position_embeddings": 256,
            "rope_parameters": _PARTIAL | _LONGROPE,
        },
    ),
    "phi3-longrope-beyond": Case(
        Phi3ForCausalLM,
        Phi3Config,
        {
            "head_dim": 8,
            "original_max_position_embeddings": 2,
            "rope_parameters": _PARTIAL | _LONGROPE,
        },
    ),
    "gemma3": Case(Gemma3ForCausalLM, Gemma3TextConfig, _GEMMA),
    "gemma3-scaled": Case(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        _GEMMA
        | {
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen3-5": Case(Qwen3_5ForCausalLM, Qwen3_5TextConfig, _DELTA),
    "qwen3-5-even": Case(
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        _DELTA
        | {
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe-dense": Case(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        _EXPERTS | {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "qwen3-5-moe": Case(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, _DELTA | _SHARED),
    "qwen3-next": Case(Qwen3NextForCausalLM, Qwen3NextConfig, _DELTA | _SHARED),
    "glm4-moe": Case(Glm4MoeForCausalLM, Glm4MoeConfig, _GLM | {"attention_bias": True}),
    "glm4-moe-scaled": Case(
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        _GLM
        | {
            "use_qk_norm": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
        },
    ),
    "gpt-oss": Case(GptOssForCausalLM, GptOssConfig, _GPT_OSS),
    "smollm3": Case(
        SmolLM3ForCausalLM, SmolLM3Config, {"num_hidden_layers": 4, "attention_bias": True}
    ),
    "smollm3-window": Case(
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 21},
    ),
    "ministral3": Case(
        Ministral3ForCausalLM,
        Ministral3Config,
        _scaled(
            "yarn",
            original_max_position_embeddings=16,
            **{"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        ),
    ),
    "granite": Case(GraniteForCausalLM, GraniteConfig, _GRANITE),
    "granite-hybrid": Case(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        _HYBRID | {"position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "granite-unrotated": Case(GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, _HYBRID),
    "lfm2": Case(Lfm2ForCausalLM, Lfm2Config, _CONV | {"block_multiple_of": 16}),
    "lfm2-even": Case(
        Lfm2ForCausalLM,
        Lfm2Config,
        _CONV
        | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 2, "tie_word_embeddings": False}
        | {"hidden_size": 32, "head_dim": 8, "num_attention_heads": 4},
    ),
    "gemma4": Case(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-shared": Case(Gemma4ForCausalLM, Gemma4TextConfig, _GEMMA4 | _SHARED_KV),
    "gemma4-moe": Case(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        _GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder, and the transformers model that was saved there."""

    path: Path
    model: PreTrainedModel

    @torch.inference_mode()
    def logits(self, token_ids: np.ndarray) -> torch.Tensor:
        """[num_tokens, vocab_size] of one sequence, computed by transformers at once."""
        return self.model(input_ids=torch.from_numpy(token_ids)[None].long()).logits[0].float()

    @property
    def tolerance(self) -> dict[str, float]:
        """Tolerance of its logits in float32: a recurrent state adds up rounding along the text."""
        is_recurrent = hasattr(self.model.config, "linear_conv_kernel_dim")
        return {"rtol": 0.0, "atol": 3e-4 if is_recurrent else 1e-4}


Checkpoints = Callable[[str], Checkpoint]
"""The fixture `checkpoint`: by the name of a case."""


def tokens(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Random token ids of the small vocabulary."""
    return np.random.default_rng(seed).integers(SHAPE["vocab_size"], size=count)


def parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a checkpoint has, also what is learned and yet no parameter."""
    yield from model.named_parameters()
    others = ("correction_bias", "layer_scalar")
    yield from ((n, b) for n, b in model.named_buffers() if n.endswith(others))


@torch.no_grad()
def randomise(model: PreTrainedModel, *, mild: bool = False) -> None:
    """Set random weights, large enough that an error in any of them moves the logits.

    mild: biases and decays within 1, as distant ones magnify what quantised matrices err by."""
    for name, parameter in parameters(model):
        if "norm" in name or "scal" in name:
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() == 1 or name.endswith("_bias"):
            parameter.uniform_(-1.0, 1.0) if mild else parameter.normal_()
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)


def write_checkpoint(path: Path, case: Case, **save_options: Any) -> Checkpoint:
    """Write a model with random weights."""
    torch.manual_seed(0)
    config = case.config(**SHAPE | case.changes)
    config.pad_token_id = None
    model = case.model(config).eval()
    randomise(model)
    model.save_pretrained(path, **save_options)
    return Checkpoint(path, model)


class Paging:
    """Gives sequences blocks in a shuffled order, and slots, and builds batches of their spans."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(np.random.default_rng(seed).permutation(num_blocks))
        self._blocks: dict[str, list[int]] = {}
        self._slots: dict[str, int] = {}

    def batch(self, *spans: tuple[str, np.ndarray, int, int], logits: str = "all") -> RaggedBatch:
        """spans: (sequence, its token ids, start, stop); logits: all rows, or each one's last."""
        counts = [stop - start for _, _, start, stop in spans]
        query_start = np.cumsum([0, *counts])
        rows = np.arange(query_start[-1]) if logits == "all" else query_start[1:] - 1
        return RaggedBatch(
            token_ids=np.concatenate([ids[a:b] for _, ids, a, b in spans]).astype(np.int32),
            positions=np.concatenate([np.arange(a, b) for _, _, a, b in spans]).astype(np.int32),
            query_start=query_start.astype(np.int32),
            seq_lens=np.array([stop for *_, stop in spans], dtype=np.int32),
            block_tables=self._tables(spans),
            logits_rows=rows.astype(np.int32),
            slots=np.array([self._slots[name] for name, *_ in spans], dtype=np.int32),
        )

    def _tables(self, spans: tuple[tuple[str, np.ndarray, int, int], ...]) -> np.ndarray:
        for name, _, _, stop in spans:
            blocks = self._blocks.setdefault(name, [])
            self._slots.setdefault(name, len(self._slots))
            while len(blocks) * self.block_size < stop:
                blocks.append(self._free.pop())
        tables = [self._blocks[name] for name, *_ in spans]
        # Padding must never be read: an id that does not exist makes reading it an error.
        width = max(map(len, tables))
        padded = [[*table, *[self.num_blocks] * (width - len(table))] for table in tables]
        return np.array(padded, dtype=np.int32)


def in_pieces(
    runner: ModelRunner, ids: dict[str, np.ndarray], seed: int
) -> dict[str, torch.Tensor]:
    """Every sequence's logits, computed in batches of random spans of random sequences."""
    rng = np.random.default_rng(seed)
    place = Paging(runner.num_blocks, runner.block_size)
    done = dict.fromkeys(ids, 0)
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    while open_names := [name for name in ids if done[name] < len(ids[name])]:
        names = rng.permutation(open_names)[: rng.integers(1, len(open_names) + 1)]
        spans = []
        for name in names:
            most = len(ids[name]) - done[name]
            rows = int(min(most, rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 9, 13, 40, 100])))
            spans.append((name, ids[name], done[name], done[name] + rows))
        logits = runner.forward(place.batch(*spans))
        counts = [stop - start for *_, start, stop in spans]
        for (name, _, _, stop), rows_of in zip(spans, logits.split(counts), strict=True):
            pieces[name].append(rows_of)
            done[name] = stop
    return {name: torch.cat(rows) for name, rows in pieces.items()}


def check_ragged_mix(runner: ModelRunner, saved: Checkpoint) -> None:
    """Prefill, chunks, verification and decoding of seven sequences in the same batches."""
    place = Paging(runner.num_blocks, runner.block_size)
    ids = {name: tokens(80, seed=i) for i, name in enumerate("abcdefg")}
    stops = [
        {"a": 40, "b": 3, "c": 17},
        {"b": 4, "a": 41, "d": 16, "c": 18, "e": 33},
        {"e": 34, "f": 1, "a": 45, "d": 17, "c": 19, "b": 5, "g": 70},
        {"a": 46, "b": 10, "c": 25, "d": 18, "e": 80, "f": 7, "g": 71},
    ]
    done = dict.fromkeys(ids, 0)
    for step in stops:
        batch = place.batch(*((name, ids[name], done[name], stop) for name, stop in step.items()))
        rows = [saved.logits(ids[name][:stop])[done[name] :] for name, stop in step.items()]
        torch.testing.assert_close(runner.forward(batch), torch.cat(rows), **saved.tolerance)
        done.update(step)
