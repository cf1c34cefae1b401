import io
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import Cli
from tests.engine.small_family import write_family

import penstock
from penstock.cli.models import named_drafters, with_models
from penstock.config import NGRAM, ConfigError, ServeConfig, parse_config
from penstock.core.policies.bundles import BUNDLES
from penstock.core.policies.registry import policies
from penstock.zoo.registry import DEFAULT_DRAFTER, ModelCard


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_family(tmp_path_factory.mktemp("family"))


@pytest.fixture
def family(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, ModelCard]:
    """A tiny family in the place of the bundled one."""
    names = {"target-large": "target", "draft-other": "far", DEFAULT_DRAFTER: "near"}
    cards = {
        name: ModelCard(
            name, "target" if name == "target-large" else "drafter", checkpoints[model], 0, ""
        )
        for name, model in names.items()
    }
    monkeypatch.setattr("penstock.cli.models.bundled_models", lambda: cards)
    return cards


def test_help_is_fast_and_loads_no_library() -> None:
    code = (
        "import sys\n"
        "from penstock.cli import main\n"
        "for command in ('serve', 'draft'):\n"
        "  sys.argv = ['penstock', command, '--help']\n"
        "  try: main()\n"
        "  except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'fastapi', 'numpy', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--drafter" in done.stdout
    assert "--connect" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"penstock {penstock.__version__}\n", "")


@pytest.mark.parametrize("command", ["serve", "simulate", "capacity"])
def test_help_names_the_policies(cli: Cli, command: str) -> None:
    code, out, _ = cli(command, "--help")
    assert code == 0
    shown = [BUNDLES, *map(policies, ("admission", "allocation", "selection"))]
    for names in shown[: 1 if command == "serve" else 4]:
        assert ", ".join(names) in " ".join(out.split())


