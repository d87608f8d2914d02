"""Regions, inputs and the error bound that the kernel tests share."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ascend_ln_fuse.kernels.reference import TORCH_DTYPES, reference
from ascend_ln_fuse.kernels.region import NormRegion, broadcast_sizes, parse

LAYER_NORM = """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in w: {dt}[{D}]
in b: {dt}[{D}]
scalar eps
v0: {dt} = layer_norm(x, w, b, eps)
out v0: {dt} order(0, 1, 2)"""

#: Name -> region text with {D} and {dt}; between them, every feature of the vocabulary.
TEXTS = {
    "layer_norm": LAYER_NORM,
    "rms_norm": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in w: {dt}[{D}]
scalar eps
v0: {dt} = rms_norm(x, w, eps)
out v0: {dt} order(0, 1, 2)""",
    "normalize": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in w: {dt}[{D}]
scalar eps
v0: {dt} = normalize(x, w, eps)
out v0: {dt} order(0, 1, 2)""",
    "l2_norm": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in w: {dt}[{D}]
scalar eps
v0: {dt} = l2_norm(x, w, eps)
out v0: {dt} order(0, 1, 2)""",
    # Wan's VAE: the length is of a sum, and stored with it; scale, gamma and SiLU come behind.
    "wan": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in r: {dt}[*, *, {D}]
in gamma: {dt}[{D}]
scalar eps
h: {dt} = add(x, r)
n: {dt} = normalize(h, none, eps)
s: {dt} = mul(n, 9.797958971132712)
y: {dt} = mul(s, gamma)
z: {dt} = silu(y)
out h: {dt} order(0, 1, 2)
out z: {dt} order(0, 1, 2)""",
    # Gated DeltaNet: q and k are cut out of one tensor, and q is scaled.
    "delta": """\
space [*, *, {D}]
in q: {dt}[*, *, {D}]
in k: {dt}[*, *, {D}]
scalar eps
v0: {dt} = l2_norm(q, none, eps)
v1: {dt} = l2_norm(k, none, eps)
v2: {dt} = mul(v0, 0.08838834764831845)
out v2: {dt} order(0, 1, 2)
out v1: {dt} order(0, 1, 2)""",
    # Llama: round, then multiply by the weight.
    "llama": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in w: {dt}[{D}]
scalar eps
v0: f32 = cast(x)
v1: f32 = rms_norm(v0, none, eps)
v2: {dt} = cast(v1)
v3: {dt} = mul(w, v2)
out v3: {dt} order(0, 1, 2)""",
    "cast_chain": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in w: f32[{D}]
in b: f32[{D}]
scalar eps
v0: f32 = cast(x)
v1: f32 = layer_norm(v0, w, b, eps)
v2: {dt} = cast(v1)
out v2: {dt} order(0, 1, 2)""",
    "add_norm": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in r: {dt}[*, *, {D}]
in w: {dt}[{D}]
scalar eps
h: {dt} = add(x, r)
v0: {dt} = layer_norm(h, w, none, eps)
out h: {dt} order(0, 1, 2)
out v0: {dt} order(0, 1, 2)""",
    # adaLN: per-sample scale and shift; the gate is one number a sample.
    "modulate": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in scale: {dt}[*, 1, {D}]
in shift: {dt}[*, 1, {D}]
in gate: {dt}[*, 1, 1]
scalar eps
v0: {dt} = layer_norm(x, none, none, eps)
v1: {dt} = add(scale, 1.0)
v2: {dt} = mul(v0, v1)
v3: {dt} = add(v2, shift)
v4: {dt} = mul(gate, v3)
out v4: {dt} order(0, 1, 2)""",
    "qk": """\
