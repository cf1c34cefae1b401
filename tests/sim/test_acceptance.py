import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.core.types import VerifyItem
from penstock.sim.acceptance import (
    AcceptanceByDrafter,
    AcceptanceModel,
    CurveAcceptance,
    GeometricAcceptance,
    RecordedAcceptance,
    parse_drafters,
    read_records,
)
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload, WorkloadError, make_workload

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))


def item(request: str = "r", length: int = 4, round_: int = 0, drafter: str = "a") -> VerifyItem:
    return VerifyItem(request, 1, round_, 9, 1, True, drafter=drafter, num_draft_tokens=length)


def test_a_curve_is_what_the_draws_survive() -> None:
    model = CurveAcceptance({"a": (0.9, 0.5, 0.5, 0.1)}, seed=3)
    counts = [model.num_accepted(item(f"r{i}"), 1) for i in range(4000)]
    for s, survival in enumerate((0.9, 0.5, 0.5, 0.1), 1):
        share = sum(c >= s for c in counts) / len(counts)
        assert share == pytest.approx(survival, abs=0.03)
    assert max(model.num_accepted(item(f"r{i}", 16), 1) for i in range(500)) == 4
    assert model.tokens_per_step("a", 2) == pytest.approx(2.4)
    assert model.tokens_per_step("a", 9) == pytest.approx(3.0)


def test_a_longer_draft_never_keeps_less() -> None:
    """One draw decides a round, so lengths can be compared on equal terms."""
    models: list[AcceptanceModel] = [
        GeometricAcceptance({"a": 0.7}, 1),
        CurveAcceptance({"a": (0.8, 0.6, 0.3, 0.2)}, 1),
        RecordedAcceptance({"a": [[3, 1, 5, 2]]}, 1),
    ]
    for model in models:
        for i in range(100):
            longest = model.num_accepted(item(round_=i, length=4), i)
            for length in range(4):
                kept = model.num_accepted(item(round_=i, length=length), i)
                assert kept == min(length, longest)


def test_behind_a_rejection_tokens_are_right_as_often_as_before_it() -> None:
    geometric = GeometricAcceptance({"a": 0.7}, 1)
    curve = CurveAcceptance({"a": (0.8, 0.6, 0.3, 0.3)}, 1)
    right = [geometric.num_right_behind(item(round_=i, length=20), 0, 3) for i in range(800)]
    assert np.mean(right) / 16 == pytest.approx(0.7, abs=0.02)
    assert np.std(right) > 1
    last = [curve.num_right_behind(item(round_=i), 0, 1) for i in range(2000)]
    assert np.mean(last) == pytest.approx(0.5 + 1.0, abs=0.04)
    recorded = RecordedAcceptance({"a": [[3, 2, 1, 5, 4, 3, 2, 1]]})
    assert recorded.num_right_behind(item(length=6), 0, 2) == 3
    for model in (geometric, curve, recorded):
        assert model.num_right_behind(item(length=4), 0, 3) == 0
        assert model.num_right_behind(item(length=4), 0, 4) == 0


@pytest.mark.parametrize("curve", [(), (1.2,), (0.5, 0.6), (0.5, -0.1), (float("nan"),)])
def test_a_curve_that_rises_is_refused(curve: tuple[float, ...]) -> None:
    with pytest.raises(WorkloadError, match="an acceptance curve falls"):
        CurveAcceptance({"a": curve})


def test_records_are_replayed_position_by_position() -> None:
    model = RecordedAcceptance({"a": [[3, 1, 21, 2]]})
    assert [model.num_accepted(item(length=20), p) for p in range(6)] == [2, 0, 20, 1, 2, 0]
    assert [model.num_accepted(item(length=1), p) for p in range(4)] == [1, 0, 1, 1]
    assert model.num_accepted(item(length=0), 2) == 0


def test_drafters_of_one_file_share_a_row_and_seeds_choose_it() -> None:
    rows = [[i + 1] for i in range(40)]
    model = RecordedAcceptance({"a": rows, "b": rows}, seed=1)
    names = [f"r{i}" for i in range(40)]
    ours = [model.num_accepted(item(n, 40), 0) for n in names]
    theirs = [model.num_accepted(item(n, 40, drafter="b"), 0) for n in names]
    assert ours == theirs
    assert len(set(ours)) > 15
    assert ours != [RecordedAcceptance({"a": rows}, 2).num_accepted(item(n, 40), 0) for n in names]


