"""`penstock plan`, and that what it prints can be served with."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Cli

from penstock.config import ServeConfig
from penstock.core.policies.base import AdmissionPolicy
from penstock.engine.build import load_engine
from penstock.sim import plots

PROFILE = ("--profile", "a100-llama2-7b")
MIX = ("--workload", "high", *PROFILE, "--rate", "15", "--requests", "200")
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(
    f"{0.2 * i:.1f},{40 + 10 * (i % 7)},{20 + 5 * (i % 9)}\n" for i in range(120)
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    path.write_text(TRACE)
    return path


REPORTS: dict[tuple[object, ...], str] = {}


def plan(cli: Cli, *arguments: object) -> dict[str, Any]:
    """Made once for the same arguments."""
    if arguments not in REPORTS:
        code, REPORTS[arguments], err = cli("plan", *arguments, "--json")
        assert code == 0, err
    return json.loads(REPORTS[arguments])


def test_plan_of_a_mix(cli: Cli) -> None:
    report = plan(cli, *MIX)
    assert report["thresholds"]["algorithm"] == "wait"
    assert report["thresholds"]["output_lens"] == [101, 201, 301]
    assert report["token_budget"] == 768
    assert 0 < report["kv_mean_tokens"] < report["kv_batch_tokens"]
    assert report["kv_batch_tokens"] == report["kv_bound_tokens"] < 111_580
    assert report["delta"] == 0.0
    assert report["kv_bound_basis"] == "stages"
    flags = report["serve_flags"]
    assert "--max-num-batched-tokens 768" in flags["vllm"]
    assert "--max-num-seqs" in flags["vllm"]
    assert flags["penstock"].startswith("--kv-tokens ")


def test_plan_of_a_trace(cli: Cli, trace: Path) -> None:
    arguments = ("--workload", trace, *PROFILE, "--delta", "0.01")
    report = plan(cli, *arguments)
    assert report["thresholds"]["segment_ends"][-1] == 60
    assert report["delta"] == 0.01
    assert report["rate_requests_per_s"] == pytest.approx(5.0)
    mean, batch, bound = (report[f"kv_{what}_tokens"] for what in ("mean", "batch", "bound"))
    assert 0 < mean <= batch <= bound
    code, out, _ = cli("plan", *arguments)
    assert code == 0
    lines = out.splitlines()
    assert lines[1] == f"  penstock serve MODEL {report['serve_flags']['penstock']}"
    low, high = report["expected"]["latency_mean_interval_95"]
    assert low < report["expected"]["latency_s"]["mean"] < high
    assert f"{low:.4g} to {high:.4g} s" in out
    most = report["bound_requests_per_s"]
    assert f"{5 / most:.0%} of the {most:.4g} requests/s" in out
    told = out.replace(json.dumps(report["serve_flags"]["penstock_config"]), "")
    for word in ("threshold", "stage", "segment", "M*", "fluid model", "delta", "δ"):
        assert word not in told, "the paper's"


def test_the_advised_memory_serves_the_load(cli: Cli) -> None:
    """With the server's blocks, and other requests than the plan's; much less does not."""
    report = plan(cli, *MIX)
    advised = int(report["serve_flags"]["penstock"].rpartition("--kv-tokens ")[2])
    assert report["expected"]["kv_peak_tokens"] < advised < 0.2 * report["kv_tokens"]
    runs = []
    for kv_tokens in (report["kv_tokens"], advised, advised // 4):
        flags = ("--kv-tokens", kv_tokens, "--block-size", "16", "--seed", "2", "--json")
        runs.append(json.loads(cli("simulate", *MIX, "--admission", "fluid_guided", *flags)[1]))
    full, enough, little = (run["latency_s"]["mean"] for run in runs)
    assert runs[1]["preemptions"] == 0
    assert enough < 1.05 * full < 1.5 * full < little


def test_every_configuration_is_expected_by_its_own_run(cli: Cli) -> None:
    report = plan(cli, *MIX)
    runs = report["expected_by_configuration"]
    assert runs.keys() == report["serve_flags"].keys()
    assert report["expected"] == runs["penstock"]
    policies = {name: figures["admission"] for name, figures in runs.items()}
    assert policies == {"penstock": "fluid_guided", "penstock_config": "wait", "vllm": "vllm_v1"}
    for figures in runs.values():
        options = [x for n, v in figures["options"].items() for x in ("--set", f"{n}={_text(v)}")]
        alone = ("simulate", *MIX, "--admission", figures["admission"], *options)
        alone += ("--kv-tokens", figures["kv_tokens"], "--json")
        code, out, err = cli(*alone)
        assert code == 0, err
        same = json.loads(out)
        assert same["requests_completed"] == figures["requests_completed"] == 200
        assert same["latency_s"] == figures["latency_s"]
        assert same["kv_peak_tokens"] == figures["kv_peak_tokens"]
    assert len({figures["latency_s"]["mean"] for figures in runs.values()}) == 3


def _text(value: Any) -> str:
    """As `--set` takes it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def test_targets_reach_the_policy_that_knows_them(cli: Cli) -> None:
    arguments = (*MIX, "--ttft-p99", "2", "--policy", "wait")
    runs = plan(cli, *arguments)["expected_by_configuration"]
    assert runs["policy wait"]["options"]["gated"]
    assert runs["penstock"]["options"] == {"ttft_p99": 2.0}
    assert "ttft_p99" not in runs["vllm"]["options"]
    assert all("slo_goodput" in figures for figures in runs.values())


