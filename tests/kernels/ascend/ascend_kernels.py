"""Kernels for the tests of the Ascend toolchain, and helpers to run them.

Kernels are made from text with literal sizes, as the product's generated kernels are: no constexpr.
Importing this skips the test module when the compilers are not installed.
"""

from __future__ import annotations

import functools
import linecache
import types

import pytest
import torch

from ascend_ln_fuse.kernels.ascend.toolchain import Planned, compile_planned, lower
from ascend_ln_fuse.kernels.ascend.tools import MissingTool, find_tool, require_triton_ascend

try:
    require_triton_ascend()
    find_tool("bishengir-compile")
except MissingTool as error:
    pytest.skip(str(error), allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@functools.cache
def make(name: str, **sizes: int):
    """The kernel `name` of `SOURCES`, its capitals replaced by numbers."""
    source = SOURCES[name]
    for symbol, value in sizes.items():
        source = source.replace(symbol, str(value))
    filename = f"<{name} {sizes}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(f"generated_{name}")
    module.tl = tl
    exec(compile(source, filename, "exec"), module.__dict__)
    return triton.jit(getattr(module, name))


def signature(name: str, **types_: str) -> dict[str, str]:
    """Parameter types by name: pointers need one, integers and eps have their usual one."""
    header = SOURCES[name].split("(", 1)[1].split("):", 1)[0]
    names = [part.strip() for part in header.split(",")]
    return {n: types_.get(n) or ("fp32" if n == "eps" else "i32") for n in names}


@functools.cache
def planned(
    name: str, pointers: tuple[tuple[str, str], ...], sizes: tuple[tuple[str, int], ...], **options
) -> Planned:
    fn = make(name, **dict(sizes))
    return compile_planned(lower(fn, signature(name, **dict(pointers))), **options)


def plan_for(name: str, pointers: dict[str, str], sizes: dict[str, int], **options) -> Planned:
    """Lower and compile, once per process."""
    return planned(name, tuple(pointers.items()), tuple(sizes.items()), **options)


# ---------------------------------------------------------------------------- strided LayerNorm


def plan_layer_norm(dtype: str, BS: int = 64, D: int = 128, **options) -> Planned:
    return plan_for("layer_norm", layer_norm_pointers(dtype), {"BS": BS, "LANES": D}, **options)


def layer_norm_pointers(dtype: str) -> dict[str, str]:
    return dict.fromkeys(("x_ptr", "g_ptr", "b_ptr", "o_ptr"), f"*{dtype}")


class LayerNormCase:
    """q of a packed qkv, [S, 3, H, D].unbind(1)[index]: rows are not contiguous."""

    def __init__(self, dtype: str, S: int = 300, H: int = 3, D: int = 128, index: int = 0, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DTYPES[dtype])

        self.packed = random(S, 3, H, D)
        self.x = self.packed.unbind(1)[index]
        self.g, self.b = random(D), random(D)
        self.out = torch.full((S, H, D), float("nan"), dtype=DTYPES[dtype])
        strides = [self.x.stride(0), self.x.stride(1), self.out.stride(0), self.out.stride(1)]
        self.args = [self.x, self.g, self.b, self.out, S, H, *strides, 1e-5]
        self.reference = torch.nn.functional.layer_norm(
            self.x.double(), (D,), self.g.double(), self.b.double(), 1e-5
        )


def assert_one_ulp(actual: torch.Tensor, reference: torch.Tensor, small: float = 2e-6) -> None:
    """|actual - reference| <= one ulp of the output dtype at the reference, plus `small`.

    `small` is what fp32 arithmetic may lose before the one rounding to the output dtype.
    """
    assert not actual.isnan().any(), "NaN: a value that was never written"
    rounded = reference.to(actual.dtype).abs()
    ulp = torch.nextafter(rounded, torch.full_like(rounded, float("inf"))).double() - rounded.double()
    excess = (actual.double() - reference).abs() - ulp - small
    assert excess.max() <= 0, f"off by {excess.max():.3g} more than one ulp"


# -------------------------------------------------------------------------------------- sources

_LINEAR = """
def {name}({pointers}, o_ptr, M, N, K):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        m = (r < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + r[:, None] * K + k[None, :], mask=m, other=0.0)
        {second}
        {weight}
        total += tl.sum({summed}.to(tl.float32), axis=1)
    y = acc - total[:, None]
    m = (r < M)[:, None] & (n < N)[None, :]
    tl.store(o_ptr + r[:, None] * N + n[None, :], y.to(o_ptr.dtype.element_ty), mask=m)
"""
_ROWS_OF_W = """mw = (n < N)[:, None] & (k < K)[None, :]
        w = tl.load(w_ptr + n[:, None] * K + k[None, :], mask=mw, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)"""
_COLUMNS_OF_W = """mw = (n < N)[None, :] & (k < K)[:, None]
        w = tl.load(w_ptr + n[None, :] * K + k[:, None], mask=mw, other=0.0)
        acc = tl.dot(x, w, acc)"""
_AGAIN = "x2 = tl.load(x2_ptr + r[:, None] * K + k[None, :], mask=m, other=0.0)"

SOURCES = {
    "layer_norm": """
def layer_norm(x_ptr, g_ptr, b_ptr, o_ptr, rows, heads, sx_s, sx_h, so_s, so_h, eps):
    cols = tl.arange(0, LANES)
    g = tl.load(g_ptr + cols).to(tl.float32)
    b = tl.load(b_ptr + cols).to(tl.float32)
    blocks = tl.cdiv(rows, BS)
    for t in range(tl.program_id(0), blocks * heads, tl.num_programs(0)):
        h = t % heads
        r = (t // heads) * BS + tl.arange(0, BS)
        m = (r < rows)[:, None]
        at = r[:, None] * sx_s + h * sx_h + cols[None, :]
        x = tl.load(x_ptr + at, mask=m, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=1)[:, None] / LANES
        xc = x - mean
        var = tl.sum(xc * xc, axis=1)[:, None] / LANES
        y = xc * tl.rsqrt(var + eps) * g[None, :] + b[None, :]
        at = r[:, None] * so_s + h * so_h + cols[None, :]
        tl.store(o_ptr + at, y.to(o_ptr.dtype.element_ty), mask=m)
""",
    # A step of the unfused chain: rows of a strided input copied, converted, normalised.
    "copy_rows": """
def copy_rows(x_ptr, o_ptr, rows, sx, so):
    cols = tl.arange(0, LANES)
    for t in range(tl.program_id(0), tl.cdiv(rows, BS), tl.num_programs(0)):
        r = t * BS + tl.arange(0, BS)
        m = (r < rows)[:, None]
        x = tl.load(x_ptr + r[:, None] * sx + cols[None, :], mask=m, other=0.0)
        tl.store(o_ptr + r[:, None] * so + cols[None, :], x.to(o_ptr.dtype.element_ty), mask=m)
""",
    # Any number of lanes, in three passes over column tiles.
    "layer_norm_by_columns": """
def layer_norm_by_columns(x_ptr, o_ptr, rows, lanes, eps):
    for t in range(tl.program_id(0), tl.cdiv(rows, BS), tl.num_programs(0)):
        r = t * BS + tl.arange(0, BS)
        total = tl.zeros((BS, BC), tl.float32)
        for c0 in range(0, lanes, BC):
            c = c0 + tl.arange(0, BC)
            m = (r < rows)[:, None] & (c < lanes)[None, :]
            x = tl.load(x_ptr + r[:, None] * lanes + c[None, :], mask=m, other=0.0)
            total += x.to(tl.float32)
        mean = tl.sum(total, 1)[:, None] / lanes
        total = tl.zeros((BS, BC), tl.float32)
        for c0 in range(0, lanes, BC):
            c = c0 + tl.arange(0, BC)
            m = (r < rows)[:, None] & (c < lanes)[None, :]
            x = tl.load(x_ptr + r[:, None] * lanes + c[None, :], mask=m, other=0.0).to(tl.float32)
            xc = tl.where((c < lanes)[None, :], x - mean, 0.0)
            total += xc * xc
        rstd = tl.rsqrt(tl.sum(total, 1)[:, None] / lanes + eps)
        for c0 in range(0, lanes, BC):
            c = c0 + tl.arange(0, BC)
            m = (r < rows)[:, None] & (c < lanes)[None, :]
            x = tl.load(x_ptr + r[:, None] * lanes + c[None, :], mask=m, other=0.0).to(tl.float32)
            y = ((x - mean) * rstd).to(o_ptr.dtype.element_ty)
            tl.store(o_ptr + r[:, None] * lanes + c[None, :], y, mask=m)
""",
    "activation": """
def activation(x_ptr, o_ptr, n):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(o_ptr + i, (EXPRESSION).to(o_ptr.dtype.element_ty), mask=i < n)
""",
    "rotate_pairs": """
def rotate_pairs(x_ptr, c_ptr, s_ptr, o_ptr, rows):
    r = tl.program_id(0) * BS + tl.arange(0, BS)
    h = tl.arange(0, HALF)
    m = (r < rows)[:, None]
    c = tl.load(c_ptr + r[:, None] * HALF + h[None, :], mask=m, other=0.0)
    s = tl.load(s_ptr + r[:, None] * HALF + h[None, :], mask=m, other=0.0)
    at = r[:, None] * (2 * HALF) + 2 * h[None, :]
    even = tl.load(x_ptr + at, mask=m, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + at + 1, mask=m, other=0.0).to(tl.float32)
    tl.store(o_ptr + at, (even * c - odd * s).to(o_ptr.dtype.element_ty), mask=m)
    tl.store(o_ptr + at + 1, (odd * c + even * s).to(o_ptr.dtype.element_ty), mask=m)
""",
    "choose": """
def choose(x_ptr, flag_ptr, o_ptr, n):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    flag = tl.load(flag_ptr + i, mask=i < n, other=0)
    tl.store(o_ptr + i, tl.where(flag != 0, x, -x), mask=i < n)
""",
    "arg_max": """
def arg_max(x_ptr, o_ptr):
    x = tl.load(x_ptr + tl.arange(0, BS)[:, None] * 64 + tl.arange(0, 64)[None, :])
    tl.store(o_ptr + tl.arange(0, BS), tl.argmax(x, axis=1))
""",
    # `n > i` is a mask that triton-ascend cannot turn into bounds.
    "reversed_mask": """
def reversed_mask(x_ptr, o_ptr, n):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    x = tl.load(x_ptr + i, mask=n > i, other=0.0)
    tl.store(o_ptr + i, x * 2.0, mask=n > i)
""",
    "flat_mask": """
def flat_mask(x_ptr, o_ptr, M, N):
    at = (tl.program_id(0) * BS + tl.arange(0, BS))[:, None] * N + tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + at, mask=at < M * N, other=0.0)
    tl.store(o_ptr + at, x * 2.0, mask=at < M * N)
""",
    "in_place": """
def in_place(x_ptr, n):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(x_ptr + i, x * 2.0, mask=i < n)
""",
    "in_place_whole": """
def in_place_whole(x_ptr, n):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    tl.store(x_ptr + i, tl.load(x_ptr + i) * 2.0)
""",
    "divided_index": """
def divided_index(x_ptr, o_ptr, n):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    x = tl.load(x_ptr + i // 3, mask=i < n, other=0.0)
    tl.store(o_ptr + i, x, mask=i < n)
""",
    "divided_rows": """
def divided_rows(x_ptr, v_ptr, o_ptr, rows, T):
    r = tl.program_id(0) * BS + tl.arange(0, BS)
    c = tl.arange(0, 128)
    m = (r < rows)[:, None]
    x = tl.load(x_ptr + r[:, None] * 128 + c[None, :], mask=m, other=0.0)
    v = tl.load(v_ptr + (r // T)[:, None] * 128 + c[None, :], mask=m, other=0.0)
    tl.store(o_ptr + r[:, None] * 128 + c[None, :], x * v, mask=m)
""",
    "running_sum": """
def running_sum(x_ptr, o_ptr, n):
    i = tl.arange(0, BS)
    tl.store(o_ptr + i, tl.cumsum(tl.load(x_ptr + i, mask=i < n, other=0.0), 0), mask=i < n)
""",
    "relu_whole": """
def relu_whole(x_ptr, o_ptr):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i, tl.where(x > 0, x, 0.0))
""",
    "join": """
def join(x_ptr, y_ptr, o_ptr, n):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(o_ptr + i, tl.where(i < n, x, y))
""",
    "integers": """
def integers(x_ptr, o_ptr, n):
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    x = tl.load(x_ptr + i, mask=i < n, other=0)
    tl.store(o_ptr + i, EXPRESSION, mask=i < n)
""",
    "undefined_name": """
def undefined_name(x_ptr, n):
    tl.store(x_ptr + tl.arange(0, BS), nothing_of_that_name)
""",
    # x feeds tl.dot and tl.sum, which ascendnpu-ir 1.2.0 miscompiles. The sound form loads x twice.
    "linear_shared": _LINEAR.format(
        name="linear_shared", pointers="x_ptr, w_ptr", second="", weight=_ROWS_OF_W, summed="x"
    ),
    "linear_shared_columns": _LINEAR.format(
        name="linear_shared_columns",
        pointers="x_ptr, w_ptr",
        second="",
        weight=_COLUMNS_OF_W,
        summed="x",
    ),
    "linear_sound": _LINEAR.format(
        name="linear_sound",
        pointers="x_ptr, x2_ptr, w_ptr",
        second=_AGAIN,
        weight=_ROWS_OF_W,
        summed="x2",
    ),
}
