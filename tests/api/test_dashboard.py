"""The dashboard in a real browser, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.serving.harness import RunningServer

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_plots_have_scales(server: RunningServer, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
            f"--user-data-dir={tmp_path}", "--virtual-time-budget=4000", f"{server.url}/dashboard",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )  # fmt: skip
    for plot in ("tokens-plot", "running-plot"):
        found = re.search(rf'<svg id="{plot}">(.*?)</svg>', done.stdout, re.DOTALL)
        assert found is not None
        labels = re.findall(r"<text[^>]*>([^<]*)</text>", found[1])
        assert labels[:3] == ["0", "1", "2"], "the least scale, of a server at rest"
        assert labels[3] == "−5 min"
        assert labels[-1] == "now"
