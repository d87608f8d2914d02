"""Norms over the channels of images: by permute, and written out over dim 1 of NCHW."""

import pytest
import torch
from checks import check
from torch import nn
from torch.nn import functional as F


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


def test_contiguous_channels_are_copied_as_in_eager():
    check(LayerNorm2d(16), torch.randn(2, 16, 5, 6), fused=1)


def test_contiguous_channels_written_out_are_declined_with_the_reason():
    report = check(ConvNeXt(16), torch.randn(2, 16, 5, 6), fused=0, declined=1)
    assert "not the innermost" in report.sites[0].reason


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
