"""Draft servers over real streams: their requests, and those of others that they draft for."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.serving.fakes import TOKENIZER
from tests.serving.harness import running_server, serve_config
from tests.serving.links import Delay
from tests.serving.scripted import free_port, greedy, scripted_server, seeded
from tests.serving.test_draft_server import Silent
from tests.serving.verified import (
    NUM_TOKENS,
    PROMPT,
    World,
    complete_by_http,
    guess_from,
    metrics_of,
    until,
    verified_world,
)

from penstock.engine.tokenizer import load_tokenizer
from penstock.serving.draft_streams import DraftStream
from penstock.serving.link import Endpoint, VerifierLink
from penstock.transport.checks import PROTOCOL_VERSION
from penstock.transport.v1 import drafting_pb2 as pb


@pytest.mark.parametrize("sampling", [greedy(), seeded(7)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("wrong_every", [0, 3, 1])
async def test_edge_output_is_the_targets_own(world, sampling, wrong_every) -> None:
    expected = world.alone(sampling)
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest)
        await draft_server.open("r", PROMPT, NUM_TOKENS, sampling)
        guess = guess_from(expected, len(PROMPT), wrong_every)
        await draft_server.run(guess, draft_server.all_finished)
        text = draft_server.texts["r"]
    assert text.output == expected
    assert text.finish_reason == "length"
    assert text.num_drafts > 0
    assert (text.num_accepted > NUM_TOKENS / 4) == (wrong_every != 1)


async def test_another_seed_gives_another_output(world: World) -> None:
    """Control: the equality above could fail."""
    assert world.alone(seeded(7)) != world.alone(seeded(8))
    assert world.alone(seeded(7)) != world.alone(greedy())


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
async def test_central_output_is_the_targets_own(world: World, fields: dict[str, Any]) -> None:
    sampling = seeded(7) if "seed" in fields else greedy()
    expected = world.alone(sampling)
    alone = await complete_by_http(world, speculation={"drafter": "none"}, **fields)
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest)
        guess = guess_from(expected, len(PROMPT), 5)
        drafting = asyncio.create_task(
            draft_server.run(guess, lambda: len(draft_server.released) > 0)
        )
        made = await complete_by_http(world, **fields)
        await drafting
    assert made["choices"][0]["text"] == alone["choices"][0]["text"]
    assert made["usage"]["speculation"]["drafter"] == "loopback"
    assert made["usage"]["speculation"]["num_accepted_tokens"] > NUM_TOKENS / 2
    (text,) = draft_server.texts.values()
    assert text.token_ids == (PROMPT + expected)[: len(text.token_ids)]
    assert len(text.token_ids) > len(PROMPT) + NUM_TOKENS / 2


async def test_the_round_trip_is_known_before_the_first_order(world: World, monkeypatch) -> None:
    """Of a real draft server's link, on which every byte takes 0.1 s each way."""
    told: list[float] = []
    post_up = DraftStream._post_up

    def note(stream: DraftStream, round_trip_s: float) -> None:
        told.append(round_trip_s)
        post_up(stream, round_trip_s)

    monkeypatch.setattr(DraftStream, "_post_up", note)
    fields = {"protocol_version": PROTOCOL_VERSION, "tokenizer_digest": world.digest}
    hello = pb.Hello(model_name="far", max_draft_tokens=8, takes_assignments=True, **fields)
    port = int(world.address.rpartition(":")[2])
    async with Delay(port, seconds=0.1).running() as link:
        far = VerifierLink(Endpoint(f"127.0.0.1:{link.port}"), hello, Silent())
        running = asyncio.create_task(far.run())
        async with asyncio.timeout(30):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    (first,) = told
    assert 0.2 <= first < 5


