"""Drafter of a draft server, and its thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.config import DrafterWeights
from penstock.core.drafting.lines import TopWeights
from penstock.core.drafting.sessions import DraftingSessions, Proposer, SessionDraft, SessionLines
from penstock.engine.backends import load_runner
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.proposers import LookupProposer, ModelProposer
from penstock.engine.models.config import DecoderConfig
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.transport.checks import PROTOCOL_VERSION
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import WEIGHT_SUM, truncate, weight_rows

_NUM_WEIGHTS = 32
"""Tokens of a truncated distribution: 64 would double a draft's bytes for 0.001 of acceptance."""
_LINES_EVERY_S = 0.005
"""Period of drafts ahead: a small model drafts faster than messages should come."""

Command = Callable[[DraftingSessions], None]


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """Options of a draft server's drafter.

    model: a checkpoint, whose tokenizer reads texts. uses_model: False for n-gram look-up, which
    needs the tokenizer alone. device, weights: as of `DrafterConfig`."""

    name: str
    model: Path
    uses_model: bool = True
    device: str = "cpu"
    dtype: str = "auto"
    weights: DrafterWeights = "stored"
    max_draft_tokens: int = 16
    takes_assignments: bool = True


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """Loaded drafter with its registration and tokenizer."""

    sessions: DraftingSessions
    hello: pb.Hello
    tokenizer: Tokenizer


def load_drafter(options: DrafterOptions) -> LoadedDrafter:
    """Load a drafter. Raises: CheckpointError for one that cannot be used."""
    tokenizer = load_tokenizer(options.model)
    proposer: Proposer
    if options.uses_model:
        runner = load_runner(
            options.model, options.dtype, rounding=options.weights, device=options.device
        )
        room = runner.num_blocks * runner.block_size
        longest = min(runner.config.max_position_embeddings, room)
        proposer = ModelProposer(ModelDrafter(options.name, runner, longest), quantise)
    else:
        vocab_size = DecoderConfig.from_pretrained(options.model).vocab_size
        proposer = LookupProposer(vocab_size, WEIGHT_SUM)
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_digest=tokenizer.digest,
        model_name=options.name,
        max_draft_tokens=options.max_draft_tokens,
        takes_assignments=options.takes_assignments,
    )
    sessions = DraftingSessions(proposer, options.max_draft_tokens)
    return LoadedDrafter(sessions, hello, tokenizer)


def quantise(draft_probs: torch.Tensor) -> list[TopWeights]:
    """Return the truncated distributions that tokens are sampled from. draft_probs: [rows, V]."""
    cut = truncate(draft_probs.cpu().numpy(), _NUM_WEIGHTS)
    return [TopWeights(*row) for row in weight_rows(*cut)]


class DraftingThread:
    """Runs sessions between commands, and reports on the event loop.

    on_drafts: called with finished drafts; on_lines: periodically, with drafts ahead."""

    def __init__(
        self,
        sessions: DraftingSessions,
        on_drafts: Callable[[list[SessionDraft]], None],
        on_lines: Callable[[list[SessionLines]], None],
    ) -> None:
        self._sessions = sessions
        self._on_drafts = on_drafts
        self._on_lines = on_lines
        self._told_at = 0.0
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the exception that ends the thread, if one does."""

    @property
    def num_ahead(self) -> int:
        return self._sessions.num_ahead

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Queue a command for the thread."""
        self._commands.put(command)

    async def stop(self) -> None:
        """End the thread after its current step."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self.failed.cancel()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _serve(self) -> None:
        while True:
            is_idle = not self._sessions.is_busy
            if is_idle or time.monotonic() >= self._told_at + _LINES_EVERY_S:
                self._tell_lines()
            while is_idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command(self._sessions)
                is_idle = False
            drafts = self._sessions.step()
            if drafts:
                self._loop.call_soon_threadsafe(self._on_drafts, drafts)

    def _tell_lines(self) -> None:
        self._told_at = time.monotonic()
        found = self._sessions.take_lines()
        if found:
            self._loop.call_soon_threadsafe(self._on_lines, found)
