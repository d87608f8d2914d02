"""Device time of a call, for choices between ways to compute one thing."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

#: Calls that one timing holds, and timings of which the median counts.
CALLS, TIMINGS = 10, 5


def may_measure(device: torch.device) -> bool:
    """Whether calls can be timed on `device` now: a GPU, outside of graph capture."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def device_microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time that `call` keeps the device busy, with its inputs as warm in the cache as they are
    after a call.

    Calls are replayed from a CUDA graph, so that the host's time does not count. Runs `call` on a stream
    of its own, after what the current stream has been given, and waits for it.

    Raises:
        whatever `call` raises.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": what other threads of the user's do meanwhile is none of the capture's business.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(CALLS):
                    call()
            graph.replay()
            times = []
            for _ in range(TIMINGS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / CALLS)
        torch.cuda.current_stream().wait_stream(stream)
    return median(times)
