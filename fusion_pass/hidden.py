"""Which kernels CANN launches around a norm without anybody having written them.

`aclnnLayerNorm` and its relatives first make their input contiguous, fill in a missing weight or
bias, and cast the statistics to fp32. The model's source shows none of it; all of it is launched.

Everything here is a *prediction*, read from the public CANN 8/9 sources (ops-math
`conversion/contiguous/op_host/op_api/contiguous.cpp`, ops-nn
`norm/layer_norm_v4/op_host/op_api/aclnn_layer_norm.cpp`) and torch_npu's op-plugin. It was not
measured; another CANN release may differ. Never print it as a measurement.

Pure arithmetic on plain ints: no torch, no device, no symbolic sizes (pass hints instead).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["layout_kernels", "norm_kernels"]

# One kept dim of a view: (stride, place among the kept dims, size). The order of the fields is the
# order in which CANN sorts: by stride, ties by place.
_Dim = tuple[int, int, int]


def layout_kernels(
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    offset: int = 0,
    storage_size: int | None = None,
) -> tuple[str, ...]:
    """Kernels that make a view contiguous, in launch order; `()` for a contiguous one.

    Names are those of a profile: "Slice", "StridedSlice", "AsStrided", "Transpose", "BroadcastTo".
    `offset` and `storage_size` (both in elements) matter only where CANN imagines a dense source
    and the view does not lie inside it, which ordinary views never do; without `storage_size` the
    source is taken to be long enough. (CANN also lists three exact image layouts for AsStrided;
    no norm reads those, they are left out.)

    A prediction from public CANN 8/9 sources, not measured.
    """
    _check_ints(shape, strides, offset, storage_size)
    if _is_contiguous(shape, strides):
        return ()
    if min(strides) < 0:
        return ("AsStrided",)

    # As in CANN, stride 0 is looked at before size 1: a size-1 dim of stride 0 counts as broadcast.
    broadcast = ("BroadcastTo",) if 0 in strides else ()
    kept = [(st, n) for n, st in zip(shape, strides, strict=True) if st != 0 and n != 1]
    dims: list[_Dim] = [(st, i, n) for i, (st, n) in enumerate(kept)]
    if _is_dense(dims):
        return broadcast

    permuted = any(a[0] < b[0] for a, b in pairwise(dims))
    transpose = ("Transpose",) if permuted else ()
    ordered = sorted(dims, reverse=True) if permuted else dims
    if permuted and _is_dense(ordered):
        return transpose + broadcast

    sizes = [d[2] for d in ordered]
    steps = [d[0] for d in ordered]
    if len(steps) == 1:  # x[::2] of a vector is column 0 of a [n, 2] matrix
        sizes, steps = [*sizes, 1], [*steps, 1]

    if any(steps[i - 1] < steps[i] * (sizes[i] - 1) for i in range(1, len(steps))):
        return ("AsStrided",)  # elements overlap
    if steps[-1] == 1 and all(a % b == 0 for a, b in pairwise(steps)):
        if not _fits_slice(sizes, steps, offset, storage_size):
            return ("AsStrided",)
        if permuted and strides[-1] == 1 and shape[-1] % 64 == 0:
            return ("AsStrided",)  # one aligned block move beats two kernels
        return ("Slice", *transpose, *broadcast)
    pitch = math.gcd(*steps[:-1])
    if pitch > 1 and pitch >= steps[-1] * sizes[-1]:
        if _fits_strided_slice(sizes, steps, pitch, offset, storage_size):
            return ("StridedSlice", *transpose, *broadcast)
    return ("AsStrided",)


def norm_kernels(
    op: str,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: object,
    *,
    has_weight: bool,
    has_bias: bool = False,
    weight_dtype: object | None = None,
    norm_size: int | None = None,
    offset: int = 0,
    storage_size: int | None = None,
    soc: str = "910B",
) -> tuple[str, ...]:
    """Kernels that one eager norm call launches besides the norm itself, in launch order.

    `op` is "layer_norm" or "rms_norm" (`F.layer_norm`, `F.rms_norm`); a handwritten chain is in the
    graph for all to see, so only `layout_kernels` is hidden there. dtypes are `torch.dtype`s or
    their names. `weight_dtype` is that of the weight and the bias, which CANN wants equal
    (default: `dtype`). `norm_size` is the number of normalised elements (default: the last size).
    `soc` is "910B" (A2, and A3, which is the same here) or "950".

    layer_norm: a Fill for a missing weight and one for a missing bias; mean and rstd come out in
    the weight's dtype and torch_npu wants them in fp32: a Cast each. The V4 kernel, used
    for a few sizes on 910B and always on 950, writes fp32 at once, and on 950 needs no Fill.
    rms_norm: `F.rms_norm` has no kernel of its own, so its whole chain is hidden.

    A prediction from public CANN 8/9 sources, not measured.
    """
    if soc not in ("910B", "950"):
        raise ValueError(f"soc must be '910B' or '950', not {soc!r}")
    if op not in ("layer_norm", "rms_norm"):
        raise ValueError(f"op must be 'layer_norm' or 'rms_norm', not {op!r}")
    _check_ints(shape, strides, norm_size)
    layout = layout_kernels(shape, strides, offset=offset, storage_size=storage_size)
    if 0 in shape:
        return ()
    dtype = _dtype_name(dtype)

    if op == "rms_norm":
        cast = ("Cast",) if dtype in ("bfloat16", "float16") else ()
        scale = ("Mul",) if has_weight else ()
        return (*layout, *cast, "Pow", "ReduceMean", "Add", "Rsqrt", "Mul", *scale, *cast)

    if soc == "950":
        return layout
    # A filled weight takes the dtype of the bias, if there is one, else that of the input.
    affine = _dtype_name(weight_dtype) if weight_dtype and (has_weight or has_bias) else dtype
    fills = ("Fill",) * ((not has_weight) + (not has_bias))
    size = shape[-1] if norm_size is None else norm_size
    if affine == "float32" or _is_v4_on_910b(dtype, affine, size):
        return (*layout, *fills)
    return (*layout, *fills, "Cast", "Cast")


def _is_v4_on_910b(dtype: str, affine: str, size: int) -> bool:
    """Whether aclnnLayerNorm picks LayerNormV4 over V3 (its IsV4SocCheck)."""
    if dtype == affine == "bfloat16" and size in (1024, 4096):
        return True
    return size < 64 and size % 16 != 0  # fp32 differs, but never casts


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _check_ints(shape: Sequence[int], strides: Sequence[int], *others: int | None) -> None:
    if len(shape) != len(strides):
        raise ValueError(f"shape {tuple(shape)} and strides {tuple(strides)} differ in length")
    for value in (*shape, *strides, *others):
        # Comparing a SymInt would add a guard to the user's graph: refuse it before touching it.
        if value is not None and not isinstance(value, int):
            raise TypeError(f"plain ints wanted, not {type(value).__name__} (pass size hints)")


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """As `Tensor.is_contiguous()`: empty tensors are, and strides of size-1 dims do not matter."""
    return 0 in shape or _is_dense(
        [(st, 0, n) for n, st in zip(shape, strides, strict=True) if n != 1]
    )


def _is_dense(dims: Sequence[_Dim]) -> bool:
    """Whether these dims, in this order, are a contiguous block."""
    step = 1
    for stride, _, size in reversed(dims):
        if stride != step:
            return False
        step *= size
    return True


def _fits_slice(sizes: list[int], steps: list[int], offset: int, storage: int | None) -> bool:
    """Whether the view lies inside the dense source that its strides imply.

    Strides (7680, 128, 1) imply a source [?, 60, 128]; offset 2560 begins at [0, 20, 0].
    """
    rows = None if storage is None else storage // steps[0]
    source = [rows, *(a // b for a, b in pairwise(steps))]
    for size, step, extent in zip(sizes, steps, source, strict=True):
        begin, offset = divmod(offset, step)
        if extent is not None and begin + size > extent:
            return False
    return True


def _fits_strided_slice(
    sizes: list[int], steps: list[int], pitch: int, offset: int, storage: int | None
) -> bool:
    """The same with steps: the implied source has rows of `pitch` elements."""
    units, extents = [1], [pitch]  # of the source, innermost dim first
    unit = pitch
    for step in steps[-3::-1]:  # the steps that bound an inner dim; the outermost is unbounded
        units.append(unit)
        extents.append(step // unit)
        unit *= step // unit
    units.append(unit)
    rows = None if storage is None else storage // unit
    source = zip(reversed(units), [rows, *reversed(extents)], strict=True)
    for size, step, (unit, extent) in zip(sizes, steps, source, strict=True):
        begin, offset = divmod(offset, unit)
        if step % unit or (extent is not None and begin + (size - 1) * (step // unit) >= extent):
            return False
    return True
