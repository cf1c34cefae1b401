import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config import (
    ConfigError,
    ServeConfig,
    cores_of,
    hash_of_key,
    parse_config,
    read_profile,
    read_yaml,
)
from penstock.core.policies.bundles import BUNDLES


def engine(**settings: Any) -> dict[str, Any]:
    return {"engine": {"target": "models/target", **settings}}


def test_defaults() -> None:
    config = parse_config(engine())
    assert isinstance(config, ServeConfig)
    assert config.engine.target == Path("models/target")
    assert config.engine.admission.make("admission").name == "fluid_guided"
    assert config.engine.allocation.make("allocation").name == "priced"


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_gives_what_is_not_set(name: str) -> None:
    bundle, config = BUNDLES[name], parse_config(engine(policy=name)).engine
    parts = (config.admission.name, config.selection.name, config.allocation.name, config.pipeline)
    assert parts == (bundle.admission, bundle.selection, bundle.allocation, bundle.pipeline)
    assert not config.admission.make("admission").may_idle
    assert parse_config({"engine": config.model_dump()}).engine == config
    own = {"pipeline": False, "selection": {"name": "lbss"}, "allocation": None}
    over = parse_config(engine(policy=name, **own)).engine
    assert (over.pipeline, over.selection.name) == ("off", "lbss")
    assert (over.admission, over.allocation) == (config.admission, config.allocation)


def test_options_without_a_name_are_for_the_policy_of_the_bundle() -> None:
    options = {"options": {"max_num_batched_tokens": 512}}
    admission = parse_config(engine(policy="wait", admission=options)).engine.admission
    assert admission.name == "nested_wait"
    bundled = dict(BUNDLES["wait"].admission_options)
    assert admission.options == {**bundled, "max_num_batched_tokens": 512}


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
        ({**engine(), "prot": 80}, "unknown setting 'prot' (did you mean 'port'?); settings: "),
        (engine(kv_token=64), "engine: unknown setting 'kv_token' (did you mean 'kv_tokens'?); "),
        (
            engine(tenants={"us": {"wait": 2}}),
            "engine.tenants.us: unknown setting 'wait' (did you mean 'weight'?); settings: ",
        ),
        ({**engine(), "port": 99999}, "port: Input should be less than or equal to 65535"),
        (engine(kv_tokens=1), "engine.kv_tokens: Input should be greater than or equal to 16"),
        (engine(drafters={"auto": "x"}), "engine.drafters: a drafter cannot be called 'auto'"),
        (
            engine(drafters={"c": "ngram+"}),
            "engine.drafters: 'ngram+': after look-up comes one model, not ''; allowed: "
            "ngram+MODEL and suffix+MODEL",
        ),
        (
            engine(allocation={"name": "fixed", "options": {"length": 3}}),
            "engine.allocation: allocation policy 'fixed' has no option 'length'; options: k",
        ),
        (
            engine(admission={"name": "vllm_v1", "options": {"watermark": 2}}),
            "engine.admission: admission policy 'vllm_v1': watermark must be a finite number "
            "from 0 to below 1, not 2",
        ),
        (
            engine(selection={"name": "single", "options": {"drafter": "x"}}),
            "engine: selection names an unknown drafter 'x'; drafters: none is configured",
        ),
        (engine(tenants={"us": {"weight": float("nan")}}), "engine.tenants.us.weight: Input sho"),
        (engine(tenants={"us": {"weight": 0}}), "engine.tenants.us.weight: Input should be great"),
        (
            engine(
                tenants={
                    "us": {"api_keys": [hash_of_key("k")]},
                    "them": {"api_keys": [hash_of_key("k")]},
                }
            ),
            "engine.tenants: each API key must belong to one tenant only",
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


def drafters(**settings: Any) -> dict[str, Any]:
    return {**engine(), "drafters": {"listen": "127.0.0.1:8100", **settings}}


TLS = {"certificate": "a.pem", "key": "a.key"}
TOKEN = {"token_sha256": "0" * 64}


def test_where_draft_servers_connect() -> None:
    assert parse_config(engine()).drafters is None
    plain = parse_config(drafters()).drafters
    assert plain.servers == {}
    for listen in ("localhost:0", "[::1]:8100", "127.9.9.9:1"):
        parse_config(drafters(listen=listen))
    named = parse_config(
        drafters(
            listen="0.0.0.0:8100",
            tls={**TLS, "client_ca": "ca.pem"},
            servers={"a": {**TOKEN, "tenant": "t"}, "b": {"common_name": "b", "trusted": True}},
        )
    ).drafters
    assert [s.trusted for s in named.servers.values()] == [False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "8100"}, "drafters.listen: '8100' is not HOST:PORT"),
        ({"listen": "host:99999"}, "is not HOST:PORT"),
        ({"listen": "0.0.0.0:1", "servers": {"a": TOKEN}}, "so `tls` is needed"),
        ({"listen": "edge.example:1", "tls": TLS}, "so `servers` must name"),
        ({"servers": {"a": {}}}, "needs token_sha256 or common_name"),
        ({"servers": {"a": {**TOKEN, "common_name": "a"}}}, "only one of them"),
        ({"servers": {"a": {"common_name": "a"}}, "tls": TLS}, "needs `tls` with `client_ca`"),
        ({"servers": {"a": {"token_sha256": "secret"}}}, "drafters.servers.a.token_sha256"),
        ({"servers": {"a/b": TOKEN}}, "cannot be called 'a/b'"),
        ({"servers": {"target": TOKEN}}, "cannot be called 'target'"),
        ({"servers": {"a": {**TOKEN, "trust": True}}}, "unknown setting 'trust'"),
        ({"audit_share": 2}, "drafters.audit_share"),
    ],
)
def test_unsafe_or_wrong_settings_of_draft_servers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse_config(drafters(**settings))
    assert "\n" not in str(error.value)


