"""What do quantised weights lose in perplexity, and does the engine agree with llama.cpp on it?

    python -m lab.bench.perplexity MODEL... [--llama-cpp FOLDER] [--near MODEL] [--tokens 50000]

A MODEL is a GGUF file, a folder or a bundled model's name. With a FOLDER that has llama.cpp's
`llama-perplexity`, GGUF files are read by that, too: perplexities must be within 0.1% of one
another, and the likeliest token equal at 99.5% of the positions. With keys and values in 8 bits,
every model must be within 0.3% of itself without. `--near`: the others must be within 0.5% of this
one. The first one's tokenizer, or that of `--near`, makes the tokens of all. Windows of 512 tokens,
the second half of each counted, as llama.cpp's own tool does. Every window is kept in the cache
folder, so that a run that was cut goes on where it ended.

A control says how much of that is rounding of activations: the same weights in float32, made by
`llama-quantize --allow-requantize FILE.gguf F32.gguf F32`, then `--near F32.gguf FILE.gguf`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO, NamedTuple

import numpy as np
import torch

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

COUNTED = WINDOW - 1 - FIRST
"""Tokens of a window that are."""

WITHIN_PEER, WITHIN_BASE, WITHIN_KV = 0.001, 0.005, 0.003
EQUAL_PEER = 0.995
_PIECE_CHARS, _BLOCK_SIZE = 1500, 16

OURS, KV8, THEIRS = "penstock", "penstock-kv-int8", "llamacpp"


class Window(NamedTuple):
    """Of its counted tokens: the negative log-likelihood, and what was likeliest in their place."""

    loss: float
    likeliest: list[int]


class Read(NamedTuple):
    """One model's windows in one program."""

    model: str
    program: str
    windows: Sequence[Window]

    @property
    def tokens(self) -> int:
        return len(self.windows) * COUNTED

    @property
    def perplexity(self) -> float:
        return math.exp(sum(window.loss for window in self.windows) / self.tokens)

    def equal(self, other: Read) -> float:
        """Share of the positions at which both find the same token likeliest."""
        pairs = zip(self.windows, other.windows, strict=True)
        same = (np.equal(mine.likeliest, yours.likeliest).sum() for mine, yours in pairs)
        return float(sum(same)) / self.tokens


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


def text_of(path: Path, tokens: int) -> str:
    """The text's beginning that has so many tokens, or more."""
    tokenizer, found, num = load_tokenizer(path), list[str](), 0
    for text in texts():
        found.append(text + "\n\n")
        num += len(tokenizer.encode(found[-1], add_special_tokens=False))
        if num >= tokens + WINDOW:  # pieces together may have fewer
            break
    return "".join(found)


def windows_of(path: Path, tokens: int) -> list[list[int]]:
    """Whole windows of the text's first `tokens` tokens, each with the model's first token."""
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(text_of(path, tokens))
    windows = [ids[i : i + WINDOW] for i in range(0, tokens - WINDOW + 1, WINDOW)]
    begin = tokenizer.encode("")
    return [[*begin, *window[len(begin) :]] for window in windows]


def our_windows(
    path: Path, windows: Iterable[Sequence[int]], kv_dtype: torch.dtype | None = None
) -> Iterator[Window]:
    """Read the windows by this engine. Raises: CheckpointError."""
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
        writer.add(0, window[:-1], COUNTED)
        logits = runner.forward(writer.batch(blocks))
        wanted = torch.tensor(window[FIRST + 1 :])
        loss = float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        yield Window(loss, logits.argmax(dim=-1).tolist())


