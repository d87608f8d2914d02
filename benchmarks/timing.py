"""What the benchmarks share: how calls are timed on a GPU."""

from __future__ import annotations

import datetime
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

#: A ratio of two times over this counts as level: a convention, for how far a row repeats was not measured.
LEVEL = 0.98


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


def device_times(calls: Mapping[str, Callable], sets: Sequence[Sequence], rounds: int,
                 own_sets: Mapping[str, Sequence[Sequence]] | None = None) -> dict[str, list[float]]:
    """us a call on the device, per contender and round; contenders take turns (`by_turns`), each once untimed
    before it is timed. `own_sets`: of contenders that take other arguments, as many sets."""
    own_sets = own_sets or {}
    graphs = {name: capture(call, own_sets.get(name, sets)) for name, call in calls.items()}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def timed(graph: torch.cuda.CUDAGraph) -> float:
        graph.replay()
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) * 1e3 / len(sets)

    return by_turns({name: lambda graph=graph: timed(graph) for name, graph in graphs.items()}, rounds)


def by_turns(timers: Mapping[str, Callable[[], float]], rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """What each timer says, per round. What ran before a contender shows in its time (clock rate, caches), so
    every round has an order of its own, drawn at random."""
    draw = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name in draw.sample(list(timers), len(timers)):
            times[name].append(timers[name]())
    return times


def paired(times: Mapping[str, Sequence[float]], name: str) -> dict[str, float]:
    """Of every other contender, its time over that of `name`: the median of what the rounds say. What the
    device does over many rounds, all contenders of one round share, so this repeats where the ratio of two
    medians does not."""
    return {other: statistics.median(a / b for a, b in zip(found, times[name], strict=True))
            for other, found in times.items() if other != name}


def plain_times(calls: Mapping[str, Callable], buffers: Sequence, count: int = 100,
                rounds: int = 5) -> dict[str, list[float]]:
    """us a call, called from Python one after another, per contender and round; contenders take turns."""
    def timed(call: Callable) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            call(*buffers)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / count * 1e6

    return by_turns({name: lambda call=call: timed(call) for name, call in calls.items()}, rounds)


def sets_needed(bytes_of_one: int, most: int = 96) -> int:
    """How many sets of that size exceed the L2 cache four times, so that no call finds its own there."""
    cold = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    return min(most, max(1, -(-cold // max(bytes_of_one, 1))))


def machine() -> str:
    """Device, versions and date, for a table's title."""
    import triton

    return (f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, Triton {triton.__version__}, "
            f"{datetime.date.today()}")
