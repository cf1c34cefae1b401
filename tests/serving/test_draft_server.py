"""A draft server over real sockets, against a scripted verification server."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from tests.products import first_fast
from tests.serving.edges import (
    GREEDY,
    SEEDED,
    complete,
    drafting,
    edge_client,
    linked,
    read,
    request,
    until,
)
from tests.serving.scripted_verifier import (
    LIMITS,
    Mangling,
    Oracle,
    ScriptedVerifier,
    logprob_of,
    target_oracle,
)

from penstock.core.types import (
    FinishReason,
    LatencyTarget,
    Output,
    Request,
    SamplingParams,
    StopStrings,
)
from penstock.serving.client import EngineUnavailable, Unsupported
from penstock.serving.draft_server import DraftService
from penstock.serving.drafting import DrafterOptions, load_drafter
from penstock.serving.link import Endpoint, LinkRefused, VerifierLink
from penstock.transport.service import add_service
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import decode_stop


@pytest.fixture(scope="module")
def oracle(family: dict[str, Path]) -> Oracle:
    return target_oracle(family["target"])


def tokens_of(outputs: list[Output], name: str) -> list[int]:
    return [t for o in outputs if o.request_id == name for t in o.token_ids]


REQUESTS = [
    request("greedy"),
    request("seeded", SEEDED, first=60),
    request("filtered", SamplingParams(1.0, 0.9, 20, 3), first=80),
    request("short", SEEDED, max_tokens=1),
]


def expected(oracle: Oracle, made: Request) -> list[int]:
    assert made.prompt_token_ids is not None
    return oracle(made.prompt_token_ids, made.max_tokens, made.sampling)


def check_outputs(oracle: Oracle, outputs: list[Output]) -> None:
    for made in REQUESTS:
        assert tokens_of(outputs, made.id) == expected(oracle, made), made.id
        ends = [o.finish_reason for o in outputs if o.request_id == made.id and o.finish_reason]
        assert ends == [FinishReason.LENGTH]


@pytest.mark.parametrize("model", first_fast(["near", "same", "far"]))
async def test_edge_requests(family: dict[str, Path], oracle: Oracle, model: str) -> None:
    verifier = ScriptedVerifier(oracle)
    async with linked(verifier, family[model]) as (_, client):
        outputs = await complete(client, *REQUESTS)
        assert client.num_open == 0
        check_outputs(oracle, outputs)
        assert verifier.problems == []
        assert verifier.hellos[0].model_name == model
        assert verifier.tokens == ["t0"]
        jobs = verifier.finished.values()
        accepted, made = sum(j.num_accepted for j in jobs), sum(len(j.output) for j in jobs)
        if model == "same":
            # All are right: four drafted and one more in each round, but for ends and firsts.
            assert sum(j.num_rounds for j in jobs) == 3 * 5
        assert (accepted > made / 2) == (model != "far")
        proposed = sum(o.num_proposed for o in outputs)
        assert proposed == sum(len(d.token_ids) for d in verifier.drafts)
        assert sum(o.num_accepted for o in outputs) == accepted


@pytest.mark.parametrize("shuffle", first_fast([5, 1, 2]))
async def test_repeated_and_reordered_messages(family, oracle, shuffle) -> None:
    verifier = ScriptedVerifier(oracle, Mangling(duplicate=True, shuffle=shuffle))
    async with linked(verifier, family["near"]) as (_, client):
        for n in range(4):
            verifier.assign(f"@{n}", list(range(n, n + 12)), 20, SEEDED)
        outputs = await complete(client, *REQUESTS)
        check_outputs(oracle, outputs)
        await until(lambda: not verifier.jobs)
        assert len(verifier.finished) == len(REQUESTS) + 4
        assert verifier.problems == []
        rounds = sum(j.num_rounds for j in verifier.finished.values())
        assert len(verifier.drafts) == rounds, "a draft was sent twice, or not at all"


@pytest.mark.parametrize("num_logprobs", first_fast([3, 0, None]))
async def test_logprobs(family: dict[str, Path], oracle: Oracle, num_logprobs: int | None) -> None:
    """Each token's own, though messages come twice and in any order and the stream breaks."""
    verifier = ScriptedVerifier(oracle, Mangling(duplicate=True, shuffle=3))
    verifier.break_after = 9
    made = request("a", replace(SEEDED, num_logprobs=num_logprobs), max_tokens=60)
    async with linked(verifier, family["near"]) as (_, client):
        outputs = await complete(client, made)
    assert len(verifier.opens) == 2
    tokens = tokens_of(outputs, "a")
    assert tokens == expected(oracle, made)
    told = [value for output in outputs for value in output.logprobs]
    if num_logprobs is None:
        assert told == []
        assert not any(o.HasField("num_logprobs") for o in verifier.opens)
    else:
        known = [logprob_of(made.prompt_len + i, t, num_logprobs) for i, t in enumerate(tokens)]
        assert told == known


