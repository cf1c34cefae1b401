"""Configuration: pydantic models that refuse what they do not know, from YAML and flags."""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock.core.policies.registry import make_pipeline, make_policy
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, TARGET
from penstock.fluid.step_profile import DrafterProfile, StepProfile

NGRAM = "ngram"
SUFFIX = "suffix"
"""Paths of drafters that have none: n-gram look-up in the request's own text; and of the longest
suffix, in earlier outputs of its tenant as well."""
LOOK_UPS = (NGRAM, SUFFIX)

DEFAULT_TENANT = "default"
"""The tenant of requests without an API key of another."""

_CHAIN = "+"

PolicyKind = Literal["admission", "selection", "allocation"]

_Parsed = TypeVar("_Parsed", bound=BaseModel)

_log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """One line: what was wrong, and what is allowed."""


class DrafterParts(NamedTuple):
    """What a drafter's path means: look-up, a model, or `ngram+MODEL`: a draft that begins with the
    one and goes on with the other."""

    look_up: str | None
    model: str | None

    @classmethod
    def of(cls, path: str) -> Self:
        """Raises: ConfigError."""
        first, is_chain, rest = path.partition(_CHAIN)
        if first not in LOOK_UPS:
            return cls(None, path)
        if not is_chain:
            return cls(first, None)
        if not rest or rest.partition(_CHAIN)[0] in LOOK_UPS:
            raise ConfigError(
                f"{path!r}: a chain goes on with one model, not with {rest!r}; allowed: "
                f"{' and '.join(look_up + _CHAIN + 'MODEL' for look_up in LOOK_UPS)}"
            )
        return cls(first, rest)

    @property
    def is_chain(self) -> bool:
        return self.look_up is not None and self.model is not None

    def with_model(self, model: str) -> str:
        """The path with the model in another place."""
        return model if self.look_up is None else f"{self.look_up}{_CHAIN}{model}"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    renamed: ClassVar[dict[str, str]] = {}
    """Old names of settings, which are accepted for one release, and the new ones."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Says what is allowed, which `extra="forbid"` does not."""
        for old, new in cls.renamed.items():
            if isinstance(data, dict) and old in data and new not in data:
                _log.warning("the setting %s is now called %s; use that name", old, new)
                data = {new if name == old else name: value for name, value in data.items()}
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise ValueError(f"unknown setting {name!r}; settings: {known}")
        return data


def _address(text: str) -> str:
    """Raises: ValueError where it is not HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8100 or [::]:8100")
    return text


class PolicyConfig(_Model):
    """A policy by name, and its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, name: str, /, **options: Any) -> Self:
        return cls(name=name, options=options)

    def with_defaults(self, options: Mapping[str, Any]) -> Self:
        """The same policy, with these options where it has none of its own."""
        return self.of(self.name, **{**options, **self.options})

    def make(self, kind: PolicyKind) -> Any:
        """Build the policy. Raises: PolicyError."""
        return make_policy(kind, self.name, self.options)


class TenantShare(_Model):
    """A tenant's weight in every fair share.

    max_running_requests: so many of its requests run at once, the others wait.
    """

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_running_requests: int | None = Field(default=None, ge=1)


class TenantConfig(TenantShare):
    """A tenant of Penstock's server: its share, and the API keys that stand for it.

    share_prompts: draft servers of other tenants may draft for its requests, and so see them.
    max_waiting_requests: without a first token at once; None is the share of any client.
    """

    api_keys: tuple[str, ...] = ()
    share_prompts: bool = False
    max_waiting_requests: int | None = Field(default=None, ge=1)


def _readable_profile(profile: Path) -> Path:
    try:
        read_profile(profile)
    except OSError as error:
        raise ValueError(f"cannot read {profile}: {error.strerror}") from error
    return profile


ProfilePath = Annotated[Path, AfterValidator(_readable_profile)]


class VllmConfig(_Model):
    """vLLM as the target's engine.

    tensor_parallel: workers that share each layer. pipeline_parallel: groups of workers, each with
    a part of the layers. quantization: of the weights, by vLLM's name.
    nodes: machines that the workers are divided between; node_rank: which of them this one is, from
    0, where the server is; master: HOST:PORT, an address of node 0 that all of them reach.
    distributed_backend: what starts the workers.
    args: further arguments of vLLM's engine, by the names that vLLM gives them.
    """

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
        if master is not None and not int(_address(master).rpartition(":")[2]):
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


