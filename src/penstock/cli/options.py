"""Options that several commands share. The names of policies are read off their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.policies.registry import policy_names


def policy_option(kind: str, what: str) -> typer.models.OptionInfo:
    """An option that takes the name of a policy. what: what such a policy decides."""
    known = ", ".join(policy_names(kind))
    made: typer.models.OptionInfo = typer.Option(metavar="NAME", help=f"{what}: {known}.")
    return made


DEFAULT_ALLOCATION = "throughput"
DRAFT_SERVERS_ALLOCATION = "deadline"
"""Default where draft servers draft: a draft's way is part of what its time is worth."""


def allocation_option(draft_servers: str) -> typer.models.OptionInfo:
    """`--allocation` of a command with which draft servers come by the option of that name."""
    defaults = f"by default {DRAFT_SERVERS_ALLOCATION} with {draft_servers}"
    return policy_option(
        "allocation", f"Draft-length policy, {defaults}, otherwise {DEFAULT_ALLOCATION}"
    )


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

# --- commands that load models ------------------------------------------------------------------

DTYPE_HELP = "auto, float32, bfloat16 or float16."
DEVICE_HELP = "cpu, cuda or cuda:N."
DRAFTER_WEIGHTS_HELP = (
    "stored, or int4: matrices of a drafter with more than 6 bits a weight are rounded to 4 as "
    "they are loaded. Drafts come sooner, and a few less are accepted."
)

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        help="Checkpoint folder, GGUF file or bundled target. Default: the bundled family.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="Checkpoint folder, GGUF file or bundled target. Default: the bundled family.",
    ),
]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="A drafter; may be repeated. A bare NAME is a bundled one, `ngram` or `suffix`; "
        "`ngram+MODEL` looks up first and goes on with a model.",
    ),
]
OneDrafterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|NAME=PATH",
        help="Use this drafter only; a bare NAME is a bundled one, `ngram`, `suffix` or "
        "`ngram+NAME`.",
    ),
]
NoSpeculationOption = Annotated[
    bool, typer.Option("--no-speculation", help="No speculative decoding: load no drafters.")
]
DtypeOption = Annotated[str, typer.Option(help=DTYPE_HELP)]
DrafterWeightsOption = Annotated[
    str, typer.Option(metavar="stored|int4", help=DRAFTER_WEIGHTS_HELP)
]
DeviceOption = Annotated[str, typer.Option(help=DEVICE_HELP)]
BatchOption = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
TemperatureOption = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
TextSeedOption = Annotated[
    int | None,
    typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same text."),
]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print speed and acceptance on standard error.")
]

# --- commands that simulate ---------------------------------------------------------------------

WorkloadOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE", help="low, high, nested or ten_bins, or a trace (CSV or CSV.gz)."
    ),
]
ProfileOption = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="Step-time profile; see `penstock profile`.")
]
AdmissionOption = Annotated[str, policy_option("admission", "Admission policy")]
AllocationOption = Annotated[str, policy_option("allocation", "Draft-length policy")]
SelectionOption = Annotated[str, policy_option("selection", "Drafter selection policy")]
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
    int | None, typer.Option(min=1, help="KV cache size in tokens. Default: the profile's.")
]
BlockSizeOption = Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")]
FairnessOption = Annotated[
    bool, typer.Option("--fairness", help="Share the server by the weights of a trace's tenants.")
]
TenantWeightOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=WEIGHT", help="A tenant's weight, otherwise 1; may be repeated."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="An option of the admission policy, or with a prefix of another: allocation.k=4. "
        "Lists are written 1,2,3. May be repeated.",
    ),
]
SimulatedDrafterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=RATE|NAME=FILE|NAME",
        help="Speculate: an acceptance rate, a survival curve G1,G2,..., or recorded acceptance "
        "(JSON lines with arrays under the drafters' names); a bare name is one of --acceptance. "
        "May be repeated.",
    ),
]
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        metavar="zoo|zoo-greedy|FILE",
        help="Speculate: requests by domain, with the bundled drafters' measured acceptance, or a "
        "file of `penstock zoo fit`. Takes all its drafters unless --drafter names some.",
    ),
]
DrafterSecondsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=SECONDS[:PER_CATCH_UP]",
        help="Of a draft token, and of a token that is only read, in the place of the profile's. "
        "May be repeated.",
    ),
]
DrafterCapacityOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=B[xK]",
        help="Requests that a drafter takes at once, and instances of it. May be repeated.",
    ),
]
TtftOption = Annotated[
    float | None, typer.Option(help="Target for p99 of the time to first token, in seconds.")
]
TpotOption = Annotated[
    float | None, typer.Option(help="Target for p99 of the time per output token, in seconds.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of lengths, arrivals and acceptance.")]
SeedsOption = Annotated[int, typer.Option(min=1, help="Repeat with so many seeds, from --seed on.")]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that work at a time. Default: one for each core."),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto", help="Work on a Ray cluster instead; needs penstock[ray]."
    ),
]
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it there.")]

PIPELINE_HELP = (
    "How drafting and verification overlap.\n\n"
    "off: drafts, then verification, in turns.\n\n"
    "N: N micro-batches; one is verified while the drafters work on the others.\n\n"
    "auto: off or N, whichever is fastest by the measured times.\n\n"
    "async: verify whatever drafts are ready."
)
