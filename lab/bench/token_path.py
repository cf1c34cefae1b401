"""Which files of the package one chat request enters, from HTTP to text.

A server with a bundled target and one drafter answers two greedy, streamed requests of 40 tokens on
the CPU. While the second one runs, a profile hook in both processes, the server's and the engine's,
notes the file of each function that is called, those called regularly beside it included:

    python -m lab.bench.token_path
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import penstock
from penstock.api.server import serve
from penstock.config import EngineConfig, parse_config

PACKAGE = Path(penstock.__file__).parent
WEIGHTS = PACKAGE / "zoo" / "weights"
NUM_TOKENS = 40
FOLDER = "PENSTOCK_TOKEN_PATH"
"""Environment variable: where both processes find the switch, and write what they enter."""


class Recorder:
    """Appends to `entered` in a folder each file of the package that is entered while the byte in
    `switch` is 1, once for each process."""

    def __init__(self, folder: Path) -> None:
        with (folder / "switch").open("r+b") as file:
            self.switch = mmap.mmap(file.fileno(), 1)
        self._log = os.open(folder / "entered", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._seen: set[str] = set()

    def watch(self) -> None:
        """This thread, and all that begin later."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def _hook(self, frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not self.switch[0] or name in self._seen:
            return
        self._seen.add(name)
        if name.startswith(f"{PACKAGE}{os.sep}") and frame.f_code.co_name != "<module>":
            os.write(self._log, f"{name}\n".encode())


def watched_engine(config: EngineConfig) -> Any:
    """The real engine, in its own process."""
    from penstock.engine.build import load_engine

    Recorder(Path(os.environ[FOLDER])).watch()
    return load_engine(config)


async def files_entered(folder: Path) -> list[Path]:
    """Files of the package that a second request enters."""
    (folder / "switch").write_bytes(b"\0")
    os.environ[FOLDER] = str(folder)
    recorder = Recorder(folder)
    recorder.watch()
    engine = {
        "target": str(WEIGHTS / "target-small"),
        "drafters": {"draft-base": str(WEIGHTS / "draft-base")},
        "allocation": {"name": "fixed"},
    }
    config = parse_config({"engine": engine, "port": 0})
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(config, address.set_result, f"{__name__}:watched_engine"))
    await asyncio.wait((server, address), return_when=asyncio.FIRST_COMPLETED)
    try:
        async with httpx.AsyncClient(base_url=address.result(), timeout=120) as http:
            await _ask(http)
            recorder.switch[0] = 1
            await _ask(http)
            recorder.switch[0] = 0
    finally:
        server.cancel()
        await asyncio.wait((server,))
    return sorted({Path(line) for line in (folder / "entered").read_text().splitlines()})


async def _ask(http: httpx.AsyncClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "How many rows has the table?"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        lines = [line async for line in answer.aiter_lines() if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = asyncio.run(files_entered(Path(folder)))
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    for file, num in lines.items():
        print(f"{num:5d}  {file.relative_to(PACKAGE)}")
    print(f"{sum(lines.values()):5d}  lines in {len(files)} files")


if __name__ == "__main__":
    # By its own name: the engine's process imports this module.
    from lab.bench.token_path import main as run

    run()
