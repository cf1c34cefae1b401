"""The version, an sdist, and a wheel outside the checkout."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock
from penstock.config import ConfigError
from penstock.engine import vllm
from penstock.engine.native.loading import usable_instruction_sets

ROOT = Path(__file__).parents[1]
_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = _SETTINGS["project"]
(BACKEND,) = _SETTINGS["build-system"]["requires"]


def test_one_version_everywhere() -> None:
    version = PROJECT["version"]
    assert penstock.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"image: penstock:{version}" in (ROOT / "deploy" / "kubernetes.yaml").read_text()


def test_nothing_advises_to_install_the_name_from_an_index() -> None:
    """Where it is not, and anybody could take it."""
    advice = re.compile(r"(pip install|uvx|--from|--spec)[^\n`]*[ '\"]penstock(\[|['\"`\s]|$)")
    folders = (ROOT / name for name in ("src/penstock", "docs", "deploy", "lab"))
    files = [ROOT / "README.md", *(f for folder in folders for f in folder.rglob("*.[mpy]*"))]
    texts = [f for f in files if f.suffix in (".md", ".py", ".yaml")]
    assert not [f for f in texts if advice.search(f.read_text(encoding="utf-8"))]
    assert advice.search("uvx --from 'penstock[serve]' penstock serve")


def test_what_is_installed_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["serve"], *extras["otel"], *extras["dev"]]
    names = {w.partition(">")[0].partition(";")[0].strip().lower() for w in wanted}
    assert not names - pinned - {"torch"}


def test_the_engine_starts_on_the_vllm_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra brings those versions that the engine takes, and no other."""
    (wanted,) = PROJECT["optional-dependencies"]["vllm"]
    allowed = Requirement(wanted).specifier
    for found in ("0.31.2", "0.32.0", "0.32.0+cpu", "0.32.7", "0.33.0", "0.34.0", "1.32.0"):
        monkeypatch.setattr(vllm, "version", lambda name, found=found: found)
        if found in allowed:
            vllm.check_installed()
        else:
            with pytest.raises(ConfigError, match=rf"vLLM 0\.32 or 0\.33, not {re.escape(found)}"):
                vllm.check_installed()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `python -m build --sdist` makes it, out of this checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "--target", str(folder / "backend"), BACKEND], check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(folder / 'backend')!r});"
        f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.mark.slow
def test_an_sdist_holds_what_is_tracked(sdist: Path) -> None:
    """Nothing is missing, and nothing that was made here is in it, such as compiled kernels."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert names == {*tracked, "PKG-INFO"}


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make wheel` builds it, out of what images are built from, for this processor alone: a
    library takes two minutes."""
    folder = tmp_path_factory.mktemp("source")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {"Makefile", *(line[1:] for line in ignored if line.startswith("!"))}
    with tarfile.open(sdist) as packed:
        wanted = [m for m in packed.getmembers() if Path(m.name).parts[1] in kept]
        packed.extractall(folder, wanted, filter="data")
    (source,) = folder.iterdir()
    command = ["make", "wheel", f"PYTHON={sys.executable}"]
    chosen = f"-DPENSTOCK_SETS={';'.join(usable_instruction_sets())}"
    subprocess.run(
        command,
        cwd=source,
        env={**os.environ, "CMAKE_ARGS": chosen},
        check=True,
        capture_output=True,
        timeout=1800,
    )
    (made,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(made) as packed_wheel:
        packed_wheel.extractall(source / "installed")
    return made


def run_installed(wheel: Path, *arguments: str, **environment: str) -> tuple[str, str]:
    """What the wheel's program says on standard output and standard error."""
    folder = wheel.parents[1] / "installed"
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Scikit' not in str(f)];"
        f"sys.path.insert(0, {str(folder)!r});"
        "import penstock; print(penstock.__file__, file=sys.stderr);"
        f"from penstock.cli import main; sys.argv = ['penstock', *{arguments!r}]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith(str(folder))
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(wheel: Path) -> None:
    """Its kernels are compiled here, out of the sdist."""
    assert wheel.name.startswith(f"penstock-{PROJECT['version']}-py3-none-")
    assert sys.platform != "linux" or "-manylinux_" in wheel.name, "what it was built on, unseen"
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert [name for name in names if name.endswith(".so")]
    assert "penstock/api/dashboard/index.html" in names
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    assert not [name for name in names if name.startswith(("lab/", "tests/", "penstock/lab/"))]
    assert "ok       kernels    compiled for" in run_installed(wheel, "doctor", "--port", "0")[0]


@pytest.mark.slow
def test_kernels_for_other_processors_compile(tmp_path: Path) -> None:
    """Not optimized, which takes a fifth of the time."""
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    listed = "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"
    subprocess.run([cmake, "-S", ROOT, "-B", tmp_path, listed], check=True, capture_output=True)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    named = {re.findall(r"-Dpenstock_(\w+)_EXPORTS", c["command"])[0]: c for c in commands}
    assert named.keys() >= set(usable_instruction_sets())
    for name in named.keys() - set(usable_instruction_sets()):
        command = shlex.split(named[name]["command"])
        command[command.index("-O3")] = "-O0"
        command[command.index("-o") + 1] = str(tmp_path / "kernels.o")
        subprocess.run(command, check=True, timeout=600)


@pytest.mark.slow
def test_every_instruction_set_of_a_wheel_writes_the_same(wheel: Path) -> None:
    asked = ("generate", "Tell me about rivers.", "--temperature", "0", "--dtype", "float32")
    texts = set()
    for name in usable_instruction_sets():
        text, noted = run_installed(wheel, *asked, PENSTOCK_INSTRUCTION_SET=name)
        assert "PyTorch computes" not in noted, name
        texts.add(text)
    assert len(texts) == 1
