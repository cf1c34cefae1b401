"""A further node: vLLM's workers on this machine, for an engine whose process is on the first.

vLLM's workers here do not notice when that engine is gone: they would wait for its next step for
ever. The store through which all workers have found each other lives in the first of them, so it is
asked, again and again, whether it is still there.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.vllm.arguments import failures_in_one_line, vllm_config

_log = logging.getLogger(__name__)

_POLL_S = 1.0
_ANSWER_S = 10.0
"""A store that has not answered for so long is gone, and the engine with it."""


def run_node(config: EngineConfig, announce: Callable[[str], None]) -> None:
    """Run the node's workers until this process is told to end. An engine that is started again
    gets new ones.

    announce: called when they have joined. Raises: ConfigError where they cannot be started.
    """
    for told in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(told, _end)
    try:
        with failures_in_one_line(config):
            settings = vllm_config(config)
            while True:
                _run_workers(settings, announce)
    finally:
        # One that was being started is not yet the executor's, and may wait for the first node in
        # a call that no SIGTERM ends; Python would wait for it in turn.
        for worker in multiprocessing.active_children():
            worker.kill()


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit()


def _run_workers(settings: Any, announce: Callable[[str], None]) -> None:
    """For as long as the engine lives that they belong to. settings: vLLM's."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    parallel = settings.parallel_config
    executor = MultiprocExecutor(settings, monitor_workers=False)
    try:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            parallel.master_addr,
            parallel.master_port,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
        )
        announce(f"node {parallel.node_rank} has joined")
        workers = [worker.proc.sentinel for worker in executor.workers]
        while not wait(workers, _POLL_S):
            store.num_keys()
        _log.error("a worker has ended")
        executor.shutdown()
        # The engine fails with its next step. Until then its store would lead new ones astray.
        while True:
            time.sleep(_POLL_S)
            store.num_keys()
    except torch.distributed.DistError:
        _log.error("the engine on the first node is gone; waiting for the next")
    finally:
        executor.shutdown()
