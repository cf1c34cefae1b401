"""Every instruction set's products, and plain C++ beside them: the same bits."""

import functools
import platform
import shutil
import subprocess
import tempfile
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


@functools.cache
def bits(*options: str, arm: bool = False) -> list[str]:
    """The twins' program compiled so, run, line by line: format, panel, row, bits."""
    compiler, runner = toolchain(arm)
    # As CMakeLists.txt has it, but for the optimisation, which changes no result.
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
    source = Path(__file__).with_name("native_twin.cpp")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "twin"
        command = [compiler, *flags, "-I", FOLDER, source, "-o", program]
        subprocess.run([*map(str, command), *options], check=True, capture_output=True)
        done = subprocess.run([*runner, program], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def check_rows(lines: list[str], tile_rows: int) -> None:
    """Of 18 quantised formats and two panels, and for some processors of pairs of bfloat16."""
    pairs = [line for line in lines if line.startswith("2 ")]
    of_a_panel = 1 + 3 + tile_rows // 2 + 1 + 4 * tile_rows
    assert len(pairs) in (0, 2 * of_a_panel)
    assert len(lines) - len(pairs) == 18 * 2 * (of_a_panel + 17 + 33)
    # One row's bits are the same in every tile, packed or unpacked; no two rows' or panels' are.
    assert len(set(lines)) == 18 * 2 * 33 + (2 * tile_rows if pairs else 0)
    assert len({line.split()[-1] for line in lines}) == len(set(lines))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "flag", "others"),
    [
        # Whole vectors of 16: by VNNI, by pairs in 16 bits, plain.
        ("icelake-server", "avx512_vnni", ["skylake-avx512"]),
        ("cooperlake", "avx512_bf16", []),
        ("sapphirerapids", "amx_int8", ["cooperlake"]),
        # Vectors of 8.
        ("x86-64-v3", "avx2", []),
        ("alderlake", "avx_vnni", ["x86-64-v3"]),
    ],
)
def test_twins_give_equal_bits(architecture: str, flag: str, others: list[str]) -> None:
    if flag not in CPU:
        pytest.skip(f"the processor has no {flag}")
    options = ["-DWITH_BF16"] if flag in ("avx512_bf16", "amx_int8") else []
    first = bits(f"-march={architecture}", *options)
    check_rows(first, 6 if architecture in ("x86-64-v3", "alderlake") else 12)
    assert bits(f"-march={architecture}", "-DPENSTOCK_PORTABLE", *options) == first
    for other in others:
        assert bits(f"-march={other}", *options) == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "flag"), [("icelake-server", "avx512_vnni"), ("x86-64-v3", "avx2")]
)
def test_tiles_in_plain_code_give_equal_bits(architecture: str, flag: str) -> None:
    """All of a matrix unit's kernel but its five operations."""
    if flag not in CPU:
        pytest.skip(f"the processor has no {flag}")
    plain = bits(f"-march={architecture}", "-DPENSTOCK_TILES_PLAIN")
    assert plain == bits(f"-march={architecture}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "flag"), [("armv8.6-a", "i8mm"), ("armv8.2-a+dotprod", "asimddp")]
)
def test_twins_give_equal_bits_on_arm(architecture: str, flag: str) -> None:
    if IS_ARM and flag not in CPU:
        pytest.skip(f"the processor has no {flag}")
    options = [f"-march={architecture}", *(["-DWITH_BF16"] if flag == "i8mm" else [])]
    first = bits(*options, arm=True)
    check_rows(first, 12)
    assert bits(*options, "-DPENSTOCK_PORTABLE", arm=True) == first
