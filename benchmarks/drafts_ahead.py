"""Draft servers that send ahead, on the virtual clock: tokens a second, near and far.

    python -m benchmarks.drafts_ahead [--quick] [--json]

Acceptance is recorded from the bundled family: along texts that `target-large` samples at
temperature 1, whether `draft-base`'s first choice under the same noise is the target's token, or
its runner-up. Every policy replays the same record, from a start of its own for each request. Draft
12 ms a token, and 6 ms for each line more that a step drafts beside the first; drafting times and
round trips log-normal over the servers (sd 0.5); verification 30 or 100 ms and 0.2 ms a position;
C = 2.5 N; one endless request a server. Servers that do not send ahead draft ahead and wait, as
they do today. Five seeds, the same for every policy; intervals are of the paired differences of
logarithms, at 95% (Student's t).

`bound` is what no policy exceeds with these servers: verification takes every right draft token
that has arrived, no wrong one, and waits for nobody; drafters are never held up, and get the
runner-up for nothing. What is left is that a token takes its drafting time, and that behind one
that is neither first choice nor runner-up nothing is right that was drafted before its verdict.
Without runner-ups the same is so behind every token that is not the first choice: nothing of what
would go on from a runner-up was drafted.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import LlamaForCausalLM

from penstock.config import PolicyConfig
from penstock.core.loop import Instrument
from penstock.core.scheduler import Scheduler
from penstock.core.types import Output, StepPlan, StepResult
from penstock.fluid.step_profile import StepProfile
from penstock.lab.bench import Results, ResultTable, parser, table, tell
from penstock.lab.claims import ClaimVerdict, bar
from penstock.lab.statistics import SEEDS, FloatArray, Interval, ratio
from penstock.sim.links import DraftServer, Link
from penstock.sim.ranks import RankedAcceptance
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload
from penstock.zoo.evidence import answer_logits, noise, target_texts
from penstock.zoo.registry import DOMAINS, load_prompts, model_path
from penstock.zoo.tokenizer import load_tokenizer

TARGET, DRAFTER = "target-large", "draft-base"
PROMPTS_EACH, TEXT_TOKENS = 3, 128
DRAFT_S, ROW_S, POSITION_S, SPREAD = 0.012, 0.006, 2e-4, 0.5
ROUNDS = 40
BLOCK = 4096
DRAFTED_TODAY = 16
"""Tokens that a draft server drafts ahead of a verdict without sending them."""

MISSED = 2
"""Rank of a token that is neither first choice nor runner-up."""

JUDGED_MS, BAR = 100.0, 1.5


class Policy(NamedTuple):
    allocation: str
    pipeline: str
    sends_ahead: bool = False

    @property
    def title(self) -> str:
        return f"{self.allocation}, {self.pipeline}{', sent ahead' if self.sends_ahead else ''}"


RIVALS = (Policy("deadline", "off"), Policy("deadline", "async"))
OURS = Policy("deadline", "async", True)
POLICIES = (*RIVALS, OURS)


class FarNetwork(NamedTuple):
    """num_servers servers, so far away (in the median); a verification takes `verify_s` beside its
    positions."""

    num_servers: int
    round_trip_s: float
    verify_s: float

    @property
    def seconds(self) -> float:
        """Simulated time: about ROUNDS rounds of a barrier."""
        return ROUNDS * (self.verify_s + self.round_trip_s + 4 * DRAFT_S)

    @property
    def title(self) -> str:
        trip, verify = 1e3 * self.round_trip_s, 1e3 * self.verify_s
        return f"N = {self.num_servers}, round trip {trip:.0f} ms, verification {verify:.0f} ms"


@torch.inference_mode()
def record_ranks(prompts_each: int) -> list[int]:
    """0, 1 or 2 for each token of the target's texts, all domains one after the other."""
    tokenizer = load_tokenizer(model_path(TARGET))
    target, drafter = (
        LlamaForCausalLM.from_pretrained(model_path(name), dtype=torch.float32)
        for name in (TARGET, DRAFTER)
    )
    vocab = int(target.config.vocab_size)
    ranks: list[int] = []
    for domain in DOMAINS:
        prompts = [tokenizer.encode(p.prompt).ids for p in load_prompts(domain)[:prompts_each]]
        noises = [noise(1, n, TEXT_TOKENS, vocab) for n in range(len(prompts))]
        texts = target_texts(target, prompts, noises, TEXT_TOKENS)
        for prompt, text, added in zip(prompts, texts, noises, strict=True):
            scores = answer_logits(drafter, prompt, text) + added[: len(text)]
            best = scores.topk(2, dim=-1).indices.tolist()
            ranks += [pair.index(t) if t in pair else 2 for t, pair in zip(text, best, strict=True)]
    return ranks


