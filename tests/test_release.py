"""The version, and a wheel outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """Its kernels are compiled here."""
    build = ["--no-deps", "--disable-pip-version-check", "-q", f"-Cbuild-dir={tmp_path / 'build'}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *build, "-w", str(tmp_path), str(ROOT)],
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
