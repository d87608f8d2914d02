"""Lanes that lie across memory: contiguous NCHW normalised over C, and whatever has its rows side by side."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from norm_cases import assert_right, region

from ascend_ln_fuse.kernels.codegen import generate
from ascend_ln_fuse.kernels.launch import Runner, launch_facts
from ascend_ln_fuse.kernels.layout import INT32_MAX, Unsupported, layout
from ascend_ln_fuse.kernels.region import parse
from ascend_ln_fuse.kernels.source import Tile, load
from ascend_ln_fuse.kernels.targets import cuda, npu
from ascend_ln_fuse.kernels.tiling import CUDA_ACROSS_ELEMENTS, CUDA_SECTOR_BYTES, ladder

pytest.importorskip("triton")
from ascend_ln_fuse.kernels.targets import interpreter  # noqa: E402

GPU = cuda.describe("sm_90", 132)

#: A channel norm written out, with an affine of [C, 1, 1] and an activation: as the region of a site has it.
CHANNELS = """\
space [*, *, *, {D}]
in x: {dt}[*, *, *, {D}]
in w: {dt}[1, 1, {D}]
in b: {dt}[1, 1, {D}]
scalar eps
v0: {dt} = {op}(x, {missing}, eps)
v1: {dt} = mul(w, v0)
v2: {dt} = add(v1, b)
v3: {dt} = silu(v2)
out v3: {dt} order({order})"""

#: A sum that is written too, of operands that may lie in two ways.
SUM = """\
space [*, *, {D}]
in x: {dt}[*, *, {D}]
in r: {dt}[*, *, {D}]
in scale: {dt}[*, 1, {D}]
in gate: {dt}[*, *, 1]
scalar eps
h: {dt} = add(x, r)
v0: {dt} = layer_norm(h, none, none, eps)
v1: {dt} = mul(v0, scale)
v2: {dt} = mul(v1, gate)
out v2: {dt} order(0, 2, 1)
out h: {dt} order(0, 1, 2)"""

NCHW, NHWC = "0, 3, 1, 2", "0, 1, 2, 3"


def channels(lane, dtype="f32", op="layer_norm", order=NCHW):
    missing = "none, none" if op == "layer_norm" else "none"
    return parse(CHANNELS.format(D=lane, dt=dtype, op=op, missing=missing, order=order))


def image(n, c, h, w, dtype=torch.float32, seed=0):
    """A contiguous NCHW tensor in memory of its own, its channels last."""
    x = torch.randn(n, c, h, w, generator=torch.Generator().manual_seed(seed)) + 1.5
    return x.to(dtype).permute(0, 2, 3, 1)


def vectors(lane, dtype=torch.float32):
    return [torch.randn(lane, 1, 1, generator=torch.Generator().manual_seed(i)).to(dtype).movedim(0, -1)
            for i in (1, 2)]


def run(r, inputs, tile=None, scalars=(1e-5,), target=GPU):
    """The kernel for `target`, interpreted; and how it walks the inputs."""
    walk = layout(r, [x.shape for x in inputs], [x.stride() for x in inputs], target.units)
    tile = tile or ladder(r, walk.structure, walk.sizes, target)[0]
    kernel = generate(r, walk.structure, tile, target.interpreted())
    outputs = [torch.full_like(x, float("nan")) for x in Runner(r)(inputs, list(scalars))]
    integers, grid = launch_facts(walk, tile.rows, target)
    interpreter.run(load(kernel), grid, [*inputs, *outputs, *integers, *scalars])
    return outputs, walk


# -- numbers


@pytest.mark.parametrize("order", [NCHW, NHWC], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [
    (2, 96, 8, 8), (1, 96, 5, 7), (3, 17, 4, 4), (2, 16, 3, 1), (1, 513, 2, 9), (1, 3, 16, 16), (2, 2, 1, 20),
], ids=str)
def test_images(shape, op, dtype, order):
    """P a multiple of 16 and not, P below a tile's rows, D no power of two, batch 1."""
    r = channels(shape[1], {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype], op,
                 order)
    inputs = [image(*shape, dtype), *vectors(shape[1], dtype)]
    outputs, walk = run(r, inputs)
    assert walk.structure.across
    assert_right(r, inputs, [1e-5], outputs)


@pytest.mark.parametrize("tile", [Tile(4, 32), Tile(16, 16), Tile(1, 32), Tile(8, 128)], ids=str)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_tiles(tile, op):
    """Pieces of the lane, a row at a time, more rows than there are."""
    r = channels(80, "bf16", op)
    inputs = [image(2, 80, 3, 5, torch.bfloat16), *vectors(80, torch.bfloat16)]
    assert_right(r, inputs, [1e-5], run(r, inputs, tile)[0])


