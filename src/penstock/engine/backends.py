"""The one place that chooses: device, number format, attention and memory, and so the runner.

What only one backend needs is imported once it is chosen; `penstock.engine.gpu` and
`penstock.engine.vllm` only from here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.config import ConfigError, EngineConfig
from penstock.core.loop import Clock
from penstock.core.types import TARGET
from penstock.engine.attention import AttentionBackend, BackendUnavailableError
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.spelling import Vocabularies
from penstock.engine.drafters.text import TextDrafter
from penstock.engine.eager import EagerRunner
from penstock.engine.executor import LocalExecutor, RunnerExecutor
from penstock.engine.kv_cache import PagedKVCache, kv_bytes_per_token
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.dtypes import resolve_dtype
from penstock.engine.models.limits import beyond_kernels
from penstock.engine.models.random import random_weights
from penstock.engine.models.weights import load_weights, weight_bytes
from penstock.engine.native.library import native_library
from penstock.engine.native.loading import NativeUnavailableError
from penstock.engine.native.runner import DTYPES, NativeRunner
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import TokenSampler, sample_coupled
from penstock.engine.synthetic import SyntheticAcceptance
from penstock.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.engine.gpu.graphs import GraphRunner
    from penstock.engine.vllm.target import VllmTarget

ATTENTION = {
    "decomposed": "penstock.engine.attention.decomposed:DecomposedAttention",
    "decomposed_spin": "penstock.engine.attention.decomposed:SpinDecomposedAttention",
    "flashinfer": "penstock.engine.gpu.flashinfer:FlashInferAttention",
    "packed": "penstock.engine.attention.packed:PackedAttention",
    "padded": "penstock.engine.attention.padded:PaddedAttention",
    "reference": "penstock.engine.attention.reference:ReferenceAttention",
    "triton_paged": "penstock.engine.gpu.triton_paged:TritonAttention",
}
"""Where each attention backend is."""

_WITHOUT_WINDOWS = ("flashinfer", "triton_paged")

_MEMORY_SHARE = 0.25
_GPU_MEMORY_SHARE = 0.8
_DEFAULT_SEQUENCES = 64
_BLOCK_SIZE = 16
"""Of a model by itself."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where models are run, and how. num_threads: of the kernels on a CPU."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    backend: str
    num_threads: int


