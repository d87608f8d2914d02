"""Generated kernels on an NVIDIA GPU: bandwidth against copies of the same bytes, a sweep over block
shapes, and the host time of a call.

    PYTHONPATH=build/gpu-site python benchmarks/kernel_sweep.py [table] [sweep] [across] [host]

Method: launches over several buffer sets, together larger than the L2 cache, are captured in one CUDA
graph; the median of its replays, divided by the number of launches, is one figure. The copy is
`copy_` of the same bytes measured in the same way in the same run. Every kernel's result is checked.
No time here is a claim; compare columns of one run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ascend_ln_fuse.kernels.codegen import generate
from ascend_ln_fuse.kernels.launch import Runner, launch_facts
from ascend_ln_fuse.kernels.layout import layout
from ascend_ln_fuse.kernels.reference import reference
from ascend_ln_fuse.kernels.region import NormRegion, parse
from ascend_ln_fuse.kernels.source import Tile, jit
from ascend_ln_fuse.kernels.targets import target_for
from ascend_ln_fuse.kernels.tiling import ladder

#: Bytes of all buffer sets together: several times the L2 cache.
COLD = 400 * 2**20


def layer_norm(lane: int, rank: int = 2) -> NormRegion:
    space = ", ".join(["*"] * (rank - 1) + [str(lane)])
    order = ", ".join(map(str, range(rank)))
    return parse(f"space [{space}]\nin x: bf16[{space}]\nin w: bf16[{lane}]\nin b: bf16[{lane}]\n"
                 f"scalar eps\nv0: bf16 = layer_norm(x, w, b, eps)\nout v0: bf16 order({order})")


def rms_norm(lane: int) -> NormRegion:
    return parse(f"space [*, {lane}]\nin x: bf16[*, {lane}]\nin w: bf16[{lane}]\nscalar eps\n"
                 f"v0: bf16 = rms_norm(x, w, eps)\nout v0: bf16 order(0, 1)")


def add_norm(lane: int) -> NormRegion:
    return parse(f"space [*, {lane}]\nin x: bf16[*, {lane}]\nin r: bf16[*, {lane}]\n"
                 f"in w: bf16[{lane}]\nin b: bf16[{lane}]\nscalar eps\nh: bf16 = add(x, r)\n"
                 "v0: bf16 = layer_norm(h, w, b, eps)\nout h: bf16 order(0, 1)\n"
                 "out v0: bf16 order(0, 1)")


@dataclass(frozen=True)
class Case:
    """One region on inputs of one shape; `make()` gives a fresh set of inputs."""

    name: str
    region: NormRegion
    make: Callable[[], list[torch.Tensor]]


def article() -> Case:
    def make():
        packed = torch.randn(50220, 9, 128, device="cuda").bfloat16()
        return [packed.view(50220, 3, 3, 128).unbind(1)[0], *_affine(128, 2)]

    return Case("layer_norm, article's view", layer_norm(128, 3), make)


def packed_pair(lane: int, heads: int) -> Case:
    """q and k of a packed qkv in one launch."""
    space, order = f"*, *, {lane}", "order(0, 1, 2)"
    lines = [f"space [{space}]", f"in q: bf16[{space}]", f"in k: bf16[{space}]"]
    lines += [f"in {name}: bf16[{lane}]" for name in ("wq", "bq", "wk", "bk")]
    lines += ["scalar eps", "v0: bf16 = layer_norm(q, wq, bq, eps)",
              "v1: bf16 = layer_norm(k, wk, bk, eps)", f"out v0: bf16 {order}", f"out v1: bf16 {order}"]

    def make():
        packed = torch.randn(50220, 3, heads, lane, device="cuda").bfloat16()
        return [*packed.unbind(1)[:2], *_affine(lane, 4)]

    return Case(f"q, k pair, {heads} heads of {lane}", parse("\n".join(lines)), make)


def contiguous(kind: Callable[[int], NormRegion], lane: int, megabytes: int = 64) -> Case:
    rows = megabytes * 2**20 // (2 * lane)
    region = kind(lane)
    wide = sum(len(x.dims) > 1 for x in region.inputs)

    def make():
        full = [torch.randn(rows, lane, device="cuda").bfloat16() for _ in range(wide)]
        return [*full, *_affine(lane, len(region.inputs) - wide)]

    return Case(f"{kind.__name__}, D {lane}, {megabytes} MB", region, make)


def channels(lane: int, pixels: int, images: int, order: str = "0, 2, 1") -> Case:
    """A norm over the channels of contiguous [N, C, P], with SiLU; `order` says where the result lies: as x,
    or ("0, 1, 2") contiguous as [N, P, C]."""
    text = (f"space [*, *, {lane}]\nin x: bf16[*, *, {lane}]\nin w: bf16[{lane}]\nin b: bf16[{lane}]\n"
            "scalar eps\nv0: bf16 = layer_norm(x, w, b, eps)\nv1: bf16 = silu(v0)\n"
            f"out v1: bf16 order({order})")

    def make():
        x = torch.randn(images, lane, pixels, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        return [x, *_affine(lane, 2)]

    where = "NPC" if order == "0, 1, 2" else "NCP"
    return Case(f"[{images}, {lane}, {pixels}] over its channels, into {where}", parse(text), make)


def _affine(lane: int, count: int) -> list[torch.Tensor]:
    return [torch.randn(lane, device="cuda").bfloat16() for _ in range(count)]


def graph_time(launches: Sequence[Callable[[], object]], replays: int = 25) -> float:
    """Median microseconds of one launch, over replays of a graph of all of them."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(launches))
    return statistics.median(times[3:])


