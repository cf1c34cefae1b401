"""`penstock simulate`: one run on the virtual clock. `capacity` and `plan` share its options."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.drafter_options import (
    AcceptanceOption,
    DrafterCapacityOption,
    DrafterOption,
    DrafterSecondsOption,
    DrafterTexts,
)
from penstock.cli.failures import one_line

if TYPE_CHECKING:
    from penstock.core.types import Output, StepPlan, StepResult
    from penstock.sim.run import Setup
    from penstock.sim.workloads import Workload

DEFAULT_REQUESTS = 10_000
_KINDS = ("admission", "allocation", "selection")
_SAMPLES = 1000

WorkloadOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE", help="low, high, nested or ten_bins, or a trace (CSV or CSV.gz)."
    ),
]
ProfileOption = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="Step-time profile; see `penstock profile`.")
]
AdmissionOption = Annotated[str, typer.Option(help="Admission policy.")]
AllocationOption = Annotated[str, typer.Option(help="Draft-length policy.")]
SelectionOption = Annotated[str, typer.Option(help="Drafter selection policy.")]
RateOption = Annotated[
    float | None, typer.Option(help="Requests a second, for arrivals that are generated.")
]
ArrivalsOption = Annotated[
    str | None,
    typer.Option(
        metavar="poisson|gamma:CV|FILE",
        help="Generated, perhaps with rate changes (poisson@600-1200x2), or recorded. "
        "Default: the trace's own, else Poisson.",
    ),
]
TimeScaleOption = Annotated[
    float, typer.Option(help="Recorded arrivals come so many times faster.")
]
KvTokensOption = Annotated[
    int | None, typer.Option(min=1, help="KV memory in tokens. Default: the profile's.")
]
BlockSizeOption = Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="An option of the admission policy, or with a prefix of another: allocation.k=4. "
        "Lists are written 1,2,3. May be repeated.",
    ),
]
DraftServersOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.yaml",
        help="Speculate across a network: draft servers, their links and their acceptance.",
    ),
]
PipelineOption = Annotated[
    str,
    typer.Option(
        metavar="off|N|auto|async",
        help="Wait for all drafts, verify in N micro-batches, choose, or verify what is ready.",
    ),
]
TtftOption = Annotated[
    float | None, typer.Option(help="Target for p99 of the time to first token, in seconds.")
]
TpotOption = Annotated[
    float | None, typer.Option(help="Target for p99 of the time per output token, in seconds.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of lengths, arrivals and acceptance.")]
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it there.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def simulate(
    workload: WorkloadOption,
    profile: ProfileOption,
    admission: AdmissionOption,
    allocation: AllocationOption = "throughput",
    selection: SelectionOption = "single",
    rate: RateOption = None,
    arrivals: ArrivalsOption = None,
    time_scale: TimeScaleOption = 1.0,
    kv_tokens: KvTokensOption = None,
    block_size: BlockSizeOption = 1,
    settings: SetOption = None,
    drafter: DrafterOption = None,
    acceptance: AcceptanceOption = None,
    drafter_seconds: DrafterSecondsOption = None,
    drafter_capacity: DrafterCapacityOption = None,
    draft_servers: DraftServersOption = None,
    pipeline: PipelineOption = "off",
    ttft_p99: TtftOption = None,
    tpot_p99: TpotOption = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help=f"Default: the whole trace, or {DEFAULT_REQUESTS}."),
    ] = None,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """One run of a workload through the scheduler, on the virtual clock."""
    from penstock.sim.drafters import DrafterCounts
    from penstock.sim.plots import Sampler, check_target, plot_run
    from penstock.sim.run import run
    from penstock.sim.servers import deal_to_tenants

    load = Load(workload, requests, arrivals, time_scale, seed)
    with bad_input():
        server = make_server(
            profile,
            {"admission": admission, "allocation": allocation, "selection": selection},
            settings or (),
            DrafterTexts(drafter, acceptance, drafter_seconds, drafter_capacity),
            kv_tokens=kv_tokens,
            block_size=block_size,
            targets=Targets(ttft_p99, tpot_p99),
            seed=seed,
            draft_servers=draft_servers,
            pipeline=pipeline,
        )
        made = deal_to_tenants(load.make(rate), server.base.draft_servers)
        setup = server.setup(made)
        if plot is not None:
            check_target(plot)
    samples: list[Sampler] = []
    drafting = DrafterCounts()

    def watch(scheduler: Any) -> Sampler:
        assert made.arrival_time is not None
        every = float(made.arrival_time[-1]) / _SAMPLES
        samples.append(Sampler(scheduler, every, _classes(setup, made)))
        return samples[0]

    with progress(len(made), "simulating") as advance:
        instruments = (Finished(advance), drafting)
        report = run(setup, made, instruments=instruments, watch=watch if plot else None)
    figures = report.figures(ttft_p99, tpot_p99)
    if setup.drafters or setup.draft_servers:
        records = report.result.records.values()
        figures["draft_tokens_proposed"] = sum(r.num_proposed for r in records)
        figures["draft_tokens_accepted"] = sum(r.num_accepted for r in records)
        figures |= drafting.figures(len(records))
    if plot is not None:
        with bad_input():
            plot_run(samples[0], plot, f"{made.name}, {admission}, {setup.profile.name}")
    if as_json:
        print(json.dumps({**describe(setup, made), **figures}, allow_nan=False))
        return
    print_figures(figures, f"{made.name}, {admission}, {setup.profile.name}")


# --- shared by the commands of the simulator ------------------------------------------------------


def bad_input() -> AbstractContextManager[None]:
    """Whatever the commands of the simulator refuse, as one line and exit code 2."""
    from penstock.core.registry import PolicyError
    from penstock.sim.planner import PlanError
    from penstock.sim.plots import PlotError
    from penstock.sim.profiles import ProfileError
    from penstock.sim.workloads import WorkloadError

    return one_line(PolicyError, PlanError, PlotError, ProfileError, WorkloadError, OSError)


@dataclass(frozen=True, slots=True)
class Load:
    """Which requests, and how they come."""

    spec: str
    num_requests: int | None
    arrivals: str | None
    time_scale: float
    seed: int
    default_requests: int = DEFAULT_REQUESTS

    def with_seed(self, seed: int) -> Load:
        return replace(self, seed=seed)

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
class Targets:
    """p99 of TTFT and TPOT that are asked for, in seconds."""

    ttft_p99: float | None = None
    tpot_p99: float | None = None

    @property
    def given(self) -> dict[str, float]:
        both = {"ttft_p99": self.ttft_p99, "tpot_p99": self.tpot_p99}
        return {name: value for name, value in both.items() if value is not None}


@dataclass(frozen=True)
class Server:
    """A setup that may still want thresholds for its load."""

    base: Setup
    targets: Targets = field(default_factory=Targets)

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
        given = base.admission_options
        set_by_hand = {"thresholds", "output_lens", "segment_ends"} & given.keys()
        if base.admission in THRESHOLD_POLICIES and not set_by_hand:
            planned = threshold_options(
                base.admission, base.profile, workload, mean_rate(workload), self.kv_tokens
            )
            base = replace(base, admission_options={**planned, **given})
        make_scheduler(base)
        check_thresholds_fit(base.admission, base.admission_options, workload, self.kv_tokens)
        return base


def make_server(
    profile: str,
    names: dict[str, str],
    settings: Sequence[str],
    drafters: DrafterTexts,
    *,
    kv_tokens: int | None,
    block_size: int,
    targets: Targets,
    seed: int,
    draft_servers: Path | None = None,
    pipeline: str = "off",
) -> Server:
    """From the command line; names: of the policies, by kind.

    Raises: ProfileError, PolicyError, WorkloadError, PlanError.
    """
    from penstock.core.pipeline import make_pipeline
    from penstock.core.registry import policies
    from penstock.sim.acceptance import AcceptanceByDrafter
    from penstock.sim.drafters import parse_capacities
    from penstock.sim.planner import PlanError
    from penstock.sim.profiles import load_profile
    from penstock.sim.run import Setup
    from penstock.sim.servers import read_servers

    for name, value in targets.given.items():
        if not 0 < value < math.inf:
            raise PlanError(f"--{name.replace('_', '-')} is a number of seconds over 0")
    loaded = drafters.with_times(load_profile(profile))
    memory = kv_tokens or loaded.kv_tokens
    if memory < block_size:
        raise PlanError(f"{memory} KV tokens hold no block of {block_size}")
    try:
        make_pipeline(pipeline)
    except ValueError as error:
        raise PlanError(str(error)) from error
    options = typed_settings(names, settings)
    known = policies("admission")[names["admission"]].Options.__dataclass_fields__
    wanted = {name: value for name, value in targets.given.items() if name in known}
    acceptance = drafters.models(seed)
    servers, remote = read_servers(draft_servers, seed) if draft_servers else ((), None)
    setup = Setup(
        loaded,
        admission=names["admission"],
        admission_options={**wanted, **options["admission"]},
        allocation=names["allocation"],
        allocation_options=options["allocation"],
        selection=names["selection"],
        selection_options=options["selection"],
        kv_tokens=memory,
        block_size=block_size,
        acceptance=AcceptanceByDrafter({**acceptance.models, **(remote.models if remote else {})}),
        drafters=tuple(acceptance.models),
        capacities=parse_capacities(drafters.capacities or (), tuple(acceptance.models)),
        draft_servers=servers,
        pipeline=pipeline,
        seed=seed,
    )
    return Server(setup, targets)


def typed_settings(names: dict[str, str], settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--set` texts as options of each kind of policy, with the types that the policies declare.

    Raises: PolicyError.
    """
    from typing import get_type_hints

    from penstock.core.registry import PolicyError, make_policy, policies

    for kind, name in names.items():
        if name not in policies(kind):
            make_policy(kind, name)
    options: dict[str, dict[str, Any]] = {kind: {} for kind in names}
    for text in settings:
        key, given, value = text.partition("=")
        kind, dot, option = key.partition(".")
        if not dot:
            kind, option = "admission", key
        if not given or kind not in names:
            raise PolicyError(
                f"--set takes OPTION=VALUE, with a prefix {' or '.join(f'{k}.' for k in _KINDS)} "
                f"or none, not {text!r}"
            )
        name = names[kind]
        hints = get_type_hints(policies(kind)[name].Options)
        if option not in hints:
            make_policy(kind, name, {option: value})
        try:
            options[kind][option] = parse_value(value.strip(), hints[option])
        except ValueError as error:
            wanted = policies(kind)[name].Options.__dataclass_fields__[option].type
            raise PolicyError(
                f"{kind} policy {name!r}: {option} must be {wanted}, not {value!r}"
            ) from error
    return options


