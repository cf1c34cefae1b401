"""Options of `simulate`, `capacity` and `plan`, and the load and server that they describe."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from penstock.cli import options as cli
from penstock.cli.terminal import one_line
from penstock.core.policies.bundles import AUTO

if TYPE_CHECKING:
    from penstock.config import PolicyConfig, PolicyKind
    from penstock.fluid.step_profile import StepProfile
    from penstock.sim.parallel import Workers
    from penstock.sim.run import Setup
    from penstock.sim.workloads import Workload


def bad_input() -> AbstractContextManager[None]:
    """Exit with code 2 and one line on errors in the input of simulations."""
    from penstock.core.policies.registry import PolicyError
    from penstock.sim.planner import PlanError
    from penstock.sim.plots import PlotError
    from penstock.sim.profiles import ProfileError
    from penstock.sim.workloads import WorkloadError

    return one_line(PolicyError, PlanError, PlotError, ProfileError, WorkloadError, OSError)


@contextmanager
def workers_of(num: int | None, ray: str | None) -> Iterator[Workers]:
    """Yield the workers of `--workers` and `--ray`; exit with code 2 if they are unavailable."""
    from penstock.sim.parallel import WorkersError, workers

    with one_line(WorkersError), workers(num, ray) as found:
        yield found


# --- options --------------------------------------------------------------------------------------


def _read_scenario(ctx: typer.Context, file: Path | None) -> Path | None:
    """Make a file's values the defaults of the options. Exit with code 2 on an unknown key."""
    if file is None:
        return None
    from penstock.config import ConfigError, read_yaml

    options = {p.name: p for p in ctx.command.params if p.name is not None}
    known = {*options, *(f.name for f in fields(Scenario))} - {"scenario", "help"}
    with one_line(ConfigError):
        values = read_yaml(file)
        for key in values:
            if key not in known:
                raise ConfigError(f"{file}: unknown key {key!r}; keys: {', '.join(sorted(known))}")
    for key, value in values.items():
        if isinstance(value, dict):
            values[key] = [*_texts(value)]
        elif key == "fairness":
            values[key] = str(value).lower()  # true, of a choice of words
        elif isinstance(value, str) and key in options and options[key].multiple:
            values[key] = [value]
    ctx.default_map = values
    return file


