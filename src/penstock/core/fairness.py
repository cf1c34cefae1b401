"""Weighted fairness between tenants, for any admission policy.

Waiting requests are ordered by the tenants' counters (`accounts`). Requests of tenants that were
served more are preempted where they hold memory or places that others need; tenants with more than
their share, by which all others are slowed, have requests paused."""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.core.accounts import UNITS, Account, Accounts
from penstock.core.learn import Estimators
from penstock.core.policies.base import AdmissionPolicy
from penstock.core.state import RequestState
from penstock.core.step import Step, newest
from penstock.fluid.step_profile import StepWork


class _Bounds(NamedTuple):
    """Most that tenants may lose to one another. Chosen by hand.

    slowdown: of a tenant below its share, over what a server of its share adds: at 0.15 half a
    server by 15%, a tenth of one by 135%. cost: throughput that pauses may take, over all; the
    slowdown may then be more."""

    slowdown: float
    cost: float


_SHARES = _Bounds(slowdown=1.0, cost=1 / 3)
_STRICT = _Bounds(slowdown=0.15, cost=1.0)
_GROWTH = 1.25
"""Growth of the requests at work a step when there is room again: tenants with little to do come
and go, and a hundred prompts at once would delay them."""
_BISECTION_ROUNDS = 16  # precise to a 65,536th of the interval


