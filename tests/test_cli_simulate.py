"""`penstock simulate`, `penstock capacity`, `penstock plan`."""

import gzip
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tests.conftest import Cli
from tests.products import slow

from penstock.cli.simulator import parse_value
from penstock.core.policies.bundles import BUNDLES
from penstock.core.policies.options import PositiveInt
from penstock.core.policies.registry import policies
from penstock.sim.profiles import load_profile, save_profile

HIGH = ("--workload", "high", "--profile", "a100-llama2-7b", "--rate", "15", "--requests", "200")
GATED = ("--set", "gated=true")
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens,tenant\n" + "".join(
    f"{0.2 * i:.1f},{40 + 10 * (i % 7)},{20 + 5 * (i % 9)},{'ab'[i % 2]}\n" for i in range(120)
)


def report_of(cli: Cli, *arguments: object) -> dict[str, Any]:
    code, out, err = cli(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(TRACE.encode()))
    return path


def test_simulate_reports_the_keys_that_scripts_rely_on(cli: Cli) -> None:
    report = report_of(cli, "simulate", *HIGH, "--admission", "sarathi")
    assert report["requests_completed"] == 200
    assert report["requests_refused"] == 0
    for key in ("latency_s", "ttft_s", "tpot_s", "slowdown"):
        assert set(report[key]) == {"mean", "p50", "p99", "p999", "max"}
        assert 0 < report[key]["mean"] <= report[key]["p99"] <= report[key]["max"]
    assert [g["requests"] for g in report["by_prompt_len"]] == [200]
    for key in ("throughput_requests_per_s", "throughput_tokens_per_s", "kv_peak_tokens", "wall_s"):
        assert report[key] > 0
    assert report["preemptions"] == 0
    again = report_of(cli, "simulate", *HIGH, "--admission", "sarathi")
    assert again["latency_s"] == report["latency_s"]
    other = report_of(cli, "simulate", *HIGH, "--admission", "sarathi", "--seed", 1)
    assert other["latency_s"] != report["latency_s"]


def test_simulate_prints_a_table(cli: Cli) -> None:
    code, out, _ = cli("simulate", *HIGH, "--admission", "vllm_v1", "--ttft-p99", "1")
    assert code == 0
    for text in ("latency", "time per output token", "200 requests completed", "p99: ttft met"):
        assert text in out
    for text in ("p99.9", "max", "slowdown"):
        assert text in out


def test_simulate_tells_long_prompts_from_short_ones(cli: Cli, tmp_path: Path) -> None:
    rows = "\n".join(f"{100 * n},20" for n in range(1, 41))
    path = tmp_path / "lengths.csv"
    path.write_text(f"num_prefill_tokens,num_decode_tokens\n{rows}\n")
    server = ("--profile", "a100-llama2-7b", "--admission", "vllm_v1")
    load = ("--workload", path, *server, "--rate", 5)
    groups = report_of(cli, "simulate", *load)["by_prompt_len"]
    assert [g["prompt_len"] for g in groups][:2] == [[100, 400], [500, 800]]
    assert groups[0]["ttft_s"] < groups[-1]["ttft_s"]
    _, out, _ = cli("simulate", *load)
    assert "means by prompt length" in out
    assert "3,700 to 4,000" in out


@pytest.mark.parametrize("policy", BUNDLES)
def test_every_bundle_serves_a_workload_with_drafters(cli: Cli, policy: str) -> None:
    drafters = ("--drafter", "a=0.7", "--drafter", "b=0.5", "--requests", 40)
    report = report_of(cli, "simulate", *HIGH, *drafters, "--policy", policy)
    assert report["admission"] == BUNDLES[policy].admission
    assert report["requests_completed"] == 40
    assert report["draft_tokens_accepted"] > 0


def test_thresholds_come_from_the_planner_unless_they_are_set(cli: Cli) -> None:
    report = report_of(cli, "simulate", *HIGH, "--admission", "wait", *GATED)
    assert report["options"]["output_lens"] == [101, 201, 301]
    assert report["options"]["gated"] is True
    given = ("--set", "output_lens=100,200,300", "--set", "thresholds=1,0.5,.5")
    report = report_of(cli, "simulate", *HIGH, "--admission", "wait", *GATED, *given)
    assert report["options"]["thresholds"] == [1.0, 0.5, 0.5]


