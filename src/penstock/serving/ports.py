"""What the HTTP layer asks of whatever makes its completions: an engine, or a link to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.core.types import Request
from penstock.serving.messages import EngineStats, Ready
from penstock.serving.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from penstock.serving.client import OutputStream


class RequestClient(Protocol):
    """Takes requests, and gives their outputs as they come."""

    num_restarts: int
    room: WaitingRoom

    @property
    def info(self) -> Ready:
        """Raises: EngineUnavailable before it is known."""
        ...

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names that a request may ask for."""
        ...

    @property
    def problem(self) -> str | None:
        """Why no requests can be served now, or None."""
        ...

    @property
    def num_open(self) -> int:
        """Requests that have not finished."""
        ...

    async def submit(self, client: str, requests: Sequence[Request]) -> OutputStream:
        """client: whose places in the waiting room they take. Raises: QueueFull,
        EngineUnavailable."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        ...

    async def stats(self) -> EngineStats | None:
        """A snapshot, or None while there is none."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Take no more requests; cancel what still runs after `grace_s` seconds."""
        ...
