"""l2 norms in every spelling that a model may choose, by generation: `F.normalize` and what it computes
written out, and `x * rsqrt(sum(x * x) + eps)`; and what only looks like one."""

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from checks import check
from reasons import check_reasons
from spellings import (
    CAST_PLACES,
    DIMS,
    DOWNCASTS,
    DTYPES,
    EPS,
    EPS_KINDS,
    EPS_SIDES,
    ORDERS,
    ROOTS,
    SHAPE,
    SQUARES,
    UPCASTS,
    VALUE_F32,
    WEIGHTS,
    D,
    assert_nearly_all_fused,
)
from torch import nn
from torch.nn import functional as F

COUNT = 560

# The axes that other norms do not have. Each maps a name to a small function.

#: (value, dims) -> sum over the last dim, of the value's rank
SUMS = {
    "keepdim": lambda x, d: x.sum(d, keepdim=True),
    "torch.sum": lambda x, d: torch.sum(x, dim=d, keepdim=True),
    "axis": lambda x, d: torch.sum(x, axis=d, keepdim=True),
    "positional": lambda x, d: x.sum(d, True),
    "unsqueeze": lambda x, d: x.sum(d).unsqueeze(-1),
    "None": lambda x, d: x.sum(d)[..., None],
    "dtype": lambda x, d: x.sum(d, keepdim=True, dtype=torch.float32),
}

#: (value, dims) -> its length, of the value's rank
LENGTHS = {
    ".norm": lambda x, d: x.norm(dim=d, keepdim=True),
    ".norm p": lambda x, d: x.norm(p=2, dim=d, keepdim=True),
    ".norm positional": lambda x, d: x.norm(2, d, True),
    ".norm unsqueeze": lambda x, d: x.norm(2.0, d).unsqueeze(-1),
    "torch.norm": lambda x, d: torch.norm(x, dim=d, keepdim=True),
    "torch.norm p": lambda x, d: torch.norm(x, p=2, dim=d, keepdim=True),
    "torch.norm fro": lambda x, d: torch.norm(x, "fro", d, True),
    "torch.norm dtype": lambda x, d: torch.norm(x, 2, d, True, dtype=torch.float32),
    "linalg.norm": lambda x, d: torch.linalg.norm(x, dim=d, keepdim=True),
    "linalg.norm ord": lambda x, d: torch.linalg.norm(x, ord=2, dim=-1, keepdim=True),
    "vector_norm": lambda x, d: torch.linalg.vector_norm(x, dim=d, keepdim=True),
    "vector_norm positional": lambda x, d: torch.linalg.vector_norm(x, 2, d)[..., None],
    "sqrt of sum": lambda x, d: (x * x).sum(d, keepdim=True).sqrt(),
    "sum ** 0.5": lambda x, d: torch.sum(x**2, d, keepdim=True) ** 0.5,
}

CLAMPS = {
    "clamp_min": lambda n, e: n.clamp_min(e),
    "clamp": lambda n, e: n.clamp(e),
    "clamp(min=)": lambda n, e: n.clamp(min=e),
    "torch.clamp": lambda n, e: torch.clamp(n, min=e),
    "torch.clamp_min": torch.clamp_min,
    "torch.clamp max=None": lambda n, e: torch.clamp(n, e, None),
}

#: (value, length, order) -> value / length
QUOTIENTS = {
    "/": lambda x, n, o: x / n,
    ".div": lambda x, n, o: x.div(n),
    "torch.div": lambda x, n, o: torch.div(x, n),
    "expand_as": lambda x, n, o: x / n.expand_as(x),
    "expand": lambda x, n, o: x / n.expand(-1, -1, D),
    "1 /": lambda x, n, o: o(x, 1.0 / n),
    "reciprocal": lambda x, n, o: o(x, n.reciprocal()),
    "** -1": lambda x, n, o: o(x, n**-1),
}

#: (value, dims, eps) -> F.normalize
CALLS = {
    "dim=": lambda x, d, e: F.normalize(x, dim=d, eps=e),
    "p=": lambda x, d, e: F.normalize(x, p=2, dim=d, eps=e),
    "positional": lambda x, d, e: F.normalize(x, 2.0, d, e),
    "input=": lambda x, d, e: F.normalize(eps=e, dim=d, input=x),
}


@dataclass(frozen=True)
class Variant:
    """One spelling; each field names an entry of the table of the same meaning.

    norm: "l2" (eps under the root), "unit" (F.normalize written out) or "call"."""

    norm: str = "l2"
    dims: str = "-1"
    squares: str = "pow"
    reduce: str = "keepdim"
    root: str = "rsqrt"
    eps_side: str = "right"
    length: str = ".norm"
    clamp: str = "clamp_min"
    quotient: str = "/"
    call: str = "dim="
    order: str = "value first"
    eps_kind: str = "float"
    upcast: str = ".float"
    cast_place: str = "value"
    downcast: str = ".to(dtype)"
    weight: str = "y * w"
    weight_after_cast: bool = True
    bias: bool = False
    dtype: str = "bfloat16"

    @property
    def dim(self):
        return DIMS[self.dims]


