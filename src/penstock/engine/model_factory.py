"""Runners, drafters and the executor that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import ConfigError, EngineConfig
from penstock.core.ports import Clock
from penstock.core.types import TARGET
from penstock.engine.attention import BackendUnavailableError
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.graph import GraphDrafter
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.eager import EagerRunner
from penstock.engine.executor import LocalExecutor
from penstock.engine.graphs import GraphRunner
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.random import random_weights
from penstock.engine.models.weights import load_weights
from penstock.engine.native.runner import NativeRunner
from penstock.engine.native.sampler import sample_natively
from penstock.engine.resolve import Placement, resolve_attention
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import Sampler, sample_coupled
from penstock.engine.speculation import DeviceExecutor
from penstock.engine.synthetic import SyntheticAcceptance


@dataclass(frozen=True, slots=True)
class Models:
    """Makes runners, drafters and the executor of one backend.

    shapes: of the models, by the drafter's name, the target's under TARGET; num_blocks: of each
    model's KV memory; is_random: without checkpoints.
    """

    config: EngineConfig
    place: Placement
    shapes: Mapping[str, DecoderConfig]
    num_blocks: int
    max_model_len: int
    is_random: bool
    synthetic: SyntheticAcceptance | None

    def drafter(self, name: str, path: str) -> LocalDrafter:
        sample, longest = self._sampler(drafts=True), self.max_model_len
        vocab = self.shapes[TARGET].vocab_size
        if self.place.backend != "graphs":
            return ModelDrafter(name, self._runner(name, Path(path)), longest, sample, vocab)
        runner = self._graphs(name, Path(path), drafts=True)
        return GraphDrafter(name, runner, longest, sample, vocab)

    def executor(self, drafters: Sequence[LocalDrafter], clock: Clock) -> LocalExecutor:
        path, sample = self.config.target, self._sampler(drafts=False)
        most, threads = self.max_model_len, self.place.num_threads
        if self.place.backend != "graphs":
            runner = self._runner(TARGET, path)
            return LocalExecutor(runner, drafters, clock, most, sample, threads)
        graphs = self._graphs(TARGET, path, drafts=False)
        # Where drafters' lanes work beside the target, its next step is planned meanwhile anyway.
        runs_ahead = self.place.device.type == "cuda" and self.config.pipeline == "off"
        return DeviceExecutor(graphs, drafters, clock, most, sample, threads, runs_ahead=runs_ahead)

    def _sampler(self, *, drafts: bool) -> Sampler:
        if self.synthetic is not None:
            return self.synthetic.samples(drafts=drafts)
        return sample_natively if self.place.backend == "native" else sample_coupled

    def _runner(self, name: str, path: Path) -> ModelRunner:
        place = self.place
        if place.backend == "native":
            return NativeRunner.load(
                path, place.dtype, self.num_blocks, self.config.block_size, place.num_threads
            )
        return self._eager(name, path, self.num_blocks)

    def _graphs(self, name: str, path: Path, *, drafts: bool) -> GraphRunner:
        synthetic = self.synthetic
        eager = self._eager(name, path, self.num_blocks + 1)
        if synthetic is None:
            return GraphRunner(eager)
        return GraphRunner(eager, lambda really: synthetic.decides(really, drafts=drafts))

    def _eager(self, name: str, path: Path, num_blocks: int) -> EagerRunner:
        place, shape = self.place, self.shapes[name]
        if self.is_random:
            weights = random_weights(shape, place.dtype, place.device)
        else:
            weights = load_weights(path, shape, place.dtype)
        attention = resolve_attention(self.config.attention, place.device)
        try:
            return EagerRunner.of(
                shape,
                weights,
                place.device,
                num_blocks,
                self.config.block_size,
                attention,
                place.kv_dtype,
            )
        except BackendUnavailableError as error:
            raise ConfigError(str(error)) from error
