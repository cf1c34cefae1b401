"""Every instruction set's products, and plain C++ beside them: the same bits."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.engine.native.loading import FOLDER, _processor_flags

IS_ARM = platform.machine() in ("aarch64", "arm64")
CPU = _processor_flags()


def toolchain(arm: bool) -> tuple[str, list[str]]:
    """A compiler for the architecture, and what runs its programs here."""
    if arm and not IS_ARM:
        compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
        if compiler is None or emulator is None:
            pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64, or such a processor")
        return compiler, [emulator, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"]
    native = shutil.which("g++") or shutil.which("clang++")
    if native is None or (IS_ARM and not arm):
        pytest.skip("needs a C++ compiler for this processor")
    return native, []


def bits(folder: Path, *options: str, arm: bool = False) -> list[str]:
    """The twins' program compiled so, run, line by line: format, panel, row, bits."""
    compiler, runner = toolchain(arm)
    program = folder / "twin"
    # As CMakeLists.txt has it, but for the optimisation, which changes no result.
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
    source = Path(__file__).with_name("native_twin.cpp")
    command = [compiler, *flags, "-I", FOLDER, source, "-o", program]
    subprocess.run([*map(str, command), *options], check=True, capture_output=True)
    done = subprocess.run([*runner, program], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def check_rows(lines: list[str], formats: int, tile_rows: int) -> None:
    assert len(lines) == formats * 2 * (1 + 3 + tile_rows // 2 + 1 + 2 * tile_rows)
    # One row's bits are the same in every tile, packed or unpacked; no two rows' or panels' are.
    assert len(set(lines)) == formats * 2 * tile_rows
    assert len({line.split()[-1] for line in lines}) == len(set(lines))


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
def test_twins_give_equal_bits(tmp_path, architecture, flag, others) -> None:
    if flag not in CPU:
        pytest.skip(f"the processor has no {flag}")
    options = ["-DWITH_BF16"] if flag == "avx512_bf16" else []
    first = bits(tmp_path, f"-march={architecture}", *options)
    formats = 19 if options else 18
    tile_rows = 12 if "avx512" in flag else 6
    check_rows(first, formats, tile_rows)
    assert bits(tmp_path, f"-march={architecture}", "-DPENSTOCK_PORTABLE", *options) == first
    for other in others:
        assert bits(tmp_path, f"-march={other}") == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "flag"), [("armv8.6-a", "i8mm"), ("armv8.2-a+dotprod", "asimddp")]
)
def test_twins_give_equal_bits_on_arm(tmp_path: Path, architecture: str, flag: str) -> None:
    if IS_ARM and flag not in CPU:
        pytest.skip(f"the processor has no {flag}")
    options = [f"-march={architecture}", *(["-DWITH_BF16"] if flag == "i8mm" else [])]
    first = bits(tmp_path, *options, arm=True)
    check_rows(first, 19 if flag == "i8mm" else 18, 12)
    assert bits(tmp_path, *options, "-DPENSTOCK_PORTABLE", arm=True) == first
