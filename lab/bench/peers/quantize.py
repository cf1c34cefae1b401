"""A GGUF file in another format, made by llama.cpp itself.

    python -m lab.bench.peers.quantize IN.gguf OUT.gguf q4_0

From a file that is quantised already, it gives the same values coarser or at more bits, not the
original's: good for measuring speed, not for judging a format's quality.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.bench.peers.engines import ENGINES, WORKERS
from lab.bench.peers.install import install

FOLDER = Path.home() / ".cache" / "penstock" / "peers"
FORMATS = ("q8_0", "q4_0", "q4_k_m")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.peers.quantize", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source", type=Path, metavar="IN.gguf")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="environments")
    args = parser.parse_args(arguments)
    if not args.source.is_file():
        parser.error(f"{args.source} is not there")
    if args.out.exists():
        parser.error(f"{args.out} exists; choose another name")
    engine = ENGINES["llamacpp"]
    args.folder.mkdir(parents=True, exist_ok=True)
    why = install(engine, args.folder)
    if why is not None:
        sys.exit(f"llama.cpp cannot be installed: {why}")
    unfinished = args.out.with_suffix(".unfinished")
    script = WORKERS / "quantize_gguf.py"
    command = [engine.python(args.folder), script, args.source, unfinished, args.format]
    done = subprocess.run([str(part) for part in command], check=False)
    if done.returncode == 0:
        unfinished.rename(args.out)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