def test_without_arguments_there_is_help(cli: Cli) -> None:
    code, out, _ = cli()
    assert code == 0
    assert "serve" in out
    assert "generate" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["serve", "--frob"], "No such option: --frob"),
        (["serve", "--kv-tokens", "many"], "'--kv-tokens'"),
        (["serve", "--port", "70000"], "port: "),
        (["serve", "--dtype", "int4"], "engine.dtype: Input should be 'auto', 'float32'"),
        (["serve", "--kv-dtype", "int4"], "engine.kv_dtype: Input should be 'auto' or 'int8'"),
        (["serve", "--set", "selecton=lbss"], "'selecton' (did you mean 'selection'?); settings: "),
        (["serve", "--set", "drafter_weights=int3"], "engine.drafter_weights: Input should be"),
        (["serve", "--set", "verification=hope"], "engine.verification: Input should be 'coupled'"),
        (["serve", "--policy", "best"], "engine.policy: unknown policy 'best'; choose from auto, "),
        (["generate", "Hi", "--set", "policy=best"], "engine.policy: unknown policy 'best'; "),
        (["serve", "--admission", "first"], "unknown admission policy 'first'; choose from "),
        (
            ["serve", "/nowhere"],
            "'/nowhere' does not exist; bundled targets are",
        ),
        (["serve", "--drafter", "draft-huge"], "does not exist; bundled drafters are draft-other"),
        (["serve", "--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["serve", "--host", "not a host"], "cannot listen on not a host:8000"),
        (["serve", "--max-model-len", "1"], "engine.max_model_len: "),
        (["serve", "--api-key", ""], "--api-key must not be empty"),
        (["serve", "--host", ".."], "cannot listen on ..:8000: that is no host's name"),
        (["generate"], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli, family, arguments, message) -> None:
    code, out, err = cli(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("penstock: ")
    assert err.count("\n") == 1


def test_a_port_in_use(cli: Cli, family: dict[str, ModelCard]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = cli("serve", "--port", str(port))
    assert (code, out) == (2, "")
    assert err == f"penstock: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_settings_files_give_way_to_options(cli: Cli, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("port: 70000\nengine:\n  dtype: int4\n  admission: {name: first}\n")
    assert "dtype" in cli("serve", "--config", str(settings), "--admission", "vllm_v1")[2]
    assert "admission" in cli("serve", "--config", str(settings), "--dtype", "auto")[2]
    options = ("--config", str(settings), "--dtype", "auto", "--admission", "vllm_v1")
    assert "port" in cli("serve", *options)[2]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("engine: 5", (), "engine must be a mapping of settings"),
        ("engine: {drafters: [a, b]}", (), "engine.drafters must be a mapping of settings"),
        ("engine: {drafters: {a: }}", (), "drafter 'a': 'None' does not exist"),
        ("engine: {admission: vllm_v1}", (), "engine.admission: "),
        # Nothing is wrong with these but the port: null is as if the setting were absent.
        ("drafters:\nport: 70000", (), "port: "),
        ("engine: {drafters: , pipeline: , admission: }\nport: 70000", (), "port: "),
        ("engine: {admission: }\nhost:\nport: 70000", ("--admission", "sarathi"), "port: "),
    ],
)
def test_settings_of_the_wrong_shape(cli, family, tmp_path, text, options, message) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(text)
    code, out, err = cli("serve", "--config", str(settings), *options)
    assert (code, out) == (2, "")
    assert re.match(rf"penstock: {re.escape(str(settings))}:[1-3]: {re.escape(message)}", err)
    assert err.count("\n") == 1


def test_the_bundled_family_is_the_default(family: dict[str, ModelCard]) -> None:
    engine = with_models({})
    assert engine["target"] == family["target-large"].path
    assert list(engine["drafters"]) == [DEFAULT_DRAFTER, "draft-other", NGRAM]
    assert with_models({"target": "target-large"}) == engine


def test_models_of_ones_own(family: dict[str, ModelCard], checkpoints: dict[str, Path]) -> None:
    own, same = str(checkpoints["target"]), str(checkpoints["same"])

    def drafters(*options: str) -> Any:
        return with_models({"target": own, "drafters": named_drafters(options)})["drafters"]

    assert drafters(f"mine={same}", "draft-other", "ngram") == {
        "mine": same,
        "draft-other": str(family["draft-other"].path),
        "ngram": NGRAM,
    }
    assert drafters(f"c=ngram+{same}", "suffix+draft-other") == {
        "c": f"ngram+{same}",
        "suffix+draft-other": f"suffix+{family['draft-other'].path}",
    }
    with pytest.raises(ConfigError, match="'c': 'edge-1' does not exist"):
        drafters("c=ngram+edge-1")
    with pytest.raises(ConfigError, match=r"'ngram\+suffix': after look-up comes one model"):
        drafters("ngram+suffix")
    named = {"target": "target-large", "drafters": {"small": "draft-other", "look-up": "ngram"}}
    assert with_models(named)["drafters"] == {
        "small": str(family["draft-other"].path),
        "look-up": NGRAM,
    }


def test_all_requests_have_look_up(checkpoints: dict[str, Path]) -> None:
    own, same = str(checkpoints["target"]), str(checkpoints["same"])

    def look_up(drafters: dict[str, str], **fields: Any) -> tuple[str, str] | None:
        models = with_models({"target": own, "drafters": drafters, **fields})
        return parse_config({"engine": models}).engine.text_look_up

    assert look_up({"mine": same}) == ("suffix", "suffix")
    assert look_up({"mine": same}, look_up="ngram") == ("ngram", "ngram")
    assert look_up({"mine": same}, look_up="none") is None
    assert look_up({"grams": f"ngram+{same}"}) == ("ngram", "ngram")
    assert look_up({"mine": same, "found": "ngram"}) == ("found", "ngram")
    assert look_up({"grams": f"ngram+{same}", "found": "suffix"}) == ("found", "suffix")
    bundled = {"target": "target-large", "drafters": {"mine": same}}
    assert parse_config({"engine": with_models(bundled)}).engine.text_look_up is None
    assert with_models({"target": own})["drafters"] == {"suffix": "suffix"}
    assert with_models({"target": own, "drafters": {}})["drafters"] == {}
    assert with_models({"target": own, "look_up": "none"})["drafters"] == {}
    assert with_models({"target": own, "vllm": {}})["drafters"] == {}


def test_a_family_that_was_never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, Any]:
        raise FileNotFoundError("no bundled models")

    monkeypatch.setattr("penstock.cli.models.bundled_models", missing)
    with pytest.raises(ConfigError, match="no bundled models"):
        with_models({})


def test_generate(cli: Cli, family: dict[str, ModelCard]) -> None:
    arguments = ("generate", "Once upon", "--max-tokens", "24", "--dtype", "float32")
    code, out, _ = cli(*arguments, "--json")
    assert code == 0
    made = json.loads(out)
    assert set(made) == {"text", "token_ids", "drafter", "tokens_per_s", "mean_acceptance_length"}
    assert len(made["token_ids"]) == 24
    drafters = {card.name for card in family.values() if card.role == "drafter"}
    assert made["drafter"] in {*drafters, "ngram", None}, "whichever the policy took"
    assert (made["mean_acceptance_length"] or 1) >= 1
    code, out, err = cli(*arguments, "--no-speculation", "--stats")
    assert code == 0
    assert out == made["text"] + "\n"
    assert "tokens/s, mean acceptance length 1.00, drafter none" in err


def test_generate_with_a_seed_and_a_target(cli: Cli, checkpoints: dict[str, Path]) -> None:
    far = str(checkpoints["far"])
    sampled = ("generate", "Once upon", "--max-tokens", "24", "--dtype", "float32", "--json")
    sampled += ("--temperature", "1")

    def tokens(*more: str, target: str = str(checkpoints["target"])) -> list[int]:
        code, out, err = cli(*sampled, "--target", target, *more)
        assert code == 0, err
        return json.loads(out)["token_ids"]

    seeded = tokens("--seed", "7")
    assert tokens("--seed", "7", "--drafter", f"near={checkpoints['near']}") == seeded
    assert tokens("--seed", "8") != seeded
    assert tokens("--seed", "7", target=far) != seeded


def _give_template(checkpoint: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    (checkpoint / "chat_template.jinja").write_text(template)


@pytest.fixture
def chatty(checkpoints: dict[str, Path], tmp_path: Path) -> str:
    """A target with a chat template."""
    folder = tmp_path / "chatty"
    shutil.copytree(checkpoints["target"], folder)
    _give_template(folder)
    return str(folder)


def test_generate_applies_the_chat_template(cli: Cli, chatty: str) -> None:
    options = ("--target", chatty, "--max-tokens", "16", "--dtype", "float32", "--json")
    made = [
        json.loads(cli("generate", *arguments, *options)[1])["token_ids"]
        for arguments in (("Hi",), ("u:Hi;a:", "--raw"), ("Hi", "--raw"))
    ]
    assert made[0] == made[1] != made[2]


@pytest.mark.slow
def test_chat_piped(cli: Cli, chatty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--target", chatty, "--max-tokens", "8", "--dtype", "float32")

    def says(said: str, *more: str) -> tuple[str, int]:
        """What it prints, and how often it says how fast it was."""
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        code, out, err = cli("chat", *options[1:], *more)
        assert code == 0, err
        return out, err.count("tokens/s")

    def text_after(raw: str) -> str:
        return json.loads(cli("generate", raw, "--raw", *options, "--json")[1])["text"]

    first = text_after("u:Hi;a:")
    second = text_after(f"u:Hi;a:{first};u:Ho;a:")
    assert says("Hi\n\nHo\n/exit\nHu\n") == (f"{first}\n{second}\n", 0)
    assert says("Hi\n/clear\nHi", "--stats") == (f"{first}\n{first}\n", 2)
    assert says("") == ("", 0)


def test_chat_goes_on_when_the_context_is_full(cli, chatty, monkeypatch) -> None:
    """The oldest turns leave, until the answer has room."""
    options = ("--target", chatty, "--max-tokens", "8", "--dtype", "float32")
    turns = [f"{i} is a turn of some length: " + "la " * 50 for i in range(9)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(turns)))
    code, out, err = cli("chat", *options[1:])  # MODEL as in `serve MODEL`
    assert code == 0, err
    told = [line for line in err.splitlines() if line.startswith("penstock: ")]
    assert told
    assert set(told) == {
        "penstock: the context of 512 tokens is full; the oldest turn has left the conversation"
    }
    answers = out.splitlines()
    assert len(answers) == len(turns)
    kept = len(turns) - 1 - len(told)
    pairs = zip(turns[len(told) : -1], answers[len(told) :], strict=False)
    raw = "".join(f"u:{turn.strip()};a:{answer};" for turn, answer in pairs)
    raw += f"u:{turns[-1].strip()};a:"
    assert kept > 0
    made = json.loads(cli("generate", raw, "--raw", *options, "--json")[1])["text"]
    assert made == answers[-1]


def test_chat_needs_a_template(cli: Cli, family: dict[str, ModelCard]) -> None:
    code, _, err = cli("chat", "--dtype", "float32")
    assert code == 2
    assert "has no chat template; use penstock generate" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--max-tokens", "5"], "the prompt must not be empty"),
        (["\udcff\udcfe"], "the prompt is not valid UTF-8"),
        (["Hi", "--max-tokens", "0"], "--max-tokens"),
        (["Hi", "--max-tokens", "100000"], "context of 512 tokens"),
        (["Hi", "--temperature", "-1"], "--temperature"),
        (["Hi", "--temperature", "inf"], "--temperature must be finite, not inf"),
        (["Hi", "--seed", "-1"], "--seed"),
        (
            ["Hi", "--target", "gpt-5"],
            "'gpt-5' does not exist; bundled",
        ),
    ],
)
def test_bad_input_to_generate(cli, family, arguments, message) -> None:
    code, out, err = cli("generate", *arguments, "--no-speculation", "--dtype", "float32")
    assert (code, out.strip()) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_serve_announces_itself_and_serves(checkpoints: dict[str, Path]) -> None:
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "serve"]
    command += ["--state", "none"]
    command += [str(checkpoints["target"]), "--drafter", f"near={checkpoints['near']}"]
    command += ["--port", "0", "--kv-tokens", "2048", "--dtype", "float32", "--device", "cpu"]
    command += ["--served-model-name", "small", "--api-key", "k1", "--max-model-len", "100"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        ExitStack() as end,
    ):
        end.callback(process.kill)  # where something fails, it would be waited for
        model, memory, line, chat, trial = (process.stdout.readline() for _ in range(5))
        assert model.startswith("penstock: small: safetensors, float32, kernels for ")
        assert memory.startswith("penstock: KV memory of 2,048 tokens (0.00 GiB in float32), at ")
        assert memory.endswith("; drafters: near, suffix\n")
        assert line.startswith("penstock: serving on http://127.0.0.1:")
        url = line.split()[-1]
        assert chat == f"penstock: chat at {url}/dashboard#playground, or:\n"
        _, asked, *options = shlex.split(trial)
        assert (asked, options[0]) == (f"{url}/v1/completions", "-H")
        told = dict(option.split(": ") for option in options[1:-2:2])
        told["Authorization"] = "Bearer k1"
        answer = httpx.post(asked, content=options[-1], headers=told, timeout=30)
        assert answer.status_code == 200, answer.text
        body = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 401
        key = {"Authorization": "Bearer k1"}
        (model,) = httpx.get(f"{url}/v1/models", headers=key, timeout=30).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("small", 100)
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 5
        process.terminate()
        assert process.wait(10) == 0
        assert process.stdout.read() == ""