def _texts(values: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yield a mapping as NAME=VALUE texts; nested keys as PREFIX.NAME, lists as 1,2,3."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _texts(value, f"{prefix}{name}.")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            yield f"{prefix}{name}={text}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Workload, machine and targets: the options of every command that simulates."""

    scenario: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            is_eager=True,
            callback=_read_scenario,
            help="Values of options, as in `workload: high`; the command line takes precedence.",
        ),
    ] = None
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="low, high, nested or ten_bins, or a trace (CSV or CSV.gz)."
        ),
    ]
    profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Step times; see `penstock profile`.")
    ]
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Requests per second of generated arrivals; `capacity` searches below it or below "
            "the fluid bound.",
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="poisson|gamma:CV|FILE",
            help="Generated, perhaps with rate changes (poisson@600-1200x2), or recorded. "
            "Default: the trace's own, else Poisson.",
        ),
    ] = None
    time_scale: Annotated[
        float, typer.Option(metavar="X", help="Speed up recorded arrivals X times.")
    ] = 1.0
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Default: the whole trace; for a mix 10000, `capacity` 60000, `plan` 5000.",
        ),
    ] = None
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="KV cache size in tokens. Default: the profile's."),
    ] = None
    ttft_p99: Annotated[
        float | None, typer.Option(metavar="S", help="Target for the time to first token, seconds.")
    ] = None
    tpot_p99: Annotated[
        float | None,
        typer.Option(metavar="S", help="Target for the time per output token, seconds."),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of lengths, arrivals and acceptance.")
    ] = 0
    workers: cli.WorkersOption = None
    ray: cli.RayOption = None
    json: cli.JsonOption = False

    @property
    def targets(self) -> dict[str, float]:
        """Targets of p99 TTFT and TPOT in seconds. Raises: PlanError."""
        from penstock.sim.planner import PlanError

        both = {"ttft_p99": self.ttft_p99, "tpot_p99": self.tpot_p99}
        given = {name: value for name, value in both.items() if value is not None}
        for name, value in given.items():
            if not 0 < value < math.inf:
                raise PlanError(f"--{name.replace('_', '-')} is a number of seconds over 0")
        return given

    def make(self, rate: float | None, default_requests: int) -> Workload:
        """Make the requests. default_requests: number for a mix. Raises: WorkloadError."""
        from penstock.sim.workloads import MIXES, make_workload

        num_requests = self.requests
        if num_requests is None and self.workload in MIXES:
            num_requests = default_requests
        return make_workload(
            self.workload,
            num_requests=num_requests,
            rate=rate,
            arrivals=self.arrivals,
            time_scale=self.time_scale,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Scenario(Load):
    """A load and a server: policies and drafters."""

    policy: Annotated[str, cli.BUNDLE_OPTION] = AUTO
    admission: Annotated[str | None, cli.policy_option("admission", "Admission policy")] = None
    allocation: Annotated[str | None, cli.policy_option("allocation", "Draft-length policy")] = None
    selection: Annotated[str | None, cli.policy_option("selection", "Drafter selection policy")] = (
        None
    )
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUE",
            help="Option of the admission policy, or of another with a prefix: allocation.k=4. "
            "Lists are written 1,2,3. May be repeated.",
        ),
    ] = None
    block_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a KV block.")] = 1
    fairness: Annotated[
        Literal["false", "true", "strict"],
        typer.Option(help="By weight; strict: at any cost. [false]", show_default=False),
    ] = "false"
    tenant_weight: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=WEIGHT", help="Default: 1; may be repeated."),
    ] = None
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=RATE|NAME=FILE|NAME|suffix",
            help="A drafter by acceptance rate, curve G1,G2,... or record (JSON lines), or one of "
            "--acceptance; `suffix` and `suffix+NAME=RATE` add look-up. May be repeated.",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="zoo|zoo-greedy|texts|FILE",
            help="Measured acceptance: of the bundled drafters, of recorded texts with look-up, "
            "or a file of `penstock zoo fit`.",
        ),
    ] = None
    drafter_seconds: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SECONDS[:PER_CATCH_UP]",
            help="Seconds per draft token, and per read token. Default: the profile's.",
        ),
    ] = None
    drafter_capacity: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=B[xK]", help="A drafter's largest batch, and its instances."),
    ] = None

    def setup(self, draft_servers: Path | None = None, pipeline: str | None = None) -> Setup:
        """Return the server, without thresholds that depend on the load.

        Raises: ProfileError, PolicyError, WorkloadError, PlanError.
        """
        from penstock.core.policies.bundles import bundle
        from penstock.core.policies.registry import make_pipeline, policy_class
        from penstock.sim.acceptance import AcceptanceByDrafter
        from penstock.sim.drafters import parse_capacities
        from penstock.sim.lookup import parse_proposers
        from penstock.sim.planner import PlanError
        from penstock.sim.run import Setup
        from penstock.sim.servers import read_servers

        targets = self.targets
        profile = self._profile()
        memory = self.kv_tokens or profile.kv_tokens
        if memory < self.block_size:
            raise PlanError(f"{memory} KV tokens hold no block of {self.block_size}")
        policies, chosen = self._policies(), bundle(self.policy)
        if pipeline is None:
            # Only draft servers are known to have devices of their own.
            pipeline = chosen.pipeline if draft_servers else "off"
        make_pipeline(pipeline)
        limits = policy_class("admission", policies["admission"].name).limits
        look_up, local = parse_proposers(self.drafter or (), self.seed, self.acceptance)
        servers, remote = read_servers(draft_servers, self.seed) if draft_servers else ((), None)
        return Setup(
            profile,
            admission=policies["admission"].with_defaults(limits.given(**targets)),
            allocation=policies["allocation"],
            selection=policies["selection"],
            kv_tokens=memory,
            block_size=self.block_size,
            acceptance=AcceptanceByDrafter({**local, **(remote.models if remote else {})}),
            drafters=tuple(local),
            capacities=parse_capacities(self.drafter_capacity or (), tuple(local)),
            draft_servers=servers,
            pipeline=pipeline,
            look_up=look_up,
            fairness="strict" if self.fairness == "strict" else self.fairness == "true",
            tenant_weights=_weights(self.tenant_weight or ()),
            seed=self.seed,
        )

    def _policies(self) -> dict[str, PolicyConfig]:
        """Return the bundle's policies by kind with the given ones. Raises: PolicyError."""
        from penstock.config import PolicyConfig

        given: dict[PolicyKind, str | None] = {
            "admission": self.admission,
            "selection": self.selection,
            "allocation": self.allocation,
        }
        policies: dict[str, PolicyConfig] = {
            kind: PolicyConfig.from_bundle(kind, self.policy)
            if name is None
            else PolicyConfig.from_name(name)
            for kind, name in given.items()
        }
        return with_options(policies, self.set or ())

    def _profile(self) -> StepProfile:
        """Return the profile of served steps with the given drafter times.

        Raises: ProfileError, WorkloadError."""
        from penstock.sim.drafters import parse_drafter_seconds
        from penstock.sim.profiles import load_profile

        profile = load_profile(self.profile).served(drafts=bool(self.drafter or self.acceptance))
        given = parse_drafter_seconds(self.drafter_seconds or ())
        names = {d.name for d in given}
        kept = (d for d in profile.drafters if d.name not in names)
        return replace(profile, drafters=(*kept, *given))


def simulates(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the fields of a command's first parameter, a Load or Scenario, into options."""
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    kind = first.annotation
    hints = get_type_hints(kind, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        p.replace(annotation=hints[p.name]) for p in inspect.signature(kind).parameters.values()
    ]

    def run(**given: Any) -> None:
        command(kind(**{p.name: given.pop(p.name) for p in shared}), **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*shared, *(p.replace(kind=keyword) for p in own)]
    )
    return run


# --- policies, thresholds, tenants ----------------------------------------------------------------


def with_thresholds(base: Setup, workload: Workload) -> Setup:
    """Return a setup with thresholds for a workload. Raises: PlanError, PolicyError."""
    from penstock.core.policies.registry import policy_class
    from penstock.sim.planner import (
        check_thresholds_fit,
        mean_rate,
        threshold_options,
    )
    from penstock.sim.run import make_scheduler

    kv_tokens = base.num_blocks * base.block_size
    admission = base.admission
    names = policy_class("admission", admission.name).thresholds
    if names is not None and not {names.lengths, names.thresholds} & admission.options.keys():
        rate = mean_rate(workload)
        planned = threshold_options(admission, base.profile, workload, rate, kv_tokens)
        base = replace(base, admission=base.admission.with_defaults(planned))
    make_scheduler(base)
    check_thresholds_fit(base.admission, base.profile, workload, kv_tokens)
    return base


def with_options(
    policies: Mapping[str, PolicyConfig], settings: Sequence[str]
) -> dict[str, PolicyConfig]:
    """Return policies by kind with `--set` texts. Raises: PolicyError."""
    from penstock.core.policies.registry import PolicyError, make_policy, option_types

    options: dict[str, dict[str, Any]] = {kind: {} for kind in policies}
    for text in settings:
        key, given, value = text.partition("=")
        kind, dot, option = key.partition(".")
        if not dot:
            kind, option = "admission", key
        if not given or kind not in policies:
            prefixes = " or ".join(f"{kind}." for kind in sorted(policies))
            raise PolicyError(
                f"--set takes OPTION=VALUE, with a prefix {prefixes} or none, not {text!r}"
            )
        if option in options[kind]:
            raise PolicyError(f"--set: {option!r} is given twice")
        wanted = option_types(kind, policies[kind].name).get(option)
        try:
            options[kind][option] = parse_value(value.strip(), wanted)
        except ValueError:
            # The policy itself raises the error.
            options[kind][option] = value
    made = {
        kind: policy.from_name(policy.name, **{**policy.options, **options[kind]})
        for kind, policy in policies.items()
    }
    for kind, policy in made.items():
        make_policy(kind, policy.name, policy.options)
    return made


def parse_value(text: str, wanted: Any) -> Any:
    """Parse a value of a declared type, without checking its range. Raises: ValueError."""
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


def _weights(texts: Sequence[str]) -> dict[str, float]:
    from penstock.config import each_once
    from penstock.sim.workloads import WorkloadError

    return each_once(map(_weight, texts), "--tenant-weight", WorkloadError)


def _weight(text: str) -> tuple[str, float]:
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
    """Return workload and setup for JSON."""
    return {
        "workload": workload.name,
        "requests": len(workload),
        "profile": setup.profile.name,
        "kv_tokens": setup.num_blocks * setup.block_size,
        "state_slots": setup.profile.state_slots,
        "admission": setup.admission.name,
        "options": setup.admission.options,
        "fairness": setup.fairness,
    }
