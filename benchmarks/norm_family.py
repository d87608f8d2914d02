"""The norm family side by side on an NVIDIA GPU: eager, torch.compile, ours, a copy of the same bytes.

    python benchmarks/norm_family.py [--dims [D ...]] [--megabytes ...] [--workers N]
        [--seconds N] [--json FILE]

Rows: LayerNorm, handwritten RMSNorm, add -> LayerNorm (both results), gated add -> LayerNorm ->
modulate, the q, k pair of a packed qkv, and norms over the channels of contiguous images and videos (written
out, with SiLU behind; and LayerNorm2d by permute), in bf16 without gradients. `megabytes` is the size of one
full operand. Ours is `torch.compile(backend="ascend_ln_fuse")`, and the share of norm sites that it fused is
checked to be all.

Device time (`graph`): each contender is captured in a CUDA graph, one call for every buffer set; the sets
together exceed the L2 cache several times. Contenders take turns in a random order; a time is the median over
the rounds of a replay's time divided by its calls, a ratio that of what each round says. Plain (`plain`):
calls one after another from Python on one buffer set, wall clock over their number. The copy is `copy_` of a
contiguous tensor that moves as many bytes, read plus written, as the fused kernel has to. Prints figures,
asserts no time.

`--workers` compiles all rows in that many processes first, which fill the compilers' caches on disk; times
are taken after that, in this process alone.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from timing import LEVEL, device_times, machine, paired, plain_times
from torch.nn import functional as F

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """`call(*buffers)`, buffers from `make()`; `moved`: bytes that have to be read and written."""

    name: str
    dim: int
    megabytes: float
    call: Callable
    make: Callable[[], list[torch.Tensor]]
    moved: int


def layer_norm(x, w, b):
    return F.layer_norm(x, w.shape, w, b, 1e-5)


def rms_norm(x, w):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def add_norm(x, h, w, b):
    x = x + h
    return x, F.layer_norm(x, w.shape, w, b, 1e-5)


def gated_modulate(x, h, gate, scale, shift):
    x = x + gate * h
    return x, F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def qk_pair(qkv, wq, bq, wk, bk):
    q, k, _ = qkv.view(qkv.shape[0], 3, -1, wq.shape[0]).unbind(1)
    return F.layer_norm(q, wq.shape, wq, bq, 1e-5), F.layer_norm(k, wk.shape, wk, bk, 1e-5)


def channel_layer_norm(x, w, b):
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return F.silu(w * ((x - mean) / torch.sqrt(variance + 1e-6)) + b)


def channel_rms_norm(x, w):
    return F.silu(x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w)


def layer_norm_2d(x, w, b):
    return F.layer_norm(x.movedim(1, -1), w.shape[:1], w.flatten(), b.flatten(), 1e-6).movedim(-1, 1)


#: Activations of video VAEs' decoders, and an image encoder's neck.
CHANNELS = ((8, 256, 64, 64), (1, 384, 21, 120, 208), (1, 96, 21, 480, 832))


def channel_cases() -> list[Case]:
    """Norms over dim 1 of contiguous tensors."""
    found = []
    for shape in CHANNELS:
        for name, call, vectors in (("channel LN -> SiLU", channel_layer_norm, 2),
                                    ("channel RMSNorm -> SiLU", channel_rms_norm, 1),
                                    ("LayerNorm2d by permute", layer_norm_2d, 2)):
            def make(shape=shape, vectors=vectors):
                sizes = [shape] + [(shape[1], *(1,) * (len(shape) - 2))] * vectors
                return [torch.randn(size, device="cuda", dtype=BF16) for size in sizes]

            size = 2 * math.prod(shape)
            found.append(Case(name, shape[1], round(size / 2**20, 1), call, make, 2 * size))
    return found


def cases(dims, megabytes) -> list[Case]:
    found = channel_cases()

    def add(name, call, dim, mb, full, vectors, reads, writes, batched=0):
        rows = max(1, int(mb * 2**20) // (2 * dim))
        batch = 4 if batched else 1
        rows -= rows % batch

        def make():
            shape = (batch, rows // batch, dim) if batched else (rows, dim)
            tensors = [torch.randn(shape, device="cuda").to(BF16) for _ in range(full)]
            tensors += [torch.randn(batch, 1, dim, device="cuda").to(BF16) for _ in range(batched)]
            return tensors + [torch.randn(dim, device="cuda").to(BF16) for _ in range(vectors)]

        found.append(Case(name, dim, mb, call, make, (reads + writes) * rows * dim * 2))

    for dim in dims:
        for mb in megabytes:
            add("LayerNorm", layer_norm, dim, mb, 1, 2, 1, 1)
            add("RMSNorm", rms_norm, dim, mb, 1, 1, 1, 1)
            add("add -> LN, two results", add_norm, dim, mb, 2, 2, 2, 2)
            add("gated add -> LN -> modulate", gated_modulate, dim, mb, 2, 0, 2, 2, batched=3)
    for dim, heads in ((128, 3), (64, 12)):
        def make(dim=dim, heads=heads):
            packed = torch.randn(50220, 3 * heads * dim, device="cuda").to(BF16)
            return [packed] + [torch.randn(dim, device="cuda").to(BF16) for _ in range(4)]

        size = 50220 * heads * dim * 2
        found.append(Case("qk pair of a packed qkv", dim, round(size / 2**20, 1), qk_pair, make,
                          4 * size))
    return found


def contenders(case: Case) -> dict[str, Callable]:
    """Freshly compiled, so that no row meets the recompilation limits of another."""
    torch._dynamo.reset()

    def call(*args):
        return case.call(*args)

    def again(*args):
        return case.call(*args)

    return {"eager": case.call, "torch.compile": torch.compile(call),
            "ours": torch.compile(again, backend="ascend_ln_fuse", options={"report": "off"})}


def measure(case: Case, rounds: int) -> dict:
    from ascend_ln_fuse import last_reports

    torch.manual_seed(0)
    cold = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    first = case.make()
    held = sum(x.numel() * 2 for x in first)
    sets = [first] + [case.make() for _ in range(min(96, max(1, -(-cold // held) - 1)))]
    calls = contenders(case)
    for call in calls.values():
        call(*first)
    report = last_reports()[-1]
    assert report.declined == 0, [site.reason for site in report.sites]
    half = torch.empty(case.moved // 4, dtype=BF16, device="cuda")
    copies = [(half.clone(), half.clone()) for _ in sets]
    graphs = device_times(calls | {"copy": lambda a, b: a.copy_(b)}, sets, rounds, {"copy": copies})
    plain = plain_times(calls, first) if case.megabytes <= 16 else {}
    return {"case": case.name, "dim": case.dim, "megabytes": case.megabytes, "moved": case.moved,
            "sets": len(sets), "graph_us": {n: statistics.median(t) for n, t in graphs.items()},
            "spread_us": {n: [min(t), max(t)] for n, t in graphs.items()},
            "graph_over_ours": paired(graphs, "ours"), "plain_us": {n: min(t) for n, t in plain.items()},
            "plain_over_ours": paired(plain, "ours") if plain else {}}


def compile_row(dims: list[int], megabytes: list[float], index: int) -> None:
    """Compiles what the row of that index times (in a worker process)."""
    case = cases(dims, megabytes)[index]
    buffers = case.make()
    with torch.no_grad():
        for call in contenders(case).values():
            call(*buffers)
    torch.cuda.empty_cache()


def compile_all(dims: list[int], megabytes: list[float], workers: int) -> None:
    """Fills the compilers' caches on disk, several rows at a time."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        count = len(cases(dims, megabytes))
        for found in [pool.submit(compile_row, dims, megabytes, i) for i in range(count)]:
            found.result()


