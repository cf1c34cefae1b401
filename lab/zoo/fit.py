"""How requests differ: each domain's distribution of acceptance, fitted to measured requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from lab.zoo.evidence import NGRAM, AcceptanceTrace, collect
from lab.zoo.modeling import load_model
from lab.zoo.tokenizer import load_tokenizer
from penstock.config import NGRAM as LOOKUP
from penstock.sim.domains import AcceptanceFile, AcceptanceFit, DomainFit
from penstock.zoo.registry import DOMAINS, bundled_models, load_prompts

LEAST_TOKENS = 16
"""Shorter requests say next to nothing, and are left out."""

DRAFT_TOKENS = 4

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
_WIDEST = 3.0
_LEAST_EIGENVALUE = 0.02
_LOGIT_LIMIT = 30.0

Array = NDArray[np.float64]


def measure_acceptance(
    target: str,
    per_domain: int,
    limit: int,
    seed: int = 0,
    on_domain: Callable[[], None] = lambda: None,
) -> dict[str, AcceptanceFit]:
    """Fit the bundled drafters' acceptance along a bundled target's own text, `sampled` at
    temperature 1 and `greedy`.

    `per_domain` shipped prompts of every domain are continued for at most `limit` tokens.

    Raises: as `fit_acceptance`.
    """
    cards = bundled_models()
    model, tokenizer = load_model(cards[target].path), load_tokenizer(cards[target].path)
    drafters = {n: load_model(card.path) for n, card in cards.items() if card.role == "drafter"}
    fits = {}
    for sampling in ("sampled", "greedy"):
        traces = []
        for domain in DOMAINS:
            traces += collect(
                model,
                drafters,
                tokenizer,
                {domain: load_prompts(domain)[:per_domain]},
                limit=limit,
                greedy=sampling == "greedy",
                seed=seed,
            )
            on_domain()
        fits[sampling] = fit_acceptance(traces)
    return fits


def fit_acceptance(traces: Sequence[AcceptanceTrace]) -> AcceptanceFit:
    """Fit every domain of `traces`.

    Raises: ValueError for a domain with fewer than two requests of `LEAST_TOKENS` tokens.
    """
    names = list(traces[0].runs)
    domains = {}
    for domain in dict.fromkeys(t.domain for t in traces):
        own = [t for t in traces if t.domain == domain and t.length >= LEAST_TOKENS]
        if len(own) < 2:
            raise ValueError(
                f"domain {domain!r} has {len(own)} requests of {LEAST_TOKENS} tokens or more; "
                "a fit needs 2"
            )
        domains[domain] = fit_domain([np.array([decisions(t.runs[n]) for n in names]) for t in own])
    drafters = tuple(LOOKUP if n == NGRAM else n for n in names)
    return AcceptanceFit(drafters=drafters, domains=domains)


def decisions(runs: NDArray[np.int64]) -> Array:
    """What verifying drafts of `DRAFT_TOKENS` along a text says of each position [tokens]: 1 for an
    accepted draft token, 0 for a rejected one, NaN where none was decided.

    runs: as in `AcceptanceTrace`. Positions behind a rejection are easier or harder than others, so
    that not the share of all positions but that of decided ones gives a geometric draft its right
    length.
    """
    decided = np.full(len(runs), np.nan)
    start = 0
    while start < len(runs):
        accepted = min(int(runs[start]), DRAFT_TOKENS)
        decided[start : start + accepted] = 1.0
        if accepted < DRAFT_TOKENS:
            decided[start + accepted : start + accepted + 1] = 0.0
        start += accepted + 1
    return decided


def fit_domain(requests: Sequence[Array]) -> DomainFit:
    """The distribution of acceptance among some requests.

    requests: `decisions` of each, [drafters, its tokens].

    What a request shows is its probability and the noise of finitely many tokens, which drafters
    partly share, since they guess at the same ones. That noise's covariance is taken off the
    observed one. The normal on the logit scale then has the mean and variance that remain as its
    own on the scale of probabilities, and their correlation.
    """
    shares = np.array([np.nanmean(r, axis=1) for r in requests])
    noise = np.mean([_noise(r) for r in requests], axis=0)
    between = np.atleast_2d(np.cov(shares.T)) - noise
    logits = [_logit_normal(m, v) for m, v in zip(shares.mean(0), np.diag(between), strict=True)]
    deviations = np.array([deviation for _, deviation in logits])
    covariance = _correlations(between) * np.outer(deviations, deviations)
    return DomainFit(
        mean=tuple(round(mean, 4) for mean, _ in logits),
        covariance=tuple(tuple(round(float(c), 5) for c in row) for row in covariance),
    )


def write_acceptance(path: Path, origin: str, fits: Mapping[str, AcceptanceFit]) -> None:
    """Write fits by way of sampling for `load_acceptance`."""
    file = AcceptanceFile(origin=origin, fits=dict(fits))
    path.write_text(file.model_dump_json() + "\n", encoding="utf-8")


def _noise(request: Array) -> Array:
    """Sampling covariance of one request's shares [drafters, drafters]. Half a success and half a
    failure more keep a share of 1 from looking certain."""
    num = (~np.isnan(request)).sum(axis=1)
    share = (np.nansum(request, axis=1) + 0.5) / (num + 1)
    errors = np.nan_to_num(request - share[:, None]) / num[:, None]
    return np.asarray(errors @ errors.T)


def _correlations(covariance: Array) -> Array:
    """Correlations of a covariance with noise in it: none of what does not vary, and nothing wholly
    determined by the rest."""
    variances = np.diag(covariance)
    varies = variances > 0
    deviations = np.sqrt(np.where(varies, variances, 1.0))
    found = np.clip(covariance / np.outer(deviations, deviations), -1, 1)
    found[~varies] = found[:, ~varies] = 0.0
    values, vectors = np.linalg.eigh(found)
    proper = (vectors * np.maximum(values, _LEAST_EIGENVALUE)) @ vectors.T
    scale = np.sqrt(np.where(varies, np.diag(proper), 1.0))
    return np.asarray(proper / np.outer(scale, scale))


def _logit_normal(mean: float, variance: float) -> tuple[float, float]:
    """Mean and deviation, on the logit scale, of a probability with that mean and variance."""
    mean = min(max(mean, 1e-3), 1 - 1e-3)
    if variance <= 0:
        return math.log(mean / (1 - mean)), 0.0

    def centre(deviation: float) -> float:
        return float(
            brentq(lambda c: _moments(c, deviation)[0] - mean, -_LOGIT_LIMIT, _LOGIT_LIMIT)
        )

    def excess(deviation: float) -> float:
        return _moments(centre(deviation), deviation)[1] - variance

    deviation = _WIDEST if excess(_WIDEST) <= 0 else float(brentq(excess, 0.0, _WIDEST))
    return centre(deviation), deviation


def _moments(centre: float, deviation: float) -> tuple[float, float]:
    rates = 1 / (1 + np.exp(-(centre + deviation * _NODES)))
    weights = _WEIGHTS / _WEIGHTS.sum()
    mean = float(weights @ rates)
    return mean, float(weights @ (rates - mean) ** 2)
