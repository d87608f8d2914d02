"""Lanes of heads (`space [*, 12 x 128]`): text, reference, layout, and kernels run by Triton's interpreter
against float64."""

import pytest
import torch
from norm_cases import assert_right, inputs_for, scalars_for
from test_rotary import CUDA, meaning, run

from ascend_ln_fuse.kernels.codegen import generate
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.layout import Unsupported, layout
from ascend_ln_fuse.kernels.ops import _Region, python_call
from ascend_ln_fuse.kernels.reference import reference
from ascend_ln_fuse.kernels.region import LANE_OPS, RegionError, parse
from ascend_ln_fuse.kernels.self_check import _by_row
from ascend_ln_fuse.kernels.source import Tile
from ascend_ln_fuse.kernels.targets import npu
from ascend_ln_fuse.kernels.tiling import ladder

#: A norm of all heads, then a rotary embedding of each, with tables that the heads share.
ROTARY = """\
space [*, *, {H} x {P}]
in q: {dt}[*, *, {D}]
in w: {dt}[{D}]
in cos: {cs}[*, 1, {P}]
in sin: {cs}[*, {P}]
in g: {dt}[{P}]
scalar eps
n: {dt} = {norm}(q, w, {none}eps)
m: {dt} = mul(n, g)
r: {dt} = {op}(m)
a: {cs} = mul(n, cos)
b: {cs} = mul(r, sin)
y: {cs} = add(a, b)
z: {dt} = cast(y)
out z: {dt} order({order})"""

#: heads, elements of one
SIZES = [(3, 16), (5, 80), (4, 6), (1, 12), (12, 2), (2, 130)]


def rotary(op, heads, head, dtype="f32", wide=False, norm="rms_norm", order="0, 1, 2"):
    text = ROTARY.format(H=heads, P=head, D=heads * head, op=op, dt=dtype, cs="f32" if wide else dtype,
                         norm=norm, none="none, " if norm == "layer_norm" else "", order=order)
    return parse(text.replace("1 x ", "") if heads == 1 else text)


# Text


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_round_trip(dtype):
    r = rotary("rotate_half", 12, 128, dtype)
    assert (r.heads, r.head, r.lane) == (12, 128, 1536) and "space [*, *, 12 x 128]" in r.text
    assert parse(r.text) == r and parse(r.text).text == r.text and hash(parse(r.text)) == hash(r)
    other = parse(r.text.replace("12 x 128", "6 x 256").replace("[128]", "[256]").replace(" 128]", " 256]"))
    assert other != r and other.lane == r.lane


def test_a_lane_without_heads_is_one_head():
    r = parse("space [*, 1 x 8]\nin x: f32[*, 8]\ny: f32 = neg(x)\nout y: f32 order(0, 1)")
    assert r.text.startswith("space [*, 8]\n") and parse(r.text) == r and r.head == r.lane == 8


@pytest.mark.parametrize("old, new, message", [
    ("[*, *, 4 x 8]", "[*, *, 0 x 8]", "does not consist of 0 heads"),
    ("[*, *, 4 x 8]", "[*, *, 32 x 1]", "does not consist of 32 heads"),
    ("[*, *, 4 x 8]", "[*, *, 4 x 2 x 4]", "expected 'space"),
    ("[*, *, 4 x 8]", "[*, *, 32]", "in cos: f32.* last dim must be the lane 32 or 1"),
    ("[*, *, 4 x 8]", "[*, *, 2 x 16]", "last dim must be the lane 32 or 16 or 1"),
    ("in w: f32[32]", "in w: f32[8]", "rms_norm needs values of the whole lane, which w is not"),
    ("in q: f32[*, *, 32]", "in q: f32[*, *, 8]", "rms_norm needs values of the whole lane, which q is not"),
    ("in q: f32[*, *, 32]", "in q: f32[*, *, 1]", "rms_norm needs values of the whole lane, which q is not"),
    ("n: f32 = rms_norm(q, w, eps)", "c: f32 = add(cos, sin)\nn: f32 = rms_norm(c, w, eps)",
     "which c is not"),
    ("in g: f32[8]", "in g: f32[16]", "last dim must be the lane 32 or 8 or 1"),
])
def test_errors_name_the_line(old, new, message):
    text = rotary("rotate_half", 4, 8).text
    assert old in text
    with pytest.raises(RegionError, match=message):
        parse(text.replace(old, new))