async def test_a_server_without_assignments_sends_no_drafts_for_others(family, oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    async with (
        verifier.serving() as port,
        drafting(port, family["same"], takes_assignments=False) as server,
    ):
        assert not verifier.hellos[0].takes_assignments
        verifier.assign("@1", [1, 2, 3], 5, GREEDY)
        client = edge_client(server, family["same"])
        await complete(client, request("own"))
        assert all(d.request_id != "@1" for d in verifier.drafts)
        assert len(verifier.drafts) > 0


async def test_a_broken_stream_is_a_pause(family: dict[str, Path], oracle: Oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    verifier.break_after = 9
    async with linked(verifier, family["near"]) as (_, client):
        outputs = await complete(client, *REQUESTS)
        check_outputs(oracle, outputs)
        assert client.num_restarts == 1
        assert len(verifier.hellos) == 2
        assert len({o.request_id for o in verifier.opens}) == len(verifier.opens)
        reopened = [o for o in verifier.opens if len(o.prompt_token_ids) > 9]
        assert reopened
        for again in reopened:
            assert len(again.prompt_token_ids) + again.max_tokens == 9 + 24


async def test_a_stop_string_may_begin_before_a_break(family, oracle) -> None:
    """The verification server is told what of a prompt is output already."""
    verifier = ScriptedVerifier(oracle)
    verifier.break_after = 3
    made = request("a", stop=StopStrings(("no such text", "nor this"), 5, frozenset({7, 3})))
    async with linked(verifier, family["near"]) as (_, client):
        await complete(client, made)
    assert len(verifier.opens) > 1
    for message in verifier.opens:
        assert made.stop is not None
        num_made = len(message.prompt_token_ids) - made.prompt_len
        assert decode_stop(message.stop) == made.stop._replace(num_made=num_made)


@pytest.mark.parametrize("sampling", first_fast([SEEDED, GREEDY]), ids=["seeded", "greedy"])
async def test_a_restarted_verification_server_changes_nothing(family, oracle, sampling) -> None:
    outputs = await restart_in_the_middle(family, oracle, request("r", sampling, 60))
    assert tokens_of(outputs, "r") == expected(oracle, request("r", sampling, 60))
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_the_comparison_can_fail(family, oracle, monkeypatch) -> None:
    """Were a request opened again without what was verified, its output would differ."""
    opening = DraftService.open

    def forgetful(server, tracked, message) -> None:
        message.prompt_token_ids[9:] = [t ^ 1 for t in message.prompt_token_ids[9:]]
        opening(server, tracked, message)

    monkeypatch.setattr(DraftService, "open", forgetful)
    outputs = await restart_in_the_middle(family, oracle, request("r", SEEDED, 60))
    assert tokens_of(outputs, "r") != expected(oracle, request("r", SEEDED, 60))


async def restart_in_the_middle(
    family: dict[str, Path], oracle: Oracle, made: Request
) -> list[Output]:
    first, second = ScriptedVerifier(oracle), ScriptedVerifier(oracle)
    first.delay_s = 0.02
    outputs: list[Output] = []
    async with first.serving() as port, asyncio.timeout(30):
        stack = drafting(port, family["near"])
        server = await stack.__aenter__()
        client = edge_client(server, family["near"])
        stream = await client.submit("someone", [made])
        while len(tokens_of(outputs, made.id)) < 15:
            outputs.append(await anext(stream))
    await until(lambda: client.problem is not None)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(stream), 0.3)
    async with second.serving(port):
        outputs += await read(stream)
        await stack.__aexit__(None, None, None)
    return outputs


@pytest.mark.slow
async def test_a_user_who_leaves_closes_the_request(family, oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    verifier.delay_s = 0.05
    async with linked(verifier, family["near"]) as (_, client):
        with await client.submit("someone", [request("a", max_tokens=200)]) as stream:
            await anext(stream)
        await until(lambda: verifier.closes)
        assert verifier.closes == [verifier.opens[0].request_id]
        assert client.num_open == 0


@pytest.mark.slow
async def test_requests_beyond_the_limit_wait_here(family, oracle, monkeypatch) -> None:
    monkeypatch.setattr(
        "tests.serving.scripted_verifier.LIMITS",
        type(LIMITS)(LIMITS.vocab_size, 256, 8, max_open_requests=2),
    )
    verifier = ScriptedVerifier(oracle)
    verifier.delay_s = 0.01
    most = 0
    async with linked(verifier, family["near"]) as (_, client):
        with await client.submit(
            "someone", [request(f"r{n}", first=40 + n) for n in range(6)]
        ) as stream:
            async with asyncio.timeout(30):
                async for _ in stream:
                    most = max(most, len(verifier.jobs))
        assert len(verifier.finished) == 6
        assert most == 2


async def test_a_refused_server_says_why(family: dict[str, Path], oracle: Oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    verifier.refuse = "the draft model has another tokenizer than the target"
    async with verifier.serving() as port:
        with pytest.raises(LinkRefused, match=rf"127\.0\.0\.1:{port} refuses: the draft model has"):
            async with drafting(port, family["near"]):
                pass


async def test_a_refusal_after_a_welcome_may_pass(family: dict[str, Path], oracle: Oracle) -> None:
    """As when the verification server is started anew, and its engine still loads."""
    verifier = ScriptedVerifier(oracle)
    verifier.break_after = 3
    verifier.delay_s = 0.01
    async with linked(verifier, family["near"]) as (_, client):
        with await client.submit("someone", [request("a")]) as stream:
            outputs = [await anext(stream)]
            verifier.refuse = "not now"
            await until(lambda: client.problem is not None and "not now" in client.problem)
            assert str(client.problem).endswith("refuses: not now")
            verifier.refuse = None
            outputs += await read(stream)
        assert tokens_of(outputs, "a") == expected(oracle, request("a"))


@pytest.mark.parametrize(
    ("answer", "why"),
    [(None, "it does not answer"), (pb.Down(), "it does not begin with a welcome")],
)
async def test_servers_of_another_kind(family, monkeypatch, answer, why) -> None:
    monkeypatch.setattr("penstock.serving.link._WELCOME_TIMEOUT_S", 0.2)

    async def connect(messages, context) -> None:
        await anext(aiter(messages))
        if answer is not None:
            await context.write(answer.SerializeToString())
        await asyncio.sleep(60)

    other = grpc.aio.server()
    add_service(other, connect)
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    link = VerifierLink(Endpoint(f"127.0.0.1:{port}"), pb.Hello(), Silent())
    running = asyncio.create_task(link.run())
    try:
        if answer is None:
            await until(lambda: why in (link.problem or ""))
            assert not running.done()
        else:
            with pytest.raises(LinkRefused, match=why):
                await running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, LinkRefused):
            await running
        await other.stop(0)


class Silent:
    """A peer that does nothing."""

    def connected(self, welcome: pb.Welcome) -> None: ...
    def received(self, message: pb.Down) -> None: ...
    def lost(self) -> None: ...


async def test_without_a_stream_requests_are_refused_after_a_while(
    family: dict[str, Path], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.serving.client._READY_WAIT_S", 0.1)
    verifier = ScriptedVerifier(oracle)
    async with verifier.serving() as port:
        stack = drafting(port, family["near"])
        server = await stack.__aenter__()
        client = edge_client(server, family["near"])
    await until(lambda: client.problem is not None)
    with pytest.raises(EngineUnavailable, match="no connection to the verification server at"):
        await client.submit("someone", [request("a")])
    await stack.__aexit__(None, None, None)


@pytest.mark.slow
async def test_requests_that_are_given_up_are_opened_again(family, oracle) -> None:
    """As when the engine behind the verification server dies."""
    verifier = ScriptedVerifier(oracle)
    verifier.delay_s = 0.02
    asked = LatencyTarget(tpot=0.5, deadline=60.0)
    made = request("a", SEEDED, 40, expected_output_tokens=30, latency=asked)
    async with linked(verifier, family["near"]) as (_, client):
        outputs = []
        with await client.submit("someone", [made]) as stream:
            for reason in ("cancelled", "error"):
                outputs.append(await anext(stream))
                job = next(iter(verifier.jobs.values()))
                verifier.jobs.clear()
                verdict = pb.VerifiedTokens(
                    request_id=job.request_id, start=job.length, finish_reason=reason, reason="died"
                )
                verifier.send(pb.Down(verdict=verdict))
                await until(lambda: verifier.jobs)
            outputs += await read(stream)
        assert tokens_of(outputs, "a") == expected(oracle, made)
        assert len(verifier.opens) == 3
        ends = [len(o.prompt_token_ids) + o.expected_output_tokens for o in verifier.opens]
        assert ends == [made.prompt_len + 30] * 3
        assert {o.tpot for o in verifier.opens} == {0.5}
        deadlines = [o.deadline for o in verifier.opens]
        assert 60.0 >= deadlines[0] > deadlines[1] > deadlines[2] > 0


async def test_a_hopeless_request_ends_in_an_error(family, oracle, monkeypatch) -> None:
    monkeypatch.setattr("penstock.serving.edge._RETRY_S", 0.001)
    verifier = ScriptedVerifier(oracle)

    def give_up(message: pb.Open) -> None:
        verifier.opens.append(message)
        verdict = pb.VerifiedTokens(
            request_id=message.request_id,
            start=len(message.prompt_token_ids),
            finish_reason="error",
            reason="it died again",
        )
        verifier.send(pb.Down(verdict=verdict))

    verifier.open_request = give_up
    async with linked(verifier, family["near"]) as (_, client):
        with await client.submit("someone", [request("a")]) as stream:
            (output,) = await read(stream)
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "it died again"
        assert len(verifier.opens) == 6


@pytest.mark.slow
async def test_a_refused_request_is_tried_again_for_a_while(family, oracle, monkeypatch) -> None:
    """As when the verification server has too much to do."""
    monkeypatch.setattr("penstock.serving.edge._RETRY_S", 0.001)
    for times in (3, 100):
        verifier = ScriptedVerifier(oracle)
        opening = verifier.open_request
        num_refused = 0

        def refuse(message: pb.Open) -> None:
            nonlocal num_refused
            num_refused += 1
            if num_refused > times:  # noqa: B023
                opening(message)  # noqa: B023
                return
            refused = pb.Refused(request_id=message.request_id, reason="too many requests")
            verifier.send(pb.Down(refused=refused))  # noqa: B023

        verifier.open_request = refuse
        async with linked(verifier, family["near"]) as (_, client):
            outputs = await complete(client, request("a"))
        if times == 3:
            assert tokens_of(outputs, "a") == expected(oracle, request("a"))
        else:
            assert [o.finish_reason for o in outputs] == [FinishReason.REFUSED]
            assert outputs[0].error == "too many requests"


NEVER_TAKEN = [
    (request("a", SamplingParams(num_logprobs=21)), "num_logprobs 21; at most 20"),
    (request("a", max_tokens=300), "9 prompt tokens and 300 to make; together at most 256"),
    (request("a", first=250), "prompt token 258; token ids go from 0 to 255"),
    (request("a", stop_token_ids=frozenset(range(65))), "65 stop tokens; at most 64"),
    (request("a", stop=StopStrings(("x" * 1025,))), "1 stop strings of 1025 characters; from"),
    (request("a", SamplingParams(min_p=0.1)), "a draft server does not pass on structured"),
    (request("a", SamplingParams(grammar="start: A")), "a draft server does not pass on"),
    (request("a", SamplingParams(presence_penalty=1.0)), "a draft server does not pass on"),
    (request("a", SamplingParams(num_prompt_logprobs=0)), "a draft server does not pass on"),
]


async def test_what_would_never_be_taken_is_refused_here(family, oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    async with linked(verifier, family["near"]) as (_, client):
        for made, why in NEVER_TAKEN:
            with pytest.raises(Unsupported, match=why):
                await client.submit("someone", [request("b"), made])
        assert verifier.opens == []
        assert client.num_open == 0


async def test_ratio_drafts_bring_distributions_from_trusted_servers_only(family, oracle) -> None:
    ratio = SamplingParams(temperature=0.9, seed=3, verification="ratio")
    for trusted in (False, True):
        verifier = ScriptedVerifier(oracle)
        verifier.trusted = trusted
        async with linked(verifier, family["near"]) as (_, client):
            await complete(client, request("a", ratio))
            assert verifier.opens[0].sampling.ratio
            assert verifier.problems == []
            assert verifier.drafts
            assert all(bool(d.weights) == trusted for d in verifier.drafts if d.token_ids)


@pytest.mark.parametrize(("drafter", "longest", "most"), [("auto", 2, 2), ("none", None, 0)])
async def test_users_say_how_far_to_draft(family, oracle, drafter, longest, most) -> None:
    verifier = ScriptedVerifier(oracle)
    made = request("a", drafter=drafter, max_draft_tokens=longest)
    async with linked(verifier, family["same"]) as (_, client):
        outputs = await complete(client, made)
        assert tokens_of(outputs, "a") == expected(oracle, made)
        assert max(len(d.token_ids) for d in verifier.drafts) == most


@pytest.mark.slow
async def test_verification_that_does_not_wait(family: dict[str, Path], oracle: Oracle) -> None:
    """Every draft comes too late; every assignment is answered all the same, and once."""
    verifier = ScriptedVerifier(oracle, Mangling(duplicate=True))
    verifier.wait_for_drafts = False
    async with linked(verifier, family["near"]) as (_, client):
        verifier.assign("@1", [1, 2, 3], 20, GREEDY)
        with await client.submit("someone", REQUESTS) as stream:
            check_outputs(oracle, await read(stream))
        await until(lambda: not verifier.jobs)
        num_rounds = sum(job.num_rounds for job in verifier.finished.values())
        await until(lambda: len(verifier.drafts) >= num_rounds)
        answered = [(d.request_id, d.epoch, d.round) for d in verifier.drafts]
        assert len(answered) == len(set(answered)) == num_rounds


async def test_a_released_request_is_answered_and_forgotten(family, oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    async with verifier.serving() as port, drafting(port, family["near"]):
        await verifier.connected.wait()
        assign = pb.Assign(
            request_id="@1",
            epoch=0,
            round=1,
            prefix_len=3,
            num_draft_tokens=4,
            prefix_token_ids=[1, 2, 3],
        )
        release = pb.Release(request_id="@1")
        verifier.send(pb.Down(assign=assign), pb.Down(release=release), pb.Down(release=release))
        verifier.send(pb.Down(assign=assign))
        await until(lambda: verifier.drafts)
        verifier.assign("@2", [1, 2, 3], 20, GREEDY)
        await until(lambda: verifier.finished)
        assert [d.request_id for d in verifier.drafts].count("@1") == 1


@pytest.mark.slow
async def test_draining(family: dict[str, Path], oracle: Oracle) -> None:
    verifier = ScriptedVerifier(oracle)
    verifier.delay_s = 0.05
    async with linked(verifier, family["near"]) as (_, client):
        stream = await client.submit("someone", [request("a", max_tokens=200)])
        await anext(stream)
        await client.drain(0.1)
        outputs = await read(stream)
        assert outputs[-1].finish_reason is FinishReason.CANCELLED
        await until(lambda: verifier.closes)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await client.submit("someone", [request("b")])


async def test_a_drafter_that_breaks_ends_the_server(family, oracle, monkeypatch) -> None:
    def broken(self: object, *arguments: object, **options: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("penstock.engine.drafters.proposers.ModelProposer.propose", broken)
    verifier = ScriptedVerifier(oracle)
    loaded = load_drafter(DrafterOptions("near", family["near"], dtype="float32"))
    async with verifier.serving() as port:
        server = DraftService(Endpoint(f"127.0.0.1:{port}"), loaded.hello, loaded.sessions)
        running = asyncio.create_task(server.run())
        await verifier.connected.wait()
        verifier.assign("@1", [1, 2, 3], 5, GREEDY)
        with pytest.raises(RuntimeError, match="out of luck"):
            await running
