"""Options that `simulate`, `capacity` and `plan` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.policy_options import policy_option

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
    int | None, typer.Option(min=1, help="KV memory in tokens. Default: the profile's.")
]
BlockSizeOption = Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")]
FairnessOption = Annotated[
    bool, typer.Option("--fairness", help="Between the tenants of a trace, by weight.")
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