class ModelsConfig(_Model):
    """Target and drafters, and how they are computed.

    kv_tokens: KV memory of the target in tokens; None takes a share of what is free.
    drafter_max_num_seqs: most requests that a drafter drafts for at once, by its name.
    profile: step times from `penstock profile measure`, which are then not measured at the start.
    backend: native (the CPU's own kernels), eager (PyTorch's operations), graphs (CUDA graphs, one
        for each batch size) or auto (the first that can be had: graphs on a GPU, native or eager on
        a CPU).
    kv_dtype: of keys and values in the cache; auto is that of the weights, float8 is e4m3.
    attention: of eager and graphs, by name; auto is triton_paged on a GPU with Triton, else packed.
    vllm: vLLM computes the target; what else is said here of devices and kernels is then of the
        drafters.
    """

    target: Path
    drafters: dict[str, str] = Field(default_factory=dict)
    drafter_max_num_seqs: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    profile: ProfilePath | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    backend: Literal["auto", "native", "eager", "graphs"] = "auto"
    kv_dtype: Literal["auto", "float8"] = "auto"
    attention: str = "auto"
    num_threads: int | None = Field(default=None, ge=1)
    kv_tokens: int | None = Field(default=None, ge=16)
    block_size: int = Field(default=16, ge=1, le=256)
    max_model_len: int | None = Field(default=None, ge=2)
    prefix_caching: bool = True
    vllm: VllmConfig | None = None

    @property
    def target_name(self) -> str:
        """What the target is called unless a name is given: its folder's or its file's."""
        return self.target.name.removesuffix(".gguf")

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", device):
            raise ValueError(f"{device!r} is unknown; allowed: cpu, cuda, cuda:N")
        return device

    @field_validator("drafters")
    @classmethod
    def _names(cls, drafters: dict[str, str]) -> dict[str, str]:
        for name, path in drafters.items():
            if name in (AUTO_DRAFTER, NO_DRAFTER, TARGET) or not name:
                raise ValueError(f"a drafter cannot be called {name!r}")
            DrafterParts.of(path)
        return drafters

    @property
    def drafter_models(self) -> dict[str, Path]:
        """Checkpoints of the drafters that have one, chains among them, by the drafter's name."""
        parts = {name: DrafterParts.of(path) for name, path in self.drafters.items()}
        return {name: Path(p.model) for name, p in parts.items() if p.model is not None}


