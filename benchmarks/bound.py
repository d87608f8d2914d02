"""The project's error bound, for benchmarks that check what they time."""

from __future__ import annotations

import torch


def share_of_bound(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of `ours` against float64 in units of what is allowed, twice eager's own largest
    error plus one ulp of its dtype: at most 1 within the bound, inf where it is NaN."""
    size = exact.abs().clamp(min=torch.finfo(eager.dtype).smallest_normal)
    ulp = torch.exp2(torch.floor(torch.log2(size))) * torch.finfo(eager.dtype).eps
    allowed = 2 * (eager.double() - exact).abs().max() + ulp
    share = ((ours.double() - exact).abs() / allowed).max().item()
    return share if share == share else float("inf")
