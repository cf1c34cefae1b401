"""What was learned, saved and restored; and a file that does not fit, which changes nothing."""

import json
import logging
import os
import signal
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import Cli
from tests.serving.program import LONG, program

from penstock.config import EngineConfig, parsed
from penstock.core.learn import Estimators
from penstock.core.lookup import TextLookUp
from penstock.core.types import Match, Verdict
from penstock.engine.backends import Placement
from penstock.engine.build import load_engine
from penstock.engine.fingerprint import digest
from penstock.engine.state import StateFile

OPEN, CLOSED = [5, 6, 7, 8, -1], [9, 9, 9, 9, -1]


def config_of(folder: Path, target: Path, *, saves: bool = True, **fields: Any) -> EngineConfig:
    tenants = {"open": {"save_outputs": saves}, "closed": {}}
    drafters = {"look-up": "suffix"}
    given = {"target": target, "state": folder, "drafters": drafters, "tenants": tenants}
    return parsed(EngineConfig, given | fields)


def file_of(
    folder: Path, target: Path, *, saves: bool = True, threads: int = 1
) -> tuple[StateFile, TextLookUp]:
    """A server's file, without loading its models."""
    config = config_of(folder, target, saves=saves)
    place = Placement(torch.device("cpu"), torch.float32, torch.float32, "eager", threads)
    limits = SimpleNamespace(vocab_size=100)
    models: Any = SimpleNamespace(
        place=place, dtype=place.dtype, backend=place.backend, target=limits
    )
    look_up = TextLookUp("look-up")
    return StateFile(config, folder, models, look_up), look_up


def teach(learn: Estimators) -> None:
    for rows in (1, 4, 16):
        learn.times.target.add_measurement(rows, 0.01 + 0.001 * rows)
    learn.times.curve_of("look-up").add_measurement(1, 0.002)
    learn.times.note_catch_up("look-up", 1e-5)
    learn.times.add_together("look-up", 1.5, 1.25)
    learn.acceptance.matches.learn("r", Match((1, 2, 3), 8, "own"), (1, 2, 4))
    for num in (1, 3, 3):
        learn.acceptance.on_verdict(
            Verdict("r", 0, 0, (1,), "look-up", 3, num, num_decided=3, evidence=float(num))
        )
    learn.acceptance.observe_empty("r", "look-up")
    for length in (7, 7, 300):
        learn.lengths.ended(length)


@pytest.fixture
def saved(tmp_path: Path, family: dict[str, Path]) -> Path:
    file, look_up = file_of(tmp_path, family["target"])
    learn = file.restore()
    teach(learn)
    look_up.restore_memory({"open": OPEN, "closed": CLOSED})
    file.save(["open"])
    return file.path


def test_what_was_learned_is_there_again(saved, family, caplog) -> None:
    caplog.set_level(logging.INFO)
    known = Estimators()
    teach(known)
    file, look_up = file_of(saved.parent, family["target"])
    learn = file.restore()
    assert learn.state()["times"] == known.state()["times"]
    assert learn.acceptance.mean("new", "look-up") == known.acceptance.mean("new", "look-up")
    assert learn.acceptance.found("new", "look-up") == known.acceptance.found("new", "look-up") < 1
    assert learn.acceptance.state() != Estimators().acceptance.state()
    assert learn.lengths.mean_ended == pytest.approx(known.lengths.mean_ended)
    assert learn.lengths.mean != Estimators().lengths.mean
    # A guess: a shorter step counts for much.
    learn.times.target.add_measurement(1, 0.005)
    assert learn.times.target(1) < 0.0085
    assert look_up.memory(["open", "closed"])["open"].tolist() == OPEN
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        f"restored what was learned from {saved}"
    ]


def test_only_tenants_that_allow_it_are_saved_and_restored(saved, family) -> None:
    assert json.loads(saved.read_text())["body"]["learned"]["memory"].keys() == {"open"}
    file, look_up = file_of(saved.parent, family["target"], saves=False)
    file.restore()
    assert not look_up.memory(["open", "closed"])


def changed(path: Path, where: str, value: Any) -> str:
    """The file with another value, and a checksum that fits."""
    whole = json.loads(path.read_text())
    *parents, last = where.split(".")
    inner = whole
    for name in parents:
        inner = inner[name]
    inner[last] = value
    if parents:
        whole["sha256"] = digest(whole["body"])
    return json.dumps(whole)


LEARNED = "body.learned"


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        ("version", 1, "it has version 1; this program reads 2"),
        ("sha256", "0" * 64, "its checksum is wrong"),
        ("body.of.machine", "another", "it was written with other machine"),
        ("body.of.kernels", "older", "it was written with other kernels"),
        (f"{LEARNED}.times.target", [[1, -0.5]], "-0.5 is not a number"),
        (f"{LEARNED}.times.target", [["1", 0.5]], "'1' is not a number"),
        (f"{LEARNED}.times.drafters", [], "'list' object has no attribute"),
        (f"{LEARNED}.times.together", {"other": [1, 1]}, "as many times"),
        (f"{LEARNED}.acceptance.tokens", {"look-up": [1, True]}, "True is not a number"),
        (f"{LEARNED}.acceptance.shapes", {"look-up": [[1, 2, 1]]}, "from 0 to 1"),
        (f"{LEARNED}.acceptance.matches", {"own": [[1.0], [1.0]]}, "a rate for each of 7"),
        (f"{LEARNED}.lengths", {}, "'lengths'"),
        (f"{LEARNED}.lengths.lengths", [1 << 20], "is not a number from 0 to 16384"),
        (f"{LEARNED}.memory", {"open": "AQ=="}, "buffer size"),
        (f"{LEARNED}.memory", {"open": "/wAAAA=="}, "not in the vocabulary"),
        ("", "", "Expecting value"),
        ("", '{"version": NaN}', "NaN is not a number"),
        ("", "[" * 100_000, "recursion"),
        ("", "\udcff", "utf-8"),
    ],
)
def test_what_does_not_fit_is_ignored(saved, family, caplog, where, value, reason) -> None:
    text = changed(saved, where, value) if where else value
    saved.write_text(text, errors="surrogateescape")
    file, look_up = file_of(saved.parent, family["target"])
    learn = file.restore()
    assert learn.state() == Estimators().state()
    assert not look_up.memory(["open"])
    (record,) = caplog.records
    assert record.message.startswith(f"the state {saved} is ignored: ")
    assert reason in record.message
    assert "\n" not in record.message


