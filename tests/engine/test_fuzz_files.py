"""Model files and settings, damaged anywhere: read, or refused in one line."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.engine.small_gguf import WIDE, write_gguf
from tests.engine.small_models import CASES, write_checkpoint
from tests.mutations import attempts

from penstock.config import ConfigError, parse_config, read_yaml
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.weights import load_weights

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """What libraries log of damaged files is no valid Unicode: pytest's workers stumble at it."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def refusals(
    file: Path, read: Callable[[], object], error: type[Exception], within: int | None = None
) -> tuple[int, int]:
    """(Attempts, of them refused); any other error is a bug."""
    whole, num_tried, messages = file.read_bytes(), 0, []
    for data in attempts([whole], within):
        file.write_bytes(data)
        num_tried += 1
        try:
            read()
        except error as refused:
            messages.append(str(refused))
    assert all(message and "\n" not in message for message in messages)
    return num_tried, len(messages)


def test_gguf(tmp_path: Path) -> None:
    case = replace(CASES["llama"], changes=CASES["llama"].changes | WIDE)
    path = write_gguf(tmp_path / "model.gguf", case, "Q8_0").path

    def read() -> None:
        load_weights(path, DecoderConfig.from_pretrained(path))

    num_tried, num_refused = refusals(path, read, CheckpointError, within=4000)
    assert num_tried / 4 < num_refused < num_tried


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_checkpoint_folders(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "llama", CASES["llama"]).path
    file = folder / name
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little") if name != "config.json" else None

    def read() -> None:
        load_weights(folder, DecoderConfig.from_pretrained(folder))

    num_tried, num_refused = refusals(file, read, CheckpointError, header)
    assert num_tried / 4 < num_refused < num_tried


def test_settings(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    settings = {
        "port": 8000,
        "max_body_bytes": 1_000_000,
        "engine": {
            "target": "target-large",
            "drafters": {"draft-tiny": "draft-tiny"},
            "kv_tokens": 4096,
            "admission": {"name": "fluid_guided"},
            "allocation": {"name": "priced", "options": {}},
            "tenants": {"a": {"weight": 2.0}, "b": {"max_waiting_requests": 4}},
        },
    }
    path.write_text(yaml.safe_dump(settings))
    parse_config(read_yaml(path))
    num_tried, num_refused = refusals(path, lambda: parse_config(read_yaml(path)), ConfigError)
    assert num_tried / 4 < num_refused < num_tried
