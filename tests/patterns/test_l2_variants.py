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
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ascend_ln_fuse import last_reports, npugraph_ex_pass

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


# What only looks like an l2 norm. Each function is run on x (4, 16, 16), so that a wrong broadcast shows.


def length(x, dim=-1, keepdim=True, **more):
    return x.norm(dim=dim, keepdim=keepdim, **more)


def total(x, dim=-1):
    return (x * x).sum(dim, keepdim=True)


def response(x):
    """ConvNeXt V2's: divided by the mean of the lengths."""
    lengths = torch.linalg.vector_norm(x, ord=2, dim=(0, 1), keepdim=True)
    return x * (lengths / (lengths.mean(-1, keepdim=True) + 1e-6))


def magnitude_preserving(x):
    """EDM2's, as in diffusers' autoencoder_mmaudio.py."""
    n = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x / torch.add(1e-4, n, alpha=0.25).to(x.dtype)


def in_place(x, dtype=torch.float16):
    """The length is fp32, and eps no 0: eager divides a row of zeros by it."""
    h = x.to(dtype)
    return h.div_(h.float().norm(dim=-1, keepdim=True).clamp_min(1e-12))


def lucidrains(x):
    """RMSNorm of older repositories."""
    n = torch.norm(x, dim=-1, keepdim=True) * 16 ** -0.5
    return x / n.clamp(min=1e-8)


ORDER, ADDED, SQUARED = "another norm than the Euclidean", "added to the length", "bounds the squares"
BOUNDED, SCALED, ELSEWHERE, IN_PLACE = "bounds a root", "scaled before", "read elsewhere", "in place"

LEARNED = torch.tensor(4.0, requires_grad=True)

#: name -> (function, reason it is declined with, or None where nothing is found at all)
LOOK_ALIKES = {
    "p=1": (lambda x: F.normalize(x, p=1, dim=-1), ORDER),
    "p=inf": (lambda x: F.normalize(x, float("inf"), -1), ORDER),
    "p=1, written out": (lambda x: x / length(x, p=1), ORDER),
    "p=3, clamped": (lambda x: x / torch.linalg.vector_norm(x, 3, -1, True).clamp_min(1e-6), ORDER),
    "p=0": (lambda x: x / length(x, p=0), ORDER),
    "dims apart": (lambda x: F.normalize(x, dim=(0, 2)), "not the last"),
    "dims apart, written out": (lambda x: x / length(x, (0, 2)), "not the last"),
    "all dims": (lambda x: x / x.norm(), None),
    "matrix norm": (lambda x: x / torch.linalg.norm(x, ord=2, dim=(-2, -1), keepdim=True), None),
    "eps added": (lambda x: x / (length(x) + 1e-2), ADDED),
    "eps added, left": (lambda x: x * (1 / (1e-2 + length(x))), ADDED),
    "eps added, scaled": (magnitude_preserving, ADDED),
    "eps added to the root": (lambda x: x / (total(x).sqrt() + 1e-2), "added to the standard deviation"),
    "eps twice": (lambda x: x / (total(x) + 0.5).sqrt().clamp_min(4.0), BOUNDED),
    "std clamped": (lambda x: x / (x - x.mean(-1, True)).pow(2).mean(-1, True).sqrt().clamp_min(1.0), None),
    "squares clamped": (lambda x: x * total(x).clamp_min(9.0).rsqrt(), SQUARED),
    "squares clamped, /": (lambda x: x / total(x).clamp(min=9.0).sqrt(), SQUARED),
    "eps of each channel": (lambda x: x / length(x).clamp(min=x[0, 0].abs() + 4), None),
    "eps of each row": (lambda x: x / length(x).clamp(min=x[..., :1].abs() + 4), None),
    "eps with a gradient": (lambda x: x / length(x).clamp(min=LEARNED), "eps is no number"),
    "clamped from above": (lambda x: x / length(x).clamp(max=4.0), None),
    "clamped on both sides": (lambda x: x / length(x).clamp(1.0, 4.0), None),
    "clamped in place": (lambda x: x / length(x).clamp_(min=4.0), IN_PLACE),
    "clamped in place, min": (lambda x: x / length(x).clamp_min_(4.0), IN_PLACE),
    "scaled": (lambda x: x / (0.25 * length(x)), SCALED),
    "scaled, / sqrt(D)": (lambda x: x / (length(x) / 4.0), SCALED),
    "scaled and clamped": (lucidrains, SCALED),
    "scaled, eps added": (lambda x: x / (length(x) * 16**-0.5 + 1e-8), ADDED),
    "scaled, of another value": (lambda x: x.flip(0) / (length(x) * 0.25), None),
    "a scaled root": (lambda x: x / (total(x).sqrt() * 0.25), None),
    "divided by": (lambda x: x / (2.0 / length(x)), None),
    "squared": (lambda x: x / length(x)**2, None),
    "no root": (lambda x: x / (total(x) + 1e-6), None),
    "no square": (lambda x: x * torch.rsqrt(x.exp().sum(-1, keepdim=True)), None),
    "of another value": (lambda x: x.flip(0) / length(x), None),
    "sum of another value": (lambda x: x.flip(0) * torch.rsqrt(total(x) + 1e-6), None),
    "of a scaled value": (lambda x: x / length(x * 2), None),
    "of a rounded value": (lambda x: x.bfloat16().float() / length(x), None),
    "the length alone": (lambda x: length(x).clamp_min(1e-6) / 2, None),
    "without keepdim": (lambda x: x[0] / length(x[0], keepdim=False), None),
    "unsqueezed at the wrong place": (lambda x: x[0] / length(x[0], keepdim=False).unsqueeze(0), None),
    "expanded along the row": (lambda x: x[0] / length(x[0], keepdim=False).expand_as(x[0]), None),
    "returns the length": (lambda x: (x / (n := length(x)), n), ELSEWHERE),
    "returns the sum": (lambda x: (x * torch.rsqrt((s := total(x)) + 1e-6), s), ELSEWHERE),
    "response": (response, None),
    "in place, fp16": (in_place, "wider dtype than the result"),
    "softmax": (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), None),
    "cosine": (lambda x: x * x.flip(0) / (length(x) * length(x.flip(0))), None),
}


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_left_alone(name):
    function, reason = LOOK_ALIKES[name]
    report = check(Of(function), torch.randn(4, 16, 16) + 0.5, fused=0, declined=None, exact=False)
    reasons = [site.reason for site in report.sites]
    assert bool(reasons) == bool(reason), reasons
    assert not reason or all(reason in why for why in reasons), reasons


