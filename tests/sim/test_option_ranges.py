"""Every option of every policy, with values that it may never have been meant for: the factory
refuses each in one line, or the policy serves a few requests to their end."""

import math
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from penstock.config import PolicyConfig
from penstock.core.policies.options import Range
from penstock.core.policies.registry import PolicyError, make_policy, option_types, policies
from penstock.core.types import Output, StepPlan, StepResult
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.run import Setup, run
from penstock.sim.workloads import make_workload

pytestmark = pytest.mark.slow

KINDS = ("admission", "selection", "allocation")
NUMBERS = (
    *(math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 0.5, 1.0, 7.0, 1e300),
    *(-1, 0, 1, 7, 10**9, 10**15, 10**400),
)
ODD = (*NUMBERS, True, None, "x", [], [1, 2], {}, "all")
MOST_STEPS = 20_000

DRAFTERS = tuple(DrafterProfile(n, (1,), (s,), 1e-5) for n, s in (("a", 1e-3), ("b", 2e-3)))
PROFILE = StepProfile("toy", 4096, (1, 64, 256), (1e-2, 1e-2, 2e-2), drafters=DRAFTERS)
LOAD = make_workload("low", num_requests=3, rate=20, seed=0)


def cases() -> Iterator[tuple[str, str, str]]:
    for kind in KINDS:
        for name in policies(kind):
            yield from ((kind, name, option) for option in option_types(kind, name))


def leaves(wanted: Any) -> Iterator[Any]:
    """The declared type, without unions and containers around it."""
    if typing.get_origin(wanted) in (None, Annotated, typing.Literal):
        yield wanted
    else:
        for part in typing.get_args(wanted):
            if part is not ...:
                yield from leaves(part)


def values_for(wanted: Any) -> list[Any]:
    """Odd values, and where lists are wanted, lists of them beside what the other options have."""
    if typing.get_origin(wanted) is not tuple:
        return list(ODD)
    return [*ODD, *([a, b, c] for a in NUMBERS for b, c in ((a, a), (256, 1024), (1, 1)))]


class Hurry:
    """An instrument that does not let a run go on for ever."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_plan(self, plan: StepPlan) -> None:
        self.num_steps += 1
        assert self.num_steps < MOST_STEPS, "the run does not end"

    def on_result(self, plan: StepPlan, result: StepResult) -> None: ...

    def on_output(self, output: Output) -> None: ...


def refusal(kind: str, name: str, options: dict[str, Any]) -> str | None:
    try:
        make_policy(kind, name, options)
    except PolicyError as error:
        return str(error)
    return None


def serve_a_few(pipeline: str = "off", **policies: PolicyConfig) -> None:
    """Everybody is served to the end, or the policy says why it stopped."""
    acceptance = GeometricAcceptance({"a": 0.7, "b": 0.8})
    setup = Setup(
        PROFILE, acceptance=acceptance, drafters=("a", "b"), pipeline=pipeline, **policies
    )
    report = run(setup, LOAD, instruments=(Hurry(),))
    assert report.completed.all() or report.result.stalled


@pytest.mark.parametrize(("kind", "name", "option"), list(cases()))
def test_every_option_is_refused_or_works(kind: str, name: str, option: str) -> None:
    for value in values_for(option_types(kind, name)[option]):
        said = refusal(kind, name, {option: value})
        if said is None:
            serve_a_few(**{kind: PolicyConfig.from_name(name, **{option: value})})
        else:
            assert said.startswith(f"{kind} policy {name!r}: ")
            assert "\n" not in said


@pytest.mark.parametrize(("kind", "name", "option"), list(cases()))
def test_every_number_has_a_range(kind: str, name: str, option: str) -> None:
    for leaf in leaves(option_types(kind, name)[option]):
        assert leaf not in (int, float), "declare its range: see core/policies/options.py"
        if typing.get_origin(leaf) is Annotated:
            allowed = typing.get_args(leaf)[1]
            assert isinstance(allowed, Range)
            assert not any(odd in allowed for odd in (math.nan, math.inf, -math.inf))


@pytest.mark.parametrize("pipeline", ["0", "1", "65", str(10**30), "-1", "nan", "inf", "", "²"])
def test_pipelines_that_are_none_are_refused(pipeline: str) -> None:
    with pytest.raises(ValueError, match=r"choose from async, auto, .* from 2 to 64") as caught:
        serve_a_few(pipeline)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pipeline", ["off", "2", "64", "auto", "async"])
def test_every_pipeline_serves(pipeline: str) -> None:
    serve_a_few(pipeline)
