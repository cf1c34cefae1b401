"""What `benchmarks.live_rig` records, read again: figures, GoodSpeed's estimate, a calibration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config import PolicyConfig
from penstock.core.learn.streams import Evidence, Smoothed
from penstock.core.policies.allocation.papers.goodspeed import INITIAL_ACCEPTANCE, GoodSpeed
from penstock.core.state import Outcome, RequestState
from penstock.core.types import Request, Verdict
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.lab.statistics import jain
from penstock.sim.acceptance import CurveAcceptance
from penstock.sim.links import DraftServer, Link
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload

FloatArray = npt.NDArray[np.float64]

_WARM_UP = 20
_BLOCKS = 10
_LONGEST = 16
_FEWEST = 20
_MOVING = 10
_BLOCK = 4096
_LEAST_TOKEN_S = 1e-4


class DraftSeconds(NamedTuple):
    """A draft's tokens and seconds; `fresh`: nothing of it can have been drafted ahead."""

    num_tokens: int
    seconds: float
    fresh: bool


class ClientAnswer(NamedTuple):
    """What a verification came to for one client."""

    num_proposed: int
    num_decided: int
    num_tokens: int


class TargetStep(NamedTuple):
    """A step of the target: when it ended, and what each client got."""

    at: float
    seconds: float
    work: StepWork
    answers: dict[str, ClientAnswer]


@dataclass
class RoundsRecord:
    """One run, from the round on in which every client has been served for a while."""

    clients: tuple[str, ...]
    steps: list[TargetStep] = field(default_factory=list)
    drafts: dict[str, list[DraftSeconds]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, clients: Iterable[str], rounds: int) -> RoundsRecord:
        """At most so many rounds, and one before them, which only begins the time."""
        record = cls(tuple(clients))
        record.drafts = {name: [] for name in record.clients}
        fresh = dict.fromkeys(record.clients, True)
        unseen, warm_up = set(record.clients), _WARM_UP
        for line in path.read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            if "draft" in data:
                name = data["draft"]
                if not warm_up:
                    drafted = DraftSeconds(data["tokens"], data["seconds"], fresh[name])
                    record.drafts[name].append(drafted)
                continue
            answers = {name: ClientAnswer(*rest) for name, *rest in data["verdicts"]}
            for name, answer in answers.items():
                fresh[name] = answer.num_tokens <= answer.num_proposed
            unseen -= set(answers)
            if unseen or not answers:
                continue
            warm_up = max(0, warm_up - 1)
            if not warm_up:
                work = StepWork(*data["work"])
                record.steps.append(TargetStep(data["at"], data["seconds"], work, answers))
                if len(record.steps) > rounds:
                    break
        return record

    @property
    def rounds(self) -> Sequence[TargetStep]:
        return self.steps[1:]

    @property
    def seconds(self) -> float:
        return self.steps[-1].at - self.steps[0].at

    def tokens(self) -> FloatArray:
        """Of each client in each round, shape [rounds, clients]."""
        nothing = ClientAnswer(0, 0, 0)
        return np.array(
            [[s.answers.get(n, nothing).num_tokens for n in self.clients] for s in self.rounds],
            dtype=np.float64,
        )

    def figures(self) -> dict[str, Any]:
        """Rates of all clients together, of the smallest, and how even they are."""
        tokens = self.tokens()
        by_round = tokens.mean(axis=0)
        each = len(tokens) / self.seconds
        answers = [a for s in self.rounds for a in s.answers.values()]
        drafted = sum(a.num_proposed for a in answers)
        accepted = sum(a.num_tokens - 1 for a in answers)
        return {
            "rounds": len(tokens),
            "seconds": self.seconds,
            "round_ms": 1e3 / each,
            "per_round": _shares(by_round),
            "per_second": _shares(by_round * each),
            "sum_log_error": _error(tokens),
            "jain": jain(by_round),
            "draft_tokens_per_round": drafted / len(tokens),
            "accepted_share": accepted / max(drafted, 1),
            "clients": dict(zip(self.clients, by_round.tolist(), strict=True)),
        }


