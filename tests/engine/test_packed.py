"""Quantised checkpoint folders: the values of every format, packed here as its definition says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small_models import CASES, write_checkpoint

from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.weights import load_weights

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


def pack_symmetric(bits: int) -> Pack:
    def pack(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        most = (1 << (bits - 1)) - 1
        grouped = weight.unflatten(1, (-1, GROUP))
        scale = (grouped.abs().amax(-1) / most).bfloat16()
        values = (grouped / scale.float()[..., None]).round().clamp(-most - 1, most)
        tensors = {
            f"{module}.weight_packed": words(values.flatten(1) + most + 1, bits),
            f"{module}.weight_scale": scale,
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }
        return tensors, (values * scale.float()[..., None]).flatten(1)

    return pack


def pack_bytes(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127)
    tensors = {f"{module}.weight": values.to(torch.int8), f"{module}.weight_scale": scale}
    return tensors, values * scale.float()


def pack_gptq(bits: int, shift: int, *, reordered: bool = False) -> Pack:
    def pack(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scale, zero = rounded(weight, bits, GROUP)
        index = torch.arange(weight.shape[1]) // GROUP
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


def pack_awq(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scale, zero = rounded(weight, 4, GROUP)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(columns: torch.Tensor) -> torch.Tensor:
        return words(columns.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    tensors = {
        f"{module}.qweight": interleaved(values.t()),
        f"{module}.qzeros": interleaved(zero.t()),
        f"{module}.scales": scale.t().half().contiguous(),
    }
    index = torch.arange(weight.shape[1]) // GROUP
    return tensors, (values - zero[:, index]) * scale[:, index]


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    config = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"]}
    return config | {"config_groups": {"group_0": group}}


GROUPS = {"strategy": "group", "group_size": GROUP}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
W4A16 = compressed("pack-quantized", num_bits=4, **GROUPS)
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "W4A16": (W4A16, pack_symmetric(4)),
    "W8A16": (compressed("pack-quantized", num_bits=8, **GROUPS), pack_symmetric(8)),
    "W8A8": (compressed("int-quantized", num_bits=8, strategy="channel"), pack_bytes),
    "gptq": (GPTQ, pack_gptq(4, 1)),
    "gptq reordered": (GPTQ | {"desc_act": True}, pack_gptq(4, 1, reordered=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, pack_gptq(4, 0)),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, pack_gptq(8, 1)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, pack_awq),
}


def write(path: Path, name: str, case: str = "llama") -> Tensors:
    """A folder in a format; returns what its tensors stand for, by their names as floats."""
    write_checkpoint(path, CASES[case])
    config, pack = FORMATS[name]
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
    assert config.dtype == torch.float32
    weights = load_weights(tmp_path, config)
    attention = [expected[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(weights["layers.1.qkv"], torch.cat(attention))
    assert torch.equal(weights["layers.0.down"], expected["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(weights["lm_head"], expected["lm_head.weight"])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        (GPTQ | {"bits": 3}, "gptq of 3 bits; allowed: 4 or 8"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "allowed: gemm"),
        (compressed("float-quantized", num_bits=8), "'float-quantized'; allowed: pack-quantized"),
        (compressed("pack-quantized", num_bits=4, symmetric=False), "symmetric False"),
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
    ],
)
def test_damaged_tensors(
    name: str,
    tensor: str,
    damage: Callable[[torch.Tensor], torch.Tensor | None],
    reason: str,
    tmp_path: Path,
) -> None:
    write(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    full = f"model.layers.1.mlp.up_proj.{tensor}"
    damaged = damage(tensors.pop(full))
    save_file(tensors | ({} if damaged is None else {full: damaged}), file, {"format": "pt"})
    refusal(tmp_path, full, reason)


def refusal(path: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, DecoderConfig.from_pretrained(path))
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(path), *parts):
        assert part in message