def test_another_combination_has_a_file_of_its_own(saved, family, caplog) -> None:
    file, _ = file_of(saved.parent, family["target"], threads=2)
    file.restore()
    reason = "it was written with other threads"
    assert caplog.records[0].message == f"the state {saved} is ignored: {reason}"
    file.save([])
    assert len(list(saved.parent.iterdir())) == 2


def test_the_path_of_a_model_does_not_matter_and_its_bytes_do(saved, family, tmp_path) -> None:
    moved = tmp_path / "elsewhere" / family["target"].name
    moved.mkdir(parents=True)
    for part in family["target"].iterdir():
        (moved / part.name).write_bytes(part.read_bytes())
    assert file_of(saved.parent, moved)[0].path == saved
    weights = next(moved.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert file_of(saved.parent, moved)[0].path != saved


def test_a_failed_write_leaves_the_old_file(saved, family, caplog, monkeypatch) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    before = saved.read_bytes()
    file, _ = file_of(saved.parent, family["target"])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    file.save([])
    file.save([])
    assert [r.message.rpartition(": ")[2] for r in caplog.records] == [
        "[Errno 28] No space left on device"
    ]
    assert list(saved.parent.iterdir()) == [saved]
    assert saved.read_bytes() == before


def test_two_servers_may_share_a_folder(saved, family) -> None:
    files = [file_of(saved.parent, family["target"])[0] for _ in range(2)]
    writers = [threading.Thread(target=lambda f=f: [f.save([]) for _ in range(20)]) for f in files]
    for writer in writers:
        writer.start()
    for _ in range(20):
        assert file_of(saved.parent, family["target"])[0]._read(saved)
    for writer in writers:
        writer.join()


def test_it_is_saved_every_few_minutes_of_serving(saved, family) -> None:
    file, _ = file_of(saved.parent, family["target"])
    saved.unlink()
    assert [now for now in (0.0, 100.0, 180.0, 181.0, 359.0, 400.0) if file.is_due(now)] == [
        180.0,
        400.0,
    ]
    file.save_soon([])
    file._writer.join()
    assert saved.exists()


def test_an_unusable_folder(cli: Cli, family, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = cli("serve", family["target"], "--state", tmp_path / "file" / "inside")
    assert (code, err) == (2, f"penstock: engine.state: {tmp_path / 'file'} is not a folder\n")
    folder = tmp_path / "later"
    file, _ = file_of(folder, family["target"])
    folder.write_text("")
    file.restore()
    file.save([])
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_times_are_not_measured_again(saved, family, tmp_path) -> None:
    fields = {"num_threads": 1, "dtype": "float32", "kv_tokens": 512, "backend": "eager"}
    drafters = {"near": str(family["near"])}
    config = config_of(tmp_path / "own", family["target"], drafters=drafters, **fields)
    first = load_engine(config)
    first.state.save([])
    second = load_engine(config)
    times, known = (engine.scheduler.learn.times for engine in (second, first))
    # Equal, but for the rounding of pooled sizes.
    assert times.target.points() == [pytest.approx(point) for point in known.target.points()]
    assert times.profile.token_seconds == pytest.approx(known.profile.token_seconds)
    assert times.draft_seconds("near", 1, 1) == pytest.approx(known.draft_seconds("near", 1, 1))


@pytest.mark.slow
def test_a_second_server_begins_where_the_first_ended(tmp_path) -> None:
    folder = tmp_path / "state"
    options = ("target-large", "--state", str(folder), "--drafter", "tiny=suffix+draft-tiny")
    options += ("--set", "tenants.default.save_outputs=true")
    texts, logs = [], []
    for log in (tmp_path / "first", tmp_path / "second"):
        with program(log, *options) as server:
            texts.append([server.text(f"def count_{name}(") for name in "abc"])
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(LONG) == 0
        logs.append(log.read_text())
        if len(logs) == 1:
            (file,) = folder.iterdir()
            learned = json.loads(file.read_text())["body"]["learned"]
    assert texts[0] == texts[1]
    assert learned["memory"]["default"]
    assert "restored" not in logs[0]
    step_ms = learned["times"]["target"][0][1] * 1e3
    right, wrong = learned["acceptance"]["tokens"]["tiny"]
    rate = (right + 1.4) / (right + wrong + 2)
    assert (
        f"restored what was learned from {file}: a step of one row takes {step_ms:.3g} ms, "
        f"acceptance: tiny {rate:.2f}\n"
    ) in logs[1]
