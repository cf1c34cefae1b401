"""Settings of vLLM's engine. No vLLM is needed for it."""

import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.config import ConfigError, EngineConfig, VllmConfig
from penstock.engine.vllm import arguments


@pytest.fixture
def envs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A vLLM of which nothing is there but what its settings are read from."""
    envs = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=False)
    made = make_dataclass("EngineArgs", [], namespace={"create_engine_config": lambda self: self})
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"envs": envs},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": made},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
    }
    for name, attributes in parts.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(arguments, "check_installed", lambda: None)
    monkeypatch.setattr(arguments, "_ENVIRONMENT", {})
    return envs


def test_the_second_model_runner_is_refused(envs: SimpleNamespace, tmp_path: Path) -> None:
    envs.VLLM_USE_V2_MODEL_RUNNER = True
    with pytest.raises(ConfigError, match="engine vllm needs vLLM's first model runner"):
        arguments.vllm_config(EngineConfig(target=tmp_path, vllm=VllmConfig()))


@pytest.mark.parametrize("name", ["scheduler_cls", "worker_cls", "speculative_config"])
def test_what_penstock_sets_itself_is_refused(envs, tmp_path, name) -> None:
    with pytest.raises(ConfigError, match=f"vllm.args.{name}: Penstock sets it itself"):
        arguments.vllm_config(EngineConfig(target=tmp_path, vllm=VllmConfig(args={name: "mine"})))
