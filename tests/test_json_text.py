"""No JSON that others read holds NaN or an infinity."""

import ast
import json
from pathlib import Path

import pytest

import penstock
from penstock.json_text import dumps

ROOT = Path(penstock.__file__).parent


def test_numbers_that_json_does_not_have_are_null() -> None:
    bad = (float("nan"), float("inf"), float("-inf"))
    text = dumps({"a": [1.5, *bad], "b": {"c": bad}, "d": "NaN"}, separators=(",", ":"))
    assert text == '{"a":[1.5,null,null,null],"b":{"c":[null,null,null]},"d":"NaN"}'
    assert dumps([1, "ü"], ensure_ascii=False) == json.dumps([1, "ü"], ensure_ascii=False)


@pytest.mark.parametrize("name", ["api/responses.py", "api/errors.py", "serving/logs.py", "cli"])
def test_all_writers_go_through_it(name: str) -> None:
    """Where something is written for others."""
    path = ROOT / name
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        own = [n for n in calls if ast.unparse(n.func) in ("json.dumps", "json.dump")]
        assert not own, f"{file.name}:{own[0].lineno}"
