"""Streams that a convolution lays out, on an NVIDIA GPU: cuDNN follows the layout of what it reads."""

import pytest
import torch
from checks import check
from stream_cases import WIDTH, model, randn
from torch import nn


@pytest.mark.real_gpu
@pytest.mark.parametrize("between", [lambda x: x, lambda x: x.contiguous()], ids=["across", "copied"])
@pytest.mark.parametrize("dtype, channels, laid_out", [
    (torch.bfloat16, 8, True), (torch.float16, 8, True), (torch.bfloat16, 3, False),
    (torch.float32, 8, False)], ids=str)
def test_a_video_transformer(dtype, channels, laid_out, between, device):
    module = model(between, dtype=dtype).to(device)
    module.patch = nn.Conv3d(channels, WIDTH, 1).to(device, dtype)
    x = randn(2, channels, 4, 4, 4, dtype=dtype).to(device)
    report = check(module, x, fused=5)
    assert ("laid out by the convolution" in str(report)) is laid_out