class EngineConfig(ModelsConfig):
    """Models, and the policies that schedule them.

    verification: None is `coupled` for requests with a seed and `ratio` for the others.
    pipeline: off (drafts, then verification, in turns), a number of micro-batches, auto (whichever
        of these is fastest by the measured times) or async (verify whatever drafts are ready). But
        for off the drafters work beside the target.
    heartbeat_timeout_s: an engine process without a heartbeat for so long is killed and started
        again; after a quarter of it, it takes no requests.
    fairness: between tenants, by weight, in who is admitted, keeps its memory and decodes.
    """

    verification: Literal["coupled", "ratio"] | None = None
    admission: PolicyConfig = PolicyConfig.of("vllm_v1")
    selection: PolicyConfig = PolicyConfig.of("single")
    allocation: PolicyConfig = PolicyConfig.of("throughput")
    pipeline: str = "off"
    heartbeat_timeout_s: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    fairness: bool = True
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)

    @field_validator("tenants")
    @classmethod
    def _one_tenant_a_key(cls, tenants: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        if "" in tenants:
            raise ValueError("a tenant needs a name")
        keys = [key for tenant in tenants.values() for key in tenant.api_keys]
        if not all(keys) or len(set(keys)) < len(keys):
            raise ValueError("API keys must not be empty, and each must belong to one tenant only")
        return tenants

    @field_validator("pipeline", mode="before")
    @classmethod
    def _is_pipeline(cls, pipeline: Any) -> str:
        """YAML reads a bare `off` as false."""
        name = "off" if pipeline is False else str(pipeline)
        make_pipeline(name)
        return name

    @model_validator(mode="after")
    def _policies(self) -> Self:
        kinds: tuple[PolicyKind, ...] = ("admission", "selection", "allocation")
        for kind in kinds:
            getattr(self, kind).make(kind)
        selected = self.selection.options.get("drafter")
        named = [("drafter_max_num_seqs", name) for name in self.drafter_max_num_seqs]
        for setting, name in [("selection", selected), *named]:
            if name is not None and name not in self.drafters:
                known = ", ".join(self.drafters) or "none is configured"
                raise ValueError(f"{setting} names an unknown drafter {name!r}; drafters: {known}")
        return self


class PluginConfig(_Model):
    """Penstock's policies inside vLLM's own server; what is named as in `EngineConfig` means the
    same.

    allocation: None verifies drafts as long as vLLM's proposer makes them.
    profile: step times; without it they are learned while serving.
    """

    admission: PolicyConfig = PolicyConfig.of("vllm_v1")
    allocation: PolicyConfig | None = None
    fairness: bool = True
    tenants: dict[str, TenantShare] = Field(default_factory=dict)
    profile: ProfilePath | None = None

    @model_validator(mode="after")
    def _policies(self) -> Self:
        self.admission.make("admission")
        if self.allocation is not None:
            self.allocation.make("allocation")
        return self


class RequestOptions(_Model):
    """What a request to vLLM's server may tell Penstock's policies."""

    tenant: str = DEFAULT_TENANT
    max_draft_tokens: int | None = Field(default=None, ge=0)
    expected_output_tokens: int | None = Field(default=None, ge=1)
    tpot_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    deadline_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class DraftServerConfig(_Model):
    """A draft server that may connect, and how it is known: by the SHA-256 (hexadecimal) of its
    token, or by the common name in its client certificate.

    tenant: whose it is. trusted: its `ratio` drafts are taken; others are compared with the
    target's own sample, and can then change nothing.
    """

    tenant: str = Field(default=DEFAULT_TENANT, min_length=1)
    token_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    common_name: str | None = Field(default=None, min_length=1)
    trusted: bool = False

    @model_validator(mode="after")
    def _has_identity(self) -> Self:
        if (self.token_sha256 is None) == (self.common_name is None):
            raise ValueError("needs token_sha256 or common_name, and only one of them")
        return self


class TlsConfig(_Model):
    """PEM files. client_ca: the authority that must have signed every client's certificate."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class DraftersConfig(_Model):
    """Where draft servers connect, and which may. Without TLS and without any named server only
    this machine's own may, as servers of the default tenant.

    listen: HOST:PORT; port 0 takes a free one
    max_open_requests: of a draft server's own users, for each stream
    max_messages_per_s: that one stream may send; twice as many at once
    max_connections_per_s: streams that one draft server, by its name, may begin; eight times as
                           many at once. One a second for each of the streams that it has open is
                           all that `penstock draft` ever needs
    max_unauthenticated_connections_per_s: connections without a known identity, from one address,
        that are answered with that reason; eight times as many at once
    audit_share: of the drafts of a model that this machine has among its drafters, too, those that
                 are recomputed here; a trusted server that fails is trusted no more
    """

    renamed = {"max_strangers_per_s": "max_unauthenticated_connections_per_s"}

    listen: str
    servers: dict[str, DraftServerConfig] = Field(default_factory=dict)
    tls: TlsConfig | None = None
    max_open_requests: int = Field(default=64, ge=1)
    max_messages_per_s: float = Field(default=1000.0, gt=0, allow_inf_nan=False)
    max_connections_per_s: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    max_unauthenticated_connections_per_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    audit_share: float = Field(default=0.02, ge=0, le=1)

    @field_validator("listen")
    @classmethod
    def _is_address(cls, listen: str) -> str:
        return _address(listen)

    @field_validator("servers")
    @classmethod
    def _server_names(cls, servers: dict[str, DraftServerConfig]) -> dict[str, DraftServerConfig]:
        for name in servers:
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
                raise ValueError(
                    f"a draft server cannot be called {name!r}; use 1 to 64 letters, digits, dots, "
                    "hyphens and underscores"
                )
            if name in (AUTO_DRAFTER, NO_DRAFTER, TARGET):
                raise ValueError(f"a draft server cannot be called {name!r}")
        return servers

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if not is_loopback(self.listen.rpartition(":")[0]):
            if self.tls is None:
                raise ValueError(
                    f"{self.listen} is not a loopback address, so `tls` is needed: drafts and "
                    "tokens would cross the network in the clear"
                )
            if not self.servers:
                raise ValueError(
                    f"{self.listen} is not a loopback address, so `servers` must name the draft "
                    "servers that may connect"
                )
        certified = any(s.common_name is not None for s in self.servers.values())
        if certified and (self.tls is None or self.tls.client_ca is None):
            raise ValueError("a server's common_name needs `tls` with `client_ca`")
        return self


def is_loopback(host: str) -> bool:
    """Whether a host, as written in an address, can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class ServeConfig(_Model):
    """The whole server: engine, address, limits.

    cors_origins: web pages from these origins may call the API from a browser; `*` is any.
    max_waiting_requests: requests without a first token at once; more get HTTP status 429. A client
        (a tenant where there are API keys, else a network address) may have no more of them than
        it leaves free.
    metrics_keys: API keys that open `/metrics`, and so the dashboard, and nothing else. Without any
        every tenant's key does, and shows it all tenants. open_metrics: no key is needed for them.
    request_timeout_s: longest time that a request may take, however long it asks for itself.
    header_timeout_s, body_timeout_s: for all of a request's head and body to come
    write_timeout_s: a client that reads nothing of its answer for so long has its request cancelled
    drafters: where draft servers connect, if they may.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    served_model_name: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_waiting_requests: int = Field(default=4096, ge=1)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    metrics_keys: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    open_metrics: bool = False
    request_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    header_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    body_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    write_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    shutdown_grace_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    drafters: DraftersConfig | None = None

    @model_validator(mode="after")
    def _one_name_each(self) -> Self:
        servers = () if self.drafters is None else self.drafters.servers
        for name in servers:
            if name in self.engine.drafters:
                raise ValueError(f"{name!r} names both a draft server and a drafter of this one")
        return self


def parse_config(data: dict[str, Any]) -> ServeConfig:
    """Validate a configuration. Raises: ConfigError with one line for the first mistake."""
    return _parsed(ServeConfig, data)


def parse_plugin_config(data: Any) -> PluginConfig:
    """Likewise, of vLLM's plug-in. Raises: ConfigError."""
    return _parsed(PluginConfig, data)


def parse_request_options(data: Any) -> RequestOptions:
    """Likewise, of a request to it. Raises: ConfigError."""
    return _parsed(RequestOptions, data)


def _parsed(model: type[_Parsed], data: Any) -> _Parsed:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {message}" if where else message) from error


class _DrafterTimes(BaseModel):
    """The JSON form of a `DrafterProfile`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    batch_counts: tuple[int, ...]
    batch_seconds: tuple[float, ...]
    per_catch_up_token: float = 0.0
    slowdown: float = 1.0
    target_slowdown: float = 1.0


class _ProfileFile(BaseModel):
    """The JSON form of a `StepProfile`, in seconds."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    origin: str = ""
    kv_tokens: int
    granularity: int = 1
    token_counts: tuple[int, ...]
    token_seconds: tuple[float, ...]
    decode_fixed: float = 0.0
    per_decode: float = 0.0
    per_kv_token: float = 0.0
    per_prefill_token: float = 0.0
    per_prefill_context: float = 0.0
    drafters: tuple[_DrafterTimes, ...] = ()


def read_profile(path: Path) -> StepProfile:
    """A step-time profile's file. Raises: OSError; ConfigError for one that is none."""
    try:
        fields = _ProfileFile.model_validate_json(path.read_bytes()).model_dump()
        drafters = tuple(DrafterProfile(**times) for times in fields.pop("drafters"))
        return StepProfile(**fields, drafters=drafters)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"profile {path}: {where}{': ' if where else ''}{first['msg']}"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises: ConfigError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings")
    return data
