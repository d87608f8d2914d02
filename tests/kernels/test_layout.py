"""A layout visits every element of every operand exactly where PyTorch keeps it."""

from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from norm_cases import region

from ascend_ln_fuse.kernels.layout import INT32_MAX, Unsupported, layout
from ascend_ln_fuse.kernels.region import parse

LANE = 3


def walk(found):
    """Index tuples of a kernel's outer dims, in the order in which tiles decode them."""
    for flat in range(prod(found.sizes)):
        index = []
        for size in reversed(found.sizes):
            index.append(flat % size)
            flat //= size
        yield tuple(reversed(index))


def addresses(found, operand):
    """Per visited position, the offset of the operand's first lane element."""
    return [sum(i * s for i, s in zip(index, found.strides[operand])) for index in walk(found)]


@st.composite
def tensors(draw):
    """A region of up to four outer dims and tensors: x any permuted or sliced view, y broadcast."""
    outer = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(outer))))
    gaps = [draw(st.integers(0, 2)) for _ in outer]
    x = torch.empty([outer[i] + gaps[i] for i in order] + [LANE])
    x = x.permute([order.index(i) for i in range(len(outer))] + [len(outer)])
    for dim, size in enumerate(outer):
        x = x.narrow(dim, draw(st.integers(0, gaps[dim])), size)
    expand = draw(st.lists(st.booleans(), min_size=len(outer), max_size=len(outer)))
    y = torch.empty([1 if e else n for e, n in zip(expand, outer)] + [draw(st.sampled_from([1, LANE]))])
    stars = ", ".join(["*"] * len(outer))
    ydims = ", ".join("1" if e else "*" for e in expand)
    out_order = draw(st.permutations(range(len(outer))))
    text = (f"space [{stars}, {LANE}]\nin x: f32[{stars}, {LANE}]\nin y: f32[{ydims}, {y.shape[-1]}]\n"
            f"z: f32 = add(x, y)\nout z: f32 order({', '.join(map(str, (*out_order, len(outer))))})")
    return parse(text), x, y


