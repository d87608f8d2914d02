"""Device time of a call, for choices between ways to compute one thing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

import torch

#: Calls that one timing holds, and timings of which the median counts.
CALLS, TIMINGS = 10, 5


def may_measure(device: torch.device) -> bool:
    """Whether calls can be timed on `device` now: a GPU, outside of graph capture."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def device_microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time that `call` keeps the device busy when it finds nothing of its own in the L2 cache, as
    the layers of a model do.

    Calls are replayed from a CUDA graph, so that the host's time does not count, each behind a reduction
    over twice the cache, whose own time is taken off. Runs on a stream of its own, after what the
    current stream has been given, and waits for it.

    Raises:
        whatever `call` raises.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            cold = torch.zeros(torch.cuda.get_device_properties(device).L2_cache_size // 2, device=device)
            call()
            flush = _replays(cold.sum, stream)
            both = _replays(lambda: (cold.sum(), call()), stream)
            times = sorted(_elapsed(both, stream) - _elapsed(flush, stream) for _ in range(TIMINGS))
        torch.cuda.current_stream().wait_stream(stream)
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
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    stream.synchronize()
    gc.disable()  # what it ends may wait for the device, which a capture forbids
    try:
        # Not by torch.cuda.graph, which gives all free memory back first: the model needs that again.
        # "thread_local": what other threads of the user's do meanwhile is none of the capture's business.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(CALLS):
                call()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    graph.replay()
    return graph


def _elapsed(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Milliseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end)
