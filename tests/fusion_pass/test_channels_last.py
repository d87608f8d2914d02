"""A stream that its convolution lays out: it reads a copy in channels_last, and nothing else is copied. (The
CPU's convolutions follow the layout of what they read in bf16, as cuDNN's do; in fp16 they do not.)"""

import pytest
import torch
from checks import check
from stream_cases import NOTE, WIDTH, close, graph_of, laid_out, model, randn, without_streams_across
from torch import nn
from torch.nn import functional as F

BF16 = torch.bfloat16
LAID_OUT = NOTE.replace("copied where it begins", "laid out by the convolution with which it begins")
COPIED = NOTE


class Image(nn.Module):
    """Blocks on patches of an image; `patch(module, x)` yields tokens."""

    def __init__(self, patch):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.patch = nn.Conv2d(8, WIDTH, 1), patch
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.patch(self, x)
        for _ in range(2):
            hidden = hidden + self.linear(F.layer_norm(hidden, (WIDTH,)))
        return F.layer_norm(hidden, (WIDTH,))


def image(patch=lambda self, x: self.conv(x).flatten(2).transpose(1, 2)):
    return Image(patch).to(BF16).eval()


def pixels():
    return randn(2, 8, 8, 8, dtype=BF16)


def latents(channels, dtype=BF16, **kwargs):
    """A video transformer and what it reads."""
    module = model(dtype=dtype, **kwargs)
    module.patch = nn.Conv3d(channels, WIDTH, 1).to(dtype)
    return module, randn(2, channels, 4, 4, 4, dtype=dtype)


def test_a_video_transformer():
    assert laid_out(*latents(8), same=close) == LAID_OUT.format(5)


def test_a_copy_that_the_model_makes():
    """Wan: there is nothing to copy then."""
    note = laid_out(*latents(8, between=lambda x: x.contiguous()), same=close)
    assert note == LAID_OUT.partition(":")[0]


@pytest.mark.parametrize("dtype, channels", [
    (torch.float32, 8), (torch.float16, 8), (BF16, 3), (BF16, 24)], ids=str)
def test_convolutions_that_are_left(dtype, channels):
    """fp32: not known to be as fast so. fp16 on a CPU: they yield what is contiguous. Channels that cuDNN
    would pad; and more of them than come out."""
    assert laid_out(*latents(channels, dtype), same=close) == COPIED.format(5)


@pytest.mark.parametrize("patch", [
    lambda self, x: self.conv(x).flatten(2).transpose(1, 2),
    lambda self, x: self.conv(x).flatten(2).mT,
    lambda self, x: F.conv2d(input=x, weight=self.conv.weight, bias=self.conv.bias).flatten(-2).mT,
    lambda self, x: self.conv(x).movedim(1, -1).flatten(1, 2),
    lambda self, x: (y := self.conv(x)).view(y.shape[0], WIDTH, -1).transpose(1, 2),
    lambda self, x: (y := self.conv(x)).permute(0, 2, 3, 1).reshape(y.size(0), -1, WIDTH),
], ids=["transpose", "mT", "keywords", "movedim", "shape", "permute"])
def test_spellings(patch):
    assert laid_out(image(patch), pixels(), same=close) == LAID_OUT.format(3)


@pytest.mark.parametrize("patch", [
    lambda self, x: (y := self.conv(x)).flatten(2).transpose(1, 2) + y.mean(),
    lambda self, x: self.conv(x).relu().flatten(2).transpose(1, 2),
    lambda self, x: self.conv(x)[..., 1:].flatten(2).transpose(1, 2),
], ids=["read elsewhere", "not a view", "a part"])
def test_what_lies_between(patch):
    """Views alone may, of all of it, and nobody else may read it."""
    assert "laid out by" not in laid_out(image(patch), pixels(), same=close)


def test_gradients():
    assert laid_out(image(), pixels(), same=close, grad=True) == ""


def test_one_copy_that_is_as_small_as_the_input():
    graph, _ = without_streams_across(graph_of(image(), pixels()))
    copies = [node for node in graph.nodes if node.target == "contiguous"]
    assert [node.meta["example_value"].shape for node in copies] == [(2, 8, 8, 8)]
    assert not any(node.target is torch.clone for node in graph.nodes)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_through_the_backend(dynamic):
    report = check(image(), pixels(), fused=3, dynamic=dynamic)
    assert "laid out by the convolution" in str(report)
    module, x = latents(8)
    check(module, x, fused=5, dynamic=dynamic)
