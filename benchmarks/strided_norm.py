"""LayerNorm of q inside a packed qkv, side by side, on an NVIDIA GPU.

    python benchmarks/strided_norm.py [--json FILE]

The site is the one of SeedVR's attention: `q = qkv.view(50220, 3, 3, 128).unbind(1)[0]`, a [50220, 3,
128] view of rows that are 1152 elements apart, then LayerNorm over the 128 in bf16.

Device time. Each contender is captured once as a CUDA graph of one call for every set of buffers; the
sets together are several times the L2 cache, so that no call finds its input there. One sample is the
time between two events around a replay, divided by the calls in it: launch gaps are out of it, every
kernel that a contender launches is in it. Contenders take turns, round after round, so that a drift of
the clock meets all of them alike. Shown are the median and the 10th and 90th percentile. Beside it stands
the median of triton.testing.do_bench: single calls, each after the cache was overwritten, events round
the call; it holds what a launch costs the GPU, and the host's time where that is the longer.

Host time. N calls without a synchronisation, divided by N; N is small enough that the launch queue never
fills, so it is the time that Python, PyTorch and the driver need for one call.

Prints figures, asserts nothing about time.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

EPS = 1e-5
SLOT = 0  # q; k and v are 1 and 2


@dataclass
class Row:
    """One contender: `call(packed)` or, for a copy, `call(packed, out)`."""

    name: str
    call: Callable | None
    into: bool = False
    samples: list[float] = field(default_factory=list)  # us a call
    do_bench_us: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def summary(self) -> dict:
        tenths = statistics.quantiles(self.samples, n=10)
        found = {"name": self.name, "median_us": self.median, "p10_us": tenths[0],
                 "p90_us": tenths[-1], "samples": len(self.samples)}
        return found if self.do_bench_us is None else {**found, "do_bench_us": self.do_bench_us}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if not torch.cuda.is_available() or torch.version.cuda is None:
        print("strided_norm.py: needs an NVIDIA GPU; none was found", file=sys.stderr)
        return 1
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    shape = (-1, 3, args.heads, args.dim)
    one = args.rows * args.heads * args.dim * dtype.itemsize
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = max(2, -(-4 * cache // one))
    packed = [torch.randn(args.rows, 3 * args.heads * args.dim, device="cuda").to(dtype)
              for _ in range(sets)]
    weight, bias = (torch.randn(args.dim, device="cuda").to(dtype) for _ in range(2))

    def view(qkv):
        return qkv.view(shape).unbind(1)[SLOT]

    def plain(qkv):
        return F.layer_norm(view(qkv), (args.dim,), weight, bias, EPS)

    def cast_chain(qkv):
        return F.layer_norm(view(qkv).float(), (args.dim,), weight.float(), bias.float(), EPS).to(dtype)

    with torch.no_grad():
        tuned = {"mode": "max-autotune-no-cudagraphs"}
        compiled = {
            "torch.compile": _compile(plain, args.dynamic),
            "torch.compile, cast chain": _compile(cast_chain, args.dynamic),
            "max-autotune": _compile(plain, args.dynamic, **tuned),
            "max-autotune, cast chain": _compile(cast_chain, args.dynamic, **tuned),
            "ours": _ours(plain, args.dynamic),
            "ours, cast chain": _ours(cast_chain, args.dynamic),
        }
        errors = _errors({"eager": plain, "eager, cast chain": cast_chain, **compiled}, packed[0],
                         view, weight, bias)
        rows = [
            Row("copy_ of the view", lambda qkv, out: out.copy_(view(qkv)), into=True),
            Row("copy_, contiguous", lambda qkv, out: out.view(-1).copy_(qkv.view(-1)[:out.numel()]),
                into=True),
            Row("eager", plain),
            Row("eager, cast chain", cast_chain),
            *(Row(name, call) for name, call in compiled.items()),
        ]
        _device_times(rows, packed, one_shape=view(packed[0]), rounds=args.rounds)
        host = _host_times(plain, view, packed[0], weight, bias, args)

    result = {
        "what": f"LayerNorm over {args.dim} of a [{args.rows}, {args.heads}, {args.dim}] view of "
                f"[{args.rows}, {3 * args.heads}, {args.dim}], {args.dtype}"
                + (", dynamic shapes" if args.dynamic else ""),
        "bytes_moved_once": 2 * one, "buffer_sets": sets,
        "machine": _machine(), "date": datetime.datetime.now(datetime.timezone.utc).isoformat()[:19],
        "device": [row.summary() for row in rows], "host": host, "max_error_vs_float64": errors,
    }
    by_name = {row.name: row.median for row in rows}
    result["ratios"] = {
        "ours / copy_ of the view": by_name["ours"] / by_name["copy_ of the view"],
        "ours / copy_ of as many contiguous bytes": by_name["ours"] / by_name["copy_, contiguous"],
        "eager / ours": by_name["eager"] / by_name["ours"],
        "torch.compile / ours": by_name["torch.compile"] / by_name["ours"],
        "max-autotune / ours": by_name["max-autotune"] / by_name["ours"],
    }
    _print(result, 2 * one)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=2)
    return 0


def _arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=50220)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=40, help="samples are 5 times as many")
    parser.add_argument("--calls", type=int, default=100, help="calls in a host-time sample")
    parser.add_argument("--dynamic", action="store_true", help="compile for any number of rows")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def _compile(function: Callable, dynamic: bool = False, **how) -> Callable:
    """`torch.compile` of a copy of `function`: contenders that share a code object would share Dynamo's
    cache, and each call would look through the entries of all."""
    code = function.__code__.replace()
    copied = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    return torch.compile(copied, dynamic=dynamic or None, **how)


def _ours(function: Callable, dynamic: bool) -> Callable:
    return _compile(function, dynamic, backend="ascend_ln_fuse", options={"report": "off"})


def _graph_of(function: Callable, dynamic: bool, *args) -> Callable:
    """The call that `function`, compiled with our backend, makes of its graph for `args`: what is left
    when Dynamo's guards are taken away."""
    from ascend_ln_fuse.backend import ascend_ln_fuse

    seen = []

    def backend(gm, inputs):
        graph = ascend_ln_fuse(gm, inputs, options={"report": "off"})

        def keep(*values):
            seen.append((graph, values))
            return graph(*values)

        return keep

    _compile(function, dynamic, backend=backend)(*args)
    (graph, values), = seen
    return lambda: graph(*values)


