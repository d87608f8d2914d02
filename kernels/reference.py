"""The meaning of a region in plain torch: the CPU path, and every test's first referee.

Differentiable, dtype-exact, and as fast as eager: a `layer_norm` line is one call of
`torch.nn.functional.layer_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.nn import functional as F

from .pointwise import torch_function
from .region import LANE_OPS, NormRegion, broadcast_sizes, dense_strides

TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16,
                "f32": torch.float32, "f64": torch.float64}
DTYPE_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}


def _rotate_half(v: torch.Tensor) -> torch.Tensor:
    half = v.shape[-1] // 2
    return torch.cat((-v[..., half:], v[..., :half]), -1)


def _rotate_pairs(v: torch.Tensor) -> torch.Tensor:
    return torch.stack((-v[..., 1::2], v[..., ::2]), -1).flatten(-2)


_LANE_FUNCTIONS = {"rotate_half": _rotate_half, "rotate_pairs": _rotate_pairs}


def reference(region: NormRegion, inputs: Sequence[torch.Tensor],
              scalars: Sequence[float]) -> tuple[torch.Tensor, ...]:
    """Run `region` on `inputs` (broadcastable to the space, dtypes as declared, any strides).

    Returns one new tensor per output, of the space's shape and the declared layout.
    Gradients flow through it. Ambient autocast is ignored, since the region's dtypes already say
    what autocast did.
    """
    device = inputs[0].device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _run(region, inputs, scalars)
    return _run(region, inputs, scalars)


def _run(region, inputs, scalars):
    env = {operand.name: x for operand, x in zip(region.inputs, inputs)}
    env.update(zip(region.scalars, scalars))
    for name, step in _program(region):
        env[name] = step(env)
    sizes = broadcast_sizes(region, [x.shape for x in inputs])
    results, used = [], set()
    for out in region.outputs:
        value = env[out.value]
        strides = dense_strides(sizes, out.order)
        # An output must be a tensor of its own: not an input, and not the same one twice.
        fresh = out.value not in used and not any(value is x for x in inputs)
        if not fresh or value.shape != sizes or value.stride() != strides:
            laid = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
            value = laid.copy_(value)
        used.add(out.value)
        results.append(value)
    return tuple(results)


@lru_cache(maxsize=1024)
def _program(region: NormRegion) -> tuple:
    """(name, env -> value) per line."""
    return tuple((line.name, _step(region, line)) for line in region.body)


def _step(region: NormRegion, line):
    dtype, args, lane = TORCH_DTYPES[line.dtype], line.args, (region.lane,)

    def get(env, arg):
        return env[arg] if isinstance(arg, str) else arg

    if line.op == "cast":
        return lambda env: env[args[0]].to(dtype)
    if line.op == "layer_norm":
        x, w, b, eps = args
        return lambda env: F.layer_norm(env[x], lane, get(env, w), get(env, b), get(env, eps))
    if line.op == "rms_norm":
        x, w, eps = args
        return lambda env: F.rms_norm(env[x], lane, get(env, w), get(env, eps))
    if line.op in LANE_OPS:
        rotate = _LANE_FUNCTIONS[line.op]
        return lambda env: rotate(env[args[0]])
    fn, tensors_only = torch_function(line.op), line.op in ("maximum", "minimum")

    def pointwise(env):
        values = [get(env, arg) for arg in args]
        # torch.add(1.0, x) and torch.maximum(x, 1.0) are no overloads; there a scalar becomes a 0-dim
        # tensor, which takes part in type promotion like a python number.
        for i, value in enumerate(values):
            if not isinstance(value, torch.Tensor) and len(values) == 2 and (i == 0 or tensors_only):
                other = values[1 - i]
                values[i] = torch.as_tensor(value, dtype=dtype, device=other.device)
        result = fn(*values)
        return result if result.dtype == dtype else result.to(dtype)

    return pointwise
