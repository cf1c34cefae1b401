"""The plug-in's scheduler over workers that only pretend, in a process of its own: every admission
policy, in tight memory, synchronous and not, with drafts and without.

    python -m tests.engine.vllm_target.plugin_runs TARGET
"""

import json
import os
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}

import tests.engine.vllm_target.no_gpu  # noqa: F401
import torch
from tests.engine.vllm_target.fake_worker import STOP_TOKEN, FakeWorker, whole_output
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from penstock.config import EngineConfig, VllmConfig
from penstock.engine.vllm import make_scheduler, plugin
from penstock.engine.vllm.arguments import vllm_config
from penstock.engine.vllm.plugin import AsyncGuidedScheduler, GuidedScheduler

BLOCK_SIZE = 16
NUM_REQUESTS = 24
POLICIES = (
    "vllm_v1",
    "sarathi",
    "wait",
    "nested_wait",
    "fluid_guided",
)


class Clock:
    """Steps take a time that is no test machine's."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()
plugin.time = CLOCK  # type: ignore[assignment]


class _Recorded:
    """Counts what was planned and came out otherwise."""

    num_planned = 0
    num_counted = 0
    num_again = 0
    num_together = 0
    num_otherwise = 0
    planned: dict[str, int]

    def _prepare(self, plan: Any) -> Any:
        decoding = self._guide.decoding(plan)  # type: ignore[attr-defined]
        self.num_counted += len(decoding)
        self.planned = dict.fromkeys(decoding, 1)
        self.planned |= {i.request_id: i.num_scheduled_tokens for i in plan.items}
        return super()._prepare(plan)  # type: ignore[misc]

    def _schedule_again(self, *args: Any, **kwargs: Any) -> Any:
        self.num_again += 1
        return super()._schedule_again(*args, **kwargs)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.num_together += len(self._rows.ids)  # type: ignore[attr-defined]
        drafts = output.scheduled_spec_decode_tokens
        for request_id, num_tokens in self.planned.items():
            drafted = len(drafts.get(request_id, ()))
            known = output.num_scheduled_tokens.get(request_id, 0) - drafted
            self.num_planned += 1
            self.num_otherwise += known != num_tokens
        self.num_otherwise += len(output.num_scheduled_tokens.keys() - self.planned)
        return output

    def update_from_output(self, scheduled: Any, made: Any) -> Any:
        CLOCK.now += 0.01 + 1e-5 * scheduled.total_num_scheduled_tokens
        return super().update_from_output(scheduled, made)  # type: ignore[misc]


class Guided(_Recorded, GuidedScheduler):
    pass


class AsyncGuided(_Recorded, AsyncGuidedScheduler):
    pass


class Unsteered(Guided):
    """The control: plans are made, and vLLM is told nothing."""

    def _prepare(self, plan: Any) -> Any:
        num_coming = super()._prepare(plan)
        self._allowed = None
        return num_coming


class Forgetful(Guided):
    """The other control: who was preempted is taken to have kept its KV."""

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        computed = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)
        request.num_computed_tokens = computed


@dataclass
class Case:
    """num_blocks: of KV, the null block among them. has_strangers: one request could grow beyond
    memory, and one comes bit by bit: on both vLLM alone decides. second_runner: vLLM's scheduler
    writes for its second model runner."""

    settings: dict[str, Any]
    kind: type[Any] = Guided
    num_blocks: int = 24
    num_drafts: int = 0
    prefix_caching: bool = False
    budget: int = 64
    max_num_seqs: int = 8
    extra_args: dict[str, Any] | None = None
    cancels: bool = False
    has_strangers: bool = False
    second_runner: bool = False


class Runs:
    """One model's configuration, and a scheduler of it for each case."""

    def __init__(self, target: Path) -> None:
        self.target = target
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn)

    def config(self, case: Case, **args: Any) -> Any:
        spec = {
            "method": "ngram",
            "num_speculative_tokens": case.num_drafts,
            "prompt_lookup_max": 3,
        }
        settings: dict[str, Any] = {
            "model": str(self.target),
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_batched_tokens": case.budget,
            "max_num_seqs": case.max_num_seqs,
            "enable_prefix_caching": case.prefix_caching,
            "speculative_config": spec if case.num_drafts else None,
            "additional_config": {"penstock": case.settings},
        }
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        config = EngineArgs(**settings | args).create_engine_config()
        config.cache_config.num_gpu_blocks = case.num_blocks
        return config

    def scheduler(self, case: Case, factory: Any = None, **args: Any) -> Any:
        config = self.config(case, **args)
        layer = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32
        )
        # Only here: with the configuration vLLM would ask for Triton, too.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(case.second_runner))
        return (factory or case.kind)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=case.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )

    def requests(self, case: Case) -> list[Request]:
        rng = random.Random(1)
        made = []
        for i in range(NUM_REQUESTS):
            shared = [1, 2, 3, 4] * 9 if case.prefix_caching and i % 2 else []
            prompt = shared + [rng.randrange(7) for _ in range(rng.randrange(1, 90))]
            params = SamplingParams(
                temperature=0.0,
                max_tokens=rng.randrange(1, 60),
                stop_token_ids=[STOP_TOKEN],
                extra_args=case.extra_args,
            )
            hasher = self._hasher if case.prefix_caching else None
            comes_in_bits = case.has_strangers and i == 9
            if case.has_strangers and i == 3:
                prompt, params.max_tokens = [1, 2, 3] * 60, 300
            made.append(
                Request(
                    f"r{i}",
                    prompt,
                    params,
                    None,
                    client_index=i % 2,
                    block_hasher=hasher,
                    resumable=comes_in_bits,
                )
            )
        return made

    def play(self, case: Case) -> dict[str, Any]:
        """Serve the requests, a few coming each step, up to two steps at once where the scheduler
        is asynchronous."""
        scheduler = self.scheduler(case)
        assert scheduler.use_v2_model_runner == case.second_runner
        is_async = isinstance(scheduler, AsyncScheduler)
        worker = FakeWorker(
            BLOCK_SIZE, case.num_drafts, 0.6, is_async=is_async, keeps_drafts=case.second_runner
        )
        requests = self.requests(case)
        texts: dict[str, list[int]] = {r.request_id: [] for r in requests}
        coming, in_flight = deque(requests), deque[Any]()
        cancelled = {"r5"} if case.cancels else set()
        most_running = num_steps = 0
        while coming or scheduler.has_requests() or in_flight:
            for _ in range(min(3, len(coming))):
                scheduler.add_request(coming.popleft())
            output = scheduler.schedule()
            assert output.total_num_scheduled_tokens <= case.budget
            most_running = max(most_running, len(scheduler.running))
            num_steps += 1
            assert num_steps < 5000, "it never ends"
            in_flight.append(output)
            if case.cancels and len(texts.get("r11", ())) > 2:
                # While its step is computed.
                del texts["r11"]
                scheduler.finish_requests("r11", RequestStatus.FINISHED_ABORTED)
            # Nothing to compute beside what is in flight: wait for it.
            depth = 1 if is_async and output.total_num_scheduled_tokens else 0
            while len(in_flight) > depth:
                self._finish(scheduler, worker, in_flight.popleft(), texts, is_async=is_async)
            for request in requests:
                if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                    # There is no more to come.
                    last = Request(request.request_id, [1], request.sampling_params, None)
                    scheduler.add_request(last)
            for request_id in [i for i in cancelled if len(texts[i]) > 2]:
                cancelled.discard(request_id)
                del texts[request_id]
                scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        expected = {
            r.request_id: whole_output(tuple(r.prompt_token_ids or ()), r.max_tokens)
            for r in requests
        }
        guide = getattr(scheduler, "_guide", None)
        return {
            "equal": all(text == expected[i] for i, text in texts.items()),
            "left_over": sum(guide.knows(r.request_id) for r in requests) if guide else 0,
            "preemptions": sum(r.num_preemptions for r in requests),
            "planned": getattr(scheduler, "num_planned", 0),
            "counted": getattr(scheduler, "num_counted", 0),
            "again": getattr(scheduler, "num_again", 0),
            "together": getattr(scheduler, "num_together", 0),
            "otherwise": getattr(scheduler, "num_otherwise", 0),
            "cached": len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block),
            "accepted": worker.num_accepted,
            "longest_draft": max(worker.longest_drafts.values()),
            "most_running": most_running,
            "steps": num_steps,
            "cancelled": NUM_REQUESTS - len(texts),
            "longest": max(len(r.prompt_token_ids or ()) + r.max_tokens for r in requests),
        }

    def _finish(
        self,
        scheduler: Any,
        worker: FakeWorker,
        output: Any,
        texts: dict[str, list[int]],
        *,
        is_async: bool,
    ) -> None:
        made = worker.run(output)
        for client, answer in scheduler.update_from_output(output, made).items():
            for one in answer.outputs:
                assert int(one.request_id[1:]) % 2 == client
                if one.request_id in texts:
                    texts[one.request_id] += one.new_token_ids
        if scheduler.num_spec_tokens and not is_async:
            scheduler.update_draft_token_ids(worker.take_drafts(made.req_ids))


