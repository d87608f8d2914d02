"""The meaning of a region in plain torch: the CPU path, and every test's first referee.

Differentiable, dtype-exact, and as fast as eager: a `layer_norm` line is one call of
`torch.nn.functional.layer_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from .pointwise import torch_function
from .region import F16_NOTHING, LANE_OPS, NORMS, NormRegion, broadcast_sizes, dense_strides

TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16,
                "f32": torch.float32, "f64": torch.float64}
DTYPE_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}


def _rotate_half(v: torch.Tensor) -> torch.Tensor:
    half = v.shape[-1] // 2
    return torch.cat((-v[..., half:], v[..., :half]), -1)


def _rotate_pairs(v: torch.Tensor) -> torch.Tensor:
    return torch.stack((-v[..., 1::2], v[..., ::2]), -1).flatten(-2)


def _repeat_even(v: torch.Tensor) -> torch.Tensor:
    return v[..., ::2].repeat_interleave(2, -1)


def _repeat_odd(v: torch.Tensor) -> torch.Tensor:
    return v[..., 1::2].repeat_interleave(2, -1)


_LANE_FUNCTIONS = {"rotate_half": _rotate_half, "rotate_pairs": _rotate_pairs,
                   "repeat_even": _repeat_even, "repeat_odd": _repeat_odd}


def _written_out(x: torch.Tensor, lane: tuple[int, ...], weight: torch.Tensor | None,
                 bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`F.layer_norm` as a model writes it out: op by op, in the dtype of x."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _layer_norm(x: torch.Tensor, lane: tuple[int, ...], weight: torch.Tensor | None,
                bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`F.layer_norm` with the derivatives of a norm that is written out, where PyTorch's own are worse.

    Models that write their norm out have a region's norm without a weight (it is a line of its own).
    PyTorch's backward for the CPU takes the mean out last (`a * dy + b * x + c`), and so loses mean/std of
    its digits: it is given the centred x, whose mean is a constant to the gradient, since the norm does not
    depend on it; a row whose sum overflows is not centred. The gradient of its forward derivative is wrong in
    torch 2.13 (it takes the statistics for constants): there the norm is written out. Else the values are
    those of `F.layer_norm(x)`, to the bit. bf16 and fp16 are computed in fp32 inside.
    """
    if weight is None and bias is None and x.dtype in (torch.float32, torch.float64):
        if forward_ad._current_level >= 0:
            return _written_out(x, lane, None, None, eps)
        if x.requires_grad and torch.is_grad_enabled() and x.device.type == "cpu" and \
                x.dtype == torch.float32:
            y = F.layer_norm(x - x.detach().mean(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0), lane, eps=eps)
            with torch.no_grad():  # backward keeps the input and the statistics, not y
                y.copy_(F.layer_norm(x, lane, eps=eps))
            return y
    return F.layer_norm(x, lane, weight, bias, eps)


def _normalize(x: torch.Tensor, lane: tuple[int, ...], weight: torch.Tensor | None,
               eps: float) -> torch.Tensor:
    """`F.normalize` over the lane, times the weight; bf16 and fp16 are computed in fp32 inside."""
    if x.dtype == torch.float16 and eps <= F16_NOTHING:
        eps = 0.0
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).clamp_min(eps)
    return (y if weight is None else y * weight).to(x.dtype)


