"""Is what is served what is simulated? The default on a real model, and the same texts played.

    python -m lab.bench.played_texts TARGET.gguf --drafter NAME=FILE --profile FILE.json
        [--texts 20] [--clients 1,4,8] [--json]

The prompts of the recorded texts (`lab.bench.record_texts`) go through the engine with its default
policies, look-up and the drafter, so many clients at a time, each sending when it has its answer.
The simulator plays the same texts: what look-up had found and how many tokens the drafter has right
are the record's, step times the profile's (`penstock profile measure TARGET --drafter NAME=FILE`,
measured just before). Output tokens per second from the first request to the last token, prompts
included."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.real_prompts import token_ids
from lab.bench.record_texts import prompts
from lab.common.claims import bar
from lab.common.results import Results, parser, table, tell
from penstock.config import DEFAULT_TENANT, SUFFIX, EngineConfig, TenantConfig
from penstock.core.loop import Loop
from penstock.core.state import RequestState
from penstock.core.types import DraftOrder, Match, Request, SamplingParams, VerifyItem
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import load_tokenizer
from penstock.fluid.step_profile import StepProfile
from penstock.serving.offline import complete
from penstock.sim.clock import VirtualClock
from penstock.sim.executor import SimulatedExecutor
from penstock.sim.lookup import RecordedText, match_at, read_texts
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, make_executor, make_scheduler
from penstock.sim.workloads import Workload

CONTEXT, BLOCK_SIZE = 1536, 16
BAR = 0.10


@dataclass(frozen=True)
class Played:
    """Look-up, and acceptance, of the text with the number that is the request's id."""

    texts: Sequence[RecordedText]
    name: str = SUFFIX

    def match(self, state: RequestState, num_tokens: int) -> Match | None:
        return match_at(self.texts[int(state.request.id)], state, num_tokens)

    def release_request(self, state: RequestState) -> None:
        """Keep nothing."""

    def _right(self, drafter: str, request_id: str, position: int) -> int:
        right = self.texts[int(request_id)].right[drafter]
        return right[position] if position < len(right) else 0

    def num_accepted(self, item: VerifyItem, position: int) -> int:
        if not item.num_draft_tokens or item.drafter is None:
            return 0
        return min(item.num_draft_tokens, self._right(item.drafter, item.request_id, position))

    def num_right_behind(self, item: VerifyItem, position: int, num_accepted: int) -> int:
        return 0

    def num_matched(self, order: DraftOrder, positions: range) -> int:
        return sum(self._right(order.drafter, order.request_id, p) > 0 for p in positions)

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        raise NotImplementedError


class Advancing(SimulatedExecutor):
    """Executor that waits by letting the virtual clock go on."""

    clock: VirtualClock

    def wait(self, timeout: float | None) -> None:
        if self.next_completion is not None:
            self.clock.advance_to(self.next_completion)


def simulated(
    texts: Sequence[RecordedText], profile: StepProfile, drafters: Sequence[str], clients: int
) -> float:
    """Tokens per second of the simulator."""
    played, clock = Played(texts), VirtualClock()
    setup = Setup(
        profile,
        kv_tokens=16 * CONTEXT,
        block_size=BLOCK_SIZE,
        acceptance=played,
        drafters=tuple(drafters),
        look_up=played,
        counted=False,
    )
    lengths = [
        np.array(column)
        for column in zip(*[(t.prompt_len, len(t.found)) for t in texts], strict=True)
    ]
    executor = make_executor(setup, Workload("texts", *lengths), clock, Advancing)
    assert isinstance(executor, Advancing)
    executor.clock = clock
    loop = Loop(make_scheduler(setup), executor, clock)
    requests = [Request(str(i), t.prompt_len, len(t.found)) for i, t in enumerate(texts)]
    complete(loop, requests, clients)
    return sum(len(t.found) for t in texts) / clock.now()


def live(engine: Engine, asked: Sequence[tuple[tuple[int, ...], int]], clients: int) -> float:
    """Tokens per second of the engine, whose scheduler begins anew."""
    loop = Loop(deepcopy(engine.scheduler), engine.executor, engine.clock)
    requests = [
        Request(
            f"{clients} {i}",
            len(ids),
            num_tokens,
            prompt_token_ids=ids,
            sampling=SamplingParams(temperature=0.0),
        )
        for i, (ids, num_tokens) in enumerate(asked)
    ]
    began = time.perf_counter()
    done = complete(loop, requests, clients)
    seconds = time.perf_counter() - began
    return sum(len(c.token_ids) for c in done) / seconds


def load(args: argparse.Namespace, drafters: Mapping[str, str]) -> Engine:
    return load_engine(
        EngineConfig(
            target=args.target,
            drafters={SUFFIX: SUFFIX, **drafters},
            kv_tokens=16 * CONTEXT,
            max_model_len=CONTEXT,
            num_threads=args.threads,
            prefix_caching=False,
            tenants={DEFAULT_TENANT: TenantConfig()},
        )
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("target", type=Path)
    options.add_argument("--drafter", action="append", default=[], metavar="NAME=FILE")
    options.add_argument("--profile", required=True)
    options.add_argument("--texts", type=int, default=20)
    options.add_argument("--clients", default="1,4,8")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    drafters = dict(text.split("=", 1) for text in args.drafter)
    texts, profile = read_texts()[: args.texts], load_profile(args.profile)
    engine = load(args, drafters)
    tokenizer = load_tokenizer(engine.tokenizer_path)
    asked = [
        (tuple(token_ids(p, tokenizer)[-t.prompt_len :]), len(t.found))
        for p, t in zip(prompts(), texts, strict=False)
    ]
    rows: list[dict[str, Any]] = []
    for clients in map(int, args.clients.split(",")):
        made = live(engine, asked, clients)
        expected = simulated(texts, profile, list(drafters), clients)
        rows.append({"clients": clients, "live": made, "simulated": expected})
        print(f"{clients} clients: {made:.1f} live, {expected:.1f} simulated", file=sys.stderr)
    worst = max(abs(r["simulated"] / r["live"] - 1) for r in rows)
    text = ", ".join(f"{r['clients']}: {r['simulated'] / r['live']:.2f}" for r in rows)
    claim = bar(f"simulated over live within {BAR:.0%}", f"by clients {text}", worst <= BAR)
    columns = {"clients": "{clients}", "live": "{live:.1f}", "simulated": "{simulated:.1f}"}
    title = f"{args.target.name} with {', '.join(drafters)}, {len(texts)} texts, tokens/s"
    return tell(args, Results(rows, [claim], [table(title, rows, columns)]))


if __name__ == "__main__":
    raise SystemExit(main())
