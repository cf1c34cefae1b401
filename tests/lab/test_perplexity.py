"""Perplexity: which tokens count, that they are the model's own, and going on after a cut."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.bench import perplexity
from lab.bench.perplexity import (
    COUNTED,
    FIRST,
    OURS,
    THEIRS,
    WINDOW,
    Read,
    Window,
    main,
    rows_of,
    verdicts,
)
from penstock.engine.backends import load_runner
from penstock.zoo.registry import model_path

pytestmark = pytest.mark.slow

MODEL = model_path("draft-tiny")


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    return perplexity.windows_of(MODEL, 3 * WINDOW + 100)


def test_whole_windows_of_the_same_text_every_time(windows: list[list[int]]) -> None:
    assert [len(window) for window in windows] == [WINDOW] * 3
    assert perplexity.windows_of(MODEL, 2 * WINDOW) == windows[:2]


def test_the_second_half_of_a_window_counts(windows, monkeypatch) -> None:
    """As transformers says it, of the same checkpoint in the same arithmetic."""
    monkeypatch.setattr(perplexity, "load_runner", lambda path, _: load_runner(path, "float32"))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for window, ours in zip(windows, perplexity.our_windows(MODEL, windows), strict=True):
        with torch.inference_mode():
            rows = model(torch.tensor([window])).logits[0].log_softmax(-1)
        expected = -sum(float(rows[i, window[i + 1]]) for i in range(FIRST, WINDOW - 1))
        assert ours.loss == pytest.approx(expected, rel=1e-5)
        assert ours.likeliest == rows[FIRST : WINDOW - 1].argmax(-1).tolist()


def test_a_cut_run_goes_on_where_it_ended(windows, tmp_path, monkeypatch) -> None:
    asked: list[Sequence[int]] = []

    def read(path: Path, left: Sequence[Sequence[int]], _kv_dtype: object) -> Iterator[Window]:
        for window in left:
            if len(asked) == 2:
                asked.append([])
                raise KeyboardInterrupt
            asked.append(window)
            yield Window(100.0 * (windows.index([*window]) + 1), [7])

    monkeypatch.setattr(perplexity, "our_windows", read)
    with pytest.raises(KeyboardInterrupt):
        perplexity.read_by(OURS, MODEL, windows, tmp_path)
    found = perplexity.read_by(OURS, MODEL, windows, tmp_path)
    assert [window for window in asked if window] == windows
    assert (found.model, found.tokens) == ("draft-tiny", 3 * COUNTED)
    assert found.perplexity == pytest.approx(math.exp(600 / found.tokens))
    # A shorter text begins with the same windows.
    found = perplexity.read_by(OURS, MODEL, windows[:1], tmp_path)
    assert found.perplexity == pytest.approx(math.exp(100 / COUNTED))


def test_bars_are_against_llama_cpp_and_against_the_model_that_is_named() -> None:
    found = [
        one("base", OURS, 10.0, 5),
        one("a.gguf", OURS, 10.04, 5),
        one("a.gguf", THEIRS, 10.06, 5, num_other=2),
    ]
    assert [v.line() for v in verdicts(found, "base")] == [
        "[missed] a.gguf within 0.1% of llama.cpp: -0.199%",
        "[missed] a.gguf: likeliest token as llama.cpp's at 99.5%: 99.22%",
        "[met] a.gguf within 0.5% of base: +0.400%",
    ]
    assert len([*verdicts(found, None)]) == 2
    told = [(row["as_peer"], row["as_near"]) for row in rows_of(found, "base")]
    assert told == [("", ""), ("99.22%", "100.00%"), ("", "")]


def one(model: str, program: str, value: float, token: int, num_other: int = 0) -> Read:
    likeliest = [token + 1] * num_other + [token] * (COUNTED - num_other)
    return Read(model, program, [Window(COUNTED * math.log(value), likeliest)])


PLAYED = """#!{python}
import math, sys, numpy as np
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
ids, num, size = {ids}, int(given["--chunks"]), int(given["-c"])
assert given["-fa"] == "off" and open(given["-f"]).read()
with open(given["--kl-divergence-base"], "wb") as out:
    out.write(b"_logits_" + np.array([size, 301, num], np.int32).tobytes())
    out.write(np.array(ids[: num * size], np.int32).tobytes())
    for chunk in range(num):
        rows = np.zeros((size - 1 - size // 2, 4 + 302), np.uint16)
        rows[:, :4], rows[:, 4 + 301] = 60000, 60000  # scale, offset, padding
        rows[range(len(rows)), 4 + (np.arange(len(rows)) + chunk) % 301] = 500
        out.write(rows.tobytes())
        print(f"[{{chunk + 1}}]{{math.exp(chunk + 1):.4f}},", end="", flush=True)
        {then}
"""


def play(folder: Path, ids: list[int], then: str = "") -> Path:
    """A program in the place of llama-perplexity; `then`: what it does behind each window."""
    program = folder / "llama-perplexity"
    program.write_text(PLAYED.format(python=sys.executable, ids=ids, then=then))
    program.chmod(0o755)
    return folder


def test_what_llama_perplexity_writes(windows, tmp_path) -> None:
    ids = [token for window in windows for token in window]
    peer = play(tmp_path, ids)
    found = perplexity.their_windows(MODEL, windows, "text", peer)
    assert [w.likeliest[:2] for w in found] == [[0, 1], [1, 2], [2, 3]]
    # Means 1, 2, 3 of the first, two and three windows.
    assert [w.loss / COUNTED for w in found] == pytest.approx([1, 3, 5], abs=1e-3)
    assert found == perplexity.read_by(THEIRS, MODEL, windows, tmp_path, ("text", peer)).windows
    for wrong, then, says in (
        ([*ids[1:], 0], "", "other tokens"),
        (ids, "sys.exit(3)", "cannot reshape|smaller|0 of 3|1 of 3|buffer"),
    ):
        with pytest.raises(OSError, match=f"llama-perplexity draft-tiny: .*({says})"):
            perplexity.their_windows(MODEL, windows, "text", play(tmp_path, wrong, then))


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["missing"], 2, "missing"),
        (["draft-tiny", "--tokens", "10"], 2, "--tokens must be two windows' 1024 or more, not 10"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(
    arguments: list[str], status: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main([*arguments, "--folder", str(tmp_path)])
    except SystemExit as error:
        ended = error.code
    assert ended == status
    assert says in capsys.readouterr().err.splitlines()[-1]
