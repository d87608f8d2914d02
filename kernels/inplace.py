"""LayerNorm in place on a strided view: the function to call by hand where nothing is compiled."""

from __future__ import annotations

import torch

from .ops import _LIBRARY, runner
from .reference import DTYPE_WORDS
from .region import Line, NormRegion, Operand, Output


def inplace_layer_norm_(x: torch.Tensor, weight: torch.Tensor | None = None,
                        bias: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    """Normalise the last dim of `x` in place and return `x`.

    `x` may be any strided view of a larger tensor, for example `q` of [50220, 3, 128] inside a packed qkv
    of [50220, 9, 128]: nothing else of it is read or written, and no copy is made. Statistics and affine
    are computed in fp32 (fp64 for fp64), with one rounding at the end, as in
    `torch.nn.functional.layer_norm`.

    Args:
        x: [..., D], bf16, fp16, fp32 or fp64, lane stride 1.
        weight, bias: [D], both of x's dtype or both fp32; None for 1 and 0.
        eps: added to the variance.

    Raises:
        TypeError: an argument is no tensor, or has a dtype that is not listed.
        ValueError: a wrong shape or device, a view that overlaps itself, or a lane stride other than 1.
        RuntimeError: gradients would be recorded (call it under `torch.no_grad()`).
    """
    if torch.compiler.is_compiling():
        torch.ops.ascend_ln_fuse.inplace_layer_norm_(x, weight, bias, eps)
    else:
        _run(x, weight, bias, eps)
    return x


def _run(x, weight, bias, eps: float) -> None:
    _check_value(x)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number, not {eps!r}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            _check_vector(name, vector, x)
    if not x.numel():
        return
    vectors = [v for v in (weight, bias) if v is not None]
    if len({v.dtype for v in vectors}) > 1:
        raise TypeError(f"weight and bias must have one dtype, not {weight.dtype} and {bias.dtype}")
    words = [DTYPE_WORDS[v.dtype] for v in vectors]
    inputs = [Operand("x", DTYPE_WORDS[x.dtype], ("*",) * (x.dim() - 1) + (x.shape[-1],))]
    inputs += [Operand(f"p{i}", word, (x.shape[-1],)) for i, word in enumerate(words)]
    names = iter(operand.name for operand in inputs[1:])
    args = ("x", *(None if v is None else next(names) for v in (weight, bias)), "eps")
    line = Line("y", inputs[0].dtype, "layer_norm", args)
    region = NormRegion(x.shape[-1], x.dim(), tuple(inputs), ("eps",), (line,),
                        (Output("y", line.dtype, tuple(range(x.dim()))),))
    runner(region.text).into([x, *vectors], [float(eps)], [x])
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def _check_value(x) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor, not {type(x).__name__}")
    if x.dtype not in DTYPE_WORDS:
        raise TypeError(f"x must be bf16, fp16, fp32 or fp64, not {x.dtype}")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must be [..., D] with D >= 1, not {list(x.shape)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("x requires grad and is written in place: call this under torch.no_grad()")
    if not x.numel():
        return
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"x must have lane stride 1 (last dim contiguous), not {x.stride(-1)}")
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n > 1):
        if stride <= reach:
            raise ValueError(f"x must not overlap itself: shape {list(x.shape)}, "
                             f"strides {list(x.stride())}")
        reach += stride * (size - 1)


def _check_vector(name: str, vector, x: torch.Tensor) -> None:
    if not isinstance(vector, torch.Tensor):
        raise TypeError(f"{name} must be a tensor or None, not {type(vector).__name__}")
    if tuple(vector.shape) != (x.shape[-1],):
        raise ValueError(f"{name} must be [{x.shape[-1]}], the last dim of x, not "
                         f"{list(vector.shape)}")
    if vector.dtype not in (x.dtype, torch.float32):
        wanted = f"{x.dtype}, as x" + (" is" if x.dtype == torch.float32 else " is, or torch.float32")
        raise TypeError(f"{name} must be {wanted}, not {vector.dtype}")
    if vector.device != x.device:
        raise ValueError(f"{name} must be on {x.device} like x, not on {vector.device}")
    if vector.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires grad, which an op in place does not record: call this "
                           "under torch.no_grad()")
    if vector.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and vector.numel():
        raise ValueError(f"{name} must not lie in the memory that x is written to")


_LIBRARY.define("inplace_layer_norm_(Tensor(a!) x, Tensor? weight, Tensor? bias, float eps) -> ()")
_LIBRARY.impl("inplace_layer_norm_", _run, "CompositeExplicitAutograd")
torch.library.register_fake("ascend_ln_fuse::inplace_layer_norm_",
                            lambda x, weight, bias, eps: None, lib=_LIBRARY)
