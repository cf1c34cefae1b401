"""`penstock quantize`: rounding a model's weights to integers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli.options import JsonOption
from penstock.cli.terminal import one_line, progress
from penstock.json_text import dumps


def quantize(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder of floats, bundled model or owner/name.")
    ],
    out: Annotated[Path, typer.Argument(help="A new or empty folder for the quantised model.")],
    weights: Annotated[
        Literal["int8", "int4"],
        typer.Option(help="int8: one scale per row. int4: one per 32 columns."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Round a model's weights to integers, for `penstock serve`, vLLM and transformers.

    Writes the format of compressed-tensors (pack-quantized, W8A16 or W4A16). Embeddings and head
    keep their 16 bits. Rounding is to the nearest, without calibration.
    """
    from penstock.cli.models import checkpoint_folder
    from penstock.config import ConfigError

    with one_line(ConfigError):
        source = checkpoint_folder(model)

    from penstock.engine.models.checkpoint import CheckpointError
    from penstock.engine.models.integers import folder_bytes, quantize_folder

    with (
        one_line(ConfigError, CheckpointError, OSError),
        progress(folder_bytes(source), "rounding") as advance,
    ):
        made = quantize_folder(source, out, weights, advance)
    row: dict[str, Any] = {
        "model": str(source),
        "out": str(out),
        "weights": weights,
        "matrices": made.matrices,
        "bytes_before": made.bytes_before,
        "bytes": made.num_bytes,
    }
    if as_json:
        print(dumps(row))
        return
    print(
        f"{out}: {made.matrices} matrices in {weights}, {made.num_bytes / 1e9:.2f} GB "
        f"({made.bytes_before / 1e9:.2f} before)"
    )