class _Watch(Instrument):
    """Counts rounds with a draft that was sent ahead, and looks at the scheduler's counters."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.counters = scheduler.table.counters
        self.num_rounds = self.num_ahead = 0

    def on_plan(self, plan: StepPlan) -> None:
        self.num_rounds += len(plan.items)
        self.num_ahead += sum(bool(i.ahead_token_ids) for i in plan.items)

    def on_result(self, plan: StepPlan, result: StepResult) -> None: ...

    def on_output(self, output: Output) -> None: ...


def servers(network: FarNetwork, seed: int) -> tuple[list[str], FloatArray, FloatArray]:
    """Names, and seconds of a draft token and of a round trip."""
    rng = np.random.default_rng(seed)
    num = network.num_servers
    drafting = DRAFT_S * np.exp(rng.normal(0, SPREAD, num))
    trips = network.round_trip_s * np.exp(rng.normal(0, SPREAD, num))
    return [f"s{i}" for i in range(num)], drafting, trips


def measure(network: FarNetwork, policy: Policy, seed: int, ranks: Sequence[int]) -> dict[str, Any]:
    """One run. Rates are tokens a second; `at_hand`: share of rounds whose draft was sent ahead;
    `sent`: tokens sent ahead for each token of the output."""
    num = network.num_servers
    names, drafting, trips = servers(network, seed)
    verify_s = network.verify_s
    setup = Setup(
        StepProfile("verify", 10**9, (0, 1000), (verify_s, verify_s + 1000 * POSITION_S)),
        allocation=PolicyConfig.of(policy.allocation, total=int(2.5 * num)),
        acceptance=RankedAcceptance(dict.fromkeys(names, ranks), seed),
        draft_servers=tuple(
            DraftServer(
                name,
                float(draft),
                Link(float(trip) / 2),
                draft_ahead=DRAFTED_TODAY,
                tenant=name,
                sends_ahead=policy.sends_ahead,
                row_seconds=ROW_S * float(draft) / DRAFT_S,
            )
            for name, draft, trip in zip(names, drafting, trips, strict=True)
        ),
        pipeline=policy.pipeline,
        block_size=BLOCK,
        kv_tokens=BLOCK * 300 * num,
        seed=seed,
    )
    endless = np.full(num, 10**6)
    load = Workload("endless", np.full(num, 8), endless, np.zeros(num), np.array(names))
    watches: list[_Watch] = []

    def watch(scheduler: Scheduler) -> Instrument:
        watches.append(_Watch(scheduler))
        return watches[0]

    report = run(setup, load, until=network.seconds, watch=watch)
    found = report.num_tokens / report.result.finished_at
    counters = watches[0].counters
    return {
        **policy._asdict(),
        "num_servers": num,
        "round_trip_ms": 1e3 * network.round_trip_s,
        "verify_ms": 1e3 * verify_s,
        "seed": seed,
        "tokens_per_s": float(found.sum()),
        "sum_log_rate": float(np.log(found).sum()),
        "smallest": float(found.min()),
        "at_hand": watches[0].num_ahead / max(1, watches[0].num_rounds),
        "sent": counters.ahead / float(report.num_tokens.sum()),
        "used": counters.ahead_used / max(1, counters.ahead),
    }


def bound(network: FarNetwork, seed: int, ranks: Sequence[int]) -> float:
    """Tokens a second of all requests that no policy exceeds."""
    names, drafting, trips = servers(network, seed)
    acceptance = RankedAcceptance(dict.fromkeys(names, ranks), seed)
    rates = []
    for i, name in enumerate(names):
        rank = partial(acceptance.rank, name, str(i))
        rates.append(_bound_of_one(rank, float(drafting[i]), float(trips[i]) / 2, network))
    return sum(rates)


def without_runner_ups(ranks: Sequence[int]) -> list[int]:
    """The record if no runner-up were ever gone on from."""
    return [0 if rank == 0 else MISSED for rank in ranks]


def _bound_of_one(
    rank: Callable[[int], int], draft_s: float, way_s: float, network: FarNetwork
) -> float:
    """Of a request. rank: of the token at a position of its output."""
    now, said, arrived = 0.0, list[float](), dict[int, float]()
    server, following, num_known = 0.0, 0, 0
    while now < network.seconds:
        while server + draft_s + way_s <= now:
            while num_known < len(said) and said[num_known] + way_s <= server:
                num_known += 1
            following = max(following, num_known)
            missed = following - 1
            if following > num_known and rank(missed) == MISSED:
                if missed >= len(said) or said[missed] + way_s + draft_s + way_s > now:
                    break  # it waits for the verdict
                server = max(server, said[missed] + way_s)
                continue
            server += draft_s
            arrived[following] = server + way_s
            following += 1
        end = len(said)
        while arrived.get(end, math.inf) <= now and rank(end) != MISSED:
            end += 1
        num_more = end + 1 - len(said)
        now += network.verify_s + POSITION_S * num_more
        said += [now] * num_more
    return len(said) / now


def pick(
    runs: Sequence[dict[str, Any]], network: FarNetwork, policy: Policy, figure: str
) -> list[float]:
    """A figure of a policy's runs, in order of their seeds."""
    num, trip, verify = network
    wanted = (*policy, num, 1e3 * trip, 1e3 * verify)
    keys = (*Policy._fields, "num_servers", "round_trip_ms", "verify_ms")
    return [r[figure] for r in runs if tuple(r[k] for k in keys) == wanted]


