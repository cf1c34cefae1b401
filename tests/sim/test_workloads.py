"""Workloads: synthetic mixes, trace files and arrivals."""

import gzip
import math
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.sim.arrivals import ArrivalProcess, RateChange, parse_arrivals
from penstock.sim.planner import load_bound, traffic_of
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.traces import WorkloadError, read_arrivals, read_trace
from penstock.sim.workloads import MIXES, Workload, load_workload, make_workload, synthetic

DATA = Path(
    os.environ.get("PENSTOCK_DATA", Path(__file__).resolve().parents[2].parent / "shared/data")
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319601,3180,8"
)
RECORDED = (
    "arrived_at,num_prefill_tokens,num_decode_tokens,tenant\n"
    "5.0,10,1,a\n5.5,20,2,b\n7.0,30,3,a\n8.0,40,4,a\n"
)
LENGTHS = "num_prefill_tokens,num_decode_tokens,pd_ratio\n11,1,x\n12,2,x\n13,3,x\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def data_file(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not there; PENSTOCK_DATA names the data folder")
    return path


# Synthetic workloads


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_drawn_in_its_shares(name: str) -> None:
    num = 20_000
    drawn = synthetic(name, num, seed=3)
    assert drawn.arrival_time is None
    assert set(drawn.prompt_len) == {62}
    assert drawn.prompt_len.dtype == drawn.output_len.dtype == np.int64
    mix = MIXES[name]
    counts = np.array([(drawn.output_len == length + 1).sum() for length in mix.decode_lens])
    assert counts.sum() == num
    p = mix.probabilities
    assert (np.abs(counts - num * p) < 5 * np.sqrt(num * p * (1 - p))).all()


@pytest.mark.parametrize(("name", "closed_form"), [("low", 1800.9), ("high", 74.60)])
def test_a_request_has_the_papers_stages(name: str, closed_form: float) -> None:
    """l' + 1 of them, the prefill's among them: in the simulator as in the fluid model."""
    paper, mix = load_profile("paper-linear"), MIXES[name]
    drawn = make_workload(name, num_requests=100_000, rate=1.0)
    assert load_bound(paper, drawn, paper.kv_tokens) == pytest.approx(closed_form, rel=0.005)
    assert [t.decode_len for t in traffic_of(drawn, 1.0)] == list(mix.decode_lens)
    alone = make_workload(name, num_requests=1, rate=1.0)
    steps = run(Setup(paper, PolicyConfig.from_name("vllm_v1")), alone).result.num_steps
    assert steps in [length + 1 for length in mix.decode_lens]


# Arrivals


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1.0), ("gamma:0.5", 0.5), ("gamma:2", 2.0)])
def test_gaps_have_the_rate_and_the_variation(text: str, cv: float) -> None:
    times = make_workload("low", num_requests=40_000, rate=5.0, arrivals=text).arrival_time
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_rate_changes_hold_between_their_times_only() -> None:
    made = make_workload(
        "low", num_requests=60_000, rate=10.0, arrivals="poisson@1000-2000x2,3000-x0.5"
    )

    def rate(start: float, end: float) -> float:
        return ((made.arrival_time >= start) & (made.arrival_time < end)).sum() / (end - start)

    assert rate(0, 1000) == pytest.approx(10, rel=0.05)
    assert rate(1000, 2000) == pytest.approx(20, rel=0.05)
    assert rate(2000, 3000) == pytest.approx(10, rel=0.05)
    assert rate(3000, 5000) == pytest.approx(5, rel=0.05)
    assert (np.diff(made.arrival_time) >= 0).all()


def test_arrivals_as_text() -> None:
    assert parse_arrivals("poisson") == ArrivalProcess()
    assert parse_arrivals("gamma:2.5@0-60x.5,300-x3") == ArrivalProcess(
        2.5, (RateChange(0, 60, 0.5), RateChange(300, math.inf, 3))
    )
    assert parse_arrivals("some/file.csv") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gamma", "choose poisson or gamma:CV"),
        ("gamma:0", "from 0.001 to 100"),
        ("poisson@5x2", "START-ENDxFACTOR"),
        ("poisson@5-9x0", "over 0"),
        ("poisson@9-5x2", "end after it starts"),
        ("poisson@0-9x2,5-12x3", "not overlap"),
        ("uniform", "name a file"),
    ],
)
def test_bad_arrivals_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint) as caught:
        make_workload("low", num_requests=5, rate=1.0, arrivals=text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 1e-308])
def test_bad_rates_are_refused(rate: float) -> None:
    with pytest.raises(WorkloadError, match="rate"):
        make_workload("low", num_requests=1000, rate=rate)


