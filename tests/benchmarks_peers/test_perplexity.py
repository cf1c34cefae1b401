"""Perplexity: which tokens count, that they are the model's own, and going on after a cut."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.bench import perplexity
from lab.bench.perplexity import FIRST, OURS, THEIRS, WINDOW, Perplexity, main, verdicts
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
    for window, ours in zip(windows, perplexity.our_losses(MODEL, windows), strict=True):
        with torch.inference_mode():
            rows = model(torch.tensor([window])).logits[0].log_softmax(-1)
        expected = -sum(float(rows[i, window[i + 1]]) for i in range(FIRST, WINDOW - 1))
        assert ours == pytest.approx(expected, rel=1e-5)


def test_a_cut_run_goes_on_where_it_ended(windows, tmp_path, monkeypatch) -> None:
    asked: list[Sequence[int]] = []

    def losses(path: Path, left: Sequence[Sequence[int]], _kv_dtype: object) -> Iterator[float]:
        for window in left:
            if len(asked) == 2:
                asked.append([])
                raise KeyboardInterrupt
            asked.append(window)
            yield 100.0 * (windows.index([*window]) + 1)

    monkeypatch.setattr(perplexity, "our_losses", losses)
    with pytest.raises(KeyboardInterrupt):
        perplexity.perplexity("tiny", MODEL, OURS, windows, tmp_path)
    found = perplexity.perplexity("tiny", MODEL, OURS, windows, tmp_path)
    assert [window for window in asked if window] == windows
    counted = 3 * (WINDOW - 1 - FIRST)
    assert found == Perplexity("tiny", OURS, counted, pytest.approx(math.exp(600 / counted)))
    # A shorter text begins with the same windows.
    found = perplexity.perplexity("tiny", MODEL, OURS, windows[:1], tmp_path)
    assert found.perplexity == pytest.approx(math.exp(100 / (counted / 3)))


def test_bars_are_against_llama_cpp_and_against_the_model_that_is_named() -> None:
    figures = (("base", OURS, 10.0), ("a.gguf", OURS, 10.04), ("a.gguf", THEIRS, 10.06))
    found = [Perplexity(model, program, 255, value) for model, program, value in figures]
    assert [v.line() for v in verdicts(found, "base")] == [
        "[missed] a.gguf within 0.1% of llama.cpp: -0.199%",
        "[met] a.gguf within 0.5% of base: +0.400%",
    ]
    assert len([*verdicts(found, None)]) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["missing"], 2, "missing"),
        (["draft-tiny", "--tokens", "10"], 2, "--tokens must be a window's 512 or more, not 10"),
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
