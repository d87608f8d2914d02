"""LayerNorm and RMSNorm in every spelling that a model may choose, by generation; and what only looks
like one."""

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

from ascend_ln_fuse.remedies import remedy

COUNT = 640

#: (value, dims) -> mean over the last dim, of the value's rank
MEANS = {
    "keepdim": lambda x, d: x.mean(d, keepdim=True),
    "torch.mean": lambda x, d: torch.mean(x, dim=d, keepdim=True),
    "axis": lambda x, d: torch.mean(x, axis=d, keepdim=True),
    "positional": lambda x, d: x.mean(d, True),
    "unsqueeze": lambda x, d: x.mean(d).unsqueeze(-1),
    "None": lambda x, d: x.mean(d)[..., None],
    "sum / D": lambda x, d: x.sum(d, keepdim=True) / D,
    "sum / shape": lambda x, d: x.sum(d, keepdim=True) / x.shape[-1],
    "sum * 1/D": lambda x, d: x.sum(dim=d, keepdim=True) * (1 / D),
    "1/D * sum": lambda x, d: (1 / D) * x.sum(d, keepdim=True),
    "div sum unsqueeze": lambda x, d: torch.sum(x, d).div(D).unsqueeze(-1),
    "sum unsqueeze / D": lambda x, d: torch.sum(x, d).unsqueeze(2) / float(D),
}

#: LayerNorm: (x, centred, variant) -> biased variance. RMSNorm has the mean of squares alone.
VARIANCES = {
    "unbiased=False": lambda x, c, v: x.var(v.dim, keepdim=True, unbiased=False),
    "positional unbiased": lambda x, c, v: x.var(v.dim, False, True),
    "torch.var": lambda x, c, v: torch.var(x, dim=v.dim, unbiased=False, keepdim=True),
    "correction": lambda x, c, v: torch.var(x, v.dim, correction=0, keepdim=True),
    "var unsqueeze": lambda x, c, v: x.var(v.dim, correction=0).unsqueeze(-1),
    "var_mean": lambda x, c, v: torch.var_mean(x, v.dim, unbiased=False, keepdim=True)[0],
    "var axis": lambda x, c, v: torch.var(x, axis=v.dim, correction=0, keepdim=True),
    "var_mean correction": lambda x, c, v: torch.var_mean(x, dim=v.dim, correction=0, keepdim=True)[0],
    "squares": lambda x, c, v: v.mean(v.square(c)),
    "var of centred": lambda x, c, v: c.var(v.dim, keepdim=True, unbiased=False),
    "std squared": lambda x, c, v: x.std(v.dim, unbiased=False, keepdim=True)**2,
    "moments": lambda x, c, v: v.mean(v.square(x)) - v.square(v.mean(x)),
    "var_mean and its mean": None,  # see Spelled
}


@dataclass(frozen=True)
class Variant:
    """One spelling; each field names an entry of the table of the same meaning."""

    norm: str = "rms"
    dims: str = "-1"
    reduce: str = "keepdim"
    squares: str = "pow"
    variance: str = "squares"
    root: str = "rsqrt"
    order: str = "value first"
    eps_side: str = "right"
    eps_kind: str = "float"
    upcast: str = ".float"
    cast_place: str = "value"
    downcast: str = ".to(dtype)"
    weight: str = "y * w"
    weight_after_cast: bool = True
    bias: bool = False
    centred_twice: bool = False
    dtype: str = "bfloat16"

    @property
    def dim(self):
        return DIMS[self.dims]

    def mean(self, x):
        return MEANS[self.reduce](x, self.dim)

    def square(self, x):
        return SQUARES[self.squares](x)


CHOICES = {
    "norm": ("rms", "ln"), "dims": DIMS, "reduce": MEANS, "squares": SQUARES, "variance": VARIANCES,
    "root": ROOTS, "order": ORDERS, "eps_side": EPS_SIDES, "eps_kind": EPS_KINDS, "upcast": UPCASTS,
    "cast_place": CAST_PLACES, "downcast": DOWNCASTS, "weight": WEIGHTS,
    "weight_after_cast": (True, False), "bias": (True, False), "centred_twice": (True, False),
    "dtype": DTYPES,
}


