"""Settings of the whole server."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from penstock.config.drafters import DraftersConfig
from penstock.config.engine import EngineConfig
from penstock.config.model import Model
from penstock.config.tenants import KeyHash


class ServeConfig(Model):
    """The whole server: engine, address, limits.

    cors_origins: web pages from these origins may call the API from a browser; `*` is any.
    max_waiting_requests: requests without a first token at once; more get HTTP status 429. A client
        (a tenant where there are API keys, else a network address) may have no more of them than
        it leaves free.
    metrics_keys: hashes of API keys that open `/metrics`, and so the dashboard, and nothing else.
        Without any every tenant's key does, and shows it all tenants.
    open_metrics: no key is needed for them.
    max_wait_s: a request that would wait longer for its first token, by the rate at which others
        get theirs, is refused with 429.
    request_timeout_s: longest time that a request may take, however long it asks for itself.
    header_timeout_s, body_timeout_s: for all of a request's head and body to come
    write_timeout_s: a client that reads nothing of its answer for so long has its request cancelled
    log_format: json is one object a line, and has a line for every HTTP request.
    otlp_traces_endpoint: where OpenTelemetry traces are sent, as http://collector:4318/v1/traces.
    drafters: where draft servers connect, if they may.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    served_model_name: str | None = None
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

    @model_validator(mode="after")
    def _one_name_each(self) -> Self:
        servers = () if self.drafters is None else self.drafters.servers
        for name in servers:
            if name in self.engine.drafters:
                raise ValueError(f"{name!r} names both a draft server and a drafter of this one")
        return self
