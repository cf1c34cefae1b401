"""Every instruction set's products, and plain C++ beside them: the same bits."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.engine.native.loading import FOLDER

COMPILER = shutil.which("g++") or shutil.which("clang++")
if COMPILER is None or platform.machine() != "x86_64":
    pytest.skip("needs a C++ compiler on x86-64", allow_module_level=True)

CPU = next(
    line.split() for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line
)


def bits(folder: Path, *options: str) -> list[str]:
    """The twins' program compiled so, run, line by line: format, panel, row, bits."""
    program = folder / "twin"
    # As CMakeLists.txt has it, but for the optimisation, which changes no result.
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
    source = Path(__file__).with_name("native_twin.cpp")
    command = [COMPILER, *flags, "-I", FOLDER, source, "-o", program]
    subprocess.run([*map(str, command), *options], check=True, capture_output=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "flag", "others"),
    [
        # Whole vectors of 16: by VNNI, by pairs in 16 bits, plain.
        ("icelake-server", "avx512_vnni", ["skylake-avx512"]),
        ("cooperlake", "avx512_bf16", []),
        # Vectors of 8.
        ("x86-64-v3", "avx2", []),
        ("alderlake", "avx_vnni", ["x86-64-v3"]),
    ],
)
def test_twins_give_equal_bits(
    tmp_path: Path, architecture: str, flag: str, others: list[str]
) -> None:
    if flag not in CPU:
        pytest.skip(f"the processor has no {flag}")
    options = ["-DWITH_BF16"] if flag == "avx512_bf16" else []
    first = bits(tmp_path, f"-march={architecture}", *options)
    formats = 16 if options else 15
    tile_rows = 12 if "avx512" in flag else 6
    assert len(first) == formats * 2 * (1 + 3 + tile_rows)
    # One row's bits are the same in every shape of tile, and no two rows' or panels' are the same.
    assert len(set(first)) == formats * 2 * tile_rows
    assert len({line.split()[-1] for line in first}) == len(set(first))
    assert bits(tmp_path, f"-march={architecture}", "-DPENSTOCK_PORTABLE", *options) == first
    for other in others:
        assert bits(tmp_path, f"-march={other}") == first
