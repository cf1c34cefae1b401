from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import ConfigError, ServeConfig, parse_config, read_yaml


def engine(**settings: Any) -> dict[str, Any]:
    return {"engine": {"target": "models/target", **settings}}


def test_defaults() -> None:
    config = parse_config(engine())
    assert isinstance(config, ServeConfig)
    assert config.engine.target == Path("models/target")
    assert config.engine.admission.make("admission").name == "vllm_v1"
    assert config.engine.allocation.make("allocation").name == "throughput"


def test_policies_with_options() -> None:
    config = parse_config(
        engine(
            drafters={"small": "models/small", "lookup": "ngram"},
            selection={"name": "single", "options": {"drafter": "lookup"}},
            allocation={"name": "fixed", "options": {"k": 6}},
        )
    )
    assert config.engine.allocation.make("allocation").options.k == 6
    assert config.engine.selection.make("selection").options.drafter == "lookup"


def test_settings_cannot_be_changed_afterwards() -> None:
    config = parse_config(engine())
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "engine: Field required"),
        ({"engine": {}}, "engine.target: Field required"),
        ({"engine": 3}, "engine: Input should be a valid dictionary"),
        ({**engine(), "prot": 80}, "unknown setting 'prot'; settings: engine, host, port, "),
        (engine(kv_token=64), "engine: unknown setting 'kv_token'; settings: target, drafters, "),
        (
            engine(tenants={"us": {"wait": 2}}),
            "engine.tenants.us: unknown setting 'wait'; settings: weight, api_keys",
        ),
        ({**engine(), "port": 99999}, "port: Input should be less than or equal to 65535"),
        (engine(dtype="int8"), "engine.dtype: Input should be 'auto', 'float32', "),
        (engine(kv_tokens=1), "engine.kv_tokens: Input should be greater than or equal to 16"),
        (engine(drafters={"auto": "x"}), "engine.drafters: a drafter cannot be called 'auto'"),
        (engine(drafters={"target": "x"}), "engine.drafters: a drafter cannot be called 'target'"),
        (
            engine(allocation={"name": "fixd"}),
            "engine: unknown allocation policy 'fixd'; choose from fixed, ",
        ),
        (
            engine(allocation={"name": "fixed", "options": {"length": 3}}),
            "engine: allocation policy 'fixed' has no option 'length'; options: k, total",
        ),
        (
            engine(allocation={"name": "fixed", "options": {"k": "3"}}),
            "engine: allocation policy 'fixed': k must be int, not '3'",
        ),
        (
            engine(admission={"name": "vllm_v1", "options": {"watermark": 2}}),
            "engine: admission policy 'vllm_v1': watermark must be in [0, 1), not 2",
        ),
        (
            engine(selection={"name": "single", "options": {"drafter": "x"}}),
            "engine: selection names an unknown drafter 'x'; drafters: none is configured",
        ),
        (engine(tenants={"us": {"weight": 0}}), "engine.tenants.us.weight: Input should be great"),
        (engine(tenants={"us": {"weight": float("nan")}}), "engine.tenants.us.weight: Input sho"),
        (
            engine(tenants={"us": {"api_keys": ["k"]}, "them": {"api_keys": ["k"]}}),
            "engine.tenants: API keys must not be empty, and each must belong to one tenant only",
        ),
    ],
)
def test_mistakes_are_one_clear_line(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_reading_yaml(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 80\nengine:\n  target: é\n", encoding="utf-8")
    assert read_yaml(path) == {"port": 80, "engine": {"target": "é"}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read .*: No such file"),
        (b"a: [1,\nb: }", "is not YAML: .* line 2"),
        (b"\xff\xfe\x00", "is not YAML: .*codec can't decode"),
        (b"- 1\n- 2\n", "must hold a mapping of settings"),
        (b"", "must hold a mapping of settings"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value)