CHOICES = {
    "norm": ("l2", "unit", "call"), "dims": DIMS, "squares": SQUARES, "reduce": SUMS, "root": ROOTS,
    "eps_side": EPS_SIDES, "length": LENGTHS, "clamp": CLAMPS, "quotient": QUOTIENTS, "call": CALLS,
    "order": ORDERS, "eps_kind": EPS_KINDS, "upcast": UPCASTS, "cast_place": CAST_PLACES,
    "downcast": DOWNCASTS, "weight": WEIGHTS, "weight_after_cast": (True, False), "bias": (True, False),
    "dtype": DTYPES,
}

#: the axes that say nothing in each norm
IDLE = {
    "l2": {"length", "clamp", "quotient", "call"},
    "unit": {"squares", "reduce", "root", "eps_side", "call"},
    "call": {"squares", "reduce", "root", "eps_side", "length", "clamp", "quotient", "order"},
}


def canonical(v: Variant) -> Variant:
    """`v` without the choices that change nothing in it, so that no spelling counts twice."""
    plain, idle = Variant(), set(IDLE[v.norm])
    divides = "/ " in v.root or "div" in v.root if v.norm == "l2" else \
        v.quotient in ("/", ".div", "torch.div", "expand_as", "expand")
    if divides:
        idle.add("order")
    if v.weight == "none" and not v.bias:
        idle.add("weight_after_cast")
    # A call has nothing inside to cast, and what is written out no squares.
    if v.cast_place in {"l2": (), "unit": ("squares",), "call": ("squares", "statistics", "rstd")}[v.norm]:
        idle.add("cast_place")
    elif v.cast_place == "nothing" and not v.weight.endswith("float()"):
        idle.add("upcast")
    return replace(v, **{axis: getattr(plain, axis) for axis in idle})


def variants() -> list[Variant]:
    """Every entry of every axis alone for each norm, then random ones, without repeats."""
    found = {}
    for norm, (axis, options) in itertools.product(CHOICES["norm"], CHOICES.items()):
        for option in options:
            found[canonical(replace(Variant(norm=norm), **{axis: option}))] = None
    draw = random.Random(3)
    while len(found) < COUNT:
        pick = {axis: draw.choice(list(options)) for axis, options in CHOICES.items()}
        found[canonical(Variant(**pick))] = None
    return list(found)


class Spelled(nn.Module):
    """An l2 norm, spelled as `variant` says."""

    def __init__(self, variant: Variant):
        super().__init__()
        self.v = variant
        dtype = getattr(torch, variant.dtype)
        self.weight = nn.Parameter(torch.rand(D, dtype=dtype) + 0.5)
        self.bias = nn.Parameter(torch.randn(D, dtype=dtype)) if variant.bias else None
        self.eps = EPS
        if variant.eps_kind == "buffer":
            self.register_buffer("eps_buffer", torch.tensor(EPS, dtype=torch.float32))

    def normed(self, x):
        v, up, place = self.v, UPCASTS[self.v.upcast], self.v.cast_place
        eps = {"float": EPS, "f32": VALUE_F32, "attribute": self.eps}[v.eps_kind] \
            if v.eps_kind != "buffer" else self.eps_buffer
        value = up(x) if place == "value" else x
        if v.norm == "call":
            return CALLS[v.call](value, v.dim, eps)
        of = up(x) if place == "statistics" else value
        if v.norm == "unit":
            length = LENGTHS[v.length](of, v.dim)
            length = up(length) if place == "rstd" else length
            return QUOTIENTS[v.quotient](value, CLAMPS[v.clamp](length, eps), ORDERS[v.order])
        total = SUMS[v.reduce](SQUARES[v.squares](up(of) if place == "squares" else of), v.dim)
        total = up(total) if place == "rstd" else total
        return ROOTS[v.root](value, EPS_SIDES[v.eps_side](total, eps), ORDERS[v.order])

    def forward(self, x):
        v, y = self.v, self.normed(x)
        if v.weight_after_cast:
            y = DOWNCASTS[v.downcast](y, x)
        y = WEIGHTS[v.weight](y, self.weight, UPCASTS[v.upcast])
        if self.bias is not None:
            y = y + self.bias
        return y if v.weight_after_cast else DOWNCASTS[v.downcast](y, x)

    def exact(self, x):
        """The same norm in float64, by its definition."""
        x = x.double()
        squares = x.square().sum(-1, keepdim=True)
        y = x / ((squares + EPS).sqrt() if self.v.norm == "l2" else squares.sqrt().clamp_min(EPS))
        w = self.weight.double()
        y = y * {"none": 1}.get(self.v.weight, 1 + w if "1" in self.v.weight else w)
        return y if self.bias is None else y + self.bias.double()


@pytest.mark.parametrize("count, dynamic", [(COUNT, None), (80, True)], ids=["static", "dynamic"])
def test_every_spelling_is_fused_or_declined_and_right(count, dynamic, capsys):
    chosen = random.Random(4).sample(variants(), count)
    assert_nearly_all_fused(Spelled, chosen, torch.randn(SHAPE) * 2 + 0.5, capsys, dynamic, sane=0.05)
