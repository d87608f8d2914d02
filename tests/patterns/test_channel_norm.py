"""Norms over the channels of images: by permute, and written out over dim 1 of NCHW."""

from types import SimpleNamespace

import pytest
import torch
from checks import check
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.across import INNERMOST, LEAST_RUN_BYTES, MAX_ACROSS, lies_across
from ascend_ln_fuse.kernels import launch
from ascend_ln_fuse.kernels.ops import runner


class LayerNorm2d(nn.LayerNorm):
    """timm's LayerNorm2d."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt's channels_first LayerNorm."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(dim)), nn.Parameter(torch.randn(dim))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    """The channels_last block: one permute, norm over the last dim, linears."""

    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)

    def forward(self, x):
        x = self.conv(x).permute(0, 2, 3, 1)
        return self.up(self.norm(x)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", [LayerNorm2d, ConvNeXt])
def test_channels_last_memory_is_fused(make, dynamic):
    """The channels are innermost in memory, so they are a lane, whatever dim they are."""
    x = torch.randn(2, 16, 5, 6).to(memory_format=torch.channels_last)
    report = check(make(16), x, fused=1, dynamic=dynamic)
    assert report.sites[0].region.splitlines()[0] == "space [*, *, *, 16]"


def test_convnext_block():
    x = torch.randn(2, 16, 5, 6).to(memory_format=torch.channels_last)
    check(ConvNeXtBlock(16).to(memory_format=torch.channels_last), x, fused=1)


def test_low_precision_with_a_cast_back():
    class Cast(ConvNeXt):
        def forward(self, x):
            return super().forward(x.float()).to(x.dtype)

    x = torch.randn(2, 16, 5, 6).bfloat16().to(memory_format=torch.channels_last)
    report = check(Cast(16), x, fused=1)
    assert "in x0: f32[1, 1, 1, 16]" in report.sites[0].region
    assert "bf16[*, *, *, 16]" in report.sites[0].region


# Contiguous NCHW and NCTHW: the channels lie across memory


class Written(nn.Module):
    """A norm over dim 1 in one of its spellings, with weights of [C, 1, ...] and SiLU behind it."""

    def __init__(self, word, channels, rank=4):
        super().__init__()
        self.word, self.tail = word, (1,) * (rank - 2)
        self.weight, self.bias = nn.Parameter(torch.rand(channels)), nn.Parameter(torch.randn(channels))

    def forward(self, x):
        y = SPELLINGS[self.word](x)
        return F.silu(y * self.weight.view(-1, *self.tail) + self.bias.view(-1, *self.tail))


def mean(x):
    return x.mean(1, keepdim=True)


SPELLINGS = {
    "pow": lambda x: (x - mean(x)) / torch.sqrt((x - mean(x)).pow(2).mean(1, keepdim=True) + 1e-6),
    "var": lambda x: (x - mean(x)) * torch.rsqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5),
    "std": lambda x: (x - mean(x)) / (x.var(dim=[1], keepdim=True, correction=0) + 1e-5) ** 0.5,
    "var_mean": lambda x: (lambda v, m: (x - m) * (v + 1e-5).rsqrt())(*torch.var_mean(x, 1, correction=0,
                                                                                     keepdim=True)),
    "moments": lambda x: (x - mean(x)) * torch.rsqrt(mean(x * x) - mean(x) ** 2 + 1e-3),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    "rms, counted from the end": lambda x: x / (x.square().mean(1 - x.dim(), keepdim=True) + 1e-6).sqrt(),
    "rms in fp32": lambda x: (
        x.float() * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-6)).to(x.dtype),
    "movedim": lambda x: (lambda y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))(
        x.movedim(1, -1)).movedim(-1, 1),
    "permuted layer_norm": lambda x: F.layer_norm(x.movedim(1, -1), x.shape[1:2]).movedim(-1, 1),
}


@pytest.fixture(params=["reference", "kernels"])
def kernels(request, monkeypatch):
    """Fused sites run as plain PyTorch, then as their kernels in Triton's interpreter."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setenv(launch.INTERPRET, "1")
    return request.param == "kernels"


def served(report) -> bool:
    """Whether a kernel ran for the one site, and not its reference."""
    runs = runner(report.sites[0].region, "first_call")
    return bool(runs._plans) and not runs.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("word", SPELLINGS)
def test_spellings(word, dtype, kernels):
    x = torch.randn(2, 24, 5, 7).to(dtype)
    report = check(Written(word, 24).to(dtype), x, fused=1)
    assert report.sites[0].region.splitlines()[0] == "space [*, *, *, 24]"
    assert not kernels or served(report)


