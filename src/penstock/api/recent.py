"""Running and recently ended requests for the dashboard, without their texts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from penstock.core.types import FinishReason, Output, Request

# Ended requests that are kept, and requests that are listed.
_MAX_ENDED = 64
_MAX_TOLD = 40

JsonDict = dict[str, Any]


class RequestRecord:
    """Record of one request, from now on."""

    __slots__ = ("__weakref__", "_began_at", "_drafts", "_num_tokens", "_recent", "_request")

    def __init__(self, request: Request, recent: RecentRequests) -> None:
        self._request = request
        self._recent = recent
        self._began_at = time.perf_counter()
        self._num_tokens = 0
        self._drafts: dict[str, list[int]] = {}
        """By drafter: drafts, draft tokens, accepted tokens."""

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
    """Requests of one server. A running one is kept as long as its record is referenced."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[str, RequestRecord] = WeakValueDictionary()
        self._ended: deque[JsonDict] = deque(maxlen=_MAX_ENDED)

    def begin(self, request: Request) -> RequestRecord:
        """Return a new record of a running request."""
        record = self._open[request.id] = RequestRecord(request, self)
        return record

    def ended(self, request_id: str, told: JsonDict) -> None:
        """Keep the final description of a request."""
        self._open.pop(request_id, None)
        self._ended.append(told)

    def of(self, tenant: str | None) -> list[JsonDict]:
        """Return a tenant's requests (None: all): running ones, then ended ones, newest first."""
        return [told for told, _ in zip(self._all(tenant), range(_MAX_TOLD), strict=False)]

    def _all(self, tenant: str | None) -> Iterator[JsonDict]:
        for record in reversed(list(self._open.values())):
            if tenant is None or record.tenant == tenant:
                yield record.describe()
        yield from (r for r in reversed(self._ended) if tenant is None or r["tenant"] == tenant)
