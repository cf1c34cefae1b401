"""From the command line to a simulated server and its load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.terminal import one_line

if TYPE_CHECKING:
    from penstock.config import PolicyConfig
    from penstock.fluid.step_profile import StepProfile
    from penstock.sim.acceptance import AcceptanceByDrafter
    from penstock.sim.parallel import Workers
    from penstock.sim.run import Setup
    from penstock.sim.workloads import Workload


def bad_input() -> AbstractContextManager[None]:
    """Whatever the commands of the simulator refuse, as one line and exit code 2."""
    from penstock.core.policies.registry import PolicyError
    from penstock.sim.planner import PlanError
    from penstock.sim.plots import PlotError
    from penstock.sim.profiles import ProfileError
    from penstock.sim.workloads import WorkloadError

    return one_line(PolicyError, PlanError, PlotError, ProfileError, WorkloadError, OSError)


@contextmanager
def workers_of(num: int | None, ray: str | None) -> Iterator[Workers]:
    """What `--workers` and `--ray` say; where that cannot be had, one line and exit code 2."""
    from penstock.sim.parallel import WorkersError, workers

    with one_line(WorkersError), workers(num, ray) as found:
        yield found


def chosen_policies(names: Mapping[str, str], settings: Sequence[str]) -> dict[str, PolicyConfig]:
    """The policies by kind, `--set` texts as their options, with the types that they declare.
    names: of the policies, by kind.

    Raises: PolicyError.
    """
    from penstock.config import PolicyConfig
    from penstock.core.policies.registry import PolicyError, make_policy, option_types

    options: dict[str, dict[str, Any]] = {kind: {} for kind in names}
    for text in settings:
        key, given, value = text.partition("=")
        kind, dot, option = key.partition(".")
        if not dot:
            kind, option = "admission", key
        if not given or kind not in names:
            prefixes = " or ".join(f"{kind}." for kind in sorted(names))
            raise PolicyError(
                f"--set takes OPTION=VALUE, with a prefix {prefixes} or none, not {text!r}"
            )
        if option in options[kind]:
            raise PolicyError(f"--set: {option!r} is given twice")
        wanted = option_types(kind, names[kind]).get(option)
        try:
            options[kind][option] = parse_value(value.strip(), wanted)
        except ValueError:
            # The policy says what it should have been.
            options[kind][option] = value
    for kind, name in names.items():
        make_policy(kind, name, options[kind])
    return {kind: PolicyConfig.of(name, **options[kind]) for kind, name in names.items()}


def parse_value(text: str, wanted: Any) -> Any:
    """Text as a value of a declared type, whose range is not looked at. Raises: ValueError."""
    from types import NoneType
    from typing import get_args, get_origin

    from pydantic import TypeAdapter

    given: Any = text
    if NoneType in get_args(wanted) and text.lower() in ("none", "null"):
        given = None
    elif get_origin(wanted) is tuple:
        listed = text.removeprefix("[").removesuffix("]")
        given = [part.strip() for part in listed.split(",") if part]
    return TypeAdapter(wanted).validate_python(given)


@dataclass(frozen=True, slots=True)
class SimulatedDrafters:
    """What the command line says of drafters: which, their acceptance, times, and capacities."""

    drafters: Sequence[str] | None = None
    acceptance: str | None = None
    seconds: Sequence[str] | None = None
    capacities: Sequence[str] | None = None

    def models(self, seed: int) -> AcceptanceByDrafter:
        """Acceptance by drafter. Raises: WorkloadError."""
        from penstock.sim.acceptance import parse_drafters
        from penstock.sim.domains import load_acceptance

        fit = None if self.acceptance is None else load_acceptance(self.acceptance)
        return parse_drafters(self.drafters or (), seed, fit)

    def with_times(self, profile: StepProfile) -> StepProfile:
        """The profile, with the times that were given in the place of its own.

        Raises: WorkloadError.
        """
        from penstock.sim.drafters import parse_drafter_seconds

        given = parse_drafter_seconds(self.seconds or ())
        names = {d.name for d in given}
        kept = (d for d in profile.drafters if d.name not in names)
        return replace(profile, drafters=(*kept, *given))


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which requests, and how they come."""

    spec: str
    num_requests: int | None
    arrivals: str | None
    time_scale: float
    seed: int
    default_requests: int
    """Of a mix; a trace comes whole."""

    def make(self, rate: float | None) -> Workload:
        """Raises: WorkloadError."""
        from penstock.sim.workloads import MIXES, make_workload

        num_requests = self.num_requests
        if num_requests is None and self.spec in MIXES:
            num_requests = self.default_requests
        return make_workload(
            self.spec,
            num_requests=num_requests,
            rate=rate,
            arrivals=self.arrivals,
            time_scale=self.time_scale,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """p99 of TTFT and TPOT that are asked for, in seconds."""

    ttft_p99: float | None = None
    tpot_p99: float | None = None

    @property
    def given(self) -> dict[str, float]:
        both = {"ttft_p99": self.ttft_p99, "tpot_p99": self.tpot_p99}
        return {name: value for name, value in both.items() if value is not None}

    def check(self) -> None:
        """Raises: PlanError."""
        from penstock.sim.planner import PlanError

        for name, value in self.given.items():
            if not 0 < value < math.inf:
                raise PlanError(f"--{name.replace('_', '-')} is a number of seconds over 0")


@dataclass(frozen=True)
class SimulatedServer:
    """A setup that may still want thresholds for its load."""

    base: Setup
    targets: LatencyTargets = field(default_factory=LatencyTargets)

    @property
    def kv_tokens(self) -> int:
        return self.base.num_blocks * self.base.block_size

    def setup(self, workload: Workload) -> Setup:
        """Complete for a workload with arrivals. Raises: PlanError, PolicyError."""
        from penstock.sim.planner import (
            THRESHOLD_POLICIES,
            check_thresholds_fit,
            mean_rate,
            threshold_options,
        )
        from penstock.sim.run import make_scheduler

        base = self.base
        admission = base.admission
        set_by_hand = {"thresholds", "output_lens", "segment_ends"} & admission.options.keys()
        if admission.name in THRESHOLD_POLICIES and not set_by_hand:
            planned = threshold_options(
                admission, base.profile, workload, mean_rate(workload), self.kv_tokens
            )
            base = replace(base, admission=base.admission.with_defaults(planned))
        make_scheduler(base)
        check_thresholds_fit(base.admission, workload, self.kv_tokens)
        return base


def make_server(
    profile: str,
    names: dict[str, str],
    settings: Sequence[str],
    drafters: SimulatedDrafters,
    *,
    kv_tokens: int | None,
    block_size: int,
    targets: LatencyTargets,
    seed: int,
    draft_servers: Path | None = None,
    pipeline: str = "off",
    fairness: bool = False,
    tenant_weights: Sequence[str] = (),
) -> SimulatedServer:
    """From the command line; names: of the policies, by kind.

    Raises: ProfileError, PolicyError, WorkloadError, PlanError.
    """
    from penstock.core.policies.registry import make_pipeline, option_types
    from penstock.sim.acceptance import AcceptanceByDrafter
    from penstock.sim.drafters import parse_capacities
    from penstock.sim.planner import PlanError
    from penstock.sim.profiles import load_profile
    from penstock.sim.run import Setup
    from penstock.sim.servers import read_servers

    targets.check()
    loaded = drafters.with_times(load_profile(profile))
    memory = kv_tokens or loaded.kv_tokens
    if memory < block_size:
        raise PlanError(f"{memory} KV tokens hold no block of {block_size}")
    make_pipeline(pipeline)
    policies = chosen_policies(names, settings)
    admission = policies["admission"]
    known = option_types("admission", admission.name)
    wanted = {name: value for name, value in targets.given.items() if name in known}
    acceptance = drafters.models(seed)
    servers, remote = read_servers(draft_servers, seed) if draft_servers else ((), None)
    setup = Setup(
        loaded,
        admission=admission.with_defaults(wanted),
        allocation=policies["allocation"],
        selection=policies["selection"],
        kv_tokens=memory,
        block_size=block_size,
        acceptance=AcceptanceByDrafter({**acceptance.models, **(remote.models if remote else {})}),
        drafters=tuple(acceptance.models),
        capacities=parse_capacities(drafters.capacities or (), tuple(acceptance.models)),
        draft_servers=servers,
        pipeline=pipeline,
        fairness=fairness,
        tenant_weights=_weights(tenant_weights),
        seed=seed,
    )
    return SimulatedServer(setup, targets)


def _weights(texts: Sequence[str]) -> dict[str, float]:
    """`NAME=WEIGHT` texts. Raises: WorkloadError."""
    from penstock.config import each_once
    from penstock.sim.workloads import WorkloadError

    return each_once(map(_weight, texts), "--tenant-weight", WorkloadError)


def _weight(text: str) -> tuple[str, float]:
    """Raises: WorkloadError."""
    from penstock.sim.workloads import WorkloadError

    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not name or not 0 < weight < math.inf:
        raise WorkloadError(f"--tenant-weight takes NAME=WEIGHT with a weight over 0, not {text!r}")
    return name, weight


def describe(setup: Setup, workload: Workload) -> dict[str, Any]:
    """What was run, for JSON."""
    return {
        "workload": workload.name,
        "requests": len(workload),
        "profile": setup.profile.name,
        "kv_tokens": setup.num_blocks * setup.block_size,
        "admission": setup.admission.name,
        "options": setup.admission.options,
        "fairness": setup.fairness,
    }
