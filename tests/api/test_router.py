"""A standard router, as people run it before vLLM, in front of two servers."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from tests.api.routing import router
from tests.api.samples import samples
from tests.serving.harness import RunningServer, running_server, serve_config

pytestmark = pytest.mark.slow

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a penstock?"}]


@dataclass(frozen=True)
class Routed:
    """url: of the router."""

    url: str
    servers: tuple[RunningServer, RunningServer]

    def served(self) -> list[float]:
        """Requests that each server has finished."""
        return [
            samples(httpx.get(f"{s.url}/metrics").text).get("penstock:request_success_total", 0)
            for s in self.servers
        ]


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    options = ("--policy", "round_robin", "--disable-retries")
    log = tmp_path_factory.mktemp("router") / "log"
    with ExitStack() as stack:
        config = serve_config(served_model_name="toy")
        first = stack.enter_context(running_server(config))
        second = stack.enter_context(running_server(config))
        url = stack.enter_context(router((first.url, second.url), log, *options))
        yield Routed(url, (first, second))


@pytest.mark.slow
def test_chats_and_completions_reach_both_servers(routed: Routed) -> None:
    before = routed.served()
    with openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0) as ai:
        assert next(iter(ai.models.list())).id == "toy"
        chats = [
            ai.chat.completions.create(
                model="toy", messages=USER, max_tokens=12, seed=seed, extra_body={"top_k": -1}
            )
            for seed in range(4)
        ]
        texts = [
            ai.completions.create(model="toy", prompt="one two three", max_tokens=12)
            for _ in range(4)
        ]
    assert all(chat.usage and chat.usage.completion_tokens == 12 for chat in chats)
    assert len({chat.choices[0].message.content for chat in chats}) == 1
    assert all(text.usage and text.usage.completion_tokens == 12 for text in texts)
    assert [n - old for n, old in zip(routed.served(), before, strict=True)] == [4, 4]


@pytest.mark.slow
def test_a_stream_comes_through(routed: Routed) -> None:
    with openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0) as ai:
        chunks = list(
            ai.chat.completions.create(
                model="toy",
                messages=USER,
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    usage = chunks[-1].usage
    assert usage.completion_tokens == 12


def test_refusals_come_through(routed: Routed) -> None:
    with (
        openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0) as ai,
        pytest.raises(openai.BadRequestError, match="temperature"),
    ):
        ai.chat.completions.create(model="toy", messages=USER, temperature=-1)
