"""Chains that tests of several files run: a feed-forward block, and one whose gate and up are packed."""

import torch
from torch.nn import functional as F

from ascend_ln_fuse.kernels.chain import Chain, RegionStage
from ascend_ln_fuse.kernels.chain_products import LinearStage, Part
from ascend_ln_fuse.kernels.region import parse

K, N = 32, 64


def norm(dtype="f32", lane=K):
    return parse(f"space [*, *, {lane}]\nin x: {dtype}[*, *, {lane}]\nin w: {dtype}[{lane}]\n"
                 f"in b: {dtype}[{lane}]\nscalar eps\nv0: {dtype} = layer_norm(x, w, b, eps)\n"
                 f"out v0: {dtype} order(0, 1, 2)")


def pointwise(op, dtype="f32", lane=N):
    return parse(f"space [*, *, {lane}]\nin x: {dtype}[*, *, {lane}]\nv0: {dtype} = {op}(x)\n"
                 f"out v0: {dtype} order(0, 1, 2)")


def gate(dtype="f32", lane=N):
    return parse(f"space [*, *, {lane}]\nin g: {dtype}[*, *, {lane}]\nin u: {dtype}[*, *, {lane}]\n"
                 f"v0: {dtype} = silu(g)\nv1: {dtype} = mul(v0, u)\nout v1: {dtype} order(0, 1, 2)")


def ffn(dtype="f32"):
    return Chain(("x", "w", "b", "w1", "b1", "w2", "b2"), ("eps",), (
        RegionStage(("h",), norm(dtype), ("x", "w", "b"), ("eps",)),
        LinearStage("z", "h", "w1", "b1"),
        RegionStage(("a",), pointwise("gelu", dtype), ("z",)),
        LinearStage("y", "a", "w2", "b2")), ("y",))


def ffn_inputs(dtype=torch.float32, requires_grad=False):
    shapes = (2, 3, K), (K,), (K,), (N, K), (N,), (K, N), (K,)
    return [torch.randn(s).mul(0.3).to(dtype).requires_grad_(requires_grad) for s in shapes]


def plain(x, w, b, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(F.layer_norm(x, (K,), w, b, 1e-5), w1, b1)), w2, b2)


def packed(transposed=False):
    return Chain(("x", "w", "b", "w1", "b1", "w2"), ("eps",), (
        RegionStage(("h",), norm("bf16"), ("x", "w", "b"), ("eps",)),
        LinearStage("z", "h", "w1", "b1", transposed),
        RegionStage(("a",), gate("bf16"), (Part("z", 0, N), Part("z", N, N))),
        LinearStage("y", "a", "w2", None, transposed)), ("h", "y"))


def plain_packed():
    """`packed` whose norm nobody else reads, so that it goes into the kernel."""
    chain = packed()
    return Chain(chain.inputs, chain.scalars, chain.stages, ("y",))


def packed_inputs(transposed=False):
    shapes = [(2, 3, K), (K,), (K,), (2 * N, K), (2 * N,), (K, N)]
    inputs = [torch.randn(s).mul(0.3).bfloat16() for s in shapes]
    return [x.t().contiguous() if transposed and i in (3, 5) else x for i, x in enumerate(inputs)]
