"""Step-time profiles: files, and their fit to measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.special import ndtri

from penstock.config import read_profile
from penstock.core.learn.profile import cell_of, clear_stairs, with_neighbours
from penstock.fluid.step_profile import PAPER_LINEAR, ServedStep, StepProfile, StepWork
from penstock.sim.traces import TraceTable, WorkloadError, numbers, read_table

FOLDER = Path(__file__).with_name("profiles_data")

Array = NDArray[np.float64]

_SHORTEST_S, _LONGEST_S = 1e-7, 1e5
"""Plausible times of a step; figures beyond them are in another unit."""


class ProfileError(ValueError):
    """A profile or its measurements cannot be used. The message is one line."""


# Files


def profile_names() -> tuple[str, ...]:
    """Return the names of the bundled profiles."""
    return PAPER_LINEAR.name, *sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name_or_path: str | Path) -> StepProfile:
    """Load a bundled profile, or a file that `save_profile` wrote. Raises: ProfileError."""
    name = str(name_or_path)
    if name == PAPER_LINEAR.name:
        return PAPER_LINEAR
    path = FOLDER / f"{name}.json" if name in profile_names() else Path(name)
    try:
        profile = read_profile(path)
        _check_steps_take_time(profile)
    except FileNotFoundError as error:
        choices = ", ".join(profile_names())
        raise ProfileError(
            f"unknown profile {name!r}; choose from {choices}, or name a file"
        ) from error
    except OSError as error:
        raise ProfileError(f"profile {name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ProfileError(f"{error} (`penstock profile measure` writes a profile)") from error
    return profile


def save_profile(profile: StepProfile, path: Path) -> None:
    """Write a profile for `load_profile`, one field a line."""
    fields = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in asdict(profile).items())
    path.write_text(f"{{\n{fields}\n}}\n", encoding="utf-8")


def _check_steps_take_time(profile: StepProfile) -> None:
    shortest = min(profile.seconds(StepWork(1)), profile.seconds(StepWork(num_decodes=1)))
    coefficients = (getattr(profile, term) for term in _TERMS)
    drafting = (s for d in profile.drafters for s in (*d.batch_seconds, d.per_catch_up_token))
    longest = max(*profile.token_seconds, *coefficients, *drafting)
    if not shortest >= _SHORTEST_S:
        raise ProfileError(
            f"profile {profile.name!r}: a step of one token must take {_SHORTEST_S:g} s at least, "
            f"not {shortest:g}"
        )
    if not longest <= _LONGEST_S:
        raise ProfileError(
            f"profile {profile.name!r}: nothing may take more than {_LONGEST_S:g} s, "
            f"not {longest:g}"
        )


# Fitting

_STEP_COLUMNS = (*StepWork._fields, "seconds")
_TERMS = ("decode_fixed", "per_decode", "per_kv_token", "per_prefill_token", "per_prefill_context")
_SHARED_TERMS = ("decode_fixed", "per_decode", "per_prefill_token")
"""Terms that measurements may not tell from positions; the table is preferred to them."""
_SHARED_PENALTY = 1e-3
"""Small beside the fit's errors: it only decides between equally good fits."""
_MOST_SAVED = 0.5
"""Most that a prompt's position saves, as without its logits, over the least cost of any."""
_MAX_KNOTS = 256
"""Bounds the time of a fit."""
_STALLED = 10.0
"""Times the expected seconds from which a served step says nothing of the next."""
_TABLE_TOLERANCE = 1e-3
"""Relative error of a table without a point, well under that of measurements."""


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Quality of a fit to measurements of one kind; errors are relative to the measured time."""

    what: str
    num_measurements: int
    r_squared: float
    max_relative_error: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted profile and its quality."""

    profile: StepProfile
    quality: tuple[FitQuality, ...]


def fit_profile(measurements: Path, *, name: str, kv_tokens: int) -> Fit:
    """Fit a profile to measured times, by least squares of relative errors. Raises: ProfileError.

    measurements: CSV (or CSV.gz) of whole steps: the fields of `StepWork` and `seconds`.

    The table rises, and bends only where the mean is off a line by three standard errors. All of it
    is one non-negative least-squares problem, with errors relative to the time expected of such a
    step. Terms that the steps cannot separate (decodes from positions, in steps without prefill) go
    to the table; the profile is good for such steps only."""
    try:
        table = read_table(measurements)
        if not all(c in table.header for c in _STEP_COLUMNS):
            raise ProfileError(
                f"{measurements} does not have the columns {', '.join(_STEP_COLUMNS)}"
            )
        return _fit_steps(table, name, kv_tokens)
    except WorkloadError as error:
        raise ProfileError(str(error)) from error


