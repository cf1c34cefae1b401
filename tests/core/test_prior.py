import numpy as np
import numpy.typing as npt
import pytest

from penstock.core.learn.prior import AcceptancePrior, Belief

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ALIKE = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
"""Of three drafters the first two find the same texts easy."""


def logistic(x: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-x)))


def prompt(topic: int, number: int) -> IntArray:
    """Half of its words are those of its topic, the others its own."""
    return np.concatenate((100 * topic + np.arange(20), 10_000 + 20 * number + np.arange(20)))


def taught(
    means: FloatArray, num: int, tokens: int = 60, seen: int | None = None, seed: int = 0
) -> AcceptancePrior:
    """A prior after so many requests, of as many topics as `means` has rows; `seen`: how many of
    the drafters, at random, each of them showed something of."""
    rng = np.random.default_rng(seed)
    num_topics, num_drafters = means.shape
    prior = AcceptancePrior()
    prior.grow(num_drafters)
    for i in range(num):
        topic = i % num_topics
        rates = logistic(rng.multivariate_normal(means[topic], 1.5 * ALIKE))
        accepted = rng.binomial(tokens, rates).astype(float)
        rejected = tokens - accepted
        if seen is not None:
            unseen = rng.permutation(num_drafters)[seen:]
            accepted[unseen] = rejected[unseen] = 0.0
        prior.learn(prompt(topic, i), accepted, rejected)
    return prior


def mean_of(prior: AcceptancePrior, topic: int) -> FloatArray:
    return prior.belief(prompt(topic, 9999))[0].mean


@pytest.mark.parametrize("seen", [None, 2])
def test_it_learns_which_drafters_go_together(seen: int | None) -> None:
    prior = taught(np.array([[1.0, 0.0, -1.0]]), 400, seen=seen)
    before, _ = prior.belief(prompt(0, 9999))
    after = before.after(np.array([60.0, 0, 0]), np.array([2.0, 0, 0]))
    shift = after.mean - before.mean
    assert shift[0] > 1.0
    assert shift[1] > 0.5 * shift[0], "a drafter that was not used is judged by its like"
    assert abs(shift[2]) < 0.3 * shift[1], "and one that has nothing to do with it is not"


def test_it_learns_what_topics_are_good_for() -> None:
    means = np.array([[2.0, 0.0, -2.0], [-2.0, 0.0, 2.0]])
    prior = taught(means, 300, seen=1)
    learned = np.array([mean_of(prior, topic) for topic in (0, 1)])
    assert learned[0, 0] - learned[1, 0] > 1.5
    assert learned[1, 2] - learned[0, 2] > 1.5
    assert np.abs(learned[:, 1]).max() < 0.7
    blind = taught(np.tile(means.mean(axis=0), (2, 1)), 300, seen=1)
    assert np.ptp([mean_of(blind, t)[0] for t in (0, 1)]) < 0.9


def test_doubt_falls_with_requests_of_a_topic_only() -> None:
    prior = AcceptancePrior()
    prior.grow(1)
    first = prior.belief(prompt(0, 9999))[1][0]
    for i in range(20):
        prior.learn(prompt(0, i), np.array([30.0]), np.array([10.0]))
    known, strange = (prior.belief(prompt(topic, 9999))[1][0] for topic in (0, 1))
    assert known < 0.3 * first
    assert 0.3 * first < strange < first


def test_a_posterior_is_near_the_truth_after_much_evidence_and_the_prior_without() -> None:
    prior = AcceptancePrior()
    prior.grow(2)
    belief, _ = prior.belief(np.arange(5))
    nothing = belief.after(np.zeros(2), np.zeros(2))
    assert nothing.mean == pytest.approx(belief.mean)
    much = belief.after(np.array([300.0, 0.0]), np.array([700.0, 0.0]))
    assert much.rates()[0] == pytest.approx(0.3, abs=0.02)
    assert much.variance[0] < 0.05 < 0.5 < much.variance[1]
    contrary = Belief(np.array([4.0, 0.0]), 0.5 * np.eye(2))
    after = contrary.after(np.array([100.0, 0.0]), np.array([300.0, 0.0]))
    assert after.rates()[0] == pytest.approx(0.26, abs=0.02)
    sure = belief.after(np.array([1000.0, 0.0]), np.zeros(2))
    assert 0.98 < sure.rates()[0] < 1.0


def test_drafters_may_come_later() -> None:
    prior = taught(np.array([[1.0, 0.0, -1.0]]), 50)
    before = mean_of(prior, 0)
    prior.grow(5)
    after = mean_of(prior, 0)
    assert after[:3] == pytest.approx(before)
    assert len(after) == 5
    prior.grow(2)
    assert len(mean_of(prior, 0)) == 5


def test_of_a_prompt_without_words_it_knows_what_all_have_in_common() -> None:
    prior = taught(np.array([[2.0, 0.0, -2.0]]), 50)
    belief, doubt = prior.belief(np.empty(0, dtype=np.int64))
    assert belief.mean[0] > belief.mean[1] + 0.3 > belief.mean[2] + 0.6
    assert (doubt > prior.belief(prompt(0, 9999))[1]).all()


def test_a_belief_in_several_drafters_moves_with_one() -> None:
    belief = Belief(np.zeros(3), 1.5 * ALIKE)
    after = belief.after(np.array([0.0, 50.0, 0.0]), np.array([0.0, 5.0, 0.0]))
    assert after.mean[0] == pytest.approx(0.9 * after.mean[1])
    assert after.mean[2] == 0.0
    assert after.variance[2] == pytest.approx(1.5)
