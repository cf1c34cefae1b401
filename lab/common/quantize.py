"""Rounding of checkpoint folders to integer weights.

    python -m lab.common.quantize FOLDER OUT --weights int8|int4

The result is compressed-tensors (pack-quantized), which vLLM and transformers also read, with the
model's own tokenizer and configuration files. Rounding is to the nearest, without calibration;
embeddings and head are unchanged."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.common.shards import new_folder, save_sharded
from penstock.config import ConfigError
from penstock.engine.models.checkpoint import CheckpointError, Tensors, is_gguf
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.models.packed import WORD
from penstock.engine.models.weight_specs import WeightSpec
from penstock.engine.models.weights import specs_in

_MATRICES = ("qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down")


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Symmetric integers of `bits` bits.

    group_size: columns that share a scale; None: all of a row. clips: shares of a group's largest
    size that are tried as the value of the largest code; the least squared error wins."""

    bits: int
    group_size: int | None
    clips: tuple[float, ...] = (1.0,)

    def columns_per_scale(self, columns: int) -> int:
        return self.group_size or columns


FORMATS = {
    "int8": IntegerFormat(8, None),
    # Without calibration a group of 128 would cost several percent of perplexity.
    "int4": IntegerFormat(4, 32, tuple(share / 20 for share in range(12, 21))),
}
"""Formats that weights may be rounded to."""


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    """Count of rounded matrices, and the bytes of all tensors before and after."""

    matrices: int
    bytes_before: int
    num_bytes: int


def quantize_folder(source: Path, out: Path, weights: str) -> QuantizedFolder:
    """Write the checkpoint folder `source` to `out` with weights in a format of FORMATS.

    An unfinished folder is removed. Raises CheckpointError for a source that is not a readable
    folder of floats, ConfigError where `out` is not empty or new."""
    made, raw = FORMATS[weights], _description(source)
    config = DecoderConfig.from_pretrained(source)
    written = 0

    def count(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal written
        for name, tensor in tensors:
            written += tensor.nbytes
            yield name, tensor

    with open_checkpoint(source).tensors() as tensors:
        specs = specs_in(tensors, config)
        _check_sizes(source, specs, made)
        new_folder(out, sum(file.stat().st_size for file in source.glob("*.safetensors")))
        try:
            _copy_other_files(source, out)
            raw["quantization_config"] = _quantization_config(made, specs)
            (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            rounded = _rounded_tensors(source, tensors, specs, config.dtype, made)
            save_sharded(out, count(rounded))
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
    matrices = sum(len(spec.sources) for spec in specs if _is_rounded(spec))
    before = sum(math.prod(shape) for spec in specs for _, shape in spec.sources)
    return QuantizedFolder(matrices, before * config.dtype.itemsize, written)


def round_matrix(
    weight: torch.Tensor, made: IntegerFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix [rows, columns] float32.

    Returns codes [rows, columns] int8, the multiples of the scale nearest to the weights, and
    scales [rows, groups] in `dtype`."""
    columns = made.columns_per_scale(weight.shape[1])
    groups = weight.reshape(len(weight), -1, columns)
    largest = groups.abs().amax(-1, keepdim=True)
    most = (1 << (made.bits - 1)) - 1
    best = torch.full_like(largest, torch.inf)
    scales, codes = torch.ones_like(largest), torch.zeros_like(groups)
    for clip in made.clips:
        # Rounded as it will be stored, before anything is divided by it.
        scale = (largest * (clip / most)).to(dtype).float()
        scale[scale == 0] = 1.0
        rounded = (groups / scale).round_().clamp_(-most - 1, most)
        error = (rounded * scale - groups).square_().sum(-1, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales = torch.where(is_better, scale, scales)
        codes = torch.where(is_better, rounded, codes)
    return codes.flatten(1).to(torch.int8), scales.squeeze(-1).to(dtype)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack signed codes [rows, columns] int8 into [rows, columns * bits / 32] int32.

    Codes become unsigned, the first in the lowest bits."""
    unsigned = (codes.int() + (1 << (bits - 1))).to(torch.uint8)
    if bits == 4:
        unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return unsigned.contiguous().view(torch.int32)


def _description(source: Path) -> dict[str, Any]:
    """Return config.json unchanged. Raises CheckpointError."""
    if is_gguf(source):
        raise CheckpointError(
            f"{source}: is a GGUF file; a folder of float weights in Hugging Face layout is rounded"
        )
    content = open_checkpoint(source).description().content
    file = source / "config.json"
    raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if raw.get("quantization_config"):
        raise CheckpointError(f"{file}: is quantised already; float weights are expected")
    if raw["architectures"] != content["architectures"]:
        (name,) = raw["architectures"]
        raise CheckpointError(f"{file}: {name} reads images, too; text models are rounded")
    return raw


def _is_rounded(spec: WeightSpec) -> bool:
    return spec.name.rpartition(".")[2] in _MATRICES


def _check_sizes(source: Path, specs: list[WeightSpec], made: IntegerFormat) -> None:
    per_word = WORD // made.bits
    for spec in filter(_is_rounded, specs):
        for name, (rows, columns) in spec.sources:
            multiple = made.group_size or per_word
            if rows % per_word or columns % multiple:
                raise CheckpointError(
                    f"{source}: tensor {name} is {rows} x {columns}; int{made.bits} takes rows in "
                    f"multiples of {per_word}, columns in multiples of {multiple}"
                )


def _copy_other_files(source: Path, out: Path) -> None:
    """Copy tokenizer, chat template and generation settings; no weights in any format."""
    for file in source.iterdir():
        is_weights = file.name.endswith(
            (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth", ".gguf")
        )
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copyfile(file, out / file.name)


def _quantization_config(made: IntegerFormat, specs: list[WeightSpec]) -> dict[str, Any]:
    routers = [
        name.removesuffix(".weight")
        for spec in specs
        if spec.name.endswith(".router")
        for name, _ in spec.sources
    ]
    weights = {
        "num_bits": made.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if made.group_size is None else "group",
        "group_size": made.group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head", *routers],
    }


def _rounded_tensors(
    source: Path,
    tensors: Tensors,
    specs: list[WeightSpec],
    dtype: torch.dtype,
    made: IntegerFormat,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of the new folder. Raises CheckpointError."""
    seen: set[str] = set()  # a matrix may be part of several
    for spec in specs:
        for name, shape in spec.sources:
            if name in seen:
                continue
            seen.add(name)
            is_rounded = _is_rounded(spec)
            tensor = torch.empty(shape, dtype=torch.float32 if is_rounded else dtype)
            tensors.read(name, tensor)
            if is_rounded:
                if not bool(tensor.isfinite().all()):
                    raise CheckpointError(
                        f"{source}: tensor {name} has numbers that are not finite"
                    )
                codes, scales = round_matrix(tensor, made, dtype)
                yield f"{name}_packed", pack_words(codes, made.bits)
                yield f"{name}_scale", scales
                yield f"{name}_shape", torch.tensor(shape)
            else:
                yield name, tensor


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="checkpoint of floats")
    parser.add_argument("out", type=Path, help="a new or empty folder")
    parser.add_argument("--weights", choices=[*FORMATS], required=True)
    given = parser.parse_args(arguments)
    try:
        made = quantize_folder(given.folder, given.out, given.weights)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 2
    print(
        f"{given.out}: {made.matrices} matrices in {given.weights}, {made.num_bytes / 1e9:.2f} GB "
        f"({made.bytes_before / 1e9:.2f} before)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
