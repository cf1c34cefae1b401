"""Parallel jobs, in processes or on a Ray cluster, with results in the order of the jobs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_REACHED_S = 5.0
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Thread numbers of NumPy's libraries, which read them when they are loaded."""


class WorkersError(RuntimeError):
    """The jobs cannot be run. The message is one line."""


class Workers:
    """Runs `num` jobs at a time in an executor, which pickles them, or in this process."""

    def __init__(self, num: int = 1, executor: Executor | None = None) -> None:
        self.num = num
        self._executor = executor

    def map(self, call: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
        """Return results in order; the first job's exception, in order, is raised."""
        if self._executor is None:
            return map(call, items)
        return self._executor.map(call, items)

    def submit(self, call: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Return the job's future; in this process it is done."""
        if self._executor is not None:
            return self._executor.submit(call, *args, **kwargs)
        done: Future[_R] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


HERE = Workers()


@contextmanager
def workers(num: int | None = None, ray: str | None = None) -> Iterator[Workers]:
    """Yield `num` workers, by default one a core; one is this process. Raises: WorkersError.

    ray: address of a cluster to use instead, whole. Unfinished jobs are cancelled at the end."""
    if ray is not None:
        if num is not None:
            raise WorkersError("a Ray cluster is used whole: take --workers or --ray, not both")
        with _cluster(ray) as cluster:
            yield cluster
        return
    num = num or _num_cores()
    if num == 1:
        yield HERE
        return
    with _processes(num) as pool:
        yield Workers(num, pool)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _processes(num: int) -> Iterator[Executor]:
    before = set(multiprocessing.active_children())
    others = {name: os.environ.get(name) for name in _THREADS}
    # One thread each, since the processes share the cores.
    os.environ |= dict.fromkeys(_THREADS, "1")
    # A forked process could inherit held locks.
    pool = ProcessPoolExecutor(num, multiprocessing.get_context("spawn"), _follow_parent)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise WorkersError(
            "a worker process was killed: with too little memory take fewer --workers"
        ) from error
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        for name, value in others.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _follow_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _cluster(address: str) -> Iterator[Workers]:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise WorkersError("--ray needs ray, which is not installed: pip install ray") from error
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon:
            # Ray itself would retry for minutes.
            socket.create_connection((host, int(port)), _REACHED_S).close()
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())
        raise WorkersError(f"no Ray cluster can be reached at {address!r}: {what}") from error
    try:
        yield Workers(max(1, int(ray.cluster_resources().get("CPU", 1))), _RayExecutor(ray))
    finally:
        ray.shutdown()


class _RayExecutor(Executor):
    """Executor of Ray tasks whose futures raise the jobs' own exceptions."""

    def __init__(self, ray: Any) -> None:
        self._run = ray.remote(_call)
        self._task_error = ray.exceptions.RayTaskError

    def submit(self, call: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        found: Future[_R] = Future()

        def settle(task: Future[_R]) -> None:
            if not found.set_running_or_notify_cancel():
                return
            error = task.exception()
            if error is None:
                found.set_result(task.result())
            else:
                found.set_exception(error.cause if isinstance(error, self._task_error) else error)

        self._run.remote(call, args, kwargs).future().add_done_callback(settle)
        return found


def _call(call: Callable[..., _R], args: Iterable[Any], kwargs: dict[str, Any]) -> _R:
    return call(*args, **kwargs)