@pytest.mark.slow
def test_the_picture_has_this_load_and_more_than_any_policy_serves(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[tuple[Any, ...]] = []
    draw = plots.plot_load
    monkeypatch.setattr(plots, "plot_load", lambda *what: (drawn.append(what), draw(*what)))
    path = tmp_path / "load.svg"
    few = (*MIX[:-1], "100", "--workers", "1")
    code, out, err = cli("plan", *few, "--json", "--plot", path)
    assert code == 0, err
    report = json.loads(out)
    ((points, marks, *_),) = drawn
    assert marks == {"this load": 15.0, "most of any policy": report["bound_requests_per_s"]}
    rates = [point.rate for point in points]
    assert 15.0 in rates
    assert rates == sorted(rates)
    assert rates[0] < 0.3 * marks["most of any policy"] < marks["most of any policy"] < rates[-1]
    assert points[0].latency < points[-1].latency
    text = path.read_text()
    for label in ("high, fluid_guided, a100-llama2-7b", *marks):
        assert label in text
    assert cli("plan", *few, "--plot", tmp_path / "load.nothing")[0] == 2


def configurations(cli: Cli, trace: Path) -> Iterator[tuple[str, list[str], dict[str, Any] | None]]:
    """(policy, flags, settings file) of what two plans print, and of the literal algorithms with
    the same thresholds."""
    small = ("--kv-tokens", "8192")
    for workload in (("--workload", "low", "--rate", "60"), ("--workload", trace)):
        report = plan(cli, *workload, *PROFILE, *small)
        flags = report["serve_flags"]
        yield "fluid_guided", flags["penstock"].split(), None
        settings = flags["penstock_config"]
        yield settings["engine"]["admission"]["name"], [], settings
        literal = dict(report["thresholds"])
        del literal["stage_steps"]
        name = literal.pop("algorithm")
        yield name, [], {"engine": {"admission": {"name": name, "options": literal}}}


@pytest.fixture
def admission_of(
    cli: Cli, family: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AdmissionPolicy]:
    """The policy of the scheduler that `penstock serve` would have built."""
    served: list[ServeConfig] = []

    async def note(config: ServeConfig, *_: object, **__: object) -> None:
        served.append(config)

    monkeypatch.setattr("penstock.api.server.serve", note)

    def build(flags: list[str], settings: dict[str, Any] | None) -> AdmissionPolicy:
        if settings is not None:
            path = tmp_path / "settings.yaml"
            path.write_text(json.dumps(settings))
            flags = [*flags, "--config", str(path)]
        code, _, err = cli("serve", family["target"], "--state", "none", *flags)
        assert code == 0, err
        engine = served[-1].engine
        load_engine(engine, calibrated=False)
        return engine.admission.make("admission")

    return build


@pytest.mark.slow
def test_the_server_takes_what_is_printed(cli, trace, admission_of) -> None:
    taken = set()
    for name, flags, settings in configurations(cli, trace):
        policy = admission_of(flags, settings)
        assert policy.name == name
        if settings is not None:
            for option, value in settings["engine"]["admission"]["options"].items():
                got = getattr(policy.options, option)  # type: ignore[attr-defined]
                assert got == (tuple(value) if isinstance(value, list) else value)
        taken.add(name)
    assert taken == {"fluid_guided", "wait", "nested_wait"}
