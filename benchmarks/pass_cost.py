"""What the pass costs as models grow: DiT blocks against time, beside Dynamo's own tracing.

    python benchmarks/pass_cost.py [--blocks 6 12 30 60] [--repeats N] [--json FILE]

`pass` is matching, selection and rewriting where torch.compile pays for it: once, in the backend, over a
graph that Dynamo has just traced. `trace` is the rest of the compilation. Both are CPU time of this
process, medians over repeats that take the models in turn, so that neither a busy machine nor caches
warmed by a model of the same size favour one. `again` is the pass over the same graph at once, best of
three: there a small graph lies in the processor's caches and a large one does not. `calls` counts the
calls of Python and C functions in one pass, which no machine disturbs.

The pass ought to grow linearly with the model, and to stay below 15% of the tracing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse.backend import fuse_graph


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * self.weight


class DiTBlock(nn.Module):
    """adaLN-Zero, packed qkv with qk-norm, attention, gated residuals, MLP: four norm sites."""

    def __init__(self, dim=64, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm_q, self.norm_k = RMSNorm(dim // heads), RMSNorm(dim // heads)
        self.modulation = nn.Linear(dim, 6 * dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = \
            self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = self.norm_q(q), self.norm_k(k)
        h = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + gate1 * self.proj(h.transpose(1, 2).flatten(2))
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


class FinalLayer(nn.Module):
    """LayerNorm, modulate, linear."""

    def __init__(self, dim, channels):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation, self.linear = nn.Linear(dim, 2 * dim), nn.Linear(dim, channels)

    def forward(self, x, condition):
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        return self.linear(self.norm(x) * (1 + scale) + shift)


class DiT(nn.Module):
    """forward(patches [batch, tokens, channels], time [batch], label [batch]) -> [batch, tokens, channels].

    The blocks and what stands around them in the published model (Peebles and Xie, arXiv 2212.09748): the
    embeddings of patches, positions, time step and label, and the final layer. Blocks alone would be a model
    that nobody has: the first without a sum above its first norm, the last without a norm below its last
    sum. What that saves is the same for 6 blocks and for 60, so the cost would seem to grow faster than the
    model.
    """

    def __init__(self, blocks, dim=64, channels=16, longest=256, labels=10):
        super().__init__()
        self.patches, self.labels = nn.Linear(channels, dim), nn.Embedding(labels, dim)
        self.positions = nn.Parameter(torch.randn(longest, dim))
        self.frequencies = nn.Buffer(10000.0 ** (-torch.arange(0, dim, 2) / dim))
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(DiTBlock(dim) for _ in range(blocks))
        self.final = FinalLayer(dim, channels)

    def forward(self, patches, time, label):
        x = self.patches(patches) + self.positions[:patches.shape[1]]
        angles = time.unsqueeze(-1) * self.frequencies
        condition = self.time(torch.cat((angles.cos(), angles.sin()), dim=-1)) + self.labels(label)
        for block in self.blocks:
            x = block(x, condition)
        return self.final(x, condition)


def cpu_seconds(call: Callable) -> tuple[float, object]:
    """(CPU time of `call()`, its result)."""
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def count_calls(call: Callable) -> int:
    """Calls of Python and C functions while `call()` runs."""
    count = 0

    def profiler(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profiler)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def measure(blocks: int, dynamic: bool) -> dict:
    """One compilation of a model of `blocks` blocks: CPU seconds of tracing and of the pass, and what
    the pass found."""
    found = {}

    def backend(gm, inputs):
        found["graph"] = gm.graph
        found["pass_s"], (_, found["sites"]) = cpu_seconds(lambda: fuse_graph(gm.graph))
        return gm.forward

    model = DiT(blocks).bfloat16()
    inputs = torch.randn(2, 8, 16).bfloat16(), torch.rand(2).bfloat16(), torch.randint(10, (2,))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        total, _ = cpu_seconds(lambda: compiled(*inputs))
    graph, sites = found["graph"], found["sites"]
    return {"nodes": len(graph.nodes), "sites": len(sites),
            "fused": sum(site.status == "fused" for site in sites),
            "trace_s": total - found["pass_s"], "pass_s": found["pass_s"],
            "again_s": min(cpu_seconds(lambda: fuse_graph(graph))[0] for _ in range(3)),
            "calls": count_calls(lambda: fuse_graph(graph))}


def summary(runs: list[dict]) -> dict:
    """Medians of the times of equal runs; what is no time is the same in all of them."""
    return {name: statistics.median(run[name] for run in runs) if name.endswith("_s") else value
            for name, value in runs[0].items()}


def growth(rows: list[dict]) -> str:
    """How much more the largest model costs than the smallest, and what each block adds, from size to size:
    where the cost grows linearly, the same everywhere."""
    small, large = rows[0], rows[-1]
    ratios = {name: large[name] / small[name]
              for name in ("nodes", "calls", "pass_s", "again_s", "trace_s")}
    return (f"{'dynamic' if small['dynamic'] else 'static'} sizes, {large['blocks']} blocks to "
            f"{small['blocks']}: " + ", ".join(f"{name.removesuffix('_s')} {ratio:.2f}x"
                                               for name, ratio in ratios.items())
            + "; calls a further block: " + ", ".join(
                f"{(b['calls'] - a['calls']) / (b['blocks'] - a['blocks']):.0f}" for a, b in pairwise(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 12, 30, 60])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict] = []
    for dynamic in (False, True):
        measure(2, dynamic)  # imports and first-use work are not what is asked here
        runs: dict[int, list] = {blocks: [] for blocks in sorted(options.blocks)}
        for _ in range(options.repeats):
            for blocks, found in runs.items():
                found.append(measure(blocks, dynamic))
        rows += [{"blocks": blocks, "dynamic": dynamic, **summary(found)}
                 for blocks, found in runs.items()]
    table = Table(title=f"Cost of the pass, CPU time, torch {torch.__version__}, "
                        f"Python {platform.python_version()}, {date.today()}")
    for name in ("blocks", "sizes", "nodes", "sites", "fused", "calls", "trace ms", "pass ms", "again ms",
                 "us a node", "pass/trace"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(str(row["blocks"]), "dynamic" if row["dynamic"] else "static",
                      *(str(row[name]) for name in ("nodes", "sites", "fused", "calls")),
                      *(f"{row[name] * 1e3:.0f}" for name in ("trace_s", "pass_s", "again_s")),
                      f"{row['pass_s'] / row['nodes'] * 1e6:.0f}",
                      f"{row['pass_s'] / row['trace_s']:.1%}")
    Console(width=112).print(table)
    for dynamic in (False, True):
        print(growth([row for row in rows if row["dynamic"] is dynamic]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "date": str(date.today()), "rows": rows}, file,
                      indent=2)


if __name__ == "__main__":
    main()
