"""Norms against other libraries' kernels, forward, bf16: eager, torch.compile, ours, Liger-Kernel, quack.

    python -m benchmarks.models.peers [--dims ...] [--megabytes ...] [--json FILE]

LayerNorm, RMSNorm and add -> RMSNorm (both results). A library that is not installed, and an op that it lacks
or refuses, is stated as such. Device time as in `norm_family.py`: replays of a CUDA graph over buffers that
exceed the L2 cache, contenders taking turns, median over the rounds; each result is checked against float64.
Prints figures, asserts no time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bound import share_of_bound
from norm_family import BF16, layer_norm, rms_norm
from timing import LEVEL, capture, device_times, machine, paired, sets_needed

from .columns import separate_function
from .measure import words

EPS = {"LayerNorm": 1e-5, "RMSNorm": 1e-6, "add -> RMSNorm": 1e-6}


def add_rms_norm(x, h, w):
    x = x + h
    return x, rms_norm(x, w)


#: op -> function of the project's spelling, and how many full tensors and vectors it takes
OPS: dict[str, tuple[Callable, int, int]] = {
    "LayerNorm": (layer_norm, 1, 2), "RMSNorm": (rms_norm, 1, 1), "add -> RMSNorm": (add_rms_norm, 2, 1)}


def liger(op: str) -> Callable:
    """Liger-Kernel's form of an op, with the arguments and results of ours.

    Raises:
        ImportError: Liger-Kernel is not installed, or lacks the op.
    """
    from liger_kernel.transformers import functional

    if op == "LayerNorm":
        return lambda x, w, b: functional.liger_layer_norm(x, w, b, EPS[op])
    if op == "RMSNorm":
        return lambda x, w: functional.liger_rms_norm(x, w, EPS[op], in_place=False)

    def fused(x, h, w):
        normed, total = functional.liger_fused_add_rms_norm(x, h, w, EPS[op], in_place=False)
        return total, normed

    return fused


def quack(op: str) -> Callable:
    """As `liger`. quack's LayerNorm takes fp32 weights: they are converted before it is timed."""
    from quack.rmsnorm import layernorm_fwd, rmsnorm_fwd

    if op == "LayerNorm":
        wide: dict[int, torch.Tensor] = {}

        def known(x: torch.Tensor) -> torch.Tensor:
            return wide.setdefault(x.data_ptr(), x.float())

        return lambda x, w, b: layernorm_fwd(x, known(w), known(b), EPS[op])
    if op == "RMSNorm":
        return lambda x, w: rmsnorm_fwd(x, w, eps=EPS[op])[0]

    def fused(x, h, w):
        normed, total, _ = rmsnorm_fwd(x, w, residual=h, eps=EPS[op])
        return total, normed

    return fused


LIBRARIES: dict[str, tuple[str, Callable[[str], Callable]]] = {
    "Liger": ("liger-kernel", liger), "quack": ("quack-kernels", quack)}


def installed() -> dict[str, str]:
    """Version of each library; "not installed" where it is not."""
    found = {}
    for name, (distribution, _) in LIBRARIES.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def tensors_of(op: str, rows: int, dim: int, device: torch.device) -> list[torch.Tensor]:
    _, full, vectors = OPS[op]
    shapes = [(rows, dim)] * full + [(dim,)] * vectors
    return [torch.randn(shape, device=device).to(BF16) for shape in shapes]


def errors(ours, eager, exact) -> float:
    """The largest share of the bound over an op's results."""
    return max(share_of_bound(*three) for three in zip(*(
        r if isinstance(r, tuple) else (r,) for r in (ours, eager, exact)), strict=True))


def contenders(op: str) -> dict[str, Callable]:
    """Every way to run the op; a library's is missing where it is not installed."""
    torch._dynamo.reset()
    call = OPS[op][0]
    found = {"eager": call, "torch.compile": torch.compile(separate_function(call)),
             "ours": torch.compile(separate_function(call), backend="ascend_ln_fuse",
                                   options={"report": "off"})}
    for name, (_, make) in LIBRARIES.items():
        try:
            found[name] = make(op)
        except ImportError:
            continue
    return found


