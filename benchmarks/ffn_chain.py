"""layer_norm -> linear -> activation -> linear side by side on an NVIDIA GPU, bf16.

    python benchmarks/ffn_chain.py [--activation gelu|gelu_tanh|relu] [--hidden ...] [--tokens ...]
                                   [--no-autotune] [--json FILE]

Contenders: eager, torch.compile (default, and mode="max-autotune-no-cudagraphs"), ours
(`torch.compile(backend="ascend_ln_fuse")`). The intermediate size is 4 times the hidden one, 28672 for
8192; linear layers have biases.

Device time (`graph`): each contender is captured in a CUDA graph, one call for each set of weights; the
sets together exceed the L2 cache several times, as the layers of a model do. Contenders take turns, in a
random order; a time is the median over the rounds, "best/ours" the median of what each round says. Plain
time: calls one after another from Python, on one set, the outer Dynamo call included. Error: against
float64 on up to 64 rows, in units of what the project allows (twice eager's own largest error, plus one ulp):
1 or less is within the bound. Memory: the peak above what is held before the call, in a forward without
gradients and in one with backward. Prints figures, asserts no time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from bound import share_of_bound
from timing import device_times, machine, paired, plain_times, sets_needed
from torch import nn

BF16 = torch.bfloat16
TUNED = "max-autotune-no-cudagraphs"
ACTIVATIONS = {"gelu": nn.functional.gelu, "relu": nn.functional.relu,
               "gelu_tanh": partial(nn.functional.gelu, approximate="tanh")}


class Ffn(nn.Module):
    def __init__(self, hidden: int, act: Callable):
        super().__init__()
        inner = 28672 if hidden == 8192 else 4 * hidden
        self.norm, self.act = nn.LayerNorm(hidden), act
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(self.norm(x))))


def make(hidden: int, act: Callable) -> nn.Module:
    with torch.device("cuda"):
        model = Ffn(hidden, act)
    for norm in (model.norm.weight, model.norm.bias):
        nn.init.normal_(norm, 1.0 if norm is model.norm.weight else 0.0, 0.2)
    return model.to(BF16).eval().requires_grad_(False)


def call(act: Callable, x, *weights):
    g, b, w1, b1, w2, b2 = weights
    h = nn.functional.layer_norm(x, g.shape, g, b, 1e-5)
    return nn.functional.linear(act(nn.functional.linear(h, w1, b1)), w2, b2)


def contenders(autotune: bool, act: Callable) -> dict:
    """Freshly compiled functions, so that no cell meets the recompilation limits of another."""
    torch._dynamo.reset()

    def fresh():
        def ffn(*args):
            return call(act, *args)
        return ffn

    found = {"eager": partial(call, act), "compile": torch.compile(fresh(), dynamic=False)}
    if autotune:
        found["autotune"] = torch.compile(fresh(), dynamic=False, mode=TUNED)
    found["ours"] = torch.compile(fresh(), dynamic=False, backend="ascend_ln_fuse",
                                  options={"report": "off"})
    return found


def chosen() -> list[str]:
    """The ways that the last graph's chain took."""
    from ascend_ln_fuse import last_reports

    return [way for report in last_reports()[-1:] for site in report.sites for way in site.chain_ways()]


