"""How models spell rotary embeddings: the rotation of a value, and what is made of it with cos and sin; and
models that do this to a value on no norm."""

import pytest
import torch
from checks import check
from einops import rearrange
from torch import nn

#: batch, tokens, heads, head_dim of the tests' tensors
B, L, H, D = 2, 5, 4, 16

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


# The rotations


def slices(x):
    """transformers"""
    return torch.cat((-x[..., x.shape[-1] // 2:], x[..., : x.shape[-1] // 2]), dim=-1)


def chunks(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def splits(x):
    first, second = torch.split(x, x.shape[-1] // 2, dim=-1)
    return torch.concat((torch.neg(second), first), dim=x.dim() - 1)


def narrow(x):
    half = x.shape[-1] // 2
    return torch.cat((x.narrow(-1, half, half).neg(), x.narrow(-1, 0, half)), axis=-1)


def reshaped_half(x):
    """diffusers' apply_rotary_emb, use_real_unbind_dim=-2"""
    real, imag = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.cat([-imag, real], dim=-1)


def einops_half(x):
    first, second = rearrange(x, "... (two d) -> two ... d", two=2)
    return torch.cat((-second, first), -1)


def reshaped_pairs(x):
    """diffusers' apply_rotary_emb, use_real_unbind_dim=-1"""
    real, imag = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-imag, real], dim=-1).flatten(3)


def strided_pairs(x):
    """GPT-J, Cohere"""
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def einops_pairs(x):
    """lucidrains"""
    first, second = rearrange(x, "... (d r) -> ... d r", r=2).unbind(-1)
    return rearrange(torch.stack((-second, first), dim=-1), "... d r -> ... (d r)")


def viewed_pairs(x):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-second, first), -1).reshape(x.shape)


HALVES = [slices, chunks, splits, narrow, reshaped_half, einops_half]
PAIRS = [reshaped_pairs, strided_pairs, einops_pairs, viewed_pairs]


# What is made of them


def plain(x, cos, sin, rotate):
    """transformers"""
    return x * cos + rotate(x) * sin


def swapped(x, cos, sin, rotate):
    return sin * rotate(x) + cos * x


def wide(x, cos, sin, rotate):
    """diffusers"""
    return (x.float() * cos + rotate(x).float() * sin).to(x.dtype)


def wide_first(x, cos, sin, rotate):
    """HunyuanVideo: the rotation is of the cast value, the result gets x's dtype."""
    return (x.float() * cos + rotate(x.float()) * sin).type_as(x)


def cast_first(x, cos, sin, rotate):
    """Qwen2.5-VL, GLM: everything in fp32, cast back."""
    dtype, x = x.dtype, x.float()
    return (x * cos.float() + rotate(x) * sin.float()).to(dtype)


FORMS = [plain, swapped, wide, wide_first, cast_first]


def wan(x, cos, sin, rotate):
    """diffusers' Wan: written by setitem."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out.type_as(x)


# On no norm


class Written(nn.Module):
    """`form` of [B, L, H, D], as Wan has it. The sizes of heads are the module's, and static."""

    def __init__(self, form, lane=D):
        super().__init__()
        self.form, self.shape = form, (H, lane)

    def forward(self, x, cos, sin):
        return self.form(*self.heads(x, cos, sin))

    def heads(self, x, *tables):
        lanes = (t.view(*t.shape[:-1], self.shape[1]) if t.shape[-1] > 1 else t for t in tables)
        return x.unflatten(-1, self.shape), *lanes


class Rotary(Written):
    """`form` of [B, H, L, D], or of two parts joined."""

    def __init__(self, rotate=slices, form=plain, joined=False, lane=D):
        super().__init__(form, lane)
        self.rotate, self.joined = rotate, joined

    def forward(self, x, cos, sin):
        x, cos, sin = self.heads(x, cos, sin)
        q = torch.cat((x[:, 2:], x[:, :2]), 1) if self.joined else x
        return self.form(q.transpose(1, 2), cos, sin, self.rotate)


def inputs(dtype=torch.float32, tables=None, shape=(B, 1, L, D)):
    angle = torch.randn(shape)
    x = torch.randn(B, L, 2 * H * D).to(dtype)[:, :, :H * D]
    return x, angle.cos().to(tables or dtype), angle.sin().to(tables or dtype)


def written(dtype=torch.float32, tables=torch.float32):
    """For `Written`: tables over the tokens, for all heads."""
    return inputs(dtype, tables, (1, L, 1, D))


def rotary(model, *given, count=1, fused=0, **options):
    """The reports of the rotary embeddings fused, in a graph with `fused` norms."""
    report = check(model, *given, fused=fused, exact=False, **options)
    sites = [site for site in report.rotary if site.status == "fused"]
    assert len(sites) == count, report
    for site in sites:
        assert site.pattern == "rotary" and "rotate_" in site.region
    return sites
