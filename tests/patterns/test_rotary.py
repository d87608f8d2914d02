"""Rotary embeddings below a norm: taken along however models spell them, left alone where in doubt."""

import sys

import pytest
import torch
from checks import check, fresh
from rotary_forms import (
    FORMS,
    HALVES,
    PAIRS,
    B,
    D,
    H,
    L,
    chunks,
    plain,
    reshaped_pairs,
    slices,
    swapped,
    wan,
    wide,
)
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ascend_ln_fuse.backend import fuse_graph
from ascend_ln_fuse.patterns.rotary import ELEMENTWISE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class RMS(nn.Module):
    """transformers' RMSNorm."""

    def __init__(self, lane):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(lane))

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Model(nn.Module):
    """Norm, transpose(1, 2) or not, rotary. `cos` and `sin` broadcast to [B, H, L, D]."""

    def __init__(self, rotate=slices, form=plain, norm=RMS, lane=D, above=True):
        super().__init__()
        self.norm, self.rotate, self.form, self.above = norm(lane), rotate, form, above

    def forward(self, x, cos, sin):
        q = self.norm(x)
        return self.form(q.transpose(1, 2) if self.above else q, cos, sin, self.rotate)


def inputs(dtype=torch.float32, lane=D, tables=None, shape=None):
    angle = torch.randn(shape or (B, 1, L, lane))
    x = torch.randn(B, L, 2 * H, lane).to(dtype)[:, :, :H]
    return x, angle.cos().to(tables or dtype), angle.sin().to(tables or dtype)


def one(report, op):
    """The report's only site, with a rotation of that op in it."""
    site, = report.sites
    assert f"{op}(" in site.region and site.pattern.split(" -> ")[-1] in ("rotary", "cast")
    assert "rotary" in site.pattern
    assert {"neg", "cat" if op == "rotate_half" else "stack"} <= set(site.kernels_removed)
    return site


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("rotate", [*HALVES, *PAIRS], ids=lambda f: f.__name__)
def test_spellings(rotate, dynamic):
    for dtype in DTYPES:
        for above in (False, True):
            torch._dynamo.reset()
            given = inputs(dtype, shape=None if above else (B, L, 1, D))
            model = Model(rotate, above=above).to(dtype)
            report = check(model, *given, fused=1, dynamic=dynamic, exact=False)
            one(report, "rotate_half" if rotate in HALVES else "rotate_pairs")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rotate", [slices, reshaped_pairs], ids=lambda f: f.__name__)
def test_forms(form, rotate, dynamic):
    for dtype in DTYPES:
        for tables in (dtype, torch.float32):
            if form in (plain, swapped) and tables != dtype:
                continue
            for norm in (RMS, nn.RMSNorm, nn.LayerNorm):
                torch._dynamo.reset()
                report = check(Model(rotate, form, norm).to(dtype), *inputs(dtype, tables=tables), fused=1,
                               dynamic=dynamic, exact=False)
                site = one(report, "rotate_half" if rotate is slices else "rotate_pairs")
                assert len(report.sites) == 1 and site.region.count("\nout ") == 1


def static_wan(x, cos, sin, rotate):
    return wan(x, *(t.view(*t.shape[:-1], D) for t in (cos, sin)), rotate)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_written(dynamic):
    """By setitem, as Wan's, below a norm of each head."""
    for dtype in DTYPES:
        for above, tables in ((False, dtype), (True, torch.float32)):
            torch._dynamo.reset()
            given = inputs(dtype, tables=tables, shape=None if above else (B, L, 1, D))
            model = Model(form=static_wan, norm=nn.RMSNorm, above=above).to(dtype)
            report = check(model, *given, fused=1, dynamic=dynamic, exact=False)
            site, = report.entries
            assert site.region.count("repeat_") == 2 and "setitem" in site.kernels_removed
            assert site.pattern == ("rms_norm -> view -> rotary" if above else "rms_norm -> rotary")


@pytest.mark.parametrize("shape", [(B, 1, L, D), (1, 1, L, D), (L, D), (1, L, D), (B, H, L, D), (B, 1, L, 1),
                                   (D,)], ids=str)
def test_shapes_of_cos(shape):
    one(check(Model(), *inputs(shape=shape), fused=1, exact=False), "rotate_half")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_against_float64(dtype):
    for rotate, form in ((slices, plain), (reshaped_pairs, plain)):
        torch._dynamo.reset()
        one(check(Model(rotate, form, nn.RMSNorm).to(dtype), *inputs(dtype), fused=1),
            "rotate_half" if rotate is slices else "rotate_pairs")


