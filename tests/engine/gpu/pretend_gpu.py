"""A GPU that is none: what is asked of CUDA happens on the CPU, and what is captured is replayed
operation by operation, into the same memory. So a number that a graph took from the host and
kept, or one that it asks of the device while it is captured, shows without a GPU.

It is as late as it can be: in the stretches of work that are `queued`, nothing is done before the
host waits for it. So what the host overwrites before the device has read it shows, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from penstock.engine.executor import LocalExecutor
from penstock.engine.gpu import graphs, torch_operations
from penstock.engine.gpu.executor import GraphExecutor

_LOOKS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero"}


class _OnTheCpu(TorchFunctionMode):
    """Tensors for the GPU are made on the CPU, where memory has no need to be page-locked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return func(*tree_map(_elsewhere, args), **tree_map(_elsewhere, kwargs))


def _elsewhere(value: Any) -> Any:
    is_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_gpu else value


class FakeGraph(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.num_replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in _LOOKS, f"{func} looks at what is not there yet"
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.num_replays += 1
        if Queue.current is not None and Queue.current.puts_off:
            Queue.current.put(self._carry_out)
        else:
            self._carry_out()

    @torch.inference_mode()
    def _carry_out(self) -> None:
        for func, args, kwargs, out in self._calls:
            if _memories(out) <= _memories((args, kwargs)):
                func(*args, **kwargs)
            else:
                _again(func, args, kwargs, out)


def _memories(values: Any) -> set[int]:
    """Where all tensors among some values lie."""
    tensors = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage().data_ptr() for t in tensors}


class Queue(TorchDispatchMode):
    """Work that is done when somebody waits for it. Results have memory at once, and numbers then;
    what writes into its arguments writes then."""

    current: ClassVar[Queue | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], object]] = []
        self._num_done = 0
        self.puts_off = False

    @property
    def num_put(self) -> int:
        return self._num_done + len(self._work)

    def put(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def finish(self, number: int | None = None) -> None:
        """All work, or the first so many pieces of it."""
        most = len(self._work) if number is None else max(0, number - self._num_done)
        now, self._work = self._work[:most], self._work[most:]
        self._num_done += len(now)
        with torch.utils._python_dispatch._disable_current_modes(), torch.inference_mode():
            for work in now:
                work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.put(partial(func, *args, **kwargs))
            return args[0]
        out = func(*args, **kwargs)
        given = _memories((args, kwargs))
        if given and not _memories(out) <= given:
            self.put(partial(_again, func, args, kwargs, out))
        return out


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        old.copy_(new)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, torch.device("cpu"))


class _Event:
    def __init__(self, **_: Any) -> None:
        self._number = 0

    def record(self) -> None:
        self._number = 0 if Queue.current is None else Queue.current.num_put

    def synchronize(self) -> None:
        if Queue.current is not None:
            Queue.current.finish(self._number)

    def elapsed_time(self, other: _Event) -> float:
        return 1.0


def _finish() -> None:
    if Queue.current is not None:
        Queue.current.finish()


class _Stream:
    def __init__(self, *_: Any) -> None:
        self.cuda_stream = id(self)

    def wait_stream(self, other: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        _finish()


@contextlib.contextmanager
def queued(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a `GraphExecutor` starts is put off, in this thread; what it does the ordinary way
    waits for it all first, and so does memory that is made."""
    Queue.current = queue = Queue()

    def put_off(really: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            queue.puts_off = True
            with queue:
                return really(*args, **kwargs)

        return method

    def at_once(really: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            queue.finish()
            before, queue.puts_off = queue.puts_off, False
            with torch.utils._python_dispatch._disable_current_modes():
                result = really(*args, **kwargs)
            queue.puts_off = before
            return result

        return method

    for kind, name, way in (
        (GraphExecutor, "_verify_batch", put_off),
        (LocalExecutor, "_verify_batch", at_once),
        (GraphExecutor, "_replayed", at_once),
        (graphs._Step, "__init__", at_once),
    ):
        monkeypatch.setattr(kind, name, way(getattr(kind, name)))
    try:
        yield
        queue.finish()
    finally:
        Queue.current = None


@contextlib.contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.device("cuda")` works meanwhile, in this thread."""

    @contextlib.contextmanager
    def graph(capture: FakeGraph, **_: Any) -> Iterator[None]:
        with torch.utils._python_dispatch._disable_current_modes(), capture:
            yield

    @contextlib.contextmanager
    def stream(_: _Stream) -> Iterator[None]:
        """Only ever used to capture: at once."""
        _finish()
        with torch.utils._python_dispatch._disable_current_modes():
            yield

    stands_for = {
        "is_available": lambda: True,
        "mem_get_info": lambda device: (1 << 33, 1 << 33),
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": FakeGraph,
        "graph": graph,
        "stream": stream,
        "current_stream": lambda device=None: _Stream(),
        "synchronize": lambda device=None: _finish(),
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: None,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
        "get_device_name": lambda device: "a GPU that is none",
    }
    for name, stand_in in stands_for.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "Generator", _Generator)
    # On the CPU NumPy does it, of which a graph sees nothing.
    monkeypatch.setattr(torch_operations, "lowest_argmax", lambda scores: scores.argmax(dim=-1))
    with _OnTheCpu():
        yield