def test_a_trace_with_tenants(cli: Cli, trace: Path) -> None:
    arguments = ("--workload", trace, "--profile", "paper-linear", "--admission", "vllm_v1")
    report = report_of(cli, "simulate", *arguments)
    assert report["requests_completed"] == 120
    assert set(report["tenants"]) == {"a", "b"}
    assert report["tenants"]["a"]["requests_completed"] == 60
    assert report["jain"] == pytest.approx(1.0, abs=0.01)
    assert isinstance(report["sum_log_rate"], float)
    weighed = report_of(cli, "simulate", *arguments, "--fairness", "true", "--tenant-weight", "a=9")
    assert weighed["requests_completed"] == 120
    faster = report_of(cli, "simulate", *arguments, "--time-scale", 3)
    shown = "throughput_requests_per_s"
    assert faster[shown] == pytest.approx(3 * report[shown], rel=0.1)
    _, out, _ = cli("simulate", *arguments)
    assert "tenant a" in out


def test_targets_reach_the_policy_and_the_report(cli: Cli) -> None:
    targets = ("--ttft-p99", "1", "--tpot-p99", "0.001")
    report = report_of(cli, "simulate", *HIGH, "--admission", "fluid_guided", *targets)
    assert report["options"] == {"ttft_p99": 1.0, "tpot_p99": 0.001}
    assert report["slo_met"] == {"ttft": True, "tpot": False}
    assert report["slo_goodput"] == 0


