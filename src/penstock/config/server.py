"""Settings of the server."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from penstock.config.drafters import DraftersConfig
from penstock.config.engine import EngineConfig
from penstock.config.model import Model
from penstock.config.tenants import KeyHash

_Name = Annotated[str, Field(min_length=1)]
_Names = Annotated[
    tuple[_Name, ...], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
]


_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNIT = re.compile(r"(\d+\.?\d*)(ns|us|µs|ms|s|m|h)")


def seconds_in(given: Any) -> float:
    """Parse a duration as Ollama's clients write it; below 0 it has no end. Raises ValueError."""
    text = str(given).strip()
    parts = [float(number) * _SECONDS[unit] for number, unit in _UNIT.findall(text)]
    if parts and _UNIT.sub("", text) in ("", "-"):
        text = text[: text.startswith("-")] + str(sum(parts))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if isinstance(given, bool) or math.isnan(seconds):
        raise ValueError(f"{given!r} is no duration; allowed: seconds, 10m, 1h30m, -1 (no end)")
    return math.inf if seconds < 0 else seconds


class ServeConfig(Model):
    """Server settings: engine, address and limits.

    models: several models by name, each with an engine of its own; `engine` is then the first one
    preload: names of those that start with the server; others do at their first request
    keep_alive: time without a request after which one is stopped; None: until memory is short
    memory_bytes: of all models together; None is what is free at the start
    served_model_name: one, or several that requests may give, the first of which answers have
    cors_origins: origins whose web pages may call the API from a browser; `*` is any
    max_waiting_requests: requests without a first token; more get HTTP status 429. A client (a
        tenant where there are API keys, else a network address) may have at most as many as it
        leaves free
    metrics_keys: hashes of API keys that open only `/metrics` and the dashboard. Without any, every
        tenant's key opens them and shows all tenants
    open_metrics: they need no key
    max_wait_s: a request with a longer expected wait for its first token is refused with 429
    request_timeout_s: limit on a request's time, also where it asks for more
    header_timeout_s, body_timeout_s: limits on the arrival of a request's head and body
    write_timeout_s: a request is cancelled if its client reads nothing for so long
    log_format: json is one object per line, with a line for every HTTP request
    otlp_traces_endpoint: OpenTelemetry collector, as http://collector:4318/v1/traces
    drafters: endpoint of draft servers; None has none"""

    models: dict[_Name, EngineConfig] = Field(default_factory=dict)
    engine: EngineConfig
    preload: _Names = ()
    keep_alive: Annotated[float, BeforeValidator(seconds_in)] | None = None
    memory_bytes: int | None = Field(default=None, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    served_model_name: _Names = ()
    cors_origins: tuple[str, ...] = ()
    max_waiting_requests: int = Field(default=4096, ge=1)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    metrics_keys: tuple[KeyHash, ...] = ()
    open_metrics: bool = False
    max_wait_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    request_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    header_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    body_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    write_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    shutdown_grace_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    log_format: Literal["text", "json"] = "text"
    otlp_traces_endpoint: Annotated[str, Field(pattern="^https?://")] | None = None
    drafters: DraftersConfig | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.engine.target_name,)

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        of_one = ("served_model_name", "drafters", "otlp_traces_endpoint")
        of_several = ("preload", "keep_alive", "memory_bytes")
        for name in of_one if self.models else of_several:
            if getattr(self, name):
                raise ValueError(
                    f"{name} is for {'one model' if self.models else 'several models'}"
                )
        for name in self.preload:
            if name not in self.models:
                raise ValueError(f"preload: {name!r} is none of {', '.join(self.models)}")
        for name, own in self.models.items():
            if own.vllm is not None or "cuda" in str([own.device, *own.drafters.values()]):
                raise ValueError(f"{name!r}: several models are for CPUs, without vLLM")
        return self

    @model_validator(mode="after")
    def _one_name_each(self) -> Self:
        servers = () if self.drafters is None else self.drafters.servers
        for name in servers:
            if name in self.engine.drafters:
                raise ValueError(f"{name!r} names both a draft server and a drafter of this one")
        return self