def served_by_tenant(runs: Runs, settings: dict[str, Any]) -> Counter[str]:
    """Prompt and output tokens of two tenants that always have requests waiting."""
    case = Case(settings, num_blocks=16, max_num_seqs=64)
    scheduler = runs.scheduler(case)
    worker = FakeWorker(BLOCK_SIZE, 0, 0.0, is_async=False)
    for i in range(200):
        tenant = "ab"[i % 2]
        params = SamplingParams(
            temperature=0.0, max_tokens=20, extra_args={"penstock_tenant": tenant}
        )
        scheduler.add_request(Request(f"{tenant}{i}", [1, 2, 3, i % 7] * 5, params, None))
    served: Counter[str] = Counter()
    for _ in range(200):
        output = scheduler.schedule()
        for request_id, num in output.num_scheduled_tokens.items():
            served[request_id[0]] += num
        scheduler.update_from_output(output, worker.run(output))
    return served


def refusals(runs: Runs) -> dict[str, str]:
    """What is said of settings that are wrong."""
    wrong: dict[str, tuple[Any, dict[str, Any]]] = {
        "setting": ({"admision": {}}, {}),
        "policy": ({"admission": {"name": "magic"}}, {}),
        "whole": ({"admission": {"name": "nested_wait"}}, {}),
        "option": ({"admission": {"name": "sarathi", "options": {"budget": 1}}}, {}),
        "limit": (
            {"admission": {"name": "fluid_guided", "options": {"max_num_batched_tokens": 65}}},
            {},
        ),
        "profile": ({"profile": "/nowhere.json"}, {}),
        "weight": ({"tenants": {"a": {"weight": 0}}}, {}),
        "mapping": (["fluid_guided"], {}),
        "order": ({}, {"scheduling_policy": "priority"}),
        "cadence": ({}, {"prefill_schedule_interval": 4}),
    }
    said = {}
    for name, (settings, args) in wrong.items():
        try:
            runs.scheduler(Case(settings), factory=make_scheduler, **args)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
    try:
        # Set here, as vLLM would ask for CUDA graphs.
        runs.scheduler(Case({}, num_drafts=3), factory=_adaptive)
    except ValueError as error:
        said["adaptive"] = f"{type(error).__name__}: {error}"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    try:
        vllm_config(EngineConfig(target=runs.target, vllm=VllmConfig()))
    except ValueError as error:
        said["second runner"] = f"{type(error).__name__}: {error}"
    return said