class Fairness:
    """Fairness between the tenants of a scheduler.

    is_strict: a tenant below its share hardly notices the others, whatever that costs them."""

    def __init__(self, accounts: Accounts, learn: Estimators, *, is_strict: bool = False) -> None:
        self._bounds = _STRICT if is_strict else _SHARES
        self._accounts = accounts
        self._learn = learn
        self._seen = -1
        self._is_growing = False
        self._taking_turns: list[Account] = []

    def compose(self, step: Step, admission: AdmissionPolicy, *, may_pause: bool) -> None:
        """Let the admission policy compose the step, after preemptions and pauses for fairness."""
        accounts = self._accounts
        accounts.lift_returned()
        if self._is_growing or self._seen != accounts.num_changes:
            self._pace(step, may_pause=may_pause)
            self._seen = accounts.num_changes
        if step.waiting and len(accounts.present) > 1:
            self._make_way(step, admission)
        if self._taking_turns:
            self._take_turns(step)
        admission.compose(step)
        if self._taking_turns and not step.num_tokens:
            # No other requests can run now.
            self._take_turns(step, at_once=True)
            admission.compose(step)

    def is_steady(self, step: Step) -> bool:
        """Return whether the next step would be composed alike."""
        is_contested = step.waiting and len(self._accounts.present) > 1
        return not (self._is_growing or self._taking_turns or is_contested)

    # --- memory and places ----------------------------------------------------------------------

    def victim(self, step: Step) -> RequestState | None:
        """Return the request to preempt: the newest paused, or of the tenant furthest over."""
        if len(self._accounts.present) < 2:
            return newest(step)
        held = self._held(step)
        last: dict[str, RequestState] = {}
        for state in reversed(step.running.values()):
            if step.can_preempt(state):
                if state.request.id in self._accounts.paused:
                    return state
                last.setdefault(state.request.tenant, state)
        return max(last.values(), key=lambda s: held[s.request.tenant], default=None)

    def _held(self, step: Step) -> dict[str, float]:
        """Return KV tokens of each tenant's running requests, over its weight."""
        held: dict[str, float] = dict.fromkeys(self._accounts.present, 0.0)
        for name, tokens in step.kv_tokens_by_tenant():
            held[name] = held.get(name, 0.0) + tokens
        present = self._accounts.present
        return {n: tokens / present[n].tenant.weight for n, tokens in held.items() if n in present}

    def _make_way(self, step: Step, admission: AdmissionPolicy) -> None:
        """Preempt for the first waiting request, if memory or places delay it for too long.

        That is longer than its own prompt takes on a server of its tenant's share; and it must not
        need more than that share. The newest requests of the tenant that is furthest over its share
        go, once it was served more by their cost of recomputation, which the other pays."""
        firsts = [s for q in step.waiting.queues if (s := q.first) is not None]
        if not firsts:
            return
        first = min(firsts, key=self._accounts.rank)
        own = self._accounts.account_of(first)
        prices, present = self._accounts.prices, self._accounts.present
        share = own.tenant.weight / sum(a.tenant.weight for a in present.values())
        prompt = prices.prompt(0, first.num_known_tokens)
        if (step.now - first.request.arrival_time) * UNITS * share < prompt:
            return
        blocks, places = admission.shortage(step, first)
        if blocks <= 0 and places <= 0:
            return
        held = self._held(step)
        wanted = held.get(first.request.tenant, 0.0) * own.tenant.weight + first.num_known_tokens
        if wanted > share * step.pool.capacity_tokens:
            return
        if own.num_running + 1 > max(1.0, share * len(step.running)):
            return
        most = max(held, key=held.__getitem__, default="")
        if present.get(most, own) is own:
            return
        victims, cost = [], 0
        for state in reversed(step.running.values()):
            if blocks <= 0 and places <= 0:
                break
            if state.request.tenant == most and step.can_preempt(state):
                victims.append(state)
                if state.request.id not in self._accounts.paused:
                    cost += prices.prompt(0, state.num_known_tokens)
                blocks -= step.pool.blocks_for(state.num_known_tokens)
                places -= 1
        self._accounts.settle()
        owed = (present[most].counter - own.counter) * own.tenant.weight
        if blocks > 0 or places > 0 or (cost and owed < cost):
            return
        own.charge(cost)
        for state in victims:
            step.displace(state)

    # --- who decodes ----------------------------------------------------------------------------

    def _pace(self, step: Step, *, may_pause: bool) -> None:
        """Set each tenant's requests at work, and pause the newest of the others."""
        present = self._accounts.present.values()
        level = self._level(list(present), step) if may_pause else math.inf
        self._is_growing = False
        for account in present:
            most = _whole(level * account.tenant.weight)
            if most >= max(1, account.num_requests):
                most = math.inf
            allowed = max(account.most_at_work * _GROWTH, account.most_at_work + 1)
            if most > allowed:
                self._is_growing = allowed < account.num_requests
                most = allowed if self._is_growing else math.inf
            account.most_at_work = most
        self._taking_turns = [a for a in present if a.most_at_work < 1]
        self._pause(step)

    def _take_turns(self, step: Step, *, at_once: bool = False) -> None:
        """Run the oldest request of each tenant with less than one at work when its turn comes."""
        turns = {}
        for account in self._taking_turns:
            account.turn = 1.0 if at_once else account.turn + account.most_at_work
            turns[account.tenant.name] = account.turn >= 1
            account.turn -= turns[account.tenant.name]
        for state in step.running.values():
            runs = turns.pop(state.request.tenant, None)
            if runs is True:
                step.resume(state)
            elif runs is False:
                step.pause(state)

    def _pause(self, step: Step) -> None:
        limited = [a for a in self._accounts.present.values() if a.most_at_work < math.inf]
        paused = self._accounts.paused
        if not limited and not paused:
            return
        left = {a.tenant.name: max(1.0, a.most_at_work) for a in limited}
        for state in list(step.running.values()):
            name = state.request.tenant
            pauses = name in left and left[name] < 1
            if name in left:
                left[name] -= 1
            if pauses:
                step.pause(state)
            else:
                step.resume(state)

    def _level(self, accounts: list[Account], step: Step) -> float:
        """Return the requests at work for a weight of 1 that slow no tenant beyond its share.

        More where pausing the others would cost too much throughput."""
        if len(accounts) < 2:
            return math.inf
        needs = [(a.tenant.weight, a.num_requests) for a in accounts]
        whole, slowdown = sum(w for w, _ in needs), self._bounds.slowdown
        allowed = [(1 + slowdown * (whole / w - 1)) * self._steps(d, step)[1] for w, d in needs]

        def steps(level: float) -> tuple[float, float]:
            return self._steps(sum(min(d, _whole(level * w)) for w, d in needs), step)

        def is_kind(level: float) -> bool:
            within = [most for most, (w, d) in zip(allowed, needs, strict=True) if d <= level * w]
            return steps(level)[1] <= min(within, default=math.inf)

        def rate(level: float) -> float:
            made, seconds = steps(level)
            return made / seconds if seconds else math.inf

        levels = [d / w for w, d in needs]
        low, high = min(levels), max(levels)
        if is_kind(high):
            return math.inf
        least = (1 - self._bounds.cost) * rate(high)
        for _ in range(_BISECTION_ROUNDS):
            middle = 0.5 * (low + high)
            goes_up = is_kind(middle) or rate(middle) < least
            low, high = (middle, high) if goes_up else (low, middle)
        return low if rate(low) >= least else high

    def _steps(self, num_requests: float, step: Step) -> tuple[float, float]:
        """Return how many ordinary requests decode in a step, and its mean seconds.

        Up to full memory and places. Prompts of those that follow are in it, each in one step."""
        lengths, traffic = self._learn.lengths, self._learn.traffic
        prompt, output = traffic.mean_prompt_len, lengths.mean_ended
        context = prompt + 0.5 * output
        room = min(step.pool.capacity_tokens / context, step.num_places + len(step.running))
        num = min(num_requests, max(1.0, room))
        decodes = math.ceil(num)
        work = StepWork(num_decodes=decodes, num_kv_tokens=round(decodes * context))
        reading = work._replace(num_prefill_tokens=round(prompt), prefill_context=0.5 * prompt**2)
        plain, longer = map(self._learn.times.step_seconds, (work, reading))
        share = decodes * lengths.per_step / output
        return num, plain + share * max(0.0, longer - plain)


def _whole(most_at_work: float) -> float:
    """Round down, except less than one request, which takes turns."""
    most = most_at_work + 1e-9
    return math.floor(most) if 1 <= most < math.inf else most
