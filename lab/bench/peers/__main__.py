"""How fast is Penstock beside transformers, vLLM, llama.cpp and OpenVINO GenAI, in one run?

    python -m lab.bench.peers [--quick] [--json]
        [--engines penstock,vllm] [--models random,zoo] [--batches 1,8] [--repeats 5]
    python -m lab.bench.peers --gguf TARGET.gguf[,DRAFTER.gguf] [--gguf ...]

Same checkpoints, same prompts as token ids, greedy, 64 new tokens, end-of-text ignored, two
threads, passes in turn. The same command goes on where a run was cut. See docs/reproduce.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.bench.peers.checkpoints import MODELS, PeerCheckpoint, gguf_models, load_models
from lab.bench.peers.engines import ENGINES, PEERS, PeerEngine
from lab.bench.peers.install import install
from lab.bench.peers.report import print_report
from lab.bench.peers.store import Store
from lab.bench.peers.sweep import PeerSweep
from lab.bench.peers.verdict import BARS, gguf_bars, judge
from lab.bench.peers.workers_pool import Pool

FOLDER = Path.home() / ".cache" / "penstock" / "peers"
MOST_REQUESTS = 32
"""Of one call, whichever batch sizes a run has: programs size their caches by it."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.peers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="first settings only, two passes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--engines", type=_names(tuple(ENGINES)), default=list(ENGINES))
    parser.add_argument("--models", type=_names(MODELS), help="default: all, with --gguf none")
    parser.add_argument(
        "--gguf",
        type=_gguf_files,
        action="append",
        default=[],
        metavar="TARGET[,DRAFTER]",
        help="a real model with real prompts, perhaps with a drafter; may be repeated",
    )
    parser.add_argument("--batches", type=_names(("1", "4", "8", "32")))
    parser.add_argument("--repeats", type=int, help="counted passes: 5, with --quick 2")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="environments, models, figures")
    args = parser.parse_args(arguments)
    if args.repeats is not None and args.repeats < 1:
        parser.error(f"--repeats must be 1 or more, not {args.repeats}")
    if args.models is None:
        args.models = [] if args.gguf else list(MODELS)
    args.repeats = args.repeats or (2 if args.quick else 5)
    usual = ("1", "4", "8", "32") if args.gguf and not args.models else ("1", "8", "32")
    args.batches = [int(b) for b in args.batches or (("1", "8") if args.quick else usual)]
    return args


def _names(allowed: Sequence[str]):
    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r}; choose from {', '.join(allowed)}")
        return [name for name in allowed if name in found]

    return names


def _gguf_files(text: str) -> tuple[Path, Path | None]:
    files = [Path(part) for part in text.split(",")]
    for file in files:
        if file.suffix != ".gguf" or not file.is_file():
            raise argparse.ArgumentTypeError(f"{file} is not a GGUF file that is there")
    if len(files) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} names more than a target and a drafter")
    return files[0], files[1] if len(files) == 2 else None


def ready_engines(
    names: Sequence[str], folder: Path, models: Sequence[PeerCheckpoint]
) -> tuple[list[PeerEngine], dict[str, str]]:
    """The engines that can be run, and why the others cannot; those that read none of the models
    are not missed."""
    folder.mkdir(parents=True, exist_ok=True)
    able = [name for name in ENGINES if any(map(ENGINES[name].settings_for, models))]
    left_out = [peer for peer in PEERS if peer in able and peer not in names]
    missing = dict.fromkeys(left_out, "left out by --engines")
    engines = []
    for name in (name for name in names if name in able):
        why = install(ENGINES[name], folder)
        if why is None:
            engines.append(ENGINES[name])
        else:
            missing[name] = why
    return engines, missing


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    models = load_models(args.models, args.folder / "models")
    models += [model for files in args.gguf for model in gguf_models(*files)]
    engines, missing = ready_engines(args.engines, args.folder, models)
    bars = [*(BARS if args.models else ()), *gguf_bars(models)]
    pool, store = Pool(args.folder, MOST_REQUESTS), Store(args.folder / "measured.jsonl")
    sweep = PeerSweep(pool, store, engines, bars, args.repeats, quick=args.quick)
    runs = sweep.measure(models, args.batches)
    verdict = judge(runs, missing, bars)
    if args.json:
        print(json.dumps({"runs": runs, "verdict": verdict}))
    else:
        print_report(runs, verdict)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on behind what is measured")
