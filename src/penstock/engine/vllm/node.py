"""vLLM's workers on a further node, for an engine on the first one.

They would wait forever for an engine that is gone. The workers' rendezvous store lives in the first
of them, so it is polled."""

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
"""Convention: short beside the start of workers."""
_ANSWER_S = 10.0
"""Timeout after which the store, and with it the engine, is taken to be gone."""


def run_node(config: EngineConfig, announce: Callable[[str], None]) -> None:
    """Run the node's workers until this process is told to end.

    A restarted engine gets new ones. announce: called when they have joined.

    Raises: ConfigError where they cannot be started."""
    for told in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(told, _end)
    try:
        with failures_in_one_line(config):
            settings = vllm_config(config)
            while True:
                _run_workers(settings, announce)
    finally:
        # A worker that is starting is not the executor's yet, and may block in a call that SIGTERM
        # does not end; Python would wait for it.
        for worker in multiprocessing.active_children():
            worker.kill()


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit()


def _run_workers(settings: Any, announce: Callable[[str], None]) -> None:
    """Run the workers while their engine lives. settings: vLLM's."""
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
        # The engine fails with its next step; until then new workers would join the old store.
        while True:
            time.sleep(_POLL_S)
            store.num_keys()
    except torch.distributed.DistError:
        _log.error("the engine on the first node is gone; waiting for the next")
    finally:
        executor.shutdown()
