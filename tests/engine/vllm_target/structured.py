"""What an engine over vLLM makes of requests with grammars, and the native one beside it.

python -m tests.engine.vllm_target.structured TENSOR_PARALLEL
"""

import json
import sys
from collections.abc import Sequence

from tests.engine.test_exactness import run
from tests.engine.test_grammar import DRAFTERS, SAMPLINGS, make_loop, make_requests, outputs_of

from penstock.config import NGRAM, EngineConfig, VllmConfig
from penstock.core.types import Request
from penstock.engine.build import Engine, load_engine
from penstock.engine.sequences import TokenBuffer
from penstock.engine.tokenizer import load_tokenizer
from penstock.zoo.registry import model_path

NUM_REQUESTS = 8


def load(vllm: VllmConfig | None) -> Engine:
    config = EngineConfig(
        target=model_path("draft-base"),
        drafters={n: NGRAM if n == "ngram" else str(model_path(n)) for n in DRAFTERS},
        dtype="float32",
        kv_tokens=8192,
        block_size=32,
        max_model_len=512,
        num_threads=1,
        vllm=vllm,
    )
    return load_engine(config, calibrated=False)


def control(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Of workers that are told of no text, and so of no grammar."""
    really, texts = TokenBuffer.so_far, {r.id: list[int]() for r in requests}
    TokenBuffer.so_far = lambda *_: None  # type: ignore[method-assign, assignment, misc]
    try:
        for output in outputs_of(make_loop(engine), requests):
            texts[output.request_id] += output.token_ids
    finally:
        TokenBuffer.so_far = really  # type: ignore[method-assign]
    return list(texts.values())


def main(tensor_parallel: int) -> None:
    args = {"enforce_eager": True, "max_num_batched_tokens": 2048}
    over_vllm = load(VllmConfig(args=args, tensor_parallel=tensor_parallel))
    native = load(None)
    tokenizer = load_tokenizer(model_path("draft-base"))

    def requests(sampling: str, drafter: str) -> list[Request]:
        return make_requests(tokenizer, SAMPLINGS[sampling], NUM_REQUESTS, drafter)

    def texts(engine: Engine, sampling: str, drafter: str) -> list[tuple[int, ...]]:
        return run(make_loop(engine), requests(sampling, drafter))[0]

    found = {
        sampling: {
            "native": texts(native, sampling, "none"),
            "over vllm": {d: texts(over_vllm, sampling, d) for d in ("none", *DRAFTERS)},
        }
        for sampling in SAMPLINGS
    }
    unmasked = control(over_vllm, requests("greedy", "draft-tiny"))
    over_vllm.executor.close()
    print(json.dumps({"found": found, "control": unmasked}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
