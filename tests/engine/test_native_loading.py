"""Which compiled library is opened, and why none is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config import ConfigError
from penstock.engine.native import loading
from penstock.engine.native.library import declared
from penstock.engine.native.loading import (
    INSTRUCTION_SET_VARIABLE,
    NativeUnavailableError,
    load_library,
)

SETS = loading.INSTRUCTION_SETS
ALL = set.union(*(flags for name, flags in SETS.items() if "neon" not in name))


class BuiltForAll:
    """Stands for the folder of libraries, those of other processors included."""

    def __truediv__(self, name: str) -> BuiltForAll:
        self.name = name
        return self

    def __str__(self) -> str:
        return self.name

    def exists(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _loads_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(INSTRUCTION_SET_VARIABLE, raising=False)
    monkeypatch.setattr(loading, "_may_use_tiles", lambda: True)
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def opened(monkeypatch: pytest.MonkeyPatch, flags: set[str], *, agree: bool = True) -> str:
    """The library that a processor with these flags gets, without opening it.

    agree: whether AMX has the sums of plain C++."""

    def fake(path: str) -> SimpleNamespace:
        agrees = agree or "amx" not in path
        return SimpleNamespace(_name=path, penstock_tiles_agree=lambda: int(agrees))

    monkeypatch.setattr(loading, "_processor_flags", lambda: flags)
    monkeypatch.setattr(loading, "FOLDER", BuiltForAll())
    monkeypatch.setattr(ctypes, "CDLL", fake)
    load_library()
    return loading.loaded_instruction_set()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (ALL, "amx_int8"),
        (ALL - {"amx_int8"}, "avx512_bf16"),
        (ALL - {"avx512_bf16"}, "avx512_vnni"),
        (ALL - {"avx512_bf16", "avx512_vnni"}, "avx512"),
        (ALL - {"avx512vl"}, "avx_vnni"),
        (ALL - {"avx512vl", "avx_vnni"}, "avx2"),
        (ALL - {"avx_vnni"}, "amx_int8"),
        (SETS["neon_i8mm"], "neon_i8mm"),
        (SETS["neon_i8mm"] - {"bf16"}, "neon_dotprod"),
        ({"asimd"}, "baseline"),
        (set(), "baseline"),
    ],
)
def test_the_best_that_the_processor_has(flags, name, monkeypatch) -> None:
    assert opened(monkeypatch, flags) == name


def test_another_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, "avx2")
    assert opened(monkeypatch, ALL) == "avx2"


def test_amx_that_the_system_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_may_use_tiles", lambda: False)
    assert opened(monkeypatch, ALL) == "avx512_bf16"


@pytest.mark.parametrize("is_allowed", [True, False])
def test_amx_is_asked_for(is_allowed: bool, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    calls = []

    def syscall(*arguments: int) -> int:
        calls.append(arguments)
        return 0 if is_allowed else -1

    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(syscall=syscall))
    assert loading._may_use_tiles.__wrapped__() is is_allowed
    assert calls == [(158, 0x1023, 18)]
    assert ("does not allow" in caplog.text) is not is_allowed


def test_amx_with_other_sums_is_passed_over(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    assert opened(monkeypatch, ALL, agree=False) == "avx512_bf16"
    assert "the kernels of amx_int8 are not used" in caplog.text
    load_library.cache_clear()
    monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, "amx_int8")
    with pytest.raises(NativeUnavailableError, match="the kernels of amx_int8 are not used"):
        opened(monkeypatch, ALL, agree=False)


@pytest.mark.parametrize("name", ["avx512_bf16", "avx3"])
def test_one_that_it_lacks_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, name)
    with pytest.raises(NativeUnavailableError, match=f"{name}.*can use avx2, baseline"):
        opened(monkeypatch, {"avx2", "fma", "f16c", "bmi2"})


def test_what_was_not_built_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "FOLDER", tmp_path)
    monkeypatch.setattr(loading, "_processor_flags", set)
    with pytest.raises(NativeUnavailableError, match=r"baseline\.so was not built; .*make native"):
        load_library()


def test_what_is_no_library_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock_baseline.so").write_text("")
    monkeypatch.setattr(loading, "FOLDER", tmp_path)
    monkeypatch.setattr(loading, "_processor_flags", set)
    with pytest.raises(NativeUnavailableError, match="cannot be loaded"):
        load_library()


def test_a_library_of_older_sources_is_named() -> None:
    with pytest.raises(ConfigError, match=r"was built from older sources; `make native`"):
        declared(ctypes.CDLL(None))
