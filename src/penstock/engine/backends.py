"""Choice of device, dtype, attention, memory and runner."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from penstock.config import ConfigError, DrafterWeights, EngineConfig, cores_of
from penstock.core.loop import Clock
from penstock.core.types import TARGET, Pooling
from penstock.engine.attention import AttentionFactory
from penstock.engine.attention.decomposed import DecomposedAttention
from penstock.engine.attention.packed import PackedAttention
from penstock.engine.cuda_graphs import GraphRunner
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.spelling import Vocabularies
from penstock.engine.drafters.text import TextDrafter
from penstock.engine.eager import EagerRunner
from penstock.engine.executor import LocalExecutor, RunnerExecutor
from penstock.engine.kv_cache import BLOCK_SIZE, kv_bytes_per_token, state_bytes
from penstock.engine.lanes import use_cores
from penstock.engine.memory import CPU_KV_SHARE, GPU_KV_SHARE, MemoryNeed, free_memory, model_bytes
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.dtypes import resolve_dtype
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.models.weight_specs import weight_bytes
from penstock.engine.native.library import native_library
from penstock.engine.native.loading import NativeUnavailableError
from penstock.engine.native.runner import DTYPES, NativeRunner
from penstock.engine.runner import ModelRunner
from penstock.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.engine.vllm.target import VllmTarget

_log = logging.getLogger(__name__)

ATTENTION: dict[str, AttentionFactory] = {
    "packed": PackedAttention,
    "decomposed": DecomposedAttention,
}
"""Attention of the eager backend, by the setting's values."""

_DEFAULT_SEQUENCES = 64
"""Most requests of full length that KV memory is for, by convention."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Device, dtypes and backend of a model.

    num_threads: of the kernels on a CPU; cores: that they keep to, if not empty."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    backend: str
    num_threads: int
    cores: tuple[int, ...] = ()

    def shares_cores(self, other: Placement) -> bool:
        """Return whether two models may compute on one core."""
        on_cpu = self.device.type == other.device.type == "cpu"
        apart = self.cores and other.cores and not {*self.cores} & {*other.cores}
        return on_cpu and not apart


def resolve_placements(config: EngineConfig) -> dict[str, Placement]:
    """Return the placements of the target (`TARGET`) and of the drafters with a model.

    This thread keeps to the target's cores from now on. Raises: ConfigError."""
    target = resolve_placement(config)
    places = {TARGET: target}
    for name in config.drafter_models:
        device = config.drafters[name].device
        own = target if device is None else _placed(config, device, target.num_threads)
        places[name] = own
        if config.weights_of(name) == "int4":
            _check_int4(own.backend)
    if config.vllm is None:
        use_cores(target.cores)
    return places


def resolve_placement(config: EngineConfig) -> Placement:
    """Return the target's placement, and set PyTorch's number of threads. Raises: ConfigError."""
    own = config.num_threads or len(cores_of(config.device))
    if own:
        torch.set_num_threads(own)
    place = _placed(config, config.device, torch.get_num_threads())
    if place.backend == "native":
        # The kernels have their own threads; PyTorch's would spin on the same cores.
        torch.set_num_threads(1)
    elif config.backend == "auto" and config.vllm is None and place.device.type == "cpu":
        why_not = why_not_native() or f"they know no {place.dtype}"
        _log.warning("PyTorch computes, slower than the CPU kernels would: %s", why_not)
    _check_own_kernels(config, place.backend)
    return place


def _placed(config: EngineConfig, name: str, num_threads: int) -> Placement:
    """Return a placement on a device. num_threads: where it names no cores."""
    device, cores = _device(name), resolved_cores(name)
    dtype = resolve_dtype(config.dtype, device)
    kv_dtype = torch.int8 if config.kv_dtype == "int8" else dtype
    backend = _backend(config, device, dtype)
    return Placement(device, dtype, kv_dtype, backend, len(cores) or num_threads, cores)


def _check_own_kernels(config: EngineConfig, backend: str) -> None:
    """Refuse what only the native kernels have. Raises: ConfigError."""
    target = backend if config.vllm is None else "vllm"
    if config.drafter_weights == "int4":
        _check_int4(backend)
    if config.kv_dtype == "int8" and target != "native":
        _refuse("kv_dtype int8", target, "auto")


