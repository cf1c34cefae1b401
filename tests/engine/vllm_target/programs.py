"""Programs with vLLM in them, in processes of their own: it changes much of one that loads it."""

import itertools
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]


def environment(num_workers: int = 1) -> dict[str, str]:
    """num_workers: that one process starts; each has a core of the machine."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    if num_workers > 1:
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        bound = map(str, itertools.islice(cores, num_workers))
        own["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return {**os.environ, **own}


def skip_if_it_computes_nothing() -> None:
    """Skip where vLLM is built for GPUs and there is none: what plans can be tested, no model."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        if not torch.cuda.is_available():
            pytest.skip("vLLM's build for GPUs computes no model without one")


def run(module: str, *arguments: object, num_workers: int = 1) -> Any:
    """What a program beside this one says in the last line of its output."""
    command = [sys.executable, "-m", f"tests.engine.vllm_target.{module}", *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(num_workers),
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
