"""Compiling on first use: kept, shared, and refused with a reason."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.native import build
from penstock.engine.native.build import NativeUnavailableError, cache_folder, load_library

if not any(map(shutil.which, build.COMPILERS)):
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def _small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and a source that compiles in no time."""
    sources = tmp_path / "source"
    sources.mkdir()
    (sources / "penstock.cpp").write_text('#include "answer.h"\n')
    (sources / "answer.h").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    )
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def kept() -> list[Path]:
    return sorted(cache_folder().iterdir())


def test_built_once_and_kept() -> None:
    assert load_library().answer() == 42
    (library,) = kept()
    before = library.stat().st_mtime_ns
    load_library.cache_clear()
    assert load_library().answer() == 42
    assert kept() == [library]
    assert library.stat().st_mtime_ns == before


def test_a_changed_header_is_another_library() -> None:
    load_library()
    header = build.SOURCE_FOLDER / "answer.h"
    header.write_text(header.read_text().replace("42", "43"))
    load_library.cache_clear()
    assert load_library().answer() == 43
    assert len(kept()) == 2


def test_several_builders_at_once() -> None:
    script = (
        "import pathlib, sys; from penstock.engine.native import build;"
        "build.SOURCE_FOLDER = pathlib.Path(sys.argv[1]); print(build.load_library().answer())"
    )
    command = [sys.executable, "-c", script, str(build.SOURCE_FOLDER)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [p.communicate()[0].strip() for p in running] == ["42"] * 3
    (library,) = kept()
    assert ctypes.CDLL(str(library)).answer() == 42


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler .* g\+\+, clang\+\+"):
        load_library()


def test_what_the_compiler_said_is_the_reason() -> None:
    (build.SOURCE_FOLDER / "answer.h").write_text("int answer() { return nonsense; }\n")
    with pytest.raises(NativeUnavailableError, match=r"failed: .*error: .*nonsense"):
        load_library()
    assert kept() == []


def test_a_cache_that_cannot_be_written_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NativeUnavailableError, match=r"kept or loaded: .*Not a directory"):
        load_library()
