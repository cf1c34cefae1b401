"""Fitting acceptance by domain: known distributions are found again, and noise is taken off."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from lab.zoo.evidence import NGRAM, AcceptanceTrace, run_lengths
from lab.zoo.fit import DRAFT_TOKENS, decisions, fit_acceptance, fit_domain, write_acceptance
from penstock.sim.acceptance import DomainAcceptance
from penstock.sim.domains import load_acceptance

MEAN = np.array([1.0, -1.0])
COVARIANCE = np.array([[0.8, 0.5], [0.5, 0.6]])


def requests(covariance: np.ndarray, num: int = 600, length: int = 120) -> list[np.ndarray]:
    """Each: whether each drafter guesses each token, [2, length]."""
    rng = np.random.default_rng(1)
    logits = rng.multivariate_normal(MEAN, covariance, num)
    rates = 1 / (1 + np.exp(-logits))
    return [rng.random((2, length)) < r[:, None] for r in rates]


def as_decisions(agrees: np.ndarray) -> np.ndarray:
    return np.array([decisions(run_lengths(row)) for row in agrees])


def test_decisions_are_those_of_drafts_in_a_row() -> None:
    runs = run_lengths(np.array([1, 1, 1, 1, 1, 0, 1, 0, 0], dtype=bool))
    assert DRAFT_TOKENS == 4
    # Four accepted, one token of the target, a rejection at once, two in one round, the rest.
    expected = [1, 1, 1, 1, np.nan, 0, 1, 0, 0]
    np.testing.assert_array_equal(decisions(runs), expected)


def test_a_known_distribution_is_found_again() -> None:
    fit = fit_domain([as_decisions(r) for r in requests(COVARIANCE)])
    assert np.array(fit.mean) == pytest.approx(MEAN, abs=0.12)
    assert np.array(fit.covariance) == pytest.approx(COVARIANCE, abs=0.15)


def test_equal_requests_do_not_look_different() -> None:
    """A negative control: without taking the noise of 30 tokens off, they would."""
    alike = [as_decisions(r) for r in requests(np.zeros((2, 2)), length=30)]
    fit = fit_domain(alike)
    shares = np.array([np.nanmean(r, axis=1) for r in alike])
    raw = np.var(np.log((shares + 0.02) / (1.02 - shares)), axis=0)
    assert np.diag(fit.covariance).max() < 0.06
    assert raw.min() > 0.15


def trace(domain: str, agrees: np.ndarray) -> AcceptanceTrace:
    runs = dict(zip((NGRAM, "small"), map(run_lengths, agrees), strict=True))
    return AcceptanceTrace(domain, agrees.shape[1], runs, {}, {})


def test_domains_are_kept_apart_and_written(tmp_path: Path) -> None:
    some = requests(COVARIANCE, num=40)
    traces = [trace("x", r) for r in some] + [trace("y", ~r) for r in some]
    fit = fit_acceptance(traces)
    assert fit.drafters == ("ngram", "small"), "the look-up is called as the engine calls it"
    assert fit.domains["x"].mean[0] > 0 > fit.domains["y"].mean[0]
    path = tmp_path / "fit.json"
    write_acceptance(path, "a test", {"sampled": fit})
    assert load_acceptance(path) == fit
    DomainAcceptance(fit).rates("0")


def test_requests_that_never_differ_can_be_drawn() -> None:
    perfect = [trace("x", np.ones((2, 40), dtype=bool)) for _ in range(5)]
    rates = DomainAcceptance(fit_acceptance(perfect)).rates("0")
    assert min(rates.values()) > 0.99


def test_too_few_requests_are_refused() -> None:
    short = [trace("x", np.ones((2, 8), dtype=bool)) for _ in range(5)]
    with pytest.raises(ValueError, match="domain 'x' has 0 requests of 16 tokens or more"):
        fit_acceptance(short)
