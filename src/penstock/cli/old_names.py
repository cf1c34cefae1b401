"""Deprecated option names, which work for one release with a warning."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperCommand

OLD_NAMES = {
    "--selection": "selection",
    "--allocation": "allocation",
    "--fairness": "fairness=true",
    "--no-fairness": "fairness=false",
    "--verification": "verification",
    "--tensor-parallel": "vllm.tensor_parallel",
    "--pipeline-parallel": "vllm.pipeline_parallel",
    "--nodes": "vllm.nodes",
    "--node-rank": "vllm.node_rank",
    "--master": "vllm.master",
    "--distributed-backend": "vllm.distributed_backend",
    "--quantization": "vllm.quantization",
    "--engine-arg": "vllm.args.",
    "--drafter-weights": "drafter_weights",
    "--profile": "profile",
    "--threads": "num_threads",
    "--tls-certificate": "drafters.tls.certificate",
    "--tls-key": "drafters.tls.key",
    "--tls-client-ca": "drafters.tls.client_ca",
    "--cors-origin": "cors_origins[]",
    "--log-format": "log_format",
    "--otlp-traces-endpoint": "otlp_traces_endpoint",
}
"""Key of `--set` by old name. With `=`: a flag; a final dot: the value is NAME=VALUE; `[]`: a list
of the values of a repeated option."""


class SettingsCommand(TyperCommand):
    """A command with `--set` that also accepts the old names, except those it declares."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        declared = {name for param in self.params for name in param.opts}
        return super().parse_args(ctx, with_new_names(args, OLD_NAMES.keys() - declared))


def with_new_names(args: list[str], names: set[str]) -> list[str]:
    """Replace old names by `--set`, with warnings on standard error; the last repeat counts."""
    kept: list[str] = []
    values: dict[str, list[str]] = {}
    rest = iter(args)
    for arg in rest:
        name, is_given, value = arg.partition("=")
        if name not in names:
            kept.append(arg)
            if arg == "--":
                break
            continue
        key, is_flag, fixed = OLD_NAMES[name].partition("=")
        if is_flag:
            value = fixed
        elif not is_given:
            value = next(rest, "")
            if not value:
                raise typer.BadParameter(f"{name} takes a value")
        if key.endswith("."):
            inner, _, value = value.partition("=")
            key += inner.strip().lstrip("-").replace("-", "_")
        values.setdefault(key, []).append(value)
        shown = f"{key}={value}".replace("[]=", "=[") + "]" * key.endswith("[]")
        print(
            f"penstock: {name} is an old name and goes with the next release; use --set {shown}",
            file=sys.stderr,
        )
    new: list[str] = []
    for key, given in values.items():
        many = key.removesuffix("[]")
        new += ["--set", f"{many}=[{', '.join(given)}]" if many != key else f"{key}={given[-1]}"]
    return [*new, *kept, *rest]