@pytest.mark.parametrize("shape", [(1, 20, 3, 4, 6), (2, 33, 2, 4, 8)], ids=str)
@pytest.mark.parametrize("word", ["pow", "rms", "movedim"])
def test_video(word, shape, kernels):
    report = check(Written(word, shape[1], 5), torch.randn(shape), fused=1)
    assert report.sites[0].region.splitlines()[0] == f"space [*, *, *, *, {shape[1]}]"
    assert not kernels or served(report)


@pytest.mark.parametrize("word", ["var", "permuted layer_norm"])
def test_dynamic_sizes(word, kernels):
    """One graph for all sizes, those with too few pixels side by side and with one pixel too."""
    model, before = Written(word, 16).eval(), len(last_reports())
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=True, options={"report": "off"})
    with torch.no_grad():
        for shape in ((2, 16, 5, 6), (3, 16, 7, 8), (2, 16, 16, 4), (2, 16, 2, 3)):
            x = torch.randn(shape)
            ours, eager = compiled(x), model(x)
            torch.testing.assert_close(ours, eager)
            assert ours.stride() == eager.stride()
    assert [report.fused for report in last_reports()[before:]] == [1]


@pytest.mark.parametrize("view", [
    lambda x: x[:, :, 2:], lambda x: x[:, 4:20], lambda x: x[:, ::2], lambda x: x[1:, :, 1:, :16],
    lambda x: x.transpose(2, 3), lambda x: x.unflatten(1, (2, 12))[:, 1], lambda x: x[:, :, :1],
], ids=["rows", "channels", "every other channel", "corner", "transposed", "chunk", "one row"])
@pytest.mark.parametrize("word", ["pow", "permuted layer_norm"])
def test_slices(word, view, kernels):
    x = torch.randn(2, 24, 6, 20)
    channels = view(x).shape[1]
    inner = Written(word, channels)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(view(x))

    report = check(Model(), x, fused=1)
    assert not kernels or served(report)


def test_layouts_of_two_kinds(kernels):
    """A residual in channels_last memory, a modulation of [N, C, 1, 1], a mask of [N, 1, H, W]."""
    class Model(nn.Module):
        def forward(self, x, residual, scale, mask):
            x = x + residual
            y = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
            return x, y * (1 + scale) * mask

    x, residual = torch.randn(2, 24, 5, 7), torch.randn(2, 24, 5, 7).to(memory_format=torch.channels_last)
    report = check(Model(), x, residual, torch.randn(2, 24, 1, 1), torch.rand(2, 1, 5, 7), fused=1)
    assert report.sites[0].region.count("\nout ") == 2
    assert not kernels or served(report)


def test_weights_of_another_dtype(kernels):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(24, 1, 1))

        def forward(self, x):
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1e-6)
            return (y * self.weight).to(x.dtype)

    report = check(Model(), torch.randn(2, 24, 5, 7).half(), fused=1)
    assert "f32[1, 1, 1, 24]" in report.sites[0].region
    assert not kernels or served(report)


def test_the_models_copy_is_not_made(kernels):
    """`.contiguous()` in front of a norm that reads what is in front of it."""
    class Model(nn.Module):
        def forward(self, x):
            return F.layer_norm(x.permute(0, 2, 3, 1).contiguous(), (24,))

    report = check(Model(), torch.randn(2, 24, 5, 7), fused=1)
    assert report.sites[0].bytes_after == 2 * 4 * 2 * 24 * 5 * 7
    assert not kernels or served(report)


