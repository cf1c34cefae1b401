"""Does llama.cpp compute what the engine does, of every architecture that both read?

    python -m lab.bench.beside_llamacpp [NAME,...] [--llama-server PATH] [--prompts 4] [--json]

Of each architecture a random model of a few million parameters is written as a GGUF file by the
writer of the tests (so it needs what the tests need), in F32 and in Q4_K with Q6_K. The engine
continues random prompts of 300 tokens greedily by 100; then llama.cpp reads the same texts, by
`llama-cpp-python` or by a server that is started for each file, with keys and values in float32.

Perplexity is that of what transformers would continue with, weighed by its probabilities from the
same weights as floats; within 0.1% of one another's. In F32 99% of the likeliest tokens must be
equal, too, and log-probabilities within 0.05. Gemma 3's differ by 0.03 and Gemma 4's by 0.4, as
llama.cpp's GELU is a table in half precision: with it in transformers, 0.07 of Gemma 4's are left.
Controls: read by llama.cpp twice a file must meet that, and one must not in which the rows of a
layer's o_proj are moved by one.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from tests.engine.small_gguf import save_gguf
from tests.engine.small_models import CASES, SHAPE, Paging, parameters, randomise
from tests.engine.test_gguf_tokenizer import qwen35
from transformers import PreTrainedModel

from lab.bench.servers import Rival, ServerError, Turn, running
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, count, parser, table, tell
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.native.runner import NativeRunner

PROMPT, MORE = 300, 100
EQUAL, CLOSE, WITHIN = 0.99, 0.05, 0.001
_BLOCK_SIZE = 16

_BASE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 256, "norm_topk_prob": True}
_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
_GLM = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **_EXPERTS}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 128}
_FIVE_OF_SIX = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
_GRANITE = {
    "logits_scaling": 8.0, "attention_multiplier": 1 / 64, "shared_intermediate_size": 768,
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "layer_types": ["attention"] * 6,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_TRUNCATED = {
    "rope_type": "yarn", "rope_theta": 32 ** (32 / 9.998), "factor": 32.0, "truncate": False,
    "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 3220,
}  # fmt: skip
"""Positions of gpt-oss, scaled between dimensions 8.001 and 17.999: llama.cpp truncates these."""
_CONV = {"layer_types": ["conv", "conv", "full_attention"] * 2, "intermediate_size": 1152}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 64, "sliding_window": 128, **_FIVE_OF_SIX}),
    "qwen35": ("qwen3-5", _DELTA),
    "qwen35moe": ("qwen3-5-moe", _DELTA | _SHARED),
    "qwen3next": ("qwen3-next", _DELTA | _SHARED),
    "glm4moe": ("glm4-moe", _GLM),
    "gpt-oss": (
        "gpt-oss",
        _WINDOWED
        | {"intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"rope_parameters": _TRUNCATED},
    ),
    "gemma4": ("gemma4", _WINDOWED | {"global_head_dim": 128}),
    "smollm3": ("smollm3", {"attention_bias": False}),
    "mistral3": ("ministral3", {"rope_parameters": _YARN}),
    "granite": ("granite", _GRANITE),
    "granitehybrid": ("granite-unrotated", _GRANITE | {"mamba_n_heads": 8}),
    "lfm2": ("lfm2", _CONV | {"block_multiple_of": 256}),
}
"""A case of the tests, and what differs from its configuration and `_BASE`."""


TOKENIZER = qwen35()
Figures = dict[str, Any]
Read = Callable[[Path, Sequence[list[int]]], torch.Tensor]
"""Log-probabilities [texts * MORE, vocabulary] of the tokens behind the prompts of texts."""


def model_of(name: str) -> PreTrainedModel:
    case, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    rows = {"vocab_size": TOKENIZER.get_vocab_size()}
    config = CASES[case].config(**SHAPE | CASES[case].changes | _BASE | rows | changes)
    model = CASES[case].model(config).eval()
    randomise(model, mild=True)
    return model


def kind_of(kind: str, name: str) -> str:
    """Return the type of a matrix."""
    small = ("in_proj_a", "in_proj_b", "router", "mlp.gate.", "expert_gate")
    if kind == "F32" or any(part in name for part in small):
        return "F32"
    large = ("down_proj", "embed", "lm_head", "v_proj", ".w2.")
    return "Q6_K" if any(part in name for part in large) else "Q4_K"


def ours(file: Path, num_prompts: int) -> tuple[list[list[int]], torch.Tensor]:
    """Greedily continued texts, and as of `Read`. Raises: CheckpointError."""
    num_blocks = -(-(PROMPT + MORE) // _BLOCK_SIZE)
    runner = NativeRunner.load(file, torch.float32, num_blocks, _BLOCK_SIZE, 1)
    rng, texts, rows = np.random.default_rng(1), [], []
    for _ in range(num_prompts):
        place, start = Paging(num_blocks, _BLOCK_SIZE), 0
        ids = rng.integers(runner.config.vocab_size - 10, size=PROMPT)
        while len(ids) < PROMPT + MORE:
            batch = place.batch(("a", ids, start, len(ids)), logits="last")
            rows.append(runner.forward(batch)[-1].log_softmax(-1))
            start, ids = len(ids), np.append(ids, int(rows[-1].argmax()))
        texts.append(ids.tolist())
    return texts, torch.stack(rows)


def by_library(file: Path, texts: Sequence[list[int]]) -> torch.Tensor:
    from llama_cpp import Llama

    exact = {"type_k": 0, "type_v": 0, "flash_attn": False}
    room = {"n_ctx": 512, "n_batch": 512, "n_threads": 1, "n_threads_batch": 1}
    model = Llama(str(file), verbose=False, logits_all=True, **exact, **room)
    found = []
    for ids in texts:
        model.reset()
        model.eval(ids)
        found.append(torch.from_numpy(model.scores[PROMPT - 1 : len(ids) - 1].copy()))
    return torch.cat(found).log_softmax(-1)


def by_server(program: Path, file: Path, texts: Sequence[list[int]]) -> torch.Tensor:
    """Always a plain letter is sampled, as nothing is told of an end or a part of a letter.

    What is told is of logits that are not biased. Raises: ServerError."""
    exact = "-ctk f32 -ctv f32 -fa off -c 1024 -np 1 -t 1 --no-warmup --port {port}"
    rival = Rival("llama.cpp", f"{program} -m {file} {exact}")
    asked = {"n_predict": 1, "n_probs": TOKENIZER.get_vocab_size()}
    asked["logit_bias"] = [[TOKENIZER.token_to_id("a"), 1000.0]]
    found = torch.full((len(texts) * MORE, TOKENIZER.get_vocab_size()), -math.inf)
    with running(rival, Turn(1, PROMPT, MORE, 1)) as (server, _):
        beginnings = [ids[:end] for ids in texts for end in range(PROMPT, PROMPT + MORE)]
        for row, ids in zip(found, beginnings, strict=True):
            body = json.dumps({"prompt": ids, **asked}).encode()
            request = Request(f"{server.url}/completion", body, {"Content-Type": "text/json"})
            with urlopen(request, timeout=300) as answer:
                (token,) = json.loads(answer.read())["completion_probabilities"]
            for one in token["top_logprobs"]:
                row[one["id"]] = one["logprob"]
    return found


def compared(mine: torch.Tensor, theirs: torch.Tensor, weights: torch.Tensor) -> Figures:
    """How often the likeliest token is the same, and more. weights: transformers' probabilities."""
    losses = [-(weights * x).sum(1).mean().item() for x in (mine, theirs)]
    return {
        "equal": (mine.argmax(1) == theirs.argmax(1)).double().mean().item(),
        "difference": (mine - theirs).abs().max().item(),
        "ours": math.exp(losses[0]),
        "theirs": math.exp(losses[1]),
        "ratio": math.expm1(losses[0] - losses[1]),
    }


