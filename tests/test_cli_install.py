"""What happens before anything heavy is imported: bad input, and extras that are not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

EXTRA = ("torch", "transformers", "fastapi", "starlette", "uvicorn", "grpc", "google")

NEEDS_THE_EXTRA = [
    ("serve",),
    ("generate", "Hi"),
    ("chat",),
    ("draft", "--connect", "127.0.0.1:1"),
    ("bench", "engine"),
    ("bench", "engine", "--random-weights", "llama-68m"),
    ("profile", "measure", "--out", "p.json"),
    ("zoo", "info"),
    ("zoo", "fit", "p.json"),
    ("zoo", "train", "--quick"),
]
BAD_INPUT = [
    (("serve", "--drafter", "draft-hgue"), "nor a bundled drafter"),
    (("serve", "/nowhere"), "neither a checkpoint folder, a GGUF file nor a bundled target"),
    (("serve", "--device", "tpu"), "'tpu' is unknown; allowed: cpu, cuda, cuda:N"),
    (("generate", ""), "the prompt must not be empty"),
    (("generate", "Hi", "--drafter", "draft-hgue"), "nor a bundled drafter"),
    (("generate", "Hi", "--temperature", "inf"), "--temperature must be finite"),
    (("chat", "--drafter", "draft-hgue"), "nor a bundled drafter"),
    (("draft", "--connect", "127.0.0.1:1", "--model", "nope"), "nor a bundled drafter"),
    (("bench", "engine", "nope"), "neither a checkpoint folder, a GGUF file nor a bundled target"),
    (("bench", "engine", "--domain", "law"), "unknown domain 'law'"),
    (("profile", "measure", "--out", "p.json", "nope"), "nor a bundled target"),
    (("zoo", "info", "--target", "nope"), "unknown target 'nope'"),
    (("zoo", "train", "--only", "nope"), "unknown model 'nope'"),
]
_RUN = """
import os, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if any(f"{{name}}.".startswith(f"{{absent}}.") for absent in {extra!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import penstock.config
from penstock.cli import main
from penstock.core.policies.registry import policies
policies("admission")  # once for all commands

for i, arguments in enumerate({commands!r}):
    if not os.fork():
        os.dup2(os.open(f"{{i}}.out", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(f"{{i}}.err", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv = ["penstock", *arguments]
        main()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""

Done = tuple[int, str, str]


def outcomes(folder: Path, extra: Sequence[str], commands: Sequence[tuple[str, ...]]) -> list[Done]:
    """Of the program where some packages cannot be imported: exit code and what it says."""
    script = _RUN.format(extra=extra, commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    said = [
        [(folder / f"{i}.{end}").read_text() for end in ("out", "err")]
        for i in range(len(commands))
    ]
    return [
        (int(code), out, err) for code, (out, err) in zip(done.stdout.split(), said, strict=True)
    ]


@pytest.fixture(scope="module")
def without_the_extra(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Done]:
    """By arguments, where only the base is installed."""
    commands = [*NEEDS_THE_EXTRA, *(arguments for arguments, _ in BAD_INPUT)]
    folder = tmp_path_factory.mktemp("base")
    return dict(zip(commands, outcomes(folder, EXTRA, commands), strict=True))


@pytest.mark.parametrize("arguments", NEEDS_THE_EXTRA)
def test_a_missing_extra_is_one_line(
    without_the_extra: dict[tuple[str, ...], Done], arguments: tuple[str, ...]
) -> None:
    code, out, err = without_the_extra[arguments]
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert err.startswith("penstock: this needs ")
    assert "pip install 'penstock[serve]'" in err


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_refused_before_anything_is_loaded(
    without_the_extra: dict[tuple[str, ...], Done], arguments: tuple[str, ...], message: str
) -> None:
    """Where PyTorch cannot even be imported."""
    code, out, err = without_the_extra[arguments]
    assert (code, out) == (2, ""), err
    assert message in err
    assert err.count("\n") == 1


def test_other_modules_that_are_missing_are_bugs(tmp_path: Path) -> None:
    ((code, _, err),) = outcomes(tmp_path, ("penstock.zoo",), [("zoo", "info")])
    assert code == 1
    assert "Traceback" in err
