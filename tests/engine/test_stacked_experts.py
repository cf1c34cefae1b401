"""Folders that keep the experts of a layer in one tensor, as gpt-oss's do: floats and MXFP4."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small_gguf import WIDE, save_gguf, write_gguf
from tests.engine.small_models import CASES, Checkpoint, in_pieces, tokens, write_checkpoint
from tests.engine.test_gguf import IDS, eager, logits
from tests.engine.test_gguf_tokenizer import ORIGINALS
from tests.engine.test_loading import edit_json, refusal
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.gguf.config import end_token_ids
from penstock.engine.models.gguf.file import GgufFile
from penstock.engine.models.quantized import QuantizedMatrix
from penstock.engine.models.rope import Rope
from penstock.engine.models.weights import load_weights, stored_weights
from penstock.engine.native.packing import BLOCK_FORMATS
from penstock.engine.native.runner import NativeRunner

Tensors = dict[str, torch.Tensor]
WIDE_CASE = replace(CASES["gpt-oss"], changes=CASES["gpt-oss"].changes | WIDE)
STACKS = ("gate_up_proj", "down_proj")


def write_mxfp4(path: Path) -> Checkpoint:
    """Random blocks of MXFP4, and a model with the values that transformers has of them."""
    saved = write_checkpoint(path, WIDE_CASE)
    tensors = load_file(path / "model.safetensors")
    values = dict(saved.model.named_parameters())
    for name in [n for n in tensors if n.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        # Weights of this size: a code is 2 on average.
        exponent = 127 - int(np.log2(2 * columns**0.5))
        scales = torch.randint(exponent - 1, exponent + 1, blocks.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            values[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    edit_json(path / "config.json", quantization_config=config)
    return saved


def test_mxfp4_as_transformers_has_it(tmp_path: Path) -> None:
    """The same values in float32; in the kernels the blocks themselves."""
    saved = write_mxfp4(tmp_path)
    expected = saved.logits(IDS)
    torch.testing.assert_close(logits(eager(tmp_path)), expected, atol=2e-4, rtol=2e-4)
    config = DecoderConfig.from_pretrained(tmp_path)
    weights = load_weights(tmp_path, config)
    with stored_weights(tmp_path, config, torch.float32, BLOCK_FORMATS) as stored:
        for name in ("layers.0.gate_up", "layers.1.down"):
            parts = stored[name]
            assert isinstance(parts, tuple)
            assert all(isinstance(part, QuantizedMatrix) and part.kind == "MXFP4" for part in parts)
            values = torch.cat([part.dequantize() for part in parts])
            assert torch.equal(values.view(weights[name].shape), weights[name])
    native = NativeRunner.load(tmp_path, torch.float32, 16, 16, 2)
    assert (logits(native) - expected).abs().mean() < 0.05 * expected.std()


def test_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    ids = {"a": tokens(120), "b": tokens(9, seed=1), "c": tokens(40, seed=2)}

    def load(threads: int) -> NativeRunner:
        return NativeRunner.load(tmp_path, torch.float32, 64, 16, threads)

    expected = in_pieces(load(1), ids, seed=0)
    for seed in (1, 2):
        found = in_pieces(load(1 + seed), ids, seed)
        assert all(torch.equal(found[name], expected[name]) for name in ids)


def test_a_folder_and_a_file_of_the_same_values(tmp_path: Path) -> None:
    """To the bit, with biases, sinks and matrices of both."""
    saved = write_gguf(tmp_path / "model.gguf", WIDE_CASE)
    saved.model.save_pretrained(tmp_path / "folder")
    for load in (eager, lambda path: NativeRunner.load(path, torch.float32, 16, 16, 1)):
        assert torch.equal(logits(load(tmp_path / "folder")), logits(load(saved.path)))


@pytest.mark.parametrize(
    "part", ["sinks", "router_bias", "gate_bias", "up_bias", "down_bias", "qkv_bias", "o_bias"]
)
def test_each_part_counts(part: str, tmp_path: Path) -> None:
    """Negative control."""
    saved = write_checkpoint(tmp_path, CASES["gpt-oss"])
    config = DecoderConfig.from_pretrained(tmp_path)
    weights = load_weights(tmp_path, config)
    weights[f"layers.0.{part}"] = weights[f"layers.0.{part}"].roll(1)
    runner = NativeRunner(config, weights, torch.float32, 16, 16, 1)
    assert not torch.allclose(logits(runner), saved.logits(IDS), atol=1e-2)


def test_the_activation_is_clamped(tmp_path: Path) -> None:
    """Where gates and ups are far beyond the limit, on both sides."""
    saved = write_checkpoint(tmp_path, CASES["gpt-oss"])
    with torch.no_grad():
        for name, parameter in saved.model.named_parameters():
            if name.endswith("gate_up_proj"):
                parameter.mul_(20)
    saved.model.save_pretrained(tmp_path)
    expected = saved.logits(IDS)
    native = NativeRunner.load(tmp_path, torch.float32, 16, 16, 1)
    for found in (logits(eager(tmp_path)), logits(native)):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


@pytest.mark.parametrize(
    ("part", "damage", "reason"),
    [
        ("down_proj_scales", drop, "down_proj_scales is missing"),
        ("down_proj_bias", drop, "down_proj.weight is missing"),
        ("gate_up_proj_scales", lambda t, n: t.update({n: t[n][:, 1:]}), "(5, 1024, 8, 16)"),
        ("gate_up_proj_blocks", lambda t, n: t.update({n: t[n].float()}), "the tensor of all"),
        ("gate_up_proj_bias", lambda t, n: t.update({n: t[n][:4]}), "the tensor of all"),
        ("down_proj_scales", lambda t, n: t[n].fill_(254), "values that are not finite"),
        ("down_proj_bias", lambda t, n: t[n].fill_(torch.nan), "values that are not finite"),
    ],
)
def test_damaged_stacks(part, damage, reason, tmp_path) -> None:
    write_mxfp4(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    damage(tensors, f"model.layers.1.mlp.experts.{part}")
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt"})
    refusal(tmp_path, reason)


def test_an_end_of_a_message_is_no_end_of_the_text(tmp_path: Path) -> None:
    """In harmony; in Phi's texts it is."""
    ends = {}
    for kind, more in {"harmony": ["<|return|>", "<|call|>"], "phi": ["<|user|>"]}.items():
        tokenizer = ORIGINALS["gpt-2"]()
        tokenizer.add_special_tokens(["<|end|>", *more])
        saved = write_gguf(tmp_path / f"{kind}.gguf", CASES["llama"], tokenizer=tokenizer)
        ids = end_token_ids(GgufFile(saved.path))
        ends[kind] = {tokenizer.id_to_token(i) for i in ids}
    assert {"<|return|>", "<|call|>"} <= ends["harmony"]
    assert "<|end|>" not in ends["harmony"]
    assert "<|end|>" in ends["phi"]


