import ast
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config import PolicyConfig
from penstock.core.policies.admission.vllm_v1 import VllmV1
from penstock.core.policies.declared import LimitOptions
from penstock.core.policies.registry import (
    PolicyError,
    known_gauges,
    make_policy,
    option_types,
    policies,
    policy_names,
)
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import make_workload


@pytest.mark.parametrize(
    ("kind", "names"),
    [("admission", {"vllm_v1"}), ("allocation", {"fixed", "priced"}), ("selection", {"single"})],
)
def test_policies_are_found_by_their_folder(kind: str, names: set[str]) -> None:
    found = policies(kind)
    assert names <= found.keys()
    assert list(found) == sorted(found)
    assert all(policy.name == name for name, policy in found.items())


@pytest.mark.parametrize("kind", ["admission", "allocation", "selection"])
def test_every_policy_can_be_made_from_its_defaults(kind: str) -> None:
    for name in policies(kind):
        assert make_policy(kind, name).name == name


def test_options_reach_the_policy() -> None:
    policy = make_policy("admission", "vllm_v1", {"max_num_seqs": 3, "watermark": 0})
    assert isinstance(policy, VllmV1)
    assert policy.max_num_seqs == 3
    assert make_policy("allocation", "fixed", {"total": None}).options.total is None
    assert make_policy("selection", "single", {"drafter": "d"}).options.drafter == "d"


@pytest.mark.parametrize(
    ("kind", "name", "options", "said"),
    [
        ("allocation", "fixd", {}, "choose from fixed, goodspeed, priced, "),
        ("allocation", "fixed", {"length": 4}, "has no option 'length'; options: k, total"),
        ("allocation", "fixed", {"k": "4"}, "k must be a whole number from 0 to 1024, not '4'"),
        ("allocation", "fixed", {"k": True}, "k must be a whole number from 0 to 1024, not True"),
        ("allocation", "fixed", {"k": 2.5}, "k must be a whole number from 0 to 1024, not 2.5"),
        ("allocation", "fixed", {"total": "all"}, "from 0 to 1000000000, or null, not 'all'"),
        ("allocation", "priced", {"in_time": "1"}, "a finite number of at least 0, not '1'"),
        ("selection", "single", {"drafter": 3}, "drafter must be a text, or null, not 3"),
    ],
)
def test_errors_are_one_clear_line(kind, name, options, said) -> None:
    with pytest.raises(PolicyError) as caught:
        make_policy(kind, name, options)
    assert said in str(caught.value)
    assert str(caught.value).startswith(
        (f"{kind} policy '{name}'", f"unknown {kind} policy '{name}'")
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["admission", "allocation", "selection", "pipeline"])
def test_policies_declare_options_that_they_have(kind: str) -> None:
    for name, policy in policies(kind).items():
        declared = {option for option in policy.limits if option is not None}
        thresholds = getattr(policy, "thresholds", None)
        if thresholds is not None:
            declared |= {thresholds.lengths, thresholds.thresholds, thresholds.gate}
        assert declared <= option_types(kind, name).keys()
        assert len({gauge.name for gauge in policy.metrics}) == len(policy.metrics)


def test_a_policy_is_told_the_limits_that_it_has() -> None:
    limits = LimitOptions(token_budget="most", ttft_p99="first_by")
    assert limits.given(token_budget=8, max_num_seqs=4, ttft_p99=2.0) == {
        "most": 8,
        "first_by": 2.0,
    }
    assert LimitOptions().given(token_budget=8) == {}


NAMING_NONE = (*("api/collectors.py", "sim/planner.py", "cli/plan.py"), "core/scheduler.py")


@pytest.mark.parametrize("file", NAMING_NONE)
def test_no_policy_is_named_outside_its_file(file: str) -> None:
    kinds = ("admission", "allocation", "selection", "pipeline")
    names = {n for kind in kinds for n in policy_names(kind)} | {g.name for g in known_gauges()}
    tree = ast.parse((Path(penstock.__file__).parent / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in names, node.lineno
        elif isinstance(node, ast.ImportFrom):
            folder = (node.module or "").removeprefix("penstock.core.policies.").partition(".")[0]
            assert folder not in kinds, node.lineno


FILE = """
from __future__ import annotations
from dataclasses import dataclass
from penstock.core.policies.base import {base}

class Own({base}):
    name = "own"

    @dataclass(frozen=True, slots=True)
    class Options:
        budget: int = 100

    def __init__(self, options):
        self.budget = options.budget
{methods}

POLICY = Own
"""
METHODS = {
    "admission": """
    def compose(self, step):
        step.schedule_decodes(self.budget)
        step.schedule_prefills(self.budget - step.num_tokens)
        step.admit_in_order(self.budget - step.num_tokens, 8)

    def draft_budget(self, num_tokens):
        return self.budget - num_tokens""",
    "selection": """
    def select(self, states, view):
        return {s.request.id: max(view.drafters) for s in states}""",
    "allocation": """
    def reserve(self, state):
        return 1

    def allocate(self, candidates, view):
        from penstock.core.state import Grant
        return [Grant(int(i < view.room.budget and c.limit > 0)) for i, c in enumerate(candidates)]
""",
    "pipeline": """
    def hold_until(self, ready, pending, view):
        return None""",
}


def own(kind: str) -> str:
    base = "Pipeline" if kind == "pipeline" else f"{kind.capitalize()}Policy"
    return FILE.format(kind=kind, base=base, methods=METHODS[kind])


@pytest.mark.parametrize("kind", METHODS)
def test_a_policy_is_one_file_anywhere(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(own(kind))
    named = str(path) if kind == "pipeline" else PolicyConfig.from_name(str(path))
    chosen: dict[str, Any] = {kind: named}
    setup = Setup(
        load_profile("zoo-large"),
        drafters=("a", "b"),
        acceptance=GeometricAcceptance({"a": 0.8, "b": 0.6}),
        **{"allocation": PolicyConfig.from_name("fixed"), "pipeline": "async", **chosen},
    )
    report = run(setup, make_workload("low", num_requests=30, rate=20.0))
    assert report.completed.all()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("admission", "compose"),
        ("selection", "select"),
        ("allocation", "allocate"),
        ("pipeline", "hold_until"),
    ],
)
def test_a_method_that_was_forgotten_is_named(kind: str, method: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(own(kind).replace(f"def {method}(", "def forgotten("))
    with pytest.raises(PolicyError, match=f"{kind} policy 'own' lacks {method}"):
        make_policy(kind, str(path))


def test_a_file_that_is_no_policy(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="there is no file"):
        make_policy("admission", "nowhere.py")
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_like_it\n")
    with pytest.raises(PolicyError, match="No module named"):
        make_policy("admission", str(broken))
    other = tmp_path / "other.py"
    other.write_text(own("selection"))
    with pytest.raises(PolicyError, match="is no AdmissionPolicy"):
        make_policy("admission", str(other))