def write(path: Path, *records: Any) -> Path:
    text = "".join(json.dumps(r) + "\n" for r in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_read_records(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl.gz",
        {"id": "1", "ngram": [1, 2], "eagle": [3, 1, 1], "eagle3": None},
        {"id": "2", "ngram": [4, 1], "eagle": [1, 1], "eagle3": None},
        {"id": "3", "ngram": None, "eagle": [2]},
    )
    assert read_records(path, ["ngram"]) == {"ngram": [[1, 2], [4, 1]]}
    assert read_records(path, ["eagle"]) == {"eagle": [[3, 1, 1], [1, 1], [2]]}
    assert read_records(path, ["ngram", "eagle"]) == {"ngram": [[4, 1]], "eagle": [[1, 1]]}
    with pytest.raises(WorkloadError, match=r"no records of 'eagle3'; it has eagle, ngram"):
        read_records(path, ["eagle3"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a", "a drafter is NAME=RATE"),
        ("a=1.5", "from 0 to 1, not 1.5"),
        ("a=0.5,0.9", "an acceptance curve falls"),
        ("a=none.jsonl", "none.jsonl cannot be read"),
        ("a=bad.jsonl", "bad.jsonl, line 1: not JSON"),
        ("a=list.jsonl", "line 1: not a JSON object"),
        ("a=zero.jsonl", "line 1: a is not an array of 1 or more"),
    ],
)
def test_bad_drafters(text, complaint, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{")
    write(Path("list.jsonl"), [1])
    write(Path("zero.jsonl"), {"a": [1, 0]})
    with pytest.raises(WorkloadError, match=complaint):
        parse_drafters([text])
    with pytest.raises(WorkloadError, match="given twice"):
        parse_drafters(["a=0.5", "a=0.6"])


PROFILE = load_profile("a100-llama2-7b")


def simulated_steps(acceptance: AcceptanceModel, output_len: int, k: int) -> int:
    """Target steps of one request alone, its prompt in one of them."""
    lengths = Workload("one", make_array(50), make_array(output_len))
    setup = Setup(
        PROFILE,
        PolicyConfig.from_name("vllm_v1"),
        allocation=PolicyConfig.from_name("fixed", k=k),
        acceptance=acceptance,
        drafters=("a",),
    )
    report = run(setup, make_workload(lengths, rate=1.0))
    assert report.num_tokens[0] == output_len
    return report.result.num_steps


def make_array(*values: int) -> Any:
    import numpy as np

    return np.array(values, dtype=np.int64)


def test_a_run_walks_the_record_exactly() -> None:
    """Output position 0 is the prefill's."""
    row = [9, 3, 1, 1, 2, 4, 1]
    model = AcceptanceByDrafter({"a": RecordedAcceptance({"a": [row]})})
    for k in (0, 1, 2, 5):
        for output_len in (2, 7, 30):
            position, steps = 1, 1
            while position < output_len:
                drafted = min(k, output_len - position - 1)
                position += min(row[position % len(row)], drafted + 1)
                steps += 1
            assert simulated_steps(model, output_len, k) == steps


def test_acceptance_does_not_depend_on_the_batch() -> None:
    """The same request advances by the same rounds, alone and among others."""
    acceptance = CurveAcceptance({"a": (0.8, 0.6, 0.4, 0.2)}, 1)

    def proposals(num: int) -> tuple[int, int]:
        lengths = Workload("some", make_array(*[50] * num), make_array(*[60] * num))
        setup = Setup(
            PROFILE,
            PolicyConfig.from_name("vllm_v1"),
            allocation=PolicyConfig.from_name("fixed"),
            acceptance=acceptance,
            drafters=("a",),
        )
        record = run(setup, make_workload(lengths, rate=100.0)).result.records["0"]
        return record.num_proposed, record.num_accepted

    assert proposals(1) == proposals(12)
