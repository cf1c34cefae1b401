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

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())
"""What `config.json` says, by model."""


def check_logits(path: Path, saved: Checkpoint) -> None:
    ids = np.arange(40)
    runner = EagerRunner.load(path, torch.float32, CPU, 8, 8)
    ours = runner.forward(Paging(8, 8).batch(("a", ids, 0, 40)))
    torch.testing.assert_close(ours, saved.logits(ids), rtol=0, atol=2e-4)


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


def published(path: Path, name: str, **changes: Any) -> DecoderConfig:
    (path / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
    return DecoderConfig.from_pretrained(path)


def test_gemma_3_as_it_is_published(tmp_path: Path) -> None:
    small, large = published(tmp_path, "gemma-3-1b"), published(tmp_path, "gemma-3-27b")
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
    small, large = published(tmp_path, "gemma-4-e2b"), published(tmp_path, "gemma-4-31b")
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
    text = PUBLISHED["gemma-4-31b"]["text_config"] | {"enable_moe_block": True, "num_experts": 128}
    text |= {"top_k_experts": 8, "moe_intermediate_size": 704}
    mixed = published(tmp_path, "gemma-4-31b", text_config=text)
    assert mixed.variant.experts == Experts(128, 8, norm_topk_prob=True, beside=True)
    assert (mixed.intermediate_size, mixed.shape(0).inner_size) == (704, 21504)
    # A token of 31B: 50 layers of 16 heads of 256, 10 of 4 of 512.
    assert kv_bytes_per_token(large, torch.bfloat16) == 2 * 2 * (50 * 4096 + 10 * 2048)


def test_qwen_3_5_as_it_is_published(tmp_path: Path) -> None:
    config = published(tmp_path, "qwen-3-5")
    delta = config.variant.delta
    assert delta.layers == {i for i in range(24) if i % 4 != 3}
    assert (delta.key_heads, delta.value_heads, delta.conv_size) == (16, 16, 3 * 16 * 128)
    assert config.variant.gated
    assert config.rope == Rope(1e7, partial_rotary_factor=0.25)
    assert (len(config.kv_layers), config.dtype) == (6, torch.bfloat16)
    assert config.tie_word_embeddings


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    config = published(tmp_path, "gpt-oss-20b")
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
    saved = write_checkpoint(tmp_path, CASES[case])
    tensors = load_file(tmp_path / "model.safetensors")
    spelt = {re.sub(r"^model\.", "model.language_model.", n): t for n, t in tensors.items()}
    spelt |= {"mtp.fc.weight": torch.ones(2, 2), "model.visual.norm.weight": torch.ones(2)}
    save_file(spelt, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    (name,) = text["architectures"]
    whole = {"architectures": [name.replace("CausalLM", "ConditionalGeneration")]}
    whole["model_type"] = text["model_type"].removesuffix("_text")
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    check_logits(tmp_path, saved)


def test_experts_as_they_are_published(tmp_path: Path) -> None:
    of_text = {
        k: v for k, v in PUBLISHED["qwen-3-5"]["text_config"].items() if k != "intermediate_size"
    }
    of_text |= {"model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512}
    of_text |= {"num_experts": 256, "shared_expert_intermediate_size": 512}
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    new = published(tmp_path, "qwen-3-5", **whole, text_config=of_text)
    shared = {"shared_size": 512, "gates_shared": True}
    assert new.variant.experts == Experts(256, 8, norm_topk_prob=True, **shared)
    assert new.intermediate_size == new.shape(0).inner_size == 512
    older = published(tmp_path, "qwen-3-next")
    assert older.variant.experts == Experts(512, 10, norm_topk_prob=True, **shared)
    assert older.variant.delta.mixed == ("in_proj_qkvz", "in_proj_ba")
    assert older.rope == new.rope == Rope(1e7, partial_rotary_factor=0.25)
    glm = published(tmp_path, "glm-4-5-air")
    dense = {"dense": frozenset([0]), "dense_size": 10944}
    by_sigmoid = {"sigmoid_scores": True, "chosen_with_bias": True, "shared_size": 1408}
    assert glm.variant.experts == Experts(128, 8, norm_topk_prob=True, **dense, **by_sigmoid)
    assert (glm.shape(0).inner_size, glm.shape(1).inner_size) == (10944, 1408)
    assert (glm.variant.bias, glm.variant.qk_norm) == ("qkv", False)
    assert glm.rope == Rope(1e6, partial_rotary_factor=0.5)


@pytest.mark.parametrize("case", ["qwen3-moe", "qwen3-5-moe", "glm4-moe"])
def test_experts_in_one_tensor_or_apart(broken: Broken, checkpoint: Checkpoints, case: str) -> None:
    """As transformers has them in memory, and as it writes them."""
    path, saved = broken(case), checkpoint(case)
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
        check_logits(path, saved)
    save_file(together | {names[-1]: torch.ones(4, 80, 48)}, file, {"format": "pt"})
    refusal(path, ".experts.4.gate_proj.weight", "has shape (4, 80, 48)", "(40, 48) of each")


@pytest.mark.parametrize("case", ["ministral3", "mistral"])
def test_the_text_part_of_mistral_3(tmp_path: Path, case: str) -> None:
    """Its model_type tells which model it is."""
    saved = write_checkpoint(tmp_path, CASES[case])
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    check_logits(tmp_path, saved)


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
    path = with_images.path
    tensors = load_file(path / "model.safetensors")
    spelt = {
        re.sub(r"^(language_model.model|model.language_model)\.", prefix, n): t
        for n, t in tensors.items()
    }
    assert any(name.startswith(prefix) for name in spelt)
    save_file(spelt, path / "model.safetensors", {"format": "pt"})
    config = DecoderConfig.from_pretrained(path)
    assert config == DecoderConfig.from_pretrained(path / "text")
    check_logits(path, with_images)
    edit_json(path / "config.json", text_config=None)
    refusal(path, "has no text_config, which Gemma3ForConditionalGeneration needs")
