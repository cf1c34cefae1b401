"""How fast are whole servers over HTTP: Penstock's, llama.cpp's, ik_llama.cpp's, any other?

    python -m lab.bench.servers MODEL.gguf [--drafter NAME[=FILE|URL],... ...] [--llama-cpp FOLDER]
        [--ik-llama FOLDER] [--other 'NAME=COMMAND' ...] [--clients 1,4,8,32]
        [--prompts 100,1400,6000] [--kinds code,chat,edits,json] [--repeats 3] [--json FILE]
    python -m lab.bench.servers --smoke [--llama-cpp FOLDER]

Closed clients stream greedy completions of `--tokens` tokens, end-of-text ignored; tokens/s are of
the time in which every client has a request. Prompts are the same token ids for all, each with a
beginning of its own, so that no prefix cache helps. For every number of clients and length of
prompts the servers are started, warmed, measured and stopped one after the other, in another order
each time; a thread for each core, a slot for each client.

FOLDER has a `llama-server`, which is measured without drafts and with its own look-up. COMMAND
starts any server with /v1/completions and /health, such as 'vllm=vllm serve FOLDER --port {port}
--max-num-seqs {clients}'; there are also {threads}, {need} (tokens of a request) and {context} (of
all). Every cell is a line of FILE (default: servers.jsonl), from which the same command goes on
where it was cut.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.bench.bundled_server import ServerProcess, stopping
from lab.bench.real_models import MODELS, default_folder
from lab.bench.real_prompts import ChatTokenizer, RealPrompt, source_texts, token_ids
from lab.bench.soak_clients import Refused, events, posted
from lab.common.cells import Cells, Figures
from lab.common.results import Results, ResultTable, count, counts, names_of, save, show, table
from lab.common.statistics import made_while_busy, rotated

KINDS = {
    "code": "",
    "chat": "Explain to a newcomer, in prose, what this is for and how it works.",
    "edits": "Repeat this text to the letter, but write `this` wherever it says `self`.",
    "json": 'Write this as a JSON array with an object {"line": number, "text": string} per line.',
}
"""By kind of prompt, what is asked of a piece of source text; nothing: to go on from there."""
COLUMNS = {
    "tokens_per_s": ("tokens/s", ".1f"),
    "first_s": ("first token, s", ".2f"),
    "per_token_ms": ("ms per token", ".1f"),
    "peak_mib": ("peak MiB", ".0f"),
    "cores": ("cores used", ".2f"),
}
"""Figures of a cell, medians over the repeats. peak_mib: of the server's processes since its start,
shared pages once; cores: processor time over wall time."""
SMOKE = {
    "model": default_folder() / MODELS["smollm2-135m"].file,
    **{"clients": [2], "prompts": [100], "tokens": 8, "requests": 1, "repeats": 1},
}
_PIECE = 40_000
"""Characters of source from one prompt's piece to the next one's."""
_WARM_PROMPT = 100
_MARGIN = 64
"""Tokens of a slot beyond prompt and output, for drafts."""
_START_S = 1800
_NO_START = "does not start"
_PENSTOCK = (
    "{python} -m penstock.cli serve {model} --port {{port}} --state none --max-model-len {{need}} "
    "--kv-tokens {{context}} --set num_threads={{threads}} "
    "--set tenants.default.share_prompts=true {more}"  # a drafter may be on another machine
)
_LLAMA = (
    "{program} -m {model} --port {{port}} -t {{threads}} -tb {{threads}} -np {{clients}} "
    "-c {{context}} -fa on -cb --cache-ram 0{more}"
)
_LOOK_UP = {
    "llama.cpp": "--spec-type ngram-simple --spec-ngram-simple-size-n 3 "
    "--spec-ngram-simple-size-m 12",
    "ik_llama.cpp": "--spec-type suffix:n_max=8",
}
"""The rivals' own drafts without a model."""


class ServerError(Exception):
    """One line: which server failed, and how."""


class NotStartedError(ServerError):
    """It ended before it answered."""


class Turn(NamedTuple):
    """What a server is started for. prompt, tokens: of a request; requests: of each client."""

    clients: int
    prompt: int
    tokens: int
    requests: int

    @property
    def need(self) -> int:
        """Most tokens of a request, in whole blocks of 256 as llama.cpp counts them."""
        prompt = max(self.prompt, _WARM_PROMPT) * 1.01  # some prompts come out longer
        return math.ceil((prompt + self.tokens + _MARGIN) / 256) * 256