def their_windows(
    path: Path, windows: Sequence[Sequence[int]], text: str, folder: Path
) -> list[Window]:
    """The same by `llama-perplexity`, whose log-probabilities come through a pipe, in 16 bits.

    Losses are from the perplexities that it prints. Raises: OSError."""
    readable, writable = os.pipe()
    with tempfile.TemporaryDirectory() as made, open(readable, "rb") as pipe:
        written, printed = Path(made, "text"), Path(made, "printed")
        written.write_text(text)
        sizes = {"-c": WINDOW, "-b": WINDOW, "--chunks": len(windows), "-t": os.cpu_count()}
        # Its flash attention on the CPU rounds more: half a per cent of a window's perplexity.
        options = {"-m": path, "-f": written, "-fa": "off", **sizes}
        options["--kl-divergence-base"] = f"/dev/fd/{writable}"
        command = [folder / "llama-perplexity", *itertools.chain(*options.items())]
        with printed.open("wb") as out:
            process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, pass_fds=[writable]
            )
        os.close(writable)
        try:
            likeliest = list(_likeliest(pipe, windows))
        except ValueError as error:
            raise OSError(f"llama-perplexity {path.name}: {error}") from error
        finally:
            pipe.close()
            process.wait()
        said = re.findall(r"\[\d+\]([\d.]+),", printed.read_text(errors="replace"))
    if len(said) != len(windows):
        raise OSError(f"llama-perplexity {path.name}: {len(said)} of {len(windows)} windows")
    sums = [COUNTED * n * math.log(float(mean)) for n, mean in enumerate(said, 1)]
    losses = (after - before for before, after in itertools.pairwise([0.0, *sums]))
    return list(map(Window, losses, likeliest))