async def test_logprobs_go_only_to_requests_that_ask(world: World) -> None:
    """At the edge the same as at the centre, drafted or not."""
    alone = await complete_by_http(world, logprobs=3, speculation={"drafter": "none"})
    known = alone["choices"][0]["logprobs"]
    guess = guess_from(world.alone(greedy()), len(PROMPT), 4)
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest)
        await draft_server.open("asked", PROMPT, NUM_TOKENS, greedy(), num_logprobs=3)
        await draft_server.open("bare", PROMPT, NUM_TOKENS, greedy(), num_logprobs=0)
        await draft_server.open("silent", PROMPT, NUM_TOKENS, greedy())
        await draft_server.run(guess, draft_server.all_finished)
        own = dict(draft_server.texts)
        drafting = asyncio.create_task(
            draft_server.run(guess, lambda: len(draft_server.released) > 0)
        )
        central = await complete_by_http(world, logprobs=3)
        await drafting
    assert own["asked"].num_accepted > NUM_TOKENS / 4
    for name, num_logprobs in (("asked", 3), ("bare", 0)):
        told = own[name].logprobs
        assert [t.logprob for t in told] == pytest.approx(known["token_logprobs"], abs=1e-3)
        assert {len(t.top_token_ids) for t in told} == {num_logprobs}
    for token, told, top in zip(
        own["asked"].output, own["asked"].logprobs, known["top_logprobs"], strict=True
    ):
        assert told.top_token_ids[0] == token
        assert list(told.top_logprobs) == pytest.approx(list(top.values()), abs=1e-3)
    assert own["silent"].logprobs == []
    assert central["choices"][0]["logprobs"]["tokens"] == known["tokens"]
    others = [text for name, text in draft_server.texts.items() if name not in own]
    assert len(others) == 1
    assert others[0].num_accepted > 0
    assert others[0].logprobs == []


async def test_prompts_stay_where_no_assignments_are_taken(world: World) -> None:
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest, takes_assignments=False)
        made = await complete_by_http(world)
        assert made["usage"]["completion_tokens"] == NUM_TOKENS
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(draft_server.call.read(), 0.2)


async def test_a_request_of_central_ingress_survives_its_draft_server(world: World) -> None:
    alone = await complete_by_http(world, speculation={"drafter": "none"})
    expected = world.alone(greedy())
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest)
        working = asyncio.create_task(complete_by_http(world))
        guess = guess_from(expected, len(PROMPT), 4)
        text = None

        def half() -> bool:
            nonlocal text
            text = next(iter(draft_server.texts.values()), None)
            return text is not None and len(text.output) > NUM_TOKENS / 2

        await draft_server.run(guess, half)
        draft_server.call.cancel()
        made = await working
    assert made["choices"][0]["text"] == alone["choices"][0]["text"]


async def test_another_draft_server_takes_over(world: World) -> None:
    alone = await complete_by_http(world, speculation={"drafter": "none"})
    guess = guess_from(world.alone(greedy()), len(PROMPT), 4)
    async with scripted_server(world.address) as first, scripted_server(world.address) as second:
        await first.hello(world.digest)
        working = asyncio.create_task(complete_by_http(world))
        await first.run(guess, lambda: any(len(t.token_ids) > 45 for t in first.texts.values()))
        await second.hello(world.digest)
        first.call.cancel()
        await second.run(guess, lambda: len(second.released) > 0)
        made = await working
    assert made["choices"][0]["text"] == alone["choices"][0]["text"]
    (text,) = second.texts.values()
    assert text.prompt_len > 45
    assert text.num_accepted > 5


@pytest.mark.parametrize("is_fast", [True, False])
async def test_a_text_is_read_before_a_switch(family: dict[str, Path], is_fast: bool) -> None:
    """Spin's fast switch, by an order without a draft."""
    options = {"alpha": 2, "beta": 2, "corrections": [], "fast_switch": is_fast}
    settings: dict[str, Any] = {"selection": {"name": "lbss", "options": options}}
    settings["allocation"] = {"name": "fixed", "options": {"k": 3}}
    with verified_world(family, engine=settings) as world:
        alone = await complete_by_http(world, speculation={"drafter": "none"})
        guess = guess_from(world.alone(greedy()), len(PROMPT), 4)
        streams = [scripted_server(world.address) for _ in range(2)]
        async with streams[0] as one, streams[1] as other:
            servers = (one, other)
            for server in servers:
                await server.hello(world.digest)
            drafting = [asyncio.create_task(s.run(guess, lambda: False)) for s in servers]
            made = await complete_by_http(world)
            for task in drafting:
                task.cancel()
    assert made["choices"][0]["text"] == alone["choices"][0]["text"]
    assert min(len(s.texts) for s in servers) > 0, "it went from one to the other"
    early = [t for s in servers for t in s.texts.values() if t.asked[0] == 0 and len(t.asked) > 1]
    assert bool(early) == is_fast
    assert not early or max(text.num_accepted for text in early) > 0