def parse_value(text: str, wanted: Any) -> Any:
    """Text as a value of a type: bool, int, float, str, None, a tuple of such, a Literal, or the
    first of a union that fits. Raises: ValueError."""
    from types import NoneType, UnionType
    from typing import Literal, Union, get_args, get_origin

    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (UnionType, Union):
        # A number before a text, None before both.
        for kind in sorted(inner, key=lambda t: (t is str, t is not NoneType)):
            try:
                return parse_value(text, kind)
            except ValueError:
                continue
        raise ValueError(text)
    if origin is tuple:
        return tuple(parse_value(part.strip(), inner[0]) for part in text.split(",") if part)
    choices: dict[str, Any] = {}
    if origin is Literal:
        choices = {str(choice): choice for choice in inner}
    elif wanted is bool:
        choices = {"true": True, "false": False}
    elif wanted is NoneType:
        choices = {"none": None}
    if choices:
        if text.lower() not in choices and text not in choices:
            raise ValueError(text)
        return choices[text] if text in choices else choices[text.lower()]
    value = wanted(text)
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(text)
    return value


def _classes(setup: Setup, workload: Workload) -> list[int]:
    from penstock.sim.planner import length_classes

    return length_classes(setup.admission_options, workload)


def describe(setup: Setup, workload: Workload) -> dict[str, Any]:
    """What was run, for JSON."""
    return {
        "workload": workload.name,
        "requests": len(workload),
        "profile": setup.profile.name,
        "kv_tokens": setup.num_blocks * setup.block_size,
        "admission": setup.admission,
        "options": setup.admission_options,
    }


