"""An OpenAI-compatible server for completions that answers as a test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes, dict[str, str]]
Answer = Callable[[dict[str, Any]], Reply]


def completion(text: object, finish_reason: str = "length") -> Reply:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return 200, json.dumps({"object": "text_completion", "choices": [choice]}).encode(), {}


def going_on(texts: list[str], chars_a_token: int = 4) -> Answer:
    """Continues a prompt as the text that it is the beginning of; nothing where there is none."""

    def answer(asked: dict[str, Any]) -> Reply:
        prompt = asked["prompt"]
        whole = next((t for t in texts if t.startswith(prompt)), prompt)
        return completion(whole[len(prompt) :][: asked["max_tokens"] * chars_a_token])

    return answer


def _dead(asked: dict[str, Any]) -> Reply:
    """Ends a connection that is still open."""
    raise ConnectionAbortedError


@dataclass
class CompletionsServer:
    """asked: bodies of the requests so far; headers: of the last one."""

    answer: Answer
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


@contextmanager
def completions_server(answer: Answer, port: int = 0) -> Iterator[CompletionsServer]:
    served = CompletionsServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.asked.append(asked)
            served.paths.append(self.path)
            served.headers = dict(self.headers)
            status, body, headers = served.answer(asked)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: object) -> None:
            """The client may have gone."""

    server = Server(("127.0.0.1", port), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.answer = _dead
        server.shutdown()
        server.server_close()
        thread.join()
