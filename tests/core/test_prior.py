from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from penstock.core.learn.prior import AcceptancePrior

FloatArray = npt.NDArray[np.float64]
ALIKE = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
"""Of three drafters the first two find the same texts easy."""


def logistic(x: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-x)))


def taught(
    means: FloatArray, num: int, tokens: int = 60, seen: int | None = None, seed: int = 0
) -> AcceptancePrior:
    """A prior after so many requests, of as many topics as `means` has rows; `seen`: how many of
    the drafters, at random, each of them showed something of."""
    rng = np.random.default_rng(seed)
    num_topics, num_drafters = means.shape
    prior = AcceptancePrior(1 + num_topics)
    prior.grow(num_drafters)
    for i in range(num):
        topic = i % num_topics
        rates = logistic(rng.multivariate_normal(means[topic], 1.5 * ALIKE))
        accepted = rng.binomial(tokens, rates).astype(float)
        rejected = tokens - accepted
        if seen is not None:
            unseen = rng.permutation(num_drafters)[seen:]
            accepted[unseen] = rejected[unseen] = 0.0
        prior.learn(features(topic, num_topics), accepted, rejected)
    return prior


def features(topic: int, num_topics: int) -> FloatArray:
    return np.concatenate(([1.0], np.eye(num_topics)[topic]))


@pytest.mark.parametrize("seen", [None, 2])
def test_it_learns_which_drafters_go_together(seen: int | None) -> None:
    means = np.array([[1.0, 0.0, -1.0]])
    prior = taught(means, 400, seen=seen)
    x = features(0, 1)
    before = prior.posterior(prior.mean(x), np.zeros(3), np.zeros(3))
    after = prior.posterior(prior.mean(x), np.array([60.0, 0, 0]), np.array([2.0, 0, 0]))
    shift = after.mean - before.mean
    assert shift[0] > 1.0
    assert shift[1] > 0.5 * shift[0], "a drafter that was not used is judged by its like"
    assert abs(shift[2]) < 0.3 * shift[1], "and one that has nothing to do with it is not"


def test_it_learns_what_topics_are_good_for() -> None:
    means = np.array([[2.0, 0.0, -2.0], [-2.0, 0.0, 2.0]])
    prior = taught(means, 300, seen=1)
    learned = np.array([prior.mean(features(topic, 2)) for topic in (0, 1)])
    assert learned[0, 0] - learned[1, 0] > 1.5
    assert learned[1, 2] - learned[0, 2] > 1.5
    assert np.abs(learned[:, 1]).max() < 0.7
    blind = taught(np.tile(means.mean(axis=0), (2, 1)), 300, seen=1)
    assert np.ptp([blind.mean(features(t, 2))[0] for t in (0, 1)]) < 0.9


def test_doubt_falls_with_requests_of_a_topic_only() -> None:
    prior = AcceptancePrior(3)
    prior.grow(1)
    known, strange = features(0, 2), features(1, 2)
    first = prior.doubt(known)[0]
    for _ in range(20):
        prior.learn(known, np.array([30.0]), np.array([10.0]))
    assert prior.doubt(known)[0] < 0.5 * first
    assert prior.doubt(strange)[0] > 0.7 * first


def test_a_posterior_is_near_the_truth_after_much_evidence_and_the_prior_without() -> None:
    prior = AcceptancePrior(1)
    prior.grow(2)
    mean = prior.mean(np.ones(1))
    nothing = prior.posterior(mean, np.zeros(2), np.zeros(2))
    assert nothing.mean == pytest.approx(mean)
    much = prior.posterior(mean, np.array([300.0, 0.0]), np.array([700.0, 0.0]))
    assert much.rates()[0] == pytest.approx(0.3, abs=0.02)
    assert much.variance[0] < 0.05 < 0.5 < much.variance[1]
    sure = prior.posterior(mean, np.array([1000.0, 0.0]), np.zeros(2))
    assert 0.98 < sure.rates()[0] < 1.0


def test_drafters_may_come_later() -> None:
    prior = taught(np.array([[1.0, 0.0, -1.0]]), 50)
    before = prior.mean(features(0, 1)).copy()
    prior.grow(5)
    after = prior.mean(features(0, 1))
    assert after[:3] == pytest.approx(before)
    assert len(after) == 5
    prior.grow(2)
    assert len(prior.mean(features(0, 1))) == 5
