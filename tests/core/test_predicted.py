"""Drafts from a prediction: where the output is in it, what they promise, and how long they are."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from tests.core.fakes import ToyDrafter, ToyExecutor, target_only
from tests.core.world import Chaos, World, make_request, make_scheduler

from penstock.core.learn import Estimators
from penstock.core.learn.matches import MatchRates
from penstock.core.policies.base import MOST_DRAFT_TOKENS
from penstock.core.policies.registry import make_policy
from penstock.core.predicted import Prediction
from penstock.core.types import PREDICTION, Match, Output, Request

TEXT = tuple(random.Random(0).randrange(1000) for _ in range(400))
OTHER = 5000
"""A token that is not in it."""


def followed(prediction: Sequence[int], output: Sequence[int], by: int = 1) -> Prediction:
    """Follow an output, so many tokens at a time."""
    made, seen = Prediction(prediction), list[int]()
    for start in range(0, len(output), by):
        new = output[start : start + by]
        seen += new
        made.follow(seen, len(new))
    return made


def next_tokens(prediction: Prediction, num_tokens: int) -> tuple[int, ...]:
    match = prediction.match(num_tokens)
    return () if match is None else match.token_ids


@pytest.mark.parametrize("by", [1, 3, 100])
@pytest.mark.parametrize(
    ("output", "place"),
    [
        ((), 0),
        (TEXT[:9], 9),
        pytest.param((*TEXT[:9], OTHER), 10, id="one is replaced, as far as is known"),
        pytest.param((*TEXT[:9], OTHER, TEXT[10]), 11, id="one was replaced"),
        pytest.param((*TEXT[:9], OTHER, TEXT[9]), 10, id="one was put in"),
        pytest.param((*TEXT[:9], TEXT[10]), 11, id="one was left out"),
        pytest.param((*TEXT[:9], *[OTHER] * 30, *TEXT[20:23]), 23, id="a part is another"),
        pytest.param((*TEXT[200:210], *TEXT[3:6]), 6, id="and goes back"),
        pytest.param((OTHER, *TEXT[:2]), 2, id="something before it"),
        pytest.param(TEXT, len(TEXT), id="its end"),
        pytest.param((*TEXT, OTHER, OTHER), len(TEXT), id="beyond its end"),
    ],
)
def test_the_output_is_found_in_it(output: tuple[int, ...], place: int, by: int) -> None:
    assert next_tokens(followed(TEXT, output, by), 5) == TEXT[place : place + 5]


def test_of_equal_matches_the_nearest_behind_counts() -> None:
    part = (1, 2, 3)
    text = (*part, 10, *range(20, 30), *part, 11, *range(30, 40), *part, 12)
    found = followed(text, (*range(20, 26), OTHER, OTHER, *part))
    assert next_tokens(found, 1) == (11,)


def test_one_token_far_away_is_no_match() -> None:
    found = followed(TEXT, (*TEXT[:9], TEXT[300]))
    assert next_tokens(found, 1) == (TEXT[10],)


def learned(output: Sequence[int]) -> MatchRates:
    """What has been learned of a request with this output, token by token."""
    rates, made = MatchRates(), Prediction(TEXT)
    for i, token in enumerate(output):
        match = made.match(20)
        if match is not None:
            rates.learn("r", match, (token,))
        made.follow(output[: i + 1], 1)
    return rates


def test_what_it_promises() -> None:
    """Less along a draft, more behind longer matches, and what it has kept so far."""
    first, later = followed(TEXT, ()).match(20), followed(TEXT, TEXT[:100]).match(20)
    assert first is not None
    assert later is not None
    fresh = MatchRates().survival("r", first)
    sure = learned(TEXT[:100]).survival("r", later)
    for survival in (fresh, sure):
        assert all(1 > a > b > 0 for a, b in pairwise(survival))
    assert len(sure) == 20
    assert sure[-1] > 0.5 > fresh[-1]
    wrong = learned([OTHER] * 50)
    assert sum(wrong.survival("r", first)) < 0.2
    doubted, others = wrong.survival("r", later), wrong.survival("another", later)
    assert sum(doubted) < 0.75 * sum(others), "also of longer matches, of which there were none"


def test_how_far_requests_differ_is_learned() -> None:
    """Where each keeps all or nothing a few tokens tell which; where all are alike, little."""
    match = Match(tuple(range(8)), 4, "own")

    def rates(outputs: Sequence[Sequence[int]]) -> MatchRates:
        learned = MatchRates()
        for i, output in enumerate(outputs):
            for token in output:
                learned.learn(str(i), match, (token,))
            learned.release_request(str(i))
        for _ in range(4):
            learned.learn("new", match, (OTHER,))
        return learned

    right = match.token_ids[0]
    unlike = rates([[right] * 20, [OTHER] * 20] * 20).survival("new", match)
    alike = rates([[right, OTHER] * 10] * 40).survival("new", match)
    assert sum(unlike) < 0.25 < 0.5 < alike[0] + 0.1


# --- in the loop ----------------------------------------------------------------------------------

DRAFTER = ToyDrafter("toy", accuracy=0.5)


def edited(tokens: Sequence[int], rng: random.Random, share: float) -> tuple[int, ...]:
    return tuple(OTHER if rng.random() < share else token for token in tokens)


def run(
    share: float, learn: Estimators | None = None, drafters: tuple[ToyDrafter, ...] = (), **asked
) -> tuple[World, list[Output]]:
    """Four requests, a share of whose predictions is wrong."""
    rng = random.Random(1)
    requests: list[Request] = []
    for i in range(4):
        plain = make_request(f"r{i}", prompt_len=5, max_tokens=150, seed=i)
        prediction = edited(target_only(plain), rng, share)
        made = {"prompt_len": 5, "max_tokens": 150, "seed": i, "prediction": prediction}
        requests.append(make_request(f"r{i}", **made, **asked))
    priced = make_policy("allocation", "priced")
    scheduler = make_scheduler(num_blocks=400, drafters=drafters, learn=learn, allocation=priced)
    executor = ToyExecutor(4, {d.name: d for d in drafters}, 1)
    world = World(scheduler, executor, chaos=Chaos(), seed=0)
    world.run(requests)
    world.check_outputs()
    world.check_empty()
    return world, [e for e in world.log if isinstance(e, Output) and e.num_proposed]


@pytest.mark.parametrize("drafters", [(), (DRAFTER,)])
def test_with_any_drafter_and_with_none(drafters: tuple[ToyDrafter, ...]) -> None:
    _, drafted = run(0.05, drafters=drafters)
    predicted = [o for o in drafted if o.drafter == PREDICTION]
    assert sum(o.num_accepted for o in predicted) > 0.8 * 4 * 150
    assert 32 < max(o.num_proposed for o in predicted) <= MOST_DRAFT_TOKENS


def test_a_likelier_drafter_goes_before_it() -> None:
    _, drafted = run(1.0, drafters=(ToyDrafter("toy", accuracy=0.9),))
    num_predicted = sum(o.drafter == PREDICTION for o in drafted)
    assert num_predicted < 0.1 * len(drafted)


@pytest.mark.parametrize("asked", [{"drafter": "none"}, {"max_draft_tokens": 0}])
def test_no_draft_is_no_draft(asked: dict[str, object]) -> None:
    assert run(0.0, **asked)[1] == []


def test_the_longest_draft_of_a_request() -> None:
    _, drafted = run(0.0, max_draft_tokens=3)
    assert {o.num_proposed for o in drafted} <= {1, 2, 3}


def test_drafts_are_as_long_as_they_pay() -> None:
    """A row costs nothing, a fifth of a step, or a whole one."""
    lengths = {}
    for row_s in (0.0, 0.2, 1.0):
        learn = Estimators()
        for rows in (1, 64):
            learn.times.target.add_measurement(rows, 1.0 + row_s * (rows - 1))
        drafted = run(0.05, learn)[1]
        lengths[row_s] = sum(o.num_proposed for o in drafted) / max(1, len(drafted))
    assert lengths[0.0] > 1.5 * lengths[0.2] > 3
    assert lengths[1.0] == 0


def test_a_wrong_prediction_is_soon_not_drafted() -> None:
    learn = Estimators()
    for rows in (1, 64):
        learn.times.target.add_measurement(rows, 1.0 + 0.1 * (rows - 1))
    drafted = run(1.0, learn)[1]
    assert sum(o.num_proposed for o in drafted) < 4 * 10


@pytest.mark.parametrize("row_s", [0.0, 0.05])
def test_a_wrong_prediction_is_soon_given_up(row_s: float) -> None:
    """Also where a row seems to cost nothing."""
    learn = Estimators()
    for rows in (1, 64):
        learn.times.target.add_measurement(rows, 1.0 + row_s * (rows - 1))
    drafted = run(1.0, learn)[1]
    assert sum(o.num_proposed for o in drafted) < (0.03 if row_s else 0.12) * 4 * 150
