"""The thread in which a drafter computes, so that the event loop never waits for a model."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from penstock.engine.drafters.sessions import DraftingSessions, SessionDraft

Command = Callable[[DraftingSessions], None]


class DraftingThread:
    """Runs sessions between commands, and says on the event loop what comes of them.

    on_drafts: called on the loop with finished drafts, in order
    """

    def __init__(
        self, sessions: DraftingSessions, on_drafts: Callable[[list[SessionDraft]], None]
    ) -> None:
        self._sessions = sessions
        self._on_drafts = on_drafts
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the exception that ends the thread, if one does."""

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Have the thread carry out a command, after all that were posted before."""
        self._commands.put(command)

    async def stop(self) -> None:
        """End the thread after the step that it is at."""
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
            while is_idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command(self._sessions)
                is_idle = False
            drafts = self._sessions.step()
            if drafts:
                self._loop.call_soon_threadsafe(self._on_drafts, drafts)
