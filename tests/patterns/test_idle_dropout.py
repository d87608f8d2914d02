"""A sum that a dropout in eval mode hands on, to a norm and to others."""

import pytest
import torch
from checks import check
from torch import nn
from torch.nn import functional as F

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
D = 64


class Embedded(nn.Module):
    """ViT's first sum: [B, L, D] and positions [1, L, D], handed on by a dropout, normalised and added to."""

    def __init__(self, read_sum=False, through=F.dropout):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)
        self.read_sum, self.through = read_sum, through

    def forward(self, x, positions):
        summed = x + positions
        handed_on = self.through(summed, 0.1, training=False)
        y = handed_on + self.linear(self.norm(handed_on))
        return (y, summed * 2) if self.read_sum else y


def inputs(dtype=torch.float32):
    return torch.randn(2, 17, D).to(dtype), torch.randn(1, 17, D).to(dtype)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@DTYPES
def test_the_sum_is_taken_along(dtype, grad, dynamic):
    report = check(Embedded().to(dtype), *inputs(dtype), fused=1, grad=grad, dynamic=dynamic)
    assert report.sites[0].pattern == "add -> layer_norm"
    assert report.sites[0].region.count("out ") == 2


def test_a_sum_with_two_names_is_left():
    """Others read the sum itself and what the dropout yields, which is the same tensor."""
    report = check(Embedded(read_sum=True), *inputs(), fused=1)
    assert report.sites[0].pattern == "layer_norm"


def test_a_view_that_others_read_is_left():
    report = check(Embedded(through=lambda x, *_, **__: x.unsqueeze(1)), *inputs(), fused=1)
    assert report.sites[0].pattern == "layer_norm"


@pytest.mark.parametrize("through", [lambda x: x.view(x.shape), lambda x: x[:]], ids=["view", "slice"])
def test_a_view_of_all_stays_a_view(through):
    def f(x):
        handed_on = through(x + x)
        return handed_on, F.layer_norm(handed_on, (D,))

    x = torch.randn(2, 3, D)
    assert torch.compile(f, backend="ascend_ln_fuse", options={"report": "off"})(x)[0]._is_view()