@pytest.mark.parametrize("function", [
    lambda x: F.normalize(x), lambda x: x / length(x, 1).clamp_min(1e-6),
    lambda x: x * torch.rsqrt(total(x, 1) + 1e-6)], ids=["F.normalize", "written out", "under the root"])
def test_another_dim_lies_across_memory(function):
    check_reasons(Of(function), torch.randn(4, 16, 16) + 0.5)
    check_reasons(Of(function), torch.randn(4, 16, 3), fused=0, declined=("not the innermost in memory",))


def test_in_place_by_a_length_of_another_dtype():
    check(Of(lambda x: in_place(x, torch.bfloat16)), torch.randn(4, 16, 16), fused=1, exact=False)


def test_the_length_of_a_centred_value_is_an_l2_norm_of_that():
    def centred(x):
        c = x - x.mean(-1, keepdim=True)
        return c / length(c)

    report = check_reasons(Of(centred), torch.randn(4, 16, 16))
    assert "normalize" in report.sites[0].region


@pytest.mark.parametrize("eager", [
    lambda x: F.normalize(x, dim=-1), lambda x: F.normalize(x.float(), dim=-1).to(x.dtype),
    lambda x: x / length(x).clamp(min=1e-6), lambda x: x / torch.linalg.norm(x, dim=-1, keepdim=True),
    lambda x: x * torch.rsqrt(total(x) + 1e-6), lambda x: x / torch.sqrt(x.pow(2).sum(-1, True) + 1e-6)],
    ids=["F.normalize", "cast", "clamp", "linalg.norm", "sum", "root of the sum"])
def test_aten_graphs(eager):
    """linalg_vector_norm, clamp_min, expand and div are one norm."""
    x = torch.randn(3, 5, 16).bfloat16()
    graph = make_fx(eager, tracing_mode="fake")(x)
    npugraph_ex_pass(graph, [x], None)
    assert [site.status for site in last_reports()[-1].sites] == ["fused"]
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls[0] is torch.ops.ascend_ln_fuse.region.default
    torch.testing.assert_close(graph(x), eager(x), rtol=2**-6, atol=0)


def extreme(dtype):
    """Rows of zeros, below eps, whose squares are too small or too large, and with a number that is not
    finite."""
    x = torch.randn(9, 16) * torch.tensor([0.0, 1e-3, 1e-13, 1e-30, 3e4, 1e20, 3e38, 1, 1])[:, None]
    x[7, 3], x[8, 3] = float("inf"), float("nan")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, eager", {
    "F.normalize": lambda x: F.normalize(x, dim=-1),
    "clamped": lambda x: F.normalize(x, dim=-1, eps=0.5),
    "no eps": lambda x: x / length(x),
    "sum": lambda x: x * torch.rsqrt(total(x) + 1e-6),
    "sum, no eps": lambda x: x / total(x).sqrt()}.items())
def test_rows_of_every_size(name, eager, dtype):
    """NaN and infinities are where eager has them (in fp16, where 1e-12 is 0, F.normalize makes NaN of a row
    of zeros), and numbers as eager has them in fp32: there lengths and sums overflow later than in fp16."""
    x = extreme(getattr(torch, dtype))
    got = torch.compile(eager, backend="ascend_ln_fuse", options={"report": "off"})(x)
    want = eager(x.float()).to(x.dtype)
    if "sum" not in name:
        assert torch.equal(got.isnan(), eager(x).isnan()) and torch.equal(got.isinf(), eager(x).isinf())
        want[got.isnan()] = float("nan")
    assert [site.status for site in last_reports()[-1].sites] == ["fused"]
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(x.dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("eager", [
    lambda x: F.normalize(x, dim=-1, eps=0.5), lambda x: F.normalize(x, dim=-1),
    lambda x: x / length(x).clamp(min=0.5), lambda x: x * torch.rsqrt(total(x) + 1e-6)],
    ids=["clamped", "default", "written out", "sum"])
def test_gradients(eager):
    """Rows of zeros and rows below eps, where the length is a constant to the gradient, among them."""
    x = torch.randn(5, 16) * torch.tensor([0.0, 1e-3, 0.1, 1.0, 100.0])[:, None]
    dy, found = torch.randn(5, 16), []
    for run in (eager, torch.compile(eager, backend="ascend_ln_fuse", options={"report": "off"})):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(run(leaf), leaf, dy)[0])
    assert [site.status for site in last_reports()[-1].sites] == ["fused"]
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)
