"""Lines that draft servers send ahead, over real streams."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.engine.small_family import VOCAB
from tests.serving.edges import SEEDED, complete, linked, request
from tests.serving.edges import until as until_true
from tests.serving.fault_rig import metric, until
from tests.serving.scripted import ScriptedServer, greedy, scripted_server, seeded
from tests.serving.scripted_verifier import ScriptedVerifier, target_oracle
from tests.serving.verified import NUM_TOKENS, PROMPT, World, complete_by_http, guess_from

from penstock.core.ahead import LinePiece, LinesAhead, Text
from penstock.core.types import SamplingParams
from penstock.transport.wire import decode_pieces

START = len(PROMPT)
IN_A_PIECE = 60
"""Tokens of a text that are sent at once."""


async def finish(server: ScriptedServer, expected: list[int]) -> int:
    """Read to the end of all requests, and answer orders by nothing; returns how many came."""
    num = 0
    while not server.all_finished():
        assign = server.take(await server.receive())
        if assign is not None:
            num += 1
            await server.send(draft=server.draft(assign, ()))
    assert server.texts["r"].output == expected
    return num


@pytest.mark.parametrize("sampling", [greedy(), seeded(7)], ids=["greedy", "seeded"])
async def test_what_is_at_hand_needs_no_order(world: World, sampling: Any) -> None:
    """Drafts of four, as ordered, until what was sent is used up."""
    expected = world.alone(sampling)
    before = await metric(world.server.url, "ahead_draft_tokens_total")
    async with scripted_server(world.address) as server:
        welcome = await server.hello(world.digest)
        assert welcome.max_ahead_tokens >= IN_A_PIECE
        await server.open("r", PROMPT, NUM_TOKENS, sampling)
        await server.ahead("r", LinePiece(1, START, tuple(expected[:IN_A_PIECE]), 1))
        num_orders = await finish(server, expected)
        text = server.texts["r"]
    assert text.num_accepted == text.num_drafted >= NUM_TOKENS - NUM_TOKENS // 5 - 8
    assert num_orders <= 2

    async def counts_them() -> bool:
        sent = await metric(world.server.url, "ahead_draft_tokens_total") - before
        return sent == min(IN_A_PIECE, NUM_TOKENS)

    await until(counts_them)


@pytest.mark.parametrize("wrong_every", [1, 2, 7])
async def test_lines_that_are_wrong_change_nothing(world: World, wrong_every: int) -> None:
    expected = world.alone(seeded(7))
    guess = guess_from(expected, START, wrong_every)
    async with scripted_server(world.address) as server:
        await server.hello(world.digest)
        await server.open("r", PROMPT, NUM_TOKENS, seeded(7))
        sent = guess(PROMPT, IN_A_PIECE)
        await server.ahead("r", LinePiece(1, START, tuple(sent), 1))
        await finish(server, expected)
        text = server.texts["r"]
    wrong = [i for i, (a, b) in enumerate(zip(sent, expected, strict=False)) if a != b]
    assert wrong
    assert text.num_accepted <= wrong[0], "nothing behind a token that is wrong is used"


async def test_a_runner_up_goes_on_where_the_first_choice_was_wrong(world: World) -> None:
    expected = world.alone(greedy())
    turn = 12
    trunk = [*expected[:turn], *((t + 1) % VOCAB for t in expected[turn : turn + 12])]
    async with scripted_server(world.address) as server:
        await server.hello(world.digest)
        await server.open("r", PROMPT, NUM_TOKENS, greedy())
        await server.ahead(
            "r",
            LinePiece(1, START, tuple(trunk), 1),
            LinePiece(2, START + turn, tuple(expected[turn : turn + 28]), 1),
        )
        num_orders = await finish(server, expected)
        text = server.texts["r"]
    assert text.num_accepted > turn + 12
    assert text.num_accepted < text.num_drafted
    assert num_orders <= 3


async def test_lines_of_what_is_forgotten(world: World) -> None:
    """A verdict has made an end of a line, and of a request, that go on coming."""
    expected = world.alone(greedy())
    async with scripted_server(world.address) as server:
        await server.hello(world.digest)
        await server.open("r", PROMPT, NUM_TOKENS, greedy())
        wrong = tuple((t + 1) % VOCAB for t in expected[:8])
        await server.ahead("r", LinePiece(1, START, wrong, 1))
        text = server.texts["r"]
        while len(text.output) < 6:
            assign = server.take(await server.receive())
            if assign is not None:
                await server.send(draft=server.draft(assign, ()))
        await server.ahead("r", LinePiece(1, START + 8, wrong), LinePiece(2, START + 4, wrong, 1))
        await server.ahead("never", LinePiece(1, START, wrong, 1))
        await finish(server, expected)
        await server.ahead("r", LinePiece(3, START, wrong, 3))
        await server.open("s", PROMPT, 5, greedy())
        while not server.all_finished():
            assign = server.take(await server.receive())
            if assign is not None:
                await server.send(draft=server.draft(assign, ()))
        assert server.texts["s"].output == expected[:5]
    assert not server.refused


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([LinePiece(1, START, tuple(range(65)), 1)], "65 tokens ahead in 1 pieces; at most 64"),
        ([LinePiece(1, START, (1,), 1)] * 33, "33 tokens ahead in 33 pieces"),
        ([LinePiece(1, START, (VOCAB,), 1)], f"token {VOCAB} ahead; token ids go from 0 to"),
        ([LinePiece(1, 1 << 30, (1,), 1)], "beyond"),
    ],
)
async def test_bad_lines(world: World, pieces: list[LinePiece], reason: str) -> None:
    expected = world.alone(greedy())
    async with scripted_server(world.address) as server:
        await server.hello(world.digest)
        await server.open("r", PROMPT, NUM_TOKENS, greedy())
        await server.ahead("r", *pieces)
        await finish(server, expected)
    (refused,) = server.refused
    assert refused.request_id == "r"
    assert reason in refused.reason


async def test_a_server_that_goes_takes_its_lines_along(world: World) -> None:
    """A request of central ingress, which has more at hand than it can use."""
    alone = await complete_by_http(world, speculation={"drafter": "none"})
    expected = world.alone(greedy())
    async with scripted_server(world.address) as server:
        await server.hello(world.digest)
        working = asyncio.create_task(complete_by_http(world))
        assign = await server.next_assign()
        first = START + len(server.texts[assign.request_id].output)
        rest = tuple(expected[first - START : first - START + IN_A_PIECE])
        await server.ahead(assign.request_id, LinePiece(1, first, rest, 1))
        await server.send(draft=server.draft(assign, rest[:1]))
        server.take(await server.receive())
        server.call.cancel()
    made = await working
    assert made["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SEEDED])
async def test_a_draft_server_sends_what_it_would_draft(family, sampling) -> None:
    """With the target itself as the drafter the first line is the target's own output."""
    oracle = target_oracle(family["target"])
    verifier = ScriptedVerifier(oracle)
    verifier.delay_s = 0.02
    made = request("r", sampling, max_tokens=40)
    assert made.prompt_token_ids is not None
    async with linked(verifier, family["same"]) as (server, client):
        await complete(client, made)
        num_tokens = server.num_ahead
    output = oracle(made.prompt_token_ids, made.max_tokens, made.sampling)
    pieces = [p for m in verifier.ahead for s in m.lines for p in decode_pieces(s.pieces)]
    assert num_tokens >= sum(len(p.token_ids) for p in pieces) > 20
    lines = LinesAhead("edge")
    lines.add_pieces(pieces[:1], Text(made.prompt_len, []))
    first = lines.path(made.prompt_len)
    assert first == tuple(output[: len(first)])
    roots = {p.line for p in pieces if p.parent == p.line}
    for piece in pieces:
        if piece.line in roots:
            at = piece.start - made.prompt_len
            known = tuple(output[at : at + len(piece.token_ids)])
            assert piece.token_ids[: len(known)] == known


async def test_a_request_with_a_limit_of_its_own_is_left_to_orders(family: dict[str, Path]) -> None:
    oracle = target_oracle(family["target"])
    verifier = ScriptedVerifier(oracle)
    made = [request("few", SEEDED, max_draft_tokens=2), request("none", SEEDED, drafter="none")]
    async with linked(verifier, family["same"]) as (_, client):
        await complete(client, *made)
        await until_true(lambda: not verifier.jobs)
    assert verifier.ahead == []
