"""Clients of `lab.bench.soak`: good ones, who check all that comes, and bad ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from penstock.zoo.registry import DOMAINS, load_prompts

MAX_TOKENS = 128
STRUCTURED_EVERY = 8
LONG_S = 300.0
"""A request that has not ended by then never will."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["person", "place", "thing"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}


@dataclass
class Seen:
    """What the good clients have seen. latencies: (end, seconds) of each complete request"""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    texts: dict[tuple[str, int, bool], str] = field(default_factory=dict)


class Refused(Exception):
    """429. seconds: what it said after which to come again."""

    def __init__(self, code: str, seconds: float) -> None:
        self.code, self.seconds = code, seconds


@asynccontextmanager
async def posted(
    address: tuple[str, int], key: str, body: dict[str, Any], receive_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which a completion was asked for. Read by hand: hundreds of clients must not
    cost what they measure. receive_bytes: of the socket's own buffer."""
    sock = socket.socket()
    sock.setblocking(False)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except OSError:
        sock.close()
        raise
    limit = {} if receive_bytes is None else {"limit": receive_bytes}
    reader, writer = await asyncio.open_connection(sock=sock, **limit)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + data)
        yield reader, writer
    finally:
        writer.transport.abort()


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Of a stream, to its `[DONE]`. Raises: Refused, ValueError for all that is no whole stream."""
    status = (await reader.readline()).split()
    if status[1:2] != [b"200"]:
        text = (await reader.read()).decode(errors="replace")
        if status[1:2] == [b"429"]:
            after = re.search(r"retry-after: (\d+)", text, re.IGNORECASE)
            code = re.search(r'"code": ?"(\w+)"', text)
            if after and code:
                raise Refused(code[1], float(after[1]))
        raise ValueError(f"status {status[1:2]}: {text[-300:]}")
    async for line in reader:
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise ValueError("the stream ended without [DONE]")


@dataclass
class Crowd:
    """Where to ask, and until when.

    drafters: that all ask for by name, one after the other, until `warm`, so that whatever there is
              has been used by then
    """

    address: tuple[str, int]
    drafters: Sequence[str]
    warm: float
    end: float
    seen: Seen = field(default_factory=Seen)

    def __post_init__(self) -> None:
        self._warm_up_s = self.warm - monotonic()
        self.prompts = [p.prompt for d in DOMAINS for p in load_prompts(d)[:4]]

    async def good(self, number: int, key: str) -> None:
        """Ask one thing after the other, and check every answer."""
        for turn in itertools.count():
            if monotonic() > self.end:
                return
            prompt = self.prompts[(number + 7 * turn) % len(self.prompts)]
            is_structured = number % STRUCTURED_EVERY == 0
            fields: dict[str, Any] = {"seed": number % 3}
            if monotonic() < self.warm:
                passed = 1 - (self.warm - monotonic()) / self._warm_up_s
                drafter = self.drafters[int(passed * len(self.drafters))]
                fields["speculation"] = {"drafter": drafter}
            try:
                await self._ask(prompt, key, fields, is_structured=is_structured)
            except Refused as refused:
                self.seen.refused[refused.code] += 1
                await asyncio.sleep(min(refused.seconds, max(0.0, self.end - monotonic())))
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.seen.errors.append(f"client {number}: {error!r}")
                await asyncio.sleep(1)

    async def _ask(
        self, prompt: str, key: str, fields: dict[str, Any], *, is_structured: bool
    ) -> None:
        began, seed = monotonic(), fields["seed"]
        text, tokens, ends = "", 0, []
        body = _body(prompt, MAX_TOKENS, is_structured=is_structured) | fields
        async with posted(self.address, key, body) as (reader, _), asyncio.timeout(LONG_S):
            async for event in events(reader):
                if "error" in event:
                    raise ValueError(f"an error event: {event['error']}")
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    text += choice["text"]
                    ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        self.seen.counts["completed"] += 1
        self.seen.counts["tokens"] += tokens
        self.seen.counts["structured"] += is_structured
        self.seen.latencies.append((monotonic(), monotonic() - began))
        if is_structured and ends == ["stop"]:
            json.loads(text)
        elif ends != ["length"] or tokens != MAX_TOKENS:
            raise ValueError(f"ends {ends} after {tokens} tokens of {MAX_TOKENS}")
        if self.seen.texts.setdefault((prompt, seed, is_structured), text) != text:
            raise ValueError(f"two texts for one prompt and seed {seed}")

    async def bad(self, body: Callable[[], Any]) -> None:
        """One bad request after the other, until cancelled. What comes is not looked at."""
        while True:
            with suppress(OSError, Refused, ValueError):
                await body()
            await asyncio.sleep(0.05)

    async def sip(self, key: str) -> None:
        """Read a byte a second, until the server has had enough."""
        body = _body(random.choice(self.prompts), MAX_TOKENS)
        async with posted(self.address, key, body, receive_bytes=2048) as (reader, _):
            while await reader.read(1):  # noqa: ASYNC110
                await asyncio.sleep(1)

    async def leave(self, key: str) -> None:
        """Go away at any time."""
        body = _body(random.choice(self.prompts), MAX_TOKENS)
        with suppress(TimeoutError):
            async with (
                posted(self.address, key, body) as (reader, _),
                asyncio.timeout(random.expovariate(1)),
            ):
                async for _event in events(reader):
                    pass


def _body(prompt: str, max_tokens: int, *, is_structured: bool = False) -> dict[str, Any]:
    schema = {"name": "a", "schema": SCHEMA, "strict": True}
    kind: dict[str, Any] = {"ignore_eos": True}
    if is_structured:
        kind = {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {
        "model": "target-large",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **kind,
    }
