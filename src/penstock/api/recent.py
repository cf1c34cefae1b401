"""Requests one by one, for people to look at: those that run, and the last that have ended. Nothing
of what they say is kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from penstock.core.types import FinishReason, Output, Request

_MAX_ENDED = 64
_MAX_TOLD = 40

JsonDict = dict[str, Any]


class RequestRecord:
    """One request, from now on. drafts: by drafter, how many, their tokens, and those accepted."""

    __slots__ = ("__weakref__", "_began_at", "_drafts", "_num_tokens", "_recent", "_request")

    def __init__(self, request: Request, recent: RecentRequests) -> None:
        self._request = request
        self._recent = recent
        self._began_at = time.perf_counter()
        self._num_tokens = 0
        self._drafts: dict[str, list[int]] = {}

    @property
    def tenant(self) -> str:
        return self._request.tenant

    def observe(self, output: Output) -> None:
        self._num_tokens += len(output.token_ids)
        if output.drafter is not None and output.num_proposed:
            counts = self._drafts.setdefault(output.drafter, [0, 0, 0])
            counts[0] += 1
            counts[1] += output.num_proposed
            counts[2] += output.num_accepted

    def end(self, reason: FinishReason) -> None:
        """Not twice."""
        self._recent.ended(self._request.id, self.describe(reason))

    def describe(self, reason: FinishReason | None = None) -> JsonDict:
        request = self._request
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        running = "running" if self._num_tokens else "waiting"
        return {
            "id": request.id,
            "tenant": request.tenant,
            "state": running if reason is None else "ended",
            "reason": reason,
            "seconds": time.perf_counter() - self._began_at,
            "num_prompt_tokens": request.prompt_len,
            "num_tokens": self._num_tokens,
            "asked": request.drafter,
            "drafters": {
                drafter: dict(zip(names, counts, strict=True))
                for drafter, counts in self._drafts.items()
            },
        }


class RecentRequests:
    """Those of one server. One whose record nobody holds any more is forgotten."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[str, RequestRecord] = WeakValueDictionary()
        self._ended: deque[JsonDict] = deque(maxlen=_MAX_ENDED)

    def begin(self, request: Request) -> RequestRecord:
        """Tell of a request from now on."""
        record = self._open[request.id] = RequestRecord(request, self)
        return record

    def ended(self, request_id: str, told: JsonDict) -> None:
        """`told`: what is known of it at last."""
        self._open.pop(request_id, None)
        self._ended.append(told)

    def of(self, tenant: str | None) -> list[JsonDict]:
        """Of one tenant (None: of all), the newest first: the last to come of those that run, then
        the last to end of the others."""
        return [told for told, _ in zip(self._all(tenant), range(_MAX_TOLD), strict=False)]

    def _all(self, tenant: str | None) -> Iterator[JsonDict]:
        for record in reversed(list(self._open.values())):
            if tenant is None or record.tenant == tenant:
                yield record.describe()
        yield from (r for r in reversed(self._ended) if tenant is None or r["tenant"] == tenant)
