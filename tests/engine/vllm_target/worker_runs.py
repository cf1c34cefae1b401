"""Steps of the engine in vLLM's own model runner, without a model, in a process of its own.

python -m tests.engine.vllm_target.worker_runs
"""

import json
import os
import random
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR"}

import tests.engine.vllm_target.no_gpu  # noqa: F401, I001
import numpy as np
import torch
import vllm
from tests.engine.vllm_target.fake_worker import next_token
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import InputBatch

from penstock.core.types import Request, SamplingParams, VerifyItem
from penstock.engine.sequences import TokenBuffer
from penstock.engine.vllm.steps import StepWriter, TargetStep
from penstock.engine.vllm.worker import StepInput, StepSampler, scheduler_output

BLOCK_SIZE, NUM_BLOCKS, VOCAB, MAX_LEN, LONGEST_DRAFT = 4, 64, 16, 64, 3


class Nothing:
    """Attribute that the model runner has and these steps do not need."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class Runner(gpu_model_runner.GPUModelRunner):
    """vLLM's runner with a batch and requests only."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.max_model_len = MAX_LEN
        self.requests = {}
        self.num_prompt_logprobs = {}
        self.input_batch = InputBatch(
            max_num_reqs=4,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=1024,
            device=self.device,
            vocab_size=VOCAB,
            block_sizes=[BLOCK_SIZE],
            max_num_blocks_per_req=[1024],
            num_spec_tokens=LONGEST_DRAFT,
        )
        self.rejection_sampler = self.sampler = StepSampler(self)

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def _get_spec_decode_draft_probs(self, metadata: Any) -> None:
        """The steps bring them."""

    def _to_list(self, sampled: torch.Tensor) -> list[list[int]]:
        return sampled.tolist()

    def run(self, step: StepInput, texts: dict[str, TokenBuffer]) -> list[str]:
        """Sample by `next_token`. Return the requests whose tokens or blocks are others."""
        self.sampler.begin(step)
        self._update_states(step)
        batch, wrong, rows = self.input_batch, [], []
        num_drafts = [len(step.scheduled_spec_decode_tokens.get(i, [])) for i in batch.req_ids]
        for row, (request_id, num_draft) in enumerate(zip(batch.req_ids, num_drafts, strict=True)):
            text = texts[request_id]
            known = text.tokens(0, text.length)
            known += step.scheduled_spec_decode_tokens.get(request_id, [])
            begin = batch.num_computed_tokens_cpu[row]
            end = begin + step.num_scheduled_tokens[request_id]
            table = batch.block_table[0]
            blocks = table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()
            if (
                batch.token_ids_cpu[row, :end].tolist() != known[:end]
                or blocks != self.expected[request_id][: len(blocks)]
                or len(blocks) * BLOCK_SIZE < end
            ):
                wrong.append(request_id)
            rows += [next_token(tuple(known[:n])) for n in range(end - num_draft, end + 1)]
        logits = torch.nn.functional.one_hot(torch.tensor(rows), VOCAB).float() * 100
        metadata = SimpleNamespace(num_draft_tokens=num_drafts) if any(num_drafts) else None
        unasked = np.array([request_id not in self.sampler.asked for request_id in batch.req_ids])
        self.discard_request_mask = SimpleNamespace(np=unasked)
        sampled = self._sample(logits, metadata)
        self._bookkeeping_sync(step, sampled, logits, Nothing(), step.total_num_scheduled_tokens)
        return wrong


def main(num_steps: int, *, stale: bool = False) -> dict[str, int]:
    """stale: the control, in which no block table is replaced."""
    gpu_model_runner.get_pp_group = lambda: SimpleNamespace(is_last_rank=True, world_size=1)
    rng, runner, writer = random.Random(0), Runner(), StepWriter(1024, 4)
    sampling, greedy = vllm.SamplingParams(temperature=0.0), SamplingParams(temperature=0.0)
    texts: dict[str, TokenBuffer] = {}
    states: dict[str, list[int]] = {}  # start, epoch
    runner.expected = {}
    facts = {"wrong": 0, "accepted": 0, "preempted": 0, "ended": 0, "chunks": 0}
    for number in range(num_steps):
        if len(texts) < 4:
            prompt = tuple(rng.randrange(7) for _ in range(rng.randrange(1, 12)))
            request_id = f"r{number}"
            request = Request(request_id, len(prompt), 40, prompt_token_ids=prompt, sampling=greedy)
            texts[request_id], states[request_id] = TokenBuffer(request), [0, 0]
            runner.expected[request_id] = []
        items, drafts = [], []
        for request_id in rng.sample(sorted(texts), rng.randrange(1, len(texts) + 1)):
            text, (start, epoch) = texts[request_id], states[request_id]
            if start and rng.random() < 0.1:  # preempted: all of it again, elsewhere
                start, epoch = states[request_id] = [0, epoch + 1]
                runner.expected[request_id] = []
                facts["preempted"] += 1
            num = text.length - start
            if num > 4 and rng.random() < 0.5:
                num -= rng.randrange(1, num)
            samples = start + num == text.length
            draft: list[int] = []
            while samples and len(draft) < LONGEST_DRAFT and rng.random() < 0.7:
                right = next_token((*text.tokens(0, text.length), *draft))
                draft.append(right if rng.random() < 0.8 else 7)
            held = runner.expected[request_id]
            need = -(-(start + num + len(draft)) // BLOCK_SIZE) - len(held)
            new = tuple(rng.randrange(NUM_BLOCKS) for _ in range(need))
            held += [block + 1 for block in new]
            items.append(VerifyItem(request_id, epoch, 0, start, num, samples, new_blocks=new))
            drafts.append((draft, [-1] * len(draft)))
            states[request_id][0] = start + num
            facts["chunks"] += not samples
        (step,) = writer.write(items, texts, drafts, None)
        facts["wrong"] += len(runner.run(_told(step, sampling, stale=stale), texts))
        for request_id, decided in runner.sampler.decided.items():
            facts["accepted"] += len(decided.token_ids) - 1
            texts[request_id].append(decided.token_ids)
            states[request_id][0] += len(decided.token_ids) - 1
            if texts[request_id].length > 40:
                writer.release_request(request_id)
                del texts[request_id], states[request_id]
                facts["ended"] += 1
    return facts


def _told(step: TargetStep, sampling: Any, *, stale: bool) -> StepInput:
    if stale:
        step.grown = [g._replace(anew=False) for g in step.grown]
    return scheduler_output(step, sampling, LONGEST_DRAFT)


if __name__ == "__main__":
    print(json.dumps({"facts": main(200), "control": main(200, stale=True)}))
