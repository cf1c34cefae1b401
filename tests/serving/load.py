"""Users who ask all the time and check whatever they get, while a test breaks things."""

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx
from tests.serving.harness import eventually

NUM_TOKENS = 96
NUM_USERS = 16
_PROMPTS = ["The quick brown fox", "def main():", "select * from t", "Once upon a"]


def bodies() -> list[dict[str, Any]]:
    """Requests whose texts are facts."""
    return [
        {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
        for n, prompt in enumerate(_PROMPTS)
        for fields in ({"temperature": 0}, {"temperature": 0.9, "seed": n})
    ]


@dataclass
class Load:
    """outcomes: of requests. `whole`; `broken`: a part of the right text and then one error event;
    `cut`: a part of it and then the connection ended; `refused`: 503 with Retry-After.
    wrong: everything else. begun: of those that had a first token, when they were asked for, and
    when it came
    """

    url: str
    expected: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    begun: list[tuple[float, float]] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Users are at work in the block, and what they have begun is ended after it."""
        for body in bodies():
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
            self.expected.append(answer.json()["choices"][0]["text"])
        users = threading.Thread(target=lambda: asyncio.run(self._users()))
        users.start()
        try:
            # Every one of them has been served before anything is done to the server.
            eventually(lambda: self.outcomes["whole"] >= 2 * NUM_USERS, timeout=120)
            yield
        finally:
            self._is_over.set()
            users.join()
        assert not self.wrong, self.wrong[:5]

    def seconds_until_served(self, since: float) -> float:
        """From then to the first token of a request that was asked for after it."""

        def found() -> list[float]:
            return [first - since for asked, first in tuple(self.begun) if asked > since]

        return min(eventually(found, timeout=120))

    async def _users(self) -> None:
        await asyncio.gather(*(self._user(number) for number in range(NUM_USERS)))

    async def _user(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            for turn in itertools.count(number):
                if self._is_over.is_set():
                    return
                outcome = await self._ask(http, turn % len(self.expected))
                self.outcomes[outcome] += 1
                if outcome != "whole":
                    await asyncio.sleep(0.1)

    async def _ask(self, http: httpx.AsyncClient, which: int) -> str:
        text, ends, errors, is_done, asked = "", 0, [], False, monotonic()
        body = {**bodies()[which], "stream": True}
        try:
            async with http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                if answer.status_code == 503 and "Retry-After" in answer.headers:
                    return "refused"
                if answer.status_code != 200:
                    self.wrong.append(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
                    return "wrong"
                async for line in answer.aiter_lines():
                    if is_done and line:
                        self.wrong.append(f"after [DONE]: {line}")
                    is_done = is_done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        errors += [event["error"]["code"]] if "error" in event else []
                        if not text and event.get("choices"):
                            self.begun.append((asked, monotonic()))
                        for choice in event.get("choices", ()):
                            text += choice["text"]
                            ends += choice["finish_reason"] is not None
        except httpx.TransportError:
            return self._checked("cut", which, text, ends == 0 and not is_done)
        if errors:
            is_right = errors == ["engine_unavailable"] and ends == 0 and is_done
            return self._checked("broken", which, text, is_right)
        is_right = ends == 1 and is_done and text == self.expected[which]
        return self._checked("whole", which, text, is_right)

    def _checked(self, outcome: str, which: int, text: str, is_right: bool) -> str:
        if not (is_right and self.expected[which].startswith(text)):
            self.wrong.append(f"{outcome}: {text!r}, not {self.expected[which]!r}")
        return outcome
