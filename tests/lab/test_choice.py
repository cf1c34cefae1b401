"""Verdicts of the live comparison of choices, on known rates."""

import asyncio
import time
from argparse import Namespace
from pathlib import Path

import pytest

from lab.bench.choice import CONTROL, MOVED, Passes, measured, moved_on, verdicts_of
from lab.bench.choice_network import relay
from lab.bench.choice_systems import AGAIN, Asked, System
from lab.common.cells import Cells, Figures

LABELS = ("code", "edit")
NUM_TURNS = 3


class Rates:
    """A bench whose policies serve each kind at a known speed. auto: what `auto` makes of code and
    edits; the fixed ones are good at one of them each."""

    def __init__(self, case: str, clients: int, auto: tuple[float, float]) -> None:
        again = LABELS[1] if case == "unlike" else AGAIN
        self.args = Namespace(case=case, clients=clients, turns=NUM_TURNS, milliseconds=5)
        self.models = ("model",)
        self.held = [Asked(label, "", ()) for label in (LABELS[0], again) * 2]
        self._rates = {"model": (20.0, 10.0), "suffix": (10.0, 20.0), "auto": auto}
        self._rates |= {CONTROL: (20.0, 20.0), MOVED: (10.0, 10.0)}

    def systems(self) -> dict[str, System]:
        fixed = {n: System((n,), wanted=n) for n in ("model", "suffix")}
        return {**fixed, "auto": System(("model",))}

    def play(self, systems: dict[str, System], turn: int) -> dict[str, Figures]:
        return {name: self._pass(name) for name in systems}

    def _pass(self, name: str) -> Figures:
        of_kind = dict(zip((a.label for a in self.held[:2]), self._rates[name], strict=True))
        requests = [
            {"kind": a.label, "tokens": 60, "seconds": 60 / of_kind[a.label], "text": i}
            for i, a in enumerate(self.held)
        ]
        seconds = sum(r["seconds"] for r in requests) / self.args.clients
        return {"seconds": seconds, "tokens": 60 * len(requests), "requests": requests}


def outcomes(tmp_path: Path, bench: Rates) -> list[str]:
    passes = measured(bench, Cells(tmp_path / "choice.jsonl", silent=True))
    return [v.outcome for v in verdicts_of(bench, passes)]


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("case", ["unlike", "seat", "network"])
def test_one_that_chooses_is_found_and_one_that_does_not_is_not(tmp_path, case, clients) -> None:
    for auto, expected in (((20.0, 20.0), "met"), ((20.0, 10.0), "missed")):
        bench = Rates(case, clients, auto)
        folder = tmp_path / expected
        folder.mkdir()
        if case == "unlike" and clients > 1:
            with pytest.raises(SystemExit, match="--clients 1"):
                outcomes(folder, bench)
            outcomes(folder, Rates(case, 1, auto))
        found = outcomes(folder, bench)
        assert found[0] == expected
        assert found[-1] == "met", "texts are the same"


def test_where_nothing_can_be_gained_nothing_is_told(tmp_path) -> None:
    bench = Rates("unlike", 1, (10.0, 10.0))
    bench._rates |= {"model": (20.0, 20.0), "suffix": (19.0, 19.0)}
    assert outcomes(tmp_path, bench)[0] == "inconclusive"


def test_another_text_is_seen(tmp_path) -> None:
    bench = Rates("unlike", 1, (20.0, 20.0))
    honest = bench.play

    def other(systems: dict[str, System], turn: int) -> dict[str, Figures]:
        found = honest(systems, turn)
        if turn == 2:
            found["auto"]["requests"][1]["text"] = "another"
        return found

    bench.play = other
    assert outcomes(tmp_path, bench)[-1] == "missed"


def test_a_kind_in_which_it_loses_is_told(tmp_path) -> None:
    found = outcomes(tmp_path, Rates("unlike", 1, (40.0, 18.0)))
    assert found[:2] == ["met", "missed"]


def test_moved_on_takes_what_the_next_kind_has() -> None:
    asked = [Asked(label, "", ()) for label in ("a", "b", "c", "a", "b", "c")]
    assert moved_on(["1", "2", "3", "4", "5", "6"], asked) == ["2", "3", "1", "5", "6", "4"]


def test_what_is_far_away_comes_late() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(4))
        await writer.drain()
        writer.close()

    async def there_and_back() -> float:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with server, relay(server.sockets[0].getsockname()[1], 0.05) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            begun = time.perf_counter()
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            assert await reader.read() == b""
            writer.close()
            return time.perf_counter() - begun

    assert asyncio.run(there_and_back()) >= 0.1


def test_passes_are_kept(tmp_path) -> None:
    bench, file = Rates("seat", 1, (20.0, 20.0)), tmp_path / "choice.jsonl"
    measured(bench, Cells(file, silent=True))
    bench.play = bench.systems  # which takes no arguments
    again = measured(bench, Cells(file, silent=True))
    assert isinstance(again, Passes)
    assert again.rates("auto") == pytest.approx([20.0] * NUM_TURNS)
