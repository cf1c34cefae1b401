"""The benchmark on vLLM's engine: which passes count, and that a cut run goes on."""

import argparse
import math
from pathlib import Path
from typing import Any, cast

import pytest

from lab.bench import vllm_engine
from lab.bench.vllm_arrivals import OutOfTimeError
from lab.bench.vllm_engine import Arm, Bench, Case, Pass
from lab.bench.vllm_engine_worker import Vllm, measure

ARMS = {"vllm": Arm("vllm", "vllm"), "engine": Arm("engine", "penstock")}
CASE = Case("model", Path("model"), "random", [[1], [2]], batch=1, new_tokens=4)


def test_a_share_of_1_85_is_clean_and_less_is_not() -> None:
    assert Pass(1.0, 1.85, 0.0).is_clean
    assert not Pass(1.0, 1.849, 0.0).is_clean


def test_a_low_share_is_the_arms_own_where_nobody_else_computes() -> None:
    assert Pass(80.0, 1.4, 0.02).is_idle_by_itself
    assert not Pass(50.0, 1.2, 0.7).is_idle_by_itself


class Short:
    """An engine that makes a token too few of the prompt 6."""

    def run(self, prompts: list[list[int]], new_tokens: int, _drafter: str) -> list[list[int]]:
        return [prompt * (new_tokens - (prompt == [6])) for prompt in prompts]


def test_answers_of_another_length_are_refused() -> None:
    engine = cast("Vllm", Short())
    found = measure(engine, [[[5], [7]], [[8]]], new_tokens=4, drafter="none")
    assert found["token_ids"] == [[5] * 4, [7] * 4, [8] * 4]
    with pytest.raises(RuntimeError, match="1 answers are not 4 tokens"):
        measure(engine, [[[5], [6]]], new_tokens=4, drafter="none")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What workers are asked, which answer at once: with 2 seconds for all calls."""
    orders: list[str] = []

    class Told:
        def __init__(self, *_about: Any, **_variables: str) -> None:
            pass

        def ask(self, do: str, **command: Any) -> dict[str, Any]:
            orders.append(do)
            ids = [[7] * command["new_tokens"] for call in command.get("calls", ()) for _ in call]
            return {"token_ids": ids, "wall_s": 2.0, "cpu_s": 4.0, "other_s": 0.0}

        def close(self) -> None:
            pass

    monkeypatch.setattr(vllm_engine, "Worker", Told)
    return orders


def run(out: Path, turns: int, minutes: float = math.inf) -> list[dict[str, Any]]:
    args = argparse.Namespace(out=out, turns=turns, minutes=minutes, requests=4, draft=None)
    return Bench(args).measure([ARMS], [CASE])


def test_a_cut_run_goes_on_behind_what_it_has_measured(asked: list[str], tmp_path: Path) -> None:
    """Of each arm a pass warms up and one counts."""
    once, out = ["load"] * 2 + ["run"] * 4, tmp_path / "out.jsonl"
    rows = run(out, turns=1)
    assert [(row["arm"], row["rates"], row["equal"]) for row in rows] == [
        ("vllm", [4.0], 1),
        ("engine", [4.0], 1),
    ]
    assert asked == once
    with pytest.raises(OutOfTimeError):
        run(out, turns=2, minutes=-1)
    assert asked == once
    assert [row["rates"] for row in run(out, turns=2)] == [[4.0, 4.0]] * 2
    assert asked == once * 2
    assert run(out, turns=1, minutes=-1) == rows
    assert asked == once * 2
