"""Settings of the engine, and of the policies inside vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from penstock.config.completions import CompletionsServer
from penstock.config.devices import DeviceName
from penstock.config.model import ConfigError, Model, address_in
from penstock.config.profiles import ProfilePath
from penstock.config.state import StateFolder
from penstock.config.tenants import TenantConfig
from penstock.core.policies.bundles import AUTO, BUNDLES, bundle
from penstock.core.policies.registry import make_pipeline, make_policy
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, PREDICTION, TARGET, FairnessRule

NGRAM = "ngram"
SUFFIX = "suffix"
"""Drafter paths without a model: look-up in a request's text, or in its tenant's outputs, too."""
LOOK_UPS = (NGRAM, SUFFIX)

HEADS = ("mtp", "eagle3", "assistant")
"""Names of drafters that are layers of the target: theirs is the path, or a folder beside it."""

_CHAIN = "+"

DrafterWeights = Literal["auto", "stored", "int4"]

PolicyKind = Literal["admission", "selection", "allocation"]


class DrafterParts(NamedTuple):
    """Parsed drafter path: a look-up, a model, both as in `suffix+MODEL`, or a server.

    Look-up is for all requests, whichever drafter they have."""

    look_up: str | None
    model: str | None
    server: CompletionsServer | None = None

    @classmethod
    def from_path(cls, path: str) -> Self:
        """Parse a path. Raises ConfigError."""
        server = CompletionsServer.from_path(path)
        if server is not None:
            return cls(None, None, server)
        first, is_chain, rest = path.partition(_CHAIN)
        if first not in LOOK_UPS:
            return cls(None, path)
        if not is_chain:
            return cls(first, None)
        if not rest or cls.from_path(rest).model != rest:
            raise ConfigError(
                f"{path!r}: after look-up comes one model, not {rest!r}; allowed: "
                f"{' and '.join(look_up + _CHAIN + 'MODEL' for look_up in LOOK_UPS)}"
            )
        return cls(first, rest)

    def with_model(self, model: str) -> str:
        """Return the path with another model."""
        return model if self.look_up is None else f"{self.look_up}{_CHAIN}{model}"


class PolicyConfig(Model):
    """Policy name and options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_name(cls, name: str, /, **options: Any) -> Self:
        return cls(name=name, options=options)

    @classmethod
    def from_bundle(cls, kind: PolicyKind, policy: str = AUTO) -> Self:
        """Return a bundle's policy of a kind. Raises PolicyError."""
        chosen = bundle(policy)
        options = getattr(chosen, f"{kind}_options", {})
        return cls.from_name(getattr(chosen, kind), **options)

    def with_defaults(self, options: Mapping[str, Any]) -> Self:
        """Return the policy with these options where it has none of its own."""
        return self.from_name(self.name, **{**options, **self.options})

    def make(self, kind: PolicyKind) -> Any:
        """Build the policy. Raises PolicyError."""
        return make_policy(kind, self.name, self.options)