@pytest.mark.slow
def test_speculation_by_rate_curve_and_record(cli: Cli, tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl.gz"
    record.write_bytes(gzip.compress(b'{"eagle": [4, 3, 2, 1, 2]}\n'))
    light = (*HIGH[:-4], "--rate", "0.5", "--requests", "40", "--admission", "vllm_v1")
    alone = report_of(cli, "simulate", *light)
    for drafter in ("a=0.8", "a=0.9,0.7,0.5", f"eagle={record}"):
        report = report_of(
            cli, "simulate", *light, "--drafter", drafter, "--set", "allocation.k_max=4"
        )
        assert 0 < report["draft_tokens_accepted"] <= report["draft_tokens_proposed"]
        assert report["latency_s"]["mean"] < 0.9 * alone["latency_s"]["mean"]


@pytest.mark.slow
def test_a_picture_of_a_run(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    code, _, err = cli("simulate", *HIGH, "--admission", "nested_wait", *GATED, "--plot", path)
    assert code == 0, err
    assert path.read_bytes().startswith(b"\x89PNG")


def test_blocks_and_memory(cli: Cli) -> None:
    memory = ("--kv-tokens", "4000", "--block-size", "16")
    report = report_of(cli, "simulate", *HIGH, "--admission", "vllm_v1", *memory)
    assert report["kv_tokens"] == 4000
    assert 3500 < report["kv_peak_tokens"] <= 4000
    assert report["preemptions"] > 0


@pytest.mark.slow
def test_capacity_of_a_mix_and_of_a_trace(cli: Cli, tmp_path: Path) -> None:
    low = ("--workload", "low", "--profile", "a100-llama2-7b", "--requests", 2000)
    report = report_of(cli, "capacity", *low, "--admission", "fluid_guided", "--seeds", 2)
    assert 0 < report["capacity_requests_per_s"] < report["bound_requests_per_s"]
    ratio = report["capacity_requests_per_s"] / report["bound_requests_per_s"]
    assert report["fraction"] == pytest.approx(ratio)
    assert len(report["by_seed"]) == 2
    low_end, high_end = report["interval_95"]
    assert low_end <= report["capacity_requests_per_s"] <= high_end
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n40,20\n50,25\n60,30\n")
    recorded = ("--workload", lengths, "--profile", "paper-linear", "--admission", "wait")
    recorded += GATED
    code, out, err = cli("capacity", *recorded, "--arrivals", "poisson", "--requests", 8000)
    assert code == 0, err
    for text in ("fluid bound", "95% interval"):
        assert text in out


@pytest.mark.slow
def test_a_trace_that_is_too_short_is_refused_with_the_length_needed(cli: Cli, trace: Path) -> None:
    high = ("--workload", "high", "--profile", "a100-llama2-7b", "--admission", "fluid_guided")
    code, out, err = cli("capacity", *high, "--requests", 500)
    assert (code, out) == (2, "")
    assert "500 requests are too few to tell which load is sustained" in err
    assert err.count("\n") == 1
    recorded = ("--workload", trace, "--profile", "paper-linear", "--admission", "wait")
    recorded += GATED
    code, _, err = cli("capacity", *recorded)
    assert code == 2
    assert "120 requests are too few" in err


@pytest.mark.slow
def test_the_length_needed_is_enough(cli: Cli) -> None:
    high = ("--workload", "high", "--profile", "a100-llama2-7b", "--admission", "fluid_guided")
    complaint = cli("capacity", *high, "--requests", 500)[2]
    needed = int(complaint.rsplit(maxsplit=1)[1])
    report = report_of(cli, "capacity", *high, "--requests", needed)
    low_end, high_end = report["interval_95"]
    # With 20,000 requests it is 36.8.
    assert low_end <= 36.8 <= high_end
    assert high_end - low_end < 0.2 * report["capacity_requests_per_s"]


@pytest.mark.slow
def test_capacity_is_of_the_whole_trace(cli: Cli, tmp_path: Path) -> None:
    """A load is judged by the second half of its arrivals."""
    rows = ["500,220\n"] * 3000 + ["500,180\n"] * 3000
    lengths = tmp_path / "lighter.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(rows))
    report = report_of(
        cli,
        *("capacity", "--workload", lengths, "--arrivals", "poisson"),
        *("--profile", "a100-llama2-7b", "--admission", "fluid_guided"),
    )
    assert 0.95 < report["fraction"] < 1


@pytest.mark.parametrize(
    ("command", "kv_tokens"),
    [("simulate", 10**9), ("plan", 10**15), *slow(["capacity"], [10**9, 10**15])],
)
def test_memory_is_not_paid_for_before_it_is_used(cli, tmp_path, command, kv_tokens) -> None:
    profile = tmp_path / "large.json"
    save_profile(replace(load_profile("a100-llama2-7b"), kv_tokens=kv_tokens), profile)
    admission = () if command == "plan" else ("--admission", "fluid_guided")
    num = 3000 if command == "capacity" else 50
    run = ("--workload", "low", "--rate", 5, "--requests", num, "--profile", profile, *admission)
    report = report_of(cli, command, *run)
    assert report["kv_tokens"] == kv_tokens
    report = report_of(cli, command, *run, "--kv-tokens", str(kv_tokens))
    assert report["kv_tokens"] == kv_tokens


ABSURD = {1e300: "nothing may take more than 100000 s", 1e-300: "a step of one token must take"}


@pytest.mark.parametrize(
    ("command", "factor"),
    [
        *itertools.product(["simulate", "capacity"], ABSURD),
        *(("simulate", factor) for factor in (1e-3, 1e3)),
        *(pytest.param("capacity", factor, marks=pytest.mark.slow) for factor in (1e-3, 1e3)),
    ],
)
def test_steps_of_absurd_length(cli: Cli, tmp_path: Path, command: str, factor: float) -> None:
    profile = load_profile("a100-llama2-7b")
    other = replace(
        profile,
        token_seconds=tuple(factor * s for s in profile.token_seconds),
        per_prefill_token=factor * profile.per_prefill_token,
    )
    save_profile(other, tmp_path / "absurd.json")
    num = 3000 if command == "capacity" else 50
    run = ("--workload", "low", "--rate", 5, "--requests", num, "--admission", "vllm_v1")
    code, _, said = cli(command, *run, "--profile", tmp_path / "absurd.json")
    assert code == (2 if factor in ABSURD else 0)
    assert ABSURD.get(factor, "") in said
    assert said.startswith("penstock: ") == (factor in ABSURD)


SCENARIO = """
workload: high
profile: a100-llama2-7b
rate: 15
requests: 200
admission: wait
allocation: fixed
set: {allocation: {k: 3}, gated: true, output_lens: [101, 201, 301], thresholds: [1, 0.5, 0.5]}
drafter: {a: 0.8, b: [0.9, 0.5]}
fairness: true
"""


@pytest.mark.slow
def test_a_scenario_file_is_as_its_options(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO)
    named = report_of(cli, "simulate", "--scenario", file)
    sets = ("allocation.k=3", "gated=true", "output_lens=101,201,301", "thresholds=1,0.5,0.5")
    options = [part for text in sets for part in ("--set", text)]
    options += ["--drafter", "a=0.8", "--drafter", "b=0.9,0.5", "--fairness", "true"]
    given = ("--admission", "wait", "--allocation", "fixed")
    same = report_of(cli, "simulate", *HIGH, *given, *options)
    assert {**named, "wall_s": 0} == {**same, "wall_s": 0}
    fewer = report_of(cli, "simulate", "--requests", 50, "--scenario", file)
    assert fewer["requests_completed"] == 50, "the command line takes precedence"
    assert report_of(cli, "plan", "--scenario", file)["rate_requests_per_s"] == 15


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "workloads: low\n",
            "scenario.yaml: unknown key 'workloads'; keys: acceptance, admission,",
        ),
        ("rate: fast\n", "Invalid value for '--rate': Input should be a valid number"),
        ("- rate\n", "must hold a mapping of settings"),
        ("rate: {", "is not YAML"),
        ("rate: 1\nrate: 2\n", "'rate' is given twice"),
    ],
)
def test_a_scenario_file_that_is_none(cli: Cli, tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    code, out, err = cli("simulate", "--scenario", file, *HIGH[:4], "--admission", "vllm_v1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


BAD_TRACES = {
    "columns.csv": "a,b\n1,2\n",
    "one.csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n",
}
WAIT = ("--admission", "wait")
SARATHI = ("--admission", "sarathi")


LOW = ("--workload", "low", "--rate", "1", "--admission", "sarathi")
FLUID = ("--workload", "low", "--rate", "1", "--admission", "fluid_guided")
BAD_INPUT = [
    (("--workload", "columns.csv", *SARATHI), "has the columns a, b; a trace has"),
    (("--workload", "none.csv", *SARATHI), "there is no file 'none.csv'"),
    (("--workload", "low", *SARATHI, "--rate", "0"), "the rate must be a finite number over 0"),
    (("--workload", "low", "--rate", "1", "--admission", "fifo"), "choose from"),
    ((*LOW, "--policy", "x"), "unknown policy 'x'; choose from auto, vllm, "),
    ((*LOW, "--set", "budget=1"), "token_budget, max"),
    ((*LOW, "--set", "token_budget=x"), "must be a whole number from 1 to 1000000000, not 'x'"),
    ((*FLUID, "--set", "ttft_p99=0"), "ttft_p99 must be a finite number above 0, or null, not"),
    ((*LOW, "--set", "allocation.in_time=-1"), "in_time must be a finite number of at least 0"),
    ((*FLUID, "--set", "order=random"), "order must be arrival or size_aware or slack, not"),
    ((*LOW, "--set", "token_budget=8"), "token_budget must be at least max_num_seqs"),
    ((*LOW, "--set", "k"), "OPTION=VALUE"),
    ((*LOW, "--set", "router.k=1"), "allocation."),
    ((*LOW, "--set", "allocation.x=1"), "k_max"),
    ((*LOW, "--drafter", "a"), "NAME=RATE"),
    ((*LOW, "--ttft-p99", "0"), "seconds over 0"),
    ((*LOW, "--plot", "a.nothing"), "an ending from"),
    ((*LOW, "--kv-tokens", "9", "--block-size", "16"), "hold no block of 16"),
    (("--workload", "one.csv", *WAIT), "no arrivals to take a rate from"),
    (
        ("--workload", "low", "--rate", "9", *WAIT, "--set", "thresholds=1"),
        "thresholds must be 3 numbers, one for each length",
    ),
    (
        (
            *("--workload", "low", "--rate", "9", *WAIT),
            *("--set", "output_lens=10,20", "--set", "thresholds=900,900"),
        ),
        "thresholds 900,900 hold up to",
    ),
]
# `capacity` looks for the load by itself.
BAD_LOADS = [
    (("--workload", "low", *SARATHI), "has no arrival times: give a rate"),
    (("--workload", "high", "--rate", "34", *WAIT), "no thresholds fit"),
    (("--workload", "high", "--rate", "900", *WAIT, *GATED), "unstable"),
]


@pytest.mark.parametrize(
    ("command", "arguments", "complaint"),
    [("simulate", *case) for case in BAD_INPUT + BAD_LOADS]
    + [pytest.param("capacity", *case, marks=pytest.mark.slow) for case in BAD_INPUT],
)
def test_bad_input_is_one_line(cli, tmp_path, monkeypatch, command, arguments, complaint) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, text in BAD_TRACES.items():
        Path(name).write_text(text)
    code, out, err = cli(command, "--profile", "a100-llama2-7b", *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("penstock: ")
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--rate", "20", "--delta", "1"), "--delta is a probability"),
        (("--rate", "2000"), "at 2000 requests a second: unstable"),
        (("--rate", "0"), "the rate must be"),
        (("--rate", "5", "--kv-tokens", "60"), "fits into 60 KV tokens"),
        (("--rate", "20", "--profile", "v100"), "unknown profile 'v100'"),
    ],
)
def test_a_plan_that_cannot_be_made(cli: Cli, arguments: tuple[str, ...], complaint: str) -> None:
    profile = () if "--profile" in arguments else ("--profile", "a100-llama2-7b")
    code, out, err = cli("plan", "--workload", "high", *profile, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


def test_requests_larger_than_memory_are_refused_not_a_hang(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,50,5\n1,5000,5\n2,50,5\n")
    for admission in policies("admission"):
        arguments = ("--workload", path, "--profile", "a100-llama2-7b", "--admission", admission)
        report = report_of(cli, "simulate", *arguments, "--kv-tokens", 1000)
        assert report["requests_refused"] == 1, admission


def test_without_matplotlib_the_message_says_what_to_install(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = ("--plot", tmp_path / "p.png")
    code, _, err = cli("simulate", *HIGH, "--admission", "sarathi", *plot)
    assert code == 2
    assert "needs matplotlib: pip install matplotlib" in err


@pytest.mark.parametrize(
    ("text", "wanted", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ("1e-3", float | None, 1e-3),
        ("none", int | None, None),
        ("1, 2,3", tuple[int, ...], (1, 2, 3)),
        ("[1, 2]", tuple[PositiveInt, ...], (1, 2)),
        ("", tuple[float, ...], ()),
        ("True", bool, True),
        ("abc", str | None, "abc"),
        ("none", str | None, None),
        ("b", Literal["a", "b"], "b"),
    ],
)
def test_values_take_the_type_of_their_option(text: str, wanted: Any, value: Any) -> None:
    parsed = parse_value(text, wanted)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.slow
def test_draft_servers_across_links(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text(
        "servers:\n"
        "  - {name: a, acceptance: 0.8, ms_per_token: 2, rtt_ms: 5, tenant: alice}\n"
        "  - {name: b, acceptance: 0.5, ms_per_token: 9, rtt_ms: 40, tenant: bob}\n"
    )
    run = (
        *("simulate", "--workload", "low", "--profile", "a100-llama2-7b", "--rate", "2"),
        *("--admission", "vllm_v1", "--requests", "40", "--draft-servers", str(path)),
    )
    figures = {}
    for pipeline in ("off", "async"):
        figures[pipeline] = report_of(cli, *run, "--pipeline", pipeline)
        by_name = report_of(cli, *run, "--pipeline", pipeline, "--allocation", "priced")
        assert {**figures[pipeline], "wall_s": 0} == {**by_name, "wall_s": 0}
        assert figures[pipeline]["requests_completed"] == 40
        assert set(figures[pipeline]["tenants"]) == {"alice", "bob"}
        assert figures[pipeline]["draft_tokens_accepted"] > 0
    assert figures["off"]["latency_s"] != figures["async"]["latency_s"]
    code, _, said = cli(*run, "--pipeline", "both")
    assert code == 2
    assert "choose from async, auto, micro_batches, off" in said


def test_weights_that_are_none(cli: Cli, trace: Path) -> None:
    arguments = ("--workload", trace, "--profile", "paper-linear", "--admission", "vllm_v1")
    for text in ("a", "a=", "=2", "a=0", "a=-1", "a=nan", "a=inf", "a=x"):
        status, _, error = cli(
            "simulate", *arguments, "--fairness", "true", "--tenant-weight", text
        )
        assert status == 2
        assert "NAME=WEIGHT" in error


EXPLAINED = (
    *("simulate", "--workload", "high", "--profile", "a100-llama2-7b", "--rate", "40"),
    *("--requests", "80", "--kv-tokens", "3000", "--drafter", "small=0.7"),
)


@pytest.mark.parametrize("admission", ["fluid_guided", "vllm_v1"])
def test_explain_tells_why_a_request_got_what_it_got(cli: Cli, admission: str) -> None:
    run = (*EXPLAINED, "--admission", admission)
    report = report_of(cli, *run, "--explain", 70)
    rows = report.pop("explain")
    assert {**report, "wall_s": 0} == {**report_of(cli, *run), "wall_s": 0}, "nothing else changes"
    assert rows[0]["state"] == "arrived"
    assert rows[0]["why"].startswith("prompt 62, output up to ")
    assert rows[-1]["tokens"] == int(rows[0]["why"].split()[-1])
    reason = "kept for running requests" if admission == "fluid_guided" else "needs 62 KV tokens"
    assert any(reason in row["why"] for row in rows if row["state"] == "waiting")
    decodes = [row for row in rows if row["state"] == "decode"]
    for row, after in itertools.pairwise(decodes):
        if after["step"] == row["step"] + 1:
            assert after["tokens"] == row["tokens"] + after["accepted"] + 1
    bought = [row for row in decodes if row["draft_tokens"]]
    assert all(row["drafter"] == "small" and 0 < row["acceptance"] < 1 for row in decodes)
    assert all(row["accepted"] <= row["draft_tokens"] for row in decodes)
    cheaper = [row["next_worth"] < row["next_price"] for row in bought]
    # A plan holds for some steps, and k_max may end a draft first.
    assert np.mean(cheaper) > 0.8


def test_explain_knows_what_policies_know(cli: Cli, tmp_path: Path) -> None:
    run = (*EXPLAINED, "--admission", "sarathi", "--allocation", "fixed", "--explain", 3)
    rows = report_of(cli, *run)["explain"]
    assert {row["price_of_second"] for row in rows} == {None} == {row["next_price"] for row in rows}
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from penstock.core.policies.selection.single import Single\n\n\n"
        "class Mine(Single):\n    name = 'mine'\n    gauges = {'saved_seconds': {'3': 0.25}}\n\n\n"
        "POLICY = Mine\n"
    )
    rows = report_of(cli, *run, "--selection", mine)["explain"]
    assert {row["saved_seconds"] for row in rows if row["state"] == "decode"} == {0.25}
    _, out, _ = cli(*run)
    assert all(text in out for text in ("request 3", "acceptance", "arrived", "decode"))
    alone = report_of(cli, *EXPLAINED[:-2], "--admission", "vllm_v1", "--explain", 0)["explain"]
    assert [row["state"] for row in alone][:3] == ["arrived", "prefill", "decode"]


@pytest.mark.parametrize("wrong", ["80", "-1", "01", "first", "²"])
def test_explain_names_the_requests_that_there_are(cli: Cli, wrong: str) -> None:
    code, _, said = cli(*EXPLAINED, "--admission", "vllm_v1", f"--explain={wrong}")
    assert (code, said.count("\n")) == (2, 1)
    assert f"--explain takes a request from 0 to 79, not {wrong!r}" in said
    code, _, said = cli(*EXPLAINED, "--admission", "vllm_v1", "--explain=1", "--seeds", 2)
    assert (code, "shows one run" in said) == (2, True)


def test_seeds_differ_more_on_a_machine_whose_times_do(cli: Cli, tmp_path: Path) -> None:
    known = load_profile("a100-llama2-7b")
    widths = []
    for spread in (0.0, 0.2):
        path = tmp_path / f"{spread}.json"
        save_profile(replace(known, name="box", spread=spread), path)
        report = report_of(cli, "simulate", *HIGH, "--profile", path, "--seeds", 4)
        figure = report["over_seeds"]["tpot_s.mean"]
        (low, high), (least, most) = figure["interval_95"], figure["one_run_95"]
        assert least < low < figure["mean"] < high < most
        # Of four values: the root of 5 times as wide.
        assert most - least == pytest.approx(5**0.5 * (high - low))
        widths.append((most - least) / figure["mean"])
    assert widths[1] > 3 * widths[0]


def test_an_unknown_rule_of_fairness_is_told(cli: Cli) -> None:
    code, _, err = cli("simulate", "--fairness", "maybe")
    said = (
        "penstock: Invalid value for '--fairness': 'maybe' is not one of 'false', 'true', 'strict'."
    )
    assert (code, err) == (2, said + "\n")
