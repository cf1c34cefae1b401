"""`penstock zoo`: the bundled family, trained and looked at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption
from penstock.cli.terminal import one_line, print_table, progress
from penstock.json_text import dumps

if TYPE_CHECKING:
    from lab.zoo.growth import Growth

app = typer.Typer(no_args_is_help=True, help="The bundled family of models.")


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for the weights.")] = Path("zoo-weights"),
    only: Annotated[
        list[str] | None, typer.Option(help="Train only this model; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A smoke version of a few minutes.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Train the family from text that the trainer makes; an interrupted run continues."""
    from lab.zoo.recipe import FULL
    from penstock.config import ConfigError

    known = [*(spec.name for spec in FULL.models), *(spec.name for spec in FULL.heads)]
    unknown = [name for name in only or () if name not in known]
    with one_line(ConfigError):
        if unknown:
            raise ConfigError(f"unknown model {unknown[0]!r}; choose from {', '.join(known)}")

    from lab.zoo.train import train as run

    run(out, only, quick, threads=threads)


@app.command()
def head(
    target: Annotated[Path, typer.Argument(help="A Llama: a folder or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="The folder for the head.")],
    steps: Annotated[int, typer.Option(min=1, help="Of two rows of 512 tokens.")] = 400,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Train an MTP head beside a model, along Python's own files; an interrupted run continues."""
    from lab.zoo.head_training import train_head
    from penstock.config import ConfigError
    from penstock.engine.models.checkpoint import CheckpointError

    with one_line(ConfigError, CheckpointError, OSError):
        accepted = train_head(target, out, steps, threads)
    shares = ", ".join(f"{share:.2f}" for share in accepted)
    print(f"{out}: drafts in a row that are the target's likeliest tokens: {shares}")


@app.command()
def info(
    target: Annotated[str, typer.Option(help="The target that verifies.")] = "target-large",
    per_domain: Annotated[int, typer.Option(min=1, help="Prompts of each domain.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens a request makes.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Acceptance, speed and the worth of choosing, for every domain and drafter."""
    from penstock.config import ConfigError

    with one_line(ConfigError, FileNotFoundError):
        _check_target(target)

    from lab.zoo.report import report

    report(target=target, per_domain=per_domain, limit=new_tokens, as_json=as_json)


@app.command()
def fit(
    out: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    target: Annotated[str, typer.Option(help="The target that verifies.")] = "target-large",
    per_domain: Annotated[int, typer.Option(min=2, help="Prompts of each domain.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=16, help="Most tokens a request makes.")] = 256,
) -> None:
    """Fit how requests of each domain differ in acceptance, for the simulator; takes minutes."""
    from penstock.cli.terminal import progress
    from penstock.config import ConfigError
    from penstock.zoo.registry import DOMAINS

    with one_line(ConfigError, FileNotFoundError):
        _check_target(target)

    from lab.zoo.fit import measure_acceptance, write_acceptance

    with progress(2 * len(DOMAINS), "measuring") as advance, one_line(ValueError):
        fits = measure_acceptance(target, per_domain, new_tokens, on_domain=lambda: advance(1))
    origin = (
        f"penstock zoo fit --target {target} --per-domain {per_domain} --new-tokens {new_tokens}: "
        "bundled drafters along the target's own text, sampled at temperature 1 and greedily"
    )
    with one_line(OSError):
        write_acceptance(out, origin, fits)
    print(f"{out}: {len(DOMAINS)} domains, {', '.join(fits['sampled'].drafters)}")


@app.command()
def grow(
    out: Annotated[Path, typer.Argument(help="A new or empty folder for the models.")],
    target_params: Annotated[
        str,
        typer.Option(metavar="N", help="Parameters of the target, met within 1.5%: 500M or 1.5B."),
    ],
    drafter_share: Annotated[
        str,
        typer.Option(
            metavar="SHARE|LOW..HIGH",
            help="A drafter's parameters over the target's, met within 1.5%: the same for all, or "
            "from LOW for the smallest drafter to HIGH for the largest.",
        ),
    ] = "0.01..0.1",
    as_json: JsonOption = False,
) -> None:
    """Larger copies of target-large and all drafters that make the same tokens.

    Real acceptance at real cost, as ordinary Llama checkpoints: added channels, heads and layers
    read random weights and write zeros.

    Exact: RMSNorm, and with the compiled CPU kernels every bit of the target. Not exact: libraries
    that sum in blocks (PyTorch) may round a last digit otherwise, and so may quantised weights.
    """
    from penstock.config import ConfigError

    with one_line(ConfigError, FileNotFoundError):
        parameters, share = _parameters(target_params), _share(drafter_share)

        from lab.zoo.growth import plan_family, write_family

        family = plan_family(parameters, share)
        with progress(sum(growth.num_bytes for growth in family), "writing") as advance:
            write_family(out, family, advance)
    rows = [_describe(growth, out, family[0].parameters) for growth in family]
    if as_json:
        print(dumps({"out": str(out), "models": rows}))
        return
    print_table(
        str(out),
        ("model", "million", "asked", "share", "layers", "hidden", "heads", "FFN", "GB"),
        (
            (
                row["name"],
                *(f"{row[key] / 1e6:.1f}" for key in ("parameters", "asked_parameters")),
                f"{row['share']:.3f}",
                *(str(row[key]) for key in ("layers", "hidden", "heads", "ffn")),
                f"{row['bytes'] / 1e9:.2f}",
            )
            for row in rows
        ),
    )
    drafters = " ".join(f"--drafter {row['name']}={row['path']}" for row in rows[1:])
    print(f"penstock bench engine {rows[0]['path']} {drafters} --drafter ngram")


def _describe(growth: Growth, out: Path, target_parameters: int) -> dict[str, Any]:
    return {
        "name": growth.card.name,
        "role": growth.card.role,
        "path": str(out / growth.card.name),
        "parameters": growth.parameters,
        "asked_parameters": growth.asked,
        "original_parameters": growth.card.parameters,
        "share": growth.parameters / target_parameters,
        "layers": growth.large.num_layers,
        "hidden": growth.large.hidden_size,
        "heads": growth.large.num_heads,
        "kv_heads": growth.large.num_kv_heads,
        "ffn": growth.large.intermediate_size,
        "bytes": growth.num_bytes,
    }


def _parameters(text: str) -> int:
    from penstock.config import ConfigError

    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([KMB]?)", text.upper())
    number = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2]] if match else 0
    if not 1 <= number <= 1e12:
        raise ConfigError(f"--target-params takes a number such as 500M or 1.5B, not {text!r}")
    return round(number)


def _share(text: str) -> tuple[float, float]:
    from penstock.config import ConfigError

    low, is_range, high = text.partition("..")
    try:
        share = float(low), float(high if is_range else low)
    except ValueError:
        share = 0.0, 0.0
    if not 0 < share[0] <= share[1] <= 1:
        raise ConfigError(
            "--drafter-share takes a share above 0 and at most 1, or two such as 0.01..0.1, the "
            f"smaller first, not {text!r}"
        )
    return share


def _check_target(target: str) -> None:
    from penstock.config import ConfigError
    from penstock.zoo.registry import bundled_models

    targets = [name for name, card in bundled_models().items() if card.role == "target"]
    if target not in targets:
        raise ConfigError(f"unknown target {target!r}; choose from {', '.join(targets)}")
