import numpy as np
import numpy.typing as npt
import pytest

from penstock.core.learn.prior import AcceptancePrior

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def prompt(topic: int, number: int) -> IntArray:
    """Half of its words are those of its topic, the others its own."""
    return np.concatenate((100 * topic + np.arange(20), 10_000 + 20 * number + np.arange(20)))


def taught(means: FloatArray, num: int, tokens: int = 60, alike: float = 1e6) -> AcceptancePrior:
    """A prior after so many requests, of as many topics as `means` has rows; each shows something
    of one drafter. alike: strength of the beta distribution that requests of a topic draw from."""
    rng = np.random.default_rng(0)
    num_topics, num_drafters = means.shape
    prior = AcceptancePrior()
    prior.grow(num_drafters)
    for i in range(num):
        topic = i % num_topics
        rates = rng.beta(alike * means[topic], alike * (1 - means[topic]))
        decided = np.zeros(num_drafters)
        decided[rng.integers(num_drafters)] = tokens
        words = prompt(topic, i)
        accepted = rng.binomial(decided.astype(int), rates).astype(float)
        prior.learn(words, prior.expect(words, 0.7), accepted, decided)
    return prior


def test_it_learns_what_topics_are_good_for() -> None:
    means = np.array([[0.9, 0.5, 0.1], [0.1, 0.5, 0.9]])
    prior = taught(means, 120)
    learned = np.array([prior.expect(prompt(topic, 9999), 0.7) for topic in (0, 1)])
    assert learned == pytest.approx(means, abs=0.15)
    blind = taught(np.tile(means.mean(axis=0), (2, 1)), 120)
    assert np.ptp([blind.expect(prompt(t, 9999), 0.7)[0] for t in (0, 1)]) < 0.15


def test_evidence_is_that_of_alike_requests() -> None:
    prior = AcceptancePrior()
    prior.grow(1)
    expected = prior.expect(prompt(0, 9999), 0.7)
    assert expected[0] == pytest.approx(0.7)
    for i in range(20):
        prior.learn(prompt(0, i), expected, np.array([3.0]), np.array([30.0]))
    known, strange = (prior.expect(prompt(topic, 9999), 0.7) for topic in (0, 1))
    assert known[0] < strange[0] < 0.3, "an unlike one is expected to be as all others"


@pytest.mark.parametrize("alike", [3.0, 30.0])
def test_it_learns_how_much_requests_differ(alike: float) -> None:
    prior = taught(np.full((1, 2), 0.6), 400, alike=alike)
    assert prior.strength == pytest.approx(alike, rel=0.5)


def test_requests_that_do_not_differ_are_trusted() -> None:
    assert taught(np.full((1, 2), 0.6), 400).strength > 50


def test_drafters_may_come_later() -> None:
    prior = taught(np.array([[0.8, 0.5, 0.2]]), 50)
    before = prior.expect(prompt(0, 9999), 0.7)
    prior.grow(5)
    after = prior.expect(prompt(0, 9999), 0.7)
    assert after[:3] == pytest.approx(before)
    assert after[3:] == pytest.approx(0.7)
    prior.grow(2)
    assert len(prior.expect(prompt(0, 9999), 0.7)) == 5


def test_a_prompt_without_words_is_as_all_others() -> None:
    prior = taught(np.array([[0.9, 0.5, 0.1]]), 60)
    expected = prior.expect(np.empty(0, dtype=np.int64), 0.7)
    assert expected[0] > expected[1] + 0.2 > expected[2] + 0.4


def test_what_is_measured_on_hard_requests_alone_is_not_thought_worse() -> None:
    """Every other request accepts little of any drafter; only these are asked for the second."""
    rng = np.random.default_rng(0)
    prior = AcceptancePrior()
    prior.grow(2)
    of_easy, of_hard = np.array([0.8, 0.9]), np.array([0.4, 0.6])
    for i in range(100):
        is_hard = i % 2 == 1
        decided = np.array([60.0, 60.0 * is_hard])
        accepted = rng.binomial(decided.astype(int), of_hard if is_hard else of_easy).astype(float)
        words = prompt(0, i)
        prior.learn(words, prior.expect(words, np.full(2, 0.7)), accepted, decided)
    first, second = prior.expect(prompt(0, 9999), np.full(2, 0.7))
    assert first == pytest.approx(0.6, abs=0.05)
    assert second > 0.67, "as measured, 0.6, but other requests accept more"
