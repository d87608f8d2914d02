"""Times, kernels and memory of calls that take turns on a GPU."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Mapping

import torch
from ffn_chain import peak

from .columns import Call

#: No H200 runs at a higher clock; `_sleep` counts cycles.
_HERTZ = 2.0e9
#: A round calls a model so often that its wall time is at least this.
_LEAST_SECONDS = 0.02
_FEWEST_ROUNDS = 3


def times(calls: Mapping[str, Call], rounds: int, seconds: float, seed: int = 0) -> dict[str, dict]:
    """ms a forward on the device and by the wall clock, per contender and round, the number of rounds, and
    the contender's place in each. After `seconds` no round is begun, but there are at least three.

    What ran before a contender shows in its time (clocks, caches, memory), so the order of each round is
    drawn at random, and a contender runs once before it is timed. What the device does over many rounds, all
    contenders of a round share: compare them round by round.

    Device time is between two events around one forward. The GPU waits in front of the first until the host
    has launched it, so that the host's time is not in it. Wall time is that of calls one after another, over
    their number. The L2 cache is left as it is.
    """
    host = {name: _host_seconds(call) for name, call in calls.items()}
    found: dict[str, dict] = {name: {"device_ms": [], "wall_ms": [], "places": [], "rounds": 0}
                              for name in calls}
    draw, started = random.Random(seed), time.monotonic()
    for done in range(rounds):
        if done >= _FEWEST_ROUNDS and time.monotonic() - started > seconds:
            break
        for place, name in enumerate(draw.sample(list(calls), len(calls))):
            calls[name]()
            found[name]["device_ms"].append(_device_ms(calls[name], host[name]))
            found[name]["wall_ms"].append(_wall_ms(calls[name]))
            found[name]["places"].append(place)
            found[name]["rounds"] += 1
    return found


def untimed(calls: Mapping[str, Call], rounds: int) -> dict[str, dict]:
    """`times` where there is no GPU: the calls run, and nothing is timed."""
    for _ in range(rounds):
        for call in calls.values():
            call()
    return {name: {"rounds": rounds} for name in calls}


def _host_seconds(call: Call) -> float:
    """How long the host needs to launch a call, after one that warms it up."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    launched = time.perf_counter() - started
    torch.cuda.synchronize()
    return launched


def _device_ms(call: Call, host_seconds: float) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(min(1.5 * host_seconds + 1e-3, 0.2) * _HERTZ))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _wall_ms(call: Call) -> float:
    count = 0
    torch.cuda.synchronize()
    started = time.perf_counter()
    while count == 0 or (count < 20 and time.perf_counter() - started < _LEAST_SECONDS):
        call()
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count * 1e3


def kernels(call: Call) -> dict[str, float]:
    """Of one call, from the profiler: kernels launched, copies and fills launched, and the ms that the
    kernels run, added up."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)  # its categories tell kernels from annotations on the device's line
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    ran = [event for event in events if event.get("cat") == "kernel"]
    return {"kernels": len(ran), "copies": sum(e.get("cat") in ("gpu_memcpy", "gpu_memset") for e in events),
            "busy_ms": sum(event["dur"] for event in ran) / 1e3}


def peak_mib(call: Call) -> float:
    """Memory of a call above what is held before it: beyond weights and inputs, and what others hold."""
    return peak(call) / 2**20
