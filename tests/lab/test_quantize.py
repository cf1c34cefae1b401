"""Folders with integer weights, read back by us and by the format's own library."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.engine.small_gguf import WIDE
from tests.engine.small_models import CASES, Case, write_checkpoint

from lab.common.quantize import (
    FORMATS,
    IntegerFormat,
    main,
    pack_words,
    quantize_folder,
    round_matrix,
)
from penstock.config import ConfigError
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.quantized import QuantizedMatrix
from penstock.engine.models.weights import load_weights, stored_weights
from penstock.engine.native.packing import BLOCK_FORMATS

KINDS = {"int8": "INT8_128", "int4": "INT4_32"}
STEPS = {"int8": 1 / 127, "int4": 1 / 7}


def wide(case: str) -> Case:
    return Case(CASES[case].model, CASES[case].config, CASES[case].changes | WIDE)


@pytest.mark.parametrize("case", ["llama", "llama-tied", "qwen2", "phi3"])
@pytest.mark.parametrize("weights", FORMATS)
def test_what_is_written_is_near_and_stays_quantised(weights, case, tmp_path) -> None:
    source, out = tmp_path / "floats", tmp_path / "out"
    write_checkpoint(source, wide(case))
    (source / "tokenizer.json").write_text("{}")
    made = quantize_folder(source, out, weights)
    assert made.bytes_before > made.num_bytes
    assert (out / "tokenizer.json").read_text() == "{}"
    config = DecoderConfig.from_pretrained(out)
    before, after = load_weights(source, config), load_weights(out, config)
    assert before.keys() == after.keys()
    for name, old in before.items():
        new = after[name]
        if not name.endswith(("qkv", "o", "gate_up", "down")):
            assert torch.equal(old, new), name
            continue
        size = 32 if weights == "int4" else old.shape[1]
        largest = old.unflatten(1, (-1, size)).abs().amax(-1).repeat_interleave(size, 1)
        # Half a step; a value that is clipped may be further away.
        near = (old - new).abs() <= largest * STEPS[weights] * 0.51
        assert near.float().mean() > 0.97, name
        assert not torch.equal(old, new), name
    with stored_weights(out, config, torch.float32, BLOCK_FORMATS) as stored:
        down = stored["layers.1.down"]
        assert isinstance(down, QuantizedMatrix)
        assert down.kind == KINDS[weights]
        assert torch.equal(down.dequantize(), after["layers.1.down"])


def test_codes_are_the_nearest_of_the_stored_scale() -> None:
    """And clipping makes the error smaller, as it is for."""
    torch.manual_seed(0)
    weight = torch.randn(16, 128)
    weight[3, 32:64] = 0
    plain = IntegerFormat(4, 32)
    errors = []
    for made in (plain, FORMATS["int4"]):
        codes, scales = round_matrix(weight, made, torch.bfloat16)
        grouped = weight.unflatten(1, (-1, 32))
        values = scales.float()[..., None] * torch.arange(-8, 8)
        nearest = (grouped[..., None] - values[:, :, None]).abs().amin(-1)
        got = (codes.unflatten(1, (-1, 32)) * scales.float()[..., None] - grouped).abs()
        torch.testing.assert_close(got, nearest, rtol=0, atol=1e-6)
        assert (codes[3, 32:64] == 0).all()
        errors.append(float(got.square().sum()))
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.parametrize("weights", FORMATS)
def test_the_format_s_own_library_reads_the_same(weights: str, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    source, out = tmp_path / "floats", tmp_path / "out"
    write_checkpoint(source, wide("llama"))
    quantize_folder(source, out, weights)
    config = DecoderConfig.from_pretrained(out)
    ours = load_weights(out, config)["layers.0.down"]
    module, bits = "model.layers.0.mlp.down_proj", FORMATS[weights].bits
    with safe_open(out / "model.safetensors", framework="pt") as file:
        packed = file.get_tensor(f"{module}.weight_packed")
        scales = file.get_tensor(f"{module}.weight_scale")
        shape = file.get_tensor(f"{module}.weight_shape")
    codes = library.unpack_from_int32(packed, bits, torch.Size(shape.tolist()))
    size = codes.shape[1] // scales.shape[1]
    assert torch.equal(ours, codes * scales.float().repeat_interleave(size, 1))
    assert torch.equal(pack_words(codes, bits), library.pack_to_int32(codes, bits))


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    def refusal(source: Path, out: Path, weights: str = "int4") -> str:
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            quantize_folder(source, out, weights)
        message = str(caught.value)
        assert "\n" not in message
        return message

    out = tmp_path / "out"
    good, narrow = tmp_path / "good", tmp_path / "narrow"
    write_checkpoint(good, wide("llama"))
    write_checkpoint(narrow, CASES["llama"])
    assert "GGUF" in refusal(tmp_path / "model.gguf", out)
    assert "no such folder" in refusal(tmp_path / "missing", out)
    assert "columns in multiples of 32" in refusal(narrow, out)
    assert not out.exists()
    assert "choose another" in refusal(good, narrow)
    quantize_folder(good, out, "int8")
    assert "is quantised already" in refusal(out, tmp_path / "again")
    tensors = load_file(good / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, 0] = torch.inf
    save_file(tensors, good / "model.safetensors", {"format": "pt"})
    message = refusal(good, tmp_path / "again")
    assert name in message
    assert str(good) in message
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("case", ["qwen3-moe", "qwen3-next"])
def test_experts_are_rounded_and_routers_are_not(tmp_path: Path, case: str) -> None:
    moe = CASES[case]
    changes = moe.changes | WIDE | {"moe_intermediate_size": 64, "linear_value_head_dim": 64}
    changes |= {"shared_expert_intermediate_size": 64}
    write_checkpoint(tmp_path / "floats", Case(moe.model, moe.config, changes))
    quantize_folder(tmp_path / "floats", tmp_path / "out", "int4")
    config = DecoderConfig.from_pretrained(tmp_path / "out")
    before, after = (load_weights(tmp_path / name, config) for name in ("floats", "out"))
    assert torch.equal(before["layers.0.router"], after["layers.0.router"])
    rounded = "down" if case == "qwen3-moe" else "shared_down"
    assert not torch.equal(before[f"layers.0.{rounded}"], after[f"layers.0.{rounded}"])
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in written["ignore"]


def test_the_command_says_what_was_written(tmp_path, capsys) -> None:
    source, out = str(tmp_path / "floats"), str(tmp_path / "out")
    write_checkpoint(tmp_path / "floats", wide("llama"))
    assert main([source, out, "--weights", "int8"]) == 0
    assert "14 matrices in int8" in capsys.readouterr().out
    assert main([source, out, "--weights", "int8"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("quantize: ")
    assert said.count("\n") == 1
