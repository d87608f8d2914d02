"""Lane ops (rotate_half, rotate_pairs, repeat_even, repeat_odd): region text, reference, and kernels run by
Triton's interpreter against float64."""

import pytest
import torch
from norm_cases import assert_right, inputs_for, scalars_for

from ascend_ln_fuse.kernels.codegen import generate
from ascend_ln_fuse.kernels.launch import Runner, launch_facts
from ascend_ln_fuse.kernels.layout import Unsupported, layout
from ascend_ln_fuse.kernels.reference import reference
from ascend_ln_fuse.kernels.region import LANE_OPS, RegionError, parse
from ascend_ln_fuse.kernels.source import Tile, load
from ascend_ln_fuse.kernels.targets import cuda, npu
from ascend_ln_fuse.kernels.tiling import ladder

#: A rotary embedding on a norm with weights; q as eager has it after transpose(1, 2).
ROTARY = """\
space [*, *, {D}]
in q: {dt}[*, *, {D}]
in w: {dt}[{D}]
in cos: {cs}[*, 1, {D}]
in sin: {cs}[*, 1, {D}]
scalar eps
n: {dt} = rms_norm(q, w, eps)
r: {dt} = {op}(n)
a: {cs} = mul(n, cos)
b: {cs} = mul(r, sin)
y: {cs} = add(a, b)
z: {dt} = cast(y)
out z: {dt} order(1, 0, 2)"""

#: Wan's rotary embedding, of which the tables have an element for each of the lane; without a norm.
REPEATED = """\
space [*, *, {D}]
in q: {dt}[*, *, {D}]
in cos: f32[*, 1, {D}]
in sin: f32[*, 1, {D}]
c: f32 = repeat_even(cos)
s: f32 = repeat_odd(sin)
r: {dt} = rotate_pairs(q)
a: f32 = mul(q, c)
b: f32 = mul(r, s)
y: f32 = add(a, b)
z: {dt} = cast(y)
out z: {dt} order(0, 1, 2)"""

LANES = [2, 16, 64, 80, 128, 130]
CUDA = cuda.describe("sm_90", 4).interpreted()


def rotary(op, lane, dtype="f32", wide=False):
    return parse(ROTARY.format(D=lane, dt=dtype, cs="f32" if wide else dtype, op=op))


def run(r, inputs, scalars, tile=None):
    pytest.importorskip("triton")
    from ascend_ln_fuse.kernels.targets import interpreter

    walk = layout(r, [x.shape for x in inputs], [x.stride() for x in inputs], CUDA.units)
    kernel = generate(r, walk.structure, tile or ladder(r, walk.structure, walk.sizes, CUDA)[0], CUDA)
    outputs = [torch.full_like(x, float("nan")) for x in reference(r, inputs, scalars)]
    integers, grid = launch_facts(walk, kernel.tile.rows, CUDA)
    interpreter.run(load(kernel), grid, [*inputs, *outputs, *integers, *scalars])
    return outputs


