"""Quantised checkpoint folders: the values of every format, packed here as its definition says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small_gguf import WIDE
from tests.engine.small_models import CASES, Case, write_checkpoint
from tests.engine.test_gguf import eager, logits
from tests.engine.test_loading import refusal
from tests.products import covering
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from lab.common.quantize import quantize_folder
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.quantized import QuantizedMatrix
from penstock.engine.models.weights import load_weights, stored_weights
from penstock.engine.native.packing import BLOCK_FORMATS
from penstock.engine.native.runner import NativeRunner

GROUP = 16
Tensors = dict[str, torch.Tensor]
Pack = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] -> [n, m * bits / 32] int32, value by value, the first in the lowest bits."""
    per_word = 32 // bits
    packed = torch.zeros(values.shape[0], values.shape[1] // per_word, dtype=torch.int64)
    for column in range(values.shape[1]):
        shifted = values[:, column].long() << (bits * (column % per_word))
        packed[:, column // per_word] |= shifted
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def rounded(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, ...]:
    """Unsigned values, and scales and zero points of each group of columns."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / ((1 << bits) - 1)).half().float()
    zero = (-low / scale).round().clamp(1, (1 << bits) - 1)
    values = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, (1 << bits) - 1)
    return values.flatten(1), scale, zero


def pack_symmetric(bits: int, group: int) -> Pack:
    def pack(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        most = (1 << (bits - 1)) - 1
        grouped = weight.unflatten(1, (-1, group))
        scale = (grouped.abs().amax(-1) / most).bfloat16()
        values = (grouped / scale.float()[..., None]).round().clamp(-most - 1, most)
        tensors = {
            f"{module}.weight_packed": words(values.flatten(1) + most + 1, bits),
            f"{module}.weight_scale": scale,
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }
        return tensors, (values * scale.float()[..., None]).flatten(1)

    return pack


def pack_with_zeros(group: int) -> Pack:
    """compressed-tensors of 4 bits: zero points are packed along the rows."""

    def pack(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scale, zero = rounded(weight, 4, group)
        tensors = {
            f"{module}.weight_packed": words(values, 4),
            f"{module}.weight_scale": scale.half(),
            f"{module}.weight_zero_point": words(zero.t().contiguous(), 4).t().contiguous(),
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }
        index = torch.arange(weight.shape[1]) // group
        return tensors, (values - zero[:, index]) * scale[:, index]

    return pack


def pack_bytes(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127)
    tensors = {f"{module}.weight": values.to(torch.int8), f"{module}.weight_scale": scale}
    return tensors, values * scale.float()


def pack_gptq(bits: int, group: int, shift: int = 1, *, reordered: bool = False) -> Pack:
    def pack(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scale, zero = rounded(weight, bits, group)
        if bits == 8:  # of 8 bits they are symmetric
            scale = (weight.unflatten(1, (-1, group)).abs().amax(-1) / 127).half().float()
            zero = torch.full_like(scale, 128)
            values = (weight / scale.repeat_interleave(group, 1) + 128).round().clamp(0, 255)
        index = torch.arange(weight.shape[1]) // group
        if reordered:
            index = index[torch.randperm(len(index))]
        tensors = {
            f"{module}.qweight": words(values.contiguous(), bits).t().contiguous(),
            f"{module}.qzeros": words(zero.t() - shift, bits),
            f"{module}.scales": scale.t().half().contiguous(),
            f"{module}.g_idx": index.int(),
        }
        return tensors, (values - zero[:, index]) * scale[:, index]

    return pack


def pack_awq(group: int) -> Pack:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(columns: torch.Tensor) -> torch.Tensor:
        return words(columns.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    def pack(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scale, zero = rounded(weight, 4, group)
        tensors = {
            f"{module}.qweight": interleaved(values.t()),
            f"{module}.qzeros": interleaved(zero.t()),
            f"{module}.scales": scale.t().half().contiguous(),
        }
        index = torch.arange(weight.shape[1]) // group
        return tensors, (values - zero[:, index]) * scale[:, index]

    return pack


def pack_fp8(*block: int) -> Pack:
    """Without a block a matrix has one scale. Values as transformers dequantises them."""

    def pack(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = block or tuple(weight.shape)
        blocks = [-(-n // b) for n, b in zip(weight.shape, size, strict=True)]
        scale = (torch.rand(blocks) + 0.5) / 100
        ends = [b * n - w for b, n, w in zip(blocks, size, weight.shape, strict=True)]
        of_each = scale.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
        of_each = of_each[: weight.shape[0], : weight.shape[1]]
        values = (weight / of_each).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {
            f"{module}.weight": values,
            f"{module}.weight_scale_inv": scale if block else scale.view(()).bfloat16(),
            f"{module}.activation_scale": torch.tensor(2.0),
        }
        if any(ends):  # transformers has whole blocks only
            return tensors, values.float() * of_each
        read = Fp8Dequantize(None)._dequantize_one
        return tensors, read(values, tensors[f"{module}.weight_scale_inv"], torch.float32)

    return pack


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    config = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"]}
    return config | {"config_groups": {"group_0": group}}


def formats(group: int) -> dict[str, tuple[dict[str, Any], Pack]]:
    """quantization_config, and how a matrix is packed."""
    groups: dict[str, Any] = {"strategy": "group", "group_size": group}
    gptq: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": group}
    four = compressed("pack-quantized", num_bits=4, **groups)
    eight = compressed("pack-quantized", num_bits=8, **groups)
    with_zeros = compressed("pack-quantized", num_bits=4, **groups | {"symmetric": False})
    whole_bytes = compressed("int-quantized", num_bits=8, strategy="channel")
    per_token = compressed("int-quantized", num_bits=8, strategy="channel")
    per_token["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token",
    }  # fmt: skip
    return {
        "W4A16": (four, pack_symmetric(4, group)),
        "W4A16 with zero points": (with_zeros, pack_with_zeros(group)),
        "W8A16": (eight, pack_symmetric(8, group)),
        "W8A8": (per_token, pack_bytes),
        "W8A8 static": (whole_bytes, pack_bytes),
        "gptq": (gptq, pack_gptq(4, group)),
        "gptq reordered": (gptq | {"desc_act": True}, pack_gptq(4, group, reordered=True)),
        "gptq v2": (gptq | {"checkpoint_format": "gptq_v2"}, pack_gptq(4, group, 0)),
        "gptq of 8 bits": (gptq | {"bits": 8}, pack_gptq(8, group)),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": group}, pack_awq(group)),
        "fp8": (FP8 | {"weight_block_size": [8, 16]}, pack_fp8(8, 16)),
        "fp8 in cut blocks": (FP8 | {"activation_scheme": "dynamic"}, pack_fp8(128, 128)),
        "fp8 in one block": (FP8 | {"weight_block_size": None}, pack_fp8()),
    }


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}
FORMATS = formats(GROUP)
GPTQ = FORMATS["gptq"][0]


def write(path: Path, name: str, case: Case = CASES["llama"], group: int = GROUP) -> Tensors:
    """A folder in a format; returns what its tensors stand for, by their names as floats."""
    write_checkpoint(path, case)
    config, pack = formats(group)[name]
    tensors = load_file(path / "model.safetensors")
    expected = dict(tensors)
    for weight_name in [n for n in tensors if n.endswith("_proj.weight")]:
        module = weight_name.removesuffix(".weight")
        made, expected[weight_name] = pack(module, tensors.pop(weight_name))
        tensors |= made
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit(path, config)
    return expected


def edit(path: Path, config: dict[str, Any]) -> None:
    file = path / "config.json"
    content = json.loads(file.read_text()) | {"quantization_config": config}
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("name", FORMATS)
def test_values(name: str, tmp_path: Path) -> None:
    expected = write(tmp_path, name)
    config = DecoderConfig.from_pretrained(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32)
    attention = [expected[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(weights["layers.1.qkv"], torch.cat(attention))
    assert torch.equal(weights["layers.0.down"], expected["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(weights["lm_head"], expected["lm_head.weight"])


KINDS = {
    "W4A16": "INT4_{}",
    "W4A16 with zero points": "UINT4_{}",
    "W8A16": "INT8_{}",
    "W8A8": "INT8_ROWS",
    "W8A8 static": "INT8_128",
    "gptq": "UINT4_{}",
    "gptq v2": "UINT4_{}",
    "gptq of 8 bits": "INT8_{}",
    "awq": "UINT4_{}",
}


BLOCKS = {32: 32, 64: 32, 128: 128, 256: 128}
"""Of the kernels, for groups of so many columns."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "group"), covering(KINDS, BLOCKS, strength=1))
def test_matrices_stay_quantised(name: str, group: int, tmp_path: Path) -> None:
    """With every value that the floats have, exactly."""
    case = replace(CASES["qwen2"], changes=CASES["qwen2"].changes | WIDE)
    expected = write(tmp_path, name, case, group)
    config = DecoderConfig.from_pretrained(tmp_path)
    with stored_weights(tmp_path, config, torch.float32, BLOCK_FORMATS) as weights:
        queries = weights["layers.1.qkv"]
        assert isinstance(queries, tuple)
        for part, x in zip(queries, "qkv", strict=True):
            assert isinstance(part, QuantizedMatrix)
            assert part.kind == KINDS[name].format(BLOCKS[group])
            values = expected[f"model.layers.1.self_attn.{x}_proj.weight"]
            assert torch.equal(part.dequantize(), values)
        assert isinstance(weights["lm_head"], torch.Tensor)


@pytest.mark.parametrize(
    ("name", "group", "why"),
    [("gptq reordered", 32, "out of order"), ("W4A16", 16, "groups of 16 columns of 4 bits")],
)
def test_what_has_no_kernel_is_widened_and_said(name, group, why, tmp_path, caplog) -> None:
    case = replace(CASES["llama"], changes=WIDE)
    expected = write(tmp_path, name, case, group)
    config = DecoderConfig.from_pretrained(tmp_path)
    with stored_weights(tmp_path, config, torch.float32, BLOCK_FORMATS) as weights:
        down = weights["layers.1.down"]
    assert isinstance(down, torch.Tensor)
    assert torch.equal(down, expected["model.layers.1.mlp.down_proj.weight"])
    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage()
    assert why in record.getMessage()


def test_experts_that_share_no_format_are_widened_and_said(tmp_path: Path, caplog) -> None:
    """Of one use alone: the kernels read the gates of all experts as one matrix."""
    case = CASES["qwen3-moe"]
    changes = case.changes | WIDE | {"moe_intermediate_size": 64}
    write_checkpoint(tmp_path / "floats", replace(case, changes=changes))
    quantize_folder(tmp_path / "floats", tmp_path / "out", "int4")
    tensors = load_file(tmp_path / "out/model.safetensors")
    gate = "model.layers.1.mlp.experts.0.gate_proj.weight"
    for part in ("packed", "scale", "shape"):
        del tensors[f"{gate}_{part}"]
    tensors[gate] = load_file(tmp_path / "floats/model.safetensors")[gate]
    save_file(tensors, tmp_path / "out/model.safetensors", {"format": "pt"})
    config = DecoderConfig.from_pretrained(tmp_path / "out")
    with stored_weights(tmp_path / "out", config, torch.float32, BLOCK_FORMATS) as weights:
        gates, ups = weights["layers.1.gate_up"][::2], weights["layers.1.gate_up"][1::2]
        assert {type(part) for part in gates} == {torch.Tensor}
        assert {part.kind for part in (*ups, *weights["layers.1.down"])} == {"INT4_32"}
        assert {part.kind for part in weights["layers.0.gate_up"]} == {"INT4_32"}
    (said,) = caplog.messages
    assert "INT4_32 with float matrices are widened to float32" in said
    runner = NativeRunner.load(tmp_path / "out", torch.float32, 16, 16, 1)
    expected = logits(eager(tmp_path / "out"))
    assert (logits(runner) - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        (GPTQ | {"bits": 3}, "gptq of 3 bits; allowed: 4 or 8"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "allowed: gemm"),
        (FP8 | {"fmt": "e5m2"}, "fp8 is ('e5m2', 'fp8')"),
        (FP8 | {"expert_dtype": "fp4"}, "allowed: e4m3, two sizes or none"),
        (FP8 | {"weight_block_size": [128]}, "blocks [128]"),
        (FP8 | {"weight_block_size": [0, 1]}, "blocks [0, 1]"),
        (compressed("float-quantized", num_bits=8), "'float-quantized'; allowed: pack-quantized"),
        (compressed("int-quantized", num_bits=8, symmetric=False), "symmetric False"),
        (compressed("pack-quantized", num_bits=4, strategy="block"), "'block'"),
        (compressed("pack-quantized", num_bits=4) | {"config_groups": {}}, "allowed: one"),
        (compressed("pack-quantized", num_bits=4) | {"config_groups": {"a": 1}}, "int"),
    ],
)
def test_formats_that_are_not_read(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(tmp_path, "W4A16")
    edit(tmp_path, config)
    refusal(tmp_path, "config.json: quantization_config", reason)


@pytest.mark.parametrize(
    ("name", "tensor", "damage", "reason"),
    [
        ("W4A16", "weight_packed", lambda x: x[:-1], "has shape"),
        ("W4A16", "weight_packed", lambda x: x.float(), "is torch.float32; torch.int32"),
        ("W8A8", "weight", lambda x: x.float(), "is torch.float32; torch.int8"),
        ("gptq", "qzeros", lambda x: None, "is missing"),
        ("gptq", "g_idx", lambda x: x + 100, "names groups beyond"),
        ("awq", "scales", lambda x: x.t().contiguous(), "has shape"),
        ("fp8", "weight", lambda x: x.float(), "is torch.float32; torch.float8_e4m3fn"),
        ("fp8", "weight", lambda x: x.view(torch.uint8).fill_(255).view(x.dtype), "not finite"),
        ("fp8", "weight_scale_inv", lambda x: x[:-1], "has shape"),
        ("fp8 in one block", "weight_scale_inv", lambda x: x.repeat(2), "torch.bfloat16 (2,)"),
        ("fp8", "weight_scale_inv", lambda x: x.byte(), "is torch.uint8"),
    ],
)
def test_damaged_tensors(name, tensor, damage, reason, tmp_path) -> None:
    write(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    full = f"model.layers.1.mlp.up_proj.{tensor}"
    damaged = damage(tensors.pop(full))
    save_file(tensors | ({} if damaged is None else {full: damaged}), file, {"format": "pt"})
    refusal(tmp_path, full, reason)


def test_fp8_without_a_scale_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "fp8")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, file, {"format": "pt"})
    refusal(tmp_path, "up_proj.weight is torch.float8_e4m3fn; allowed: torch.float32")


@pytest.mark.parametrize("name", ["fp8", "fp8 in one block"])
def test_fp8_is_served_as_the_floats_that_it_stands_for(name: str, tmp_path: Path) -> None:
    """In bfloat16, as the folder says its numbers are; on the kernels and in PyTorch."""
    expected = write(tmp_path, name)
    write_checkpoint(tmp_path / "floats", CASES["llama"])
    save_file(expected, tmp_path / "floats/model.safetensors", {"format": "pt"})
    for folder in (tmp_path, tmp_path / "floats"):
        content = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(content))
    for load in (eager, lambda path: NativeRunner.load(path, torch.float32, 16, 16, 1)):
        assert torch.equal(logits(load(tmp_path)), logits(load(tmp_path / "floats")))
