"""Drafters that are servers: their addresses, names and keys."""

import pytest
from tests.conftest import Cli

from penstock.cli.models import with_models
from penstock.config import (
    CompletionsServer,
    ConfigError,
    DrafterParts,
    parse_config,
    read_settings,
)
from penstock.config.completions import key_variable
from penstock.zoo.registry import model_path

TARGET = {"target": str(model_path("draft-base"))}


@pytest.mark.parametrize(
    ("path", "server"),
    [
        ("http://127.0.0.1:8080/v1#small", ("http://127.0.0.1:8080/v1", "small", True)),
        ("http://localhost:8080", ("http://localhost:8080/v1", None, True)),
        ("http://[::1]:80/v1/#a/b:c", ("http://[::1]:80/v1", "a/b:c", True)),
        ("https://draft.example/base/v1", ("https://draft.example/base/v1", None, False)),
        ("HTTP://10.0.0.2:1/v1", ("http://10.0.0.2:1/v1", None, False)),
        ("http://localhost.example/v1", ("http://localhost.example/v1", None, False)),
    ],
)
def test_a_url_is_a_server(path: str, server: tuple[str, str | None, bool]) -> None:
    assert DrafterParts.from_path(path) == (None, None, CompletionsServer(*server))


@pytest.mark.parametrize("path", ["ngram", "/models/http", "owner/name", "ftp://host/x"])
def test_other_paths_are_none(path: str) -> None:
    assert DrafterParts.from_path(path).server is None


@pytest.mark.parametrize(
    "path",
    [
        "http://",
        "http:///v1",
        "http://host:port/v1",
        "http://host:99999/v1",
        "http://ho st/v1",
        "http://h\u00f6st/v1",
        "http://[::1/v1",
        "http://user:sk-secret@host/v1",
        "http://sk-secret@host/v1",
        "http://host/v1?key=sk-secret",
        "suffix+http://127.0.0.1:1/v1",
    ],
)
def test_bad_urls_are_one_line_without_secrets(cli: Cli, path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DrafterParts.from_path(path)
    assert "\n" not in str(raised.value)
    code, out, err = cli("serve", "target-large", "--drafter", f"edge={path}")
    assert (code, out) == (2, "")
    assert "sk-secret" not in err
    assert "URL" in err or "after look-up comes one model" in err


def test_a_server_is_no_model_and_gets_no_look_up() -> None:
    drafters = {"edge": "http://127.0.0.1:1/v1#m", "look": "ngram"}
    engine = parse_config({"engine": {**TARGET, "drafters": drafters, "look_up": "suffix"}}).engine
    assert engine.text_look_up == ("look", "ngram")
    assert list(engine.servers) == ["edge"]
    assert engine.drafter_models == {}


def test_its_name_is_a_word(cli: Cli) -> None:
    code, _, err = cli("serve", "target-large", "--drafter", "http://127.0.0.1:1/v1")
    assert code == 2
    assert "a server needs a name of letters and digits, as in edge=URL" in err
    code, _, err = cli("draft", "--connect", "127.0.0.1:1", "--model", "http://127.0.0.1:1/v1")
    assert code == 2
    assert "a draft server drafts with one model" in err


def test_a_key_is_no_setting(caplog: pytest.LogCaptureFixture) -> None:
    assert key_variable("my-edge.2") == "PENSTOCK_DRAFTER_KEY_MY_EDGE_2"
    assert read_settings(None, {key_variable("edge"): "sk-secret"}).values == {}
    assert caplog.messages == []


def test_look_up_goes_on_beside_servers() -> None:
    edge = {"edge": "http://127.0.0.1:1/v1"}
    assert with_models({**TARGET, "drafters": edge})["drafters"] == {**edge, "suffix": "suffix"}
    without = with_models({**TARGET, "drafters": edge, "look_up": "none"})
    assert without["drafters"] == edge
    assert with_models({**TARGET, "drafters": {}})["drafters"] == {}
