from collections.abc import Iterator

import httpx
import openai
import pytest
from tests.serving.fakes import SLOW_FACTORY, TOKENIZER
from tests.serving.harness import RunningServer, running_server, serve_config

from penstock.engine.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server(serve_config(served_model_name="toy")) as running:
        yield running


@pytest.fixture(scope="session")
def slow_server() -> Iterator[RunningServer]:
    """A step takes 20 ms, so that requests can be caught while they run."""
    config = serve_config(served_model_name="toy", max_waiting_requests=8)
    with running_server(config, SLOW_FACTORY) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TOKENIZER)


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def ai(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