def _shares(rates: FloatArray) -> dict[str, float]:
    return {
        "total": float(rates.sum()),
        "sum_log": float(np.log(rates).sum()),
        "smallest": float(rates.min()),
    }


def _error(tokens: FloatArray) -> float:
    """Half an interval at 95% of the sum of logarithms, by leaving out a tenth of the rounds: the
    jackknife's error, (n - 1) / sqrt(n) deviations of what is found without each of n."""
    blocks = np.array_split(np.arange(len(tokens)), _BLOCKS)
    found = [np.log(np.delete(tokens, block, axis=0).mean(axis=0)).sum() for block in blocks]
    return float(2.26 * (_BLOCKS - 1) / np.sqrt(_BLOCKS) * np.std(found, ddof=1))


# --- GoodSpeed's estimates ------------------------------------------------------------------------


def estimates(record: RoundsRecord) -> dict[str, float]:
    """The literal policy's estimates, replayed over the verdicts, against what was realised.

    total, worst_client: relative difference of the means of X (eq. 4) and goodput
    correlation: of ten-round moving averages of the sums
    expected: worst client's difference where goodput is what α̂ makes of the draft's length (eq. 3
        over the decided positions: the record has no others)
    """
    policy = GoodSpeed(GoodSpeed.Options())
    eta = policy.options.eta
    acceptance = {n: Smoothed(INITIAL_ACCEPTANCE, eta, decided_only=True) for n in record.clients}
    states = {n: RequestState(Request(n, 1, 1, tenant=n), i) for i, n in enumerate(record.clients)}
    rows = []
    sums: dict[str, list[tuple[float, float]]] = {n: [] for n in record.clients}
    for step in record.rounds:
        outcomes = []
        for name, answer in step.answers.items():
            evidence = Evidence(answer.num_proposed, answer.num_decided, answer.num_tokens - 1)
            rate, model = acceptance[name].rate(), acceptance[name]
            hoped = float((rate ** np.arange(answer.num_proposed + 1)).sum())
            sums[name].append((hoped, answer.num_tokens))
            model.observe(evidence)
            outcomes.append(Outcome(states[name], _verdict(name, answer)))
        policy.observe(outcomes, step.at)
        rows.append([policy.goodput(name) for name in record.clients])
    real, found = record.tokens(), np.array(rows)
    present = real > 0
    means = np.array([(found[p, i].mean(), real[p, i].mean()) for i, p in enumerate(present.T)])
    expected = np.array([np.mean(sums[name], axis=0) for name in record.clients])
    together = np.corrcoef(_moving((found * present).sum(axis=1)), _moving(real.sum(axis=1)))
    return {
        "total": float(means[:, 0].sum() / means[:, 1].sum() - 1),
        "worst_client": float(np.abs(means[:, 0] / means[:, 1] - 1).max()),
        "correlation": float(together[0, 1]),
        "expected": float(np.abs(expected[:, 0] / expected[:, 1] - 1).max()),
    }


def _verdict(name: str, answer: ClientAnswer) -> Verdict:
    return Verdict(
        name,
        0,
        0,
        (0,) * answer.num_tokens,
        name if answer.num_proposed else None,
        answer.num_proposed,
        answer.num_tokens - 1,
        answer.num_decided,
        float(answer.num_tokens - 1),
    )


def _moving(values: FloatArray) -> FloatArray:
    return np.convolve(values, np.full(_MOVING, 1 / _MOVING), mode="valid")