@pytest.mark.parametrize("lane", [2, 6, 80, 130])
@pytest.mark.parametrize("rotate", [slices, reshaped_pairs], ids=lambda f: f.__name__)
def test_through_the_kernel(monkeypatch, rotate, lane):
    pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    for dtype, form in ((torch.bfloat16, wide), (torch.float32, plain)):
        torch._dynamo.reset()
        given = inputs(dtype, lane, torch.float32)
        check(Model(rotate, form, nn.RMSNorm, lane).to(dtype), *given, fused=1)


def test_gradients():
    model, (x, cos, sin) = Model(norm=nn.RMSNorm).double(), inputs(torch.float64)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    found = []
    for run in (model, compiled):
        leaves = [fresh(t).requires_grad_() for t in (x, cos, sin)]
        run(*leaves).sin().sum().backward()
        found.append([t.grad for t in (*leaves, model.norm.weight)])
        model.zero_grad()
    for eager, ours in zip(*found):
        torch.testing.assert_close(ours, eager)


# Whole attentions


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qwen3_attention(dtype, dynamic):
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    config = modeling.Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                  num_hidden_layers=1)
    config._attn_implementation = "sdpa"

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = modeling.Qwen3Attention(config, 0)
            self.rotary = modeling.Qwen3RotaryEmbedding(config)

        def forward(self, x):
            places = torch.arange(x.shape[1]).unsqueeze(0)
            return self.attention(x, self.rotary(x, places), None)[0]

    report = check(Attention().to(dtype), torch.randn(B, L, 64).to(dtype), fused=2, dynamic=dynamic,
                   exact=False)
    cast = "" if dtype == torch.float32 else "cast -> "
    for site in report.sites:
        assert site.pattern.endswith("view -> rotary") and site.pattern.startswith(f"{cast}rms_norm")
        assert {"neg", "cat"} <= set(site.kernels_removed)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flux_attention(dtype, packed, dynamic):
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = flux.FluxAttention(64, heads=H, dim_head=D, pre_only=True, eps=1e-6)
            if packed:
                self.attention.fuse_projections()

        def forward(self, x, cos, sin):
            return self.attention(x, image_rotary_emb=(cos, sin))

    x = torch.randn(B, L, 64).to(dtype)
    angle = torch.randn(L, D)
    report = check(Attention().to(dtype), x, angle.cos(), angle.sin(), fused=2, dynamic=dynamic, exact=False)
    for site in report.sites:
        assert "rotary" in site.pattern and {"neg", "stack"} <= set(site.kernels_removed)
        assert bool(site.note) == packed
        assert site.region.count("rotate_pairs") == 1 + packed
        # cos and sin are read once for both
        assert site.region.count("in x") == (6 if packed else 4)


def test_packed_halves_share_the_tables():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_q, self.norm_k = RMS(D), RMS(D)

        def forward(self, qkv, cos, sin):
            q, k, v = qkv.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(0)
            q, k = self.norm_q(q), self.norm_k(k)
            return (plain(q, cos.unsqueeze(1), sin.unsqueeze(1), slices),
                    plain(k, cos.unsqueeze(1), sin.unsqueeze(1), slices), v)

    for dtype in DTYPES:
        torch._dynamo.reset()
        angle = torch.randn(B, L, D)
        report = check(Packed().to(dtype), torch.randn(B, L, 3 * H * D).to(dtype), angle.cos().to(dtype),
                       angle.sin().to(dtype), fused=2, exact=False)
        q, k = report.sites
        assert q.region == k.region and q.region.count("in x") == 6 and q.note and k.note
        assert q.region.count("rotate_half") == 2


def test_graph_of_aten_ops():
    for rotate in (slices, chunks):
        model = Model(rotate)

        def call(weights, *given, model=model):
            return functional_call(model, weights, given)

        graph = make_fx(call, tracing_mode="fake")(dict(model.named_parameters()), *inputs()).graph
        fused, sites = fuse_graph(graph)
        assert fused is not None and "rotate_half" in sites[0].region


# Left alone


def without_rotation(model, *given, fused=1, exact=False, **options):
    report = check(model, *given, fused=fused, exact=exact, **options)
    assert all("rotate" not in site.region and "rotary" not in site.pattern for site in report.sites)
    return report


def test_not_on_devices_that_permute_element_by_element(monkeypatch):
    assert ELEMENTWISE == {"npu"}
    monkeypatch.setattr(sys.modules["ascend_ln_fuse.patterns.grow"], "ELEMENTWISE", {"cpu"})
    report = without_rotation(Model(), *inputs())
    assert report.sites[0].pattern == "rms_norm -> scale"


def other_sign(x):
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], -x[..., :half]), -1)


def no_sign(x):
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), -1)


def both_signs(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], -x[..., :half]), -1)


def other_order(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., :half], x[..., half:]), -1)


def pairs_to_halves(x):
    return torch.cat((-x[..., 1::2], x[..., ::2]), -1)


