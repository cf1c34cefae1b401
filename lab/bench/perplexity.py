"""What do quantised weights lose in perplexity, and does the engine agree with llama.cpp on it?

    python -m lab.bench.perplexity MODEL... [--near MODEL] [--tokens 50000] [--result FILE]

A MODEL is a GGUF file, a folder or a bundled model's name. GGUF files are read by llama.cpp, too,
and must agree with it within 0.1%. With keys and values in 8 bits, every model must be within 0.3%
of itself without. `--near`: the others must be within 0.5% of this one. The first
one's tokenizer, or that of `--near`, makes the tokens of all. Windows of 512 tokens, the second
half of each counted, as llama.cpp's own tool does. Every window is kept in the cache folder, so
that a run that was cut goes on where it ended.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

from lab.bench.peers.__main__ import FOLDER
from lab.bench.peers.engines import ENGINES, WORKERS
from lab.bench.peers.install import install
from lab.bench.real_prompts import source_texts
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, parser, table, tell
from lab.zoo.corpora import GENERATORS, examples
from penstock.engine.backends import load_runner
from penstock.engine.models.checkpoint import CheckpointError, is_gguf
from penstock.engine.models.dtypes import resolve_dtype
from penstock.engine.native import loading
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import BatchWriter, ModelRunner
from penstock.engine.tokenizer import load_tokenizer
from penstock.zoo.registry import bundled_models, model_path

WINDOW = 512
FIRST = WINDOW // 2
"""Tokens of a window that are context alone."""

WITHIN_PEER, WITHIN_BASE, WITHIN_KV = 0.001, 0.005, 0.003
_PIECE_CHARS, _BLOCK_SIZE = 1500, 16

OURS, KV8, THEIRS = "penstock", "penstock-kv-int8", "llamacpp"
THEIR_SCRIPT = WORKERS / "losses_llamacpp.py"


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of one model in one program, over `tokens` counted tokens."""

    model: str
    program: str
    tokens: int
    perplexity: float


def texts() -> Iterator[str]:
    """Python's language reference, the standard library's source and held-back examples of the
    bundled family's domains in turn; the same on every machine with the same Python."""
    made = [examples(domain, "held_back") for domain in GENERATORS]
    references = itertools.cycle(sorted(topics))
    for source, reference in zip(itertools.cycle(source_texts()), references, strict=False):
        yield topics[reference].strip()[:_PIECE_CHARS]
        yield source[:_PIECE_CHARS]
        for example in map(next, made):
            yield f"{example.prompt}{example.answer}"


def windows_of(path: Path, tokens: int) -> list[list[int]]:
    """Whole windows of the first `tokens` tokens of the text."""
    tokenizer = load_tokenizer(path)
    ids: list[int] = []
    for text in texts():
        ids += tokenizer.encode(text + "\n\n")
        if len(ids) >= tokens:
            break
    return [ids[i : i + WINDOW] for i in range(0, tokens - WINDOW + 1, WINDOW)]


def our_losses(
    path: Path, windows: Iterable[Sequence[int]], kv_dtype: torch.dtype | None = None
) -> Iterator[float]:
    """Sum of the counted tokens' negative log-likelihoods, window by window. Raises:
    CheckpointError."""
    runner: ModelRunner
    if kv_dtype is None:
        runner = load_runner(path, "auto")
    else:
        dtype = resolve_dtype("auto", torch.device("cpu"))
        room = (WINDOW // _BLOCK_SIZE, _BLOCK_SIZE, torch.get_num_threads())
        runner = NativeRunner.load(path, dtype, *room, kv_dtype=kv_dtype)
    blocks = np.arange(runner.blocks_for(WINDOW), dtype=np.int32)[None]
    for window in windows:
        writer = BatchWriter()
        # The last token's own prediction is not asked for: nothing follows it.
        writer.add(0, window[:-1], WINDOW - 1 - FIRST)
        logits = runner.forward(writer.batch(blocks))
        wanted = torch.tensor(window[FIRST + 1 :])
        yield float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))


