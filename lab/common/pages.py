"""Pages of results, written from result files and never by hand.

    python -m lab.common.pages [--docs DIR] [--check]

DIR (default: docs) has a folder `results/PAGE` for each page, and in it a result file for each
experiment, as a benchmark's `--result FILE` writes it:

title, about    what was measured
command, date, machine
                how, when and where
commit          of what was measured, if it has changed since
outdated        why the figures must be made again, if they must
tables          each with a title (Markdown), a header and rows of cells; one of more than eight
                rows becomes a CSV file beside the result file, which the page links to
verdicts        a line for each claim (`ClaimVerdict.line`); a page tells of its control an
                outcome other than `does not hold`, of its oracle one that the claim's own outcome
                does not imply. `results/claims.csv` has all lines of all pages whole
remarks         what the figures say, in Markdown, which is gone when they are measured again
order           where in the page, by rising numbers

Pictures beside a result file, NAME.png and NAME_*.png beside NAME.json, are shown with it.
`results/PAGE/page.json` has the title of the page and what stands at its beginning.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PAGE = "page.json"
_GENERATED = "<!-- Written by `python -m lab.common.pages` from the files in {}: change those. -->"
_LINE = re.compile(
    r"\[(?P<outcome>[a-z ]+)\] (?P<claim>.+?)"
    r"(?:\. Control, (?P<control>.+? \[(?P<control_outcome>[a-z ]+)\]: .+?))?"
    r"(?:\. Oracle, (?P<oracle>.+? \[(?P<oracle_outcome>[a-z ]+)\]: .+))?",
    re.DOTALL,
)
"""The parts of `ClaimVerdict.line`."""
_CLAIMS_HEADER = ["page", "section", "command", "outcome", "claim", "control", "oracle"]
_LONGEST_TABLE = 8
"""Rows. Longer tables are read by programs, so they are data files."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is stale")
    given = parser.parse_args(arguments)
    stale = []
    for path, text in pages(given.docs):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not given.check:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'is not what its result files say' if given.check else 'written'}")
    return int(given.check and bool(stale))


def pages(docs: Path) -> Iterator[tuple[Path, str]]:
    """The file and text of every page and long table. Raises: OSError, ValueError for bad JSON."""
    claims = [_CLAIMS_HEADER]
    for about in sorted(docs.glob(f"results/*/{_PAGE}")):
        folder = about.parent
        files = [path for path in sorted(folder.glob("*.json")) if path != about]
        results = [{**_read(path), "path": path, "pictures": _pictures(path)} for path in files]
        results.sort(key=lambda result: result.get("order", 1000))
        page = _read(about)
        parts = [f"# {page['title']}", _GENERATED.format(f"`results/{folder.name}`"), page["about"]]
        for result in results:
            long_tables = dict(_long_tables(result))
            for path, table in long_tables.items():
                yield path, _csv([table["header"], *table["rows"]])
            parts += _section(result, list(long_tables.items()))
            claims += _claims(folder.name, result)
        yield folder.with_suffix(".md"), "\n\n".join(filter(None, parts)) + "\n"
    yield docs / "results" / "claims.csv", _csv(claims)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _pictures(path: Path) -> list[str]:
    """Beside a result file, as the page names them."""
    found = [path.with_suffix(".png"), *sorted(path.parent.glob(f"{path.stem}_*.png"))]
    # Those of a longer name are another result's.
    others = [p.stem for p in path.parent.glob(f"{path.stem}_*.json")]
    mine = [p for p in found if p.exists() and not p.stem.startswith(tuple(others))]
    return [f"{path.parent.name}/{p.name}" for p in mine]


def _long_tables(result: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Tables that become data files, and those files."""
    path: Path = result["path"]
    for number, table in enumerate(result["tables"], 1):
        if len(table["rows"]) > _LONGEST_TABLE:
            yield path.with_name(f"{path.stem}_table_{number}.csv"), table


def _claims(page: str, result: dict[str, Any]) -> Iterator[list[str]]:
    """A row of claims.csv for each verdict."""
    for parts in map(_parts, result.get("verdicts", ())):
        of_line = (parts[name] or "" for name in _CLAIMS_HEADER[3:])
        yield [page, result["title"], result["command"], *of_line]


def _csv(rows: list[list[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _section(
    result: dict[str, Any], long_tables: list[tuple[Path, dict[str, Any]]]
) -> Iterator[str]:
    yield f"## {result['title']}"
    if "outdated" in result:
        yield f'!!! warning "To be made again"\n    {result["outdated"]}'
    yield result.get("about", "")
    commit = f" at {result['commit']}" if "commit" in result else ""
    yield f"`{result['command']}`{commit} ({result['date']}; {result['machine']}):"
    yield from (f"![Figure]({picture})" for picture in result["pictures"])
    for table in result["tables"]:
        yield table["title"]
        files = [path for path, long_table in long_tables if long_table is table]
        links = [f"[{len(table['rows'])} rows]({path.parent.name}/{path.name})" for path in files]
        yield links[0] if links else _markdown(table["header"], table["rows"])
    yield "\n".join(f"- {_verdict(line)}" for line in result.get("verdicts", ()))
    yield result.get("remarks", "")


def _verdict(line: str) -> str:
    """A claim's line with what is to be told of its control and its oracle."""
    told = f"[{(parts := _parts(line))['outcome']}] {parts['claim']}"
    if parts["control_outcome"] not in (None, "does not hold"):
        told += f" (control: {parts['control_outcome']})"
    if parts["outcome"] == "holds" and parts["oracle_outcome"] not in (None, "holds"):
        told += f" (oracle: {parts['oracle_outcome']})"
    return told


def _parts(line: str) -> dict[str, str | None]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(f"{line!r} is no claim's line")
    return found.groupdict()


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    sys.exit(main())
