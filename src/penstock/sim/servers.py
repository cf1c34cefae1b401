"""Draft servers of a simulated run, from a YAML file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config import ConfigError, read_yaml
from penstock.sim.acceptance import (
    AcceptanceByDrafter,
    AcceptanceModel,
    CurveAcceptance,
    DriftingAcceptance,
    GeometricAcceptance,
    RecordedAcceptance,
    read_records,
)
from penstock.sim.links import DraftServer, Link
from penstock.sim.traces import WorkloadError
from penstock.sim.workloads import Workload


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Drift(_Strict):
    rates: list[float] = Field(min_length=1)
    dwell: int = Field(ge=1)


class _Recorded(_Strict):
    file: Path
    drafter: str


class _Entry(_Strict):
    name: str = Field(min_length=1)
    acceptance: float | list[float] | _Drift | _Recorded
    ms_per_token: float = Field(gt=0, allow_inf_nan=False)
    rtt_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    jitter_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    loss: float = Field(default=0.0, ge=0, lt=1)
    mbit_per_s: float | None = Field(default=None, gt=0)
    max_draft_tokens: int = Field(default=16, ge=1)
    draft_ahead: int = Field(default=0, ge=0)
    tenant: str | None = None


class _File(_Strict):
    servers: list[_Entry] = Field(min_length=1)


def read_servers(path: Path, seed: int = 0) -> tuple[tuple[DraftServer, ...], AcceptanceByDrafter]:
    """Read draft servers and their acceptance models.

    path: YAML with `servers`, a list of mappings: `name`, `ms_per_token`, and `acceptance` (a rate,
    a survival curve, `{rates, dwell}` that drift, or `{file, drafter}` with records); `rtt_ms` of
    its link, `jitter_ms` and `loss` of each way, `mbit_per_s`, `max_draft_tokens`, `draft_ahead`,
    `tenant`. Raises: WorkloadError."""
    try:
        entries = _File.model_validate(read_yaml(path)).servers
    except ConfigError as error:
        raise WorkloadError(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WorkloadError(f"{path}: {where}: {first['msg']}") from error
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise WorkloadError(f"{path}: every draft server needs a name of its own")
    models = {entry.name: _acceptance(entry, path, seed) for entry in entries}
    return tuple(_server(entry) for entry in entries), AcceptanceByDrafter(models)


def deal_to_tenants(workload: Workload, servers: Sequence[DraftServer]) -> Workload:
    """Return a workload without tenants dealt in turn to the tenants of the servers."""
    tenants = list(dict.fromkeys(s.tenant for s in servers if s.tenant is not None))
    if workload.tenants is not None or not tenants:
        return workload
    dealt = np.array(tenants)[np.arange(len(workload)) % len(tenants)]
    return replace(workload, tenants=dealt)


def _server(entry: _Entry) -> DraftServer:
    bandwidth = math.inf if entry.mbit_per_s is None else entry.mbit_per_s * 1e6 / 8
    return DraftServer(
        entry.name,
        entry.ms_per_token / 1e3,
        Link(entry.rtt_ms / 2e3, entry.jitter_ms / 1e3, entry.loss, bandwidth),
        entry.max_draft_tokens,
        entry.draft_ahead,
        entry.tenant,
    )


def _acceptance(entry: _Entry, path: Path, seed: int) -> AcceptanceModel:
    given: Any = entry.acceptance
    name = entry.name
    if isinstance(given, _Recorded):
        file = given.file if given.file.is_absolute() else path.parent / given.file
        rows = read_records(file, [given.drafter])[given.drafter]
        return RecordedAcceptance({name: rows}, seed)
    if isinstance(given, list):
        return CurveAcceptance({name: given}, seed)
    rates = given.rates if isinstance(given, _Drift) else [given]
    if not all(0 <= rate <= 1 for rate in rates):
        raise WorkloadError(f"{path}: {name}: an acceptance rate is from 0 to 1, not {rates}")
    if isinstance(given, _Drift):
        return DriftingAcceptance({name: rates}, given.dwell, seed)
    return GeometricAcceptance({name: given}, seed)
