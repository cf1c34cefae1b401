"""Virtual token counters of tenants (Sheng et al., OSDI'24), and the queue ordered by them.

Service counts by its cost in the step-time profile, over the tenant's weight. The waiting tenant
with the least comes first; one that did not wait starts at the least of those that do."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple

from penstock.core.groups import DecodeGroup
from penstock.core.learn import Estimators
from penstock.core.queues import ArrivalQueue
from penstock.core.state import RequestState
from penstock.core.types import Tenant
from penstock.fluid.step_profile import StepProfile

UNITS = 1e12
"""Picoseconds: integers, so that charging steps one by one or together is the same."""


class Prices(NamedTuple):
    """Prices in units: of positions, prompt tokens, decodes, and attention's reading."""

    position: int
    prefill: int
    decode: int
    prefill_context: float
    kv_token: int

    @classmethod
    def from_profile(cls, profile: StepProfile) -> Prices:
        """Return a profile's prices, or the paper's: 1 a prompt token, 2 a decoded token."""
        most = profile.token_counts[-1]
        position = profile.linear(most) / most if most else 0.0
        prefill, decode = position + profile.per_prefill_token, position + profile.per_decode
        if not prefill + profile.per_prefill_context + decode + profile.per_kv_token:
            return cls(1, 1, 2, 0.0, 0)
        return cls(
            round(UNITS * position),
            round(UNITS * prefill),
            round(UNITS * decode),
            UNITS * profile.per_prefill_context,
            round(UNITS * profile.per_kv_token),
        )

    def prompt(self, start: int, num_tokens: int) -> int:
        """Return the price of prompt tokens behind a context of `start`."""
        context = num_tokens * (start + 0.5 * num_tokens)
        return self.prefill * num_tokens + round(self.prefill_context * context)

    def decodes(self, num_rows: int, num_kv_tokens: int) -> int:
        """Return the price of decoded tokens with `num_kv_tokens` of context together."""
        return self.decode * num_rows + self.kv_token * num_kv_tokens


class Account:
    """Service of a tenant, and its demand."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.num_waiting = 0
        self.num_running = 0
        self.most_at_work = math.inf  # under 1: the share of steps with one request
        self.turn = 0.0  # sum of these shares since the last turn
        self._start = 0.0
        self._served = 0

    @property
    def counter(self) -> float:
        """Service over weight, in units."""
        return self._start + self._served / self.tenant.weight

    def charge(self, units: int) -> None:
        self._served += units

    def change(self, tenant: Tenant) -> None:
        """Change the settings; earlier service keeps its weight."""
        self._start, self._served = self.counter, 0
        self.tenant = tenant

    def lift(self, counter: float) -> None:
        """Raise the counter to at least `counter`."""
        self._start += max(0.0, counter - self.counter)

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

    def may_admit(self, num_others: int = 0) -> bool:
        """Return whether another request may run, beside `num_others` admitted before."""
        most = self.tenant.max_running_requests
        allowed = self.most_at_work if most is None else min(self.most_at_work, most)
        return self.num_running + num_others < allowed


class Accounts:
    """Accounts of all tenants.

    present: of tenants with unfinished requests, by name. paused: ids of running requests that keep
    their KV, but do not run now. is_fair: accounts decide the order. are_kept: service is
    counted."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        estimators: Estimators,
        groups: Mapping[Hashable, DecodeGroup],
        *,
        is_fair: bool,
    ) -> None:
        self.is_fair = is_fair
        is_limited = any(t.max_running_requests is not None for t in tenants.values())
        self.are_kept = is_fair or is_limited
        self.present: dict[str, Account] = {}
        self.num_changes = 0
        """Changes of the present tenants or their numbers of requests."""
        self.paused: set[str] = set()
        self._charged: dict[str, int] = {}
        """Tokens charged before a preemption, by request."""
        self._tenants = tenants
        self._groups = groups
        self._times = estimators.times
        self._accounts: dict[str, Account] = {}
        self._returned: dict[str, Account] = {}
        self._prices: tuple[StepProfile | None, Prices] = (None, Prices(1, 1, 2, 0.0, 0))

    @property
    def prices(self) -> Prices:
        profile = self._times.profile
        if self._prices[0] is not profile:
            self._prices = (profile, Prices.from_profile(profile))
        return self._prices[1]

    def account_of(self, state: RequestState) -> Account:
        name = state.request.tenant
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(self._tenants[name])
        return account

    def tenants_changed(self) -> None:
        """Take over changed settings of tenants."""
        self.settle()
        for name, account in self._accounts.items():
            account.change(self._tenants[name])
        self.num_changes += 1

    def queues(self, new_queue: Callable[[], ArrivalQueue]) -> Callable[[], ArrivalQueue]:
        """Return a factory of queues: one of the policy's queues for each tenant, or for all."""
        if not self.are_kept:
            return new_queue
        return lambda: TenantQueue(self, new_queue)

    def settle(self) -> None:
        """Charge what was decoded in groups."""
        prices = self.prices
        for group in self._groups.values():
            for name, rows, kv_tokens in group.take_decoded():
                self._accounts[name].charge(prices.decodes(rows, kv_tokens))

    # --- service --------------------------------------------------------------------------------

    def charge_prompt(self, state: RequestState, start: int, num_tokens: int) -> None:
        """Charge computed prompt tokens, except those computed before a preemption."""
        again = max(0, min(num_tokens, self._charged.get(state.request.id, 0) - start))
        if again < num_tokens:
            self.account_of(state).charge(self.prices.prompt(start + again, num_tokens - again))

    def preempted(self, state: RequestState) -> None:
        """Note a preempted request, whose computed tokens are not charged again."""
        self.paused.discard(state.request.id)
        if self.are_kept:
            charged = self._charged.get(state.request.id, 0)
            self._charged[state.request.id] = max(charged, state.num_computed_tokens)

    def release_request(self, request_id: str) -> None:
        self.paused.discard(request_id)
        self._charged.pop(request_id, None)

    def charge_decode(self, state: RequestState, num_kv_tokens: int, num_drafts: int) -> None:
        """Charge a decoded token behind `num_kv_tokens` of context, and its verified drafts."""
        prices = self.prices
        units = prices.decodes(1, num_kv_tokens) + prices.position * num_drafts
        self.account_of(state).charge(units)

    def rank(self, state: RequestState, num_units: int = 0) -> tuple[float, float, int]:
        """Return a request's order with `num_units` more charged; ties by work, then arrival."""
        if not self.is_fair:
            return (0.0, 0.0, state.order)
        account = self.account_of(state)
        weight = account.tenant.weight
        return (account.counter + num_units / weight, account.num_running / weight, state.order)

    # --- who is there ---------------------------------------------------------------------------

    def arrived(self, state: RequestState) -> None:
        account = self.account_of(state)
        if not account.num_waiting:
            self._returned[state.request.tenant] = account
        account.num_waiting += 1
        self.present[state.request.tenant] = account
        self.num_changes += 1

    def lift_returned(self) -> None:
        """Raise the counters of tenants that have begun to wait since the last call.

        They start at the least of those that waited before, or of those present, if any. All
        service until then must be charged."""
        if not self._returned:
            return
        self.settle()
        others = [a for name, a in self.present.items() if name not in self._returned]
        waiting = [a.counter for a in others if a.num_waiting]
        if others:
            floor = min(waiting or [a.counter for a in others])
        else:
            floor = max(a.counter for a in self._returned.values())
        for account in self._returned.values():
            account.lift(floor)
        self._returned.clear()

    def moved(self, state: RequestState, *, waiting: int = 0, running: int = 0) -> None:
        """Note a request that starts or stops waiting or running."""
        if not self.are_kept:
            return
        account = self.account_of(state)
        account.num_waiting += waiting
        account.num_running += running
        if not account.num_requests:
            del self.present[state.request.tenant]
        self.num_changes += 1


