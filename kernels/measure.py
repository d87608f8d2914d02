"""Device time of a call, for choices between ways to compute one thing."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from statistics import median

import torch

#: Calls that one timing holds, and timings of which the median counts.
CALLS, TIMINGS = 10, 5

#: `by_turns`: milliseconds that one timing should hold, calls that it holds at most, and timings at most.
TURN_MS, TURN_CALLS, TURNS = 2.0, 50, 15


def may_measure(device: torch.device) -> bool:
    """Whether calls can be timed on `device` now: a GPU, outside of graph capture."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=64)
def machine(device: torch.device) -> str:
    """The device and the versions that times depend on: a part of the key of what is kept."""
    from importlib.metadata import version

    words = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        try:
            from triton import __version__ as triton
        except ImportError:
            triton = "missing"
        properties = torch.cuda.get_device_properties(device)
        words = [f"{properties.name}, {properties.multi_processor_count} cores", *words,
                 f"CUDA {torch.version.cuda}, triton {triton}"]
    elif device.type != "cpu":
        words.insert(0, torch.get_device_module(device).get_device_name(device))
    return ", ".join((*words, f"ascend-ln-fuse {version('ascend-ln-fuse')}"))


def has_events(device: torch.device) -> bool:
    """Whether `by_turns` can time calls on `device`: any accelerator whose events have times."""
    return device.type != "cpu" and hasattr(_module(device), "Event")


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of an accelerator is being recorded into a graph."""
    return bool(getattr(_module(device), "is_current_stream_capturing", lambda: False)())


def _module(device: torch.device):
    """torch.cuda or its like; None where the device has none."""
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def by_turns(calls: Sequence[Callable[[], object]], device: torch.device,
             seconds: float) -> list[list[float]]:
    """Milliseconds a call takes of a row of such calls, several timings for each of `calls`, made by turns
    so that a change of the clock rate meets all alike. What the host cannot launch as fast as the device
    works counts as the device's time.

    Every call has been made before, so that nothing is compiled here. Takes about `seconds`, but times each
    call once however long it takes.

    Raises:
        whatever a call raises.
    """
    module = _module(device)
    with module.device(device):
        once = [_row(call, 1, module) for call in calls]
        count = max(1, min(TURN_CALLS, int(TURN_MS / max(*once, 1e-3))))
        turns = min(TURNS, int(seconds * 1e3 / (count * max(sum(once), 1e-3))))
        if not turns:
            return [[ms] for ms in once]
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(turns):
            order = range(len(calls))
            for i in order if turn % 2 else reversed(order):
                times[i].append(_row(calls[i], count, module))
    return times


def replayed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`call` as a CUDA graph replays it: what the host does for it does not count.

    Raises:
        whatever `call` raises, and RuntimeError where it cannot be recorded.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return _recorded(call, stream, 1).replay


def _row(call: Callable[[], object], count: int, module) -> float:
    """Milliseconds a call of `count` calls in a row."""
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    module.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


class ColdCache:
    """What `device_microseconds` empties a GPU's L2 cache with: a reduction over twice its size, its graph of
    CALLS reductions, and the stream that all runs on. They are made when they are first needed, and serve all
    calls that are timed inside of the context; at its end nothing is kept.

        with ColdCache(device) as cold:
            times = [device_microseconds(call, cold) for call in calls]
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._give_back()

    def __enter__(self) -> ColdCache:
        return self

    def __exit__(self, *error) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self.flush: torch.cuda.CUDAGraph | None = None
        self._memory: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def stream(self) -> Iterator[torch.cuda.Stream]:
        """Inside, the stream is the current one: behind what the caller's has been given, and waited for."""
        with torch.cuda.device(self.device):
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    if self.flush is None:
                        size = torch.cuda.get_device_properties(self.device).L2_cache_size // 2
                        self._memory = torch.zeros(size, device=self.device)
                        self.flush = _replays(self.empty, stream)
                    yield stream
            except BaseException:  # which may have spoilt the stream, or want the memory
                self._give_back()
                raise
            torch.cuda.current_stream().wait_stream(stream)

    def empty(self) -> None:
        """Empty the cache once, inside of `stream`."""
        self._memory.sum()


def device_microseconds(call: Callable[[], object], cold: ColdCache) -> float:
    """Median time that `call` keeps the device busy when it finds nothing of its own in the L2 cache, as
    the layers of a model do.

    Calls are replayed from a CUDA graph, so that the host's time does not count, each after the cache was
    emptied. What that alone takes is timed by turns with it, so that a change of the clock rate meets both,
    and taken off.

    Raises:
        whatever `call` raises.
    """
    with cold.stream() as stream:
        call()
        both = _replays(lambda: (cold.empty(), call()), stream)
        times = [_elapsed(both, stream) - _elapsed(cold.flush, stream) for _ in range(TIMINGS)]
    return max(median(times) * 1e3 / CALLS, 0.01)


def host_microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time that `call` keeps the host busy, the device's not waited for."""
    times = []
    for _ in range(TIMINGS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    torch.cuda.synchronize(device)
    return median(times)


def _replays(call: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of CALLS calls, recorded on `stream`, the current one, and replayed once."""
    graph = _recorded(call, stream, CALLS)
    graph.replay()
    return graph


def _recorded(call: Callable[[], object], stream: torch.cuda.Stream, count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls, recorded on `stream`, the current one."""
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    stream.synchronize()
    gc.disable()  # what it ends may wait for the device, which a capture forbids
    try:
        # Not by torch.cuda.graph, which gives all free memory back first: the model needs that again.
        # "thread_local": what other threads of the user's do meanwhile is none of the capture's business.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(count):
                call()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


def _elapsed(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Milliseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end)