def goals(rows: list[dict]) -> list[str]:
    """What the rows say of the goals: the best other contender in device time, the copy's speed from 64 MB
    up, and the plain call below 8 MB."""
    def short(row: dict, ratio: float) -> str:
        return f"{row['case']}, D {row['dim']}, {row['megabytes']:g} MB: {ratio:.2f}"

    def line(title: str, ratios: list[tuple[dict, float]], least: float) -> str:
        missed = sorted(((r, row) for row, r in ratios if r < least), key=lambda pair: pair[0])
        return f"{title}: {len(ratios) - len(missed)} of {len(ratios)} rows" + "".join(
            f"\n    {short(row, r)}" for r, row in missed)

    def over(row: dict, names: tuple[str, ...], key: str = "graph_over_ours") -> float:
        return min(row[key][name] for name in names)

    large = [row for row in rows if row["megabytes"] >= 64]
    small = [row for row in rows if row["megabytes"] < 8 and row["plain_us"]]
    return [
        line(f"at least {LEVEL}x the fastest of eager and torch.compile, device time",
             [(row, over(row, ("eager", "torch.compile"))) for row in rows], LEVEL),
        line("at least 0.95 of the copy's speed from 64 MB up",
             [(row, over(row, ("copy",))) for row in large if row["case"][:2] != "qk"], 0.95),
        line("at least 1.3x torch.compile below 8 MB, called plainly",
             [(row, over(row, ("torch.compile",), "plain_over_ours")) for row in small], 1.3),
        line("qk pair at least 2x torch.compile", [(row, over(row, ("torch.compile",)))
                                                  for row in rows if row["case"][:2] == "qk"], 2.0)]


def show(rows: list[dict], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="us a call (median): graph replay | called from Python")
    for name in ("case", "D", "MB", "eager", "compile", "ours", "copy", "copy/ours", "compile/ours",
                 "plain compile", "plain ours"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        us, plain = row["graph_us"], row["plain_us"]
        table.add_row(
            row["case"], str(row["dim"]), f"{row['megabytes']:g}",
            *(f"{us[n]:.1f}" for n in ("eager", "torch.compile", "ours", "copy")),
            *(f"{row['graph_over_ours'][n]:.2f}" for n in ("copy", "torch.compile")),
            *(f"{plain[n]:.1f}" if plain else "" for n in ("torch.compile", "ours")))
    Console(width=130).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128, 1024, 2048, 4096, 8192])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 8, 64, 512, 1024])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--workers", type=int, default=0, help="processes that compile all rows first")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after this long")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.cuda is None:
        print("norm_family.py: needs an NVIDIA GPU; none was found", file=sys.stderr)
        return 1
    if args.workers:
        compile_all(args.dims, args.megabytes, args.workers)
    started, rows, left = time.monotonic(), [], 0
    # The pair first, then from small to large, so that a short run shows every kind.
    todo = sorted(cases(args.dims, args.megabytes), key=lambda c: (c.call is not qk_pair, c.megabytes))
    with torch.no_grad():
        for case in todo:
            if time.monotonic() - started > args.seconds:
                left += 1
                continue
            rows.append(measure(case, args.rounds))
    title = machine()
    show(rows, title)
    print(*goals(rows), sep="\n")
    if left:
        print(f"{left} rows were not reached in {args.seconds:.0f} s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": title, "rows": rows, "not_reached": left}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
