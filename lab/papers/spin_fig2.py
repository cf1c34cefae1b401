"""Spin, figures 2 and 3: which drafter is best for whom.

Live, on the bundled family or a larger copy of it (`--family`): every request is served with every
drafter, four tokens a round, one request at a time; the time of a token counts. The eight domains
stand for the paper's data sets.

Every prompt is served twice, sampled with other seeds: a drafter is chosen by the first pass and
judged by the second, in which luck is another. The controls choose for a request, and for a domain,
what was best for the next one; the oracles what is best in the second pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.report import Plot, draw, write_table
from lab.common.statistics import FloatArray, ratio
from penstock.config import PolicyConfig

if TYPE_CHECKING:
    from lab.common.live import LiveScene, LiveSystem
    from penstock.core.types import Request
    from penstock.engine.build import Engine

NAME = "spin_fig2"

_SINGLE = PolicyConfig.from_name("single")
_FOUR = PolicyConfig.from_name("fixed", k=4)
_PASSES = 2
_SHOWN = 3
"""Requests of figure 3."""
_OTHER_SEEDS = 1_000_000
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ServedRequests:
    """domains: of each request; drafters: names. seconds: of a token, [passes, requests, drafters].
    drafting: seconds of a draft token, accepted: share of the draft tokens, both of the first pass,
    [requests, drafters]."""

    domains: Sequence[str]
    drafters: Sequence[str]
    seconds: FloatArray
    drafting: FloatArray
    accepted: FloatArray

    @property
    def best(self) -> IntArray:
        """[requests] the drafter that is fastest in the first pass."""
        return np.asarray(self.seconds[0].argmin(axis=1))

    @property
    def single(self) -> int:
        """The drafter that is fastest for all requests together in the first pass."""
        return int(np.log(self.seconds[0]).mean(axis=0).argmin())

    @property
    def of_domain(self) -> dict[str, int]:
        """And for the requests of each domain."""
        own = np.array(self.domains)
        return {
            domain: int(np.log(self.seconds[0][own == domain]).mean(axis=0).argmin())
            for domain in dict.fromkeys(self.domains)
        }


def run(job: Trial) -> list[ClaimVerdict]:
    from lab.common.live import LiveScene

    scene = LiveScene.from_trial(job, NAME)
    job.tell(f"{NAME}: loading")
    found = served(scene, scene.load(1), job)
    write_table(
        job.out / f"{NAME}.csv",
        ("domain", "drafter", "ms_a_token", "again", "ms_a_draft_token", "accepted"),
        (
            (
                domain,
                drafter,
                *(1e3 * found.seconds[:, i, j]).tolist(),
                1e3 * float(found.drafting[i, j]),
                float(found.accepted[i, j]),
            )
            for i, domain in enumerate(found.domains)
            for j, drafter in enumerate(found.drafters)
        ),
    )
    _draw(job, found)
    return verdicts(found)


def served(scene: LiveScene, engine: Engine, job: Trial) -> ServedRequests:
    """Everything, the drafters in another order for each request."""
    from lab.common.live import LiveSystem, make_loop, request_of

    names = list(engine.executor.drafters)
    systems = [LiveSystem(n, engine, make_loop(engine, _SINGLE, _FOUR), n) for n in names]
    prompts = [
        (domain, own[turn % len(own)])
        for turn in range(scene.num_turns + 1)
        for domain, own in scene.prompts.items()
    ]
    shape = (len(prompts), len(names))
    seconds, drafting, accepted = np.zeros((_PASSES, *shape)), np.zeros(shape), np.zeros(shape)
    for number in range(_PASSES):
        for i, (_, prompt) in enumerate(prompts):
            job.tell(f"{NAME}: pass {number + 1}, request {i + 1} of {len(prompts)}")
            for j in np.roll(np.arange(len(names)), i):
                seed = i + number * _OTHER_SEEDS
                request = request_of(prompt, seed, scene.new_tokens, 1.0, drafter=names[j])
                figures = scene.kept.measure(
                    f"{scene.family.name}, {scene.new_tokens} tokens, {names[j]}/{seed}",
                    partial(_measured, engine, systems[j], request),
                )
                seconds[number, i, j] = figures["seconds"]
                if not number:
                    drafting[i, j], accepted[i, j] = figures["drafting"], figures["accepted"]
    # The first request of every domain warms up.
    warm = len(scene.prompts)
    domains = [domain for domain, _ in prompts]
    return ServedRequests(
        domains[warm:], names, seconds[:, warm:], drafting[warm:], accepted[warm:]
    )


def _measured(engine: Engine, system: LiveSystem, request: Request) -> dict[str, float]:
    """Of one request: seconds a token and a draft token, and the share that is accepted."""
    before = engine.executor.totals.drafter_seconds[system.name]
    done = system.serve([request], 1)
    spent = engine.executor.totals.drafter_seconds[system.name] - before
    usage = done.completions[0].usage
    num = max(1, usage.num_draft_tokens)
    return {
        "seconds": 1 / done.tokens_per_s,
        "drafting": spent / num,
        "accepted": usage.num_accepted_tokens / num,
    }


def verdicts(found: ServedRequests) -> list[ClaimVerdict]:
    by_domain = found.of_domain
    chosen = np.array([by_domain[domain] for domain in found.domains])
    # The next request is of the next domain.
    shown = np.arange(_SHOWN)
    again = replace(found, seconds=found.seconds[::-1])
    hindsight = np.array([again.of_domain[domain] for domain in found.domains])
    # Of requests that differ, if any do.
    others = np.unique(found.best, return_index=True)[1]
    return [
        check(
            "requests differ in their best drafter (figure 2)",
            choice_pays,
            (found, found.best),
            "the best of the next request",
            (found, np.roll(found.best, -1)),
            ("the best in the second pass", (found, again.best)),
        ),
        check(
            "data sets differ in their best drafter (figure 2)",
            choice_pays,
            (found, chosen),
            "the best of the next domain",
            (found, np.roll(chosen, -1)),
            ("the best in the second pass", (found, hindsight)),
        ),
        check(
            "of three requests the fastest drafter is not the best for all (figure 3)",
            three,
            (found, shown),
            "three times the same request",
            (found, shown * 0),
            ("a request of each best drafter", (found, others)),
        ),
    ]


def choice_pays(given: tuple[ServedRequests, IntArray]) -> Measurement:
    """Whether these drafters, [requests], are ahead of the best single one in the second pass, and
    who was best for how many requests in the first."""
    found, chosen = given
    seconds = found.seconds[1]
    gain = ratio(seconds[:, found.single], seconds[np.arange(len(chosen)), chosen])
    shares = Counter(found.drafters[j] for j in chosen.tolist())
    told = ", ".join(f"{name} {num / len(chosen):.0%}" for name, num in shares.most_common())
    return Measurement(
        f"{gain.times} the tokens per second of "
        f"{found.drafters[found.single]} for all; chosen: {told}",
        (gain.low > 1,),
    )


def three(given: tuple[ServedRequests, IntArray]) -> Measurement:
    """Of these requests: the fastest drafter, and the best one of each."""
    found, requests = given
    models = [j for j, name in enumerate(found.drafters) if name.startswith("draft")]
    speed = found.drafting[requests][:, models].mean(axis=0)
    fastest = models[int(speed.argmin())]
    best = [models[int(found.seconds[0, i, models].argmin())] for i in requests]
    shown = "; ".join(
        f"{found.domains[i]}: {found.drafters[j]}, {found.accepted[i, j]:.0%} accepted, "
        f"{1e3 * found.seconds[0, i, j]:.3g} ms a token"
        for i, j in zip(requests.tolist(), best, strict=True)
    )
    return Measurement(
        f"{found.drafters[fastest]} drafts fastest; best are {shown}",
        (any(j != fastest for j in best), len(set(best)) > 1),
    )


def _draw(job: Trial, found: ServedRequests) -> None:
    domains = list(dict.fromkeys(found.domains))
    counts = {
        name: [
            sum(d == domain and b == j for d, b in zip(found.domains, found.best, strict=True))
            for domain in domains
        ]
        for j, name in enumerate(found.drafters)
    }
    lines = {name: (domains, shares) for name, shares in counts.items()}
    plot = Plot(lines, {"ylabel": "requests it is best for"}, "o-")
    draw(job.out / f"{NAME}.png", "The best drafter by data set (Spin, figure 2)", [[plot]])


EXPERIMENT = Experiment(NAME, "Figures 2 and 3: who is best for whom, live", run, is_live=True)