def _check_int4(backend: str) -> None:
    if backend != "native":
        _refuse("drafter_weights int4", backend, "auto, stored")


def _refuse(setting: str, backend: str, allowed: str) -> NoReturn:
    raise ConfigError(f"{setting} is for the CPU's own kernels; backend {backend} takes: {allowed}")


def why_not_native() -> str | None:
    """Return why the native CPU kernels cannot be used on this machine; None if they can."""
    try:
        native_library()
    except NativeUnavailableError as error:
        return str(error)
    return None


def resolved_cores(name: str) -> tuple[int, ...]:
    """Return the cores that a device names. Raises ConfigError for one that cannot be used."""
    cores = cores_of(name)
    allowed = os.sched_getaffinity(os.getpid()) if hasattr(os, "sched_getaffinity") else set[int]()
    if absent := sorted({*cores} - allowed):
        raise ConfigError(
            f"device {name!r}: this process may not use core {absent[0]}, only "
            f"{', '.join(map(str, sorted(allowed))) or 'those that this system chooses'}"
        )
    return cores


def _device(name: str) -> torch.device:
    device = torch.device("cpu" if name.startswith("cpu") else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch sees no CUDA device")
    return device


def _backend(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    if config.backend == "eager":
        return "eager"
    why_not: str | None = None
    if device.type != "cpu":
        why_not = f"it runs on the CPU, not on {device}"
    elif dtype not in DTYPES:
        why_not = f"it computes float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    else:
        why_not = why_not_native()
    if config.backend == "native" and why_not is not None:
        raise ConfigError(f"backend native cannot be used: {why_not}")
    return "eager" if why_not is not None else "native"


def resolve_context(config: EngineConfig, target: DecoderConfig) -> int:
    """Return the most tokens of a request. Raises: ConfigError."""
    limit = target.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {limit} positions of the target"
        )
    return config.max_model_len or limit


def resolve_num_slots(
    config: EngineConfig, place: Placement, target: DecoderConfig, most: int | None
) -> int | None:
    """Return the requests whose recurrent states have room; None for a target without them.

    At most 64, or `most`, and as many copies if prefixes are shared, in half of the memory that KV
    would have without them: whatever the lengths of texts, so divided it holds half as many as the
    division that is best for them."""
    each = state_bytes(target) * (1 + config.prefix_caching)
    if each == 0:
        return None
    free, share = free_memory(), CPU_KV_SHARE
    if place.device.type == "cuda":
        free, share = torch.cuda.mem_get_info(place.device)[0], GPU_KV_SHARE
        free -= weight_bytes(target, place.dtype)
    return max(1, min(int(free * share / 2) // each, most or _DEFAULT_SEQUENCES))


def resolve_num_blocks(
    config: EngineConfig,
    places: Mapping[str, Placement],
    shapes: Mapping[str, DecoderConfig],
    max_model_len: int,
    states: int = 0,
) -> int:
    """Return KV blocks of every model: as configured, or from a share of the free memory.

    It is what fits on each device. states: bytes of the target's recurrent states."""
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // config.block_size)
    by_device: dict[torch.device, list[str]] = {}
    for name in shapes:
        by_device.setdefault(places[name].device, []).append(name)
    found = []
    for device, names in by_device.items():
        models, place = [shapes[name] for name in names], places[names[0]]
        weights = sum(weight_bytes(model, place.dtype) for model in models)
        room = (config.block_size, max_model_len, weights, states if TARGET in names else 0)
        found.append(affordable_blocks(models, place.kv_dtype, device, *room))
    return min(found)


def affordable_blocks(
    models: Collection[DecoderConfig],
    kv_dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_model_len: int,
    weights: int,
    states: int = 0,
) -> int:
    """Return KV blocks for each model from a share of the free memory.

    At most those of 64 requests of full length, at least 1. weights: bytes still to be loaded,
    which a GPU must hold beside the KV; on a CPU the share leaves room for them. states: bytes of
    the share that recurrent states take.

    Raises: ConfigError where a GPU cannot hold the weights."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if weights >= free:
            raise ConfigError(
                f"the models take {weights / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB "
                "free: smaller models, fewer drafters or a smaller dtype would fit"
            )
        free -= weights
        share = GPU_KV_SHARE
    else:
        free, share = free_memory(), CPU_KV_SHARE
    tokens = max(0, int(free * share) - states) // sum(
        kv_bytes_per_token(m, kv_dtype) for m in models
    )
    return max(1, min(tokens, _DEFAULT_SEQUENCES * max_model_len) // block_size)


@dataclass(frozen=True, slots=True)
class Models:
    """Factory of runners, drafters and the executor of one backend.

    shapes: by the drafter's name, the target's under TARGET. num_blocks: of each model's KV memory.
    tokenizers: of drafters that draft text since theirs is not the target's, and then the target's
    under TARGET. vllm: the target, if it runs in vLLM, without a shape and with its own memory.
    num_slots: requests whose recurrent states the target has room for; None if it has none."""

    config: EngineConfig
    places: Mapping[str, Placement]
    shapes: Mapping[str, DecoderConfig]
    num_blocks: int
    max_model_len: int
    tokenizers: Mapping[str, Tokenizer]
    vllm: VllmTarget | None = None
    num_slots: int | None = None

    @property
    def place(self) -> Placement:
        """The target's placement."""
        return self.places[TARGET]

    @property
    def target(self) -> VllmTarget | DecoderConfig:
        """The target's limits and token ids."""
        return self.vllm or self.shapes[TARGET]

    @property
    def num_target_blocks(self) -> int:
        return self.num_blocks if self.vllm is None else self.vllm.num_blocks

    @property
    def backend(self) -> str:
        return self.place.backend if self.vllm is None else "vllm"

    @property
    def dtype(self) -> torch.dtype:
        return self.place.dtype if self.vllm is None else self.vllm.dtype

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one request, by context and KV memory."""
        return min(self.max_model_len, self.num_target_blocks * self.config.block_size)

    @property
    def kv_bytes(self) -> int | None:
        """KV memory of all models; None with vLLM, which has its own."""
        if self.vllm is not None:
            return None
        tokens, places = self.num_blocks * self.config.block_size, self.places
        each = (kv_bytes_per_token(m, places[n].kv_dtype) for n, m in self.shapes.items())
        return tokens * sum(each)

    @property
    def state_bytes(self) -> int:
        """Memory of the target's recurrent states."""
        return 0 if self.num_slots is None else self.num_states * state_bytes(self.shapes[TARGET])

    @property
    def num_states(self) -> int:
        """Number of the target's recurrent states, with copies for prefixes to be shared."""
        return (self.num_slots or 0) * (1 + self.config.prefix_caching)

    def uses(self) -> tuple[Pooling | None, bool]:
        """Return the pooling of the target's embeddings, and whether it makes text.

        There are no embeddings in vLLM, nor where the states that are kept are EAGLE-3's."""
        if self.vllm is not None:
            return None, True
        named, head = open_checkpoint(self.config.target).pooling(), self.shapes[TARGET].head
        has_states = head is None or not head.reads
        return (named or "last") if has_states else None, named is None

    def need(self) -> MemoryNeed:
        """Return what the models take, and what this machine has free for those on its CPU."""
        paths = {**self.config.drafter_models, TARGET: self.config.target}
        weights = sum(model_bytes(paths[name]) for name in self.shapes)
        if self.config.head is not None and self.config.head[1] != self.config.target:
            weights += model_bytes(self.config.head[1])
        return MemoryNeed(weights, self.kv_bytes or 0, free_memory(), self.state_bytes)

    def drafter(self, name: str, path: Path) -> ModelDrafter | TextDrafter:
        target, own = self.target, self.tokenizers.get(name)
        runner = self._runner(name, path)
        if own is None:
            return ModelDrafter(name, runner, self.max_model_len, target.vocab_size)
        shape = self.shapes[name]
        longest = shape.max_position_embeddings
        vocabularies = Vocabularies(
            self.tokenizers[TARGET], own, target.eos_token_ids, shape.eos_token_ids
        )
        return TextDrafter(ModelDrafter(name, runner, longest), vocabularies, longest)

    def executor(self, drafters: Sequence[LocalDrafter], clock: Clock) -> LocalExecutor:
        most, threads = self.max_model_len, self.place.num_threads
        own = {n: p.cores for n, p in self.places.items() if n != TARGET and self.is_apart(n)}
        cores = {name: numbers for name, numbers in own.items() if numbers}
        if self.vllm is not None:
            from penstock.engine.vllm.executor import VllmExecutor

            return VllmExecutor(self.vllm, drafters, clock, most, threads, cores)
        runner = self._runner(TARGET, self.config.target)
        head = None if self.config.head is None else self.config.head[0]
        return RunnerExecutor(runner, drafters, clock, most, threads, cores, head)

    def is_apart(self, drafter: str) -> bool:
        """Return whether a drafter with a model computes on another device or other cores."""
        return self.vllm is not None or not self.places[drafter].shares_cores(self.place)

    def _runner(self, name: str, path: Path) -> ModelRunner:
        place, room = self.places[name], (self.num_blocks, self.config.block_size)
        # A text may have more of a drafter's own tokens than of the target's.
        drafts_text = name != TARGET and name in self.tokenizers
        longest = None if drafts_text else self.max_model_len
        head = self.config.head[1] if name == TARGET and self.config.head is not None else None
        num_slots = self.num_states or 1
        if place.backend == "native":
            rounding: DrafterWeights = "stored" if name == TARGET else self.config.weights_of(name)
            return NativeRunner.load(
                path,
                place.dtype,
                *room,
                place.num_threads,
                rounding=rounding,
                max_model_len=longest,
                kv_dtype=place.kv_dtype,
                num_slots=num_slots,
                head=head,
            )
        attention = ATTENTION[self.config.attention]
        on_gpu = place.device.type == "cuda" and self.config.attention == "packed"
        kind = GraphRunner if on_gpu else EagerRunner
        where = (path, place.dtype, place.device)
        return kind.load(*where, *room, attention, longest, num_slots, head)


def load_vllm(config: EngineConfig) -> VllmTarget:
    """Return the target, loaded by vLLM. Raises: ConfigError."""
    from penstock.engine.vllm.target import VllmTarget

    return VllmTarget(config)


def run_vllm_node(config: EngineConfig, announce: Callable[[str], None]) -> None:
    """Run the workers of a further node until told to end. Raises: ConfigError."""
    from penstock.engine.vllm.node import run_node

    run_node(config, announce)


def load_runner(
    path: Path, dtype_name: str, *, rounding: DrafterWeights = "stored", device: str = "cpu"
) -> ModelRunner:
    """Load one checkpoint, on the CPU with the native kernels if possible.

    KV memory: as `affordable_blocks`. rounding: as `NativeRunner.load`. device: its cores are only
    counted; threads keep to those of their parent.

    Raises: CheckpointError for an unusable one, ConfigError for a device that is not here, or
    without kernels for 4 bits."""
    place, cores = _device(device), resolved_cores(device)
    dtype = resolve_dtype(dtype_name, place)
    config = DecoderConfig.from_pretrained(path)
    num_blocks = affordable_blocks(
        [config], dtype, place, BLOCK_SIZE, config.max_position_embeddings, weights=0
    )
    threads = len(cores) or torch.get_num_threads()
    is_native = place.type == "cpu" and dtype in DTYPES and why_not_native() is None
    if rounding == "int4" and not is_native:
        raise ConfigError("weights int4 are for the CPU's own kernels, which cannot be had here")
    kv = num_blocks * BLOCK_SIZE * kv_bytes_per_token(config, dtype)
    with MemoryNeed(model_bytes(path), kv, free_memory()).explained():
        if not is_native:
            kind = GraphRunner if place.type == "cuda" else EagerRunner
            return kind.load(path, dtype, place, num_blocks, BLOCK_SIZE)
        # As in `resolve_placement`.
        torch.set_num_threads(1)
        return NativeRunner.load(path, dtype, num_blocks, BLOCK_SIZE, threads, rounding=rounding)