class VllmConfig(Model):
    """Settings of vLLM as the target's engine.

    tensor_parallel: workers that share each layer
    pipeline_parallel: groups of workers, each with a part of the layers
    quantization: of the weights, by vLLM's name
    nodes: machines that share the workers; node_rank: number of this one, from 0 (the server's);
        master: HOST:PORT, an address of node 0 that all nodes reach
    distributed_backend: launcher of the workers
    args: further arguments of vLLM's engine"""

    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    nodes: int = Field(default=1, ge=1)
    node_rank: int = Field(default=0, ge=0)
    master: str | None = None
    distributed_backend: Literal["mp", "ray"] | None = None
    quantization: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)

    @property
    def num_local_workers(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel // self.nodes

    @field_validator("master")
    @classmethod
    def _is_address(cls, master: str | None) -> str | None:
        if master is not None and not int(address_in(master).rpartition(":")[2]):
            raise ValueError(f"{master!r} has port 0; allowed: 1 to 65535")
        return master

    @model_validator(mode="after")
    def _fits_nodes(self) -> Self:
        workers = self.tensor_parallel * self.pipeline_parallel
        if self.nodes == 1 and (self.node_rank or self.master is not None):
            raise ValueError("node_rank and master are for several nodes; add nodes")
        if self.node_rank >= self.nodes:
            raise ValueError(f"node_rank is {self.node_rank}; allowed: 0 to {self.nodes - 1}")
        if self.nodes > 1 and self.master is None:
            raise ValueError(f"nodes is {self.nodes}, so master is needed: HOST:PORT of node 0")
        if self.nodes > 1 and self.distributed_backend == "ray":
            raise ValueError("nodes is for mp: a Ray cluster knows its own nodes")
        if workers % self.nodes:
            raise ValueError(
                f"nodes is {self.nodes}, which does not divide the {workers} workers "
                "(tensor_parallel times pipeline_parallel)"
            )
        return self


class DrafterConfig(Model):
    """A drafter: a path, or a mapping with settings of its own.

    path: as `DrafterParts`. device: of its model, which then works beside the target; None shares
    the target's. weights: in place of `drafter_weights`. max_num_seqs: most requests that it drafts
    for at once (Spin's B_j)."""

    path: str
    device: DeviceName | None = None
    weights: DrafterWeights | None = None
    max_num_seqs: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> Any:
        own: dict[str, Any] = handler(self)
        return own if any(own[name] is not None for name in own if name != "path") else self.path


class ModelsConfig(Model):
    """Target, drafters and their computation.

    kv_tokens: KV memory of the target in tokens; None takes a share of what is free.
    look_up: for all requests, if there is a drafter and none names another look-up.
    drafter_weights: int4 rounds the drafters' matrices of more than 6 bits a weight to 4 bits as
        they are loaded, for the CPU's own kernels; auto does if no cache would hold them.
    profile: step times from `penstock profile measure`, which are then not measured at the start.
    kv_dtype: int8 keeps keys and values in 8 bits, for the CPU's own kernels; auto as `dtype`.
    backend: native (the CPU's own kernels), eager (PyTorch's operations, also on a GPU) or auto
        (native where it can be had, else eager).
    attention: of the eager backend.
    vllm: vLLM computes the target; what else is said here of devices and kernels is then of the
        drafters.
    """

    target: Path
    drafters: dict[str, DrafterConfig] = Field(default_factory=dict)
    look_up: Literal["suffix", "ngram", "none"] = "none"
    drafter_weights: DrafterWeights = "auto"
    profile: ProfilePath | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_dtype: Literal["auto", "int8"] = "auto"
    device: DeviceName = "cpu"
    backend: Literal["auto", "native", "eager"] = "auto"
    attention: Literal["packed", "decomposed"] = "packed"
    num_threads: int | None = Field(default=None, ge=1)
    kv_tokens: int | None = Field(default=None, ge=16, le=2**40)
    block_size: int = Field(default=16, ge=1, le=256)
    max_model_len: int | None = Field(default=None, ge=2)
    prefix_caching: bool = True
    vllm: VllmConfig | None = None

    @property
    def target_name(self) -> str:
        """Default name of the target: its folder's or its file's."""
        return model_name(self.target)

    @field_validator("drafters")
    @classmethod
    def _names(cls, drafters: dict[str, DrafterConfig]) -> dict[str, DrafterConfig]:
        for name, drafter in drafters.items():
            if name in (AUTO_DRAFTER, NO_DRAFTER, PREDICTION, TARGET) or not name:
                raise ValueError(f"a drafter cannot be called {name!r}")
            parts = DrafterParts.from_path(drafter.path)
            if (parts.model is None or name in HEADS) and (drafter.device or drafter.weights):
                raise ValueError(f"{name!r} loads no model, so it takes no device and no weights")
            if name in HEADS and parts.model != drafter.path:
                raise ValueError(f"{name!r} is a part of the target: {name}, or {name}=FOLDER")
            if parts.server is not None and not re.fullmatch(r"[\w.-]+", name, re.ASCII):
                raise ValueError("a server needs a name of letters and digits, as in edge=URL")
        return drafters

    @property
    def text_look_up(self) -> tuple[str, str] | None:
        """Name and kind of the look-up that all requests have, if any."""
        own = {name: p for name, p in self._parts.items() if p.server is None}
        kinds = {p.look_up for p in own.values() if p.look_up is not None}
        if own and not kinds and self.look_up != "none":
            kinds = {self.look_up}
        if not kinds:
            return None
        kind = SUFFIX if SUFFIX in kinds else NGRAM
        return next((name for name, p in own.items() if p.model is None), kind), kind

    @property
    def servers(self) -> dict[str, CompletionsServer]:
        """Servers that draft text, by the drafter's name."""
        return {n: p.server for n, p in self._parts.items() if p.server is not None}

    @property
    def _parts(self) -> dict[str, DrafterParts]:
        return {name: DrafterParts.from_path(d.path) for name, d in self.drafters.items()}

    def weights_of(self, drafter: str) -> DrafterWeights:
        """How a drafter's weights are loaded."""
        return self.drafters[drafter].weights or self.drafter_weights

    @property
    def drafter_models(self) -> dict[str, Path]:
        """Checkpoints of the drafters with a model, by drafter name."""
        return {
            name: Path(p.model)
            for name, p in self._parts.items()
            if p.model is not None and name not in HEADS
        }

    @property
    def head(self) -> tuple[str, Path] | None:
        """Name of the drafter that is a part of the target, and the checkpoint that holds it."""
        for name in HEADS:
            if (own := self.drafters.get(name)) is not None:
                return name, self.target if own.path == name else Path(own.path)
        return None


def model_name(path: Path) -> str:
    """Return a model's name: its folder's, its GGUF file's, or `owner/name` of a hub's folder."""
    hub = path.parent.parent.name
    if path.parent.name == "snapshots" and hub.startswith("models--"):
        return hub.removeprefix("models--").replace("--", "/", 1)
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.name, flags=re.IGNORECASE)


