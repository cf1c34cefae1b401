"""What a Penstock engine over vLLM makes of the same requests in every circumstance, in a process
of its own: vLLM changes much of one that loads it.

    python -m tests.engine.vllm_target.scenes FAMILY NUM_REQUESTS VLLM

VLLM: settings of `engine.vllm`, in JSON.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.test_exactness import (
    A_DEVICE_EACH,
    DRAFTERS,
    SAMPLINGS,
    Alone,
    load,
    make_loop,
    make_requests,
    run,
)

from penstock.config import NGRAM, EngineConfig, VllmConfig
from penstock.core.learn import Estimators
from penstock.core.types import Arrive, Cancel
from penstock.engine.build import Engine, load_engine
from penstock.engine.vllm import steps

TIGHT = 20 * 16


def load_vllm_engine(paths: dict[str, Path], vllm: dict[str, Any]) -> Engine:
    args = {"enforce_eager": True, "max_num_batched_tokens": 2048}
    return load_engine(
        EngineConfig(
            target=paths["target"],
            drafters={name: str(paths[name]) for name in DRAFTERS[:3]} | {"ngram": NGRAM},
            dtype="float32",
            kv_tokens=64 * 256,
            block_size=32,
            num_threads=1,
            max_model_len=512,
            vllm=VllmConfig(args=args, **vllm),
        ),
        calibrated=False,
    )


class Scenes:
    """Outputs by name, and what shows that the circumstance has come about."""

    def __init__(self, engine: Engine, num: int) -> None:
        self._engine = engine
        self._num = num
        self.outputs: dict[str, Sequence[Sequence[int]]] = {}
        self.facts: dict[str, int] = {}

    def play(self, name: str, sampling: str, drafter: str = "auto", **loop: Any) -> None:
        """loop: of `make_loop`."""
        made = make_loop(self._engine, rotating=drafter == "auto", **loop)
        self.outputs[name], accepted = run(
            made, make_requests(SAMPLINGS[sampling], self._num, drafter)
        )
        self.facts[f"{name}: accepted"] = accepted
        self.facts[f"{name}: preemptions"] = made.scheduler.table.counters.preemptions
        groups = made.scheduler.table.groups.values()
        self.facts[f"{name}: steps of the group"] = sum(group.ticks for group in groups)

    def begin_with_a_chunk(self) -> None:
        """The longest prompt first, of which a step holds a part: nobody asks for a token then."""
        requests = make_requests(SAMPLINGS["greedy"], self._num, "none")
        requests.sort(key=lambda r: -r.prompt_len)
        loop = make_loop(self._engine, max_num_batched_tokens=32)
        assert requests[0].prompt_len > 32
        texts, _ = run(loop, requests)
        by_prompt = dict(zip((r.prompt_token_ids for r in requests), texts, strict=True))
        again = make_requests(SAMPLINGS["greedy"], self._num, "none")
        self.outputs["a chunk alone"] = [by_prompt[r.prompt_token_ids] for r in again]

    def share_prefixes(self) -> None:
        """The same requests one after the other: all but the first find full blocks of theirs."""
        loop = make_loop(self._engine, rotating=True)
        requests = make_requests(SAMPLINGS["greedy"], self._num, "auto")
        run(loop, requests)
        again = [dataclasses.replace(r, id=f"{r.id}-again") for r in requests]
        cached = 0
        texts: dict[str, list[int]] = {r.id: [] for r in again}
        events = [Arrive(r) for r in again]
        while events or loop.scheduler.num_unfinished:
            for output in loop.turn(events).outputs:
                texts[output.request_id] += output.token_ids
                cached += output.num_cached_tokens
            events = []
        loop.turn([])
        self.outputs["prefix cache"] = [texts[r.id] for r in again]
        self.facts["prefix cache: cached"] = cached

    def cancel_some(self, name: str, **options: Any) -> None:
        """In tight memory; an id of those that go away comes again at once, with another text."""
        loop = make_loop(self._engine, kv_tokens=TIGHT, **options)
        requests = make_requests(SAMPLINGS["greedy"], self._num, "auto")
        gone = {requests[1].id, requests[3].id}
        again = dataclasses.replace(requests[-1], id=requests[1].id)
        texts: dict[str, list[int]] = {r.id: [] for r in requests}
        events: list[Arrive | Cancel] = [Arrive(r) for r in requests]
        cancelled = 0
        while events or loop.scheduler.num_unfinished:
            for output in loop.turn(events).outputs:
                texts[output.request_id] += output.token_ids
            events = []
            for request_id in [i for i in gone if len(texts[i]) > 8]:
                gone.discard(request_id)
                texts[request_id].clear()
                events.append(Cancel(request_id))
                cancelled += 1
                if request_id == again.id:
                    events.append(Arrive(again))
        loop.turn([])  # so that the executor hears of the last ends
        self.outputs[name] = [texts[r.id] for r in requests]
        self.facts[f"{name}: cancelled"] = cancelled


@contextmanager
def stale_tables() -> Iterator[None]:
    """The control: a request that was preempted gets its new blocks behind its old ones."""
    really = steps.GrownSequence

    def stale(*args: Any, **kwargs: Any) -> steps.GrownSequence:
        return really(*args, **kwargs)._replace(anew=False)

    steps.GrownSequence = stale  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        steps.GrownSequence = really  # type: ignore[misc]


def main(family: Path, num: int, vllm: dict[str, Any]) -> None:
    paths = {name: family / name for name in ("target", *DRAFTERS[:3])}
    alone = Alone(load(paths, "eager"))
    engine = load_vllm_engine(paths, vllm)
    scenes = Scenes(engine, num)
    scenes.play("alone", "greedy", "none")
    scenes.play("near", "greedy", "near")
    scenes.play("switches", "greedy")
    scenes.play("chunks", "greedy", max_num_batched_tokens=32)
    scenes.begin_with_a_chunk()
    scenes.play("preemption", "greedy", kv_tokens=TIGHT)
    beside = {"own_lane": True, "pipeline": "2", "learn": Estimators(A_DEVICE_EACH)}
    scenes.play("lanes", "greedy", **beside)
    scenes.share_prefixes()
    scenes.cancel_some("cancels", rotating=True)
    grouped = {"groups_decodes": vllm.get("pipeline_parallel", 1) == 1}
    scenes.play("group", "greedy", "none", **grouped)
    scenes.play("group, chunks", "greedy", "none", max_num_batched_tokens=32, **grouped)
    scenes.play("group, preemption", "greedy", "none", kv_tokens=TIGHT, **grouped)
    scenes.cancel_some("group, cancels", **grouped)
    for mode in [name for name in SAMPLINGS if name != "greedy"]:
        scenes.play(f"group, {mode}", mode, "none", kv_tokens=TIGHT, **grouped)
        scenes.play(mode, mode, kv_tokens=TIGHT)
        scenes.outputs[f"{mode}, native"] = alone[mode][:num]
    with stale_tables():
        scenes.play("control", "greedy", kv_tokens=TIGHT)
        scenes.play("group, control", "greedy", "none", kv_tokens=TIGHT, **grouped)
    engine.executor.close()
    print(json.dumps({"outputs": scenes.outputs, "facts": scenes.facts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
