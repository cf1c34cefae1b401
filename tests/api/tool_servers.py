"""Servers whose model writes what its last message says, and whose chat template has tools."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.serving.fakes import TOKENIZER
from tests.serving.harness import RunningServer, running_server, serve_config

# The toy engine repeats its prompt, of which the end token ends the first round.
TEMPLATE = (
    "{{ messages[-1]['content'] }}<|eos|>"
    "{% for m in messages[:-1] %}<|user|>{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
)
HERMES = TEMPLATE + "{# <tool_call> #}"
MISTRAL = TEMPLATE + "{# [TOOL_CALLS] #}"
MISTRAL_ARGS = TEMPLATE + "{# [TOOL_CALLS]name[ARGS] #}"
QWEN_CODER = TEMPLATE + "{# <tool_call> <function=name> #}"
GPT_OSS = TEMPLATE + "{# <|channel|>analysis<|message|> <|channel|>commentary #}<|end|>"
DEEPSEEK = TEMPLATE + "{# <｜tool▁call▁begin｜>name ```json #}"
DEEPSEEK_V31 = TEMPLATE + "{# <｜tool▁call▁begin｜>name #}"
GLM = TEMPLATE + "{# <tool_call><arg_key>k</arg_key>\n<arg_value> #}"
SHORT_GLM = TEMPLATE + "{# <tool_call><arg_key>k</arg_key><arg_value> #}"
GRANITE = TEMPLATE + "{# <|tool_call|> #}"
GEMMA = TEMPLATE + "{# <|tool_call>call: #}"
LFM2 = TEMPLATE + "{# List of tools: [] #}"
LLAMA = TEMPLATE + '{# ipython {"name": NAME, "parameters": {}} #}'


def write_tokenizer(folder: Path, template: str) -> Path:
    """The bundled one, with another template."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@contextmanager
def tool_server(folder: Path, template: str) -> Iterator[RunningServer]:
    target = write_tokenizer(folder, template)
    with running_server(serve_config({"target": target}, served_model_name="toy")) as running:
        yield running
