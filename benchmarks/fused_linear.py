"""Tiles of the kernels with matrix products (kernels/fused_linear.py) on an NVIDIA GPU.

    PYTHONPATH=build/gpu-site python benchmarks/fused_linear.py [WORD ...] [tokens=1,16] [hidden=1024,4096]

with the words check, check16, table, check-wide and sweep.

The case is LayerNorm -> linear -> gelu -> linear in bf16: two segments. `check` and `check16` (fp16) hold
every tile that `configs` proposes to the error bound at mean/std 0 to 1000, in several processes, which also
fills Triton's cache; `table` compares the best of them with eager. `check-wide` and `sweep` do the same with
many more tiles, one segment at a time, with the best known tile of the other.

Method: one whole chain is captured in a CUDA graph; the figure is the median over blocks of replays.
Compare columns of one run; no time here is a claim.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from bound import share_of_bound
from torch.nn import functional as F

from ascend_ln_fuse.kernels.fused_linear import FusedLinear, GemmTile, Projection, Segment, reference
from ascend_ln_fuse.kernels.layout import Unsupported
from ascend_ln_fuse.kernels.region import NormRegion, parse

TOKENS = (1, 16, 128)
HIDDEN = {1024: 4096, 2048: 8192, 4096: 16384, 8192: 28672}
RATIOS = (0.0, 1.0, 10.0, 100.0, 1000.0)
EPS = 1e-5

#: Bytes of shared memory that a program on Hopper can have.
SHARED = 227 * 1024


def layer_norm(lane: int, dtype: str = "bf16") -> NormRegion:
    return parse(f"space [*, {lane}]\nin x: {dtype}[*, {lane}]\nin w: {dtype}[{lane}]\n"
                 f"in b: {dtype}[{lane}]\nscalar eps\nv0: {dtype} = layer_norm(x, w, b, eps)\n"
                 f"out v0: {dtype} order(0, 1)")


def gelu(lane: int, dtype: str = "bf16") -> NormRegion:
    return parse(f"space [*, {lane}]\nin y: {dtype}[*, {lane}]\nv0: {dtype} = gelu(y)\n"
                 f"out v0: {dtype} order(0, 1)")


@dataclass
class Chain:
    """Tensors of one cell, and its two segments."""

    tokens: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        word = {torch.bfloat16: "bf16", torch.float16: "f16"}[self.dtype]
        inner = HIDDEN[self.hidden]

        def make(*shape, scale=1.0):
            return (torch.randn(shape, device="cuda") * scale).to(self.dtype)

        self.x = make(self.tokens, self.hidden)
        self.affine = [make(self.hidden), make(self.hidden)]
        self.up, self.up_bias = make(inner, self.hidden, scale=self.hidden**-0.5), make(inner)
        self.down, self.down_bias = make(self.hidden, inner, scale=inner**-0.5), make(self.hidden)
        self.first = FusedLinear(Segment(layer_norm(self.hidden, word), (Projection(bias=True),),
                                         gelu(inner, word)))
        self.second = FusedLinear(Segment(None, (Projection(bias=True),)))

    def eager(self):
        a = F.layer_norm(self.x, (self.hidden,), *self.affine, EPS)
        return F.linear(F.gelu(F.linear(a, self.up, self.up_bias)), self.down, self.down_bias)

    def ours(self, first: GemmTile, second: GemmTile):
        """By the kernels with these tiles; Unsupported where the device has too little on-chip memory."""
        h, = self.first.attempt([self.x, *self.affine, self.up, self.up_bias], [EPS], first)
        return self.second.attempt([h, self.down, self.down_bias], [], second)[0]

    @property
    def floor(self) -> float:
        """Microseconds to read the weights at 4.3 TB/s."""
        return 2 * self.up.nbytes / 4.3e6


#: (columns, depth, warps, stages) of tiles of one row, of 16 rows, and with the operands swapped.
VECTOR = ((2, 4096, 4, 1), (4, 1024, 4, 1), (4, 2048, 4, 1), (4, 4096, 8, 1), (8, 512, 4, 1),
          (8, 1024, 4, 1), (8, 1024, 8, 1), (8, 2048, 8, 1), (16, 512, 4, 1), (16, 512, 8, 1),
          (16, 256, 4, 1), (32, 256, 8, 1), (8, 512, 4, 4), (16, 256, 4, 4), (4, 1024, 4, 4), (16, 512, 8, 3))
FEW = ((16, 256, 2, 5), (16, 512, 4, 3), (16, 256, 4, 5), (32, 128, 4, 6), (32, 256, 4, 3), (32, 256, 4, 5),
       (32, 512, 4, 3), (64, 128, 4, 5), (64, 256, 4, 3))
SWAPPED = ((64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (128, 64, 4, 6),
           (128, 128, 8, 4))
#: (rows, columns, depth, warps, stages) of larger tiles.
MANY = ((64, 32, 128, 4, 5), (64, 64, 64, 4, 6), (64, 64, 128, 4, 4), (64, 128, 64, 4, 5),
        (64, 128, 128, 4, 4), (128, 32, 128, 4, 5), (128, 64, 64, 4, 6), (128, 64, 64, 8, 6),
        (128, 64, 128, 4, 4), (128, 64, 128, 8, 4), (128, 128, 64, 4, 5), (128, 128, 64, 8, 5),
        (128, 128, 128, 8, 3), (128, 256, 64, 8, 4))


def wide(m: int, n: int, k: int, norm: bool) -> list[GemmTile]:
    """Tiles to sweep."""
    found = []

    def add(rows, shape, splits=(1,), ahead=(norm,), ways=((True, 0),), swapped=False):
        for split, first, (overlap, prefetch) in product(splits, ahead, ways):
            tile = GemmTile(rows, *shape, split, swapped, first and norm, overlap, prefetch)
            shared = 0 if rows == 1 else tile.num_stages * (rows + tile.cols) * tile.depth * 2
            if tile.depth * split <= k and tile.cols <= n and shared <= SHARED:
                found.append(tile)

    if m == 1:
        for shape in VECTOR:
            add(1, shape, ahead=(False,), ways=((True, 0), (True, 1), (False, 0)))
        add(1, (8, 1024, 4, 1), ahead=(False, True))
        add(16, (32, 256, 4, 4), ahead=(False, True))
    elif m <= 16:
        splits = (1, 2, 4) if n <= 4096 else (1,)
        for shape in FEW:
            add(16, shape, splits)
        for shape in SWAPPED:
            add(16, shape, splits, swapped=True)
        add(16, (32, 256, 4, 4), ahead=(False, True), ways=((True, 2), (False, 0)))
        add(16, (64, 128, 4, 5), ahead=(False, True), ways=((True, 2), (False, 0)), swapped=True)
    else:
        splits = (1, 2, 4, 8) if n <= 2048 else (1, 2, 4) if n <= 8192 else (1, 2)
        for rows, *shape in MANY:
            add(rows, shape, splits)
        add(128, (128, 64, 8, 5), ways=((True, 2), (False, 0)))
        add(64, (64, 64, 4, 6), ahead=(False,))
    return list(dict.fromkeys(found))


def sides(chain: Chain, everything: bool) -> tuple[Sequence[GemmTile], Sequence[GemmTile]]:
    """The tiles of both segments: those to sweep, or those that `configs` proposes."""
    m, inner, hidden = chain.tokens, HIDDEN[chain.hidden], chain.hidden
    if everything:
        return wide(m, inner, hidden, True), wide(m, hidden, inner, False)
    return chain.first.configs(m, inner, hidden), chain.second.configs(m, hidden, inner)


# -- check -------------------------------------------------------------------------------------------


def cases(chain: Chain, side: int) -> Iterator[tuple[float, tuple, torch.Tensor]]:
    """(mean/std of the input, arguments of the segment, exact result)."""
    shape = (chain.tokens, chain.hidden)
    if side == 1:
        h = F.gelu(torch.randn(chain.tokens, HIDDEN[chain.hidden], device="cuda")).to(chain.dtype)
        yield (0.0, ([h], [], [chain.down], [chain.down_bias]),
               F.linear(h.double(), chain.down.double(), chain.down_bias.double()))
        return
    for ratio in RATIOS:
        x = (torch.randn(shape, device="cuda") + ratio).to(chain.dtype)
        a = F.layer_norm(x.double(), shape[1:], *[t.double() for t in chain.affine], EPS)
        yield (ratio, ([x, *chain.affine], [EPS], [chain.up], [chain.up_bias]),
               F.gelu(F.linear(a, chain.up.double(), chain.up_bias.double())))


def check_side(job: tuple) -> tuple[int, list[str]]:
    """Every tile in one slice of a segment's set against float64: (count, failures)."""
    tokens, hidden, side, part, parts, dtype, everything = job
    torch.manual_seed(0)
    chain = Chain(tokens, hidden, dtype)
    run = (chain.first, chain.second)[side]
    known = [(ratio, args, reference(run.segment, *args)[0], exact)
             for ratio, args, exact in cases(chain, side)]
    tiles, failures = sides(chain, everything)[side][part::parts], []
    for tile in tiles:
        where = f"{tokens} x {hidden}, segment {side}, {tile}"
        try:
            for ratio, args, low, exact in known:
                if (share := share_of_bound(run(*args, config=tile)[0], low, exact)) > 1:
                    failures.append(f"{where}: wrong at {ratio}, by {share - 1:.2f} of the bound")
        except Exception as error:  # noqa: BLE001 - one broken tile must not hide the others
            failures.append(f"{where}: {type(error).__name__} {str(error)[-200:]}")
    return len(tiles), failures