def is_same(kind: str, found: Figures) -> bool:
    is_near = found["equal"] >= EQUAL and found["difference"] <= CLOSE
    return abs(found["ratio"]) <= WITHIN and (is_near or kind != "F32")


def measure(name: str, kind: str, num_prompts: int, read: Read) -> Iterator[tuple[str, Figures]]:
    """Figures of an architecture, then of its controls. Raises: CheckpointError, ServerError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        stored = save_gguf(file, model_of(name), partial(kind_of, kind), TOKENIZER, "qwen35")
        texts, mine = ours(file, num_prompts)
        rows = [stored.logits(np.array(ids))[PROMPT - 1 : -1] for ids in texts]
        weights = torch.cat(rows).softmax(-1)
        theirs = read(file, texts)
        yield "", compared(mine, theirs, weights)
        if kind == "F32":
            yield "twice", compared(theirs, read(file, texts), weights)
            outputs = ("2.self_attn.o_proj", "2.self_attn.out_proj")
            with torch.no_grad():
                for matrix, values in parameters(stored.model):
                    if matrix.removesuffix(".weight").endswith(outputs):
                        values.copy_(values.roll(1, 0))
            save_gguf(file, stored.model, "F32", TOKENIZER, "qwen35")
            yield "changed", compared(mine, read(file, texts), weights)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("names", nargs="?", default=",".join(ARCHITECTURES), metavar="NAME,...")
    options.add_argument("--llama-server", type=Path, metavar="PATH", help="read by this program")
    options.add_argument("--prompts", type=count, default=4)
    args = options.parse_args(arguments)
    names = args.names.split(",")
    if unknown := set(names) - set(ARCHITECTURES):
        options.error(f"{', '.join(sorted(unknown))}; allowed: {', '.join(ARCHITECTURES)}")
    read = partial(by_server, args.llama_server) if args.llama_server else by_library
    rows: list[Figures] = []
    verdicts: list[ClaimVerdict] = []
    try:
        for name, kind in itertools.product(names, ("F32", "Q4_K")):
            for case, found in measure(name, kind, args.prompts, read):
                rows.append({"architecture": name, "kind": kind, "case": case, **found})
                told = "{equal:.2%} equal, to {difference:.5f}, {ratio:+.4%}".format_map(found)
                is_met = is_same(kind, found) is (case != "changed")
                verdicts.append(bar(f"{name} {kind} {case}".strip(), told, is_met))
                print(verdicts[-1].line(), file=sys.stderr)
    except (ImportError, CheckpointError, ServerError, OSError, ValueError) as error:
        print(f"beside_llamacpp: {error}", file=sys.stderr)
        return 2
    columns = {"architecture": "{architecture}", "case": "{kind} {case}", "equal": "{equal:.2%}"}
    columns |= {"largest difference": "{difference:.5f}", "perplexity": "{ours:.4f}"}
    columns |= {"llama.cpp's": "{theirs:.4f}", "ratio": "{ratio:+.4%}"}
    return tell(args, Results(rows, verdicts, [table("", rows, columns)]))


if __name__ == "__main__":
    sys.exit(main())
