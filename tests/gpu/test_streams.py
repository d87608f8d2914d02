"""A residual stream that lies across memory, laid out once: the kernels read and write rows."""

import pytest
import torch
from checks import check
from torch import nn
from torch.nn import functional as F

NOTE = "1 stream that lies across memory is copied where it begins: 4 norms read rows"


class Video(nn.Module):
    """How HunyuanVideo begins: patches, and blocks of modulated norms and gated sums."""

    def __init__(self, width):
        super().__init__()
        self.patch = nn.Conv1d(4, width, 1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scale, self.shift, self.gate = (nn.Parameter(torch.randn(2, 1, width)) for _ in range(3))

    def forward(self, x):
        hidden = self.patch(x).transpose(1, 2)
        for layer in self.layers:
            normed = F.layer_norm(hidden, (hidden.shape[-1],))
            hidden = hidden + self.gate * layer(normed * (1 + self.scale) + self.shift)
        return F.layer_norm(hidden, (hidden.shape[-1],))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("width", [96, 2304], ids=["short rows", "long rows"])
def test_sums_and_norms_are_one_kernel(width, dtype, device):
    torch.manual_seed(0)
    model = Video(width).to(device, dtype).requires_grad_(False)
    report = check(model, torch.randn(2, 4, 24, device=device, dtype=dtype), fused=4)
    assert report.notes == (NOTE,)
    grown = [site.pattern.startswith("modulate -> layer_norm") for site in report.sites]
    assert grown == [False, True, True, True]
