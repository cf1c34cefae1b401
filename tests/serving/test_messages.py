import asyncio
import multiprocessing
import pickle
import socket
from multiprocessing.connection import Connection

import pytest

from penstock.core.types import Arrive, Cancel, FinishReason, Output, Request, TokenLogprob
from penstock.serving.messages import HEADER, Events, Outputs, StatsRequest, frame

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
    Events((Arrive(Request("long", 10**5, 5, prompt_token_ids=tuple(range(10**5)))),)),
]


@pytest.mark.parametrize("message", MESSAGES)
async def test_both_ends_frame_alike(message: object) -> None:
    """One end is asyncio's, the other the standard library's `Connection`."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    with Connection(theirs.detach()) as connection:
        writer.write(frame(message))
        assert await asyncio.to_thread(connection.recv) == message
        sending = asyncio.create_task(asyncio.to_thread(connection.send, message))
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        assert pickle.loads(await reader.readexactly(size)) == message
        await sending
    writer.close()
    await writer.wait_closed()


def test_finish_reasons_stay_themselves() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        ours.send(MESSAGES[2])
        assert theirs.recv().outputs[1].finish_reason is FinishReason.REFUSED
