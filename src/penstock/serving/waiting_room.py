"""Places that clients share, so that none can take what the others need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from penstock.serving.refusals import Departures, QueueFull


class Shares:
    """Places of some kind: for requests in a queue, for bytes in memory.

    A client with a limit of its own may hold that many. Any other may hold no more than it leaves
    free: half of all if it is alone, a third each where two want all. So whoever comes next always
    finds room. (Dynamic thresholds with α = 1: Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998.)

    limits: by client
    """

    def __init__(self, size: int, limits: Mapping[str, int] | None = None) -> None:
        self.size = size
        self.num_taken = 0
        self._limits = limits or {}
        self._held: Counter[str] = Counter()

    def held_by(self, client: str) -> int:
        return self._held[client]

    def most_of(self, client: str) -> int:
        """What a client may hold while nobody else holds anything."""
        return min(self._limits.get(client, max(self.size // 2, 1)), self.size)

    def take(self, client: str, num: int) -> bool:
        """Take places, or none if there are not enough for this client."""
        held, free = self._held[client] + num, self.size - self.num_taken - num
        if free < 0 or held > self._limits.get(client, max(free, 1)):
            return False
        self._held[client] = held
        self.num_taken += num
        return True

    def release(self, client: str, num: int) -> None:
        self.num_taken -= num
        self._held[client] -= num
        if not self._held[client]:
            del self._held[client]


class WaitingRoom:
    """Requests that have had no output yet. size: most of them at once; limits: by client."""

    def __init__(self, size: int, limits: Mapping[str, int] | None = None) -> None:
        self._places = Shares(size, limits)
        self._client_of: dict[str, str] = {}
        self._departures = Departures()

    def most_of(self, client: str) -> int:
        """Requests of a client that can ever wait at once."""
        return self._places.most_of(client)

    def enter(self, client: str, request_ids: Sequence[str]) -> None:
        """Raises: QueueFull."""
        places = self._places
        if not places.take(client, len(request_ids)):
            raise QueueFull(
                f"{places.num_taken} requests are waiting already, of at most {places.size}, "
                f"{places.held_by(client)} of them from this client; try again later",
                self._departures.seconds_for(places.num_taken),
            )
        self._client_of.update(dict.fromkeys(request_ids, client))

    def answered(self, request_id: str) -> None:
        """A request has an output; it need not be its first."""
        if request_id in self._client_of:
            self._departures.add()
            self.leave([request_id])

    def leave(self, request_ids: Iterable[str]) -> None:
        """Requests that are no longer wanted, or are not here any more."""
        for request_id in request_ids:
            client = self._client_of.pop(request_id, None)
            if client is not None:
                self._places.release(client, 1)
