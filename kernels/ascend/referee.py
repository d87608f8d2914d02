"""A region whose meaning in plain PyTorch on the CPU is what PyTorch computes on an accelerator.

They differ where a number is added to a tensor in half precision: the CPU rounds the number to the
tensor's dtype first, CUDA keeps it in fp32 (`at::opmath_type`), as a region's lines do. 0.3 in bf16 is
0.30078, which changes most results. Products and quotients keep the number on both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..region import DTYPES, Line, NormRegion


@lru_cache(maxsize=64)
def with_exact_numbers(region: NormRegion) -> NormRegion:
    """The region with sums and differences of a half-precision value and a number (a literal or a scalar of
    the call) in fp32, rounded once."""
    dtypes = region.dtype_of
    body = []
    for line in region.body:
        tensors = [a for a in line.args if isinstance(a, str) and a in dtypes]
        if line.op not in ("add", "sub") or len(tensors) != 1 or DTYPES[dtypes[tensors[0]]] > 2:
            body.append(line)
            continue
        (tensor,) = tensors
        wide, result = f"{line.name}_wide_number_", f"{line.name}_unrounded_"
        body += [Line(wide, "f32", "cast", (tensor,)),
                 Line(result, "f32", line.op, tuple(wide if a == tensor else a for a in line.args)),
                 Line(line.name, line.dtype, "cast", (result,))]
    return replace(region, body=tuple(body))
