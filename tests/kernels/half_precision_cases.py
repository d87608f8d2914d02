"""Every value of a 16-bit float through an activation's kernel."""

import torch
from checks import ulp

from ascend_ln_fuse.kernels.reference import TORCH_DTYPES
from ascend_ln_fuse.kernels.region import NormRegion, parse

#: In float64. (F.gelu is 0 from -8.3 on, where 1 + erf(x) is.)
EXACT = {"gelu": lambda x: x * torch.special.erfc(-x * 0.5**0.5) / 2, "silu": torch.nn.functional.silu}


def region(op: str, dtype: str) -> NormRegion:
    return parse(f"space [*, 256]\nin x: {dtype}[*, 256]\ny: {dtype} = {op}(x)\nout y: {dtype} order(0, 1)")


def every_value(dtype: str, device="cpu") -> torch.Tensor:
    """[256, 256]: all numbers, infinities and NaNs."""
    bits = torch.arange(-2**15, 2**15, dtype=torch.int32, device=device).to(torch.int16)
    return bits.view(TORCH_DTYPES[dtype]).view(256, 256)


def assert_every_value_right(op: str, x: torch.Tensor, ours: torch.Tensor) -> None:
    """No element is more than an ulp away from the exact value; below fp32's normal numbers it may be 0. The
    activations of inf and -inf are inf and NaN. (PyTorch's own gelu of inf is NaN on some CPUs.)"""
    plain = x.isfinite()
    assert ours[plain].isfinite().all() and ours[~plain & (x != float("inf"))].isnan().all()
    assert (ours[x == float("inf")] == float("inf")).all()
    found, exact = ours[plain].double(), EXACT[op](x[plain].double())
    excess = (found - exact).abs() - ulp(exact, x.dtype).clamp_min(2.0**-120)
    assert excess.max() <= 0, (x[plain][excess.argmax()], found[excess.argmax()], exact[excess.argmax()])
