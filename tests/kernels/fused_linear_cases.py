"""Segments, their inputs and the error bound that the tests of fused_linear share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from norm_cases import ulp

from ascend_ln_fuse.kernels.fused_linear import FusedLinear, GemmTile, Projection, Segment, reference
from ascend_ln_fuse.kernels.reference import TORCH_DTYPES
from ascend_ln_fuse.kernels.region import NormRegion, parse

EPS = 1e-5


def region(*lines: str, lane: int, dtype: str) -> NormRegion:
    """Lines with X for `dtype[*, *, lane]`, L for `dtype[lane]` and T for the dtype."""
    whole, vector = f"{dtype}[*, *, {lane}]", f"{dtype}[{lane}]"
    text = "\n".join((f"space [*, *, {lane}]", *lines))
    text = re.sub(r"\bX\b", whole, text)
    text = re.sub(r"\bL\b", vector, text)
    text = re.sub(r"\bT\b", dtype, text)
    return parse(re.sub(r"(?m)^(out .*)$", r"\1 order(0, 1, 2)", text))


LAYER_NORM = ("in x: X", "in w: L", "in b: L", "scalar eps", "v0: T = layer_norm(x, w, b, eps)", "out v0: T")
LLAMA = ("in x: X", "in w: L", "scalar eps", "v0: f32 = cast(x)", "v1: f32 = rms_norm(v0, none, eps)",
         "v2: T = cast(v1)", "v3: T = mul(w, v2)", "out v3: T")
ADD_NORM = ("in x: X", "in r: X", "in w: L", "scalar eps", "h: T = add(x, r)",
            "v0: T = layer_norm(h, w, none, eps)", "out v0: T", "out h: T")


@dataclass(frozen=True)
class Case:
    """A segment, and a function of the outer sizes that makes its arguments."""

    segment: Segment
    arguments: Callable[..., tuple]


def case(name: str, k: int, n: int, dtype: str = "bf16", device: str = "cpu") -> Case:
    """One of `NAMES` for K `k` and N `n`."""
    torch_dtype = TORCH_DTYPES[dtype]
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) + mean).to(torch_dtype).to(device)

    def rows(outer: tuple[int, int], width: int, mean: float = 0.0) -> torch.Tensor:
        """Every third token of a longer sequence: rows of a view."""
        return make(outer[0], 3 * outer[1], width, mean=mean)[:, 1::3]

    def weight(features: int, transposed: bool = False) -> torch.Tensor:
        full = make(features, k) * k**-0.5
        return full.t().contiguous() if transposed else full

    def norm(*lines: str) -> NormRegion:
        return region(*lines, lane=k, dtype=dtype)

    def end(*lines: str) -> NormRegion:
        return region(*lines, lane=n, dtype=dtype)

    with_bias, plain, conv1d = Projection(bias=True), Projection(), Projection(bias=True, transposed=True)
    if name == "gelu":
        segment = Segment(norm(*LAYER_NORM), (with_bias,), end("in y: X", "v0: T = gelu(y)", "out v0: T"))
        weights, biases = [weight(n)], [make(n)]
        return Case(segment, lambda outer, mean=0.0: (
            [rows(outer, k, mean), make(k), make(k)], [EPS], weights, biases, [], []))
    if name == "conv1d":
        segment = Segment(norm(*LAYER_NORM), (conv1d,), end("in y: X", "v0: T = gelu_tanh(y)", "out v0: T"))
        weights, biases = [weight(n, transposed=True)], [make(n)]
        return Case(segment, lambda outer, mean=0.0: (
            [rows(outer, k, mean), make(k), make(k)], [EPS], weights, biases, [], []))
    if name == "gated":  # a packed gate_up: two slices of one weight
        segment = Segment(norm(*LLAMA), (plain, plain), end(
            "in g: X", "in u: X", "v0: T = silu(g)", "v1: T = mul(v0, u)", "out v1: T"))
        weights = list(weight(2 * n).chunk(2))
        return Case(segment, lambda outer, mean=0.0: (
            [rows(outer, k, mean), make(k)], [EPS], weights, [None, None], [], []))
    if name == "qkv":  # add -> norm, whose sum is stored; products of different widths
        segment = Segment(norm(*ADD_NORM), (with_bias, plain, with_bias))
        weights, biases = [weight(n), weight(n // 3), weight(n // 2)], [make(n), None, make(n // 2)]
        return Case(segment, lambda outer, mean=0.0: (
            [rows(outer, k, mean), rows(outer, k), make(k)], [EPS], weights, biases, [], []))
    if name == "residual":  # no norm; a gate for each sample, a number and a strided residual behind
        segment = Segment(None, (with_bias,), end(
            f"in y: {dtype}[*, *, {n}]", f"in gate: {dtype}[*, 1, {n}]", "in x: X", "scalar scale",
            "v0: T = mul(y, gate)", "v1: T = mul(v0, scale)", "v2: T = add(v1, x)", "out v2: T"))
        weights, biases = [weight(n)], [make(n)]
        return Case(segment, lambda outer, mean=0.0: (
            [rows(outer, k)], [], weights, biases, [make(outer[0], 1, n), rows(outer, n)], [0.5]))
    if name == "product":
        weights = [weight(n)]
        return Case(Segment(None, (plain,)), lambda outer, mean=0.0: (
            [rows(outer, k)], [], weights, [None], [], []))
    raise KeyError(name)


NAMES = ("gelu", "conv1d", "gated", "qkv", "residual", "product")


def exact(segment: Segment, arguments: tuple) -> tuple[torch.Tensor, ...]:
    """The segment in float64 throughout."""
    def wide(part: NormRegion | None) -> NormRegion | None:
        return part and parse(re.sub(r"\b(bf16|f16|f32)\b", "f64", part.text))

    norm_inputs, norm_scalars, weights, biases, more, scalars = arguments
    return reference(replace(segment, norm=wide(segment.norm), epilogue=wide(segment.epilogue)),
                     [x.double() for x in norm_inputs], norm_scalars, [w.double() for w in weights],
                     [b if b is None else b.double() for b in biases], [x.double() for x in more], scalars)


def assert_right(segment: Segment, arguments: tuple, outputs: tuple[torch.Tensor, ...]) -> None:
    """Shapes and dtypes of the reference, contiguous; error against float64 at most twice the reference's own
    (its largest in the tensor) plus one ulp."""
    references = reference(segment, *arguments), exact(segment, arguments)
    for ours, low, true in zip(outputs, *references, strict=True):
        assert ours.shape == low.shape and ours.dtype == low.dtype and ours.is_contiguous()
        ours, low, true = ours.cpu(), low.cpu(), true.cpu()
        assert torch.equal(ours.isfinite(), low.isfinite())
        allowed = 2 * (low.double() - true).abs().max() + ulp(true, low.dtype)
        excess = ((ours.double() - true).abs() - allowed).max().item()
        assert excess <= 0, f"error exceeds the bound by {excess:.3e}"


def check(run: FusedLinear, arguments: tuple, tile: GemmTile | None) -> tuple[torch.Tensor, ...]:
    outputs = run(*arguments, config=tile)
    assert not run.record.fallback()  # the kernel's, not the reference's in its place
    assert_right(run.segment, arguments, outputs)
    return outputs