# --- the simulator --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatorInputs:
    """What the simulator is told, from runs at one delay.

    survival: for each server, the probability that at least 1, 2, … of its tokens are accepted
    shares: part of a client's tokens that is left by the rounds between its requests
    round_trip: injected seconds in those runs
    """

    profile: StepProfile
    servers: tuple[DraftServer, ...]
    survival: Mapping[str, Sequence[float]]
    shares: Mapping[str, float]
    round_trip: float

    def predict(
        self, allocation: dict[str, Any], pipeline: str, round_trip: float, seconds: float
    ) -> dict[str, float]:
        """Rates at another injected round trip."""
        names = [s.name for s in self.servers]
        change = (round_trip - self.round_trip) / 2
        servers = tuple(
            DraftServer(
                s.name,
                s.seconds_per_token,
                Link(max(0.0, s.link.latency + change), s.link.jitter),
                draft_ahead=s.draft_ahead,
                tenant=s.name,
            )
            for s in self.servers
        )
        setup = Setup(
            self.profile,
            allocation=PolicyConfig.of(allocation["name"], **allocation["options"]),
            acceptance=CurveAcceptance(self.survival),
            draft_servers=servers,
            pipeline=pipeline,
            block_size=_BLOCK,
            kv_tokens=_BLOCK * 300 * len(names),
        )
        num = len(names)
        endless = np.full(num, 10**6)
        load = Workload("endless", np.full(num, 8), endless, np.zeros(num), np.array(names))
        report = run(setup, load, until=seconds)
        rates = report.num_tokens / report.result.finished_at
        return _shares(rates * np.array([self.shares[n] for n in names]))


def calibrate(
    records: Sequence[RoundsRecord], equal: RoundsRecord, round_trip: float
) -> SimulatorInputs:
    """Fit what the simulator needs. records: runs under all policies; equal: one with a barrier and
    equal lengths, which shows what is lost between requests."""
    return SimulatorInputs(
        _profile(records),
        tuple(_server(name, records) for name in equal.clients),
        {name: _survival(name, records) for name in equal.clients},
        {name: _share(name, equal) for name in equal.clients},
        round_trip,
    )


def _profile(records: Sequence[RoundsRecord]) -> StepProfile:
    """A line through the seconds of steps without prefill; what prefill adds is spread over all."""
    steps = [s for r in records for s in r.rounds]
    rows = np.array([s.work.num_decodes + s.work.num_draft_tokens for s in steps], dtype=float)
    seconds = np.array([s.seconds for s in steps])
    plain = np.array([not s.work.num_prefill_tokens for s in steps])
    slope = max(0.0, float(np.polyfit(rows[plain], seconds[plain], 1)[0]))
    fixed = max(1e-4, float(seconds.mean() - slope * rows.mean()))
    return StepProfile("live", 10**9, (0, 1000), (fixed, fixed + 1000 * slope))


def _server(name: str, records: Sequence[RoundsRecord]) -> DraftServer:
    """Round trip and seconds of a token, from drafts of which nothing was there before."""
    drafts = [d for r in records for d in r.drafts[name] if d.num_tokens]
    tokens, seconds = np.array([d[:2] for d in drafts if d.fresh]).T
    slope = _LEAST_TOKEN_S
    if np.ptp(tokens):
        slope = max(slope, float(np.polyfit(tokens, seconds, 1)[0]))
    trips = seconds - slope * tokens
    trip = max(0.0, float(trips.mean()))
    # Two messages with an exponential delay each have this spread together.
    jitter = min(float(trips.std()) / np.sqrt(2), trip / 2)
    ahead = 1 + round(np.mean([d.num_tokens for d in drafts]))
    return DraftServer(
        name, slope, Link(max(0.0, trip / 2 - jitter), jitter), draft_ahead=ahead, tenant=name
    )


def _survival(name: str, records: Sequence[RoundsRecord]) -> list[float]:
    """Probability that at least 1, 2, … draft tokens are accepted (Kaplan and Meier); where drafts
    are too few, with the mean acceptance."""
    answers = [s.answers[name] for r in records for s in r.rounds if name in s.answers]
    decided = sum(a.num_decided for a in answers)
    mean = sum(a.num_tokens - 1 for a in answers) / max(decided, 1)
    survival, curve = 1.0, []
    for s in range(1, _LONGEST + 1):
        tried = [a for a in answers if a.num_proposed >= s and a.num_tokens >= s]
        kept = sum(a.num_tokens > s for a in tried)
        survival *= kept / len(tried) if len(tried) >= _FEWEST else mean
        curve.append(survival)
    return curve


def _share(name: str, record: RoundsRecord) -> float:
    drafted = [
        s.answers[name].num_tokens
        for s in record.rounds
        if name in s.answers and s.answers[name].num_proposed
    ]
    index = record.clients.index(name)
    return float(record.tokens()[:, index].mean() / np.mean(drafted))
