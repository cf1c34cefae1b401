"""Does a server with models on a GPU write the target's own text, and how fast with draft servers?

    python -m lab.bench.gpu_serve exact|draft [--family DIR] [--device cuda] [--json]

Real servers, asked through the `openai` package, eight requests at once, half of them greedy and
half sampled with a seed. `exact`: texts with drafters on the GPU and on the host's cores, beside
the target in lanes, against those of the target alone; in float32 they must be equal, bfloat16 is
reported. Control: other seeds. `draft`: a verification server on the CPU with no drafter, with a
draft server on the CPU's other cores, and with one on the GPU; tokens per second, best of turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from lab.bench.bundled_server import BundledServer, bundled_server, stopping
from lab.common.results import Results, parser, table, tell
from penstock.zoo.registry import (
    DEFAULT_DRAFTER,
    DEFAULT_TARGET,
    DOMAINS,
    WEIGHTS,
    load_prompts,
    model_path,
)

_AT_ONCE, _NEW_TOKENS, _TURNS = 8, 64, 2
Texts = list[str]


async def _ask(url: str, prompts: Sequence[str], seed: int) -> tuple[Texts, float]:
    """Texts and seconds. Even prompts are greedy."""
    gate = asyncio.Semaphore(_AT_ONCE)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
        model = (await client.models.list()).data[0].id

        async def one(number: int, prompt: str) -> str:
            async with gate:
                answer = await client.completions.create(
                    model=model,
                    prompt=prompt,
                    max_tokens=_NEW_TOKENS,
                    temperature=0.8 * (number % 2),
                    seed=seed + number,
                )
            return answer.choices[0].text

        began = time.perf_counter()
        texts = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
        return list(texts), time.perf_counter() - began


def ask(server: BundledServer, prompts: Sequence[str], seed: int = 0) -> tuple[Texts, float]:
    return asyncio.run(_ask(server.url, prompts, seed))


def prompts_of(each: int) -> list[str]:
    """So many of every domain."""
    return [p.prompt for domain in DOMAINS for p in load_prompts(domain)[:each]]


def equal(texts: Texts, others: Texts) -> str:
    same = sum(a == b for a, b in zip(texts, others, strict=True))
    return f"{same} of {len(texts)}"


def exact(family: Path, device: str) -> list[dict[str, Any]]:
    target, cores = str(model_path(DEFAULT_TARGET, family)), os.cpu_count() or 2
    half = f"cpu:{cores // 2}-{cores - 1}"
    placed = {
        "base-gpu": (DEFAULT_DRAFTER, device),
        "code-gpu": ("draft-code", device),
        "lang-host": ("draft-lang", half),
    }
    drafters: dict[str, Any] = {
        name: {"path": str(model_path(model, family)), "device": place}
        for name, (model, place) in placed.items()
    }
    prompts, rows = prompts_of(8), []
    for dtype in ("float32", "bfloat16"):
        common = ["--device", device, "--dtype", dtype, "--kv-tokens", "65536", target]
        with bundled_server("--no-speculation", *common) as server:
            alone, _ = ask(server, prompts)
            others, _ = ask(server, prompts, seed=1000)
            again, alone_s = ask(server, prompts)
            print(f"{dtype}: started in {server.start_s:.0f} s", file=sys.stderr, flush=True)
        told = {"family": family.name, "dtype": dtype}
        for drafting, settings in (
            ("GPU and host, two micro-batches", {"drafters": drafters, "pipeline": "2"}),
            ("GPU and host, default", {"drafters": drafters}),
        ):
            with bundled_server(*common, settings={"engine": settings}) as server:
                texts, _ = ask(server, prompts)
                _, seconds = ask(server, prompts)
                accepted = server.metric("spec_decode_num_accepted_tokens_total")
                tokens = server.by_label("spec_decode_num_accepted_tokens_total", "drafter")
            row = told | {
                "drafters": drafting,
                "equal": equal(texts, alone),
                "again": equal(again, alone),
                "control": equal(others, alone),
                "accepted": accepted,
                "by": ", ".join(f"{name} {int(n)}" for name, n in tokens.items()),
                "gain": alone_s / seconds,
                "start_s": server.start_s,
            }
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    return rows


@contextmanager
def draft_server(address: str, model: Path, device: str) -> Iterator[None]:
    command = [sys.executable, "-m", "penstock.cli", "draft", "--connect", address]
    command += ["--model", str(model), "--device", device]
    with subprocess.Popen(command) as process, stopping(process):
        yield


def draft(family: Path, device: str) -> list[dict[str, Any]]:
    """Tokens per second with no draft server, one on the CPU, one on the GPU."""
    cores = os.cpu_count() or 2
    ours, theirs = f"cpu:0-{cores // 2 - 1}", f"cpu:{cores // 2}-{cores - 1}"
    target, model = model_path(DEFAULT_TARGET, family), model_path(DEFAULT_DRAFTER, family)
    prompts, rows = prompts_of(2), []
    alone: Texts = []
    for where in ("none", theirs, device):
        address = "127.0.0.1:7979"
        arguments = ["--device", ours, "--drafters-listen", address, str(target)]
        with bundled_server(*arguments) as server:
            if where == "none":
                found = [ask(server, prompts) for _ in range(1 + _TURNS)]
            else:
                with draft_server(address, model, where):
                    _until(lambda s=server: s.metric("draft_servers") >= 1)
                    found = [ask(server, prompts) for _ in range(1 + _TURNS)]
            accepted = server.metric("spec_decode_num_accepted_tokens_total")
        texts = found[0][0]
        alone = alone or texts
        tokens = len(prompts) * _NEW_TOKENS
        rows.append(
            {
                "family": family.name,
                "draft_server": where,
                "equal": equal(texts, alone),
                "tokens_per_s": tokens / min(seconds for _, seconds in found[1:]),
                "accepted": accepted,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _until(holds: Any, seconds: float = 120) -> None:
    """Raises: RuntimeError."""
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            raise RuntimeError("no draft server came")
        time.sleep(0.2)


_COLUMNS = {
    "exact": {
        "models": "{family}",
        "dtype": "{dtype}",
        "drafters": "{drafters}",
        "texts equal to the target's alone": "{equal}",
        "target alone, again": "{again}",
        "control: other seeds": "{control}",
        "accepted": "{by}",
        "times as fast": "{gain:.2f}",
    },
    "draft": {
        "models": "{family}",
        "draft server": "{draft_server}",
        "texts equal": "{equal}",
        "tokens/s": "{tokens_per_s:.0f}",
        "accepted": "{accepted:.0f}",
    },
}


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("part", choices=_COLUMNS)
    made.add_argument("--device", default="cuda")
    made.add_argument("--family", type=Path, default=WEIGHTS)
    args = made.parse_args(arguments)
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp())
    rows = {"exact": exact, "draft": draft}[args.part](args.family, args.device)
    titles = {"exact": "Models on a GPU", "draft": "A verification server on the CPU"}
    return tell(args, Results(rows, (), [table(titles[args.part], rows, _COLUMNS[args.part])]))


if __name__ == "__main__":
    sys.exit(main())