_BUNDLED: Any = Field(default=None, validate_default=True)
"""Default of a policy: the bundle's."""


class EngineConfig(ModelsConfig):
    """Models, and the policies that schedule them.

    policy: bundle of the four policies below, each of which overrides its part; options without a
        name are for the bundle's
    verification: None is `coupled` for requests with a seed and `ratio` for the others
    pipeline: off (draft and verify in turns), a number of micro-batches, P% (as many as cost less
        of the target's throughput), auto (the fastest by measured times) or async (verify the
        drafts that are ready). Drafters work beside the target unless it is off
    heartbeat_timeout_s: an engine process without a heartbeat for so long is restarted; after a
        quarter of it, it takes no requests
    fairness: between tenants, by weight, in admission, preemption and decoding; strict: whatever
        it costs the others
    state: folder of what was learned, for the next start; None (`none`) keeps nothing"""

    verification: Literal["coupled", "ratio"] | None = None
    policy: str = AUTO
    admission: PolicyConfig = _BUNDLED
    selection: PolicyConfig = _BUNDLED
    allocation: PolicyConfig = _BUNDLED
    pipeline: str = _BUNDLED
    heartbeat_timeout_s: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    fairness: FairnessRule = True
    state: StateFolder = None
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _as_bundled(cls, given: Any) -> Any:
        """Fill in the bundle's further settings. An unknown bundle is reported by itself."""
        named = BUNDLES.get(str(given.get("policy", AUTO))) if isinstance(given, dict) else None
        return given if named is None else {**named.engine, **given}

    @field_validator("tenants")
    @classmethod
    def _one_tenant_a_key(cls, tenants: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        if "" in tenants:
            raise ValueError("a tenant needs a name")
        keys = [key for tenant in tenants.values() for key in tenant.api_keys]
        if len(set(keys)) < len(keys):
            raise ValueError("each API key must belong to one tenant only")
        return tenants

    @field_validator("policy")
    @classmethod
    def _is_bundle(cls, policy: str) -> str:
        bundle(policy)
        return policy

    @field_validator("pipeline", mode="before")
    @classmethod
    def _is_pipeline(cls, pipeline: Any, info: ValidationInfo) -> str:
        """Accept false: YAML reads a bare `off` so."""
        if pipeline is None:
            return BUNDLES[info.data.get("policy", AUTO)].pipeline
        name = "off" if pipeline is False else str(pipeline)
        make_pipeline(name)
        return name

    @field_validator("admission", "selection", "allocation", mode="wrap")
    @classmethod
    def _can_be_made(
        cls, given: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> PolicyConfig:
        kind: Any = info.field_name
        # An unknown bundle is reported by itself.
        bundled = PolicyConfig.from_bundle(kind, info.data.get("policy", AUTO))
        if given is None:
            return bundled
        is_part = isinstance(given, dict) and given.get("name") is None
        policy: PolicyConfig = handler({**given, "name": bundled.name} if is_part else given)
        if is_part:
            policy = policy.with_defaults(bundled.options)
        policy.make(kind)
        return policy

    @model_validator(mode="after")
    def _drafters_are_known(self) -> Self:
        selected = self.selection.options.get("drafter")
        if selected is not None and selected not in self.drafters:
            known = ", ".join(self.drafters) or "none is configured"
            raise ValueError(f"selection names an unknown drafter {selected!r}; drafters: {known}")
        if sum(name in self.drafters for name in HEADS) > 1:
            raise ValueError(f"drafters {', '.join(HEADS)}: a target has one head at most")
        if self.head is not None and self.vllm is not None:
            raise ValueError(f"drafter {self.head[0]!r} is a part of the target, not with vLLM")
        return self