def resolve_placement(config: EngineConfig) -> Placement:
    """Also tells PyTorch how many threads to use. Raises: ConfigError."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    num_threads = torch.get_num_threads()
    device = _device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    backend = _backend(config, device, dtype)
    if backend == "native":
        # The kernels have threads of their own; PyTorch's would spin on the same cores.
        torch.set_num_threads(1)
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "float8" else dtype
    if kv_dtype != dtype:
        attention = resolve_attention(config.attention, device)
        if attention == "flashinfer" or (backend == "graphs" and attention != "triton_paged"):
            raise ConfigError(
                f"kv_dtype float8 is not read by attention {attention} of backend {backend}; "
                "allowed: attention triton_paged, or backend eager with another"
            )
    return Placement(device, dtype, kv_dtype, backend, num_threads)


def fit_models(
    config: EngineConfig,
    place: Placement,
    shapes: Mapping[str, DecoderConfig],
    max_model_len: int,
) -> Placement:
    """The placement, once it is known what the models compute: all of them eagerly where the
    kernels of the backend cannot do one. shapes: as of `Models`. Raises: ConfigError."""
    place = _eager_where_needed(config, place, shapes, max_model_len)
    if config.drafter_weights != "stored" and place.backend != "native":
        raise ConfigError(
            f"drafter_weights {config.drafter_weights} is for the CPU's own kernels; backend "
            f"{place.backend} takes: stored"
        )
    return place


def _eager_where_needed(
    config: EngineConfig,
    place: Placement,
    shapes: Mapping[str, DecoderConfig],
    max_model_len: int,
) -> Placement:
    if place.backend == "eager":
        return place
    for name, shape in shapes.items():
        why_not = beyond_kernels(shape, min(max_model_len, shape.max_position_embeddings))
        if why_not is None:
            continue
        if config.backend != "auto":
            raise ConfigError(
                f"backend {place.backend} does not compute {why_not}, which the model "
                f"{name} ({shape.architecture}) has; allowed: auto, eager"
            )
        _log.warning(
            "the %s kernels do not compute %s, which the model %s (%s) has: it runs eagerly",
            place.backend,
            why_not,
            name,
            shape.architecture,
        )
        torch.set_num_threads(place.num_threads)
        return replace(place, backend="eager")
    return place


def resolve_attention(name: str, device: torch.device, *, windowed: bool = False) -> str:
    """The attention backend that is meant on a device. windowed: some layers have a sliding window.
    Raises: ConfigError."""
    if name == "auto":
        if device.type != "cuda" or windowed:
            return "packed"
        from penstock.engine.gpu.triton_paged import why_not_triton

        return "triton_paged" if why_not_triton(device) is None else "packed"
    if name not in ATTENTION:
        raise ConfigError(f"attention is {name!r}; allowed: auto, {', '.join(ATTENTION)}")
    if windowed and name in _WITHOUT_WINDOWS:
        others = ", ".join(other for other in ATTENTION if other not in _WITHOUT_WINDOWS)
        raise ConfigError(
            f"attention {name} has no sliding windows, which a model has; allowed: auto, {others}"
        )
    return name


def make_attention(name: str, cache: PagedKVCache, num_heads: int) -> AttentionBackend[Any]:
    """Raises: ValueError for an unknown name, BackendUnavailableError where it cannot be used."""
    if name not in ATTENTION:
        raise ValueError(f"attention is {name!r}; allowed: {', '.join(ATTENTION)}")
    module, _, kind = ATTENTION[name].partition(":")
    backend: AttentionBackend[Any] = getattr(import_module(module), kind)(cache, num_heads)
    return backend


def why_not_native() -> str | None:
    """Why the native CPU kernels cannot be used on this machine; None if they can."""
    try:
        native_library()
    except NativeUnavailableError as error:
        return str(error)
    return None


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch sees no CUDA device")
    return device


def _backend(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    """CUDA graphs on a GPU; the native CPU kernels where they can be had, else eager."""
    if config.backend in ("eager", "graphs"):
        return config.backend
    if config.backend == "auto" and device.type == "cuda":
        return "graphs"
    why_not: str | None = None
    if device.type != "cpu":
        why_not = f"it runs on the CPU, not on {device}"
    elif dtype not in DTYPES:
        why_not = f"it computes float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    elif config.kv_dtype != "auto":
        why_not = f"it keeps keys and values as it computes, not as {config.kv_dtype}"
    else:
        why_not = why_not_native()
    if config.backend == "native" and why_not is not None:
        raise ConfigError(f"backend native cannot be used: {why_not}")
    return "eager" if why_not is not None else "native"


def resolve_context(config: EngineConfig, target: DecoderConfig) -> int:
    """Most tokens of a request. Raises: ConfigError."""
    limit = target.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {limit} positions of the target"
        )
    return config.max_model_len or limit


def resolve_num_blocks(
    config: EngineConfig, place: Placement, models: Collection[DecoderConfig], max_model_len: int
) -> int:
    """KV blocks of every model: as asked, or what a share of the free memory holds."""
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // config.block_size)
    weights = sum(weight_bytes(model, place.dtype) for model in models)
    return affordable_blocks(
        models, place.kv_dtype, place.device, config.block_size, max_model_len, weights
    )


def affordable_blocks(
    models: Collection[DecoderConfig],
    kv_dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_model_len: int,
    weights: int,
) -> int:
    """KV blocks that each of the models may have out of a share of the free memory; no more than 64
    texts of full length need, and at least 1.

    weights: bytes that are yet to be loaded, which a GPU's memory has to hold beside the KV. On a
    CPU they are not counted: the share leaves them three times the room.

    Raises: ConfigError where it cannot hold even them.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if weights >= free:
            raise ConfigError(
                f"the models take {weights / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB "
                "free: smaller models, fewer drafters or a smaller dtype would fit"
            )
        free -= weights
        share = _GPU_MEMORY_SHARE
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = _MEMORY_SHARE
    tokens = int(free * share) // sum(kv_bytes_per_token(m, kv_dtype) for m in models)
    return max(1, min(tokens, _DEFAULT_SEQUENCES * max_model_len) // block_size)


@dataclass(frozen=True, slots=True)
class Models:
    """Makes runners, drafters and the executor of one backend.

    shapes: of the models, by the drafter's name, the target's under TARGET; num_blocks: of each
    model's KV memory; is_random: without checkpoints. tokenizers: of drafters that draft text
    because theirs is not the target's, which is then there, too, under TARGET. vllm: the target, if
    vLLM computes it: it has no shape then, and memory of its own.
    """

    config: EngineConfig
    place: Placement
    shapes: Mapping[str, DecoderConfig]
    num_blocks: int
    max_model_len: int
    is_random: bool
    synthetic: SyntheticAcceptance | None
    tokenizers: Mapping[str, Tokenizer]
    vllm: VllmTarget | None = None

    @property
    def target(self) -> VllmTarget | DecoderConfig:
        """What the tokens of a text are."""
        return self.vllm or self.shapes[TARGET]

    @property
    def num_target_blocks(self) -> int:
        return self.num_blocks if self.vllm is None else self.vllm.num_blocks

    @property
    def backend(self) -> str:
        """Of the target."""
        return self.place.backend if self.vllm is None else "vllm"

    @property
    def dtype(self) -> torch.dtype:
        """Of the target."""
        return self.place.dtype if self.vllm is None else self.vllm.dtype

    def drafter(self, name: str, path: Path) -> ModelDrafter | TextDrafter:
        target, own = self.target, self.tokenizers.get(name)
        if own is None:
            return self._drafter(name, path, self.max_model_len, target.vocab_size)
        shape = self.shapes[name]
        # A text may have more of its tokens than of the target's. A window must hold them.
        longest = shape.max_position_embeddings
        if shape.variant.window is not None:
            longest = min(longest, self.max_model_len)
        vocabularies = Vocabularies(
            self.tokenizers[TARGET], own, target.eos_token_ids, shape.eos_token_ids
        )
        model = self._drafter(name, path, longest, shape.vocab_size)
        return TextDrafter(model, vocabularies, longest)

    def _drafter(self, name: str, path: Path, longest: int, vocab: int) -> ModelDrafter:
        if self.place.backend != "graphs":
            return ModelDrafter(name, self._runner(name, path), longest, vocab)
        from penstock.engine.gpu.drafter import GraphDrafter

        return GraphDrafter(name, self._graphs(name, path, drafts=True), longest, vocab)

    def executor(self, drafters: Sequence[LocalDrafter], clock: Clock) -> LocalExecutor:
        path = self.config.target
        stream: Callable[[], AbstractContextManager[None]] = nullcontext
        most, threads = self.max_model_len, self.place.num_threads
        if self.vllm is not None:
            from penstock.engine.vllm.executor import VllmExecutor

            return VllmExecutor(self.vllm, drafters, clock, most, threads)
        if self.place.device.type == "cuda":
            from penstock.engine.gpu.streams import own_stream

            stream = partial(own_stream, self.place.device)
        if self.place.backend != "graphs":
            runner = self._runner(TARGET, path)
            return RunnerExecutor(runner, drafters, clock, most, threads, stream)
        from penstock.engine.gpu.executor import GraphExecutor

        graphs = self._graphs(TARGET, path, drafts=False)
        # Where drafters' lanes work beside the target, its next step is planned meanwhile anyway.
        runs_ahead = self.place.device.type == "cuda" and self.config.pipeline == "off"
        return GraphExecutor(graphs, drafters, clock, most, threads, stream, runs_ahead=runs_ahead)

    def _runner(self, name: str, path: Path) -> ModelRunner:
        place = self.place
        if place.backend == "native":
            int4 = name != TARGET and self.config.drafter_weights == "int4"
            room = self.num_blocks, self.config.block_size
            return NativeRunner.load(path, place.dtype, *room, place.num_threads, int4=int4)
        return self._eager(name, path, self.num_blocks, sample_coupled)

    def _graphs(self, name: str, path: Path, *, drafts: bool) -> GraphRunner:
        from penstock.engine.gpu.graphs import GraphRunner

        synthetic, num_blocks = self.synthetic, self.num_blocks + 1
        if synthetic is None:
            return GraphRunner(self._eager(name, path, num_blocks, sample_coupled))
        eager = self._eager(name, path, num_blocks, synthetic.samples(drafts=drafts))
        return GraphRunner(eager, lambda really: synthetic.decides(really, drafts=drafts))

    def _eager(self, name: str, path: Path, num_blocks: int, sample: TokenSampler) -> EagerRunner:
        place, shape = self.place, self.shapes[name]
        if self.is_random:
            weights = random_weights(shape, place.dtype, place.device)
        else:
            weights = load_weights(path, shape, place.dtype)
        windowed = shape.variant.window is not None
        attention = resolve_attention(self.config.attention, place.device, windowed=windowed)
        try:
            return EagerRunner.of(
                shape,
                weights,
                place.device,
                num_blocks,
                self.config.block_size,
                partial(make_attention, attention),
                place.kv_dtype,
                sample,
            )
        except BackendUnavailableError as error:
            raise ConfigError(str(error)) from error


def load_vllm(config: EngineConfig) -> VllmTarget:
    """The target, loaded by vLLM. Raises: ConfigError."""
    from penstock.engine.vllm.target import VllmTarget

    return VllmTarget(config)


def run_vllm_node(config: EngineConfig, announce: Callable[[str], None]) -> None:
    """Workers of a node that is not the first, until this process is told to end. announce: called
    when they have joined the others. Raises: ConfigError."""
    from penstock.engine.vllm.node import run_node

    run_node(config, announce)


def load_runner(path: Path, dtype_name: str, *, int4: bool = False) -> ModelRunner:
    """A checkpoint by itself, on the CPU, by the native kernels where they can be had.

    Its KV memory is a share of what is free, at most enough for 64 texts of full length. int4:
    its matrices to 4 bits (`models.rounding`). Raises: CheckpointError for one that cannot be used,
    ConfigError where there are no kernels that read 4 bits.
    """
    device = torch.device("cpu")
    dtype = resolve_dtype(dtype_name, device)
    config = DecoderConfig.from_pretrained(path)
    num_blocks = affordable_blocks(
        [config], dtype, device, _BLOCK_SIZE, config.max_position_embeddings, weights=0
    )
    threads = torch.get_num_threads()
    beyond = beyond_kernels(config, config.max_position_embeddings)
    if dtype not in DTYPES or beyond is not None or why_not_native() is not None:
        if int4:
            raise ConfigError(
                "weights int4 are for the CPU's own kernels, which cannot be had here"
            )
        return EagerRunner.load(path, dtype, device, num_blocks, _BLOCK_SIZE)
    # The kernels have threads of their own; PyTorch's would spin on the same cores.
    torch.set_num_threads(1)
    return NativeRunner.load(path, dtype, num_blocks, _BLOCK_SIZE, threads, int4=int4)
