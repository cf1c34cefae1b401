"""Loading of the compiled kernels for this processor: one library per instruction set."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).parent

_log = logging.getLogger(__name__)

_AVX512_BF16 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}

INSTRUCTION_SETS = {
    "amx_int8": _AVX512_BF16 | {"amx_tile", "amx_int8"},
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx_vnni": {"avx2", "fma", "f16c", "bmi2", "avx_vnni"},
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "neon_i8mm": {"asimd", "asimddp", "i8mm", "bf16"},
    "neon_dotprod": {"asimd", "asimddp"},
    "baseline": set[str](),
}
"""Required processor flags by Linux's names, the best set first. CMakeLists.txt builds them."""

INSTRUCTION_SET_VARIABLE = "PENSTOCK_INSTRUCTION_SET"
"""Environment variable that selects an instruction set, for tests and measurements."""


class NativeUnavailableError(RuntimeError):
    """The compiled kernels are unavailable; the message is one line with the reason."""


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """Load the library of the best instruction set, or of INSTRUCTION_SET_VARIABLE.

    Raises NativeUnavailableError where it was not built or cannot be loaded."""
    usable = usable_instruction_sets()
    asked = os.environ.get(INSTRUCTION_SET_VARIABLE)
    if asked and asked not in usable:
        raise NativeUnavailableError(
            f"{INSTRUCTION_SET_VARIABLE} is {asked!r}; this processor can use {', '.join(usable)}"
        )
    fault = "its products of tiles are not those of plain C++"
    for wanted in [asked] if asked else usable:
        library = _open(wanted, "native" if wanted == usable[0] else "native-all")
        agrees = getattr(library, "penstock_tiles_agree", None)
        if agrees is None or agrees():
            return library
        _log.warning("the kernels of %s are not used: %s", wanted, fault)
    raise NativeUnavailableError(f"the kernels of {asked} are not used: {fault}")


def _open(name: str, target: str) -> ctypes.CDLL:
    """Open a set's library, which `make target` builds."""
    library = FOLDER / f"penstock_{name}.so"
    if not library.exists():
        raise NativeUnavailableError(
            f"{library} was not built; in a clone `make {target}` builds it with a C++ compiler"
        )
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailableError(f"the native library cannot be loaded: {error}") from error


def loaded_instruction_set() -> str:
    """Return the instruction set of the loaded library."""
    return Path(load_library()._name).stem.removeprefix("penstock_")


def best_instruction_set() -> str:
    """Return the best instruction set of this processor."""
    return usable_instruction_sets()[0]


def usable_instruction_sets() -> list[str]:
    """Return the instruction sets of this processor, the best first."""
    flags = _processor_flags()
    if "amx_tile" in flags and not _may_use_tiles():
        flags = flags - {"amx_tile"}
    return [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]


@lru_cache(maxsize=1)
def _may_use_tiles() -> bool:
    """Ask Linux for AMX in this process: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) of x86-64."""
    is_allowed: bool = ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0
    if not is_allowed:
        _log.warning("AMX is not used: the system does not allow it to this process")
    return is_allowed


def _processor_flags() -> set[str]:
    """Return Linux's flags: "flags" of x86-64, "Features" of ARM."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    named = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return set(next(named, "").split())


if __name__ == "__main__":
    # For the Makefile, which runs this file before anything is installed.
    print(*usable_instruction_sets())