@pytest.mark.parametrize(
    ("pattern", "windows"), [(None, {0, 2}), (3, {0, 1, 3}), ([False, True, True, False], {1, 2})]
)
def test_layers_with_a_window_in_a_file(pattern, windows, tmp_path) -> None:
    kinds = ["sliding_attention" if i in windows else "full_attention" for i in range(4)]
    changes = WIDE_CASE.changes | {"num_hidden_layers": 4, "layer_types": kinds}
    case = replace(WIDE_CASE, changes=changes)
    name = "attention.sliding_window_pattern"
    saved = write_gguf(tmp_path / "model.gguf", case, **{name: pattern})
    window = DecoderConfig.from_pretrained(saved.path).variant.window
    assert window.layers == windows
    torch.testing.assert_close(logits(eager(saved.path)), saved.logits(IDS), atol=2e-4, rtol=2e-4)


def test_type_of_a_bfloat16_file_whose_biases_it_holds(tmp_path: Path) -> None:
    """Those of experts are matrices of float32 values there."""
    saved = write_gguf(tmp_path / "model.gguf", WIDE_CASE, "BF16")
    assert DecoderConfig.from_pretrained(saved.path).dtype == torch.float32
    saved = save_gguf(tmp_path / "rounded.gguf", saved.model.bfloat16().float(), "BF16")
    assert DecoderConfig.from_pretrained(saved.path).dtype == torch.bfloat16


def test_a_file_whose_rotary_embedding_is_not_scaled(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e4}
    case = replace(WIDE_CASE, changes=WIDE_CASE.changes | {"rope_parameters": rope})
    saved = write_gguf(tmp_path / "model.gguf", case)
    assert DecoderConfig.from_pretrained(saved.path).rope == Rope(5e4)


def test_what_a_file_may_not_ask_for(tmp_path: Path) -> None:
    saved = write_gguf(tmp_path / "model.gguf", WIDE_CASE, expert_gating_func=2)
    refusal(saved.path, "gpt-oss.expert_gating_func is 2, which is not computed")
