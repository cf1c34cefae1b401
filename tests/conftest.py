"""What holds for all tests."""

import ctypes
import gc
import hashlib
import os
import sys
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings

from penstock.cli import main
from penstock.engine.native import loading

Cli = Callable[..., tuple[int, str, str]]


# Where slow tests are left out; the others have hypothesis's own number of examples.
settings.register_profile("fast", max_examples=25, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several workers a core to itself, before PyTorch counts them: threads that wait
    for each other inside a step are slow on cores that another worker is using."""
    if "not slow" in config.option.markexpr:
        settings.load_profile("fast")
    share_tls_contexts()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    if not worker and not kernels_are_built():
        pytest.exit("the CPU kernels are missing or of older sources: make native", returncode=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what imports have made out of the garbage collector, whose every full pass would look
    through it: two million objects, half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def share_tls_contexts() -> None:
    """Let httpx's clients have one TLS context: it reads a thousand certificates for each."""
    transports: Any = httpx._transports.default
    transports.create_ssl_context = cache(transports.create_ssl_context)


def kernels_are_built() -> bool:
    """Whether the library that this processor uses is built from the sources beside it, by the
    digest that CMakeLists.txt gave it."""
    sources = sorted([*loading.FOLDER.glob("*.h"), loading.FOLDER / "penstock.cpp"])
    digests = "".join(hashlib.sha256(x.read_bytes()).hexdigest() for x in sources)
    library = loading.FOLDER / f"penstock_{loading.best_instruction_set()}.so"
    if not library.exists():
        return False
    told = ctypes.CDLL(str(library)).penstock_sources
    told.restype = ctypes.c_char_p
    return bool(told().decode() == hashlib.sha256(digests.encode()).hexdigest())


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny `target` and of drafters that are right always (`same`), often (`near`)
    and hardly ever (`far`)."""
    from tests.engine.small_family import write_family  # imports transformers

    return write_family(tmp_path_factory.mktemp("family"))


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the program here; returns exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run
