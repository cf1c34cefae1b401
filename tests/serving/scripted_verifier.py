"""A verification server from a script: real sockets, a tiny target, and messages mangled at will.

It keeps to `coupled` verification by definition: the whole output of a request is the target's own
sample, known beforehand, and a draft is accepted as far as it equals that.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np
import torch
from tests.engine.small_family import VOCAB

from penstock.core.types import SamplingParams, TokenLogprob
from penstock.engine.eager import EagerRunner
from penstock.engine.runner import RaggedBatch
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.serving.draft_access import peer_of
from penstock.transport.checks import ExpectedDraft, Limits, check_draft
from penstock.transport.service import add_service, server_options
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import PrefixDigest, encode_logprobs

LIMITS = Limits(vocab_size=VOCAB, max_request_tokens=256, max_draft_tokens=8)

Oracle = Callable[[Sequence[int], int, SamplingParams], list[int]]


def target_oracle(path) -> Oracle:
    """What a checkpoint's model makes of a text: the output that every request must have."""
    runner = EagerRunner.load(path, torch.float32, torch.device("cpu"), 64, 16)

    def go_on(text: Sequence[int], num_tokens: int, params: SamplingParams) -> list[int]:
        tokens = list(text)
        rows = SamplingRows(
            np.array([params.temperature]),
            np.array([params.top_p]),
            np.array([params.top_k]),
            np.array([params.seed], dtype=np.uint64),
        )
        for _ in range(num_tokens):
            size = len(tokens)
            batch = RaggedBatch(
                token_ids=np.array(tokens, dtype=np.int32),
                positions=np.arange(size, dtype=np.int32),
                query_start=np.array([0, size], dtype=np.int32),
                seq_lens=np.array([size], dtype=np.int32),
                block_tables=np.arange(64, dtype=np.int32)[None],
                logits_rows=np.array([size - 1], dtype=np.int32),
            )
            logits = runner.forward(batch)
            tokens += sample_coupled(logits, rows, np.array([size])).tolist()
        return tokens[len(text) :]

    return go_on


def logprob_of(position: int, token: int, num_logprobs: int) -> TokenLogprob:
    """What is told of a token, made up: it says which token, and where."""
    top = tuple(((token + i) % VOCAB, -float(position + i)) for i in range(num_logprobs))
    return TokenLogprob(-float(position), top)


@dataclass
class Mangling:
    """What happens to messages on their way down. Of every few neighbours the order is shuffled."""

    duplicate: bool = False
    shuffle: int = 1
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def apply(self, messages: list[pb.Down]) -> list[pb.Down]:
        copies = [m for m in messages for _ in range(1 + self.duplicate)]
        mangled = []
        for start in range(0, len(copies), self.shuffle):
            window = copies[start : start + self.shuffle]
            self.rng.shuffle(window)
            mangled += window
        return mangled


@dataclass
class Job:
    """A request that is verified. draft_len: asked of every draft."""

    request_id: str
    prompt: list[int]
    output: list[int]
    sampling: pb.Sampling
    is_central: bool = False
    num_logprobs: int | None = None
    num_done: int = 0
    num_accepted: int = 0
    num_rounds: int = 0
    draft: asyncio.Future[pb.DraftTokens] | None = None
    digest: PrefixDigest = field(init=False)

    def __post_init__(self) -> None:
        self.digest = PrefixDigest(self.prompt)

    @property
    def length(self) -> int:
        return len(self.prompt) + self.num_done