class TenantQueue(ArrivalQueue):
    """A queue for each tenant; the least served one that may admit comes first."""

    def __init__(self, accounts: Accounts, new_queue: Callable[[], ArrivalQueue]) -> None:
        self._accounts = accounts
        self._new_queue = new_queue
        self._queues: dict[str, ArrivalQueue] = {}

    def __len__(self) -> int:
        return sum(len(q) for q in self._queues.values())

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate as if each tenant were charged for its prompts at once."""
        self._accounts.settle()
        requests = {name: iter(queue) for name, queue in self._queues.items()}
        admitted = dict.fromkeys(requests, 0)
        charged = dict.fromkeys(requests, 0)
        heads: list[tuple[float, float, int, RequestState]] = []

        def push(name: str) -> None:
            state = next(requests[name], None)
            if state is not None and self._accounts.account_of(state).may_admit(admitted[name]):
                counter, running, order = self._accounts.rank(state, charged[name])
                heapq.heappush(heads, (counter, running, order, state))

        for name in requests:
            push(name)
        while heads:
            state = heapq.heappop(heads)[-1]
            yield state
            name = state.request.tenant
            admitted[name] += 1
            charged[name] += self._accounts.prices.prompt(0, state.num_known_tokens)
            push(name)

    @property
    def oldest(self) -> RequestState | None:
        oldest = [s for q in self._queues.values() if (s := q.oldest) is not None]
        return min(oldest, key=lambda s: s.order, default=None)

    @property
    def first(self) -> RequestState | None:
        firsts = [
            s
            for q in self._queues.values()
            if (s := q.first) is not None and self._accounts.account_of(s).may_admit()
        ]
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        self._accounts.settle()
        return min(firsts, key=self._accounts.rank)

    def append(self, state: RequestState) -> None:
        self._accounts.arrived(state)
        self._of(state).append(state)

    def appendleft(self, state: RequestState) -> None:
        self._accounts.moved(state, waiting=1, running=-1)
        self._of(state).appendleft(state)

    def remove(self, state: RequestState) -> None:
        self._accounts.moved(state, waiting=-1)
        self._of(state).remove(state)
        self._drop_empty(state)

    def admit(self, state: RequestState) -> None:
        self._accounts.moved(state, waiting=-1, running=1)
        self._of(state).admit(state)
        self._drop_empty(state)

    def _of(self, state: RequestState) -> ArrivalQueue:
        name = state.request.tenant
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = self._new_queue()
        return queue

    def _drop_empty(self, state: RequestState) -> None:
        if not self._queues[state.request.tenant]:
            del self._queues[state.request.tenant]