def test_a_draft_server_and_a_drafter_of_one_name() -> None:
    both = drafters(servers={"small": TOKEN})
    both["engine"]["drafters"] = {"small": "models/small"}
    with pytest.raises(ConfigError, match="names both"):
        parse_config(both)


def test_a_profile_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    with pytest.raises(ConfigError, match=r"engine\.profile: cannot read"):
        parse_config(engine(profile=str(path)))
    path.write_text('{"name": "toy", "kv_tokens": 9, "token_counts": [1]}')
    with pytest.raises(ConfigError, match="token_seconds"):
        parse_config(engine(profile=str(path)))
    path.write_text(
        '{"name": "toy", "kv_tokens": 9, "token_counts": [1], "token_seconds": [0.1],'
        ' "drafters": [{"name": "a", "batch_counts": [1], "batch_seconds": [0.2]}]}'
    )
    assert parse_config(engine(profile=str(path))).engine.profile == path
    assert read_profile(path).drafters[0].slowdown == 1.0


def test_drafters_have_settings_of_their_own() -> None:
    own = {"path": "small.gguf", "device": "cpu:0,2-3", "weights": "int4", "max_num_seqs": 8}
    parsed = parse_config(engine(drafters={"a": "ngram", "b": own})).engine
    assert parsed.drafters["b"].max_num_seqs == 8
    assert (parsed.weights_of("b"), parsed.weights_of("a")) == ("int4", "auto")
    assert cores_of(str(parsed.drafters["b"].device)) == (0, 2, 3)
    assert cores_of("cpu") == cores_of("cuda:1") == ()
    assert parsed.model_dump(mode="json")["drafters"] == {"a": "ngram", "b": own}


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ({"device": "cpu"}, "engine.drafters.a.path: Field required"),
        ({"path": "x", "cores": 2}, "unknown setting 'cores'; settings: path, device, weights"),
        ({"path": "x", "max_num_seqs": 0}, "engine.drafters.a.max_num_seqs: Input should be"),
        ({"path": "x", "device": "gpu"}, "'gpu' is unknown; allowed: cpu, cpu:CORES"),
        ({"path": "x", "device": "cpu:3-1"}, "'cpu:3-1' names no cores"),
        ({"path": "ngram", "device": "cpu:0"}, "'a' loads no model, so it takes no device"),
        ({"path": "http://127.0.0.1:1/v1", "weights": "int4"}, "'a' loads no model"),
    ],
)
def test_settings_of_a_drafter_that_are_refused(drafter: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(engine(drafters={"a": drafter}))
    assert said in str(refused.value)


def test_bundles_have_further_settings() -> None:
    """Those that are given come first."""
    good, spin = (parse_config(engine(policy=name)).engine for name in ("goodspeed", "spin"))
    assert (good.verification, good.pipeline, spin.attention) == ("ratio", "off", "decomposed")
    given = engine(policy="goodspeed", verification="coupled")
    assert parse_config(given).engine.verification == "coupled"
