"""What happens before anything heavy is imported: bad input, and extras that are not there."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.products import first_fast

pytestmark = pytest.mark.slow

EXTRA = ("torch", "transformers", "fastapi", "starlette", "uvicorn", "grpc", "google")

NEEDS_THE_EXTRA = [
    ("serve",),
    ("generate", "Hi"),
    ("chat",),
    ("draft", "--connect", "127.0.0.1:1"),
    ("bench", "engine"),
    ("profile", "measure", "--out", "p.json"),
    ("zoo", "info"),
    ("zoo", "fit", "p.json"),
    ("zoo", "train", "--quick"),
]
BAD_INPUT = [
    (("serve", "--drafter", "draft-hgue"), "bundled drafters are"),
    (("serve", "/nowhere"), "does not exist; bundled targets are"),
    (("serve", "--device", "tpu"), "'tpu' is unknown; allowed: cpu, cpu:CORES as 0-3,6, cuda"),
    (("generate", ""), "the prompt must not be empty"),
    (("generate", "Hi", "--drafter", "draft-hgue"), "bundled drafters are"),
    (("generate", "Hi", "--temperature", "inf"), "--temperature must be finite"),
    (("chat", "--drafter", "draft-hgue"), "bundled drafters are"),
    (("draft", "--connect", "127.0.0.1:1", "--model", "nope"), "bundled drafters are"),
    (("bench", "engine", "nope"), "does not exist; bundled targets are"),
    (("bench", "engine", "--domain", "law"), "unknown domain 'law'"),
    (("profile", "measure", "--out", "p.json", "nope"), "bundled targets are"),
    (("zoo", "info", "--target", "nope"), "unknown target 'nope'"),
    (("zoo", "train", "--only", "nope"), "unknown model 'nope'"),
]
_RUN = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if any(f"{{name}}.".startswith(f"{{absent}}.") for absent in {extra!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from penstock.cli import main
sys.argv = ["penstock", *{arguments!r}]
main()
"""


def outcome(folder: Path, extra: Sequence[str], arguments: tuple[str, ...]) -> tuple[int, str, str]:
    """Of the program where some packages cannot be imported: exit code and what it says."""
    script = _RUN.format(extra=extra, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", first_fast(NEEDS_THE_EXTRA))
def test_a_missing_extra_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, out, err = outcome(tmp_path, EXTRA, arguments)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert err.startswith("penstock: this needs ")
    assert "pip install -e '.[serve]'" in err


@pytest.mark.parametrize("case", first_fast(BAD_INPUT))
def test_bad_input_is_refused_before_anything_is_loaded(tmp_path, case) -> None:
    """Where PyTorch cannot even be imported."""
    arguments, message = case
    code, out, err = outcome(tmp_path, EXTRA, arguments)
    assert (code, out) == (2, ""), err
    assert message in err
    assert err.count("\n") == 1


def test_other_modules_that_are_missing_are_bugs(tmp_path: Path) -> None:
    code, _, err = outcome(tmp_path, ("penstock.zoo",), ("zoo", "info"))
    assert code == 1
    assert "Traceback" in err