# Trace files


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_an_azure_trace_keeps_a_tenth_of_a_microsecond(tmp_path: Path, name: str) -> None:
    made = make_workload(write(tmp_path, AZURE, name))
    assert made.name == name
    assert made.prompt_len.tolist() == [4808, 3180]
    assert made.output_len.tolist() == [10, 8]
    assert made.arrival_time == pytest.approx([0, 0.0520001], abs=1e-9)
    assert made.tenants is None


def test_times_may_end_in_utc(tmp_path: Path) -> None:
    text = AZURE.replace("9600,", "9600+00:00,").replace("9601,", "9601Z,")
    expected = read_trace(write(tmp_path, AZURE)).arrival_time
    assert (read_trace(write(tmp_path, text)).arrival_time == expected).all()


def test_a_recorded_trace_has_tenants_and_is_played_once(tmp_path: Path) -> None:
    path = write(tmp_path, RECORDED)
    made = make_workload(path, num_requests=100)
    assert made.arrival_time.tolist() == [0, 0.5, 2, 3]
    assert made.tenants.tolist() == ["a", "b", "a", "a"]
    assert make_workload(path, time_scale=4).arrival_time.tolist() == [0, 0.125, 0.5, 0.75]
    cut = make_workload(path, num_requests=2)
    assert (len(cut), cut.tenants.tolist()) == (2, ["a", "b"])


def test_a_recorded_trace_may_arrive_otherwise(tmp_path: Path) -> None:
    made = make_workload(write(tmp_path, RECORDED), rate=3.0, seed=5)
    assert made.output_len.tolist() == [1, 2, 3, 4]
    assert made.tenants.tolist() == ["a", "b", "a", "a"]
    expected = make_workload("low", num_requests=4, rate=3.0, seed=5).arrival_time
    assert (made.arrival_time == expected).all()


def test_a_file_of_lengths_is_repeated_from_its_start(tmp_path: Path) -> None:
    path = write(tmp_path, LENGTHS)
    made = make_workload(path, num_requests=7, rate=1.0)
    assert made.prompt_len.tolist() == [11, 12, 13, 11, 12, 13, 11]
    assert made.output_len.tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert len(make_workload(path, rate=1.0)) == 3
    with pytest.raises(WorkloadError, match="give a rate"):
        make_workload(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RECORDED, [0, 0.5, 2, 3]),
        (AZURE, [0, 0.0520001]),
        ("arrived_at\n1\n2\n4\n", [0, 1, 3]),
        ("1\n2\n\n4.5\n", [0, 1, 3.5]),
        ("2023-11-16 18:17:03\n2023-11-16 18:17:05\n", [0, 2]),
    ],
)
def test_arrivals_from_a_file(tmp_path: Path, text: str, expected: list[float]) -> None:
    path = write(tmp_path, text)
    assert read_arrivals(path) == pytest.approx(expected, abs=1e-9)
    made = make_workload("low", num_requests=20, arrivals=str(path), time_scale=2)
    assert made.arrival_time == pytest.approx(np.array(expected) / 2, abs=1e-9)
    assert len(made) == len(made.output_len) == len(expected)
    with pytest.raises(WorkloadError, match="time scale instead"):
        make_workload("low", num_requests=20, arrivals=path, rate=1.0)


BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 472, "output_length": 18, "hash_ids": [46, 47]}

{"hash_ids": [], "timestamp": 43000, "input_length": 1087, "output_length": 230, "more": null}
"""


@pytest.mark.parametrize(
    ("name", "text"), [("b.csv", BURSTGPT), ("m.jsonl", MOONCAKE), ("m.jsonl.gz", MOONCAKE)]
)
def test_other_public_traces(tmp_path: Path, name: str, text: str) -> None:
    """Times in seconds, and in milliseconds."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    made = make_workload(path)
    assert made.prompt_len.tolist() == [472, 1087]
    assert made.output_len.tolist() == [18, 230]
    assert made.arrival_time.tolist() == [0, 40]
    assert read_arrivals(path).tolist() == [0, 40]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n \n", "is empty"),
        ("[1]\n", "line 1: not a JSON object"),
        (MOONCAKE + "{", "line 4: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        (MOONCAKE.replace(', "output_length": 230', ""), "line 3: output_length is missing"),
        (MOONCAKE.replace("230", "null"), "line 3: output_length 'None' is not a number"),
        (
            MOONCAKE.replace("43000", "43.5"),
            "line 3: timestamp '43.5' is not a whole number of mil",
        ),
        (MOONCAKE.replace("input", "prompt"), "has the columns timestamp, prompt_length"),
    ],
)
def test_bad_json_lines_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=complaint) as caught:
        make_workload(path)
    assert "\n" not in str(caught.value)


HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        (HEADER, "has no rows"),
        ("a,b\n1,2\n", "has the columns a, b; a trace has TIMESTAMP, ContextTokens"),
        (HEADER + "0,1,2\n1,x,2\n", "line 3: num_prefill_tokens 'x' is not a number"),
        (HEADER + "0,1,2\n\n1,1,\n", "line 4: num_decode_tokens '' is not a number"),
        (HEADER + "0,nan,2\n", "line 2: num_prefill_tokens 'nan' is not a finite number"),
        (HEADER + "0,0,2\n", "line 2: num_prefill_tokens '0' is not a whole number from 1"),
        (HEADER + "0,1.5,4\n", "'1.5' is not a whole number"),
        (HEADER + "0,10000001,4\n", "from 1 to 10000000"),
        (HEADER + "inf,1,4\n", "arrived_at 'inf' is not a finite number"),
        (HEADER + "-1,1,4\n", "arrived_at '-1' is negative"),
        (HEADER + "2,1,4\n1,1,4\n", "line 3: arrived_at '1' is earlier than the line before"),
        (HEADER + "2,1\n", "line 2: 2 columns instead of 3"),
        (RECORDED.replace(",b", ","), "line 3: tenant '' is not a name"),
        (AZURE.replace("2023-11-16 18:17:04", "soon"), "line 3: TIMESTAMP .* is not a time"),
        (AZURE.replace("2023-11-16 18:17:03.9799600", ""), "line 2: TIMESTAMP '' is not a time"),
        (AZURE.replace("3.9799600", "3+02:00"), "line 2: TIMESTAMP .* is not a time"),
        (AZURE.replace("18:17:04", "17:17:04"), "line 3: TIMESTAMP .* is earlier"),
    ],
)
def test_bad_traces_are_refused_with_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint) as caught:
        make_workload(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(gzip.compress(RECORDED.encode() * 50)[:60])
    pretended = tmp_path / "pretended.csv.gz"
    pretended.write_text(RECORDED)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path in (broken, pretended, binary, tmp_path):
        with pytest.raises(WorkloadError, match=path.name):
            make_workload(path)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"spec": "medium", "num_requests": 5}, "choose from low, high, nested, ten_bins, or name"),
        ({"spec": "low", "rate": 1.0}, "needs a number of requests"),
        ({"spec": "low", "num_requests": 0, "rate": 1.0}, "1 request or more"),
        ({"spec": "low", "num_requests": 5, "arrivals": "poisson"}, "need a rate"),
        ({"spec": "low", "num_requests": 5, "rate": 1.0, "time_scale": 2.0}, "recorded arrivals"),
        ({"spec": "low", "num_requests": 5, "rate": 1.0, "time_scale": 0.0}, "time scale"),
        ({"spec": "low", "num_requests": 5, "rate": 1.0, "seed": -1}, "seed"),
    ],
)
def test_bad_requests_for_a_workload(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        make_workload(**arguments)


def test_arrivals_need_a_column_of_times(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="needs a column TIMESTAMP or arrived_at"):
        read_arrivals(write(tmp_path, LENGTHS))


def test_what_requests_ask_for_is_in_the_trace(tmp_path: Path) -> None:
    text = (
        "arrived_at,num_prefill_tokens,num_decode_tokens,tpot_ms,deadline_ms\n"
        "0,10,1,25,\n1,20,2,,1500\n2,30,3,,\n"
    )
    made = make_workload(write(tmp_path, text))
    assert made.tpot is not None
    assert np.isnan(made.tpot).tolist() == [False, True, True]
    assert made.tpot[0] == 0.025
    assert made.deadline[1] == 1.5
    lines = '{"timestamp": 0, "input_length": 9, "output_length": 2, "tpot_ms": null}\n'
    assert np.isnan(load_workload(write(tmp_path, lines, "t.jsonl")).tpot).all()


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("0", "line 2: tpot_ms '0' is not a number of milliseconds over 0"),
        ("nan", "line 2: tpot_ms 'nan' is not a number of milliseconds over 0"),
        ("fast", "line 2: tpot_ms 'fast' is not a number"),
    ],
)
def test_a_target_that_is_none(tmp_path: Path, cell: str, said: str) -> None:
    text = f"num_prefill_tokens,num_decode_tokens,tpot_ms\n10,1,{cell}\n"
    with pytest.raises(WorkloadError, match=said):
        load_workload(write(tmp_path, text))


def test_a_workload_checks_its_columns() -> None:
    ones = np.ones(2, dtype=np.int64)
    with pytest.raises(WorkloadError, match="differ in length"):
        Workload("w", ones, ones[:1])
    with pytest.raises(WorkloadError, match="lengths are from 1"):
        Workload("w", ones, ones * 0)
    with pytest.raises(WorkloadError, match="start at 0"):
        Workload("w", ones, ones, np.array([1.0, 2.0]))
    with pytest.raises(WorkloadError, match="sorted"):
        Workload("w", ones, ones, np.array([0.0, np.nan]))


# The real traces