def test_look_up_beside_draft_servers(started: Callable[..., ServeConfig]) -> None:
    listens = ("--drafters-listen", "127.0.0.1:0")
    assert started(*listens).engine.text_look_up is None
    assert started(*listens, "--set", "look_up=suffix").engine.text_look_up == ("suffix", "suffix")


@pytest.fixture
def started(cli: Cli, family: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeConfig]:
    """Runs `penstock serve` up to its start; returns the settings in force."""
    found: list[ServeConfig] = []

    async def serve(config: ServeConfig, *_: Any, **__: Any) -> None:
        found.append(config)

    monkeypatch.setattr("penstock.serving.fork_context.preload", lambda: None)
    monkeypatch.setattr("penstock.api.server.serve", serve)

    def run(*arguments: str) -> ServeConfig:
        code, _, said = cli("serve", "target-large", *arguments)
        assert code == 0, said
        return found[-1]

    return run


@pytest.mark.parametrize(
    ("options", "allocation", "pipeline"),
    [
        ((), "priced", "auto"),
        (("--pipeline", "async"), "priced", "async"),
        (("--drafters-listen", "127.0.0.1:0"), "priced", "auto"),
        (("--drafters-listen", "127.0.0.1:0", "--pipeline", "off"), "priced", "off"),
        (("--drafters-listen", "127.0.0.1:0", "--pipeline", "2"), "priced", "2"),
        (("--drafters-listen", "127.0.0.1:0", "--set", "allocation=fixed"), "fixed", "auto"),
        (("--drafters-listen", "127.0.0.1:0", "--policy", "goodspeed"), "goodspeed", "off"),
        (("--policy", "spin", "--set", "allocation.k=2"), "fixed", "5%"),
        (("--policy", "spin", "--pipeline", "10%"), "fixed", "10%"),
        (("--set", "policy=spin", "--set", "allocation=priced", "--pipeline", "2"), "priced", "2"),
    ],
)
def test_the_defaults_with_draft_servers(started, options, allocation, pipeline) -> None:
    engine = started(*options).engine
    assert engine.allocation.name == allocation
    assert engine.pipeline == pipeline


@pytest.mark.parametrize(
    ("admission", "warns"), [("wait", True), ("nested_wait", True), ("vllm_v1", False)]
)
def test_a_policy_that_may_idle_is_warned_of_at_start(started, caplog, admission, warns) -> None:
    started("--admission", admission)
    lines = [r.getMessage() for r in caplog.records if r.name == "penstock.cli.serve"]
    assert len(lines) == warns
    if warns:
        assert lines[0].startswith(f"--admission {admission} may wait for other requests")
        assert "gated: true, or --admission fluid_guided, always serves" in lines[0]
