import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code: str, hash_seed: str = "0") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def modules_of_packages() -> dict[str, set[str]]:
    """What importing each of them alone brings: in processes forked from one that has numpy and
    scipy."""
    code = """
import importlib, os, pkgutil, sys
import numpy, scipy.integrate, scipy.optimize, scipy.stats
before = set(sys.modules)
for name in ("core", "fluid", "sim", "config"):
    if not os.fork():
        package = importlib.import_module(f"penstock.{name}")
        folders = getattr(package, "__path__", [])
        for module in pkgutil.walk_packages(folders, package.__name__ + "."):
            importlib.import_module(module.name)
        print(name, *(set(sys.modules) - before), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    lines = (line.split() for line in python(code).splitlines())
    return {name: set(modules) for name, *modules in lines}


def test_all_policies_are_imported_without_scipy() -> None:
    """Which would be half a second of every start."""
    code = """
import sys
from penstock.core.policies.registry import policies
kinds = ("admission", "selection", "allocation", "pipeline")
assert all(policies(kind) for kind in kinds)
print("numpy" in sys.modules, "scipy" in sys.modules)
"""
    assert python(code) == "True False"


@pytest.mark.parametrize(
    ("package", "strangers"),
    [
        ("core", {"torch", "pydantic", "yaml", "asyncio", "socket", "threading"}),
        ("fluid", {"torch", "pydantic", "yaml", "asyncio", "socket", "threading"}),
        ("sim", {"torch", "transformers", "fastapi"}),
        ("config", {"torch", "transformers", "fastapi"}),
    ],
)
def test_importing_brings_no_strangers(modules_of_packages, package, strangers) -> None:
    """Every module of a package; what numpy and scipy import is not the package's doing."""
    brought = modules_of_packages[package]
    assert f"penstock.{package}" in brought
    assert not brought & strangers


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_hash_seed() -> None:
    """Sets of strings have another order in every process; no decision may hang on it."""
    code = """
from tests.sim.test_simulation import Log, make, make_trace, run
log = Log()
run(make(["b"], num_blocks=24), make_trace(), log=log)
print(len(log.entries), log.entries)
"""
    outputs = [python(code, hash_seed) for hash_seed in ("1", "2")]
    assert int(outputs[0].split()[0]) > 100
    assert len({hashlib.sha256(o.encode()).digest() for o in outputs}) == 1
