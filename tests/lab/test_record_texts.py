"""Records of real texts: what look-up finds, what drafters guess, and that the engine agrees."""

import gzip
import json
from argparse import Namespace
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.engine.other_vocabulary import TARGET as TARGET_NAME
from tests.engine.other_vocabulary import reordered
from tests.engine.other_vocabulary import write as write_model

from lab.bench.real_prompts import PARTS, RealPrompt
from lab.bench.record_texts import (
    KINDS,
    MOST_FOUND,
    MOST_RIGHT,
    NOTHING,
    OWN,
    TENANT,
    Row,
    Text,
    check,
    load,
    look_up,
    prompts,
    record_of,
    rights_of,
    rounds_of,
    rows_of,
    runs,
    tables_of,
    texts_of,
    write,
)
from lab.common.cells import Cells
from penstock.config import SUFFIX
from penstock.sim.domains import FOLDER
from penstock.zoo.registry import DOMAINS, load_prompts, model_path

ASKED = RealPrompt("edit", "learn", "here", text="")
FIRST = Text(ASKED, (1, 2, 3, 4, 5, 6), (9, 1, 2, 3, 4, 7))
SECOND = Text(ASKED, (20, 21), (9, 1, 2, 3, 5, 30))
NONE = Row(NOTHING, 0, 0, 0)


def test_look_up_finds_in_the_text_itself_and_in_those_before() -> None:
    first, second = look_up([FIRST, SECOND])
    assert first == [NONE] * 4 + [Row(OWN, 3, MOST_FOUND, 1), Row(OWN, 4, MOST_FOUND, 0)]
    # To the output's end, which is that of what is found; its last token was read, too.
    assert second == [NONE] * 3 + [Row(TENANT, 3, 3, 1), Row(TENANT, 4, 2, 0), NONE]


def test_runs_of_right_guesses() -> None:
    assert runs([True, True, False, True]) == [2, 1, 0, 1]
    assert runs([True] * 20) == [16] * 5 + list(range(15, 0, -1))


def test_rounds_are_compared_at_the_positions_where_they_begin() -> None:
    # A first token, then 3 of a draft with 2 right, none of one with 1, and the last of many.
    assert rounds_of([1, 3, 1, 2], [0, 2, 0, 0, 1, 9, 9]) == [(3, 3), (1, 2), (2, 2)]


def test_figures_are_means_over_positions(tmp_path: Path) -> None:
    rights = {"small-0.5b": [[0, 1, 2, 3, 4, 5], [0, 0, 0, 2, 1, 0]]}
    record = record_of("target", [FIRST, SECOND], look_up([FIRST, SECOND]), rights)
    write(record, tmp_path / "record.json.gz")
    record = json.loads(gzip.decompress((tmp_path / "record.json.gz").read_bytes()))
    row = rows_of(record)[-1]
    assert [list(one.rows[-1])[-2:] for one in tables_of([row], ["small-0.5b"])] == [
        ["17%", "17%"],
        ["nan", "nan"],
        ["3.00", "0.75"],
    ]
    assert (row["positions"], row["none"], row["own"], row["tenant"]) == (12, 8 / 12, 1 / 6, 1 / 6)
    assert (row["match of 1 to 3"], row["match of 4 to 7"]) == (1, 0)
    assert (row["drafter 0 with"], row["drafter 0 without"]) == (12 / 4, 6 / 8)


@pytest.mark.slow
def test_twelve_prompts_of_each_kind_and_half_of_them_held_out() -> None:
    asked = prompts()
    assert Counter((p.kind, p.part) for p in asked) == {(k, p): 6 for k in KINDS for p in PARTS}
    assert len({p.text or p.message for p in asked}) == len(asked)


def test_the_engine_accepts_what_is_recorded(tmp_path: Path) -> None:
    """With a drafter of the target's tokens, one of the same under other ids, and itself."""
    twin = write_model(tmp_path / "twin", "draft-base", reordered)
    drafters = {"same": model_path("draft-base"), "twin": twin, "itself": model_path(TARGET_NAME)}
    paths = {name: str(path) for name, path in drafters.items()}
    engine = load(Namespace(target=model_path(TARGET_NAME), drafters=paths, threads=1))
    cut = [load_prompts(domain)[0].prompt for domain in DOMAINS[:4]]
    asked = [RealPrompt("chat", "learn", "here", text=text) for text in cut]
    kept = Cells(tmp_path / "kept.jsonl", silent=True)
    texts = texts_of(engine, asked, kept)
    looked_up = [[row.right for row in rows] for rows in look_up(texts)]
    rights = {name: rights_of(engine, name, texts, kept) for name in drafters}
    found = {row["drafts of"]: row for row in check(engine, texts, {SUFFIX: looked_up, **rights})}
    assert all(found[name]["equal"] == 1 for name in ("same", "itself"))
    assert found[SUFFIX]["equal"] > 0.97, "what is hardly right is not drafted"
    assert found["twin"]["live"] == pytest.approx(found["twin"]["recorded"], rel=0.1)
    assert 1 < found["same"]["live"] < found["itself"]["live"]
    # What is kept is not made again.
    done = len(kept.done)
    assert texts_of(engine, asked, kept) == texts
    assert len(kept.done) == done == 4 + len(drafters)


def test_the_bundled_record() -> None:
    (path,) = FOLDER.glob("texts-*.json.gz")
    record = json.loads(gzip.decompress(path.read_bytes()))
    texts = record["texts"]
    halves = Counter((text["kind"], text["held_out"]) for text in texts)
    assert halves == {(kind, held): 6 for kind in KINDS for held in (True, False)}
    for text in texts:
        rows = np.array(text["lookup"])
        assert rows.shape == (text["output_len"], 4)
        assert list(text["right"]) == record["drafters"]
        left = text["output_len"] - np.arange(len(rows))
        source, length, found, right = rows.T
        assert set(source) <= {NOTHING, OWN, TENANT}
        assert (length <= 32).all()
        assert ((source == NOTHING) == (length == 0)).all()
        assert (right <= np.minimum(found, left)).all()
        assert (found <= MOST_FOUND).all()
        for guessed in text["right"].values():
            assert len(guessed) == len(rows)
            assert (np.array(guessed) <= np.minimum(left, MOST_RIGHT)).all()
    # With the target's tokens a right guess is one more than from the next position on.
    same = texts[0]["right"][record["drafters"][0]]
    assert all(here in (0, min(then + 1, MOST_RIGHT)) for here, then in pairwise(same))
