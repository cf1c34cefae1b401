"""What does a request's `prediction` gain, and what does a wrong one cost?

    python -m lab.bench.prediction TARGET.gguf [--repeats 3] [--tokens 160,160,160,1000] [--json]

Edits of `lab.bench.real_prompts`, one request at a time, greedy, without a drafter. The prediction
is the target's own output: as it is, with 5% of its tokens changed, one by one or in spans of 8, or
all of them. Passes take turns, and must put out the same. Tokens per second from the first token
on, over those without a prediction; medians.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from lab.bench.real_prompts import PARTS, real_prompts, token_ids
from lab.common.claims import bar
from lab.common.live import decode
from lab.common.results import Results, parser, table, tell
from lab.common.statistics import rotated
from penstock.config import EngineConfig
from penstock.core.types import Request, SamplingParams
from penstock.engine.build import load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.offline import complete

CONTEXT, SHARE, SPAN = 768, 0.05, 8
BASE, EDIT, WRONG = "none", "5% changed", "all wrong"
EDIT_BAR, WRONG_BAR = 4.0, 0.98


def changed(output: Sequence[int], share: float, span: int = 1) -> tuple[int, ...]:
    """Replace a share of the tokens, in spans, by others of the output."""
    rng, found = random.Random(0), list(output)
    num = max(1, round(share * len(found) / span))
    for start in rng.sample(range(0, len(found), span), num):
        part = range(start, min(start + span, len(found)))
        for i in part:
            found[i] = rng.choice([token for token in set(output) if token != output[i]])
    return tuple(found)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("target", type=Path)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--tokens", default="160,160,160,1000")
    args = options.parse_args()
    lengths = [int(n) for n in args.tokens.split(",")]
    room = CONTEXT + max(lengths) + 32
    config = EngineConfig(
        target=args.target,
        drafters={},
        kv_tokens=room,
        max_model_len=room,
        prefix_caching=False,
    )
    engine = load_engine(config)
    tokenizer = load_tokenizer(engine.tokenizer_path)
    edits = [p for p in real_prompts() if p.kind == "edit" and p.part == PARTS[1]]
    rows: list[dict[str, float]] = []
    for prompt, length in zip(edits, lengths, strict=False):
        tokens = token_ids(prompt, tokenizer)[-CONTEXT:]
        greedy = SamplingParams(temperature=0.0)
        plain = Request("", len(tokens), length, prompt_token_ids=tokens, sampling=greedy)
        output = tuple(complete(engine.loop, [plain], 1)[0].token_ids)
        predictions = {BASE: (), "exact": output, EDIT: changed(output, SHARE)}
        predictions |= {"in spans": changed(output, SHARE, SPAN), WRONG: changed(output, 1.0)}
        rates: dict[str, list[float]] = {name: [] for name in predictions}
        for turn in range(args.repeats):
            for name in rotated(tuple(predictions), turn):
                asked = replace(plain, id=f"{turn}-{name}", prediction=predictions[name])
                (done,) = decode(engine.loop, [asked], 1)
                if done.token_ids != output[-len(done.token_ids) :]:
                    raise RuntimeError(f"{prompt.origin}, {name}: another text than without")
                rates[name].append(len(done.token_ids) / done.seconds)
        base = median(rates[BASE])
        rows.append({"tokens": length, BASE: base})
        rows[-1] |= {name: median(rates[name]) / base for name in predictions if name != BASE}
    columns = {"tokens": "{tokens}", "none, tokens/s": f"{{{BASE}:.1f}}"}
    columns |= {name: f"{{{name}:.2f}}" for name in rows[0] if name not in ("tokens", BASE)}
    edit, wrong = rows[-1][EDIT], fmean(row[WRONG] for row in rows)
    verdicts = [
        bar(f"{EDIT}, the last prompt", f"{edit:.2f} (bar: {EDIT_BAR})", edit >= EDIT_BAR),
        bar(f"{WRONG}, the mean", f"{wrong:.3f} (bar: {WRONG_BAR})", wrong >= WRONG_BAR),
    ]
    found = table("times the speed without a prediction", rows, columns)
    return tell(args, Results(rows, verdicts, [found]))


if __name__ == "__main__":
    sys.exit(main())
