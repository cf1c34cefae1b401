"""What the simulator's commands say of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from penstock.fluid.step_profile import StepProfile
    from penstock.sim.acceptance import AcceptanceByDrafter

DrafterOption = Annotated[
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
        help="Speculate: requests by domain, as the bundled drafters fare with them, or as a file "
        "of `penstock zoo fit` says. Takes all its drafters unless --drafter names some.",
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


@dataclass(frozen=True, slots=True)
class DrafterTexts:
    """What the command line says of drafters: which, how their drafts fare, times, capacities."""

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
