"""From a configuration to a running engine: load the models, size the memory, measure, compose."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.config import NGRAM, ConfigError, EngineConfig, read_profile
from penstock.core.blocks import BlockPool
from penstock.core.loop import Loop
from penstock.core.pipeline import make_pipeline
from penstock.core.ports import Clock
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter, Tenant
from penstock.core.types import TARGET
from penstock.engine.attention import BackendUnavailableError, backend_names
from penstock.engine.attention.triton_paged import why_not_triton
from penstock.engine.audit import Auditor
from penstock.engine.calibrate import calibrate
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.lookup import LookupDrafter
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.eager import EagerRunner
from penstock.engine.executor import LocalExecutor
from penstock.engine.graphs import GraphRunner
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.dtypes import resolve_dtype
from penstock.engine.models.random import random_weights
from penstock.engine.models.weights import load_weights
from penstock.engine.native.build import NativeUnavailableError
from penstock.engine.native.library import native_library
from penstock.engine.native.runner import NativeRunner
from penstock.engine.native.sampler import sample_natively
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import Sampler, sample_coupled
from penstock.engine.speculation import DeviceExecutor, GraphDrafter
from penstock.engine.synthetic import SyntheticAcceptance
from penstock.engine.tokenizer import load_tokenizer

_MEMORY_SHARE = 0.25
_DEFAULT_SEQUENCES = 64


class MonotonicClock:
    """Seconds of the machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that a process needs to serve one target."""

    loop: Loop
    scheduler: Scheduler
    executor: LocalExecutor
    auditor: Auditor
    clock: MonotonicClock
    tokenizer_path: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    target: str
    backend: str
    dtype: str
    num_threads: int
    is_random: bool = False
    synthetic_acceptance: float | None = None

    def describe(self) -> dict[str, Any]:
        """Facts for `/health`, logs and reports."""
        made_up = {
            "random_weights": self.is_random or None,
            "synthetic_acceptance": self.synthetic_acceptance,
        }
        return {
            **{name: value for name, value in made_up.items() if value is not None},
            "target": self.target,
            "drafters": list(self.executor.drafters),
            "dtype": self.dtype,
            "backend": self.backend,
            "num_threads": self.num_threads,
            "kv_tokens": self.scheduler.pool.capacity_tokens,
            "max_model_len": self.max_model_len,
        }


def load_engine(
    config: EngineConfig,
    shapes: Mapping[str, DecoderConfig] | None = None,
    synthetic_acceptance: float | None = None,
    *,
    calibrated: bool = True,
) -> Engine:
    """Load the models and compose the engine.

    shapes: of models with random weights instead of checkpoints, by the drafter's name, the
    target's under TARGET; only to be measured, as is synthetic_acceptance, the probability with
    which drafters are made to foresee the target. calibrated: measure step times at the start;
    without, policies that go by them must not be asked.

    Raises: CheckpointError for a checkpoint that cannot be used, ConfigError for settings that do
    not fit each other or this machine.
    """
    torch.manual_seed(0)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    threads = torch.get_num_threads()
    device = _device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    backend = _backend(config, device, dtype)
    if backend == "native":
        # The kernels have threads of their own; PyTorch's would spin on the same cores.
        torch.set_num_threads(1)
    configs = dict(shapes or {})
    if not shapes:
        configs = _configs(config)
        _check_tokenizers(config)
    target = configs[TARGET]
    max_model_len = _max_model_len(config, target)
    kv_dtype = _kv_dtype(config, dtype)
    if kv_dtype != dtype and _attention(config.attention, device) != "triton_paged":
        raise ConfigError("kv_dtype float8 needs attention triton_paged; allowed otherwise: auto")
    num_blocks = _num_blocks(config, list(configs.values()), kv_dtype, max_model_len)
    synthetic = None
    if synthetic_acceptance is not None:
        vocab = min(c.vocab_size for c in configs.values())
        synthetic = SyntheticAcceptance(synthetic_acceptance, vocab)
    models = _Models(
        config, backend, device, dtype, num_blocks, threads, configs, bool(shapes), synthetic
    )

    clock = MonotonicClock()
    drafters: list[LocalDrafter] = []
    states: list[Drafter] = []
    beside = config.pipeline != "off"
    for name, path in config.drafters.items():
        most = config.drafter_max_num_seqs.get(name)
        if path == NGRAM:
            drafters.append(LookupDrafter(name))
            states.append(Drafter(name, own_lane=beside, max_num_seqs=most))
        else:
            drafters.append(models.drafter(name, path, max_model_len))
            pool = _pool(config, num_blocks)
            states.append(Drafter(name, pool, own_lane=beside, max_num_seqs=most))
    executor = models.executor(drafters, clock, max_model_len)
    scheduler = Scheduler(
        _pool(config, num_blocks),
        states,
        admission=config.admission.make("admission"),
        selection=config.selection.make("selection"),
        allocation=config.allocation.make("allocation"),
        pipeline=make_pipeline(config.pipeline),
        max_model_len=max_model_len,
        tenants=[
            Tenant(name, t.weight, shares_prompts=t.share_prompts)
            for name, t in config.tenants.items()
        ],
    )
    profile = None if config.profile is None else read_profile(config.profile)
    if calibrated:
        together = config.pipeline == "auto"
        calibrate(executor, scheduler.estimators, clock, profile, together=together)
    return Engine(
        loop=Loop(scheduler, executor, clock),
        scheduler=scheduler,
        executor=executor,
        auditor=Auditor(
            {n: Path(p) for n, p in config.drafters.items() if p != NGRAM and not shapes}
        ),
        clock=clock,
        tokenizer_path=config.target,
        max_model_len=max_model_len,
        vocab_size=target.vocab_size,
        eos_token_ids=target.eos_token_ids,
        target=config.target.name,
        backend=backend,
        dtype=str(dtype).removeprefix("torch."),
        num_threads=threads,
        is_random=shapes is not None,
        synthetic_acceptance=synthetic_acceptance,
    )


@dataclass(frozen=True, slots=True)
class _Models:
    """Makes runners, drafters and the executor of one kind."""

    config: EngineConfig
    backend: str
    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    threads: int
    configs: Mapping[str, DecoderConfig]
    is_random: bool
    synthetic: SyntheticAcceptance | None

    def drafter(self, name: str, path: str, max_model_len: int) -> LocalDrafter:
        sample = self._sampler(drafts=True)
        if self.backend != "graphs":
            return ModelDrafter(name, self._runner(name, Path(path)), max_model_len, sample)
        runner = self._graphs(name, Path(path), drafts=True)
        vocab = self.configs[TARGET].vocab_size
        return GraphDrafter(name, runner, max_model_len, vocab, sample)

    def executor(
        self, drafters: Sequence[LocalDrafter], clock: Clock, max_model_len: int
    ) -> LocalExecutor:
        path, sample = self.config.target, self._sampler(drafts=False)
        if self.backend != "graphs":
            runner = self._runner(TARGET, path)
            return LocalExecutor(runner, drafters, clock, max_model_len, sample, self.threads)
        graphs = self._graphs(TARGET, path, drafts=False)
        return DeviceExecutor(graphs, drafters, clock, max_model_len, sample, self.threads)

    def _sampler(self, *, drafts: bool) -> Sampler:
        if self.synthetic is not None:
            return self.synthetic.samples(drafts=drafts)
        return sample_natively if self.backend == "native" else sample_coupled

    def _runner(self, name: str, path: Path) -> ModelRunner:
        if self.backend == "native":
            return NativeRunner.load(
                path, self.dtype, self.num_blocks, self.config.block_size, self.threads
            )
        return self._eager(name, path, self.num_blocks)

    def _graphs(self, name: str, path: Path, *, drafts: bool) -> GraphRunner:
        synthetic = self.synthetic
        eager = self._eager(name, path, self.num_blocks + 1)
        if synthetic is None:
            return GraphRunner(eager)
        return GraphRunner(eager, lambda really: synthetic.decides(really, drafts=drafts))

    def _eager(self, name: str, path: Path, num_blocks: int) -> EagerRunner:
        shape = self.configs[name]
        if self.is_random:
            weights = random_weights(shape, self.dtype, self.device)
        else:
            weights = load_weights(path, shape, self.dtype)
        attention = _attention(self.config.attention, self.device)
        try:
            return EagerRunner.of(
                shape,
                weights,
                self.device,
                num_blocks,
                self.config.block_size,
                attention,
                _kv_dtype(self.config, self.dtype),
            )
        except BackendUnavailableError as error:
            raise ConfigError(str(error)) from error


def _configs(config: EngineConfig) -> dict[str, DecoderConfig]:
    """Of the target and of every drafter that is a model, by name."""
    configs = {TARGET: DecoderConfig.from_pretrained(config.target)}
    for name, path in config.drafters.items():
        if path != NGRAM:
            configs[name] = DecoderConfig.from_pretrained(Path(path))
    return configs


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e4m3fn if config.kv_dtype == "float8" else dtype


def _attention(name: str, device: torch.device) -> str:
    """The backend that `auto` means on a device."""
    if name == "auto":
        usable = device.type == "cuda" and why_not_triton(device) is None
        return "triton_paged" if usable else "packed"
    if name not in backend_names():
        raise ConfigError(f"attention is {name!r}; allowed: auto, {', '.join(backend_names())}")
    return name


def why_not_native() -> str | None:
    """Why the native CPU kernels cannot be used on this machine; None if they can."""
    try:
        native_library()
    except NativeUnavailableError as error:
        return str(error)
    return None


def _pool(config: EngineConfig, num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, config.block_size, prefix_caching=config.prefix_caching)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch sees no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use cpu, cuda or cuda:N")
    return device


def _backend(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Recorded steps on a GPU; the native CPU kernels where they can be had, else eager."""
    if config.backend in ("eager", "graphs"):
        return config.backend
    if config.backend == "auto" and device.type == "cuda":
        return "graphs"
    why_not: str | None = None
    if device.type != "cpu":
        why_not = f"it runs on the CPU, not on {device}"
    elif dtype not in (torch.float32, torch.bfloat16):
        why_not = f"it computes float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    else:
        why_not = why_not_native()
    if config.backend == "native" and why_not is not None:
        raise ConfigError(f"backend native cannot be used: {why_not}")
    return "eager" if why_not is not None else "native"


def _check_tokenizers(config: EngineConfig) -> None:
    """Draft tokens are ids: they mean something only under one tokenizer."""
    digest = load_tokenizer(config.target).digest
    for name, path in config.drafters.items():
        if path != NGRAM and load_tokenizer(Path(path)).digest != digest:
            raise ConfigError(
                f"drafter {name!r} ({path}) has another tokenizer than the target "
                f"({config.target}); a drafter must share the target's tokenizer"
            )


def _max_model_len(config: EngineConfig, target: DecoderConfig) -> int:
    limit = target.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {limit} positions of the target"
        )
    return config.max_model_len or limit


def _num_blocks(
    config: EngineConfig, models: list[DecoderConfig], dtype: torch.dtype, max_model_len: int
) -> int:
    """KV blocks of every model: as asked, or a share of the free memory."""
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // config.block_size)
    bytes_per_token = sum(
        2 * m.num_layers * m.num_kv_heads * m.head_dim * dtype.itemsize for m in models
    )
    if config.device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(torch.device(config.device))
        share = 0.8
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = _MEMORY_SHARE
    tokens = min(int(free * share) // bytes_per_token, _DEFAULT_SEQUENCES * max_model_len)
    return max(1, tokens // config.block_size)
