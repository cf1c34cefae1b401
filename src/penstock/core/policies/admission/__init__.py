"""Who runs in a step, and with how many known tokens. One file a policy, with `name`, an `Options`
dataclass and `compose(step)`, which schedules, admits and preempts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar

from penstock.core.learn import Estimators
from penstock.core.queues import ArrivalQueue, OrderName, make_queue
from penstock.core.state import RequestState
from penstock.core.step import Step


class AdmissionPolicy(ABC):
    """Base of admission policies; only `compose` is required."""

    name: ClassVar[str]
    cuts_prompts: bool = True
    """Whether it may schedule part of a prompt; if not, a step must have room for all of it."""
    may_idle: bool = False
    """Whether it may leave requests waiting for ever, as a paper's rule to the letter may. Fairness
    between tenants does not apply to such a policy."""
    order: OrderName = "arrival"
    """In which order the requests of a queue are tried."""
    token_budget = 0
    """Positions of a step, drafts included; 0: no speculation."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @abstractmethod
    def compose(self, step: Step) -> None:
        """Schedule the step."""

    def is_steady(self, step: Step) -> bool:
        """Whether `compose`, asked again for the step after this one, would do the same as long as
        no request arrives or ends: then many steps are planned at once where nothing else
        happens in them."""
        return False

    def draft_budget(self, num_tokens: int) -> int:
        """Draft positions that may join a step of so many known tokens."""
        return max(0, self.token_budget - num_tokens)

    def queue_of(self, state: RequestState) -> Hashable:
        """Key of the queue in which a request waits."""
        return None

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        """What keeps a waiting request out for longer than a step, as `Step.shortage`."""
        return step.shortage(state)

    def new_queue(self, estimators: Estimators) -> ArrivalQueue:
        """An empty queue, which keeps the order."""
        return make_queue(self.order, estimators)
