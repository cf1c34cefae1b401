"""The version, an sdist, and a wheel outside the checkout."""

import re
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

ROOT = Path(__file__).parents[1]
_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = _SETTINGS["project"]
(BACKEND,) = _SETTINGS["build-system"]["requires"]


def test_one_version_everywhere() -> None:
    version = PROJECT["version"]
    assert penstock.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"image: penstock:{version}" in (ROOT / "deploy" / "kubernetes.yaml").read_text()


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


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(sdist: Path, tmp_path: Path) -> None:
    """Its kernels are compiled here, out of the sdist."""
    build = ["--no-deps", "--disable-pip-version-check", "-q", f"-Cbuild-dir={tmp_path / 'build'}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *build, "-w", str(tmp_path), str(sdist)],
        check=True,
        timeout=900,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"penstock-{PROJECT['version']}-py3-none-")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "installed")
    assert [name for name in names if name.endswith(".so")]
    assert "penstock/api/dashboard/index.html" in names
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    assert not [name for name in names if name.startswith(("lab/", "tests/", "penstock/lab/"))]
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Scikit' not in str(f)];"
        f"sys.path.insert(0, {str(tmp_path / 'installed')!r});"
        "import penstock; print(penstock.__file__);"
        "from penstock.cli import main; sys.argv = ['penstock', 'doctor', '--port', '0']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "ok       kernels    compiled for" in done.stdout