space [*, *, {D}]
in q: {dt}[*, *, {D}]
in k: {dt}[*, *, {D}]
in wq: {dt}[{D}]
in wk: {dt}[{D}]
scalar eps, eps2
v0: {dt} = rms_norm(q, wq, eps)
v1: {dt} = rms_norm(k, wk, eps2)
out v0: {dt} order(1, 0, 2)
out v1: {dt} order(0, 1, 2)""",
    # A norm of a norm, a post-norm residual, values that padded lanes must not reach.
    "sandwich": """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in w: {dt}[{D}]
in per_token: {dt}[*, 1]
in one: {dt}[]
scalar eps
a: {dt} = add(x, 3.0)
b: {dt} = mul(a, per_token)
n: {dt} = layer_norm(b, w, none, eps)
g: {dt} = gelu_tanh(n)
m: {dt} = rms_norm(g, none, eps)
s: {dt} = add(m, x)
t: {dt} = maximum(s, -1.0)
u: {dt} = sub(t, one)
out s: {dt} order(0, 1, 2)
out u: {dt} order(0, 1, 2)""",
}


def region(name: str, lane: int, dtype: str) -> NormRegion:
    return parse(TEXTS[name].format(D=lane, dt=dtype))


def inputs_for(region: NormRegion, outer: Sequence[int], ratio: float = 1.0, seed: int = 0,
               strided: bool = True) -> list[torch.Tensor]:
    """Random inputs of `region` over outer dims `outer`. Operands of the whole space are views inside
    larger tensors (as q is inside a packed qkv) that end exactly where the view ends; their mean over
    standard deviation is `ratio`."""
    generator = torch.Generator().manual_seed(seed)
    space = (*outer, region.lane)
    tensors = []
    for operand in region.inputs:
        dtype = TORCH_DTYPES[operand.dtype]
        shift = region.rank - len(operand.dims)
        shape = [space[shift + i] if d == "*" else d for i, d in enumerate(operand.dims)]
        whole = len(shape) == region.rank and shape == list(space)
        if whole and strided and len(shape) > 1:
            packed = [*shape[:-2], 3 * shape[-2], shape[-1]]
            full = torch.randn(packed, generator=generator) + ratio
            view = full.to(dtype)[..., 2 * shape[-2]:, :]
            tensors.append(view)
        else:
            offset = ratio if whole else 0.5
            tensors.append((torch.randn(shape, generator=generator) + offset).to(dtype))
    return tensors


def scalars_for(region: NormRegion) -> list[float]:
    return [1e-5 * (i + 1) for i in range(len(region.scalars))]


def exact(region: NormRegion, inputs, scalars) -> tuple[torch.Tensor, ...]:
    """The region in float64 throughout."""
    wide = parse(re.sub(r"\b(bf16|f16|f32)\b", "f64", region.text))
    return reference(wide, [x.double() for x in inputs], scalars)


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    magnitude = x.double().abs().clamp(min=info.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


def assert_right(region: NormRegion, inputs, scalars, outputs) -> None:
    """Shapes, strides and dtypes of the reference; error against float64 at most twice the
    reference's own (its largest in the tensor) plus one ulp of the output's dtype."""
    for ours, low, true in zip(outputs, reference(region, inputs, scalars),
                               exact(region, inputs, scalars), strict=True):
        assert ours.shape == low.shape == broadcast_sizes(region, [x.shape for x in inputs])
        assert ours.dtype == low.dtype
        # The stride of a dim of size 1 says nothing, and torch's ops give it what they like.
        assert all(a == b or n == 1 for a, b, n in zip(ours.stride(), low.stride(), ours.shape))
        ours, low = ours.cpu(), low.cpu()
        finite = low.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        if not finite.any():
            continue
        ours, low, true = (t[finite].double() for t in (ours, low, true.cpu()))
        allowed = 2 * (low - true).abs().max() + ulp(true, outputs[0].dtype)
        if outputs[0].dtype == torch.float64:  # the reference may be float64 itself, and have no error
            allowed = allowed.clamp(min=1e-13 * true.abs().max())
        excess = ((ours - true).abs() - allowed).max().item()
        assert excess <= 0, f"error exceeds the bound by {excess:.3e}"