@given(tensors())
def test_addresses(case):
    region, x, y = case
    found = layout(region, [x.shape, y.shape], [x.stride(), y.stride()])
    space = x.shape
    out = torch.empty_strided(space, tuple(
        s for s in torch.empty([space[i] for i in region.outputs[0].order]).permute(
            [region.outputs[0].order.index(i) for i in range(len(space))]).stride()))
    visited = {}
    for number, tensor in enumerate((x, y.expand(*space[:-1], y.shape[-1]), out)):
        first = tensor.select(-1, 0)
        base = first.storage_offset()
        flat = torch.arange(first.untyped_storage().nbytes() // 4)
        places = flat.as_strided(first.shape, first.stride(), base).flatten() - base
        visited[number] = (addresses(found, number), places.tolist())
    # The same positions in the same order for all operands, whatever the order is.
    kernel = sorted(zip(*(visited[n][0] for n in visited)))
    torch_ = sorted(zip(*(visited[n][1] for n in visited)))
    assert kernel == torch_
    lanes = [x.shape[-1] == LANE, y.shape[-1] == LANE, True]
    assert [operand.lane for operand in found.structure.operands] == lanes


@given(tensors())
def test_structure_says_what_the_strides_are(case):
    region, x, y = case
    found = layout(region, [x.shape, y.shape], [x.stride(), y.stride()])
    assume(prod(x.shape[:-1]) > 1)
    for operand, strides in zip(found.structure.operands, found.strides):
        assert operand.moving == tuple(s != 0 for s in strides)
        assert all(s % operand.unit == 0 for s in strides) and LANE % operand.unit == 0
        assert operand.dense == (operand.lane and strides[found.structure.blocked] == LANE)
        assert len(operand.passed(found.structure.blocked)) == sum(operand.moving) - operand.dense
    plain = layout(region, [x.shape, y.shape], [x.stride(), y.stride()], units=False)
    assert all(operand.unit == 1 and not operand.dense for operand in plain.structure.operands)
    assert found.structure.narrow and not plain.structure.narrow


def ln(shape, strides, rank=None, lane=128):
    r = region("layer_norm", lane, "bf16")
    return layout(r, [shape, (lane,), (lane,)], [strides, (1,), (1,)])


def test_contiguous_is_one_dim():
    assert ln((4, 50, 128), (6400, 128, 1)).sizes == (200,)


def test_article():
    found = ln((50220, 3, 128), (1152, 128, 1))
    assert found.sizes == (50220, 3) and found.structure.blocked == 0
    assert found.strides[0] == (1152, 128) and found.strides[3] == (384, 128)
    assert found.strides[1] == (0, 0)
    assert found.structure.operands[0].unit == 8
    assert found.tiles(32) == 3 * -(-50220 // 32)


def test_permuted_view_keeps_memory_order():
    """FLUX's B H L D view: consecutive tiles walk what lies together."""
    found = ln((20, 4096, 128), (128, 7680, 1))
    assert found.sizes == (4096, 20) and found.strides[0] == (7680, 128)
    assert found.structure.blocked == 0


def test_modulate_rows_run_along_tokens():
    r = region("modulate", 128, "bf16")
    shapes = [(64, 70, 128), (64, 1, 128), (64, 1, 128), (64, 1, 1)]
    found = layout(r, shapes, [(8960, 128, 1), (128, 128, 1), (768, 128, 1), (1, 1, 1)])
    assert found.rows == 70
    assert not found.structure.operands[1].moving[found.structure.blocked]


def test_size_one_dims_and_single_rows():
    assert ln((1, 9, 128), (7, 128, 1)).sizes == (9,)
    single = ln((1, 1, 128), (999, 7, 1))
    assert single.sizes == (1,)
    # A row alone is read as a row among others: same structure.
    assert single.structure == ln((1, 9, 128), (1, 128, 1)).structure


def test_zero_sizes():
    assert 0 in ln((0, 9, 128), (1152, 128, 1)).space


@pytest.mark.parametrize("shape, strides, why", [
    ((4, 5, 128), (1280, 256, 2), "lane stride of x is 2"),
    ((2**31, 1, 128), (128, 128, 1), "more than 2\\^31"),
])
def test_unsupported(shape, strides, why):
    with pytest.raises(Unsupported, match=why):
        ln(shape, strides)


def test_too_many_dims():
    r = parse("space [*, *, *, *, *, 8]\nin x: f32[*, *, *, *, *, 8]\nv: f32 = layer_norm(x, none, none, "
              "1e-05)\nout v: f32 order(0, 1, 2, 3, 4, 5)")
    x = torch.empty(3, 3, 3, 3, 3, 16)[:, :2, :2, :2, :2, :8]
    with pytest.raises(Unsupported, match="5 outer dims"):
        layout(r, [x.shape], [x.stride()])


def test_an_expanded_lane_is_a_broadcast():
    r = region("layer_norm", 8, "f32")
    found = layout(r, [(2, 3, 8), (8,), (8,)], [(3, 1, 0), (1,), (0,)])
    assert [x.lane for x in found.structure.operands] == [False, True, False, True]


def test_wide_offsets():
    assert ln((5, 7, 128), (2**25, 2**22, 1)).structure.wide
    assert not ln((5, 7, 128), (2**25, 2**20, 1)).structure.wide
    assert 2**22 * 1024 > INT32_MAX


def test_offsets_that_fit_32_bits():
    """In units of 8 elements, to the last row that there is."""
    most = 2**31 - 1
    assert ln((5, 3, 128), (most // 4 * 8, 2**13, 1)).structure.narrow is False
    assert ln((5, 3, 128), (most // 4 * 8 - 2**13, 2**10, 1)).structure.narrow
    assert not ln((2, 3, 128), (2**34, 256, 1)).structure.narrow
    assert ln((1, 3, 128), (2**34, 256, 1)).structure.narrow  # where it never goes


@pytest.mark.parametrize("shape, message", [
    ((4, 5, 64), "dim 2 is 64"), ((5, 128), "got a tensor of 2 dims"), ((4, 5, 1), "dim 2 is 1"),
])
def test_shapes_that_do_not_fit(shape, message):
    with pytest.raises(ValueError, match=message):
        ln(shape, torch.empty(shape).stride())


def test_outer_sizes_that_disagree():
    r = region("add_norm", 128, "f32")
    with pytest.raises(ValueError, match="expected"):
        layout(r, [(4, 5, 128), (4, 6, 128), (128,)], [(640, 128, 1), (768, 128, 1), (1,)])


def test_outputs_given():
    r = region("layer_norm", 128, "bf16")
    found = layout(r, [(50, 3, 128), (128,), (128,)], [(1152, 128, 1), (1,), (1,)],
                   out_strides=[(1152, 128, 1)])
    assert found.strides[3] == found.strides[0]
