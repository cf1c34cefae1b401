"""`penstock draft` as a program, against a scripted verification server."""

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from tests.serving.certificates import write_certificates
from tests.serving.scripted_verifier import Oracle, ScriptedVerifier, target_oracle

from penstock.cli.models import drafter_checkpoint
from penstock.config import NGRAM
from penstock.core.types import SamplingParams
from penstock.transport.service import server_credentials
from penstock.zoo.registry import DEFAULT_DRAFTER, bundled_models

# Tests started in the background hand an ignored SIGINT down. It is mended in the program itself:
# with a `preexec_fn` Python would fork, which gRPC's threads in this process may not outlive.
_CODE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
_CODE += "from penstock.cli import main; main()"
PROGRAM = (sys.executable, "-c", _CODE, "draft")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def oracle(family: dict[str, Path]) -> Oracle:
    return target_oracle(family["target"])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority `ca`, and certificates of `server` and `edge` from it; PEM."""
    folder = tmp_path_factory.mktemp("certificates")
    return write_certificates(folder, {"server": "ca", "edge": "ca"})


class Running:
    """The program while it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        async with asyncio.timeout(60):
            line = (await self.process.stdout.readline()).decode()
        assert line, await self.ended()
        return line.rstrip("\n")

    async def ended(self) -> tuple[int | None, str, str]:
        """Exit code, the rest of standard output, and standard error."""
        async with asyncio.timeout(60):
            out, err = await self.process.communicate()
        return self.process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def program(*arguments: object) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--connect'"),
        (["--connect", "nowhere"], "--connect takes HOST:PORT, not 'nowhere'"),
        (["--connect", ":8100"], "--connect takes HOST:PORT, not ':8100'"),
        (["--connect", "a:1", "--model", "huge"], "'huge' does not exist"),
        (["--connect", "a:1", "--listen", "web"], "--listen: 'web' in 'web' is no port"),
        (["--connect", "a:1", "--weights", "int8"], "'int8' is not one of 'stored', 'int4'"),
        (["--connect", "a:1", "--max-draft-tokens", "0"], "'--max-draft-tokens'"),
        (["--connect", "a:1", "--cert", "x.pem"], "--cert and --key belong together"),
        (["--connect", "a:1", "--ca", "/nowhere.pem"], "cannot read /nowhere.pem: No such file"),
        (["--connect", "a:1", "--ca", __file__], "holds no certificates in PEM format"),
        (
            ["--connect", "a:1", "--cert", __file__, "--key", __file__],
            "are no certificate and its unencrypted key",
        ),
        (["--connect", "a:1", "--token", "a\nb"], "--token must be printable ASCII"),
        (["--connect", "a:1", "--no-assignments"], "leaves nothing to draft for"),
        (["--connect", "a:1", "--model", "ngram+draft-code"], "one model or with ngram, not"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli, arguments, message) -> None:
    code, out, err = cli("draft", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("penstock: ")
    assert err.count("\n") == 1


def test_which_model_is_meant(family: dict[str, Path]) -> None:
    cards = bundled_models()
    assert drafter_checkpoint(None) == (DEFAULT_DRAFTER, cards[DEFAULT_DRAFTER].path)
    assert drafter_checkpoint("draft-code") == ("draft-code", cards["draft-code"].path)
    assert drafter_checkpoint(NGRAM) == (NGRAM, cards[DEFAULT_DRAFTER].path)
    assert drafter_checkpoint(str(family["near"])) == ("near", family["near"])


@pytest.mark.slow
async def test_users_are_served(family: dict[str, Path], oracle: Oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    prompt = "Once upon a time"
    async with (
        verifier.serving() as port,
        program(
            *("--connect", f"127.0.0.1:{port}", "--model", family["near"], "--listen", 0),
            *("--token", "t0", "--max-draft-tokens", 5),
            *("--log-format", "json"),
        ) as running,
    ):
        assert await running.line() == f"penstock: drafting for 127.0.0.1:{port} as edge"
        line = await running.line()
        assert line.startswith("penstock: serving on http://127.0.0.1:")
        assert verifier.hellos[0].model_name == "near"
        assert verifier.hellos[0].max_draft_tokens == 5
        assert verifier.tokens == ["t0"]
        async with httpx.AsyncClient(base_url=line.split()[-1], timeout=30) as http:
            body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
            made = (await http.post("/v1/completions", json=body)).json()
            assert made["usage"]["completion_tokens"] == 30
            assert made["usage"]["speculation"]["drafter"] == "edge"
            assert list(verifier.opens[0].prompt_token_ids) == await tokens_of(http, family, prompt)
            assert (await http.get("/health")).status_code == 200
            (model,) = (await http.get("/v1/models")).json()["data"]
            assert (model["id"], model["draft_model"]) == ("big", "near")
            assert made["model"] == "big"
            told = {**body, "model": "big", "max_tokens": 5, "logprobs": 2}
            choice = (await http.post("/v1/completions", json=told)).json()["choices"][0]
            first = verifier.opens[-1].prompt_token_ids
            assert choice["logprobs"]["token_logprobs"] == [-len(first) - i for i in range(5)]
            assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 5
            unknown = await http.post("/v1/completions", json={**body, "model": "near"})
            assert unknown.status_code == 404
            assert "this server has 'big'" in unknown.json()["error"]["message"]
            expected = {"type": "content", "content": "Once"}
            refused = await http.post("/v1/completions", json={**body, "prediction": expected})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prediction")
            verifier.delay_s = 0.05
            async with http.stream(
                "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 150}
            ) as stream:
                pieces = []
                async for data in stream.aiter_lines():
                    # A slow machine's verifier lets comments through that keep the stream alive.
                    if data.startswith("data: "):
                        pieces.append(json.loads(data.removeprefix("data: ")))
                    if len(pieces) == 2:
                        break
            async with asyncio.timeout(60):
                while not verifier.closes:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        code, out, errors = await running.ended()
        assert (code, out) == (0, "")
        told = [json.loads(line) for line in errors.splitlines()]
        assert {"POST /v1/completions", "GET /health"} <= {line["message"] for line in told}
        assert {line["level"] for line in told} == {"DEBUG"}


@pytest.mark.slow
async def test_texts_end_where_the_targets_do(family, oracle, tmp_path) -> None:
    """Not at the drafter's own ends of text."""
    model = tmp_path / "model"
    shutil.copytree(family["near"], model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    verifier = ScriptedVerifier(oracle)
    prompt = list(range(40, 49))
    end = oracle(prompt, 6, GREEDY)[-1]
    verifier.eos_token_ids = (end, 250)
    async with (
        verifier.serving() as port,
        program(*("--connect", f"127.0.0.1:{port}", "--model", model, "--listen", 0)) as running,
    ):
        await running.line()
        url = (await running.line()).split()[-1]
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 0}
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            for fields in ({}, {"stop_token_ids": [3]}, {"ignore_eos": True}):
                made = (await http.post("/v1/completions", json={**body, **fields})).json()
                assert (made["usage"]["completion_tokens"] == 30) == ("ignore_eos" in fields)
    stops = [list(message.stop_token_ids) for message in verifier.opens]
    assert stops == [sorted([end, 250]), sorted([3, end, 250]), []]


async def tokens_of(http: httpx.AsyncClient, family: dict[str, Path], text: str) -> list[int]:
    from penstock.engine.tokenizer import load_tokenizer

    return load_tokenizer(family["near"]).encode(text)


@pytest.mark.slow
async def test_without_users_no_port_is_opened(family: dict[str, Path], oracle: Oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    async with (
        verifier.serving() as port,
        program(*("--connect", f"127.0.0.1:{port}", "--model", family["same"])) as running,
    ):
        await running.line()
        verifier.assign("@1", [1, 2, 3], 20, GREEDY)
        async with asyncio.timeout(60):
            while not verifier.finished:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # All 16 drafts but where products in bfloat16 break a tie otherwise than in float32.
        assert verifier.finished["@1"].num_accepted >= 12
        process = psutil.Process(running.process.pid)
        listening = [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening == []
        before = process.cpu_times()
        await asyncio.sleep(1)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.2, "it spins when idle"
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == (0, "", "")


@pytest.mark.slow
async def test_a_refusal_is_one_line_and_exit_code_2(family, oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    verifier.refuse = "the draft model has another tokenizer than the target"
    async with (
        verifier.serving() as port,
        program("--connect", f"127.0.0.1:{port}", "--model", family["near"]) as running,
    ):
        code, out, err = await running.ended()
    assert (code, out) == (2, "")
    assert err == (
        f"penstock: the verification server at 127.0.0.1:{port} refuses: {verifier.refuse}\n"
    )


@pytest.mark.slow
async def test_it_can_be_stopped_before_it_is_connected(family: dict[str, Path]) -> None:
    async with program("--connect", "127.0.0.1:9", "--model", family["near"]) as running:
        async with asyncio.timeout(60):
            line = (await running.process.stderr.readline()).decode()
        assert line.startswith("penstock: WARNING: no connection to the verification server at")
        assert line.endswith("; trying again\n")
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == (0, "", "")


@pytest.mark.slow
async def test_certificates(family: dict[str, Path], oracle: Oracle, certificates: Path) -> None:
    verifier = ScriptedVerifier(oracle)
    secured = server_credentials(
        certificates / "server.pem", certificates / "server.key", certificates / "ca.pem"
    )
    async with (
        verifier.serving(credentials=secured) as port,
        program(
            *("--connect", f"127.0.0.1:{port}", "--model", family["near"]),
            *("--ca", certificates / "ca.pem"),
            *("--cert", certificates / "edge.pem", "--key", certificates / "edge.key"),
        ) as running,
    ):
        assert await running.line() == f"penstock: drafting for 127.0.0.1:{port} as edge"
        assert verifier.names == ["edge"]
        running.process.send_signal(signal.SIGTERM)
        assert (await running.ended())[0] == 0
