"""`LLM.generate` on the requests of the scenes, in a process of its own: greedy, in float32.

python -m tests.engine.vllm_target.reference TARGET NUM_REQUESTS
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import vllm
from tests.engine.test_exactness import SAMPLINGS, make_requests


def main(target: Path, num: int) -> None:
    llm = vllm.LLM(
        model=str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**28,
    )
    requests = make_requests(SAMPLINGS["greedy"], num, "none")
    made = llm.generate(
        [{"prompt_token_ids": list(r.prompt_token_ids or ())} for r in requests],
        [
            vllm.SamplingParams(
                temperature=0.0, max_tokens=r.max_tokens, ignore_eos=True, detokenize=False
            )
            for r in requests
        ],
        use_tqdm=False,
    )
    print(json.dumps([list(m.outputs[0].token_ids) for m in made]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