class ScriptedVerifier:
    """One verification server.

    delay_s:     of each verification
    draft_len:   asked of every draft
    break_after: end the stream after so many verdicts, once
    refuse_opens: answer every request by a refusal with this code
    eos_token_ids: ends of text that it tells
    """

    def __init__(self, oracle: Oracle, mangling: Mangling | None = None) -> None:
        self.oracle = oracle
        self.mangling = mangling or Mangling()
        self.delay_s = 0.0
        self.draft_len = 4
        self.min_survival = 0.0
        self.break_after: int | None = None
        self.refuse: str | None = None
        self.refuse_opens: pb.Refused.Code | None = None
        self.eos_token_ids: tuple[int, ...] = ()
        self.trusted = False
        self.wait_for_drafts = True
        self.hellos: list[pb.Hello] = []
        self.tokens: list[str | None] = []
        self.names: list[str | None] = []
        self.opens: list[pb.Open] = []
        self.closes: list[str] = []
        self.drafts: list[pb.DraftTokens] = []
        self.ahead: list[pb.DraftAhead] = []
        self.problems: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.finished: dict[str, Job] = {}
        self._send: Callable[[list[pb.Down]], None] | None = None
        self._context: grpc.aio.ServicerContext | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_verdicts = 0
        self.connected = asyncio.Event()

    @asynccontextmanager
    async def serving(
        self, port: int = 0, credentials: grpc.ServerCredentials | None = None
    ) -> AsyncIterator[int]:
        server = grpc.aio.server(options=server_options())
        add_service(server, self._connect)
        address = f"127.0.0.1:{port}"
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
        await server.start()
        try:
            yield bound
        finally:
            for task in self._tasks:
                task.cancel()
            await server.stop(0)
            self.jobs.clear()

    def assign(self, request_id: str, prompt: list[int], num_tokens: int, params: SamplingParams):
        """A request of central ingress."""
        output = self.oracle(prompt, num_tokens, params)
        sampling = pb.Sampling(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, seed=params.seed
        )
        self._begin(Job(request_id, prompt, output, sampling, is_central=True))

    def send(self, *messages: pb.Down) -> None:
        assert self._send is not None
        self._send(list(messages))

    async def _connect(self, requests, context) -> None:
        peer = peer_of(context)
        self.tokens.append(peer.token)
        self.names.append(peer.common_name)
        outbox: asyncio.Queue[bytes | None] = asyncio.Queue()

        def send(messages: list[pb.Down]) -> None:
            for message in messages:
                outbox.put_nowait(message.SerializeToString())

        reader = asyncio.create_task(self._read(requests, send, outbox))
        try:
            while (data := await outbox.get()) is not None:
                await context.write(data)
        finally:
            reader.cancel()
            self._send = None
            self.connected.clear()
            for task in self._tasks:
                task.cancel()
            self.jobs.clear()

    async def _read(self, requests, send, outbox) -> None:
        async for data in requests:
            up = pb.Up.FromString(data)
            match up.WhichOneof("message"):
                case "hello":
                    self.hellos.append(up.hello)
                    if self.refuse is not None:
                        send([pb.Down(refused=pb.Refused(reason=self.refuse))])
                        outbox.put_nowait(None)
                        return
                    welcome = LIMITS.welcome(
                        "edge", "big", self.eos_token_ids, trusted=self.trusted
                    )
                    send([pb.Down(welcome=welcome)])
                    self._send = lambda messages: send(self.mangling.apply(messages))
                    self._end = lambda: outbox.put_nowait(None)
                    self.connected.set()
                case "open":
                    self.open_request(up.open)
                case "draft":
                    self._draft(up.draft)
                case "ahead" if up.ahead.lines:
                    self.ahead.append(up.ahead)
                case "close":
                    self.closes.append(up.close.request_id)
                    self.jobs.pop(up.close.request_id, None)

    def open_request(self, message: pb.Open) -> None:
        self.opens.append(message)
        if self.refuse_opens is not None:
            refused = pb.Refused(
                request_id=message.request_id, reason="not now", code=self.refuse_opens
            )
            self.send(pb.Down(refused=refused))
            return
        params = SamplingParams(
            message.sampling.temperature,
            message.sampling.top_p,
            message.sampling.top_k,
            message.sampling.seed,
        )
        prompt = list(message.prompt_token_ids)
        output = self.oracle(prompt, message.max_tokens, params)
        stops = set(message.stop_token_ids)
        for i, token in enumerate(output):
            if token in stops:
                output = output[: i + 1]
                break
        self.send(pb.Down(opened=pb.Opened(request_id=message.request_id)))
        wanted = message.num_logprobs if message.HasField("num_logprobs") else None
        job = Job(message.request_id, prompt, output, message.sampling, num_logprobs=wanted)
        self._begin(job)

    def _begin(self, job: Job) -> None:
        self.jobs[job.request_id] = job
        task = asyncio.create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job) -> None:
        # The first token is sampled after the prompt alone.
        pending = [] if job.is_central else [self._verdict(job, 0, [])]
        while job.num_done < len(job.output):
            job.num_rounds += 1
            asked = min(self.draft_len, len(job.output) - job.num_done)
            order = ExpectedDraft(
                0, job.num_rounds, asked, weighted=job.sampling.ratio and self.trusted
            )
            job.draft = asyncio.get_running_loop().create_future()
            assign = pb.Assign(
                request_id=job.request_id,
                epoch=0,
                round=job.num_rounds,
                prefix_len=job.length,
                num_draft_tokens=asked,
                min_survival=self.min_survival,
            )
            if job.is_central and job.num_rounds == 1:
                assign.prefix_token_ids.extend(job.prompt)
                assign.sampling.CopyFrom(job.sampling)
            # Verdict and assignment side by side, so that mangling can swap them.
            self.send(*pending, pb.Down(assign=assign))
            tokens = []
            if self.wait_for_drafts:
                draft = await job.draft
                try:
                    check_draft(draft, LIMITS, order, job.digest)
                    tokens = list(draft.token_ids)
                except Exception as error:
                    self.problems.append(str(error))
            await asyncio.sleep(self.delay_s)
            due = job.output[job.num_done :]
            accepted = 0
            while accepted < len(tokens) and accepted < len(due) - 1:
                if tokens[accepted] != due[accepted]:
                    break
                accepted += 1
            job.num_accepted += accepted
            pending = [self._verdict(job, accepted, tokens)]
            self._num_verdicts += 1
            if self._num_verdicts == self.break_after:
                self._end()
                return
        self.finished[job.request_id] = job
        self.jobs.pop(job.request_id, None)
        self.send(*pending)

    def _verdict(self, job: Job, accepted: int, tokens: list[int]) -> pb.Down:
        start = job.length
        emitted = job.output[job.num_done : job.num_done + accepted + 1]
        job.num_done += len(emitted)
        job.digest.extend(emitted)
        is_last = job.num_done == len(job.output)
        verdict = pb.VerifiedTokens(
            request_id=job.request_id,
            start=start,
            token_ids=emitted,
            num_accepted=accepted,
            num_drafted=len(tokens),
            finish_reason="length" if is_last else "",
        )
        if job.num_logprobs is not None:
            told = [logprob_of(start + i, t, job.num_logprobs) for i, t in enumerate(emitted)]
            verdict.logprobs.extend(encode_logprobs(told))
        return pb.Down(verdict=verdict)

    def _draft(self, draft: pb.DraftTokens) -> None:
        self.drafts.append(draft)
        job = self.jobs.get(draft.request_id)
        if job is None or job.draft is None or job.draft.done():
            return
        if draft.round == job.num_rounds:
            job.draft.set_result(draft)
