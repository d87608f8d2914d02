"""What the region of a handwritten norm says: which casts are kept, what is read, what is left alone."""

import re

import pytest
import torch
from reasons import check_reasons
from torch import nn

D = 16
EPS = 1e-6


def ms(x):
    return x.pow(2).mean(-1, keepdim=True)


class Norm(nn.Module):
    """`function(x, weight, *more)` with a weight of the input's dtype."""

    def __init__(self, function, dtype=torch.bfloat16):
        super().__init__()
        self.function = function
        self.eps = EPS
        self.weight = nn.Parameter(torch.rand(D, dtype=dtype) + 0.5)

    def forward(self, x, *more):
        return self.function(self, x, *more)


def llama(m, x):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(ms(h) + m.eps)
    return m.weight * h.to(x.dtype)


def gemma(m, x):
    h = x.float()
    h = h * torch.rsqrt(ms(h) + m.eps)
    return (h * (1.0 + m.weight.float())).type_as(x)


def gpt_oss(m, x):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(ms(h) + m.eps)
    return (m.weight * h).to(x.dtype)


def t5(m, x):
    h = x * torch.rsqrt(ms(x.to(torch.float32)) + m.eps)
    return m.weight * h.to(m.weight.dtype)


def all_low(m, x):
    return m.weight * (x * torch.rsqrt(ms(x) + m.eps))


def rounded_before(m, x):
    h = (x.float() * 3).bfloat16()  # the model rounds here, so the region must
    return h * torch.rsqrt(ms(h.float()) + m.eps).bfloat16() * m.weight


def layer_norm(m, x):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    return m.weight * ((h - mean) / torch.sqrt(ms(h - mean) + m.eps)).to(x.dtype)


#: model -> lines of its region between the head (x0: the value, x1: the weight) and the output
BODIES = {
    llama: """v0: f32 = cast(x0)
v1: f32 = rms_norm(v0, none, s0)
v2: bf16 = cast(v1)
v3: bf16 = mul(x1, v2)""",
    gemma: """v0: f32 = cast(x0)
v1: f32 = rms_norm(v0, none, s0)
v2: f32 = cast(x1)
v3: f32 = add(1.0, v2)
v4: f32 = mul(v1, v3)
v5: bf16 = cast(v4)""",
    gpt_oss: """v0: f32 = cast(x0)
v1: f32 = rms_norm(v0, none, s0)
v2: f32 = mul(x1, v1)
v3: bf16 = cast(v2)""",
    t5: """v0: f32 = cast(x0)
v1: f32 = rms_norm(v0, none, s0)
v2: bf16 = cast(v1)
v3: bf16 = mul(x1, v2)""",
    all_low: """v0: bf16 = rms_norm(x0, none, s0)
v1: bf16 = mul(x1, v0)""",
    rounded_before: """v0: f32 = cast(x0)
v1: f32 = mul(v0, 3.0)
v2: bf16 = cast(v1)
v3: bf16 = rms_norm(v2, none, s0)
v4: bf16 = mul(v3, x1)""",
    layer_norm: """v0: f32 = cast(x0)
v1: f32 = layer_norm(v0, none, none, s0)
v2: bf16 = cast(v1)
v3: bf16 = mul(x1, v2)""",
}


@pytest.mark.parametrize("function", BODIES, ids=lambda f: f.__name__)
def test_region(function):
    """Where the model rounds, the region rounds; casts of the statistics are gone."""
    report = check_reasons(Norm(function), torch.randn(3, 5, D).bfloat16())
    site, = report.sites
    operands = {f"in x0: bf16[*, *, {D}]", f"in x1: bf16[{D}]"}
    lines = site.region.splitlines()
    # The weight may be read before the value: names follow the order of use.
    if lines[1] == f"in x0: bf16[{D}]":
        names = str.maketrans("01", "10")
        lines = [line if not line.strip() else _renamed(line, names) for line in lines]
    assert lines[0] == f"space [*, *, {D}]" and set(lines[1:3]) == operands
    assert "\n".join(lines[4:-1]) == BODIES[function]


def _renamed(line, names):
    return re.sub(r"\bx([01])\b", lambda match: "x" + match[1].translate(names), line)