def gain(runs: Sequence[dict[str, Any]], network: FarNetwork) -> tuple[Policy, Interval]:
    """The better of `deadline`'s pipelines, and how many times as fast sending ahead is."""
    rates = {p: pick(runs, network, p, "tokens_per_s") for p in (*RIVALS, OURS)}
    rival = max(RIVALS, key=lambda p: float(np.mean(rates[p])))
    return rival, ratio(rates[OURS], rates[rival])


def verdicts(runs: Sequence[dict[str, Any]], networks: Sequence[FarNetwork]) -> list[ClaimVerdict]:
    """At the round trip that is judged."""
    told = []
    for network in networks:
        if 1e3 * network.round_trip_s == JUDGED_MS:
            rival, found = gain(runs, network)
            text = f"{OURS.title} over {rival.title}: {found.mean:.2f}x "
            text += f"({found.low:.2f} to {found.high:.2f}; bar {BAR}x)"
            told.append(bar(network.title, text, found.mean >= BAR))
    return told


def means(
    runs: Sequence[dict[str, Any]],
    networks: Sequence[FarNetwork],
    most: Sequence[tuple[float, float]],
) -> ResultTable:
    """A row for each network: means over the seeds. most: the bound of each, and that without
    runner-ups."""
    rows = []
    for network, (limit, first_only) in zip(networks, most, strict=True):
        rates = {p.title: np.mean(pick(runs, network, p, "tokens_per_s")) for p in POLICIES}
        figures = ("at_hand", "sent", "used")
        rival, found = gain(runs, network)
        rows.append(
            network._asdict()
            | {"gain": found.mean, "low": found.low, "high": found.high}
            | {"bound": limit, "most": limit / rates[rival.title]}
            | {"first_only": first_only, "most_first_only": first_only / rates[rival.title]}
            | {f: np.mean(pick(runs, network, OURS, f)) for f in figures}
            | {f"rate {i}": rates[p.title] for i, p in enumerate(POLICIES)}
        )
    columns = {
        "servers": "{num_servers}",
        "round trip, s": "{round_trip_s:g}",
        "verification, s": "{verify_s:g}",
        **{f"{p.title}, tokens/s": f"{{rate {i}:.0f}}" for i, p in enumerate(POLICIES)},
        "over the better `deadline`": "{gain:.2f} ({low:.2f} to {high:.2f})",
        "bound, tokens/s": "{bound:.0f}",
        "bound over the same": "{most:.2f}",
        "without runner-ups, tokens/s": "{first_only:.0f}",
        "over the same": "{most_first_only:.2f}",
        "draft at hand": "{at_hand:.0%}",
        "sent ahead per token": "{sent:.1f}",
        "of them verified": "{used:.0%}",
    }
    return table("", rows, columns)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser(__doc__, quick="one seed, N = 4").parse_args(arguments)
    sizes, seeds, prompts = ((4,), SEEDS[:1], 2) if args.quick else ((4, 16), SEEDS, PROMPTS_EACH)
    ranks = record_ranks(prompts)
    shares = [ranks.count(rank) / len(ranks) for rank in range(3)]
    networks = [FarNetwork(*n) for n in itertools.product(sizes, (0.03, 0.1, 0.3), (0.03, 0.1))]
    jobs = list(itertools.product(networks, POLICIES, seeds))
    console = Console(file=sys.stderr)
    runs = [measure(*job, ranks) for job in track(jobs, "simulating", console=console)]
    said = f"{shares[0]:.3f} first choice, {shares[1]:.3f} runner-up, of {len(ranks)} tokens"
    told = [bar("the target's token is", said, None), *verdicts(runs, networks)]
    records = (ranks, without_runner_ups(ranks))
    most = []
    for network in networks:
        rates = ([bound(network, seed, record) for seed in seeds] for record in records)
        limit, first_only = (float(np.mean(found)) for found in rates)
        most.append((limit, first_only))
    return tell(args, Results(runs, told, [means(runs, networks, most)]))


if __name__ == "__main__":
    sys.exit(main())