def peak(run) -> int:
    """Bytes above what is held before, at the highest."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def memory(hidden: int, tokens: int, act: Callable) -> dict[str, dict[str, int]]:
    """Peak bytes of eager and ours, in inference and in training."""
    found: dict[str, dict[str, int]] = {"inference": {}, "training": {}}
    model, x = make(hidden, act), torch.randn(1, tokens, hidden, device="cuda").to(BF16)
    torch._dynamo.reset()
    ours = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    for name, run in (("eager", model), ("ours", ours)):
        with torch.no_grad():
            run(x)
            found["inference"][name] = peak(lambda run=run: run(x))
    model.requires_grad_(True)
    leaf = x.clone().requires_grad_()
    for name, run in (("eager", model), ("ours", ours)):
        def step(run=run):
            run(leaf).square().sum().backward()

        step()  # gradients exist from here on, and are held before
        found["training"][name] = peak(step)
    return found


def measure(hidden: int, tokens: int, args) -> dict:
    torch.manual_seed(0)
    act = ACTIVATIONS[args.activation]
    x = torch.randn(1, tokens, hidden, device="cuda").to(BF16)
    first = [p.detach() for p in make(hidden, act).parameters()]
    held = sum(p.numel() * 2 for p in first)
    sets = [(x, *first)]
    sets += [(x, *(p.detach() for p in make(hidden, act).parameters()))
             for _ in range(sets_needed(held, 16) - 1)]
    calls = contenders(args.autotune and tokens <= args.autotune_tokens, act)
    started, compile_s = time.perf_counter(), {}
    results = {}
    for name, run in calls.items():
        results[name] = run(*sets[0])
        torch.cuda.synchronize()
        compile_s[name] = time.perf_counter() - started
        started = time.perf_counter()
    ways = chosen()
    rows = torch.arange(tokens, device="cuda")[:: max(1, tokens // 64)][:64]
    exact = call(act, x.view(-1, hidden)[rows].double(), *(p.double() for p in first))
    error = share_of_bound(*(results[name].view(-1, hidden)[rows] for name in ("ours", "eager")), exact)
    del results, exact
    times = device_times(calls, sets, args.rounds)
    plain = plain_times(calls, sets[0], count=50 if tokens <= 128 else 5, rounds=7)
    del sets, calls
    torch.cuda.empty_cache()
    found = {"hidden": hidden, "tokens": tokens, "activation": args.activation, "ways": ways, "error": error,
             "first_call_s": compile_s, "spread_us": {n: [min(t), max(t)] for n, t in times.items()}}
    for kind, measured in (("graph", times), ("plain", plain)):
        found[f"{kind}_us"] = {n: statistics.median(t) for n, t in measured.items()}
        found[f"{kind}_over_ours"] = paired(measured, "ours")
    return found


def gain(row: dict, kind: str) -> float:
    """Time of the best of the others over ours, round by round."""
    return min(row[f"{kind}_over_ours"].values())


def show(cells: list[dict], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("eager", "compile", "autotune", "ours")
    table = Table(title=title, caption="us a call (median): graph replay | called from Python; best/ours: "
                                       "the fastest of the others over ours; error: in units of the bound")
    for name in ("hidden", "tokens", *names, "best/ours", *(f"plain {n}" for n in names), "best/ours ",
                 "error"):
        table.add_column(name, justify="right")
    for row in cells:
        words = []
        for kind in ("graph", "plain"):
            us = row[f"{kind}_us"]
            words += [f"{us[n]:.1f}" if n in us else "" for n in names]
            words.append(f"{gain(row, kind):.2f}")
        table.add_row(str(row["hidden"]), str(row["tokens"]), *words, f"{row['error']:.2f}")
    Console(width=150).print(table)
    for row in cells:
        print(f"hidden {row['hidden']}, {row['tokens']} tokens: {'; '.join(row['ways'])}")
    for kind in ("graph", "plain"):
        few = [gain(row, kind) for row in cells if row["tokens"] <= 128]
        line = f"{kind}: lowest best/ours {min(gain(row, kind) for row in cells):.2f}"
        if few:
            line += f", geometric mean up to 128 tokens {math.exp(statistics.fmean(map(math.log, few))):.2f}"
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--activation", choices=sorted(ACTIVATIONS), default="gelu")
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024, 8192])
    parser.add_argument("--autotune", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--autotune-tokens", type=int, default=8192, help="no autotuning above this many")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=3600, help="start no cell after this long")
    parser.add_argument("--json", metavar="FILE", help="written anew after every cell")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.cuda is None:
        print("ffn_chain.py: needs an NVIDIA GPU; none was found", file=sys.stderr)
        return 1
    started, cells, left = time.monotonic(), [], 0
    title = f"{args.activation}; {machine()}"

    def save(**more) -> None:
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"machine": title, "cells": cells, **more}, file, indent=1)

    with torch.no_grad():
        for tokens in args.tokens:
            for hidden in args.hidden:
                if time.monotonic() - started > args.seconds:
                    left += 1
                    continue
                cells.append(measure(hidden, tokens, args))
                print(f"{hidden} x {tokens}: {cells[-1]['graph_us']}", file=sys.stderr)
                save()
    show(cells, title)
    held = memory(4096, 8192, ACTIVATIONS[args.activation])
    for kind, found in held.items():
        eager, ours = found["eager"], found["ours"]
        print(f"peak memory, {kind}, hidden 4096, 8192 tokens: eager {eager / 2**20:.0f} MiB, ours "
              f"{ours / 2**20:.0f} MiB ({100 * (1 - ours / eager):.0f}% less)")
    if left:
        print(f"{left} cells were not reached in {args.seconds:.0f} s")
    save(memory=held, not_reached=left)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