def strided(shape, kind):
    """A tensor of `shape` [N, P, D] that lies in memory in one of several ways."""
    n, p, d = shape
    if kind == "across":
        return torch.randn(n, d, p).transpose(1, 2)
    if kind == "across, cut":  # out of more channels and more pixels
        return torch.randn(n, d + 3, p + 5)[:, 2:-1, 4:-1].transpose(1, 2)
    if kind == "every other channel":
        return torch.randn(n, 2 * d, p)[:, ::2].transpose(1, 2)
    return torch.randn(n, p, 2 * d)[..., d:]


KINDS = ("across", "across, cut", "every other channel", "innermost")


@given(n=st.integers(1, 3), p=st.integers(2, 40), d=st.integers(2, 40), x=st.sampled_from(KINDS),
       other=st.sampled_from(KINDS), word=st.sampled_from(["f32", "bf16"]), tile=st.booleans())
@settings(deadline=None, max_examples=80)
def test_operands_that_lie_in_two_ways(n, p, d, x, other, word, tile):
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[word]
    torch.manual_seed(n * p * d)
    r = parse(SUM.format(D=d, dt=word))
    gate = torch.randn(n, 1, p).transpose(1, 2)
    inputs = [strided((n, p, d), kind).to(dtype) for kind in (x, other)]
    inputs += [torch.randn(n, 1, d).to(dtype), gate.to(dtype)]
    assert_right(r, inputs, [1e-5], run(r, inputs, Tile(8, 16) if tile else None)[0])


@pytest.mark.parametrize("x, scale", [
    (torch.randn(2, 8, 40)[..., ::2].transpose(1, 2), torch.randn(2, 1, 8)),
    (torch.randn(2, 20, 16)[..., ::2], torch.randn(2, 1, 8)),
    (torch.randn(2, 20, 8), torch.randn(2, 1, 16)[..., ::2]),
], ids=["every other pixel", "every other channel of a pixel", "a vector alone"])
def test_rows_that_are_no_neighbours(x, scale):
    """The reference runs, which copies."""
    r = parse("space [*, *, 8]\nin x: f32[*, *, 8]\nin s: f32[*, 1, 8]\nv: f32 = rms_norm(x, none, 1e-06)\n"
              "u: f32 = mul(v, s)\nout u: f32 order(0, 1, 2)")
    with pytest.raises(Unsupported, match="lane stride of (x|s) is [0-9]+, not 1"):
        run(r, [x, scale], scalars=())


@pytest.mark.parametrize("op", ["rotate_half", "rotate_pairs"])
def test_lane_ops(op):
    """Padded lanes of a rotation stand behind each half."""
    r = parse(f"space [*, *, 24]\nin x: f32[*, *, 24]\nin c: f32[24]\nv: f32 = rms_norm(x, none, 1e-06)\n"
              f"u: f32 = {op}(v)\ny: f32 = mul(u, c)\nout y: f32 order(0, 2, 1)")
    inputs = [torch.randn(2, 24, 20).transpose(1, 2), torch.randn(24)]
    assert_right(r, inputs, [], run(r, inputs, scalars=())[0])


def test_one_vector_for_the_tile_may_lie_in_any_way():
    r = parse("space [*, *, 8]\nin x: f32[*, *, 8]\nin s: f32[*, 1, 8]\nv: f32 = rms_norm(x, none, 1e-06)\n"
              "u: f32 = mul(v, s)\nout u: f32 order(0, 2, 1)")
    inputs = [torch.randn(2, 8, 20).transpose(1, 2), torch.randn(2, 1, 40)[..., ::5]]
    outputs, walk = run(r, inputs, scalars=())
    assert walk.structure.operands[1].across and not walk.structure.operands[1].adjacent
    assert_right(r, inputs, [], outputs)


