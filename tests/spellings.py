"""Spellings of norms by generation: what tests of several kinds of norms choose from, and how they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields

import numpy as np
import torch
from checks import assert_within_bound
from torch import nn

from ascend_ln_fuse import last_reports

D, EPS = 16, 1e-5
SHAPE = (3, 5, D)
PER_GRAPH = 40

# The axes. Each maps a name to a small function; a variant picks one of each.

DIMS = {"[-1]": [-1], "-1": -1, "(-1,)": (-1,), "[rank-1]": [len(SHAPE) - 1], "rank-1": len(SHAPE) - 1}

SQUARES = {
    "pow": lambda x: x.pow(2),
    "torch.pow": lambda x: torch.pow(x, 2.0),
    "x*x": lambda x: x * x,
    "torch.mul": lambda x: torch.mul(x, x),
    "square": lambda x: x.square(),
    "torch.square": torch.square,
    "**2": lambda x: x**2,
}

#: (value, variance with eps, order) -> value / sqrt(variance)
ROOTS = {
    "rsqrt": lambda x, s, o: o(x, torch.rsqrt(s)),
    ".rsqrt": lambda x, s, o: o(x, s.rsqrt()),
    "pow(-0.5)": lambda x, s, o: o(x, s.pow(-0.5)),
    "**-0.5": lambda x, s, o: o(x, s**-0.5),
    "1/sqrt": lambda x, s, o: o(x, 1 / s.sqrt()),
    "1.0/torch.sqrt": lambda x, s, o: o(x, 1.0 / torch.sqrt(s)),
    "reciprocal": lambda x, s, o: o(x, torch.reciprocal(torch.sqrt(s))),
    ".reciprocal": lambda x, s, o: o(x, s.sqrt().reciprocal()),
    "/ sqrt": lambda x, s, o: x / torch.sqrt(s),
    ".div(sqrt)": lambda x, s, o: x.div(s.sqrt()),
    "/ **0.5": lambda x, s, o: x / s**0.5,
    "torch.div": lambda x, s, o: torch.div(x, s.pow(0.5)),
}

ORDERS = {
    "value first": lambda a, b: a * b,
    "value last": lambda a, b: b * a,
    "torch.mul": torch.mul,
    ".mul": lambda a, b: b.mul(a),
}


EPS_SIDES = {
    "right": lambda s, e: s + e,
    "left": lambda s, e: e + s,
    "torch.add": torch.add,
    ".add": lambda s, e: s.add(e),
}

EPS_KINDS = ("float", "f32", "attribute", "buffer")
VALUE_F32 = np.float32(EPS).item()

#: casts to fp32: where x is low precision
UPCASTS = {
    ".float": lambda x: x.float(),
    ".to": lambda x: x.to(torch.float32),
    ".to(dtype=)": lambda x: x.to(dtype=torch.float32),
    ".type": lambda x: x.type(torch.float32),
}

#: what is cast up: the whole norm, its statistics alone, the square alone, or nothing
CAST_PLACES = ("value", "statistics", "squares", "rstd", "nothing")

#: (result, x) -> the result in the dtype of x
DOWNCASTS = {
    ".to(dtype)": lambda y, x: y.to(x.dtype),
    ".type_as": lambda y, x: y.type_as(x),
    ".to(other)": lambda y, x: y.to(x),
    "own name": lambda y, x: {torch.bfloat16: y.bfloat16, torch.float16: y.half,
                              torch.float32: y.float}[x.dtype](),
}

#: (normed, weight, cast to fp32) -> weighted
WEIGHTS = {
    "none": lambda y, w, up: y,
    "y * w": lambda y, w, up: y * w,
    "w * y": lambda y, w, up: w * y,
    "torch.mul": lambda y, w, up: torch.mul(w, y),
    "1 + w": lambda y, w, up: y * (1 + w),
    "w + 1": lambda y, w, up: (w + 1.0) * y,
    "1 + w.float()": lambda y, w, up: y * (1.0 + up(w)),
    "w.float()": lambda y, w, up: up(w) * y,
}

DTYPES = ("bfloat16", "float16", "float32")


class Many(nn.Module):
    """Norms (with a variant `v` each, whose dtype their input has) as one graph."""

    def __init__(self, items):
        super().__init__()
        self.items = nn.ModuleList(items)

    def forward(self, xs):
        return [item(xs[item.v.dtype]) for item in self.items]


def outcome(sites, count) -> list[list]:
    """The reports of each child of a `Many`, by its place."""
    per_item = [[] for _ in range(count)]
    for site in sites:
        path = site.where.partition(",")[0]
        per_item[int(path.rpartition(".")[2])].append(site)
    return per_item


def run_variants(make: Callable, chosen: Sequence, x: torch.Tensor, dynamic: bool | None = None,
                 sane: float = 0.3) -> list[tuple]:
    """(variant, its site reports) for all; each is checked against eager and float64.

    `make(variant)` is the norm so spelled, whose `exact(x)` says in float64 what it is to give; `sane`: how
    far eager may be from that.
    """
    torch._dynamo.reset()
    model = Many([make(v) for v in chosen]).eval()
    xs = {name: x.to(getattr(torch, name)) for name in DTYPES}
    compiled = torch.compile(model, backend="ascend_ln_fuse", fullgraph=True, dynamic=dynamic,
                             options={"report": "off"})
    with torch.no_grad():
        ours, eager = compiled(xs), model(xs)
        exact = [item.exact(xs[item.v.dtype]) for item in model.items]
    for v, a, b, c in zip(chosen, ours, eager, exact):
        assert (b.double() - c).abs().max() < sane, f"the generator is wrong: {v}"
        try:
            assert_within_bound(a, b, c)
        except AssertionError as error:
            raise AssertionError(f"{different(v)}: {error}") from None
    return list(zip(chosen, outcome(last_reports()[-1].sites, len(chosen))))


def different(variant) -> dict:
    """The fields in which a variant differs from the plain one."""
    plain = asdict(type(variant)())
    return {f.name: getattr(variant, f.name) for f in fields(variant)
            if getattr(variant, f.name) != plain[f.name] or f.name == "norm"}


def assert_nearly_all_fused(make: Callable, chosen: Sequence, x: torch.Tensor, capsys,
                            dynamic: bool | None = None, sane: float = 0.3) -> None:
    """Run all of `chosen`, print the share that is fused, and assert that none is passed over in silence and
    that the share is at least 98%."""
    results = []
    for start in range(0, len(chosen), PER_GRAPH):
        results += run_variants(make, chosen[start:start + PER_GRAPH], x, dynamic, sane)
    missed = [different(v) for v, sites in results if not sites]
    fused = [v for v, sites in results if [s.status for s in sites] == ["fused"]]
    reasons = Counter(s.reason for _, sites in results for s in sites if s.status != "fused")
    share = len(fused) / len(chosen)
    with capsys.disabled():
        print(f"\n{len(fused)} of {len(chosen)} spellings fused ({share:.1%}); "
              f"declined: {dict(reasons)}; missed: {len(missed)}")
    assert not missed, missed[:10]
    assert share >= 0.98, [(different(v), [s.reason for s in sites]) for v, sites in results
                           if [s.status for s in sites] != ["fused"]][:10]
