"""Arithmetic of the benchmark of servers, and its rivals."""

import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lab.bench.servers import (
    KINDS,
    Prompts,
    Rival,
    Streamed,
    Turn,
    figures,
    measure,
    medians,
    parse,
)
from lab.common.cells import Cells
from lab.common.statistics import made_while_busy


class Words:
    """A tokenizer with a token for each four characters."""

    def encode(self, text: str) -> list[int]:
        return [hash(text[i : i + 4]) for i in range(0, len(text), 4)]

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [1, *self.encode(messages[0]["content"]), 2]


def test_speed_and_latencies_of_a_cell() -> None:
    streams = [Streamed(1.0, 3.0, 11), Streamed(2.0, 3.0, 11), Streamed(9.0, 9.0, 1)]
    # The two clients are busy until second 3; until then the first two requests are through.
    assert figures(streams, [3.0, 3.0, 12.0], clients=2) == {
        "tokens_per_s": pytest.approx(22 / 3),
        "first_s": 2.0,
        "per_token_ms": pytest.approx(100.0),
    }


def test_a_client_that_has_nothing_left_to_ask_ends_what_is_measured() -> None:
    # A token a second each, but the second client has asked for less.
    first, ended = np.array([0.0, 0.0, 5.0]), np.array([4.0, 20.0, 9.0])
    came, seconds = made_while_busy(first, ended, ended - first + 1, clients=2)
    assert (came, seconds) == (pytest.approx(5 + 10 + 5), 9.0)
    everything = made_while_busy(first, ended, ended - first + 1, clients=1)
    assert everything == (pytest.approx(5 + 21 + 5), 20.0)


def test_medians_are_over_the_repeats(tmp_path: Path) -> None:
    names = ("tokens_per_s", "first_s", "per_token_ms", "peak_mib", "cores")
    lines = [{"key": f"a/{i}", **dict.fromkeys(names, value)} for i, value in enumerate((1, 9, 2))]
    file = tmp_path / "cells.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert medians(Cells(file), "a") == dict.fromkeys(names, 2)


def test_rivals_are_measured_without_drafts_and_with_their_own_look_up() -> None:
    folder = Path(sys.executable).parent
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shutil.which", str)
        _, rivals = parse([__file__, "--llama-cpp", str(folder), "--ik-llama", str(folder)])
    commands = {rival.name: rival.words(80, Turn(1, 100, 8, 1)) for rival in rivals}
    for name in ("llama.cpp", "ik_llama.cpp"):
        assert "--spec-type" not in commands[name]
        own = commands[f"{name}, look-up"]
        assert own[: len(commands[name])] == commands[name]
        assert own[len(commands[name])] == "--spec-type"


def test_a_server_that_does_not_start_says_so_in_the_table(tmp_path: Path) -> None:
    arguments = [__file__, "--clients", "1", "--prompts", "100", "--kinds", "code"]
    arguments += ["--repeats", "1", "--json", str(tmp_path / "cells.jsonl")]
    args, _ = parse(arguments)
    broken = Rival("broken", f"{shlex.quote(sys.executable)} -c exit(1)")
    prompts = Prompts(Words(), "".join(f"line {i}\n" for i in range(20_000)))
    for _ in range(2):  # the second time from the file
        results = measure(args, [broken], prompts)
        assert results.tables[0].rows == [["broken", "1", "does not start", "", "", "", ""]]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_as_long_as_wanted_and_begin_differently(kind: str) -> None:
    prompts = Prompts(Words(), "".join(f"line {i}\n" for i in range(20_000)))
    made = prompts.make(kind, 100, itertools.count(), 50)
    assert all(95 <= len(prompt) <= 101 for prompt in made)
    assert len({tuple(prompt[:2]) for prompt in made}) == 50
    assert prompts.make(kind, 100, itertools.count(), 50) == made


def test_a_command_has_room_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    turn = Turn(clients=8, prompt=1400, tokens=128, requests=2)
    assert turn.need == 1792
    rival = Rival("it", "'/a folder/it' -p {port} -t {threads} -np {clients} -c {context}")
    assert " ".join(rival.words(80, turn)) == "/a folder/it -p 80 -t 3 -np 8 -c 14336"
    assert rival.shown.startswith("it -p {port}")


def test_drafters_with_commas_between_them_share_a_server() -> None:
    _, rivals = parse([__file__, "--drafter", "suffix,small=/a/small.gguf", "--drafter", "suffix"])
    assert [rival.name for rival in rivals][1:] == [
        "penstock, suffix, small small.gguf",
        "penstock, suffix",
    ]
    assert rivals[1].shown.endswith("--drafter suffix --drafter small.gguf")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["no.gguf"], "model is no.gguf; allowed: a GGUF file"),
        ([__file__, "--clients", "1,0"], "'0'; allowed: numbers from 1"),
        ([__file__, "--kinds", "code,prose"], "'prose'; allowed: code, chat, edits, json"),
        ([__file__, "--other", "vllm"], "allowed: NAME=COMMAND"),
        ([__file__, "--llama-cpp", "/nowhere"], "llama.cpp: no program /nowhere/llama-server"),
    ],
)
def test_bad_options(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(wrong)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