def halves_to_pairs(x):
    half = x.shape[-1] // 2
    return torch.stack((-x[..., half:], x[..., :half]), -1).flatten(-2)


def pairs_by_rows(x):
    """Stacked before the lane: halves."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2)


def other_pairs(x):
    return torch.stack((-x[..., ::2], x[..., 1::2]), -1).flatten(-2)


def one_further(x):
    """Overlapping parts."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half - 1:-1], x[..., 1:half + 1]), -1)


def along_rows(x):
    """Halves of the tokens."""
    half = x.shape[-2] // 2
    return torch.cat((-x[..., half:, :], x[..., :half, :]), -2)


def thirds(x):
    third = x.shape[-1] // 4
    return torch.cat((-x[..., 3 * third:], x[..., :3 * third]), -1)


def of_another_value(x):
    half, y = x.shape[-1] // 2, x.abs()
    return torch.cat((-y[..., half:], x[..., :half]), -1)


def transposed_part(x):
    """The same sizes, lying otherwise."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:].transpose(0, 2).transpose(0, 2), x[:, :, :, :half].flip(2)), -1)


@pytest.mark.parametrize("rotate", [
    other_sign, no_sign, both_signs, other_order, pairs_to_halves, halves_to_pairs, pairs_by_rows,
    other_pairs, one_further, along_rows, thirds, of_another_value, transposed_part],
    ids=lambda f: f.__name__)
def test_other_rotations(rotate):
    model = Model(rotate)
    without_rotation(model, torch.randn(B, 6, H, D), torch.randn(B, 1, 6, D), torch.randn(B, 1, 6, D))


def read_half(x, cos, sin, rotate):
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return x * cos + torch.cat((-second, first), -1) * sin, second


def read_rotated(x, cos, sin, rotate):
    rotated = rotate(x)
    return x * cos + rotated * sin, rotated


def read_q(x, cos, sin, rotate):
    return x * cos + rotate(x) * sin, x


def partial(x, cos, sin, rotate):
    turned, passed = x[..., :D // 2], x[..., D // 2:]
    return torch.cat((plain(turned, cos[..., :D // 2], sin[..., :D // 2], rotate), passed), -1)


def halved_tables(x, cos, sin, rotate):
    """GPT-OSS"""
    first, second = x.chunk(2, -1)
    cos, sin = cos[..., :D // 2], sin[..., :D // 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def complex_numbers(x, cos, sin, rotate):
    """Llama 4, Lumina"""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    freqs = torch.complex(cos[..., :D // 2].float(), sin[..., :D // 2].float())
    return torch.view_as_real(turned * freqs).flatten(-2).type_as(x)


def written_half(x, cos, sin, rotate):
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    rotated = torch.cat((-second, first), -1)
    second.mul_(2)
    return x * cos + rotated * sin


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", [read_half, read_q, partial, halved_tables, complex_numbers,
                                  written_half], ids=lambda f: f.__name__)
def test_other_forms(form, dynamic):
    for dtype in DTYPES:
        for norm in (RMS, nn.LayerNorm):
            torch._dynamo.reset()
            without_rotation(Model(form=form, norm=norm).to(dtype), *inputs(dtype), dynamic=dynamic)


def test_a_rotation_with_another_reader_is_an_output_too():
    report = check(Model(form=read_rotated), *inputs(), fused=1, exact=False)
    assert report.sites[0].region.count("\nout ") in (1, 2)


def late_sin(x, cos, sin, rotate):
    """sin is made from what the norm yields: nothing may wait for it inside."""
    sin = torch.softmax(rotate(x), -1)
    return x * cos + rotate(x) * sin


def dtype_outside(x, cos, sin, rotate):
    """x gives its dtype to a cast that is no part of the site."""
    y = plain(x, cos, sin, rotate)
    return y, F.softmax(y.float(), -1).cumsum(-1).type_as(x)


@pytest.mark.parametrize("form", [late_sin, dtype_outside], ids=lambda f: f.__name__)
def test_fused_and_right_whatever_is_taken(form):
    for dtype in DTYPES:
        torch._dynamo.reset()
        check(Model(form=form).to(dtype), *inputs(dtype), fused=1, exact=False)


def test_odd_lane():
    class Odd(Model):
        def forward(self, x, cos, sin):
            q = self.norm(x)
            return q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin

    x = torch.randn(B, L, 15)
    without_rotation(Odd(lane=15), x, torch.randn(L, 15), torch.randn(L, 15))


def test_a_flattened_norm():
    """Several normalised dims are one lane for the kernel, of which the model rotates a part."""
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm((H, D))

        def forward(self, x, cos, sin):
            return plain(self.norm(x), cos, sin, slices)

    without_rotation(Flat(), torch.randn(B, L, H, D), torch.randn(L, 1, D), torch.randn(L, 1, D))
