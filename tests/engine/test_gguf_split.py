"""GGUF models in several files, opened by any of them."""

from pathlib import Path

import gguf
import pytest
import torch
from tests.conftest import Cli
from tests.engine.small_gguf import finish, write_gguf
from tests.engine.test_gguf import eager, logits, wide
from tests.engine.test_gguf_tokenizer import ORIGINALS
from tests.engine.test_loading import load

from penstock.config import model_name
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.gguf.file import open_gguf
from penstock.engine.native.runner import NativeRunner
from penstock.engine.tokenizer import load_tokenizer

COUNT = 3


def write_parts(folder: Path, kind: str = "F16") -> list[Path]:
    write_gguf(folder / "model.gguf", wide("llama"), kind, ORIGINALS["gpt-2"](), split=8)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    return parts


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_any_part_opens_the_model(kind: str, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", wide("llama"), kind, ORIGINALS["gpt-2"]()).path
    (tmp_path / "parts").mkdir()
    parts = write_parts(tmp_path / "parts", kind)
    expected = logits(eager(whole))
    for part in parts:
        assert torch.equal(logits(eager(part)), expected)
        assert load_tokenizer(part).encode("a b") == load_tokenizer(parts[0]).encode("a b")
        assert model_name(part) == "model"
    native = logits(NativeRunner.load(parts[1], torch.float32, 16, 16, 1))
    assert torch.equal(native, logits(NativeRunner.load(whole, torch.float32, 16, 16, 1)))
    assert not {entry.name for entry in open_gguf(parts[0]).tensors.values()} ^ set(
        open_gguf(whole).tensors
    )


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("missing", range(COUNT))
def test_a_part_that_is_missing(missing: int, tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[missing].unlink()
    for part in parts:
        told = refusal(part)
        if part == parts[missing]:
            assert told.endswith("cannot be read (No such file or directory)")
        else:
            assert told == (
                f"{part}: is one of 3 parts of a model; {parts[missing].name} is missing beside it"
            )


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    first, second, third = (part.read_bytes() for part in parts)
    parts[1].write_bytes(third)
    assert "split.no is 2 and split.count 3; its name asks for 1 and 3" in refusal(parts[0])
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first)
    assert refusal(renamed).startswith(f"{renamed}: split.no is 0 and split.count 3; its name asks")
    # The second part as another cut would have made it.
    parts[1].write_bytes(second.replace(b"blk.", b"blq.", 1))
    assert "is missing" in refusal(parts[0])
    name = next(iter(open_gguf(parts[0]).tensors)).encode()
    twin = gguf.GGUFWriter(parts[1], "llama")
    for key, value in (("no", 1), ("count", 3)):
        twin.add_uint16(f"split.{key}", value)
    twin.add_tensor(name.decode(), torch.zeros(1).numpy())
    finish(twin)
    assert f"{parts[1]}: tensor {name.decode()} is also in another part" in refusal(parts[0])
    single = gguf.GGUFWriter(parts[1], "llama")
    for key, value in (("no", 1), ("count", 3)):
        single.add_uint16(f"split.{key}", value)
    finish(single)
    assert "split.tensors.count is 21; all parts have 13" in refusal(parts[0])


def test_generate_and_a_clear_line(cli: Cli, tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    code, _, err = cli("generate", "a", "--raw", "--max-tokens", 4, "--target", parts[0])
    assert code == 0, err
    parts[2].unlink()
    for arguments in (("--target", parts[0]), ("--drafter", f"small={parts[0]}")):
        code, _, err = cli("generate", "a", *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{parts[2].name} is missing beside it" in err