def test_heads_of_odd_size():
    with pytest.raises(RegionError, match="rotate_half needs heads of even size, not 3"):
        rotary("rotate_half", 4, 3)


# Meaning


def by_hand(op, q, w, cos, sin, g, eps, heads):
    n = torch.nn.functional.rms_norm(q, q.shape[-1:], w, eps).unflatten(-1, (heads, -1))
    turned = meaning(op, n * g)
    return (n * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).flatten(-2)


@pytest.mark.parametrize("op", LANE_OPS)
@pytest.mark.parametrize("heads, head", SIZES)
def test_reference(op, heads, head):
    r = rotary(op, heads, head)
    for outer in ((2, 5), (1, 1), (0, 3)):
        inputs = inputs_for(r, outer)
        got, = reference(r, inputs, [1e-5])
        assert torch.equal(got, by_hand(op, *inputs, 1e-5, heads))
        assert got.shape == (*outer, heads * head) and got.is_contiguous()


def test_layouts_of_the_reference():
    """Rows of another order, values without a lane, one that all heads share, and one that is given twice."""
    r = parse("space [*, *, 3 x 4]\nin x: f32[*, *, 12]\nin t: f32[*, 1, 4]\nin s: f32[*, 1]\nin o: f32[]\n"
              "a: f32 = mul(x, t)\nb: f32 = add(t, o)\nc: f32 = add(s, o)\n"
              "out a: f32 order(1, 0, 2)\nout b: f32 order(0, 1, 2)\nout c: f32 order(1, 0, 2)\n"
              "out a: f32 order(0, 1, 2)\nout x: f32 order(0, 1, 2)")
    x, t, s, o = inputs = inputs_for(r, (2, 5))
    outputs = reference(r, inputs, [])
    wide = t.repeat(1, 1, 3)
    wanted = (x * wide, wide + o, s + o, x * wide, x)
    strides = [(12, 24, 1), (60, 12, 1), (12, 24, 1), (60, 12, 1), (60, 12, 1)]
    for got, want, stride in zip(outputs, wanted, strides, strict=True):
        assert torch.equal(got, want.expand(2, 5, 12)) and got.stride() == stride
    assert len({got.data_ptr() for got in (*outputs, x)}) == 6
    assert_right(r, inputs, [], run(r, inputs, []))


def test_gradients():
    r = rotary("rotate_pairs", 3, 4, "f64")
    inputs = [x.clone().requires_grad_() for x in inputs_for(r, (2, 3))]
    assert torch.autograd.gradcheck(lambda *given: reference(r, given, [1e-5])[0], inputs)


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_results_may_be_written_in_place(device):
    """With gradients too, though they may be views of what the reference computed: on a CPU, and on an
    accelerator without a kernel."""
    r = rotary("rotate_half", 3, 4)
    inputs = [x.clone().requires_grad_() for x in inputs_for(r, (2, 3))]
    want = (by_hand("rotate_half", *inputs, 1e-5, 3) * 2).sin().sum()
    if device == "cpu":
        y = python_call(r)(*inputs, 1e-5)
    else:
        y, = _Region.apply(lambda given, scalars: reference(r, given, scalars), r, [1e-5], *inputs)
    y.unflatten(-1, (3, 4)).mul_(2)
    y.sin().sum().backward()
    for x, grad in zip(inputs, torch.autograd.grad(want, inputs)):
        torch.testing.assert_close(x.grad, grad)


# Layout


