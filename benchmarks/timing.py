"""What the benchmarks share: how calls are timed on a GPU."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def capture(call: Callable, sets: Sequence[Sequence]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call for each set of arguments."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for buffers in sets:
                call(*buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(*buffers) for buffers in sets]
    graph.kept = kept  # results stay alive, so that memory is not reused between the calls
    return graph


def device_times(calls: Mapping[str, Callable], sets: Sequence[Sequence],
                 rounds: int) -> dict[str, list[float]]:
    """us a call on the device, per contender and round; contenders take turns."""
    graphs = {name: capture(call, sets) for name, call in calls.items()}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            graph.replay()
            events[0].record()
            graph.replay()
            events[1].record()
            events[1].synchronize()
            times[name].append(events[0].elapsed_time(events[1]) * 1e3 / len(sets))
    return times


def plain_time(call: Callable, buffers: Sequence, calls: int = 100, rounds: int = 5,
               of: Callable = statistics.median) -> float:
    """us a call, called from Python one after another: `of` the times of `rounds`."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call(*buffers)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / calls * 1e6)
    return of(times)


def sets_needed(bytes_of_one: int, most: int = 96) -> int:
    """How many sets of that size exceed the L2 cache four times, so that no call finds its own there."""
    cold = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    return min(most, max(1, -(-cold // max(bytes_of_one, 1))))


def machine() -> str:
    """Device, versions and date, for a table's title."""
    import triton

    return (f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, Triton {triton.__version__}, "
            f"{datetime.date.today()}")