def canonical(v: Variant) -> Variant:
    """`v` without the choices that change nothing in it, so that no spelling counts twice."""
    plain, same = Variant(), set()
    if v.norm == "rms":
        same |= {"variance", "centred_twice"}
    else:
        if v.variance not in ("squares", "moments"):
            same |= {"squares"}
        if v.variance not in ("squares", "var of centred"):  # those that read the centred value
            same |= {"centred_twice"}
            same |= {"cast_place"} if v.cast_place == "squares" else set()
        if v.variance == "var_mean and its mean":
            same |= {"reduce"}
    if "/ " in v.root or "div" in v.root:
        same |= {"order"}
    if v.weight == "none" and not v.bias:
        same |= {"weight_after_cast"}
    if v.cast_place == "nothing" and not v.weight.endswith("float()"):
        same |= {"upcast"}
    return replace(v, **{axis: getattr(plain, axis) for axis in same})


def variants() -> list[Variant]:
    """Every entry of every axis alone for both norms, then random ones, without repeats."""
    found = {}
    for norm, (axis, options) in itertools.product(("rms", "ln"), CHOICES.items()):
        for option in options:
            found[canonical(replace(Variant(norm=norm), **{axis: option}))] = None
    draw = random.Random(3)
    while len(found) < COUNT:
        pick = {axis: draw.choice(list(options)) for axis, options in CHOICES.items()}
        found[canonical(Variant(**pick))] = None
    return list(found)


class Spelled(nn.Module):
    """A norm, spelled as `variant` says."""

    def __init__(self, variant: Variant):
        super().__init__()
        self.v = variant
        dtype = getattr(torch, variant.dtype)
        self.weight = nn.Parameter(torch.rand(D, dtype=dtype) + 0.5)
        self.bias = nn.Parameter(torch.randn(D, dtype=dtype)) if variant.bias else None
        self.eps = EPS
        if variant.eps_kind == "buffer":
            self.register_buffer("eps_buffer", torch.tensor(EPS, dtype=torch.float32))

    def forward(self, x):
        v, up, place = self.v, UPCASTS[self.v.upcast], self.v.cast_place
        value = up(x) if place == "value" else x
        of = up(x) if place == "statistics" else value
        centred, again = value, of
        if v.norm == "ln" and v.variance != "var_mean and its mean":
            centred = again = value - v.mean(of)
            if v.centred_twice:
                again = of - v.mean(of)
        elif v.norm == "ln":
            stat, mean = torch.var_mean(of, v.dim, correction=0, keepdim=True)
            centred = value - mean
        if place == "squares":
            again = up(again)
        if v.norm == "rms":
            stat = v.mean(v.square(again))
        elif VARIANCES[v.variance] is not None:
            stat = VARIANCES[v.variance](of, again, v)
        if place == "rstd":
            stat = up(stat)
        eps = {"float": EPS, "f32": VALUE_F32, "attribute": self.eps}[v.eps_kind] \
            if v.eps_kind != "buffer" else self.eps_buffer
        y = ROOTS[v.root](centred, EPS_SIDES[v.eps_side](stat, eps), ORDERS[v.order])
        if v.weight_after_cast:
            y = DOWNCASTS[v.downcast](y, x)
        y = WEIGHTS[v.weight](y, self.weight, up)
        if self.bias is not None:
            y = y + self.bias
        return y if v.weight_after_cast else DOWNCASTS[v.downcast](y, x)

    def exact(self, x):
        """The same norm in float64, by its definition."""
        x = x.double()
        if self.v.norm == "ln":
            x = x - x.mean(-1, keepdim=True)
        y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        w = self.weight.double()
        y = y * {"none": 1}.get(self.v.weight, 1 + w if "1" in self.v.weight else w)
        return y if self.bias is None else y + self.bias.double()


@pytest.mark.parametrize("count, dynamic", [(COUNT, None), (80, True)], ids=["static", "dynamic"])
def test_every_spelling_is_fused_or_declined_and_right(count, dynamic, capsys):
    chosen = variants()
    assert len(chosen) >= 500
    chosen = random.Random(4).sample(chosen, min(count, len(chosen)))
    assert_nearly_all_fused(Spelled, chosen, torch.randn(SHAPE) * 2 + 0.5, capsys, dynamic)


LEARNED = torch.tensor(1e-2, requires_grad=True)

# What only looks like a norm. Each function is run on x (4, 16, 16), so that a wrong broadcast shows.


def ms(x, dim=-1, keepdim=True):
    return x.pow(2).mean(dim, keepdim=keepdim)


def centre(x, dim=-1):
    return x - x.mean(dim, keepdim=True)


def plus_equals(variance, x, view=lambda variance: variance):
    part = view(variance)
    part += 1e-5
    return x * torch.rsqrt(variance)


def two_dims_one_restored(x):
    return (x - x.mean((-2, -1)).unsqueeze(-1)) * (x.var((-2, -1), False, True) + 1e-5).rsqrt()