def their_losses(path: Path, windows: Iterable[Sequence[int]], folder: Path) -> Iterator[float]:
    """The same by llama.cpp, in its own environment. Raises: OSError."""
    engine = ENGINES[THEIRS]
    command = [str(engine.python(folder)), str(THEIR_SCRIPT), str(path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=engine.environment(folder),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for window in windows:
            process.stdin.write(json.dumps({"window": list(window), "first": FIRST}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise OSError(f"llama.cpp ended while it read {path}")
            yield float(line)


def perplexity(
    name: str, path: Path, program: str, windows: Sequence[Sequence[int]], folder: Path
) -> Perplexity:
    """From what is kept of an earlier run, and the rest now. Raises: CheckpointError, OSError."""
    kept = folder / "perplexity" / f"{_key(path, program, windows)}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    losses = [float(line) for line in kept.read_text().split()] if kept.exists() else []
    losses = losses[: len(windows)]
    left = windows[len(losses) :]
    if program == THEIRS:
        new = their_losses(path, left, folder)
    else:
        new = our_losses(path, left, torch.int8 if program == KV8 else None)
    with kept.open("a") as file:
        for loss in new if left else ():
            losses.append(loss)
            file.write(f"{loss!r}\n")
            file.flush()
            so_far = f"{len(losses)} of {len(windows)} windows, {_perplexity(losses):.4f}"
            print(f"{name}, {program}: {so_far}", file=sys.stderr, flush=True)
    counted = len(windows) * (WINDOW - 1 - FIRST)
    return Perplexity(name, program, counted, _perplexity(losses))


def _perplexity(losses: Sequence[float]) -> float:
    return math.exp(sum(losses) / (len(losses) * (WINDOW - 1 - FIRST)))


def _key(path: Path, program: str, windows: Sequence[Sequence[int]]) -> str:
    """Of the model's files, the text and the program: what a loss depends on."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    parts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    code: list[object] = [ENGINES[THEIRS].installs, THEIR_SCRIPT.read_text()]
    if program != THEIRS:
        libraries = sorted(loading.FOLDER.glob("*.so"))
        code = [hashlib.sha256(p.read_bytes()).hexdigest() for p in libraries]
    # A longer text begins with the shorter one's windows.
    described = json.dumps([str(path.resolve()), parts, windows[:1], program, code])
    return f"{path.stem}-{program}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def verdicts(found: Sequence[Perplexity], near: str | None) -> Iterator[ClaimVerdict]:
    """Of GGUF files against llama.cpp, and of all models against `near`."""
    ours = {p.model: p.perplexity for p in found if p.program == OURS}
    for other in (p for p in found if p.program == THEIRS):
        ratio = ours[other.model] / other.perplexity - 1
        claim = f"{other.model} within {WITHIN_PEER:.1%} of llama.cpp"
        yield bar(claim, f"{ratio:+.3%}", abs(ratio) <= WITHIN_PEER)
    for eight in (p for p in found if p.program == KV8):
        ratio = eight.perplexity / ours[eight.model] - 1
        claim = f"{eight.model} with KV in 8 bits within {WITHIN_KV:.1%} of itself without"
        yield bar(claim, f"{ratio:+.3%}", abs(ratio) <= WITHIN_KV)
    for model in ours if near is not None else ():
        if model != near:
            ratio = ours[model] / ours[near] - 1
            claim = f"{model} within {WITHIN_BASE:.1%} of {near}"
            yield bar(claim, f"{ratio:+.3%}", abs(ratio) <= WITHIN_BASE)


def measure(models: Sequence[str], tokens: int, folder: Path) -> Iterator[Perplexity]:
    """Raises: CheckpointError, OSError."""
    paths = [model_path(name) if name in bundled_models() else Path(name) for name in models]
    windows = windows_of(paths[0], tokens)
    for path in paths:
        yield perplexity(path.name, path, OURS, windows, folder)
        yield perplexity(path.name, path, KV8, windows, folder)
        if is_gguf(path):
            yield perplexity(path.name, path, THEIRS, windows, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("model", nargs="+", help="GGUF file, folder or bundled model")
    options.add_argument("--near", metavar="MODEL", help="all others must be near this one")
    options.add_argument("--tokens", type=int, default=50_000)
    options.add_argument("--folder", type=Path, default=FOLDER, help="environments, kept windows")
    args = options.parse_args(arguments)
    if args.tokens < WINDOW:
        options.error(f"--tokens must be a window's {WINDOW} or more, not {args.tokens}")
    models = [*([args.near] if args.near else ()), *args.model]
    try:
        if any(is_gguf(Path(name)) for name in models):
            args.folder.mkdir(parents=True, exist_ok=True)
            why = install(ENGINES[THEIRS], args.folder)
            if why is not None:
                raise OSError(f"llama.cpp cannot be installed: {why}")
        found = list(measure(models, args.tokens, args.folder))
    except (CheckpointError, OSError) as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return 2
    near = Path(args.near).name if args.near else None
    columns = {"model": "{model}", "program": "{program}", "counted tokens": "{tokens:,}"}
    rows = [asdict(one) for one in found]
    shown = table("", rows, columns | {"perplexity": "{perplexity:.4f}"})
    return tell(args, Results(rows, list(verdicts(found, near)), [shown]))


if __name__ == "__main__":
    sys.exit(main())
