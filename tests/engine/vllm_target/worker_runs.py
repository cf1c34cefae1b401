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
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import InputBatch

from penstock.core.types import GroupChange, Request, SamplingParams, VerifyItem
from penstock.engine.sequences import TokenBuffer
from penstock.engine.vllm.steps import StepWriter, TargetStep
from penstock.engine.vllm.worker import StepInput, StepSampler, scheduler_output

BLOCK_SIZE, NUM_BLOCKS, VOCAB, MAX_LEN, LONGEST_DRAFT = 4, 64, 16, 64, 3


def next_token(text: tuple[int, ...]) -> int:
    """What the model makes of a text: so and so, but always the same."""
    return random.Random(hash(text)).randrange(8 if len(text) % 9 == 0 else 7)


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

    def run(self, step: StepInput, texts: dict[str, list[int]]) -> list[str]:
        """Sample by `next_token`. Return the requests whose tokens or blocks are others."""
        self.sampler.begin(step)
        self._update_states(step)
        batch, wrong, rows = self.input_batch, [], []
        num_drafts = [len(step.scheduled_spec_decode_tokens.get(i, [])) for i in batch.req_ids]
        for row, (request_id, num_draft) in enumerate(zip(batch.req_ids, num_drafts, strict=True)):
            known = texts[request_id] + step.scheduled_spec_decode_tokens.get(request_id, [])
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
        asked = {a.request_id for a in step.asked}.union(step.rows.ids if step.rows else ())
        unasked = np.array([request_id not in asked for request_id in batch.req_ids])
        self.discard_request_mask = SimpleNamespace(np=unasked)
        sampled = self._sample(logits, metadata)
        self._bookkeeping_sync(step, sampled, logits, Nothing(), step.total_num_scheduled_tokens)
        return wrong


class Scene:
    """Requests in steps that are drawn at random, some of them as rows of the decode group.

    texts: what the engine keeps, which rows reach late; whole: all tokens; states: start, epoch.
    """

    def __init__(self) -> None:
        self.rng, self.runner, self.writer = random.Random(0), Runner(), StepWriter(1024, 4)
        self.texts: dict[str, TokenBuffer] = {}
        self.whole: dict[str, list[int]] = {}
        self.states: dict[str, list[int]] = {}
        self.members: dict[str, None] = {}
        self.left: list[str] = []
        self.runner.expected = {}
        self.facts = dict.fromkeys(("wrong", "accepted", "preempted", "ended", "chunks", "rows"), 0)

    def arrive(self, request_id: str) -> None:
        prompt = tuple(self.rng.randrange(7) for _ in range(self.rng.randrange(1, 12)))
        greedy = SamplingParams(temperature=0.0)
        request = Request(request_id, len(prompt), 40, prompt_token_ids=prompt, sampling=greedy)
        self.texts[request_id], self.states[request_id] = TokenBuffer(request), [0, 0]
        self.whole[request_id] = list(prompt)
        self.runner.expected[request_id] = []

    def leave(self, request_id: str) -> None:
        del self.members[request_id]
        self.left.append(request_id)

    def blocks(self, request_id: str, end: int) -> tuple[int, ...]:
        """New ones up to a position."""
        held = self.runner.expected[request_id]
        new = [self.rng.randrange(NUM_BLOCKS) for _ in range(-(-end // BLOCK_SIZE) - len(held))]
        held += [block + 1 for block in new]
        return tuple(new)

    def item(self, request_id: str) -> tuple[VerifyItem, list[int]]:
        """With its draft."""
        rng, text, (start, epoch) = self.rng, self.whole[request_id], self.states[request_id]
        if request_id in self.members:
            self.leave(request_id)
        if start and rng.random() < 0.1:  # preempted: all of it again, elsewhere
            start, epoch = self.states[request_id] = [0, epoch + 1]
            self.runner.expected[request_id] = []
            self.facts["preempted"] += 1
        num = len(text) - start
        if num > 4 and rng.random() < 0.5:
            num -= rng.randrange(1, num)
        samples = start + num == len(text)
        draft: list[int] = []
        while samples and len(draft) < LONGEST_DRAFT and rng.random() < 0.7:
            right = next_token((*text, *draft))
            draft.append(right if rng.random() < 0.8 else 7)
        new = self.blocks(request_id, start + num + len(draft))
        self.states[request_id][0] = start + num
        self.facts["chunks"] += not samples
        return VerifyItem(request_id, epoch, 0, start, num, samples, new_blocks=new), draft

    def change(self, taken: set[str]) -> GroupChange | None:
        """Of the group; None: it is not in the step. taken: requests with an item."""
        joined = []
        for request_id, (start, _) in self.states.items():
            is_due = start and start + 1 == len(self.whole[request_id])
            if is_due and request_id not in taken | self.members.keys() and self.rng.random() < 0.7:
                joined.append(request_id)
                self.members[request_id] = None
        if not self.members:
            return None
        left, self.left = self.left, []
        blocks = {i: self.blocks(i, len(self.whole[i])) for i in self.members}
        return GroupChange(left, joined, {i: new[0] for i, new in blocks.items() if new})

    def step(self, *, stale: bool) -> None:
        rng = self.rng
        chosen = rng.sample(sorted(self.texts), rng.randrange(len(self.texts) + 1))
        asked = [self.item(i) for i in chosen if i not in self.members or rng.random() < 0.2]
        for request_id in [i for i in self.members if rng.random() < 0.05]:
            self.leave(request_id)
        change = self.change({item.request_id for item, _ in asked})
        drafts = [(draft, [-1] * len(draft)) for _, draft in asked]
        items = [item for item, _ in asked]
        for step in self.writer.write(items, self.texts, drafts, None, change):
            sampling = vllm.SamplingParams(temperature=0.0)
            told = _told(step, sampling, stale=stale)
            self.facts["wrong"] += len(self.runner.run(told, self.whole))
            decided, made = self.runner.sampler.answer
            for one, answer in zip(step.asked, decided, strict=True):
                self.facts["accepted"] += len(answer.token_ids) - 1
                self.texts[one.request_id].append(answer.token_ids)
                self.whole[one.request_id] += answer.token_ids
                self.states[one.request_id][0] += len(answer.token_ids) - 1
            if step.rows:
                self.writer.rows.take_in(made)
                self.facts["rows"] += len(made)
                for request_id, token in zip(step.rows.ids, made, strict=True):
                    self.whole[request_id].append(token)
                    self.states[request_id][0] += 1
        for request_id in [i for i, text in self.whole.items() if len(text) > 40]:
            self.writer.release_request(request_id)
            text = self.texts.pop(request_id)
            self.facts["wrong"] += text.tokens(0, text.length) != self.whole.pop(request_id)
            del self.states[request_id]
            if request_id in self.members:
                self.leave(request_id)
            self.facts["ended"] += 1


def main(num_steps: int, *, stale: bool = False) -> dict[str, int]:
    """stale: the control, in which no block table is replaced."""
    gpu_model_runner.get_pp_group = lambda: SimpleNamespace(is_last_rank=True, world_size=1)
    scene = Scene()
    for number in range(num_steps):
        if len(scene.texts) < 4:
            scene.arrive(f"r{number}")
        scene.step(stale=stale)
    return scene.facts


def _told(step: TargetStep, sampling: Any, *, stale: bool) -> StepInput:
    if stale:
        step.grown = [g._replace(anew=False) for g in step.grown]
    return scheduler_output(step, sampling, LONGEST_DRAFT)


if __name__ == "__main__":
    print(json.dumps({"facts": main(200), "control": main(200, stale=True)}))
