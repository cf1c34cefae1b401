"""The program with GGUF files: as target, as drafter, beside a folder, and damaged."""

import dataclasses
import json
from pathlib import Path

import pytest
from tests.conftest import Cli
from tests.engine.small_gguf import write_gguf
from tests.engine.small_models import CASES
from tests.engine.test_gguf_tokenizer import ORIGINALS

from lab.bench.real_models import dequantize
from penstock.cli.models import drafter_checkpoint
from penstock.config import parse_config

CASE = dataclasses.replace(CASES["qwen2"], changes=CASES["qwen2"].changes | {"vocab_size": 512})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file, a folder with its values in bfloat16, and a file with another tokenizer."""
    root = tmp_path_factory.mktemp("gguf")
    write_gguf(root / "file.gguf", CASE, "F32", ORIGINALS["qwen2"](), "qwen2")
    dequantize(root / "file.gguf", root / "folder")
    write_gguf(root / "other.gguf", CASE, "F32", ORIGINALS["gpt-2"](), "gpt-2")
    return {name: str(root / name) for name in ("file.gguf", "folder", "other.gguf")}


def made(cli: Cli, *arguments: str) -> dict[str, object]:
    given = ("generate", "def reverse", "--raw", "--max-tokens", "24", "--dtype", "float32")
    code, out, err = cli(*given, "--json", *arguments)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("target", "drafter"),
    [("file.gguf", "file.gguf"), ("file.gguf", "folder"), ("folder", "file.gguf")],
)
def test_generate_with_unlike_formats(target, drafter, models, cli) -> None:
    alone = made(cli, "--target", models[target])
    drafted = made(cli, "--target", models[target], "--drafter", f"small={models[drafter]}")
    assert drafted["token_ids"] == alone["token_ids"]
    # None where no draft was worth its time: it is no smaller than the target.
    assert drafted["drafter"] in ("small", "look-up", None)


def test_a_drafter_of_another_tokenizer(models, cli, caplog) -> None:
    """Its text is drafted, and that is said."""
    target, drafter = ("--target", models["file.gguf"]), f"small={models['other.gguf']}"
    alone = made(cli, *target)
    assert not caplog.text
    assert made(cli, *target, "--drafter", drafter)["token_ids"] == alone["token_ids"]
    said = f"drafter small ({models['other.gguf']}) has another tokenizer than the target"
    assert said in caplog.text


def test_a_drafter_without_a_tokenizer(models: dict[str, str], cli: Cli, tmp_path: Path) -> None:
    bare = tmp_path / "bare.gguf"
    write_gguf(bare, CASE, "F32")
    drafter = f"small={bare}"
    code, _, err = cli("generate", "a", "--target", models["file.gguf"], "--drafter", drafter)
    assert code == 2
    assert f"{bare}: has no tokenizer.ggml.tokens" in err
    assert err.count("\n") == 1


def test_a_damaged_file(models: dict[str, str], cli: Cli, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(Path(models["file.gguf"]).read_bytes()[:-1000])
    code, _, err = cli("generate", "a", "--target", damaged)
    assert code == 2
    assert f"{damaged}: is cut off: tensor" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["MODEL.GGUF", "model.bin", "model"])
def test_a_file_is_known_by_its_content(models, cli, tmp_path, name) -> None:
    path = tmp_path / name
    path.hardlink_to(models["file.gguf"])
    twice = made(cli, "--target", str(path), "--drafter", f"small={path}")
    assert twice["token_ids"] == made(cli, "--target", models["file.gguf"])["token_ids"]
    assert drafter_checkpoint(str(path)) == (name.removesuffix(".GGUF"), path)
    engine = parse_config({"engine": {"target": path}}).engine
    assert engine.target_name == name.removesuffix(".GGUF")


def test_a_file_that_is_no_model(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * 64)
    for arguments in (("--target", path), ("--drafter", f"small={path}")):
        code, _, err = cli("generate", "a", *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert f"'{path}' is no checkpoint folder or GGUF file" in err


@pytest.mark.slow
def test_serve_with_a_tokenizer_that_is_not_known(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, CASE, "F32", ORIGINALS["gpt-2"](), "klingon")
    code, _, err = cli("serve", path, "--port", 0, "--no-speculation", "--kv-tokens", 512)
    assert code == 2
    assert f"{path}: tokenizer.ggml.pre is 'klingon'; allowed: " in err
    assert err.count("\n") == 1
