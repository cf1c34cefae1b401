"""Acceptance models: numbers of accepted draft tokens without a target model.

They depend on the request, its position and its round, not on the batch or the order of events."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import DraftOrder, VerifyItem
from penstock.sim.domains import AcceptanceFit
from penstock.sim.traces import WorkloadError, read_json_lines

_Array = NDArray[np.floating[Any]]

_NODES = 40
"""Gauss-Hermite nodes, far more than the smooth integrand needs."""
_JITTER = 1e-4
"""Added to covariances: files round them, and drafters without variation have zeros."""


class AcceptanceModel(Protocol):
    """Numbers of draft tokens that the target would accept."""

    def num_accepted(self, item: VerifyItem, position: int) -> int:
        """Return the accepted draft tokens of an item. position: output tokens before it."""
        ...

    def num_right_behind(self, item: VerifyItem, position: int, num_accepted: int) -> int:
        """Return the draft tokens behind the first rejected one that the target would say, too."""
        ...

    def num_matched(self, order: DraftOrder, positions: range) -> int:
        """Return the output tokens at `positions` that the order's drafter would have guessed."""
        ...

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        """Return the expected accepted draft tokens + 1 of one verification."""
        ...


@dataclass(frozen=True, slots=True)
class GeometricAcceptance:
    """Constant acceptance probability by drafter, up to the first rejection."""

    rates: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def num_accepted(self, item: VerifyItem, position: int) -> int:
        if not item.num_draft_tokens or item.drafter is None:
            return 0
        rate = self.rates[item.drafter]
        if rate <= 0 or rate >= 1:
            return item.num_draft_tokens if rate >= 1 else 0
        run = math.log(_draw(self.seed, item)) / math.log(rate)
        return min(item.num_draft_tokens, int(run))

    def num_right_behind(self, item: VerifyItem, position: int, num_accepted: int) -> int:
        num_behind = item.num_draft_tokens - num_accepted - 1
        if num_behind <= 0 or item.drafter is None:
            return 0
        return _num_right(self.seed, item, [self.rates[item.drafter]] * num_behind)

    def num_matched(self, order: DraftOrder, positions: range) -> int:
        return _num_matched(self.seed, order, positions, self.rates[order.drafter])

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        return 1.0 + sum(self.rates[drafter] ** s for s in range(1, num_draft_tokens + 1))


class _Delegating(ABC):
    """A model that has another one for each drafter, request and round."""

    @abstractmethod
    def _model(self, drafter: str, request_id: str, round_: int) -> AcceptanceModel: ...

    def num_accepted(self, item: VerifyItem, position: int) -> int:
        if not item.num_draft_tokens or item.drafter is None:
            return 0
        model = self._model(item.drafter, item.request_id, item.round)
        return model.num_accepted(item, position)

    def num_right_behind(self, item: VerifyItem, position: int, num_accepted: int) -> int:
        if item.drafter is None:
            return 0
        model = self._model(item.drafter, item.request_id, item.round)
        return model.num_right_behind(item, position, num_accepted)

    def num_matched(self, order: DraftOrder, positions: range) -> int:
        model = self._model(order.drafter, order.request_id, order.round)
        return model.num_matched(order, positions)