class Rival(NamedTuple):
    """A server to measure. command: a shell's words, with places for the sizes of a turn."""

    name: str
    command: str

    @property
    def shown(self) -> str:
        """The command without this machine's folders."""
        return " ".join(word.rpartition("/")[2] for word in shlex.split(self.command))

    def words(self, port: int, turn: Turn) -> list[str]:
        sizes = {"clients": turn.clients, "need": turn.need, "context": turn.clients * turn.need}
        sizes |= {"port": port, "threads": len(os.sched_getaffinity(0))}
        return [word.format(**sizes) for word in shlex.split(self.command)]


class Streamed(NamedTuple):
    """One request. first, total: seconds until its first token and its end."""

    first: float
    total: float
    tokens: int


def figures(streams: Sequence[Streamed], ended: Sequence[float], clients: int) -> Figures:
    """Speed of a cell while all clients have requests, and medians of its requests' latencies.
    ended: seconds from the common start, by request."""
    first, total, tokens = (np.array(column, float) for column in zip(*streams, strict=True))
    came, seconds = made_while_busy(
        np.array(ended) - total + first, np.array(ended), tokens, clients
    )
    per_token = (total - first) / np.maximum(1, tokens - 1)
    return {
        "tokens_per_s": came / seconds,
        "first_s": float(np.median(first)),
        "per_token_ms": 1e3 * float(np.median(per_token)),
    }


class Prompts(NamedTuple):
    """Prompts of about so many tokens, from the sources of Python's standard library."""

    tokenizer: ChatTokenizer
    text: str

    def make(self, kind: str, tokens: int, numbers: Iterator[int], count: int) -> list[list[int]]:
        """So many prompts, each of which begins as no other does."""
        return [self._one(kind, tokens, number) for number in itertools.islice(numbers, count)]

    def _one(self, kind: str, tokens: int, number: int) -> list[int]:
        mark = self.tokenizer.encode(f"{random.Random(number).getrandbits(32):08x}\n")
        start = number * _PIECE % (len(self.text) - 8 * tokens)
        piece = self.text[start : start + 8 * tokens]
        room = max(0, tokens - len(mark) - len(self._asked(kind, "")))
        length = 4 * room
        for _ in range(4):  # tokens are not equally long everywhere
            length = int(room * length / max(1, len(self.tokenizer.encode(piece[:length]))))
        return mark + self._asked(kind, piece[:length])

    def _asked(self, kind: str, piece: str) -> list[int]:
        whole = f"{KINDS[kind]}\n\n{piece}"
        asked = {"message": whole} if KINDS[kind] else {"text": piece}
        return list(token_ids(RealPrompt(kind, "held", "", **asked), self.tokenizer))


async def streamed(server: ServerProcess, prompt: list[int], tokens: int) -> Streamed:
    """One request. Raises: OSError, Refused, ValueError for what is no whole stream."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    began, first, made = time.perf_counter(), 0.0, 0
    async with posted(address, "none", body) as (reader, _):
        async for event in events(reader):
            if not first and any(choice.get("text") for choice in event.get("choices", ())):
                first = time.perf_counter() - began
            if event.get("usage"):
                made = event["usage"]["completion_tokens"]
    total = time.perf_counter() - began
    if not made:
        raise ValueError("a stream without usage")
    # Of special tokens there is no text.
    return Streamed(first or total, total, made)


async def closed_clients(
    server: ServerProcess, prompts: Sequence[list[int]], turn: Turn
) -> list[tuple[Streamed, float]]:
    """All requests of clients that each ask for the next one as soon as theirs ends, and when each
    ended, in seconds."""
    waiting, began = iter(prompts), time.perf_counter()

    async def client() -> list[tuple[Streamed, float]]:
        return [
            (await streamed(server, prompt, turn.tokens), time.perf_counter() - began)
            for prompt in waiting
        ]

    return list(itertools.chain(*await asyncio.gather(*(client() for _ in range(turn.clients)))))


@contextmanager
def running(rival: Rival, turn: Turn) -> Iterator[tuple[ServerProcess, list[float]]]:
    """The server, ready, with its memory (MiB) since its start. Raises: ServerError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(rival.words(port, turn), stdout=log, stderr=log)
        server, memory = ServerProcess(process, f"http://127.0.0.1:{port}"), [0.0]
        ended = threading.Event()

        def weigh() -> None:
            while not ended.wait(2):
                memory.append(server.memory_mib("Pss:"))

        watch = threading.Thread(target=weigh)
        with stopping(process):
            watch.start()
            kind: type[ServerError] = NotStartedError
            try:
                _await_health(server)
                kind = ServerError
                yield server, memory
            except (OSError, Refused, ValueError) as error:
                log.seek(0)
                said = " | ".join(log.read().decode(errors="replace").split("\n")[-6:])
                raise kind(f"{rival.name}: {error!r}; {said}") from error
            finally:
                ended.set()
                watch.join()