def meaning(op, v):
    """What LANE_OPS says, element by element."""
    lane = v.shape[-1]
    if op == "rotate_half":
        return torch.stack([-v[..., i + lane // 2] if i < lane // 2 else v[..., i - lane // 2]
                            for i in range(lane)], -1)
    if op != "rotate_pairs":
        return torch.stack([v[..., i - i % 2 + (op == "repeat_odd")] for i in range(lane)], -1)
    return torch.stack([-v[..., i + 1] if i % 2 == 0 else v[..., i - 1] for i in range(lane)], -1)


# Text


@pytest.mark.parametrize("op", LANE_OPS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_round_trip(op, dtype):
    r = rotary(op, 64, dtype)
    assert parse(r.text) == r and parse(r.text).text == ROTARY.format(D=64, dt=dtype, cs=dtype, op=op)


@pytest.mark.parametrize("old, new, message", [
    ("64", "63", "rotate_half needs an even lane, not 63"),
    ("r: bf16", "r: f32", "rotate_half keeps the dtype of its value, bf16"),
    ("rotate_half(n)", "rotate_half(n, n)", "takes 1 arguments"),
    ("rotate_half(n)", "rotate_half(eps)", "needs a value with a lane, which eps has not"),
    ("rotate_half(n)", "rotate_half(1.0)", "needs a value with a lane"),
    ("rotate_half(n)", "rotate_half(none)", "only a norm may miss"),
    ("cos: bf16[*, 1, 64]", "cos: bf16[*, 1, 1]\nr0: bf16 = rotate_half(cos)", "which cos has not"),
    ("rotate_half(n)", "rotate_third(n)", "unknown op"),
])
def test_errors_name_the_line(old, new, message):
    with pytest.raises(RegionError, match=message):
        parse(rotary("rotate_half", 64, "bf16").text.replace(old, new))


# Meaning


@pytest.mark.parametrize("op", LANE_OPS)
@pytest.mark.parametrize("lane", LANES)
def test_reference(op, lane):
    r = parse(f"space [*, {lane}]\nin x: f16[*, {lane}]\ny: f16 = {op}(x)\nout y: f16 order(0, 1)")
    x = torch.randn(5, 3 * lane).half()[:, lane:2 * lane]
    got, = reference(r, [x], [])
    assert torch.equal(got, meaning(op, x)) and got.is_contiguous()


@pytest.mark.parametrize("op", LANE_OPS)
def test_reference_is_differentiable(op):
    r = parse(f"space [*, 6]\nin x: f64[*, 6]\ny: f64 = {op}(x)\nz: f64 = mul(y, x)\nout z: f64 order(0, 1)")
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference(r, [x], [])[0], x)


# Kernels


@pytest.mark.parametrize("wide", [False, True], ids=["", "fp32 tables"])
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("op", LANE_OPS)
def test_rotary(op, dtype, lane, wide):
    r = rotary(op, lane, dtype, wide)
    for outer, ratio in (((2, 5), 1.0), ((7, 3), 30.0), ((1, 1), 1.0)):
        inputs, scalars = inputs_for(r, outer, ratio), scalars_for(r)
        assert_right(r, inputs, scalars, run(r, inputs, scalars))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_repeated_tables(dtype, lane):
    r = parse(REPEATED.format(D=lane, dt=dtype))
    for outer in ((2, 5), (7, 3), (1, 1)):
        inputs = inputs_for(r, outer)
        outputs = run(r, inputs, [])
        assert_right(r, inputs, [], outputs)
        q, cos, sin = (x.double() for x in inputs)
        first, second, cos, sin = q[..., ::2], q[..., 1::2], cos[..., ::2], sin[..., 1::2]
        want = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
        torch.testing.assert_close(outputs[0], want.to(outputs[0].dtype))


@pytest.mark.parametrize("op", ["repeat_even", "repeat_odd"])
def test_repeated_lanes_are_exact(op):
    """Also of a table that all rows share, in a tile with room, where a half is padded."""
    r = parse(f"space [*, 80]\nin x: f32[*, 80]\nin w: f32[80]\na: f32 = {op}(x)\nb: f32 = {op}(w)\n"
              f"h: f32 = rotate_half(a)\nc: f32 = add(b, h)\nout a: f32 order(0, 1)\nout c: f32 order(0, 1)")
    x, w = torch.randn(9, 80), torch.randn(80)
    x[3, 4], x[4, 5] = float("inf"), float("-inf")
    repeated, total = run(r, [x, w], [], Tile(4, 128))
    assert torch.equal(repeated, meaning(op, x))
    assert torch.equal(total, meaning(op, w) + meaning("rotate_half", meaning(op, x)))


@pytest.mark.parametrize("tile", [Tile(1, 128), Tile(4, 128), Tile(2, 256)], ids=str)
@pytest.mark.parametrize("lane", [80, 128])
@pytest.mark.parametrize("op", LANE_OPS)
def test_tiles_with_room(op, lane, tile):
    r = rotary(op, lane, "bf16")
    inputs, scalars = inputs_for(r, (3, 5)), scalars_for(r)
    assert_right(r, inputs, scalars, run(r, inputs, scalars, tile))


@pytest.mark.parametrize("lane", [16, 80])
def test_exact_moves(lane):
    """Nothing is rounded on the way, -0 and NaN move like any value; the norm above is centred, so
    padded columns matter."""
    r = parse(f"space [*, {lane}]\nin x: f32[*, {lane}]\nscalar eps\n"
              f"n: f32 = layer_norm(x, none, none, eps)\n"
              f"h: f32 = rotate_half(x)\np: f32 = rotate_pairs(h)\nq: f32 = rms_norm(p, none, eps)\n"
              f"out n: f32 order(0, 1)\nout p: f32 order(0, 1)\nout q: f32 order(0, 1)")
    x = torch.randn(9, lane) + 100
    inputs, scalars = [x], [1e-5]
    outputs = run(r, inputs, scalars, Tile(4, 128))
    assert_right(r, inputs, scalars, outputs)
    assert torch.equal(outputs[1], meaning("rotate_pairs", meaning("rotate_half", x)))
    x[3, 5], x[4, 2] = float("nan"), 0.0
    moved = run(r, [x], scalars, Tile(4, 128))[1]
    want = meaning("rotate_pairs", meaning("rotate_half", x))
    assert torch.equal(moved.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(moved.signbit()[:3], want.signbit()[:3])
    assert torch.equal(moved.signbit()[4:], want.signbit()[4:])  # a NaN's sign is nobody's business


def test_a_broadcast_lane():
    """A value whose lane stride is 0, and one that is the same for all rows."""
    r = parse("space [*, 16]\nin x: f32[*, 16]\nin s: f32[*, 16]\nin w: f32[16]\n"
              "a: f32 = rotate_half(s)\nb: f32 = rotate_pairs(w)\nc: f32 = add(a, b)\n"
              "y: f32 = add(c, x)\nout y: f32 order(0, 1)")
    inputs = [torch.randn(9, 16), torch.randn(9, 1).expand(9, 16), torch.randn(16)]
    assert_right(r, inputs, [], run(r, inputs, [], Tile(4, 16)))


def test_pairs_that_a_half_cuts():
    r = parse("space [*, 130]\nin x: f32[*, 130]\na: f32 = rotate_half(x)\nb: f32 = rotate_pairs(a)\n"
              "out b: f32 order(0, 1)")
    with pytest.raises(Unsupported, match="pairs and halves of 130 columns"):
        run(r, [torch.randn(4, 130)], [])


@pytest.mark.parametrize("op", LANE_OPS)
def test_column_passes_and_npus_refuse(op):
    r = rotary(op, 128, "bf16")
    inputs, scalars = inputs_for(r, (2, 5)), scalars_for(r)
    with pytest.raises(Unsupported, match=f"{op} of 128 columns"):
        run(r, inputs, scalars, Tile(4, 32))
    target = npu.describe("Ascend910B3")
    walk = layout(r, [x.shape for x in inputs], [x.stride() for x in inputs], target.units)
    tile = ladder(r, walk.structure, walk.sizes, target)[0]
    with pytest.raises(Unsupported, match=f"{op}: Ascend910B3 permutes"):
        generate(r, walk.structure, tile, target)
    run_npu = Runner(r, target.interpreted())
    for ours, want in zip(run_npu(inputs, scalars), reference(r, inputs, scalars)):
        assert torch.equal(ours, want)  # the reference ran
    assert any("permutes" in reason for reason in run_npu.reasons)