def _fit_steps(table: TraceTable, name: str, kv_tokens: int) -> Fit:
    table.demand_rows()
    prefill, decodes, kv, drafts = (
        _whole(table, f"num_{what}")
        for what in ("prefill_tokens", "decodes", "kv_tokens", "draft_tokens")
    )
    context, seconds = (_not_negative(table, c) for c in ("prefill_context", "seconds"))
    tokens = prefill + decodes + drafts
    for column, what in ((tokens, "num_prefill_tokens"), (seconds, "seconds")):
        if (column == 0).any():
            complaint = "belongs to a step without tokens or time"
            raise table.error(int(np.argmax(column == 0)), what, complaint)
    origin = f"fitted to {len(seconds)} steps of {table.path.name}"
    works = np.stack([prefill, context, decodes, kv, drafts], axis=1)
    return _fit_works(works, seconds, name, kv_tokens, origin)


def fit_steps(
    steps: Sequence[tuple[StepWork, float]],
    *,
    name: str,
    kv_tokens: int,
    origin: str,
    is_grid: bool = False,
) -> Fit:
    """Fit a profile to measured steps as `fit_profile` does to a file. Raises: ProfileError.

    is_grid: steps of every size, with prompts and without, tell what a prompt's positions save."""
    works = np.array([work for work, _ in steps], dtype=np.float64)
    seconds = np.array([s for _, s in steps])
    return _fit_works(works, seconds, name, kv_tokens, origin, seconds.min() / 2, is_grid)


def with_served(profile: StepProfile, served: Sequence[Sequence[ServedStep]]) -> StepProfile:
    """Return the profile with pace, host's part and spread of served steps. served: by pass.

    The spread is that of the passes' times over the expected ones."""
    steps = [step for own in served for step in own]
    if not steps:
        return profile
    seconds = np.array([step.seconds for step in steps])
    rows = [
        (profile.seconds(work), 1.0, work.num_decodes, drafts * work.num_decodes)
        for work, _, drafts in steps
    ]
    matrix, solution = np.array(rows), np.eye(len(rows[0]))[0]
    for _ in range(2):
        # Over the usual seconds: over the measured ones, fast steps would weigh more.
        usual = matrix @ solution
        solution = _served_terms(matrix / usual[:, None], seconds / usual)
        kept = seconds < _STALLED * (matrix @ solution)
        matrix, seconds = matrix[kept], seconds[kept]
    terms = ("pace", "host_fixed", "host_per_decode", "host_per_drafting")
    fields: dict[str, Any] = dict(zip(terms, _rounded(solution), strict=True))
    found = replace(profile, **fields)
    expected = {drafts: found.served(drafts=drafts) for drafts in (False, True)}
    off = [
        math.log(sum(s.seconds for s in own) / sum(expected[s.drafts].seconds(s.work) for s in own))
        for own in served
    ]
    spread = float(np.std(off, ddof=1)) if len(off) > 1 else 0.0
    return replace(found, spread=_rounded(np.array([spread]))[0])


def _served_terms(matrix: Array, seconds: Array) -> Array:
    """Return the pace and the host's parts by least squares, over each step's usual time."""
    solution, _ = nnls(matrix, seconds)
    if solution[0] < 0.1:
        # No pass is ten times as fast as measured: the host's part alone explains these steps.
        rest, _ = nnls(matrix[:, 1:], np.maximum(0.0, seconds - matrix[:, 0]))
        solution = np.array([1.0, *rest])
    return solution


def paces(spread: float, num: int) -> list[float]:
    """Return equally likely factors on all times of a machine whose times have that spread."""
    quantiles = ndtri((np.arange(num) + 0.5) / num)
    return [float(factor) for factor in np.exp(spread * quantiles)]


def _fit_works(
    works: Array,
    seconds: Array,
    name: str,
    kv_tokens: int,
    origin: str,
    least: float = 0.0,
    is_grid: bool = False,
) -> Fit:
    """Fit a profile. works: [steps, fields of StepWork]. least: seconds of any step.

    is_grid: a prompt's positions may cost less than others, as without logits."""
    prefill, context, decodes, kv, drafts = works.T
    tokens = prefill + decodes + drafts
    of_step = [decodes > 0, decodes, kv, prefill, context, -prefill * is_grid]
    terms = np.stack(of_step, axis=1).astype(float)
    line = np.unique(tokens)[[0, -1]] if tokens.min() < tokens.max() else tokens[:1]
    matrix, solution = _fit_table(tokens, line, terms, seconds, least)
    knots = _knots(tokens, seconds / (matrix @ solution + least) - 1)
    if len(knots) > len(line):
        matrix, solution = _fit_table(tokens, knots, terms, seconds, least)
    counts, times = _compact(knots, least + np.cumsum(solution[: len(knots)]))
    *found, saved = _rounded(solution[len(knots) :])
    coefficients: dict[str, Any] = dict(zip(_TERMS, found, strict=True))
    profile = StepProfile(name, kv_tokens, counts, times, **coefficients, origin=origin)
    if saved:
        least = -_MOST_SAVED * profile.least_added
        profile = replace(profile, per_prefill_token=max(least, profile.per_prefill_token - saved))
    _check_steps_take_time(profile)
    predicted = np.array([profile.seconds(_work(row)) for row in works.tolist()])
    return Fit(profile, (_quality("steps", predicted, seconds),))