@dataclass(slots=True)
class Finished:
    """An instrument that tells of finished requests, a hundred at a time."""

    advance: Callable[[int], None]
    _num: int = 0

    def on_plan(self, plan: StepPlan) -> None:
        """Nothing finishes here."""

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Outputs say more."""

    def on_output(self, output: Output) -> None:
        self._num += output.finish_reason is not None
        if self._num == 100:
            self.advance(100)
            self._num = 0


@contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; yields what moves it on."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num: bar.advance(task, num)


def print_figures(figures: dict[str, Any], title: str) -> None:
    """A table of times, and the rest in lines."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("seconds")
    for column in ("mean", "p50", "p99"):
        table.add_column(column, justify="right")
    for key, name in (
        ("latency_s", "latency"),
        ("ttft_s", "time to first token"),
        ("tpot_s", "time per output token"),
    ):
        values = [figures[key][column] for column in ("mean", "p50", "p99")]
        table.add_row(name, *("" if v is None else f"{v:.4g}" for v in values))
    console = Console(highlight=False)
    console.print(table)
    for line in _lines(figures):
        console.print(line, markup=False)


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{figures['requests_completed']:,} requests completed, "
        f"{figures['requests_refused']:,} refused, {figures['requests_unfinished']:,} unfinished"
    )
    yield (
        f"{figures['throughput_requests_per_s']:.4g} requests/s, "
        f"{figures['throughput_tokens_per_s']:.4g} tokens/s; {figures['steps']:,} steps, "
        f"{figures['preemptions']:,} preemptions, KV peak {figures['kv_peak_tokens']:,} tokens"
    )
    if figures["stalled"]:
        yield f"stalled: {figures['stalled']}"
    if "slo_goodput" in figures:
        met = ", ".join(f"{n} {'met' if ok else 'missed'}" for n, ok in figures["slo_met"].items())
        yield f"{figures['slo_goodput']:.4g} requests/s within their targets; p99: {met}"
    if "draft_tokens_proposed" in figures:
        yield (
            f"{figures['draft_tokens_proposed']:,} draft tokens, "
            f"{figures['draft_tokens_accepted']:,} accepted"
        )
    if figures.get("drafters"):
        shares = (f"{n} {own['rounds']:,}" for n, own in figures["drafters"].items())
        yield (
            f"rounds by drafter: {', '.join(shares)}; "
            f"{figures['switches_per_request']:.3g} switches a request"
        )
    for name, own in figures.get("tenants", {}).items():
        mean = own["latency_s"]["mean"]
        yield (
            f"tenant {name}: {own['throughput_tokens_per_s']:.4g} tokens/s, mean latency "
            f"{'none' if mean is None else f'{mean:.4g} s'}"
        )
    if figures.get("jain") is not None:
        yield f"Jain's index {figures['jain']:.4f}"
    yield f"{figures['wall_s']:.2f} s of wall time"