async def test_a_prompt_is_read_while_the_target_reads_it(family: dict[str, Path]) -> None:
    """A prompt of several steps: its text comes before the order for its first draft."""
    admission = {"name": "vllm_v1", "options": {"max_num_seqs": 2, "max_num_batched_tokens": 2}}
    with verified_world(family, engine={"admission": admission}) as world:
        guess = guess_from(world.alone(greedy()), len(PROMPT), 4)
        async with scripted_server(world.address) as server:
            await server.hello(world.digest)
            drafting = asyncio.create_task(server.run(guess, lambda: len(server.released) > 0))
            made = await complete_by_http(world, speculation={"drafter": "loopback"})
            await drafting
    (text,) = server.texts.values()
    assert text.asked[0] == 0 < text.asked[1]
    assert made["usage"]["speculation"]["num_accepted_tokens"] > NUM_TOKENS / 4


async def test_a_broken_stream_cancels_what_came_over_it(world: World) -> None:
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest)
        for n in range(3):
            await draft_server.open(f"r{n}", PROMPT, 200, greedy())
        for _ in range(3):
            await draft_server.next_assign()
        await until(world, "num_requests_running", 3)
        await until(world, "draft_servers", 1)
    await until(world, "num_requests_running", 0)
    await until(world, "draft_servers", 0)


async def test_what_was_verified_can_be_opened_again(world: World) -> None:
    """Edge ingress goes on from the verified prefix after the stream broke, in mid-round."""
    sampling = seeded(11)
    expected = world.alone(sampling)
    guess = guess_from(expected, len(PROMPT), 4)
    async with scripted_server(world.address) as first:
        await first.hello(world.digest)
        await first.open("r", PROMPT, NUM_TOKENS, sampling)
        await first.run(guess, lambda: len(first.texts["r"].output) > 10)
        known = first.texts["r"].token_ids
    async with scripted_server(world.address) as second:
        await second.hello(world.digest)
        left = NUM_TOKENS - (len(known) - len(PROMPT))
        await second.open("r", known, left, sampling)
        await second.run(guess, second.all_finished)
        assert second.texts["r"].token_ids == PROMPT + expected
    assert 0 < left < NUM_TOKENS


async def test_drafts_that_come_twice_late_and_out_of_order(world: World) -> None:
    """Two requests at once; every draft comes twice, old ones come again, answers swap places."""
    samplings = {"a": seeded(1), "b": greedy()}
    expected = {name: world.alone(sampling) for name, sampling in samplings.items()}
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest)
        for name, sampling in samplings.items():
            await draft_server.open(name, PROMPT, NUM_TOKENS, sampling)
        sent: list[pb.DraftTokens] = []
        while not draft_server.all_finished():
            assign = draft_server.take(await draft_server.receive())
            if assign is None:
                continue
            guess = guess_from(expected[assign.request_id], len(PROMPT), 3)
            text = draft_server.texts[assign.request_id].token_ids
            sent.append(draft_server.draft(assign, guess(text, assign.num_draft_tokens)))
            late = sent[-3:-1]
            for draft in (*late, sent[-1], *late, sent[-1]):
                await draft_server.send(draft=draft)
        for name in samplings:
            assert draft_server.texts[name].output == expected[name]
            assert draft_server.texts[name].num_accepted > NUM_TOKENS / 4


@pytest.mark.slow
async def test_targets_come_with_a_request(world: World) -> None:
    before = await metrics_of(world)
    async with scripted_server(world.address) as draft_server:
        await draft_server.hello(world.digest)
        await draft_server.open("r", PROMPT, NUM_TOKENS, greedy(), tpot=60.0, deadline=600.0)
        while not draft_server.all_finished():
            draft_server.take(await draft_server.receive())
    after = await metrics_of(world)
    for name in ("requests", "met"):
        key = f"penstock:latency_target_{name}_total"
        assert after[key] - before.get(key, 0.0) == 1


@pytest.mark.slow
async def test_an_expected_length_reaches_the_scheduler() -> None:
    """`wait` begins one request of the short type alone, but not one of the long type."""
    options = {"output_lens": [4, 64], "thresholds": [1, 2]}
    address = f"127.0.0.1:{free_port()}"
    config = serve_config(
        {"admission": {"name": "wait", "options": options}}, drafters={"listen": address}
    )
    with running_server(config):
        async with scripted_server(address) as draft_server:
            await draft_server.hello(load_tokenizer(TOKENIZER).digest)
            first_token = {"stop_token_ids": PROMPT[:1]}
            await draft_server.open("long", PROMPT, 8, greedy(), **first_token)
            await draft_server.open(
                "short", PROMPT, 8, greedy(), expected_output_tokens=3, **first_token
            )
            while not draft_server.texts["short"].finish_reason:
                draft_server.take(await draft_server.receive())
            assert not draft_server.texts["long"].finish_reason