def test_layout():
    r = rotary("rotate_half", 3, 8)
    shapes = [(2, 5, 24), (24,), (2, 1, 8), (5, 8), (8,)]
    walk = layout(r, shapes, [(120, 24, 1), (1,), (8, 8, 1), (8, 1), (1,)])
    assert [x.lane for x in walk.structure.operands] == [True] * 6
    assert walk.strides == ((120, 24), (0, 0), (8, 0), (0, 8), (0, 0), (120, 24))
    for i, shape in ((2, (2, 1, 24)), (2, (2, 1, 1)), (3, (5, 4)), (1, (8,))):
        wrong = [*shapes[:i], shape, *shapes[i + 1:]]
        with pytest.raises(ValueError, match="expected"):
            layout(r, wrong, [torch.empty(x).stride() for x in wrong])
    with pytest.raises(Unsupported, match="heads that lies across memory"):
        layout(r, shapes, [(120, 24, 1), (1,), (8, 8, 1), (16, 2), (1,)])


def test_alignment_of_a_shared_operand():
    """By the elements of a head, of which rows of a table are a multiple."""
    r = rotary("rotate_half", 4, 6)
    walk = layout(r, [(2, 5, 24), (24,), (2, 1, 6), (5, 6), (6,)],
                  [(120, 24, 1), (1,), (6, 6, 1), (6, 1), (1,)])
    assert [x.unit for x in walk.structure.operands] == [4, 4, 2, 2, 2, 4]


# Kernels


@pytest.mark.parametrize("wide", [False, True], ids=["", "fp32 tables"])
@pytest.mark.parametrize("heads, head", SIZES)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("op", LANE_OPS)
def test_rotary(op, dtype, heads, head, wide):
    for norm, order in (("rms_norm", "0, 1, 2"), ("layer_norm", "1, 0, 2")):
        r = rotary(op, heads, head, dtype, wide, norm, order)
        for outer, ratio in (((2, 5), 1.0), ((7, 3), 30.0), ((1, 1), 1.0)):
            if dtype == "f32" and outer == (1, 1):
                continue  # the reference may be right by luck on so few elements (kernels/self_check.py)
            inputs, scalars = inputs_for(r, outer, ratio), scalars_for(r)
            assert_right(r, inputs, scalars, run(r, inputs, scalars))


@pytest.mark.parametrize("tile", [Tile(1, 256), Tile(4, 256), Tile(2, 1024)], ids=str)
@pytest.mark.parametrize("heads, head", [(3, 64), (3, 40)])
@pytest.mark.parametrize("op", LANE_OPS)
def test_tiles_with_room(op, heads, head, tile):
    r = rotary(op, heads, head, "bf16")
    inputs, scalars = inputs_for(r, (3, 5)), scalars_for(r)
    assert_right(r, inputs, scalars, run(r, inputs, scalars, tile))


@pytest.mark.parametrize("tile", [Tile(1, 32), Tile(4, 16), Tile(2, 64)], ids=str)
@pytest.mark.parametrize("op", LANE_OPS)
def test_column_passes_of_whole_heads(op, tile):
    for heads in (5, 8):
        r = rotary(op, heads, 16, "bf16", norm="layer_norm")
        inputs, scalars = inputs_for(r, (3, 5)), scalars_for(r)
        assert_right(r, inputs, scalars, run(r, inputs, scalars, tile))


def test_column_passes_of_shared_operands():
    """Nothing moves along the lane: passes may cut a head."""
    text = rotary("rotate_half", 5, 6, "bf16", norm="layer_norm").text
    r = parse(text.replace("rotate_half(m)", "neg(m)"))
    inputs, scalars = inputs_for(r, (3, 5)), scalars_for(r)
    for tile in (Tile(1, 4), Tile(2, 8), Tile(4, 16)):
        assert_right(r, inputs, scalars, run(r, inputs, scalars, tile))


