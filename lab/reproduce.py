"""`penstock reproduce`: a paper's figure or table again, with a verdict for each claim."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as cli
from penstock.cli.simulator import workers_of
from penstock.cli.terminal import one_line
from penstock.json_text import dumps

if TYPE_CHECKING:
    from lab.common.experiment import Experiment, Trial


def reproduce(
    name: Annotated[str, typer.Argument(help="A figure or table, or all; `list` names them.")],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for PNG, SVG and CSV files.")
    ] = Path("reproduction"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller runs, coarser search.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of measurements. Default: what PENSTOCK_DATA names.",
        ),
    ] = None,
    family: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Models of live experiments: a folder that `penstock zoo grow` has made. Default: "
            "the bundled ones.",
        ),
    ] = None,
    device: cli.DeviceOption = None,
    workers: cli.WorkersOption = None,
    ray: cli.RayOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """A paper's figure or table again: PNG, SVG, CSV and a verdict for each claim."""
    from lab.common.experiment import FULL, QUICK, LabError, Trial
    from lab.common.report import pyplot
    from lab.papers import experiments, experiments_named
    from penstock.config import ConfigError

    if name == "list":
        _list(list(experiments().values()), as_json)
        return
    with one_line(LabError, ConfigError, OSError):
        chosen = experiments_named(name)
        if family is not None or device is not None:
            chosen = _live(chosen)
        pyplot()
        out.mkdir(parents=True, exist_ok=True)
        named = os.environ.get("PENSTOCK_DATA")
        folder = data or (Path(named) if named else None)
        found = []
        with workers_of(workers, ray) as pool, _progress(len(chosen)) as (tell, advance):
            job = Trial(out, QUICK if quick else FULL, folder, tell, pool, family, device or "cpu")
            for entry in chosen:
                found.append(_outcome(entry, job))
                if not as_json:
                    _print(found[-1])
                advance()
    if as_json:
        print(dumps({"out": str(out), "quick": quick, "entries": found}))


def _outcome(entry: Experiment, job: Trial) -> dict[str, Any]:
    """Verdicts and files of an entry, or why it was skipped. Raises: LabError, OSError."""
    from dataclasses import asdict

    from lab.common.experiment import FULL, Skipped
    from lab.common.results import Results, save

    verdicts, skipped = [], None
    try:
        found = entry.run(job)
        job.kept(entry.name).unlink(missing_ok=True)
        quick = "" if job.effort == FULL else " --quick"
        family = "" if job.family is None else f" --family {job.family}"
        data = "" if job.data is None else " --data DIR"
        device = "" if job.device == "cpu" else f" --device {job.device}"
        command = f"penstock reproduce {entry.name}{quick}{data}{family}{device}"
        told = {"title": entry.title, "command": command}
        save(job.out / f"{entry.name}.json", Results({}, found), **told)
        verdicts = [asdict(verdict) | {"line": verdict.line()} for verdict in found]
    except Skipped as reason:
        skipped = str(reason)
    files = [] if skipped else sorted(str(path) for path in job.out.glob(f"{entry.name}[._]*"))
    return {
        "name": entry.name,
        "title": entry.title,
        "verdicts": verdicts,
        "files": files,
        "skipped": skipped,
    }


def _live(chosen: list[Experiment]) -> list[Experiment]:
    """Those of them that run models. Raises: LabError where there are none."""
    from lab.common.experiment import LabError
    from lab.papers import experiments

    live = [entry for entry in chosen if entry.is_live]
    if not live:
        known = ", ".join(e.name for e in experiments().values() if e.is_live)
        raise LabError(
            f"--family, --device: {chosen[0].name} runs no models; those that do: {known}"
        )
    return live


def _print(found: dict[str, Any]) -> None:
    print(f"{found['name']}: {found['title']}")
    if found["skipped"]:
        print(f"  skipped: {found['skipped']}")
    for verdict in found["verdicts"]:
        print(f"  {verdict['line']}")
    for path in found["files"]:
        print(f"  wrote {path}")


def _list(known: list[Experiment], as_json: bool) -> None:
    if as_json:
        print(dumps({entry.name: entry.title for entry in known}))
        return
    for entry in known:
        print(f"{entry.name:18} {entry.title}")


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Tell what is being done, and count what is done, on standard error: a bar in a terminal,
    lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, soft_wrap=True)
    # Experiments take seconds to hours: nothing can be said of the time that is left.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    name = TextColumn("{task.description}", markup=False)
    hidden = not console.is_terminal
    with Progress(name, *columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("reproducing", total=total)

        def tell(what: str) -> None:
            progress.update(task, description=what)
            if hidden:
                number = int(progress.tasks[0].completed) + 1
                console.print(f"[{number}/{total}] {what}", markup=False, highlight=False)

        yield tell, lambda: progress.advance(task)
