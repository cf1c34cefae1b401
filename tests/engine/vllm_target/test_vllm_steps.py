"""Plans become steps of vLLM's workers. No vLLM is needed for it."""

import pickle
from typing import Any

import numpy as np

from penstock.core.types import Request, SamplingParams, VerifyItem
from penstock.engine.sequences import TokenBuffer
from penstock.engine.vllm.steps import GrownSequence, NewSequence, StepWriter, TargetStep

NO_DRAFT: tuple[list[int], list[int]] = ([], [])
GREEDY = SamplingParams(temperature=0.0)


def text(
    request_id: str, *token_ids: int, sampling: SamplingParams = GREEDY, **more: Any
) -> TokenBuffer:
    request = Request(request_id, len(token_ids), 16, prompt_token_ids=token_ids, sampling=sampling)
    return TokenBuffer(request, **more)


def item(
    request_id: str,
    start: int,
    num: int,
    blocks: tuple[int, ...] = (),
    *,
    samples: bool = True,
    epoch: int = 0,
) -> VerifyItem:
    return VerifyItem(request_id, epoch, 0, start, num, samples, new_blocks=blocks)


def write(
    writer: StepWriter, texts: dict[str, TokenBuffer], *items: VerifyItem, **drafts: list[int]
) -> list[TargetStep]:
    """drafts: by request, looked up."""
    given = [(d := drafts.get(i.request_id, []), [-1] * len(d)) for i in items]
    return writer.write(items, texts, given, None)


def test_a_new_request_comes_whole_and_then_its_changes() -> None:
    writer, texts = StepWriter(100, 10), {"a": text("a", 5, 6, 7)}
    (first,) = write(writer, texts, item("a", 0, 3, (0, 4)))
    assert first.new == [NewSequence("a", [5, 6, 7], [1, 5], 0)]
    assert first.num_tokens == {"a": 3}
    assert [(a.request_id, a.position) for a in first.asked] == [("a", 3)]
    texts["a"].append([8])
    (second,) = write(writer, texts, item("a", 3, 1, (9,)), a=[1, 2])
    assert not second.new
    assert second.grown == [GrownSequence("a", 3, [10], 1, [8], anew=False)]
    assert second.num_tokens == {"a": 3}
    assert second.drafts == {"a": [1, 2]}
    assert second.asked[0].token_ids == [1, 2]
    assert second.asked[0].position == 4


class Odd:
    """A grammar that allows token 1 alone."""

    problem = None

    def masks(self, text: TokenBuffer, draft: list[int], num_rows: int) -> np.ndarray:
        return np.full((num_rows, 1), 2, dtype=np.int32)


def test_what_changes_logits_goes_with_the_step() -> None:
    """The workers know neither prompts from outputs nor grammars."""
    params = SamplingParams(presence_penalty=1.0, grammar="odd")
    texts = {"a": text("a", 5, 6, sampling=params, grammar=Odd()), "b": text("b", 5)}
    writer = StepWriter(100, 10)
    (step,) = write(writer, texts, item("a", 0, 2, (0,)), item("b", 0, 1, (1,)), a=[3, 4])
    first, second = pickle.loads(pickle.dumps(step.asked))
    assert first.so_far.token_ids.tolist() == [5, 6, 3, 4]
    assert first.so_far.prompt_len == 2
    assert first.so_far.allowed.tolist() == [[2]] * 3
    assert second.so_far is None


def test_a_chunk_of_prefill_asks_for_nothing() -> None:
    writer, texts = StepWriter(100, 10), {"a": text("a", 5, 6, 7)}
    (step,) = write(writer, texts, item("a", 0, 2, (0,), samples=False))
    assert step.num_tokens == {"a": 2}
    assert not step.asked


def test_a_cached_prefix_is_where_it_starts() -> None:
    writer, texts = StepWriter(100, 10), {"a": text("a", *range(40))}
    (step,) = write(writer, texts, item("a", 32, 8, (7, 8, 2)))
    assert step.new == [NewSequence("a", list(range(40)), [8, 9, 3], 32)]


def test_a_new_epoch_replaces_the_blocks() -> None:
    writer, texts = StepWriter(100, 10), {"a": text("a", 5, 6, 7)}
    write(writer, texts, item("a", 0, 3, (0,)))
    texts["a"].append([8, 9])
    (step,) = write(writer, texts, item("a", 0, 5, (3, 4), epoch=1))
    assert step.grown == [GrownSequence("a", 0, [4, 5], 2, [8, 9], anew=True)]


def test_the_end_of_a_request_goes_with_the_next_step_once() -> None:
    writer, texts = StepWriter(100, 10), {"a": text("a", 5), "b": text("b", 6)}
    write(writer, texts, item("a", 0, 1, (0,)))
    writer.release_request("a")
    writer.release_request("never seen")
    (step,) = write(writer, texts, item("b", 0, 1, (1,)))
    assert step.finished == {"a"}
    (step,) = write(writer, texts, item("b", 0, 1))
    assert step.finished == set()


def test_an_id_that_comes_again_is_another_request() -> None:
    writer, texts = StepWriter(100, 10), {"a": text("a", 5)}
    write(writer, texts, item("a", 0, 1, (0,)))
    writer.release_request("a")
    (step,) = write(writer, {"a": text("a", 9, 9)}, item("a", 0, 2, (0,)))
    assert step.finished == {"a"}
    assert step.new == [NewSequence("a", [9, 9], [1], 0)]


def test_more_requests_than_a_step_holds() -> None:
    writer = StepWriter(100, 2)
    texts = {n: text(n, 5) for n in "abc"}
    steps = write(writer, texts, *(item(n, 0, 1, (i,)) for i, n in enumerate("abc")))
    assert [list(s.num_tokens) for s in steps] == [["a", "b"], ["c"]]


def test_more_rows_than_a_step_holds() -> None:
    """The draft goes with its last known token, however long the prompt is before it."""
    for num_draft in range(4):
        for length in range(1, 13):
            writer = StepWriter(5, 9)
            texts = {"a": text("a", *range(length)), "b": text("b", 1, 2)}
            draft = [99] * num_draft
            items = (item("b", 0, 2, (8,)), item("a", 0, length, (1, 2, 3)))
            steps = write(writer, texts, *items, a=draft)
            pieces = [s for s in steps if "a" in s.num_tokens]
            known = [s.num_tokens["a"] - len(s.drafts.get("a", [])) for s in pieces]
            assert sum(known) == length
            assert all(n > 0 for n in known)
            assert all(s.num_rows <= 5 for s in steps)
            assert [s.drafts.get("a", []) for s in pieces][-1] == draft
            asked = [a for s in steps for a in s.asked if a.request_id == "a"]
            assert [a.position for a in asked] == [length]
            assert pieces[-1].asked[-1] is asked[0]
            starts = [
                *(n.start for s in pieces for n in s.new if n.request_id == "a"),
                *(g.start for s in pieces for g in s.grown),
            ]
            assert starts == [sum(known[:i]) for i in range(len(known))]
            blocks = [n.blocks for s in pieces for n in s.new if n.request_id == "a"]
            assert blocks == [[2, 3, 4]]