UNBIASED, ON_STD, ELSEWHERE, IN_PLACE = "unbiased", "added to the standard deviation", "read elsewhere", \
    "in place"

#: name -> (function, reason it is declined with, or None where nothing is found at all)
LOOK_ALIKES = {
    "eps on std": (lambda x: centre(x) / (x.std(-1, keepdim=True, unbiased=False) + 1e-3), ON_STD),
    "eps on std, left": (lambda x: centre(x) / (1e-3 + torch.sqrt(ms(centre(x)))), ON_STD),
    "eps on rms": (lambda x: x / (ms(x).sqrt() + 1e-3), ON_STD),
    "eps on rms, reciprocal": (lambda x: x * torch.reciprocal(ms(x).sqrt() + 1e-3), ON_STD),
    "eps on rms, 1/": (lambda x: x * (1 / (ms(x)**0.5 + 1e-3)), ON_STD),
    "annotated transformer": (lambda x: centre(x) / (x.std(-1, keepdim=True) + 1e-6), UNBIASED),
    "unbiased std": (lambda x: centre(x) / x.std(-1, keepdim=True), UNBIASED),
    "unbiased var": (lambda x: centre(x) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5), UNBIASED),
    "correction 1": (lambda x: centre(x) / (x.var(-1, correction=1, keepdim=True) + 1e-5).sqrt(),
                     UNBIASED),
    "var_mean unbiased": (lambda x: centre(x) / (torch.var_mean(x, -1, keepdim=True)[0] + 1e-5).sqrt(),
                          UNBIASED),
    "sum over D-1": (lambda x: centre(x) * (centre(x).pow(2).sum(-1, True) / 15 + 1e-5).rsqrt(), None),
    "mean of abs": (lambda x: x / torch.sqrt(x.abs().mean(-1, keepdim=True) + 1e-5), None),
    "no square": (lambda x: x * torch.rsqrt(x.exp().mean(-1, keepdim=True) + 1e-5), None),
    "cube": (lambda x: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5), None),
    "product of two": (lambda x: x * torch.rsqrt((x * x.abs()).mean(-1, keepdim=True).abs() + 1e-5), None),
    "fourth root": (lambda x: x * (ms(x) + 1e-5).pow(-0.25), None),
    "no root": (lambda x: x / (ms(x) + 1e-5), None),
    "eps outside": (lambda x: x * (torch.rsqrt(ms(x)) + 1e-2), None),
    "eps times": (lambda x: x * torch.rsqrt(ms(x) * 1.5), None),
    "eps scaled": (lambda x: x * torch.rsqrt(torch.add(ms(x), 1e-1, alpha=2)), None),
    "eps per channel": (lambda x: x * torch.rsqrt(ms(x) + x[0, 0].abs()), None),
    "eps with a gradient": (lambda x: x * torch.rsqrt(ms(x) + LEARNED), "eps is no number"),
    "clamped": (lambda x: x * torch.rsqrt(ms(x).clamp(min=0.5)), "bounds the squares"),
    "root clamped": (lambda x: x / ms(x).sqrt().clamp(min=0.5), "bounds a root"),
    "softmax": (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), None),
    "of another value": (lambda x: x.flip(0) * torch.rsqrt(ms(x) + 1e-5), None),
    "of a scaled value": (lambda x: x * torch.rsqrt(ms(x * 2) + 1e-5), None),
    "of a rounded value": (lambda x: x.bfloat16().float() * torch.rsqrt(ms(x) + 1e-5), None),
    "rms of x, x centred": (lambda x: centre(x) * torch.rsqrt(ms(x) + 1e-5), None),
    "var of x, x not centred": (lambda x: x * torch.rsqrt(x.var(-1, False, True) + 1e-5), None),
    "mean of another": (lambda x: (x - x.flip(0).mean(-1, True)) * (x.var(-1, False, True) + 1e-5).rsqrt(),
                        None),
    "mean - x": (lambda x: (x.mean(-1, True) - x) * (x.var(-1, False, True) + 1e-5).rsqrt(), None),
    "moments the wrong way": (lambda x: centre(x) * (x.mean(-1, True)**2 - ms(x)).abs().rsqrt(), None),
    "moments of two": (lambda x: centre(x) * (ms(x) - x.flip(0).mean(-1, True)**2).abs().rsqrt(), None),
    "other dim, mean": (lambda x: centre(x, 1) * (x.var(-1, False, True) + 1e-5).rsqrt(), None),
    "other dim, var": (lambda x: centre(x) * (x.var(1, False, True) + 1e-5).rsqrt(), None),
    "all dims": (lambda x: x * torch.rsqrt(x.pow(2).mean() + 1e-5), None),
    "dims apart": (lambda x: x * torch.rsqrt(ms(x, (0, 2)) + 1e-5), "not the last"),
    "square without keepdim": (lambda x: x[0] * torch.rsqrt(ms(x[0], -1, False) + 1e-5), None),
    "unsqueezed at the wrong place": (lambda x: x * torch.rsqrt(ms(x, -1, False).unsqueeze(1) + 1e-5), None),
    "mean without keepdim": (lambda x: (x[0] - x[0].mean(-1)) * (x[0].var(-1, False, True) + 1).rsqrt(),
                             None),
    "two dims, one restored": (lambda x: two_dims_one_restored(x[:, :4]), None),
    "kept and unsqueezed": (lambda x: x[0] * torch.rsqrt(ms(x[0]).unsqueeze(-1) + 1e-5), None),
    "rank grows": (lambda x: x[0, 0] * torch.rsqrt(ms(x[0]) + 1e-5), None),
    "eps +=, of a view": (lambda x: plus_equals(ms(x), x, lambda v: v[:]), "memory is written"),
    "eps add_": (lambda x: (x * torch.rsqrt((v := ms(x))[:].add_(1e-5)), v), IN_PLACE),
    "rsqrt_": (lambda x: (x * (v := ms(x) + 1e-5)[:].rsqrt_(), v), IN_PLACE),
    "add_ rsqrt_": (lambda x: (x * (v := ms(x))[:].add_(1e-5).rsqrt_(), v), IN_PLACE),
    "sum +=": (lambda x: plus_equals(x.abs().sum(-1, True), x), None),
    "returns rstd": (lambda x: (x * (r := torch.rsqrt(ms(x) + 1e-5)), r), ELSEWHERE),
    "returns var": (lambda x: (centre(x) * ((v := ms(centre(x))) + 1e-5).rsqrt(), v * 2), ELSEWHERE),
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
    x = torch.randn(4, 16, 16) + 0.5
    report = check(Of(function), x, fused=0, declined=None, exact=False)
    reasons = [site.reason for site in report.sites]
    assert bool(reasons) == bool(reason), reasons
    assert not reason or all(reason in why for why in reasons), reasons