@dataclass(frozen=True, slots=True)
class DriftingAcceptance(_Delegating):
    """`GeometricAcceptance` whose rates change every `dwell` rounds of a request, in a cycle."""

    rates: Mapping[str, Sequence[float]]
    dwell: int
    seed: int = 0

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        """Return the mean over its probabilities."""
        rates = self.rates[drafter]
        steps = range(1, num_draft_tokens + 1)
        return 1.0 + sum(rate**s for rate in rates for s in steps) / len(rates)

    def _model(self, drafter: str, request_id: str, round_: int) -> AcceptanceModel:
        rates = self.rates[drafter]
        return GeometricAcceptance({drafter: rates[round_ // self.dwell % len(rates)]}, self.seed)


@dataclass(frozen=True, slots=True)
class CurveAcceptance:
    """Acceptance by survival curve: P(at least s draft tokens accepted), s = 1, 2, ..., then 0."""

    survival: Mapping[str, Sequence[float]]
    seed: int = 0

    def __post_init__(self) -> None:
        for name, curve in self.survival.items():
            falling = all(a >= b for a, b in pairwise((1.0, *curve, 0.0)))
            if not curve or not falling:
                raise WorkloadError(
                    f"drafter {name!r}: an acceptance curve falls from at most 1 to at least 0, "
                    f"not {', '.join(f'{g:g}' for g in curve)}"
                )

    def num_accepted(self, item: VerifyItem, position: int) -> int:
        if not item.num_draft_tokens or item.drafter is None:
            return 0
        curve = self.survival[item.drafter][: item.num_draft_tokens]
        draw = _draw(self.seed, item)
        return sum(draw <= g for g in curve)

    def num_right_behind(self, item: VerifyItem, position: int, num_accepted: int) -> int:
        """Take each place as likely as if all before it were right."""
        if item.drafter is None:
            return 0
        curve = (1.0, *self.survival[item.drafter][: item.num_draft_tokens])
        rates = [b / a if a else 0.0 for a, b in pairwise(curve)]
        return _num_right(self.seed, item, rates[num_accepted + 1 :])

    def num_matched(self, order: DraftOrder, positions: range) -> int:
        return _num_matched(self.seed, order, positions, self.survival[order.drafter][0])

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        return 1.0 + sum(self.survival[drafter][:num_draft_tokens])


@dataclass(frozen=True, slots=True)
class RecordedAcceptance:
    """Replays measured acceptance by position.

    records: by drafter, rows of tokens (accepted + 1) of a verification at each output position
    with the recorded draft length; a draft of S tokens advances by min(that, S + 1). A request gets
    a row by its id and `seed`, the same for drafters with equally many rows, in a cycle."""

    records: Mapping[str, Sequence[Sequence[int]]]
    seed: int = 0

    def num_accepted(self, item: VerifyItem, position: int) -> int:
        if not item.num_draft_tokens or item.drafter is None:
            return 0
        row = self._row(item.drafter, item.request_id)
        return min(row[position % len(row)] - 1, item.num_draft_tokens)

    def num_right_behind(self, item: VerifyItem, position: int, num_accepted: int) -> int:
        """Count positions where a new draft would be right; wrong prefixes were not recorded."""
        if item.drafter is None:
            return 0
        row = self._row(item.drafter, item.request_id)
        behind = range(position + num_accepted + 1, position + item.num_draft_tokens)
        return sum(row[p % len(row)] > 1 for p in behind)

    def num_matched(self, order: DraftOrder, positions: range) -> int:
        row = self._row(order.drafter, order.request_id)
        return sum(row[position % len(row)] > 1 for position in positions)

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        """Return the mean over every row, walked from its start."""
        tokens = rounds = 0
        for row in self.records[drafter]:
            position = 0
            while position < len(row):
                position += min(row[position], num_draft_tokens + 1)
                rounds += 1
            tokens += position
        return tokens / rounds

    def _row(self, drafter: str, request_id: str) -> Sequence[int]:
        rows = self.records[drafter]
        return rows[digest(f"{self.seed}/{request_id}") % len(rows)]


@dataclass(frozen=True)
class DomainAcceptance(_Delegating):
    """Geometric acceptance with probabilities drawn for each request from its domain.

    The draw is joint over all drafters. fit: of the domains; `load_acceptance()` is the bundled
    family's. tenants: of the requests "0", "1", ...: a tenant named like a domain has requests of
    that domain; others draw a domain uniformly."""

    fit: AcceptanceFit
    seed: int = 0
    tenants: Sequence[str] = ()

    def _model(self, drafter: str, request_id: str, round_: int) -> AcceptanceModel:
        return GeometricAcceptance(self.rates(request_id), self.seed)

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        """Return the mean over the requests of all domains."""
        column = self.fit.drafters.index(drafter)
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
        steps = np.arange(num_draft_tokens + 1)
        means = []
        for fit in self.fit.domains.values():
            deviation = math.sqrt(fit.covariance[column][column])
            rates = _probability(fit.mean[column] + deviation * nodes)
            means.append(weights @ (rates[:, None] ** steps).sum(1) / weights.sum())
        return float(np.mean(means))

    def domain_of(self, request_id: str) -> str:
        if self.tenants and request_id.isdecimal() and int(request_id) < len(self.tenants):
            tenant = str(self.tenants[int(request_id)])
            if tenant in self.fit.domains:
                return tenant
        names = list(self.fit.domains)
        return names[digest(f"{self.seed}/{request_id}/domain") % len(names)]

    def rates(self, request_id: str, domain: str | None = None) -> dict[str, float]:
        """Return a request's acceptance probability by drafter; as if of `domain`, if given."""
        domain = domain or self.domain_of(request_id)
        known = self._rates.get((request_id, domain))
        if known is None:
            mean, factor = self._factors[domain]
            stream = np.random.default_rng(digest(f"{self.seed}/{request_id}/rates"))
            drawn = _probability(mean + factor @ stream.standard_normal(len(mean)))
            known = dict(zip(self.fit.drafters, drawn.tolist(), strict=True))
            self._rates[request_id, domain] = known
        return known

    @cached_property
    def _rates(self) -> dict[tuple[str, str], dict[str, float]]:
        return {}

    @cached_property
    def _factors(self) -> dict[str, tuple[_Array, _Array]]:
        """Mean and Cholesky factor of the covariance of each domain."""
        factors: dict[str, tuple[_Array, _Array]] = {}
        for name, fit in self.fit.domains.items():
            jitter = _JITTER * np.eye(len(fit.mean))
            try:
                factor = np.linalg.cholesky(np.array(fit.covariance) + jitter)
            except np.linalg.LinAlgError as error:
                raise WorkloadError(f"domain {name!r} has no proper covariance") from error
            factors[name] = np.array(fit.mean), factor
        return factors


def of_tenants(model: AcceptanceModel, tenants: Sequence[str]) -> AcceptanceModel:
    """Return the model with the requests' tenants."""
    if isinstance(model, DomainAcceptance):
        return replace(model, tenants=tenants)
    if isinstance(model, AcceptanceByDrafter):
        return AcceptanceByDrafter({n: of_tenants(m, tenants) for n, m in model.models.items()})
    return model


@dataclass(frozen=True, slots=True)
class AcceptanceByDrafter(_Delegating):
    """Drafters with a model each."""

    models: Mapping[str, AcceptanceModel]

    def _model(self, drafter: str, request_id: str, round_: int) -> AcceptanceModel:
        return self.models[drafter]

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        return self.models[drafter].tokens_per_step(drafter, num_draft_tokens)


def parse_drafters(
    texts: Sequence[str], seed: int = 0, fit: AcceptanceFit | None = None
) -> AcceptanceByDrafter:
    """Parse drafters, in the order given. Raises: WorkloadError.

    `NAME=RATE`, `NAME=G1,G2,…` (a survival curve), or `NAME=FILE` with records (`read_records`)
    under that name; a bare NAME is one of `fit`, and no text at all means all of these. Drafters of
    one file share its rows: a request replays the same row with each of them."""
    models: dict[str, AcceptanceModel] = {}
    files: dict[str, list[str]] = {}
    by_domain = None if fit is None else DomainAcceptance(fit, seed)
    for text in texts or (() if fit is None else fit.drafters):
        name, given, value = text.partition("=")
        if name in models:
            raise WorkloadError(f"--drafter: {name!r} is given twice")
        if by_domain is not None and not given:
            models[name] = by_domain
            _check_fitted(name, by_domain.fit)
            continue
        if not given or not name or not value:
            raise WorkloadError(
                f"a drafter is NAME=RATE, NAME=G1,G2,... or NAME=FILE, not {text!r}"
            )
        numbers = _numbers(value)
        if numbers is None:
            files.setdefault(value, []).append(name)
            models[name] = AcceptanceByDrafter({})
        elif len(numbers) > 1:
            models[name] = CurveAcceptance({name: numbers}, seed)
        elif 0 <= numbers[0] <= 1:
            models[name] = GeometricAcceptance({name: numbers[0]}, seed)
        else:
            raise WorkloadError(f"drafter {name!r}: an acceptance rate is from 0 to 1, not {value}")
    for path, names in files.items():
        recorded = RecordedAcceptance(read_records(Path(path), names), seed)
        models |= dict.fromkeys(names, recorded)
    return AcceptanceByDrafter(models)


def _check_fitted(name: str, fit: AcceptanceFit) -> None:
    if name not in fit.drafters:
        known = ", ".join(fit.drafters)
        raise WorkloadError(f"no acceptance was fitted for drafter {name!r}; there are {known}")


def read_records(path: Path, drafters: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return rows of recorded acceptance of some drafters, for `RecordedAcceptance`.

    path: JSON lines, optionally gzipped; an object a line, with an array of positive integers under
    each drafter's name, or null. Rows without an array for every drafter asked for, or with arrays
    of different length (of different texts), are left out. Raises: WorkloadError."""
    rows: dict[str, list[list[int]]] = {name: [] for name in drafters}
    found: set[str] = set()
    for number, record in read_json_lines(path):
        found |= {name for name, values in record.items() if isinstance(values, list)}
        arrays = [record.get(name) for name in drafters]
        if not all(arrays) or len({len(a) for a in arrays if a}) > 1:
            continue
        for name, array in zip(drafters, arrays, strict=True):
            if not all(type(x) is int and x >= 1 for x in array or ()):
                raise WorkloadError(f"{path}, line {number}: {name} is not an array of 1 or more")
            rows[name].append(array or [])
    if not all(rows.values()):
        wanted = " and ".join(repr(name) for name in drafters)
        known = ", ".join(sorted(found)) or "none"
        raise WorkloadError(f"{path} has no records of {wanted}; it has {known}")
    return rows


def _numbers(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return None


def _probability(logits: _Array) -> _Array:
    return np.asarray(1 / (1 + np.exp(-logits)))


def _draw(seed: int, item: VerifyItem) -> float:
    """Return a uniform draw in (0, 1] by (seed, request, round, drafter)."""
    return (digest(f"{seed}/{item.request_id}/{item.round}/{item.drafter}") + 1) / 2**64


def _num_right(seed: int, item: VerifyItem, rates: Sequence[float]) -> int:
    """Return the number of right tokens, independent with these probabilities."""
    if not rates:
        return 0
    key = f"{seed}/{item.request_id}/{item.round}/{item.drafter}/behind"
    draws = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * len(rates)), dtype="<u4")
    return sum((draw + 1) / 2**32 <= rate for draw, rate in zip(draws.tolist(), rates, strict=True))


def _num_matched(seed: int, order: DraftOrder, positions: range, rate: float) -> int:
    key = f"{seed}/{order.request_id}/{order.drafter}/match"
    return sum((digest(f"{key}/{p}") + 1) / 2**64 <= rate for p in positions)


def digest(key: str) -> int:
    """Return a hash of 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