def test_rows_and_lanes_beyond_32_bits():
    """The last channel of the last pixels lies more than 2^31 elements after the first."""
    r = parse("space [*, 3]\nin x: bf16[*, 3]\nv0: bf16 = layer_norm(x, none, none, 1e-05)\n"
              "out v0: bf16 order(0, 1)")
    pixels, lane = 40, 3
    stride = (INT32_MAX // 2 + 33) & ~7
    memory = torch.empty(0, dtype=torch.bfloat16)
    try:
        memory = torch.empty(2 * stride + pixels, dtype=torch.bfloat16)  # untouched pages take no room
    except RuntimeError:
        pytest.skip("no addresses for 4 GiB")
    x = memory.as_strided((pixels, lane), (1, stride))
    x.copy_(torch.randn(pixels, lane))
    outputs, walk = run(r, [x], scalars=())
    assert walk.lanes == (stride,) and 2 * stride > INT32_MAX and not walk.structure.wide
    assert_right(r, [x], [], outputs)


# -- the walk


def found(shape, dtype="bf16", order=NCHW):
    r = channels(shape[1], dtype, order=order)
    n, c, h, w = shape
    strides = [(c * h * w, w, 1, h * w), (1, 1, 1), (1, 1, 1)]
    return r, layout(r, [(n, h, w, c), (1, 1, c), (1, 1, c)], strides)


def test_rows_run_along_pixels():
    _, walk = found((128, 96, 7, 7))
    assert walk.sizes == (128, 49) and walk.rows == 49  # and not along the images, of which there are more
    x, w, _, out = walk.structure.operands
    assert x.across and x.adjacent and out.across and out.adjacent
    assert w.lane and not w.across
    assert walk.lanes == (49, 49)
    assert (x.unit, walk.structure.grain) == (1, 1)


@pytest.mark.parametrize("side, unit", [(64, 8), (18, 4), (6, 4), (5, 1)])
def test_alignment_is_that_of_the_pixels(side, unit):
    """The kernel can prove 16 bytes where the number of pixels allows it."""
    _, walk = found((2, 96, side, side))
    assert [x.unit for x in walk.structure.operands][::3] == [unit, unit]
    assert walk.structure.grain == unit
    *_, n, p, tiles = walk.arguments(32)
    assert (n, p * unit) == (2, side * side) and tiles == 2 * -(-side * side // 32)


def test_an_output_may_be_innermost():
    _, walk = found((2, 96, 8, 8), order=NHWC)
    x, *_, out = walk.structure.operands
    assert x.across and out.lane and not out.across and walk.lanes == (64,)


def test_a_lane_that_one_pixel_leaves_is_innermost():
    assert not found((4, 96, 1, 1))[1].structure.across


@pytest.mark.parametrize("lane", [2, 16, 64, 96, 256, 384, 1024, 2048, 5000])
@pytest.mark.parametrize("dtype, width", [("bf16", 2), ("f32", 4), ("f64", 8)])
def test_tiles_of_neighbours(lane, dtype, width):
    """A tile's rows make up a sector at least, and fit registers; the batch decides nothing."""
    r, walk = found((1, lane, 64, 64), dtype)
    tile, = ladder(r, walk.structure, walk.sizes, GPU)
    assert tile.rows * width >= CUDA_SECTOR_BYTES
    assert tile.rows * tile.cols <= CUDA_ACROSS_ELEMENTS
    assert tile.cols >= lane or lane > 1024
    _, many = found((512, lane, 64, 64), dtype)
    assert ladder(r, many.structure, many.sizes, GPU) == (tile,)
    _, few = found((512, lane, 3, 5), dtype)
    short, = ladder(r, few.structure, few.sizes, GPU)
    assert short.rows == min(16, tile.rows) and short.cols == tile.cols and short.num_warps <= tile.num_warps


@pytest.mark.parametrize("lane", [64, 96, 192, 384, 768, 1024])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_warps_of_three_live_tiles_are_a_power_of_two(dtype, lane):
    """Triton takes no other number."""
    full = f"{dtype}[*, *, {lane}]"
    r = parse(f"space [*, *, {lane}]\nin x: {full}\nin y: {full}\nin z: {full}\nscalar eps\n"
              f"m: {dtype} = mul(y, z)\nu: {dtype} = add(x, m)\nv: {dtype} = layer_norm(u, none, none, eps)\n"
              f"out v: {dtype} order(0, 2, 1)")
    pixels = 4096
    walk = layout(r, [(2, pixels, lane)] * 3, [(lane * pixels, 1, pixels)] * 3)
    assert walk.structure.across
    for tile in ladder(r, walk.structure, walk.sizes, GPU):
        assert tile.num_warps in (1, 2, 4, 8, 16)


def test_ascend_wants_lanes_innermost():
    r, walk = found((2, 96, 8, 8))
    target = npu.describe("Ascend910B3")
    with pytest.raises(Unsupported, match="Ascend910B3 wants lane stride 1"):
        generate(r, walk.structure, Tile(8, 96), target)


# -- the text


def test_source():
    r, walk = found((2, 96, 8, 8))
    kernel = generate(r, walk.structure, Tile(32, 128), GPU)
    body = kernel.source.split("):\n", 1)[1]
    assert "S_x_LANE" in kernel.signature and kernel.signature["S_x_LANE"] == "i64"
    assert "SIZE = N_1 * 8" in body
    assert "A_x + COL.to(tl.int64) * (S_x_LANE * 8) + (ROW)" in body
    assert not re.search(r"S_x_1\b", kernel.source)  # the literal 1
    # A vector that all rows share is no tile, or Triton would move the whole tile to meet it.
    assert re.search(r"w = tl.load\(P_w \+ \(LANE\), mask=LANE_IN.*\n.*\)\[None, :\]", body)
    assert "rows along dim 1, in 8s; strides/unit (s, 1, s)/8" in kernel.source


def test_other_kernels_are_as_they_were():
    """Nothing of this shows where no lane lies across."""
    r = region("layer_norm", 96, "bf16")
    walk = layout(r, [(4, 50, 96), (96,), (96,)], [(4800, 96, 1), (1,), (1,)])
    assert walk.structure.grain == 1 and walk.lanes == ()
    assert not any(x.across or x.adjacent for x in walk.structure.operands)
    source = generate(r, walk.structure, Tile(4, 128), GPU).source
    assert "LANE" not in source and "SIZE" not in source