STATISTICS_IN_PLACE = {
    "eps +=": lambda x: plus_equals(ms(x), x),
    "eps add_": lambda x: x * torch.rsqrt(ms(x).add_(1e-5)),
    "rsqrt_": lambda x: x * (ms(x) + 1e-5).rsqrt_(),
    "add_ rsqrt_": lambda x: x * ms(x).add_(1e-5).rsqrt_(),
    "mul_": lambda x: x.exp().mul_(torch.rsqrt(ms(x.exp()) + 1e-5)),
}


@pytest.mark.parametrize("name", STATISTICS_IN_PLACE)
def test_statistics_in_place_that_nobody_else_reads(name):
    function = Of(STATISTICS_IN_PLACE[name])
    check(function, torch.randn(4, 16, 16), fused=int(name != "mul_"))
    check(function, torch.randn(4, 16, 16, requires_grad=True), declined=None, grad=True, exact=False)


def rstd(x):
    return torch.rsqrt(ms(x) + 1e-5)


EARLY_WEIGHTS = {
    "w x rstd": lambda x, w: w * x * rstd(x),
    "x (w rstd)": lambda x, w: x * (w * rstd(x)),
    "(rstd w) x": lambda x, w: rstd(x) * w * x,
    "x w / rms": lambda x, w: x * w / torch.sqrt(ms(x) + 1e-5),
    "(x - mean) w rstd": lambda x, w: centre(x) * w * rstd(centre(x)),
    "(x - mean) (rstd w)": lambda x, w: centre(x) * (torch.rsqrt(x.var(-1, False, True) + 1e-5) * w),
    "w (x - mean) / std": lambda x, w: w * centre(x) / torch.sqrt(x.var(-1, False, True) + 1e-5),
}


class Weighted(Of):
    def __init__(self, function, dtype):
        super().__init__(function)
        self.weight = nn.Parameter(torch.rand(16, dtype=dtype) + 0.5)

    def forward(self, x):
        return self.function(x, self.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EARLY_WEIGHTS)
def test_weight_before_the_statistics(name, dtype):
    check(Weighted(EARLY_WEIGHTS[name], dtype), torch.randn(4, 5, 16).to(dtype), fused=1)