def test_two_norms_of_one_eps_and_of_two():
    def both(m, x):
        y = x * m.weight
        return tuple(y * torch.rsqrt(ms(y) + eps) for eps in (m.eps, 0.5)) + \
            (x * torch.rsqrt(ms(x) + m.eps),)

    check_reasons(Norm(both, torch.float32), torch.randn(3, 5, D), fused=3, dynamic=True)


def test_several_dims():
    def norm(m, x):
        h = x - x.mean((-2, -1), keepdim=True)
        return h * torch.rsqrt(h.square().mean((-2, -1), keepdim=True) + EPS)

    report = check_reasons(Norm(norm, torch.float32), torch.randn(3, 5, D))
    assert report.sites[0].region.startswith(f"space [*, {5 * D}]")


class Left(nn.Module):
    """Norms that stand beside something which forbids a naive rewrite."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def value_written_later(x):
    h = x.exp()
    y = h * torch.rsqrt(ms(h) + EPS)
    h.add_(1)
    return y, h


def result_written_later(x):
    y = x * torch.rsqrt(ms(x) + EPS)
    y.mul_(2)
    return y


def view_of_value_written_between(x):
    h = x.exp()
    scale = torch.rsqrt(ms(h) + EPS)
    h[:, 0] = 0
    return h * scale


def cast_read_elsewhere(x):
    wide = x.double()
    return x * torch.rsqrt(ms(wide) + EPS).to(x.dtype), wide


def cast_of_what_is_written_later(x):
    """Of fp32, `float()` is the tensor itself."""
    y = x.float() * torch.rsqrt(ms(x.float()) + EPS)
    x.add_(1)
    return y


def input_written_first(x):
    x.mul_(2)
    return x * torch.rsqrt(ms(x) + EPS)


@pytest.mark.parametrize("function", [value_written_later, result_written_later, cast_read_elsewhere,
                                      cast_of_what_is_written_later, input_written_first],
                         ids=lambda f: f.__name__)
def test_memory_written_beside_a_norm(function):
    check_reasons(Left(function), torch.randn(3, 5, D))


def test_value_written_between_statistics_and_product():
    check_reasons(Left(view_of_value_written_between), torch.randn(3, 5, D), fused=0,
               declined=("must run between",))


def test_centred_value_read_elsewhere_is_declined_by_name():
    def norm(x):
        h = x - x.mean(-1, keepdim=True)
        return h * torch.rsqrt(ms(h) + EPS), h

    check_reasons(Left(norm), torch.randn(3, 5, D), fused=0, declined=("read elsewhere",))


def test_grad_mode_switched_inside_is_declined():
    def norm(x):
        with torch.no_grad():
            scale = torch.rsqrt(ms(x) + EPS)
        return x * scale

    x = torch.randn(3, 5, D, requires_grad=True)
    check_reasons(Left(norm), x, fused=0, declined=("mode switched",), grad=True)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_mean_far_from_zero(scale):
    """Moments lose everything at mean/std 1000; the fused norm must be at least as good as that."""
    def norm(m, x):
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - mean**2 + m.eps)

    check_reasons(Norm(norm, torch.float32), torch.randn(3, 5, D) * scale + 20 * scale)


def test_rows_with_inf_nan_and_zeros():
    x = torch.randn(6, D)
    x[1], x[2, 3], x[3, 4], x[4] = 0, float("inf"), float("nan"), 1e-30
    check_reasons(Norm(llama, torch.float32), x)
    check_reasons(Norm(layer_norm, torch.float32), x)


@pytest.mark.parametrize("shape", [(D,), (1, D), (0, D), (2, 1, 3, D), (2, 3, 4, 5, D)], ids=str)
def test_ranks(shape):
    check_reasons(Norm(gemma), torch.randn(shape).bfloat16())
    check_reasons(Norm(layer_norm), torch.randn(shape).bfloat16())


def test_lane_of_one():
    def norm(x):
        return x * torch.rsqrt(ms(x) + EPS)

    check_reasons(Left(norm), torch.randn(5, 1))
    check_reasons(Left(norm), torch.randn(1))
