"""Pictures: what is drawn can be told apart, and is the same file again."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")


from lab.common.report import Plot, draw

NAMES = ["wait", "vllm_v0", "vllm_v1", "sarathi", "sarathi, tuned", "the bound"]


def picture(path: Path) -> None:
    x = np.arange(1, 6)
    lines = {name: (x, x * i) for i, name in enumerate(NAMES, start=1)}
    left = Plot(lines, {"xlabel": "T, s"}, "o-", {"the bound": "k--"}, {"wait": (x - 0.5, x + 1)})
    draw(path, "Toys", [[left, Plot({"wait": (x, -x)})]])


@pytest.mark.slow
def test_a_picture_is_written_as_png_and_svg_and_again_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        picture(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.slow
def test_the_legend_names_every_line_once(tmp_path: Path) -> None:
    picture(tmp_path / "toys.png")
    drawn = (tmp_path / "toys.svg").read_text(encoding="utf-8")
    for name in NAMES:
        assert drawn.count(f"<!-- {name} -->") == 1