class Bench:
    """Buffers of one case, and the launches to time."""

    def __init__(self, case: Case):
        self.case, self.region = case, case.region
        self.target = target_for(torch.device("cuda", 0))
        first = case.make()
        self.outputs_of = reference(self.region, first, [1e-5])
        full = [x for x in first if x.dim() > 1]
        self.bytes = sum(x.numel() * x.element_size() for x in (*full, *self.outputs_of))
        sets = max(2, -(-COLD // self.bytes))
        self.inputs = [first] + [case.make() for _ in range(sets - 1)]
        self.outputs = [[torch.empty_like(o) for o in self.outputs_of] for _ in range(sets)]
        self.walk = layout(self.region, [x.shape for x in first], [x.stride() for x in first])
        self.tile = ladder(self.region, self.walk.structure, self.walk.sizes, self.target)[0]

    def copy(self) -> float:
        def launch(inputs, outputs):
            for x, out in zip((x for x in inputs if x.dim() > 1), outputs):
                out.copy_(x)

        return graph_time([lambda i=i, o=o: launch(i, o) for i, o in zip(self.inputs, self.outputs)])

    def kernel(self, tile: Tile | None = None, programs: int = 0) -> float:
        """Microseconds of the kernel with `tile` (the chosen one by default); `programs` > 0 makes it
        persistent, with that many programs a multiprocessor."""
        tile, target = tile or self.tile, self.target
        if programs:
            target = replace(target, persistent=True, cores=target.cores * programs)
        kernel = jit(generate(self.region, self.walk.structure, tile, target))
        integers, grid = launch_facts(self.walk, tile.rows, target)

        def launch(inputs, outputs):
            kernel[grid](*inputs, *outputs, *integers, 1e-5, num_warps=tile.num_warps)

        for out in self.outputs[0]:
            out.fill_(float("nan"))
        time_us = graph_time([lambda i=i, o=o: launch(i, o)
                              for i, o in zip(self.inputs, self.outputs)])
        for out, want in zip(self.outputs[0], self.outputs_of):
            torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)
        return time_us

    def runner(self) -> float:
        run = Runner(self.region)
        return graph_time([lambda i=i: run(i, [1e-5]) for i in self.inputs])


def table() -> None:
    print(f"{'case':34} {'bytes':>8} {'copy us':>8} {'ours us':>8} {'ours/copy':>9} {'GB/s':>6}  tile")
    cases = [article()]
    cases += [contiguous(kind, lane) for kind in (layer_norm, rms_norm, add_norm)
              for lane in (128, 1024, 4096, 8192)]
    for case in cases:
        bench = Bench(case)
        copy, ours, again = bench.copy(), bench.runner(), bench.copy()
        copy = min(copy, again)
        print(f"{case.name:34} {bench.bytes / 1e6:7.0f}M {copy:8.1f} {ours:8.1f} {ours / copy:9.3f} "
              f"{bench.bytes / ours / 1e3:6.0f}  {bench.tile}, {bench.tile.num_warps} warps", flush=True)


def sweep() -> None:
    cases = [packed_pair(128, 3), packed_pair(64, 12), article(), contiguous(rms_norm, 8192)]
    cases += [contiguous(layer_norm, d) for d in (128, 1024, 4096, 8192)]
    cases += [contiguous(add_norm, d) for d in (1024, 4096, 8192)]
    for case in cases:
        bench = Bench(case)
        print(f"\n{case.name}: copy {bench.copy():.1f} us; chosen {bench.tile}, "
              f"{bench.tile.num_warps} warps {bench.kernel():.1f} us")
        row_bytes = 2 * bench.tile.cols
        sizes = (1024, 2048, 4096, 8192, 16384, 2 * row_bytes)
        for rows in sorted({max(1, size // row_bytes) for size in sizes if size <= 32768}):
            figures = []
            for warps in (1, 2, 4, 8, 16):
                if 512 <= rows * row_bytes // warps <= 4096:
                    tile = Tile(rows, bench.tile.cols, warps)
                    figures.append(f"{warps} warps {bench.kernel(tile):.1f}")
            print(f"  {rows:4} rows: {', '.join(figures)}", flush=True)
        print(f"  persistent, 8 programs a multiprocessor: {bench.kernel(programs=8):.1f}", flush=True)


def across() -> None:
    """Tiles for lanes across memory: rows are neighbours, so their number is what lies side by side."""
    cases = [channels(96, 480 * 832, 8), channels(384, 120 * 208, 8), channels(256, 4096, 8),
             channels(256, 4096, 1), channels(768, 14 * 14, 64), channels(1024, 1024, 8),
             channels(256, 4096, 8, "0, 1, 2"), channels(96, 480 * 832, 8, "0, 1, 2")]
    for case in cases:
        bench = Bench(case)
        print(f"\n{case.name}: copy {bench.copy():.1f} us; chosen {bench.tile}, "
              f"{bench.tile.num_warps} warps {bench.kernel():.1f} us")
        for rows in (8, 16, 32, 64, 128):
            figures = []
            for warps in (1, 2, 4, 8, 16):
                if 512 <= rows * bench.tile.cols * 2 // warps <= 8192:
                    tile = Tile(rows, bench.tile.cols, warps)
                    figures.append(f"{warps} warps {bench.kernel(tile):.1f}")
            print(f"  {rows:4} rows: {', '.join(figures)}", flush=True)


def host() -> None:
    """Host time of a call on the article's view with few rows, so that the GPU keeps up."""
    packed = torch.randn(64, 9, 128, device="cuda").bfloat16()
    x = packed.view(64, 3, 3, 128).unbind(1)[0]
    w, b = _affine(128, 2)
    run, inputs, scalars = Runner(layer_norm(128, 3)), [x, w, b], [1e-5]
    torch.testing.assert_close(run(inputs, scalars)[0].float(),
                               F.layer_norm(x, (128,), w, b, 1e-5).float(), rtol=2e-2, atol=2e-2)
    outputs, plan = run(inputs, scalars), next(iter(run._plans.values()))
    pointers = [t.data_ptr() for t in inputs]
    calls = {
        "ours": lambda: run(inputs, scalars),
        "  its launch": lambda: plan(inputs, pointers, scalars, outputs),
        "  its allocation": lambda: plan.allocate(),
        "F.layer_norm": lambda: F.layer_norm(x, (128,), w, b, 1e-5),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(30):
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(200):
                    call()
                found[name].append((time.perf_counter() - start) / 200 * 1e6)
    for name, times in found.items():
        print(f"{name:24} {statistics.median(times):6.2f} us host time, median of 30 x 200 calls "
              f"(spread {min(times):.2f} to {max(times):.2f})")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs an NVIDIA GPU")
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    torch.manual_seed(0)
    for name in sys.argv[1:] or ["table", "host"]:
        {"table": table, "sweep": sweep, "across": across, "host": host}[name]()