def _errors(contenders, qkv, view, weight, bias) -> dict[str, float]:
    """Largest error of each against float64; the first call of each, so that all get compiled."""
    exact = F.layer_norm(view(qkv).double(), weight.shape, weight.double(), bias.double(), EPS)
    return {name: (call(qkv).double() - exact).abs().max().item() for name, call in contenders.items()}


# -- device time


def _device_times(rows: list[Row], packed: list, one_shape, rounds: int) -> None:
    import triton.testing

    outs = [torch.empty_like(one_shape, memory_format=torch.contiguous_format) for _ in packed]
    graphs = [_capture(row, packed, outs) for row in rows]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(rounds):
        for row, (graph, _) in zip(rows, graphs):
            graph.replay()  # brings the clocks and the cache to this contender's state
            for _ in range(5):
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                if number:
                    row.samples.append(start.elapsed_time(stop) * 1e3 / len(packed))
    for row in rows:
        arguments = (packed[0], outs[0]) if row.into else (packed[0],)
        call = functools.partial(row.call, *arguments)
        row.do_bench_us = 1e3 * triton.testing.do_bench(call, return_mode="median")


def _capture(row: Row, packed: list, outs: list):
    """A CUDA graph of one call a buffer set, and the outputs, all alive so that none is reused."""
    def round_trip():
        if row.into:
            return [row.call(x, out) for x, out in zip(packed, outs)]
        return [row.call(x) for x in packed]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            round_trip()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = round_trip()
    return graph, results


# -- host time


def _host_times(plain, view, qkv, weight, bias, args) -> list[dict]:
    q = view(qkv)
    ours, through = _ours(plain, args.dynamic), _compile(plain, args.dynamic, backend="eager")
    contenders = {
        "F.layer_norm(q), eager": lambda: F.layer_norm(q, (args.dim,), weight, bias, EPS),
        "view, unbind, F.layer_norm, eager": lambda: plain(qkv),
        "the fused graph": _graph_of(plain, args.dynamic, qkv),
        'torch.compile(backend="eager")': lambda: through(qkv),
        'torch.compile(backend="ascend_ln_fuse")': lambda: ours(qkv),
    }
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(31):
        for name, call in contenders.items():
            torch.cuda.synchronize()
            started = time.perf_counter_ns()
            for _ in range(args.calls):
                call()
            spent = time.perf_counter_ns() - started
            if number:
                samples[name].append(spent / args.calls / 1e3)
    torch.cuda.synchronize()
    return [Row(name, None, samples=values).summary() for name, values in samples.items()]


# -- output


def _machine() -> dict[str, str]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {"gpu": torch.cuda.get_device_name(0), "multiprocessors": str(properties.multi_processor_count),
            "l2_mib": str(properties.L2_cache_size >> 20), "torch": torch.__version__,
            "cuda": str(torch.version.cuda), "triton": triton.__version__,
            "python": sys.version.split()[0]}


def _print(result: dict, moved: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    machine = result["machine"]
    console.print(f"\n[bold]{result['what']}[/bold]", highlight=False)
    console.print(f"{machine['gpu']}, torch {machine['torch']}, CUDA {machine['cuda']}, triton "
                  f"{machine['triton']}, {result['date']} UTC", style="dim", highlight=False)
    ours = next(row["median_us"] for row in result["device"] if row["name"] == "ours")
    table = Table(title="device time of one call, us", title_justify="left")
    for name in ("contender", "median", "10% .. 90%", "TB/s *", "time / ours", "do_bench",
                 "error vs float64"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for row in result["device"]:
        error = result["max_error_vs_float64"].get(row["name"])
        table.add_row(row["name"], f"{row['median_us']:.1f}",
                      f"{row['p10_us']:.1f} .. {row['p90_us']:.1f}",
                      f"{moved / row['median_us'] / 1e6:.2f}", f"{row['median_us'] / ours:.2f}",
                      f"{row['do_bench_us']:.1f}", "" if error is None else f"{error:.2e}")
    console.print(table)
    console.print(f"* {moved / 2**20:.1f} MiB, each element read once and written once, over the time. "
                  f"{result['buffer_sets']} buffer sets in turn.", style="dim", highlight=False)
    table = Table(title="host time of one call, us", title_justify="left")
    for name in ("call", "median", "10% .. 90%"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for row in result["host"]:
        table.add_row(row["name"], f"{row['median_us']:.1f}",
                      f"{row['p10_us']:.1f} .. {row['p90_us']:.1f}")
    console.print(table)
    for name, value in result["ratios"].items():
        console.print(f"{name}: {value:.2f}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
