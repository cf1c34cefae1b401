"""WAIT paper, eq. 1: is a step's time linear in its tokens, prefill and KV alike?

Measured operators of Llama-2-7B on an A100 (Vidur's) give the time of a step. Decode batches are
those of the attention measurements; mixed batches join each of them with each measured chunk of a
prompt.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Skipped, Trial
from lab.common.operators import linear_profile
from lab.common.report import Plot, draw, write_table
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.sim.traces import TraceTable, numbers, read_table

Array = NDArray[np.float64]

NAME = "wait_linear_model"

_OPERATORS = "vidur_a100_llama2_7b_mlp.csv.gz"
_ATTENTION = "attention_a100_llama2_7b_tp1_sample.csv"
_LAYERS = 32
_PAPER = (PAPER_LINEAR.token_seconds[0], PAPER_LINEAR.per_kv_token)
_USELESS = 0.5
_PUBLISHED = 0.894
_GOOD = 0.85


def run(job: Trial) -> list[ClaimVerdict]:
    job.tell(NAME)
    decode, mixed = _batches(_folder(job.data))
    fits = {"decode": fit(decode), "mixed": fit(mixed)}
    rows = [(kind, *row) for kind, b in (("decode", decode), ("mixed", mixed)) for row in b]
    write_table(job.out / f"{NAME}.csv", ("kind", "prefill_tokens", "kv_tokens", "seconds"), rows)
    _draw(job, decode, mixed, fits["decode"])
    return verdicts(decode, mixed)


def _folder(data: Path | None) -> Path:
    """The folder of measurements. Raises: Skipped."""
    if data is None:
        raise Skipped(f"{NAME} needs measurements: name their folder with --data or PENSTOCK_DATA")
    for name in (_OPERATORS, _ATTENTION):
        if not (data / name).is_file():
            raise Skipped(f"{NAME} needs {name}, which is not in {data}")
    return data


def _batches(folder: Path) -> tuple[Array, Array]:
    """Decode and mixed batches: prefill tokens, KV tokens that are read, seconds; (N, 3) each."""
    profile = linear_profile(folder / _OPERATORS, _LAYERS)
    table = read_table(folder / _ATTENTION)
    kinds = np.array(table.column("kind"))
    batch, chunk, kv, seconds = _columns(table)
    decodes = np.flatnonzero(kinds == "decode")
    prefills = np.flatnonzero(kinds == "prefill")
    alone = [(0.0, batch[i] * kv[i], profile.linear(int(batch[i])) + seconds[i]) for i in decodes]
    mixed = [
        (
            chunk[j],
            batch[i] * kv[i] + kv[j],
            profile.linear(int(batch[i] + chunk[j])) + seconds[i] + seconds[j],
        )
        for i, j in itertools.product(decodes, prefills)
        if batch[i] * kv[i] + kv[j] + chunk[j] <= PAPER_LINEAR.kv_tokens
    ]
    return np.array(alone), np.array(mixed)


def _columns(table: TraceTable) -> tuple[Array, Array, Array, Array]:
    """Batch size, chunk, KV tokens of each request, and seconds of all layers."""
    batch, chunk, kv, ms = (
        numbers(table, name)
        for name in ("batch_size", "prefill_chunk_size", "kv_cache_size", "median_ms_per_layer")
    )
    return batch, chunk, kv, ms * _LAYERS / 1000


def fit(batches: Array) -> tuple[float, float]:
    """d0 and d1 of eq. 1 in seconds, by least squares. batches: (N, 3), see `_batches`."""
    tokens = batches[:, 0] + batches[:, 1]
    d1, d0 = np.polyfit(tokens, batches[:, 2], 1)
    return float(d0), float(d1)


def r_squared(batches: Array, coefficients: tuple[float, float]) -> float:
    """Share of the variance of times that eq. 1 with these coefficients explains; below 0 where it
    is worse than their mean."""
    seconds = batches[:, 2]
    residuals = seconds - _predicted(batches, coefficients)
    return float(1 - (residuals**2).sum() / ((seconds - seconds.mean()) ** 2).sum())


def _predicted(batches: Array, coefficients: tuple[float, float]) -> Array:
    return coefficients[0] + coefficients[1] * (batches[:, 0] + batches[:, 1])


def two_coefficients(batches: Array) -> Array:
    """Seconds of a prefill token and of a KV token, by least squares with a constant."""
    terms = np.column_stack([batches[:, :2], np.ones(len(batches))])
    return np.asarray(np.linalg.lstsq(terms, batches[:, 2], rcond=None)[0][:2])


def verdicts(decode: Array, mixed: Array) -> list[ClaimVerdict]:
    """Whether eq. 1 explains decode batches, and mixed ones. Controls have the times of others."""
    fitted = fit(decode)
    published = decode.copy()
    published[:, 2] += _predicted(decode, _PAPER) - _predicted(decode, fitted)
    prefill_s, kv_s = two_coefficients(mixed)
    weighted = mixed * (prefill_s / kv_s, 1, 1)

    def explains_decodes(batches: Array) -> Measurement:
        own, given = r_squared(batches, fit(batches)), r_squared(batches, _PAPER)
        return Measurement(
            f"R² {own:.3f} on {len(batches)} batches, {given:.3f} with paper-linear's coefficients",
            (own >= _GOOD, given >= _GOOD),
        )

    def explains_mixed(batches: Array) -> Measurement:
        refitted = fit(batches)
        other, best = r_squared(batches, fitted), r_squared(batches, refitted)
        return Measurement(
            f"R² {other:.2f} with the coefficients of decode batches, {best:.2f} fitted anew on "
            f"{len(batches)} mixed ones",
            (other > _USELESS, best > _USELESS),
        )

    return [
        check(
            f"eq. 1 fits decode batches (R² {_PUBLISHED} where paper-linear was fitted)",
            explains_decodes,
            decode,
            "times shuffled",
            _shuffled(decode),
            ("paper-linear's times with the residuals as measured", published),
        ),
        check(
            "eq. 1 with one coefficient for prefill and KV tokens fits mixed batches",
            explains_mixed,
            mixed,
            "times shuffled",
            _shuffled(mixed),
            (f"a prefill token counted as {prefill_s / kv_s:.0f} KV tokens", weighted),
        ),
    ]


def _shuffled(batches: Array) -> Array:
    seconds = np.random.default_rng(0).permutation(batches[:, 2])
    return np.column_stack([batches[:, :2], seconds])


def _draw(job: Trial, decode: Array, mixed: Array, coefficients: tuple[float, float]) -> None:
    lines: dict[str, tuple[Array, Array]] = {
        label: ((batches[:, 0] + batches[:, 1]) / 1000, batches[:, 2] * 1e3)
        for label, batches in (("mixed", mixed), ("decode", decode))
    }
    ends = np.array([0, mixed[:, :2].sum(axis=1).max()])
    fitted = "eq. 1, decode batches"
    lines[fitted] = ends / 1000, (coefficients[0] + coefficients[1] * ends) * 1e3
    axes = {"xlabel": "prefill and KV tokens, thousands", "ylabel": "ms a step"}
    plot = Plot(lines, axes, ".", {fitted: "-"})
    draw(job.out / f"{NAME}.png", "Step times (WAIT paper, eq. 1)", [[plot]])


EXPERIMENT = Experiment(NAME, "WAIT, eq. 1: step times against measurements", run)
