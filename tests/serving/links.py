"""TCP links that something can be done to, and metrics as text; for tests and for benchmarks."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

from tests.serving.scripted import free_port


class Relay:
    """A link in front of a port, on which bytes go on as they are. What is done to them is up to
    `pump`, and whether anybody is let in to `admits`."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port = free_port()
        self._host = host
        self._behind = port
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        server = await asyncio.start_server(self._connected, self._host, self.port)
        try:
            yield self
        finally:
            server.close()
            self.drop()

    def drop(self) -> None:
        """Break what is open."""
        for writer in self._writers:
            writer.transport.abort()

    def admits(self) -> bool:
        return True

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, to its end."""
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self.admits():
                with suppress(OSError):
                    await self._relay(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._behind)
        self._writers.add(far_writer)
        pumps = [
            asyncio.create_task(self.pump(reader, far_writer)),
            asyncio.create_task(self.pump(far_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers.discard(far_writer)
            far_writer.close()


class Delay(Relay):
    """A link on which every byte takes `seconds` more; its rate is as it was."""

    def __init__(self, port: int, host: str = "127.0.0.1", seconds: float = 0.0) -> None:
        super().__init__(port, host)
        self.seconds = seconds

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction. Bytes keep their order, whatever the timers do."""
        loop = asyncio.get_running_loop()
        waiting: deque[bytes] = deque()

        def send() -> None:
            if not writer.is_closing():
                writer.write(waiting.popleft())

        while data := await reader.read(1 << 16):
            if self.seconds:
                waiting.append(data)
                loop.call_later(self.seconds, send)
            else:
                writer.write(data)


def sum_of(text: str, name: str, *labels: str) -> float:
    """The sum of a metric over its labels, or over those lines that have all of `labels`."""
    lines = [line for line in text.splitlines() if line.startswith(f"penstock:{name}")]
    chosen = [line for line in lines if all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in chosen)