def check(dtype: torch.dtype = torch.bfloat16, everything: bool = False, workers: int = 14) -> None:
    parts = 4 if everything else 2
    jobs = [(tokens, hidden, side, part, parts, dtype, everything) for hidden in HIDDEN for tokens in TOKENS
            for side in (0, 1) for part in range(parts)]
    start, count = time.perf_counter(), 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for checked, failures in pool.imap_unordered(check_side, jobs):
            count += checked
            for failure in failures:
                print(failure, flush=True)
    print(f"{count} tiles checked in {dtype}, {time.perf_counter() - start:.0f} s", flush=True)


# -- time --------------------------------------------------------------------------------------------


def graph_time(launch: Callable[[], object], blocks: int = 7, budget_us: float = 4000.0) -> float:
    """Microseconds of one replay of a graph of `launch`: the median over blocks of replays."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    torch.cuda.synchronize()
    times, count = [], 10
    for block in range(blocks + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        each = 1e3 * start.elapsed_time(end) / count
        times.append(each)
        if block == 0:
            count = max(5, min(100, int(budget_us / each)))
    return statistics.median(times[1:])


class Search:
    """The best tiles of one chain, one segment at a time."""

    def __init__(self, chain: Chain, sets: tuple[Sequence[GemmTile], Sequence[GemmTile]]):
        self.chain, self.sets = chain, sets
        self.best = [sets[0][0], sets[1][0]]

    def time(self, pair: Sequence[GemmTile], blocks: int = 3) -> float:
        return graph_time(lambda: self.chain.ours(*pair), blocks)

    def side(self, side: int, tiles: Sequence[GemmTile] | None = None) -> list[tuple[float, GemmTile]]:
        """(microseconds of the whole chain, tile) for each tile of a segment, best first; keeps the best."""
        found = []
        for tile in tiles or self.sets[side]:
            pair = [tile if i == side else self.best[i] for i in (0, 1)]
            try:
                found.append((self.time(pair), tile))
            except Unsupported:
                pass  # told by check
        found.sort(key=lambda x: x[0])
        self.best[side] = found[0][1]
        return found


def sweep(show: int = 6) -> None:
    for h, m in product(HIDDEN, TOKENS):
        chain = Chain(m, h)
        search = Search(chain, sides(chain, True))
        print(f"\n{m} tokens, hidden {h}: floor {chain.floor:.1f}, eager {graph_time(chain.eager):.1f} us")
        second = search.side(1)
        for side, found in ((0, search.side(0)), (1, search.side(1, [tile for _, tile in second[:8]]))):
            lines = (f"{t:6.1f}  {tile}" for t, tile in found[:show])
            print(f" segment {side}: " + "\n            ".join(lines), flush=True)
        best, eager = search.time(search.best, 7), graph_time(chain.eager)
        print(f" best {best:.1f} us, eager / ours {eager / best:.2f}", flush=True)
        del chain, search
        torch.cuda.empty_cache()


def table() -> None:
    print(f"{'tokens':>6} {'hidden':>6} {'floor':>7} {'eager':>7} {'ours':>7} {'ratio':>6}  tiles")
    for h, m in product(HIDDEN, TOKENS):
        chain = Chain(m, h)
        search = Search(chain, sides(chain, False))
        guess = search.time(search.best)
        search.side(1)
        search.side(0)
        ours, eager = search.time(search.best, 7), graph_time(chain.eager)
        print(f"{m:6} {h:6} {chain.floor:7.1f} {eager:7.1f} {ours:7.1f} {eager / ours:6.2f}  first guess "
              f"{guess:.1f}; [{search.best[0]}] [{search.best[1]}]", flush=True)
        del chain, search
        torch.cuda.empty_cache()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs an NVIDIA GPU")
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.abspath("build/triton-cache"))
    torch.manual_seed(0)
    words = [word for word in sys.argv[1:] if "=" not in word]
    for name, numbers in (word.split("=") for word in sys.argv[1:] if "=" in word):
        chosen = tuple(map(int, numbers.split(",")))
        if name == "tokens":
            TOKENS = chosen
        else:
            HIDDEN = {h: HIDDEN[h] for h in chosen}
    for word in words or ["check", "table"]:
        {"check": check, "check16": lambda: check(torch.float16), "table": table, "sweep": sweep,
         "check-wide": lambda: check(everything=True)}[word]()