def _fit_table(
    tokens: Array, knots: Array, terms: Array, seconds: Array, least: float
) -> tuple[Array, Array]:
    """Return a matrix and the coefficients of the table and the terms, seconds beyond `least`."""
    matrix = np.hstack([_rising_basis(tokens, knots), terms])
    shared = [len(knots) + _TERMS.index(term) for term in _SHARED_TERMS] + [matrix.shape[1] - 1]
    solution = _relative_nnls(matrix, seconds - least, seconds, shared)
    # Relative to the expected time: relative to the measured one, fast steps would weigh more.
    solution = _relative_nnls(matrix, seconds - least, matrix @ solution + least, shared)
    return matrix, solution


def _knots(tokens: Array, off: Array) -> Array:
    """Return token counts where the table may bend. off: of steps from a line, relative."""
    counts, at = np.unique(tokens, return_inverse=True)
    cells, of_count = np.unique([cell_of(int(n)) for n in counts], return_inverse=True)
    nums = np.bincount(of_count[at], minlength=len(cells)).astype(float)
    means, squares = (
        np.bincount(of_count[at], values, minlength=len(cells)) / nums for values in (off, off**2)
    )
    is_knot = with_neighbours(clear_stairs(means, squares, nums))[of_count]
    is_knot[[0, -1]] = True
    knots = counts[is_knot]
    if len(knots) > _MAX_KNOTS:
        knots = knots[np.linspace(0, len(knots) - 1, _MAX_KNOTS).round().astype(int)]
    return knots


def _work(row: list[float]) -> StepWork:
    prefill, context, decodes, kv, drafts = row
    return StepWork(int(prefill), context, int(decodes), int(kv), int(drafts))


def _not_negative(table: TraceTable, name: str) -> Array:
    values = numbers(table, name)
    if (values < 0).any():
        raise table.error(int(np.argmax(values < 0)), name, "is negative")
    return values


def _whole(table: TraceTable, name: str) -> Array:
    values = _not_negative(table, name)
    if (values % 1 != 0).any():
        raise table.error(int(np.argmax(values % 1 != 0)), name, "is not a whole number")
    return values


def _rising_basis(tokens: Array, knots: Array) -> Array:
    """Return a basis [N, K]; the sum of the first k coefficients is the table's value at knot k."""
    first = np.ones((len(tokens), 1))
    climbs = np.clip((tokens[:, None] - knots[:-1]) / np.diff(knots), 0, 1)
    return np.hstack([first, climbs])


def _relative_nnls(
    matrix: Array, measured: Array, expected: Array, penalised: Sequence[int]
) -> Array:
    """Return x >= 0 with least squares of (matrix x − measured) / expected, `penalised` small."""
    relative = matrix / expected[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    penalty = np.zeros((len(penalised), matrix.shape[1]))
    penalty[np.arange(len(penalised)), penalised] = _SHARED_PENALTY
    goal = np.concatenate([measured / expected, np.zeros(len(penalised))])
    solution, _ = nnls(np.vstack([relative / scale, penalty]), goal)
    return np.asarray(solution / scale)


def _compact(counts: Array, seconds: Array) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the table without the points that interpolation reproduces."""
    kept = [0]
    while kept[-1] < len(counts) - 1:
        start = end = kept[-1]
        while end + 1 < len(counts) and _straight(counts, seconds, start, end + 1):
            end += 1
        kept.append(end)
    return tuple(int(c) for c in counts[kept]), tuple(_rounded(seconds[kept]))


def _straight(counts: Array, seconds: Array, start: int, end: int) -> bool:
    inner = slice(start + 1, end)
    line = np.interp(counts[inner], counts[[start, end]], seconds[[start, end]])
    return bool((np.abs(line - seconds[inner]) <= _TABLE_TOLERANCE * seconds[inner]).all())


def _rounded(values: Array) -> list[float]:
    """Round to five significant digits, more than measurements have."""
    return [float(f"{v:.5g}") for v in values]


def _quality(what: str, predicted: Array, measured: Array) -> FitQuality:
    residual = float(((predicted - measured) ** 2).sum())
    variation = float(((measured - measured.mean()) ** 2).sum())
    return FitQuality(
        what,
        len(measured),
        1 - residual / variation if variation else float(residual == 0),
        float(np.abs(predicted / measured - 1).max()),
    )
