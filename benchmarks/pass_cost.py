"""What the pass costs as models grow: DiT blocks against time, beside Dynamo's own tracing.

    python benchmarks/pass_cost.py [--blocks 6 12 30 60] [--json FILE]

CPU time of one process: `trace` is Dynamo's time for the model with a backend that does nothing, `pass`
is matching, selection and rewriting of the traced graph (best of five). Both ought to grow linearly, and
the pass to stay below 15% of the tracing.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date

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


class DiT(nn.Module):
    def __init__(self, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(blocks))

    def forward(self, x, condition):
        for block in self.blocks:
            x = block(x, condition)
        return x


def measure(blocks: int, dynamic: bool) -> dict:
    """CPU seconds of tracing and of the pass for a model of `blocks` blocks."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm.graph)
        return gm.forward

    model = DiT(blocks).bfloat16()
    x, condition = torch.randn(2, 8, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    torch._dynamo.reset()
    with torch.no_grad():
        started = time.process_time()
        torch.compile(model, backend=keep, dynamic=dynamic)(x, condition)
        trace = time.process_time() - started
    times = []
    for _ in range(5):
        started = time.process_time()
        _, sites = fuse_graph(graphs[0])
        times.append(time.process_time() - started)
    return {"blocks": blocks, "dynamic": dynamic, "nodes": len(graphs[0].nodes),
            "sites": len(sites), "fused": sum(s.status == "fused" for s in sites),
            "trace_s": trace, "pass_s": min(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 12, 30, 60])
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(2, False)  # imports and first-use work are not what is asked here
    rows = [measure(blocks, dynamic) for dynamic in (False, True) for blocks in options.blocks]
    table = Table(title=f"Cost of the pass, CPU time, torch {torch.__version__}, "
                        f"Python {platform.python_version()}, {date.today()}")
    for name in ("blocks", "sizes", "nodes", "sites", "fused", "trace ms", "pass ms", "us a node",
                 "pass/trace"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(str(row["blocks"]), "dynamic" if row["dynamic"] else "static",
                      str(row["nodes"]), str(row["sites"]), str(row["fused"]),
                      f"{row['trace_s'] * 1e3:.0f}", f"{row['pass_s'] * 1e3:.0f}",
                      f"{row['pass_s'] / row['nodes'] * 1e6:.0f}",
                      f"{row['pass_s'] / row['trace_s']:.1%}")
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "date": str(date.today()), "rows": rows}, file,
                      indent=2)


if __name__ == "__main__":
    main()