def _likeliest(pipe: IO[bytes], windows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Read what llama.cpp's `--kl-divergence-base` writes. Raises: ValueError."""

    def read(kind: type[np.generic], count: int) -> np.ndarray:
        return np.frombuffer(pipe.read(count * np.dtype(kind).itemsize), kind, count)

    read(np.int32, 3)  # its name, and the size of a window
    vocabulary, num_windows = read(np.int32, 2).tolist()
    tokens = read(np.int32, num_windows * WINDOW).reshape(num_windows, WINDOW)
    if tokens[:, 1:].tolist() != [[*window[1:]] for window in windows]:
        raise ValueError("its tokenizer makes other tokens of the text")
    width = vocabulary + vocabulary % 2 + 4  # after scale and offset in float32
    for _ in windows:
        rows = read(np.uint16, COUNTED * width).reshape(COUNTED, width)
        yield rows[:, 4 : 4 + vocabulary].argmax(axis=1).tolist()


def read_by(
    program: str,
    path: Path,
    windows: Sequence[Sequence[int]],
    folder: Path,
    theirs: tuple[str, Path] | None = None,
) -> Read:
    """Take the windows from what is kept of an earlier run, and the rest now.

    theirs: the text, and llama.cpp's folder. Raises: CheckpointError, OSError."""
    kept = folder / "perplexity" / f"{_key(path, program, windows)}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = kept.read_text().splitlines() if kept.exists() else []
    found = [Window(*json.loads(line)) for line in known][: len(windows)]
    left = windows[len(found) :]
    new: Iterable[Window]
    if theirs is not None:  # it begins with the text
        new = their_windows(path, windows, *theirs)[len(found) :] if left else ()
    else:
        new = our_windows(path, left, torch.int8 if program == KV8 else None) if left else ()
    with kept.open("a") as file:
        for window in new:
            found.append(window)
            print(json.dumps(window), file=file, flush=True)
            so_far = f"{len(found)} of {len(windows)} windows"
            so_far += f", {Read('', '', found).perplexity:.4f}"
            print(f"{path.name}, {program}: {so_far}", file=sys.stderr, flush=True)
    return Read(path.name, program, found)


def _key(path: Path, program: str, windows: Sequence[Sequence[int]]) -> str:
    """Of the model's files, the text and the program: what a loss depends on."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    parts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    libraries = [] if program == THEIRS else [Path(loading.load_library()._name)]
    code = [hashlib.sha256(p.read_bytes()).hexdigest() for p in libraries]
    # A longer text begins with the shorter one's windows.
    described = json.dumps([str(path.resolve()), parts, windows[:1], program, code])
    return f"{path.stem}-{program}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def verdicts(found: Sequence[Read], near: str | None) -> Iterator[ClaimVerdict]:
    """Of GGUF files against llama.cpp, and of all models against `near`."""
    ours = {read.model: read for read in found if read.program == OURS}

    def within(read: Read, other: Read, most: float, claim: str) -> ClaimVerdict:
        ratio = read.perplexity / other.perplexity - 1
        return bar(f"{claim.format(f'within {most:.1%}')}", f"{ratio:+.3%}", abs(ratio) <= most)

    for their in (read for read in found if read.program == THEIRS):
        mine = ours[their.model]
        yield within(mine, their, WITHIN_PEER, f"{mine.model} {{}} of llama.cpp")
        equal = mine.equal(their)
        claim = f"{mine.model}: likeliest token as llama.cpp's at {EQUAL_PEER:.1%}"
        yield bar(claim, f"{equal:.2%}", equal >= EQUAL_PEER)
    for eight in (read for read in found if read.program == KV8):
        claim = f"{eight.model} with KV in 8 bits {{}} of itself without"
        yield within(eight, ours[eight.model], WITHIN_KV, claim)
    for name, mine in ours.items():
        if near is not None and name != near:
            yield within(mine, ours[near], WITHIN_BASE, f"{name} {{}} of {near}")


def rows_of(found: Sequence[Read], near: str | None) -> list[dict[str, object]]:
    """Figures of each, and how often its likeliest token is llama.cpp's, and `near`'s here."""
    known = {(read.model, read.program): read for read in found}

    def equal(read: Read, model: str | None, program: str) -> str:
        other = None if model is None else known.get((model, program))
        return "" if other is None or other is read else f"{read.equal(other):.2%}"

    return [
        {
            "model": read.model,
            "program": read.program,
            "tokens": read.tokens,
            "perplexity": read.perplexity,
            "as_peer": equal(read, read.model, THEIRS),
            "as_near": equal(read, near, read.program),
        }
        for read in found
    ]


def measure(
    models: Sequence[str], tokens: int, folder: Path, llama_cpp: Path | None
) -> Iterator[Read]:
    """Raises: CheckpointError, OSError."""
    paths = [model_path(name) if name in bundled_models() else Path(name) for name in models]
    windows = windows_of(paths[0], tokens)
    for path in paths:
        yield read_by(OURS, path, windows, folder)
        yield read_by(KV8, path, windows, folder)
        if llama_cpp is not None and is_gguf(path):
            theirs = (text_of(paths[0], tokens), llama_cpp)
            yield read_by(THEIRS, path, windows, folder, theirs)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("model", nargs="+", help="GGUF file, folder or bundled model")
    options.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="with llama-perplexity")
    options.add_argument("--near", metavar="MODEL", help="all others must be near this one")
    options.add_argument("--tokens", type=int, default=50_000)
    cache = Path.home() / ".cache" / "penstock" / "peers"
    options.add_argument("--folder", type=Path, default=cache, help="of kept windows")
    args = options.parse_args(arguments)
    if args.tokens < 2 * WINDOW:
        options.error(f"--tokens must be two windows' {2 * WINDOW} or more, not {args.tokens}")
    models = [*([args.near] if args.near else ()), *args.model]
    try:
        found = list(measure(models, args.tokens, args.folder, args.llama_cpp))
    except (CheckpointError, OSError) as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return 2
    near = Path(args.near).name if args.near else None
    columns = {"model": "{model}", "program": "{program}", "counted tokens": "{tokens:,}"}
    columns |= {"perplexity": "{perplexity:.4f}", "likeliest as llama.cpp's": "{as_peer}"}
    columns |= {} if near is None else {f"as {near}'s": "{as_near}"}
    rows = rows_of(found, near)
    shown = table("", rows, columns)
    return tell(args, Results(rows, list(verdicts(found, near)), [shown]))


if __name__ == "__main__":
    sys.exit(main())