def _await_health(server: ServerProcess) -> None:
    end = time.monotonic() + _START_S
    while server.process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise OSError(f"did not start: {shlex.join(server.process.args)}")


def measured(
    server: ServerProcess, memory: list[float], prompts: Sequence[list[int]], turn: Turn
) -> Figures:
    """One cell's figures, and the server's whole command."""
    cpu, began = server.cpu_seconds(), time.perf_counter()
    found = asyncio.run(closed_clients(server, prompts, turn))
    wall = time.perf_counter() - began
    cpu = server.cpu_seconds() - cpu
    memory.append(server.memory_mib("Pss:"))
    mine = {"peak_mib": max(memory), "cores": cpu / wall}
    streams, ended = zip(*found, strict=True)
    return {
        **figures(streams, ended, turn.clients),
        **mine,
        "command": shlex.join(server.process.args),
    }


def measure(args: argparse.Namespace, rivals: Sequence[Rival], prompts: Prompts) -> Results:
    """The servers in turns over all cells that are not in the file. Raises: ServerError."""
    cells = Cells(args.json)
    turns = [
        Turn(clients, prompt, args.tokens, args.requests)
        for prompt, clients in itertools.product(args.prompts, args.clients)
    ]
    keys = {
        (rival, turn, kind): f"{args.model.stem}/{rival.name}/{kind}/{'/'.join(map(str, turn))}"
        for rival, turn, kind in itertools.product(rivals, turns, args.kinds)
    }
    starts = [
        (repeat, turn, rival)
        for repeat, (i, turn) in itertools.product(range(args.repeats), enumerate(turns))
        for rival in rotated(rivals, repeat + i)
    ]
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(starts))
        for repeat, turn, rival in starts:
            what = f"{rival.name}, {turn.clients} clients, prompts of {turn.prompt}"
            progress.update(task, description=what)
            wanted = {kind: f"{keys[rival, turn, kind]}/{repeat}" for kind in args.kinds}
            if any(key not in cells.done for key in wanted.values()):
                try:
                    _measure_start(rival, turn, prompts, cells, wanted)
                except NotStartedError as error:
                    print(error, file=sys.stderr)
                    for key in wanted.values():
                        cells.measure(key, lambda: {"error": _NO_START})
            progress.advance(task)
    return _results(args, rivals, {place: medians(cells, key) for place, key in keys.items()})


def _measure_start(
    rival: Rival, turn: Turn, prompts: Prompts, cells: Cells, keys: Mapping[str, str]
) -> None:
    """Every kind of prompts, with one start of one server. keys: of cells, by kind."""
    numbers = itertools.count()
    with running(rival, turn) as (server, memory):
        warm = prompts.make("chat", _WARM_PROMPT, numbers, turn.clients)
        asyncio.run(closed_clients(server, warm, turn))
        for kind, key in keys.items():
            some = prompts.make(kind, turn.prompt, numbers, turn.clients * turn.requests)
            cells.measure(key, partial(measured, server, memory, some, turn))


def medians(cells: Cells, key: str) -> Figures:
    """Of each figure over the repeats; none of a server that did not start."""
    found = {figure: cells.values(key, figure) for figure in COLUMNS}
    return {figure: statistics.median(values) for figure, values in found.items() if values}