class MovesBack(nn.Module):
    """A norm over the last dim of a permuted image, which is permuted back, and what follows there."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.weight, self.bias = nn.Parameter(torch.rand(24)), nn.Parameter(torch.randn(24))

    def forward(self, x):
        return self.run(self, x)


def layer_norm_2d(m, x):
    y = F.layer_norm(x.permute(0, 2, 3, 1), (24,), m.weight, m.bias)
    return y.permute(0, 3, 1, 2)


def rms_norm_2d(m, x):  # LTX-Video's
    x = x.movedim(1, -1)
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight).movedim(-1, 1)


#: forward -> the pattern of its site
BACK = {
    "silu": (lambda m, x: F.silu(rms_norm_2d(m, x)), "rms_norm -> scale -> view -> silu"),
    "gelu": (lambda m, x: F.gelu(layer_norm_2d(m, x)), "layer_norm -> view -> gelu"),
    "residual": (lambda m, x: x + layer_norm_2d(m, x), "layer_norm -> view -> add"),
    "modulate": (lambda m, x: rms_norm_2d(m, x) * (1 + x[:, :, :1, :1]) + m.bias[:, None, None],
                 "rms_norm -> scale -> view -> modulate"),
    "the weight again": (lambda m, x: rms_norm_2d(m, x) * m.weight.view(1, -1, 1, 1),
                         "rms_norm -> scale -> view -> scale"),
    "cast": (lambda m, x: rms_norm_2d(m, x).double(), "rms_norm -> scale -> view -> cast"),
    "nothing": (layer_norm_2d, "layer_norm"),
    "another view": (lambda m, x: F.silu(layer_norm_2d(m, x).transpose(2, 3)), "layer_norm"),
    "two readers": (lambda m, x: (lambda y: (F.silu(y), y.sum()))(layer_norm_2d(m, x)), "layer_norm"),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("word", BACK)
def test_moved_back(word, channels_last, kernels):
    run, pattern = BACK[word]
    x = torch.randn(2, 24, 5, 7)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    report = check(MovesBack(run), x, fused=1)
    assert report.sites[0].pattern == pattern
    assert not kernels or word == "cast" or served(report)  # there is no fp64 in the interpreter


def test_moved_back_and_read_by_a_product():
    """As a norm over dim 1 in channels_last memory, it begins a chain."""
    class Model(MovesBack):
        def __init__(self):
            super().__init__(None)
            self.conv = nn.Conv2d(24, 32, 1)

        def forward(self, x):
            return self.conv(F.gelu(layer_norm_2d(self, x)))

    check(Model(), torch.randn(2, 24, 5, 7), fused=1)
    assert last_reports()[-1].sites[0].chain == "linear"


def test_operands_that_registers_hold_together():
    """Of 1280 channels a sum above the norm would be too much: it stays outside (Whisper's encoder)."""
    class Model(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.norm = nn.LayerNorm(channels)

        def forward(self, x, y):
            x = x.transpose(1, 2) + y
            return x, self.norm(x)

    for channels, pattern in ((384, "add -> layer_norm"), (1280, "layer_norm")):
        x, y = (torch.randn(1, *shape).bfloat16() for shape in ((channels, 20), (20, channels)))
        report = check(Model(channels).bfloat16(), x, y, fused=1)
        assert report.sites[0].pattern == pattern


@pytest.mark.parametrize("word", ["pow", "rms", "permuted layer_norm"])
def test_gradients(word):
    model, x = Written(word, 12), torch.randn(2, 12, 4, 5)
    grads = []
    for run in (model, torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})):
        model.zero_grad()
        given = x.clone().requires_grad_()
        run(given).square().sum().backward()
        grads.append((given.grad, model.weight.grad.clone(), model.bias.grad.clone()))
    for ours, eager in zip(*grads[::-1]):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    assert last_reports()[-1].fused == 1


# Where it is not taken


@pytest.mark.parametrize("side, dtype, fused", [
    ((2, 4), torch.float32, 1), ((7, 1), torch.float32, 0), ((4, 4), torch.bfloat16, 1),
    ((3, 5), torch.bfloat16, 0),
], ids=str)
def test_pixels_side_by_side_make_up_a_sector(side, dtype, fused):
    """Of fewer, memory moves more than is read."""
    report = check(Written("rms", 24).to(dtype), torch.randn(2, 24, *side).to(dtype), fused=fused,
                   declined=1 - fused)
    assert fused or "not the innermost" in report.sites[0].reason


def test_long_lanes_are_declined():
    report = check(Written("rms", MAX_ACROSS + 1), torch.randn(1, MAX_ACROSS + 1, 4, 4), fused=0, declined=1)
    assert "not the innermost" in report.sites[0].reason


def test_ascend_wants_channels_innermost():
    """By the device of the tensor: there a copy is made, or the norm is declined, as ever."""
    assert "npu" in INNERMOST
    x = torch.randn(2, 24, 5, 7)
    assert lies_across(x, 1)
    npu = SimpleNamespace(shape=x.shape, stride=x.stride, dim=x.dim, element_size=x.element_size,
                          device=SimpleNamespace(type="npu"))
    assert not lies_across(npu, 1)


def test_what_lies_across():
    x = torch.randn(2, 24, 5, 7)
    assert 7 * 4 < LEAST_RUN_BYTES < 5 * 7 * 4 and lies_across(x, 1) and lies_across(x, -3)
    assert not lies_across(x, 3)  # innermost
    assert not lies_across(x[..., ::2], 1)  # no pixel beside another
    assert not lies_across(x[:, :, :1], 1)  # 7 pixels are less than a sector
    assert not lies_across(x[:, :, :1, :1].expand(2, 24, 5, 7), 1)
    assert lies_across(torch.randn(1, 24, 5, 7).expand(4, 24, 5, 7), 1)
