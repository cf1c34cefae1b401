"""The hostile draft server of `lab.bench.hostile`, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from tests.serving.scripted import ScriptedServer, greedy, scripted_server

from penstock.transport.v1 import drafting_pb2 as pb

ATTACKS = ("late", "quota", "flood", "opens", "false", "again", "strange")
MAX_OPEN = 16
MESSAGES_PER_S = 1000
"""Of one stream, the server's default."""

NUM_LOOPS = 8
END_S = 30.0


def pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > core:
        os.sched_setaffinity(0, {core})


async def receive(server: ScriptedServer) -> pb.Down:
    """Without the time limit of tests, which can lose a cancellation. Raises: EOFError."""
    data = await server.call.read()
    if data is grpc.aio.EOF:
        raise EOFError
    return pb.Down.FromString(data)


def is_cancelled() -> bool:
    """Whether this task has been cancelled, though gRPC may have swallowed it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Hostile:
    """One draft server that can do all of it. `is_bad`: otherwise it behaves, as a control."""

    def __init__(self, address: str, digest: str, prompt: list[int]) -> None:
        self._address, self._digest, self._prompt = address, digest, prompt
        self._rng = random.Random(4)
        self._writing = asyncio.Lock()
        self.num_sent = 0
        self.num_streams = 0

    async def run(self, attack: str, is_bad: bool) -> None:
        """Until cancelled."""
        if is_bad and attack in ("again", "strange"):
            async with asyncio.TaskGroup() as loops:
                for _ in range(NUM_LOOPS):
                    loops.create_task(self._connect_in_a_loop(is_known=attack == "again"))
        kinds: dict[str, Callable[[ScriptedServer, bool], Awaitable[None]]] = {
            "late": self._late,
            "quota": self._quota,
            "flood": self._flood,
            "opens": self._opens,
            "false": self._false,
            "again": self._idle,
            "strange": self._idle,
        }
        while not is_cancelled():
            self.num_streams += 1
            try:
                async with scripted_server(self._address, token="bad") as server:
                    await server.hello(self._digest)
                    await kinds[attack](server, is_bad)
            except* (grpc.RpcError, EOFError, asyncio.InvalidStateError):
                pass  # thrown out

    async def _connect_in_a_loop(self, *, is_known: bool) -> None:
        """Until cancelled. Where it is known it has a request opened, and leaves."""
        while not is_cancelled():
            self.num_streams += 1
            with suppress(grpc.RpcError, EOFError, asyncio.InvalidStateError):
                token = "bad" if is_known else "nobody"
                async with scripted_server(self._address, token=token) as server:
                    if is_known:
                        await server.hello(self._digest)
                        await self._open(server, 1, greedy())
                    else:
                        await receive(server)

    async def _idle(self, server: ScriptedServer, is_bad: bool) -> None:
        await _with_reader(server, None)

    async def _open(self, server: ScriptedServer, number: int, sampling: pb.Sampling) -> None:
        for n in range(number):
            await server.open(f"r{n}", self._prompt, 1500, sampling)

    async def _send(self, server: ScriptedServer, **message: Any) -> None:
        async with self._writing:  # a gRPC call takes one write at a time
            await server.send(**message)
        self.num_sent += 1

    async def _answer(self, server: ScriptedServer, ratio: bool = False) -> None:
        """Promptly, with drafts that are always wrong."""
        while True:
            assign = server.take(await receive(server))
            if assign is not None:
                tokens = [7] * assign.num_draft_tokens
                weights = [pb.Distribution(token_ids=[7], weights=[65536])] * (len(tokens) * ratio)
                await self._send(server, draft=server.draft(assign, tokens, weights=weights))

    async def _late(self, server: ScriptedServer, is_bad: bool) -> None:
        await self._open(server, 8, greedy())
        if not is_bad:
            await self._answer(server)
        delay = 0.0
        newest: dict[str, int] = {}

        async def answer(assign: pb.Assign) -> None:
            nonlocal delay
            await asyncio.sleep(delay)
            if newest[assign.request_id] != assign.round:
                delay *= 0.9
            else:
                delay = 1.05 * delay + 0.0002
            tokens = [7] * assign.num_draft_tokens
            await self._send(server, draft=server.draft(assign, tokens))

        async with asyncio.TaskGroup() as answers:
            while True:
                message = await receive(server)
                if message.HasField("verdict"):
                    newest[message.verdict.request_id] = -1
                assign = server.take(message)
                if assign is not None:
                    newest[assign.request_id] = assign.round
                    answers.create_task(answer(assign))

    async def _quota(self, server: ScriptedServer, is_bad: bool) -> None:
        async def flood() -> None:
            while True:
                for _ in range(19):
                    await self._send(server, **self._harmless())
                await asyncio.sleep(20 / MESSAGES_PER_S)

        await _with_reader(server, flood if is_bad else None)

    async def _flood(self, server: ScriptedServer, is_bad: bool) -> None:
        async def flood() -> None:
            while True:
                for _ in range(50):
                    await self._send(server, **self._harmless())
                if self._rng.random() < 0.01:
                    await server.send_bytes(self._rng.randbytes(self._rng.randrange(400)))

        await _with_reader(server, flood if is_bad else None)

    def _harmless(self) -> dict[str, Any]:
        """A message that is refused or ignored, but does not end the stream."""
        rng = self._rng
        if rng.random() < 0.5:
            return {"close": pb.Close(request_id=str(rng.random()))}
        ids = [rng.randrange(1 << 32) for _ in range(8)]
        return {"draft": pb.DraftTokens(request_id=f"r{rng.randrange(9)}", round=1, token_ids=ids)}

    async def _opens(self, server: ScriptedServer, is_bad: bool) -> None:
        await self._open(server, MAX_OPEN, greedy())

        async def flood() -> None:
            for number in range(1 << 30):
                opening = pb.Open(
                    request_id=f"more{number}",
                    prompt_token_ids=self._prompt,
                    max_tokens=1500,
                    sampling=greedy(),
                )
                await self._send(server, open=opening)
                await asyncio.sleep(1 / MESSAGES_PER_S)

        async with asyncio.TaskGroup() as both:
            both.create_task(self._answer(server))
            if is_bad:
                both.create_task(flood())

    async def _false(self, server: ScriptedServer, is_bad: bool) -> None:
        sampling = pb.Sampling(temperature=1.2, top_p=1, seed=3, ratio=is_bad)
        await self._open(server, 8, sampling)
        await self._answer(server, ratio=is_bad)


async def _with_reader(
    server: ScriptedServer, write: Callable[[], Coroutine[Any, Any, None]] | None
) -> None:
    """Read what comes, and write."""
    async with asyncio.TaskGroup() as both:
        if write is not None:
            both.create_task(write())
        while True:
            await receive(server)


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task that runs for ever, and wait for its end; a single cancellation can get lost
    between gRPC's futures. Raises: what ended it before; RuntimeError where it does not end."""
    with suppress(asyncio.CancelledError):
        for _ in range(round(END_S / 0.2)):
            if task.done():
                task.result()
                return
            task.cancel()
            await asyncio.wait((task,), timeout=0.2)
        raise RuntimeError(f"{task.get_name()} does not end within {END_S:g} s")


def hostile_process(pipe: Any, address: str, digest: str, prompt: list[int]) -> None:
    """Does what the pipe says: (attack, is_bad) begins a window, None ends it."""
    pin(1)

    async def window(attack: str, is_bad: bool) -> dict[str, float]:
        hostile = Hostile(address, digest, prompt)
        begun, cpu = time.perf_counter(), time.process_time()
        running = asyncio.create_task(hostile.run(attack, is_bad), name=f"the attack {attack!r}")
        await asyncio.to_thread(pipe.recv)
        seconds = time.perf_counter() - begun
        await ended(running)
        return {
            "cpu_share": (time.process_time() - cpu) / seconds,
            "messages_per_s": hostile.num_sent / seconds,
            "streams": hostile.num_streams,
        }

    async def windows() -> None:
        # One loop for all: gRPC's poller outlives a loop that is closed.
        pipe.send("ready")
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            try:
                did = await window(*order)
            except BaseException:
                # The loop would wait for the task that does not end.
                traceback.print_exc()
                os._exit(1)
            pipe.send(did)

    asyncio.run(windows())
