from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.types import Arrive, Cancel, FinishReason, Output, Request, TokenLogprob
from penstock.serving.messages import Deframer, Events, Outputs, StatsRequest, frame

MESSAGES = [
    Events((Arrive(Request("a", 2, 5, prompt_token_ids=(1, 2))), Cancel("b"))),
    StatsRequest(),
    Outputs(
        (
            Output("a", (1, 2), drafter="d", num_proposed=3, num_accepted=1),
            Output("b", finish_reason=FinishReason.REFUSED, error="no"),
            Output("c", (5,), logprobs=(TokenLogprob(-0.5, ((5, -0.5),)),)),
        )
    ),
    Outputs(()),
]


@given(st.lists(st.integers(1, 60), min_size=1))
def test_messages_survive_any_cutting_of_the_stream(sizes: list[int]) -> None:
    stream = b"".join(map(frame, MESSAGES))
    deframer = Deframer()
    got = []
    at = 0
    while at < len(stream):
        size = sizes[at % len(sizes)]
        got += deframer.feed(stream[at : at + size])
        at += size
    assert got == MESSAGES


def test_finish_reasons_stay_themselves() -> None:
    (outputs,) = Deframer().feed(frame(MESSAGES[2]))
    assert outputs.outputs[1].finish_reason is FinishReason.REFUSED