def _adaptive(vllm_config: Any, **rest: Any) -> Any:
    vllm_config.speculative_config.enable_adaptive_verification = True
    return make_scheduler(vllm_config=vllm_config, **rest)


def main(target: Path) -> None:
    runs = Runs(target)
    cases: dict[str, Case] = {}
    for name in POLICIES:
        options = {"gated": True} if name in ("wait", "nested_wait") else {}
        settings = {"admission": {"name": name, "options": options}}
        for kind in (Guided, AsyncGuided):
            label = f"{name}, {kind.__name__}"
            cases[label] = Case(settings, kind)
            cases[f"{label}, drafts"] = Case(settings, kind, num_drafts=3)
            cases[f"{label}, prefixes"] = Case(settings, kind, prefix_caching=True)
            cases[f"{label}, roomy"] = Case(settings, kind, num_blocks=200, cancels=True)
            cases[f"{label}, second runner"] = Case(settings, kind, second_runner=True)
            cases[f"{label}, second runner, drafts"] = Case(
                settings, kind, num_drafts=3, second_runner=True
            )
    fluid = {"admission": {"name": "fluid_guided"}}
    two = {"tenants": {"a": {"weight": 3.0}, "b": {}}}
    cases["default"] = Case({})
    cases["strangers"] = Case(fluid, has_strangers=True)
    cases["strangers, async"] = Case({}, AsyncGuided, has_strangers=True)
    cases["tenants"] = Case(fluid | two, extra_args={"penstock_tenant": "a"}, cancels=True)
    cases["bad options"] = Case(fluid, extra_args={"penstock_tenant": "nobody", "session_id": 3})
    cases["short drafts"] = Case({}, num_drafts=3, extra_args={"penstock_max_draft_tokens": 1})
    cases["no drafts"] = Case({}, num_drafts=3, extra_args={"penstock_max_draft_tokens": 0})
    cases["priced"] = Case({"allocation": {"name": "priced"}}, num_drafts=3)
    shared = {"allocation": {"name": "fixed", "options": {"k": 2}}}
    cases["two each"] = Case(shared, num_drafts=3)
    small = {"admission": {"name": "sarathi", "options": {"token_budget": 16, "max_num_seqs": 8}}}
    cases["small steps"] = Case(small, num_blocks=200)
    cases["control"] = Case(small, Unsteered, num_blocks=200)
    cases["stock"] = Case({}, Scheduler)
    shares: dict[str, Any] = {"num_blocks": 400, "prefix_caching": True}
    cases["shares"] = Case({}, **shares)
    cases["stock, shares"] = Case({}, Scheduler, **shares)
    cases["stock, drafts"] = Case({}, Scheduler, num_drafts=3)
    cases["stock, async"] = Case({}, AsyncScheduler)
    cases["stock, async, drafts"] = Case({}, AsyncScheduler, num_drafts=3)
    facts = {}
    for name, case in cases.items():
        try:
            facts[name] = runs.play(case)
        except Exception as error:
            raise RuntimeError(name) from error
    try:
        lost = str(runs.play(Case({}, Forgetful)))
    except AssertionError as error:
        lost = str(error)
    served = {w: served_by_tenant(runs, {"tenants": {"a": {"weight": w}, "b": {}}}) for w in (1, 3)}
    print(json.dumps({"facts": facts, "lost": lost, "shares": served, "refusals": refusals(runs)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
