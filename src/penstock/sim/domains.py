"""Acceptance of requests by domain: fitted normal distributions, and their file."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from penstock.sim.traces import WorkloadError

FOLDER = Path(__file__).with_name("acceptance_data")

_ZOO = FOLDER / "zoo.json"
"""Measured acceptance of the bundled family's drafters, by domain (`penstock zoo fit`)."""
_BUNDLED = {"zoo": (_ZOO, "sampled"), "zoo-greedy": (_ZOO, "greedy")}


class DomainFit(BaseModel):
    """Joint normal distribution of a domain's logit acceptances, shapes [drafters] and square."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]


class AcceptanceFit(BaseModel):
    """Fit to measured acceptance: names of drafters, and distributions by domain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafters: tuple[str, ...]
    domains: dict[str, DomainFit]

    @model_validator(mode="after")
    def _fits_together(self) -> AcceptanceFit:
        num = len(self.drafters)
        if not num or not self.domains:
            raise ValueError("names no drafters or no domains")
        for name, fit in self.domains.items():
            if {len(fit.mean), len(fit.covariance), *map(len, fit.covariance)} != {num}:
                raise ValueError(f"domain {name!r} is not of {num} drafters")
        return self


class AcceptanceFile(BaseModel):
    """JSON form: a fit for each way of sampling, and how they were measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origin: str
    fits: dict[str, AcceptanceFit]


def load_acceptance(name_or_path: str | Path = "zoo") -> AcceptanceFit:
    """Load the fitted acceptance of requests by domain.

    `zoo` is the bundled family's on sampled text, `zoo-greedy` on greedy text; of any other file
    the fit to sampled text. Raises: WorkloadError."""
    path, sampling = _BUNDLED.get(str(name_or_path), (Path(name_or_path), "sampled"))
    try:
        fits = AcceptanceFile.model_validate_json(path.read_bytes()).fits
    except OSError as error:
        choices = ", ".join(_BUNDLED)
        raise WorkloadError(
            f"acceptance {str(path)!r} cannot be read: {error.strerror}; choose from {choices}, or "
            "name a file"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise WorkloadError(f"{path}: {where}{': ' if where else ''}{first['msg']}") from error
    if sampling not in fits:
        raise WorkloadError(f"{path} has no fit to {sampling} text; it has {', '.join(fits)}")
    return fits[sampling]