def _results(
    args: argparse.Namespace,
    rivals: Sequence[Rival],
    found: Mapping[tuple[Rival, Turn, str], Figures],
) -> Results:
    runs = [
        {"server": rival.name, **turn._asdict(), "kind": kind, **told}
        for (rival, turn, kind), told in sorted(found.items(), key=lambda one: one[0][1])
    ]
    columns = {"server": "{server}", "clients": "{clients}"}
    columns |= {told: f"{{{name}}}" for name, (told, _) in COLUMNS.items()}
    tables = []
    for prompt, kind in itertools.product(args.prompts, args.kinds):
        rows = [
            dict.fromkeys(COLUMNS, "")
            | {"tokens_per_s": _NO_START}
            | run
            | {name: f"{run[name]:{form}}" for name, (_, form) in COLUMNS.items() if name in run}
            for run in runs
            if (run["prompt"], run["kind"]) == (prompt, kind)
        ]
        tables.append(table(f"Prompts of {prompt:,} tokens, {kind}", rows, columns))
    commands = [[rival.name, f"`{rival.shown}`"] for rival in rivals]
    return Results(runs, tables=[*tables, ResultTable("", ["server", "command"], commands)])


def rivals_of(args: argparse.Namespace) -> list[Rival]:
    """The servers that are asked for, Penstock's first. Raises: ValueError, one line."""
    names = {"model": shlex.quote(str(args.model)), "python": shlex.quote(sys.executable)}
    rivals = [Rival("penstock", _PENSTOCK.format(more="--no-speculation", **names))]
    for drafters in args.drafter:
        each = drafters.split(",")
        more = " ".join(f"--drafter {shlex.quote(drafter)}" for drafter in each)
        own = [" ".join(part.rpartition("/")[2] for part in one.split("=")) for one in each]
        rivals.append(Rival(f"penstock, {', '.join(own)}", _PENSTOCK.format(more=more, **names)))
    folders = {"llama.cpp": (args.llama_cpp, ""), "ik_llama.cpp": (args.ik_llama, " -rtr")}
    for name, (folder, more) in folders.items():
        if folder is not None:
            program = shlex.quote(str(folder / "llama-server"))
            for shown, own in ((name, more), (f"{name}, look-up", f"{more} {_LOOK_UP[name]}")):
                rivals.append(Rival(shown, _LLAMA.format(program=program, more=own, **names)))
    for other in args.other:
        name, _, command = other.partition("=")
        if not command.strip():
            raise ValueError(f"--other is {other!r}; allowed: NAME=COMMAND")
        rivals.append(Rival(name, command))
    for rival in rivals:
        if shutil.which(program := shlex.split(rival.command)[0]) is None:
            raise ValueError(f"{rival.name}: no program {program}")
    return rivals


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[Rival]]:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.servers", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="GGUF file that all serve")
    add(
        "--drafter",
        action="append",
        default=[],
        metavar="NAME[=FILE],...",
        help="Penstock with these",
    )
    add("--llama-cpp", type=Path, metavar="FOLDER", help="llama.cpp's, by its llama-server")
    add("--ik-llama", type=Path, metavar="FOLDER", help="ik_llama.cpp's, weights repacked")
    add("--other", action="append", default=[], metavar="NAME=COMMAND")
    add("--clients", type=counts, default=[1, 4, 8, 32], metavar="N,N")
    add("--prompts", type=counts, default=[100, 1400, 6000], metavar="N,N", help="tokens")
    add("--kinds", type=names_of(KINDS), default=[*KINDS], help=", ".join(KINDS))
    add("--tokens", type=count, default=128, help="of an answer")
    add("--requests", type=count, default=2, help="of each client in a cell")
    add("--repeats", type=count, default=3, help="starts of each server")
    add("--smoke", action="store_true", help="few tokens of a small model: does it all run?")
    add("--json", type=Path, metavar="FILE", default=Path("servers.jsonl"), help="every cell")
    add("--result", type=Path, metavar="FILE", help="write a result file, too")
    if "--smoke" in (sys.argv if arguments is None else arguments):
        parser.set_defaults(**SMOKE)
    args = parser.parse_args(arguments)
    if args.model is None or not args.model.is_file():
        parser.error(f"model is {args.model}; allowed: a GGUF file that is there")
    try:
        return args, rivals_of(args)
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    from penstock.engine.tokenizer import load_tokenizer

    args, rivals = parse(arguments)
    try:
        prompts = Prompts(load_tokenizer(args.model), "\n".join(source_texts()))
        results = measure(args, rivals, prompts)
    except (ServerError, OSError, ValueError) as error:
        print(f"servers: {error}", file=sys.stderr)
        return 1
    if args.result:
        save(args.result, results)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
