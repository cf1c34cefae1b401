"""What `make` builds, and where it has no compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.native.loading import FOLDER, best_instruction_set, usable_instruction_sets

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
pytestmark = pytest.mark.skipif(MAKE is None, reason="needs make")


def make(folder: Path, *arguments: str, path: str = os.environ["PATH"]) -> tuple[int, str, str]:
    assert MAKE is not None
    command = [MAKE, "--no-print-directory", *arguments, f"PYTHON={sys.executable}"]
    done = subprocess.run(
        command, cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """With Penstock installed, whose program says what it was given, and no kernels."""
    for path in ("Makefile", "CMakeLists.txt", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / path, tmp_path)
    native = tmp_path / FOLDER.relative_to(ROOT)
    native.mkdir(parents=True)
    shutil.copy(FOLDER / "loading.py", native)
    program = tmp_path / ".venv" / "bin" / "penstock"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "served: $*"\n')
    program.chmod(0o755)
    (tmp_path / ".venv" / ".serve").touch()
    return tmp_path


def test_only_the_kernels_of_this_processor_are_built(clone: Path) -> None:
    for target in ("serve", "setup"):
        _, told, _ = make(clone, "-n", target)
        built = [word for word in told.split() if word.startswith("penstock_")]
        assert built == [f"penstock_{best_instruction_set()}"], target
    _, told, _ = make(clone, "-n", "native-all")
    assert all(f"penstock_{name}" in told.split() for name in usable_instruction_sets())
    assert "--parallel" in told


@pytest.fixture
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with neither a compiler nor CMake."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("sh", "make", "getconf"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return str(folder)


def test_a_missing_compiler_is_one_line(clone: Path, no_compiler: str) -> None:
    code, out, err = make(clone, "native", path=no_compiler)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "no C++ compiler was found (g++ or clang++)" in err
    code, out, err = make(clone, "serve", path=no_compiler)
    assert (code, err) == (0, "")
    said, _, served = out.splitlines()
    assert "no C++ compiler was found" in said
    assert "PyTorch" in said
    assert served == "served: serve --port 8000"


def test_kernels_that_cannot_be_built_do_not_keep_it_from_serving(
    clone: Path, no_compiler: str
) -> None:
    for name in ("c++", "cmake"):
        (Path(no_compiler) / name).write_text("#!/bin/sh\necho broken >&2; exit 1\n")
        (Path(no_compiler) / name).chmod(0o755)
    code, out, err = make(clone, "serve", path=no_compiler)
    assert code == 0
    assert "broken" in err
    assert out.splitlines()[-1] == "served: serve --port 8000"
