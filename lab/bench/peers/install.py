"""A virtual environment for every peer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lab.bench.peers.engines import PeerEngine


def install(engine: PeerEngine, venvs: Path) -> str | None:
    """Make `engine`'s environment unless it is there; the reason if it cannot be made."""
    if not engine.installs:
        return None
    folder = venvs / engine.name
    ready = folder / ".ready"
    recipe = repr((engine.installs, engine.removes, dict(engine.build)))
    if ready.exists() and ready.read_text() == recipe:
        return None
    python = engine.python(venvs)
    pip = [str(python), "-m", "pip"]
    quiet = ["-q", "--disable-pip-version-check"]
    steps = [] if python.exists() else [[sys.executable, "-m", "venv", str(folder)]]
    steps += [[*pip, "install", *quiet, *arguments] for arguments in engine.installs]
    steps += [[*pip, "uninstall", *quiet, "-y", *engine.removes]] if engine.removes else []
    for step in steps:
        print(f"{engine.name}: {' '.join(step)}", file=sys.stderr, flush=True)
        done = subprocess.run(
            step, env=os.environ | engine.build, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            return f"{' '.join(step[3:])} failed: {' '.join(last)}"
    ready.write_text(recipe)
    return None
