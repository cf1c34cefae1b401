"""guidellm and lm-eval, as people run them, against the bundled models.

They bring many packages along, and so are not among those that the tests need: where they are found
(`PATH=/a/venv/bin:$PATH`, with guidellm and lm-eval[api] in it), they are tried.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving.program import LONG, Program, program

from penstock.zoo.registry import model_path

pytestmark = pytest.mark.slow

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(name: str, *arguments: str, folder: Path) -> str:
    """What a client says on its way. Skips where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(folder / "hf")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [found, *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
        env=environment,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    log = tmp_path_factory.mktemp("clients") / "log"
    with program(log, "--dtype", "float32", "--kv-tokens", "16384") as running:
        yield running


@pytest.mark.parametrize(
    ("profile", "form"),
    [
        ("kind=constant,rate=4", "/v1/completions"),
        ("kind=poisson,rate=4", "/v1/chat/completions"),
        ("kind=concurrent,streams=4", "/v1/completions"),
        ("kind=sweep,sweep_size=3", "/v1/chat/completions"),
        ("kind=synchronous", "/v1/responses"),
    ],
)
def test_guidellm(server: Program, tmp_path: Path, profile: str, form: str) -> None:
    """Nothing fails, and every output has the length that was asked for."""
    out = tmp_path / "out.json"
    run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={server.url},request_format={form}"),
        *("--profile", profile),
        *("--constraint", "kind=max_duration,seconds=4"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={model_path('target-large')}"),
        *("--output", f"kind=json,path={out}"),
        "--disable-console",
        folder=tmp_path,
    )
    made = json.loads(out.read_text())["benchmarks"]
    assert len(made) == (3 if "sweep" in profile else 1)
    for one in made:
        requests = one["requests"]
        assert not requests["errored"]
        assert requests["successful"]
        lengths = {r["output_metrics"]["text_tokens"] for r in requests["successful"]}
        assert lengths == {16}


QUESTIONS = [
    {"question": "Question: language of Poland? Answer:", "choices": [" Polish", " 12", " {}"]},
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " Warsaw", " the"]},
    {"question": "SELECT name FROM", "choices": [" users", "!!!", " Once upon"]},
]
TASK = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def reference(context: str, continuation: str) -> float:
    """The log-probability by transformers, with the tokens that lm-eval takes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path("target-large"))
    model = AutoModelForCausalLM.from_pretrained(model_path("target-large"), dtype="float32")
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    begin = len(tokenizer.encode(context, add_special_tokens=False))
    with torch.no_grad():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(scores[i - 1, whole[i]]) for i in range(begin, len(whole)))


def test_lm_eval(server: Program, tmp_path: Path) -> None:
    """A task of multiple choices by log-probabilities."""
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (tmp_path / "choices.yaml").write_text(TASK.format(data=data))
    said = run(
        "lm_eval",
        *("--model", "local-completions"),
        *("--model_args", f"model=target-large,base_url={server.url}/v1/completions"),
        *("--tasks", "choices", "--include_path", str(tmp_path)),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
        folder=tmp_path,
    )
    assert "Using remote tokenizer" in said
    (path,) = (tmp_path / "out").rglob("samples_choices_*.jsonl")
    samples: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        found = [float(score) for score, _ in sample["filtered_resps"]]
        asked = sample["doc"]
        expected = [reference(asked["question"], choice) for choice in asked["choices"]]
        assert found == pytest.approx(expected, abs=2e-3)
        assert found != pytest.approx(expected[::-1], abs=2e-3)
