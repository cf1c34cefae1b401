"""What happens before anything heavy is imported: bad input, and extras that are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXTRA = ("torch", "transformers", "fastapi", "starlette", "uvicorn", "grpc", "google")

_RUN = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {extra!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = ["penstock", *{arguments!r}]
from penstock.cli import main
main()
"""


def without_the_extra(*arguments: str) -> tuple[int, str, str]:
    """The program where only the base is installed."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(extra=EXTRA, arguments=arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
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
    ],
)
def test_a_missing_extra_is_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, out, err = without_the_extra(*arguments)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert err.startswith("penstock: this needs ")
    assert "pip install 'penstock[serve]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--drafter", "draft-hgue"), "nor a bundled drafter"),
        (("serve", "/nowhere"), "neither a checkpoint folder nor a bundled target"),
        (("generate", ""), "the prompt must not be empty"),
        (("generate", "Hi", "--drafter", "draft-hgue"), "nor a bundled drafter"),
        (("generate", "Hi", "--temperature", "inf"), "--temperature must be finite"),
        (("chat", "--drafter", "draft-hgue"), "nor a bundled drafter"),
        (("draft", "--connect", "127.0.0.1:1", "--model", "nope"), "nor a bundled drafter"),
        (("bench", "engine", "nope"), "neither a checkpoint folder nor a bundled target"),
        (("bench", "engine", "--domain", "law"), "unknown domain 'law'"),
        (("profile", "measure", "--out", "p.json", "nope"), "nor a bundled target"),
        (("zoo", "info", "--target", "nope"), "unknown target 'nope'"),
        (("zoo", "train", "--only", "nope"), "unknown model 'nope'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(
    arguments: tuple[str, ...], message: str
) -> None:
    """Where PyTorch cannot even be imported."""
    code, out, err = without_the_extra(*arguments)
    assert (code, out) == (2, ""), err
    assert message in err
    assert err.count("\n") == 1


def test_other_modules_that_are_missing_are_bugs() -> None:
    script = _RUN.format(extra=("penstock.zoo",), arguments=("zoo", "info"))
    script = script.replace('name.partition(".")[0] in', "name in")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert "Traceback" in done.stderr
