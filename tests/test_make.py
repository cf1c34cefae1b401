"""What `make` builds, and where it has no compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.native.loading import FOLDER, best_instruction_set, usable_instruction_sets

ROOT = Path(__file__).parents[1]


def make(folder: Path, *arguments: str, path: str = os.environ["PATH"]) -> tuple[int, str, str]:
    command = [str(shutil.which("make")), *arguments, f"PYTHON={sys.executable}"]
    done = subprocess.run(
        command, cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """With Penstock installed, whose program says what it was given, and no kernels."""
    native = FOLDER.relative_to(ROOT)
    (tmp_path / native).mkdir(parents=True)
    for path in ("Makefile", "CMakeLists.txt", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / path, tmp_path)
    shutil.copy(FOLDER / "loading.py", tmp_path / native)
    program = tmp_path / ".venv" / "bin" / "penstock"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "served: $*"\n')
    program.chmod(0o755)
    (tmp_path / ".venv" / ".serve").touch()
    return tmp_path


def test_only_the_kernels_of_this_processor_are_built(clone: Path) -> None:
    for target in ("serve", "setup"):
        told = make(clone, "-n", target)[1].split()
        built = [word for word in told if word.startswith("penstock_")]
        assert built == [f"penstock_{best_instruction_set()}"], target
    told = make(clone, "-n", "native-all")[1].split()
    assert {f"penstock_{name}" for name in usable_instruction_sets()} | {"--parallel"} <= {*told}


def test_a_missing_compiler_is_one_line(clone: Path) -> None:
    """And PyTorch serves, also where the compiler that there is fails."""
    folder = clone / "bin"
    folder.mkdir()
    for name in ("sh", "make"):
        (folder / name).symlink_to(str(shutil.which(name)))
    code, out, err = make(clone, "native", path=str(folder))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no C++ compiler was found (g++ or clang++)" in err
    code, out, err = make(clone, "serve", path=str(folder))
    assert (code, err) == (0, "")
    said, _, served = out.splitlines()
    assert "no C++ compiler was found" in said
    assert "PyTorch serves" in said
    assert served == "served: serve --port 8000"
    for name in ("c++", "cmake"):
        (folder / name).write_text("#!/bin/sh\necho broken >&2; exit 1\n")
        (folder / name).chmod(0o755)
    code, out, err = make(clone, "serve", path=str(folder))
    assert (code, "broken" in err) == (0, True)
    assert out.splitlines()[-1] == served
