"""Compiles the C++ sources on first use and keeps the result for this machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)


class NativeUnavailableError(RuntimeError):
    """The compiled path cannot be used here; the message is one line that says why."""


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The compiled library, built if this machine has not built these sources before.

    Raises NativeUnavailableError without a compiler, or where it, the cache folder or the dynamic
    loader refuses.
    """
    compiler = _compiler()
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        library = folder / f"penstock-{_fingerprint(compiler)}.so"
        if not library.exists():
            _compile(compiler, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        reason = f"the native library cannot be kept or loaded: {error}"
        raise NativeUnavailableError(reason) from error


def cache_folder() -> Path:
    """Where compiled libraries lie: $XDG_CACHE_HOME, or .cache in the home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / "native"


def _compiler() -> str:
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise NativeUnavailableError(
        f"no C++ compiler was found; the native path needs one of {', '.join(COMPILERS)}"
    )


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr.strip())
        raise NativeUnavailableError(f"{Path(command[0]).name} failed: {reason}")
    return done.stdout


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for file in [*sorted(SOURCE_FOLDER.glob("*.h")), SOURCE_FOLDER / "penstock.cpp"]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    for text in (_run([compiler, "--version"]), " ".join(FLAGS), _cpu_flags()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    """What -march=native depends on: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "cpu family", "model\t", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, library: Path) -> None:
    """Build beside the destination and rename: of several builders at once, any may win."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        output = Path(folder) / library.name
        _run([compiler, *FLAGS, str(SOURCE_FOLDER / "penstock.cpp"), "-o", str(output)])
        output.replace(library)