def _l2_norm(x: torch.Tensor, lane: tuple[int, ...], weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x * rsqrt(sum(x * x) + eps) * weight` over the lane; bf16 and fp16 are computed in fp32 inside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def reference(region: NormRegion, inputs: Sequence[torch.Tensor],
              scalars: Sequence[float]) -> tuple[torch.Tensor, ...]:
    """Run `region` on `inputs` (broadcastable to the space, dtypes as declared, any strides).

    Returns one new tensor per output, of the space's shape and the declared layout.
    Gradients flow through it. Ambient autocast is ignored, since the region's dtypes already say
    what autocast did.
    """
    return program(region)(*inputs, *scalars)


@lru_cache(maxsize=1024)
def program(region: NormRegion, written_out: bool = False) -> Callable:
    """The reference as one Python function of the inputs, then the scalars: what `reference` calls, for
    callers that keep it. Made as source so that a call costs little more than its torch ops.

    `written_out`: layer norms op by op, as PyTorch's own for the CPU computes any two rows in two threads."""
    names = [_variable(x.name) for x in region.inputs]
    scope: dict = {"torch": torch, "rms_norm": F.rms_norm, "normalize": _normalize,
                   "l2_norm": _l2_norm, "REGION": region, "LANE": (region.lane,),
                   "HEADS": (region.heads, region.head), "laid_out": _laid_out, "one_lane": _one_lane,
                   "broadcast_sizes": broadcast_sizes, **_LANE_FUNCTIONS,
                   "layer_norm": _written_out if written_out else _layer_norm,
                   **{word.upper(): dtype for word, dtype in TORCH_DTYPES.items()}}
    lines = [f"def run({', '.join((*names, *map(_variable, region.scalars)))}):"]
    full = [_variable(x.name) for x in region.inputs if x.dims == region.full]
    sizes = f"{full[0]}.shape" if full else \
        f"broadcast_sizes(REGION, ({' '.join(f'{n}.shape,' for n in names)}))"
    lines.append(f"    SIZES = {sizes}")
    if region.heads > 1:
        # A dim for the heads, along which what they share broadcasts; norms and outputs are without it.
        lines += [f"    {name} = {name}.unflatten(-1, HEADS)" if x.dims[-1] == region.lane else
                  f"    {name} = {name}.unsqueeze(-2)" for name, x in zip(names, region.inputs) if x.dims]
    for line in region.body:
        lines += [f"    {text}" for text in _statements(region, line, scope)]
    used: set[str] = set()
    for i, out in enumerate(region.outputs):
        # An output must be a tensor of its own: not an input, and not the same one twice.
        value = _variable(out.value)
        fresh = value not in used and value not in names
        used.add(value)
        if region.heads > 1:
            lines.append(f"    H{i} = one_lane({value}, (*SIZES[:-1], *HEADS))")
            value = f"H{i}"
        text = f"laid_out({value}, SIZES, {out.order}, {fresh})"
        if fresh and out.is_contiguous:
            text = f"{value} if {value}.is_contiguous() and {value}.shape == SIZES else {text}"
        lines.append(f"    O{i} = {text}")
    lines.append(f"    return {' '.join(f'O{i},' for i in range(len(region.outputs)))}")
    exec(compile("\n".join(lines), "<ascend_ln_fuse reference>", "exec"), scope)
    run = scope["run"]

    def reference_of_region(*args):
        device = args[0].device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return run(*args)
        return run(*args)

    return reference_of_region


def _statements(region: NormRegion, line, scope: dict) -> list[str]:
    """Python source of one line. Names come from the region's grammar, numbers from `repr`."""
    def word(arg) -> str:
        return _variable(arg) if isinstance(arg, str) else _number(arg)

    name = _variable(line.name)
    if line.op == "cast":
        return [f"{name} = {word(line.args[0])}.to({line.dtype.upper()})"]
    if line.op in NORMS:
        first, *rest, eps = map(word, line.args)
        if line.args[-1] in region.dtype_of:
            eps = f"{eps}.item()"  # torch's norms want a number
        if region.heads > 1:
            first, *rest = (x if x == "None" else f"{x}.flatten(-2)" for x in (first, *rest))
        rest.append(eps)
        whole = f"{line.op}({first}, LANE, {', '.join(rest)})"
        return [f"{name} = {whole}" if region.heads == 1 else f"{name} = {whole}.unflatten(-1, HEADS)"]
    if line.op in LANE_OPS:
        return [f"{name} = {line.op}({word(line.args[0])})"]
    scope[f"op_{line.op}"] = torch_function(line.op)
    tensors = region.dtype_of
    words = list(map(word, line.args))
    dtype = line.dtype.upper()
    call = f"op_{line.op}({', '.join(words)})"
    if len(words) == 2 and line.op in ("maximum", "minimum"):
        # They take no number. The greater of two is one of them: rounding it before or after is the same.
        words = [word if arg in tensors else f"torch.as_tensor({word}, dtype={dtype}, device={other}.device)"
                 for word, arg, other in zip(words, line.args, reversed(words))]
        call = f"op_{line.op}({', '.join(words)})"
    elif len(words) == 2 and line.args[0] not in tensors:
        call = _NUMBER_FIRST[line.op].format(*words)
    return [f"{name} = {call}",
            f"if {name}.dtype != {dtype}: {name} = {name}.to({dtype})"]


#: What Python's operators do with a number on the left, which no torch function takes there: the number is
#: not rounded to the tensor's dtype, and a quotient is a reciprocal times the number (torch/_tensor.py).
_NUMBER_FIRST = {"add": "torch.add({1}, {0})", "mul": "torch.mul({1}, {0})", "sub": "torch.rsub({1}, {0})",
                 "div": "torch.reciprocal({1}) * {0}"}


def _variable(name: str) -> str:
    """A region's name as one that is no word of Python's or of the source."""
    return f"V_{name}"


def _number(value) -> str:
    return {"inf": "float('inf')", "-inf": "float('-inf')"}.get(repr(value), repr(value))


def _one_lane(value: torch.Tensor, sizes: tuple) -> torch.Tensor:
    """`value`, broadcast to `sizes` of which the last two are the heads and their elements, with these in
    one dim; a view of a value that is dense."""
    return (value if value.shape == sizes else value.expand(sizes)).flatten(-2)


def _laid_out(value: torch.Tensor, sizes, order: tuple[int, ...], fresh: bool) -> torch.Tensor:
    """`value` as a dense tensor of `sizes` in `order`, itself where it is one and `fresh`."""
    sizes = tuple(sizes)
    wanted = dense_strides(sizes, order)
    # The stride of a dim of size 1 says nothing; torch's own op gives it the value that eager has.
    if fresh and value.shape == sizes and \
            all(a == b or n == 1 for a, b, n in zip(value.stride(), wanted, sizes)):
        return value
    laid = torch.empty_strided(sizes, wanted, dtype=value.dtype,
                               device=value.device)
    return laid.copy_(value)