def test_weight_before_the_statistics_of_another_dtype_is_declined():
    report = check(Weighted(EARLY_WEIGHTS["w x rstd"], torch.bfloat16), torch.randn(4, 5, 16), fused=0,
                   declined=1)
    assert "another dtype" in report.sites[0].reason


def test_two_early_weights_and_a_square_input():
    """w and x have one shape: neither may be taken for the other."""
    x = torch.randn(16)
    check(Weighted(lambda x, w: w * x * rstd(x), torch.float32), x, fused=1)
    check(Weighted(lambda x, w: w * x * rstd(w), torch.float32), x, fused=1)
    check(Weighted(lambda x, w: w * x * (w * rstd(x)), torch.float32), x, fused=0)


def test_value_changed_in_place_between_statistics_and_product():
    def changed(x):
        h = x.exp()
        r = torch.rsqrt(ms(h) + 1e-5)
        h.mul_(3)
        return h * r

    def before(x):
        h = x.exp()
        h.mul_(3)
        return h * torch.rsqrt(ms(h) + 1e-5)

    check(Of(changed), torch.randn(4, 16, 16), fused=0, declined=None, exact=False)
    check(Of(before), torch.randn(4, 16, 16), declined=None, exact=False)


def test_a_weight_of_another_shape_keeps_its_own_meaning():
    scale = torch.rand(16, 1) + 0.5
    for weight in (scale, torch.tensor([3.0]), torch.rand(4, 1, 16), torch.rand(4, 16, 16)):
        check_reasons(Of(lambda x, w=weight: x * rstd(x) * w.to(x)), torch.randn(4, 16, 16))


#: name -> (function, how each of the reasons begins, with whether something is known to help)
SEVERAL = {
    "annotated transformer": (lambda x: centre(x) / (x.std(-1, keepdim=True) + 1e-6),
                              {"eps is added to the standard deviation": True,
                               "the variance is unbiased": True}),
    "eps on the root": (lambda x: centre(x) * (x.var(-1, keepdim=True).sqrt() + 1e-6).reciprocal(),
                        {"eps is added to the standard deviation": True,
                         "the variance is unbiased": True}),
    "clamped": (lambda x: centre(x) * torch.rsqrt(x.var(-1, keepdim=True).clamp_min(1e-6)),
                {"eps bounds the squares": True, "the variance is unbiased": True}),
    "in place": (lambda x: (centre(x) * torch.rsqrt((v := x.var(-1, keepdim=True))[:].add_(1e-5)), v),
                 {"the statistics are changed in place": True, "the variance is unbiased": True}),
    "scaled": (lambda x: x / (x.norm(p=1, dim=-1, keepdim=True) * 0.25).clamp_min(1e-6),
               {"the length of the vector is scaled": True,
                "normalises by another norm than the Euclidean one (p=1)": False}),
}


@pytest.mark.parametrize("function, reasons", SEVERAL.values(), ids=SEVERAL)
def test_all_reasons_at_once(function, reasons):
    """Else a user does what helps against one, and meets the next. Advice covers all, or there is none."""
    report = check(Of(function), torch.randn(4, 16, 16) + 0.5, fused=0, declined=None, exact=False)
    site, = report.sites
    found = site.reason.split("; also: ")
    assert len(found) == len(reasons) and all(map(str.startswith, found, reasons)), found
    assert site.remedy == ("; and ".join(map(remedy, found)) if all(reasons.values()) else "")
    assert [bool(remedy(why)) for why in found] == [*reasons.values()]


@pytest.mark.parametrize("function", [
    lambda x: centre(x) / x.var(-1, unbiased=False, keepdim=True).clamp_min_(1e-5).sqrt(),
    lambda x: centre(x) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True).clamp_min_(1e-5)),
    lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp_(min=1e-6))])
def test_a_clamp_in_place_is_told(function):
    report = check(Of(function), torch.randn(4, 16, 16), fused=0, declined=None, exact=False)
    assert [site.reason for site in report.sites] == ["the statistics are changed in place"]


def test_the_advice_for_all_reasons_fuses():
    """Of "annotated transformer": both changes, and neither alone."""
    def on_variance(x, unbiased):
        return centre(x) / torch.sqrt(x.var(-1, unbiased=unbiased, keepdim=True) + 1e-6)

    x = torch.randn(4, 16, 16) + 0.5
    check(Of(lambda x: on_variance(x, False)), x, fused=1)
    for half in (lambda x: on_variance(x, True),
                 lambda x: centre(x) / (x.std(-1, unbiased=False, keepdim=True) + 1e-6)):
        check(Of(half), x, fused=0, declined=1, exact=False)
