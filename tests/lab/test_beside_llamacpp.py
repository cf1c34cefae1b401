"""The comparison with llama.cpp, where the engine itself stands in for it."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.engine.small_models import Paging

from lab.bench.beside_llamacpp import MORE, PROMPT, compared, is_same, main, measure
from penstock.engine.native.runner import NativeRunner


def whole(file: Path, texts: Sequence[list[int]]) -> torch.Tensor:
    runner = NativeRunner.load(file, torch.float32, 26, 16, 1)
    rows = [
        runner.forward(Paging(26, 16).batch(("a", torch.tensor(ids).numpy(), 0, len(ids))))
        for ids in texts
    ]
    return torch.cat([x[PROMPT - 1 : PROMPT - 1 + MORE] for x in rows]).log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral3", "gemma4"])
def test_a_reader_that_agrees_is_told_from_a_matrix_that_differs(name: str) -> None:
    found = dict(measure(name, "F32", 1, whole))
    assert {case: is_same("F32", figures) for case, figures in found.items()} == {
        "": True,
        "twice": True,
        "changed": False,
    }


def test_what_is_called_the_same() -> None:
    torch.manual_seed(0)
    mine = torch.randn(50, 40).log_softmax(-1)
    weights = mine.softmax(-1)
    assert is_same("F32", compared(mine, mine, weights))
    near = mine + 0.02 * torch.randn_like(mine)
    assert not is_same("F32", compared(mine, near, weights))
    assert is_same("Q4_K", compared(mine, near, weights))
    assert not is_same("Q4_K", compared(mine, mine - 0.01, weights))


def test_an_unknown_architecture_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["qwen2,bert"])
    assert "bert; allowed: qwen2, gemma3" in capsys.readouterr().err


@pytest.mark.slow
def test_without_llama_cpp_one_line_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr("lab.bench.beside_llamacpp.PROMPT", 4)
    monkeypatch.setattr("lab.bench.beside_llamacpp.MORE", 2)
    assert main(["qwen2", "--prompts", "1"]) == 2
    assert capsys.readouterr().err.startswith("beside_llamacpp: import of llama_cpp halted")