def measure(op: str, dim: int, megabytes: float, rounds: int) -> dict:
    """A row: us a call, error in units of the bound, and why a contender has none."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    count = max(1, int(megabytes * 2**20) // (2 * dim))
    first = tensors_of(op, count, dim, device)
    eager, exact = OPS[op][0](*first), _exact(op, first)
    calls, share, failures = contenders(op), {}, {}
    for name in list(calls):
        try:
            share[name] = errors(calls[name](*first), eager, exact)
            capture(calls[name], [first])
        except Exception as error:
            failures[name] = words(error)
            del calls[name]
    held = sum(x.numel() * 2 for x in first)
    del eager, exact
    sets = [first] + [tensors_of(op, count, dim, device) for _ in range(sets_needed(held) - 1)]
    for call in calls.values():
        for buffers in sets:
            call(*buffers)
    times = device_times(calls, sets, rounds)
    return {"op": op, "dim": dim, "megabytes": megabytes, "failures": failures, "share_of_bound": share,
            "us": {name: statistics.median(t) for name, t in times.items()},
            "over_ours": paired(times, "ours") if "ours" in times else {},
            "spread_us": {name: [min(t), max(t)] for name, t in times.items()}}


def _exact(op: str, buffers: list[torch.Tensor]):
    """The op's results in float64."""
    wide = [x.double() for x in buffers]
    if op == "LayerNorm":
        return layer_norm(*wide)
    x = wide[0] + wide[1] if op == "add -> RMSNorm" else wide[0]
    normed = wide[-1] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS[op])
    return (x, normed) if op == "add -> RMSNorm" else normed


def show(rows: list[dict], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("eager", "torch.compile", "ours", *LIBRARIES)
    table = Table(title=title, caption="us a call, median (least - most); error in units of the bound")
    for header in ("op", "D", "MB", *names, "Liger / ours", "quack / ours"):
        table.add_column(header, justify="left" if header == "op" else "right")
    for row in rows:
        us = row["us"]
        cells = [f"{us[n]:.1f} ({row['spread_us'][n][0]:.1f}-{row['spread_us'][n][1]:.1f}), "
                 f"{row['share_of_bound'][n]:.2f}" if n in us else "failed" if n in row["failures"] else "-"
                 for n in names]
        ratios = [f"{row['over_ours'][n]:.2f}" if n in row["over_ours"] else "" for n in LIBRARIES]
        table.add_row(row["op"], str(row["dim"]), f"{row['megabytes']:g}", *cells, *ratios)
    Console(width=180).print(table)
    for row in rows:
        for name, text in row["failures"].items():
            print(f"{row['op']}, D {row['dim']}, {row['megabytes']:g} MB, {name}: {text}")
    for name in LIBRARIES:
        known = [row for row in rows if name in row["over_ours"]]
        slower = [f"{row['op']} D {row['dim']} {row['megabytes']:g} MB ({row['over_ours'][name]:.2f})"
                  for row in known if row["over_ours"][name] < LEVEL]
        if known:
            print(f"at least as fast as {name}: {len(known) - len(slower)} of {len(known)} rows"
                  + (f"; not {', '.join(slower)}" if slower else ""))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.peers",
                                     description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1e6, help="start no row after this long")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    libraries = installed()
    print(", ".join(f"{name} {version}" for name, version in libraries.items()))
    if not torch.cuda.is_available() or torch.version.cuda is None:
        print("benchmarks.models.peers: needs an NVIDIA GPU; none was found", file=sys.stderr)
        return 1
    title = machine() + "".join(f", {name} {version}" for name, version in libraries.items())
    rows, left, started = [], 0, time.monotonic()
    with torch.no_grad():
        for megabytes in args.megabytes:
            for op in OPS:
                for dim in args.dims:
                    if time.monotonic() - started > args.seconds:
                        left += 1
                        continue
                    rows.append(measure(op, dim, megabytes, args.rounds))
                    print(rows[-1], file=sys.stderr, flush=True)
                    if args.json:  # after each row: a run that is cut off keeps them
                        args.json.write_text(json.dumps({"machine": title, "rows": rows}, indent=1))
    show(rows, title)
    if left:
        print(f"{left} rows were not reached in {args.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
