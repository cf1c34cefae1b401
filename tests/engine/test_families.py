"""What the architectures beside Llama's and Qwen2's say of themselves, and what they may not."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small_models import (
    CASES,
    SHAPE,
    Checkpoint,
    Checkpoints,
    Paging,
    write_checkpoint,
)
from tests.engine.test_loading import CPU, Broken, edit_json, refusal
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from penstock.engine.eager import EagerRunner
from penstock.engine.kv_cache import kv_bytes_per_token
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.rope import Rope
from penstock.engine.models.variant import Experts, LayerShape, SlidingWindow

GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "eos_token_id": [1, 106],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


GEMMA_4_E2B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "tie_word_embeddings": True,
    "vision_config": {"hidden_size": 768},
    "text_config": {
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": None,
        "num_attention_heads": 8,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-06,
        "sliding_window": 512,
        "top_k_experts": None,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
GEMMA_4_31B = GEMMA_4_E2B | {
    "text_config": GEMMA_4_E2B["text_config"]
    | {
        "attention_k_eq_v": True,
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 262144,
    }
}

QWEN_3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "vision_config": {"depth": 12},
    "text_config": {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
}

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"max_window_layers": 1, "layer_types": None}, {1}),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {0}),
    ],
)
def test_which_layers_have_a_window(broken, changes, layers) -> None:
    path = broken("qwen3")
    edit_json(path / "config.json", use_sliding_window=True, sliding_window=8, **changes)
    window = DecoderConfig.from_pretrained(path).variant.window
    assert (window.size, window.layers, window.rope) == (8, layers, None)


def test_a_window_as_long_as_the_model_reads_is_none(broken: Broken) -> None:
    path = broken("mistral-window")
    assert DecoderConfig.from_pretrained(path).variant.window is not None
    edit_json(path / "config.json", sliding_window=SHAPE["max_position_embeddings"])
    assert DecoderConfig.from_pretrained(path).variant.window is None


@pytest.mark.parametrize(
    ("case", "changes", "parts"),
    [
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, ["sliding_window is missing"]),
        (
            "mistral-window",
            {"sliding_window": 0},
            ["sliding_window is 0; must be a whole number above 0"],
        ),
        ("gemma3", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping is 30.0"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention is true"]),
        ("gemma3", {"hidden_activation": "relu"}, ["'relu'; allowed: silu, gelu_pytorch_tanh"]),
        ("qwen3-moe", {"num_experts_per_tok": 6}, ["is 6; allowed: 1..5 (num_experts)"]),
        ("qwen3-moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step is 0; must be a whole"]),
        ("glm4-moe", {"n_group": 5}, ["n_group is 5; allowed: 1, as groups are not computed"]),
        ("glm4-moe", {"routed_scaling_factor": "x"}, ["routed_scaling_factor is 'x'; must be"]),
        ("qwen3-5", {"linear_num_value_heads": 3}, ["is not a multiple of linear_num_key_heads 2"]),
        ("qwen3-5", {"linear_key_head_dim": 0}, ["linear_key_head_dim is 0; must be a whole"]),
        ("qwen3-5", {"layer_types": ["sliding_attention"] * 3}, ["layer_types is", "linear_att"]),
        ("qwen3-5", {"attn_output_gate": False}, ["attn_output_gate is false; allowed: true"]),
        ("gpt-oss", {"swiglu_limit": 5.0}, ["swiglu_limit is 5.0; allowed: 7.0"]),
        ("gpt-oss", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'; allowed: 'silu'"]),
        ("gpt-oss", {"num_local_experts": 0}, ["num_local_experts is 0; must be a whole"]),
        ("gpt-oss", {"num_experts_per_tok": 6}, ["is 6; allowed: 1..5 (num_experts)"]),
        ("smollm3", {"no_rope_layers": [1]}, ["no_rope_layers is [1]; one number for each layer"]),
        ("smollm3", {"mlp_bias": True}, ["mlp_bias is true; allowed: false"]),
        ("granite", {"residual_multiplier": 0}, ["residual_multiplier is 0; must be a number"]),
        ("granite-hybrid", {"layer_types": ["mamba", "attention"]}, ["some layers are of Mamba-2"]),
        ("granite-hybrid", {"num_local_experts": 4}, ["num_local_experts is not 0; its experts"]),
        ("lfm2", {"conv_bias": True}, ["conv_bias is true; allowed: false"]),
        ("lfm2", {"conv_L_cache": 0}, ["conv_L_cache is 0; must be a whole number above 0"]),
        ("gemma4", {"use_bidirectional_attention": "all"}, ["is_causal is false; allowed: true"]),
        ("gemma4-moe", {"top_k_experts": 6}, ["is 6; allowed: 1..5 (num_experts)"]),
        ("gemma4-shared", {"num_kv_shared_layers": 5}, ["leaves no layer of full_attention"]),
        ("gemma4-shared", {"vocab_size_per_layer_input": 90}, ["differs from vocab_size"]),
    ],
)
def test_what_an_architecture_may_not_ask_for(broken, case, changes, parts) -> None:
    path = broken(case)
    edit_json(path / "config.json", **changes)
    refusal(path, "config.json", *parts)


def published(path: Path, content: dict[str, Any]) -> DecoderConfig:
    (path / "config.json").write_text(json.dumps(content))
    return DecoderConfig.from_pretrained(path)


def test_gemma_3_as_it_is_published(tmp_path: Path) -> None:
    small, large = published(tmp_path, GEMMA_3_1B), published(tmp_path, GEMMA_3_27B)
    for config, size, full in ((small, 512, range(5, 26, 6)), (large, 1024, range(5, 62, 6))):
        window = config.variant.window
        assert (window.size, window.rope) == (size, Rope(10_000.0))
        assert window.layers == set(range(config.num_layers)) - set(full)
        assert (config.eos_token_ids, config.dtype) == ((1, 106), torch.bfloat16)
        assert config.tie_word_embeddings
    assert small.rope == Rope(1e6)
    assert large.rope == Rope(1e6, "linear", 8.0)
    assert (small.variant.query_scale, large.variant.query_scale) == (1, (128 / 168) ** 0.5)


def test_gemma_4_as_it_is_published(tmp_path: Path) -> None:
    small, large = published(tmp_path, GEMMA_4_E2B), published(tmp_path, GEMMA_4_31B)
    for config in (small, large):
        assert config.rope == Rope(1e6, "proportional", partial_rotary_factor=0.25)
        assert config.layer_rope(0) == Rope(1e4)
        assert (config.eos_token_ids, config.dtype) == ((1, 106), torch.bfloat16)
        assert config.variant.softcap == 30
        full = config.num_layers - 1
        assert config.at(0).variant.query_scale == 16
        assert config.at(full).variant.query_scale == pytest.approx(512**0.5)
    assert small.kv_layers == list(range(15))
    assert [small.shape(i).kv_layer for i in (14, 15, 18, 19, 34)] == [14, 13, 13, 14, 14]
    assert [small.at(i).intermediate_size for i in (14, 15)] == [6144, 12288]
    assert small.at(19).kv_size == 512
    assert large.shape(5) == LayerShape(512, 4, 21504, 5, keys_are_values=True)
    assert large.shape(6) == LayerShape(256, 16, 21504, 6)
    text = GEMMA_4_31B["text_config"] | {"enable_moe_block": True, "num_experts": 128}
    text |= {"top_k_experts": 8, "moe_intermediate_size": 704}
    mixed = published(tmp_path, GEMMA_4_31B | {"text_config": text})
    assert mixed.variant.experts == Experts(128, 8, norm_topk_prob=True, beside=True)
    assert (mixed.intermediate_size, mixed.shape(0).inner_size) == (704, 21504)
    # A token of 31B: 50 layers of 16 heads of 256, 10 of 4 of 512.
    assert kv_bytes_per_token(large, torch.bfloat16) == 2 * 2 * (50 * 4096 + 10 * 2048)


def test_qwen_3_5_as_it_is_published(tmp_path: Path) -> None:
    config = published(tmp_path, QWEN_3_5)
    delta = config.variant.delta
    assert delta.layers == {i for i in range(24) if i % 4 != 3}
    assert (delta.key_heads, delta.value_heads, delta.conv_size) == (16, 16, 3 * 16 * 128)
    assert config.variant.gated
    assert config.rope == Rope(1e7, partial_rotary_factor=0.25)
    assert (len(config.kv_layers), config.dtype) == (6, torch.bfloat16)
    assert config.tie_word_embeddings


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    config = published(tmp_path, GPT_OSS_20B)
    variant = config.variant
    assert variant.window == SlidingWindow(128, frozenset(range(0, 24, 2)))
    assert variant.experts == Experts(32, 4, norm_topk_prob=True, bias=True)
    assert (variant.bias, variant.activation, variant.sinks) == ("qkvo", "clamped", True)
    bands = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
    assert config.rope == Rope(150000.0, "yarn", 32.0, truncate=False, **bands)
    assert (config.max_position_embeddings, config.intermediate_size) == (131072, 2880)
    # It does not say its type.
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize("case", ["qwen3-5", "qwen3-5-moe", "gemma4-shared", "gemma4-moe"])
def test_the_text_part_of_a_model_that_sees(tmp_path: Path, case: str) -> None:
    """Its head that predicts further tokens, and what sees images, are left."""
    saved, ids = write_checkpoint(tmp_path, CASES[case]), np.arange(40)
    tensors = load_file(tmp_path / "model.safetensors")
    spelt = {re.sub(r"^model\.", "model.language_model.", n): t for n, t in tensors.items()}
    spelt |= {"mtp.fc.weight": torch.ones(2, 2), "model.visual.norm.weight": torch.ones(2)}
    save_file(spelt, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    (name,) = text["architectures"]
    whole = {"architectures": [name.replace("CausalLM", "ConditionalGeneration")]}
    whole["model_type"] = text["model_type"].removesuffix("_text")
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    runner = EagerRunner.load(tmp_path, torch.float32, CPU, 8, 8)
    ours = runner.forward(Paging(8, 8).batch(("a", ids, 0, 40)))
    torch.testing.assert_close(ours, saved.logits(ids), rtol=0, atol=2e-4)


QWEN_3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def test_experts_as_they_are_published(tmp_path: Path) -> None:
    of_text = {k: v for k, v in QWEN_3_5["text_config"].items() if k != "intermediate_size"}
    of_text |= {"model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512}
    of_text |= {"num_experts": 256, "shared_expert_intermediate_size": 512}
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    new = published(tmp_path, whole | {"text_config": of_text})
    shared = {"shared_size": 512, "gates_shared": True}
    assert new.variant.experts == Experts(256, 8, norm_topk_prob=True, **shared)
    assert new.intermediate_size == new.shape(0).inner_size == 512
    older = published(tmp_path, QWEN_3_NEXT)
    assert older.variant.experts == Experts(512, 10, norm_topk_prob=True, **shared)
    assert older.variant.delta.mixed == ("in_proj_qkvz", "in_proj_ba")
    assert older.rope == new.rope == Rope(1e7, partial_rotary_factor=0.25)
    glm = published(tmp_path, GLM_4_5_AIR)
    dense = {"dense": frozenset([0]), "dense_size": 10944}
    by_sigmoid = {"sigmoid_scores": True, "chosen_with_bias": True, "shared_size": 1408}
    assert glm.variant.experts == Experts(128, 8, norm_topk_prob=True, **dense, **by_sigmoid)
    assert (glm.shape(0).inner_size, glm.shape(1).inner_size) == (10944, 1408)
    assert (glm.variant.bias, glm.variant.qk_norm) == ("qkv", False)
    assert glm.rope == Rope(1e6, partial_rotary_factor=0.5)


@pytest.mark.parametrize("case", ["qwen3-moe", "qwen3-5-moe", "glm4-moe"])
def test_experts_in_one_tensor_or_apart(broken: Broken, checkpoint: Checkpoints, case: str) -> None:
    """As transformers has them in memory, and as it writes them."""
    path, saved, ids = broken(case), checkpoint(case), np.arange(40)
    file = path / "model.safetensors"
    together = {name: tensor.contiguous() for name, tensor in saved.model.state_dict().items()}
    names = [name for name in together if name.endswith("experts.gate_up_proj")]
    apart = {name: tensor for name, tensor in together.items() if ".experts." not in name}
    for name in names:
        folder = name.removesuffix(".gate_up_proj")
        for i, both in enumerate(together[name]):
            uses = dict(zip(("gate", "up"), both.chunk(2), strict=True))
            uses["down"] = together[f"{folder}.down_proj"][i]
            apart |= {f"{folder}.{i}.{use}_proj.weight": x.clone() for use, x in uses.items()}
    assert load_file(file).keys() in (together.keys(), apart.keys())
    for tensors in (together, apart):
        save_file(tensors, file, {"format": "pt"})
        runner = EagerRunner.load(path, torch.float32, CPU, 8, 8)
        ours = runner.forward(Paging(8, 8).batch(("a", ids, 0, 40)))
        torch.testing.assert_close(ours, saved.logits(ids), rtol=0, atol=2e-4)
    save_file(together | {names[-1]: torch.ones(4, 80, 48)}, file, {"format": "pt"})
    refusal(path, ".experts.4.gate_proj.weight", "has shape (4, 80, 48)", "(40, 48) of each")


@pytest.mark.parametrize("case", ["ministral3", "mistral"])
def test_the_text_part_of_mistral_3(tmp_path: Path, case: str) -> None:
    """Its model_type tells which model it is."""
    saved, ids = write_checkpoint(tmp_path, CASES[case]), np.arange(40)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    runner = EagerRunner.load(tmp_path, torch.float32, CPU, 8, 8)
    ours = runner.forward(Paging(8, 8).batch(("a", ids, 0, 40)))
    torch.testing.assert_close(ours, saved.logits(ids), rtol=0, atol=2e-4)


@pytest.fixture
def with_images(tmp_path: Path) -> Checkpoint:
    """A Gemma 3 that reads images, too; its text model's weights as random as the others'."""
    text = write_checkpoint(tmp_path / "text", CASES["gemma3"]).model
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text.config, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(tmp_path)
    return Checkpoint(tmp_path, text)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_reads_images(with_images: Checkpoint, prefix: str) -> None:
    path, ids = with_images.path, np.arange(40)
    tensors = load_file(path / "model.safetensors")
    spelt = {
        re.sub(r"^(language_model.model|model.language_model)\.", prefix, n): t
        for n, t in tensors.items()
    }
    assert any(name.startswith(prefix) for name in spelt)
    save_file(spelt, path / "model.safetensors", {"format": "pt"})
    config = DecoderConfig.from_pretrained(path)
    assert config == DecoderConfig.from_pretrained(path / "text")
    ours = EagerRunner.load(path, torch.float32, CPU, 8, 8).forward(
        Paging(8, 8).batch(("a", ids, 0, 40))
    )
    torch.testing.assert_close(ours, with_images.logits(ids), rtol=0, atol=2e-4)
    edit_json(path / "config.json", text_config=None)
    refusal(path, "has no text_config, which Gemma3ForConditionalGeneration needs")
