"""Acceptance by domain."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.core.types import DraftOrder, VerifyItem
from penstock.sim.acceptance import DomainAcceptance, of_tenants, parse_drafters
from penstock.sim.domains import AcceptanceFit, DomainFit, load_acceptance
from penstock.sim.traces import WorkloadError

FIT = AcceptanceFit(
    drafters=("a", "b"),
    domains={
        "easy": DomainFit(mean=(2.0, 1.0), covariance=((0.5, 0.45), (0.45, 0.5))),
        "hard": DomainFit(mean=(-2.0, 0.0), covariance=((0.3, -0.2), (-0.2, 0.3))),
    },
)


def logits(model: DomainAcceptance, domain: str, num: int = 3000) -> np.ndarray:
    rates = np.array([list(model.rates(str(i), domain).values()) for i in range(num)])
    return np.log(rates / (1 - rates))


@pytest.mark.parametrize("domain", ["easy", "hard"])
def test_requests_are_drawn_from_their_domain(domain: str) -> None:
    drawn = logits(DomainAcceptance(FIT, seed=5), domain)
    fit = FIT.domains[domain]
    assert drawn.mean(0) == pytest.approx(np.array(fit.mean), abs=0.05)
    assert np.cov(drawn.T) == pytest.approx(np.array(fit.covariance), abs=0.05)


def test_a_request_is_the_same_for_every_caller() -> None:
    first, second = DomainAcceptance(FIT, seed=1), DomainAcceptance(FIT, seed=1)
    second.rates("99")
    assert first.rates("7") == second.rates("7")
    assert first.rates("7") != first.rates("8")
    assert first.rates("7") != DomainAcceptance(FIT, seed=2).rates("7")


def test_drafts_are_geometric_with_the_requests_rate() -> None:
    model = DomainAcceptance(FIT, seed=3)
    rate = model.rates("r")["b"]
    kept = [
        model.num_accepted(VerifyItem("r", 0, i, 9, 1, True, drafter="b", num_draft_tokens=3), 1)
        for i in range(4000)
    ]
    for s in (1, 2, 3):
        assert np.mean([k >= s for k in kept]) == pytest.approx(rate**s, abs=0.03)
    order = DraftOrder("r", 0, 0, "b", 0, 1, 0)
    assert model.num_matched(order, range(4000)) / 4000 == pytest.approx(rate, abs=0.03)
    assert model.num_matched(order, range(5)) + model.num_matched(order, range(5, 9)) == (
        model.num_matched(order, range(9))
    )


def test_the_domain_is_the_tenants_or_drawn() -> None:
    model = of_tenants(DomainAcceptance(FIT, seed=3), ["hard", "somebody", "easy"])
    assert isinstance(model, DomainAcceptance)
    assert model.domain_of("0") == "hard"
    assert model.domain_of("2") == "easy"
    untold = DomainAcceptance(FIT, seed=3)
    assert model.domain_of("1") == untold.domain_of("1")
    share = np.mean([untold.domain_of(str(i)) == "easy" for i in range(2000)])
    assert share == pytest.approx(0.5, abs=0.04)


def test_tokens_a_step_are_the_mean_over_requests() -> None:
    model = DomainAcceptance(FIT, seed=1)
    rates = [model.rates(str(i), d)["a"] for d in FIT.domains for i in range(4000)]
    mean = np.mean([sum(r**s for s in range(5)) for r in rates])
    assert model.tokens_per_step("a", 4) == pytest.approx(mean, rel=0.02)


def test_the_bundled_fits() -> None:
    """The smallest drafter is worse than the largest, and each specialist is best at home."""
    for name in ("zoo", "zoo-greedy"):
        fit = load_acceptance(name)
        assert len(fit.domains) == 8
        assert "ngram" in fit.drafters
        means = {d: dict(zip(fit.drafters, f.mean, strict=True)) for d, f in fit.domains.items()}
        assert max(means["math"], key=means["math"].__getitem__) == "draft-data"
        assert max(means["chat"], key=means["chat"].__getitem__) == "draft-lang"
        assert all(m["draft-tiny"] < m["draft-base"] + 0.7 for m in means.values())
        for fitted in fit.domains.values():
            assert np.linalg.eigvalsh(np.array(fitted.covariance)).min() > -1e-3
        DomainAcceptance(fit).rates("0")


def test_drafters_by_name_are_those_of_the_fit() -> None:
    model = parse_drafters([], 3, FIT)
    assert list(model.models) == ["a", "b"]
    mixed = parse_drafters(["b", "c=0.5"], 3, FIT)
    assert list(mixed.models) == ["b", "c"]
    assert mixed.tokens_per_step("c", 1) == 1.5
    with pytest.raises(WorkloadError, match="no acceptance was fitted for drafter 'x'"):
        parse_drafters(["x"], 3, FIT)
    with pytest.raises(WorkloadError, match="a drafter is NAME=RATE"):
        parse_drafters(["b"], 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fits": {"greedy": FIT.model_dump()}}, "no fit to sampled text; it has greedy"),
        ({"origin": 3}, "origin"),
        (
            {"fits": {"sampled": {"drafters": ["a"], "domains": FIT.model_dump()["domains"]}}},
            "'easy' is not of 1 drafters",
        ),
        ({"fits": {"sampled": {"drafters": ["a"], "domains": {}}}}, "names no drafters or no"),
    ],
)
def test_a_file_that_is_no_fit(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "fit.json"
    good = {"origin": "here", "fits": {"sampled": FIT.model_dump()}}
    path.write_text(json.dumps(good))
    assert load_acceptance(path) == FIT
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(WorkloadError, match=message):
        load_acceptance(path)
    with pytest.raises(WorkloadError, match="choose from zoo, zoo-greedy, or name a file"):
        load_acceptance(tmp_path / "missing")