@pytest.mark.parametrize("heads, head", [(4, 16), (3, 20)])
def test_exact_moves(heads, head):
    """Nothing is rounded on the way, -0 and NaN move like any value."""
    r = parse(f"space [*, {heads} x {head}]\nin x: f32[*, {heads * head}]\nin t: f32[*, {head}]\n"
              f"h: f32 = rotate_half(x)\np: f32 = rotate_pairs(h)\ne: f32 = repeat_even(t)\n"
              f"y: f32 = mul(p, e)\nout p: f32 order(0, 1)\nout y: f32 order(0, 1)")
    x, t = torch.randn(9, heads * head), torch.randn(9, head)
    x[3, 5], x[4, 2], t[5, 2] = float("inf"), 0.0, -0.0
    moved, product = run(r, [x, t], [], Tile(4, 256))
    split = x.unflatten(-1, (heads, head))
    turned = meaning("rotate_pairs", meaning("rotate_half", split))
    for got, want in ((moved, turned), (product, turned * meaning("repeat_even", t)[:, None])):
        assert torch.equal(got, want.flatten(-2)) and torch.equal(got.signbit(), want.flatten(-2).signbit())


def test_the_columns_of_a_tile():
    """Powers of two, with room for halves that are none."""
    wanted = {(12, 128): 2048, (3, 16): 64, (12, 80): 2048, (2, 130): 512, (1, 80): 128}
    for (heads, head), cols in wanted.items():
        r = rotary("rotate_half", heads, head, "bf16")
        inputs = inputs_for(r, (2, 5))
        walk = layout(r, [x.shape for x in inputs], [x.stride() for x in inputs], CUDA.units)
        assert ladder(r, walk.structure, walk.sizes, CUDA)[0].cols == cols
    assert "IN_HEAD = COL % 128" in generate(*_offline(12, 128)).source


def _offline(heads, head):
    r = rotary("rotate_half", heads, head, "bf16")
    inputs = inputs_for(r, (2, 5))
    walk = layout(r, [x.shape for x in inputs], [x.stride() for x in inputs], CUDA.units)
    return r, walk.structure, ladder(r, walk.structure, walk.sizes, CUDA)[0], CUDA


def test_what_no_kernel_serves():
    r = rotary("rotate_half", 4, 20)
    inputs, scalars = inputs_for(r, (2, 5)), scalars_for(r)
    for tile in (Tile(4, 64), Tile(4, 16)):  # 80 columns, of which halves need 128
        with pytest.raises(Unsupported, match="rotate_half of 80 columns"):
            run(r, inputs, scalars, tile)
    r = rotary("rotate_pairs", 4, 16)
    with pytest.raises(Unsupported, match="rotate_pairs of 64 columns"):
        run(r, inputs_for(r, (2, 5)), scalars, Tile(4, 8))
    r = parse(rotary("rotate_half", 4, 10).text.replace("a: f32 = mul(n", "p: f32 = rotate_pairs(r)\n"
                                                        "a: f32 = mul(p"))
    with pytest.raises(Unsupported, match="pairs and halves of 10 columns"):
        run(r, inputs_for(r, (2, 5)), scalars)


@pytest.mark.parametrize("op", [*LANE_OPS, "neg"])
def test_npus_refuse(op):
    """Elements of a lane are neither permuted nor gathered there: the reference runs."""
    r = parse(rotary("rotate_half", 4, 16, "bf16").text.replace("rotate_half", op))
    inputs, scalars = inputs_for(r, (2, 5)), scalars_for(r)
    run_npu = Runner(r, npu.describe("Ascend910B3").interpreted())
    for ours, want in zip(run_npu(inputs, scalars), reference(r, inputs, scalars)):
        assert torch.equal(ours, want)
    wanted = "gathers a lane element by element" if op == "neg" else "permutes a lane element by element"
    assert any(wanted in reason for reason in run_npu.reasons)


def test_the_self_check_keeps_the_heads():
    r = rotary("rotate_half", 4, 16, "bf16")
    by_row, spread = _by_row(r)
    assert by_row.heads == 4 and spread == (True, False, True, True, False)
    assert [x.dims for x in by_row.inputs] == [("*", 64), (64,), ("*", 16), ("*", 16), (16,)]
