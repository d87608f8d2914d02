"""Region text: round trip, errors that name the line, helpers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import TEXTS, region

from ascend_ln_fuse.kernels.region import (
    Line,
    NormRegion,
    Operand,
    Output,
    RegionError,
    broadcast_sizes,
    dense_strides,
    literal,
    one_line,
    parse,
)

GOOD = TEXTS["llama"].format(D=128, dt="bf16")


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_round_trip(name, dtype):
    r = region(name, 96, dtype)
    assert parse(r.text) == parse(one_line(r.text)) == r
    assert parse(r.text).text == r.text == TEXTS[name].format(D=96, dt=dtype)
    assert hash(parse(r.text)) == hash(r)


@given(value=st.floats(allow_nan=False), lane=st.integers(0, 10**6), rank=st.integers(1, 5))
def test_round_trip_of_numbers(value, lane, rank):
    dims = ("*",) * (rank - 1) + (lane,)
    r = NormRegion(lane, rank, (Operand("x", "f32", dims),), (),
                   (Line("y", "f32", "mul", ("x", literal(value))),),
                   (Output("y", "f32", tuple(range(rank))),))
    assert parse(r.text) == r


@pytest.mark.parametrize("old, new, message", [
    ("space [*, *, 128]", "space (*, 128)", "space"),
    ("in w: bf16[128]", "in w: bf16[64]", "last dim must be the lane"),
    ("in w: bf16[128]", "in w: i32[128]", "dtype 'i32'"),
    ("in w: bf16[128]", "in w: bf16[1, 2, 3, 128]", "has 4 dims"),
    ("in w: bf16[128]", "in w: bf16[7, 128]", "outer dims are"),
    ("in w: bf16[128]", "in x: bf16[128]", "defined twice"),
    ("in w: bf16[128]", "in W: bf16[128]", "is not a name"),
    ("cast(x)", "cast(y)", "y is not defined above"),
    ("rms_norm(v0, none, eps)", "rms_norm(v0, eps)", "takes 3 arguments"),
    ("rms_norm(v0, none, eps)", "rms_norm(x, none, eps)", "keeps the dtype"),
    ("rms_norm(v0, none, eps)", "group_norm(v0, none, eps)", "unknown op"),
    ("mul(w, v2)", "mul(w, none)", "only a norm may miss"),
    ("mul(w, v2)", "mul(w, v2", "not a line"),
    ("out v3: bf16", "out v3: f32", "no value v3 of dtype f32"),
    ("order(0, 1, 2)", "order(0, 1, 1)", "no permutation"),
    ("out v3: bf16 order(0, 1, 2)", "", "not a line"),
])
def test_errors_name_the_line(old, new, message):
    with pytest.raises(RegionError, match=message.replace("(", r"\(")):
        parse(GOOD.replace(old, new))


def test_nothing_written():
    with pytest.raises(RegionError, match="writes nothing"):
        parse("space [*, 4]\nin x: f32[*, 4]")


def test_nan_has_no_text():
    with pytest.raises(RegionError):
        literal(float("nan"))


@pytest.mark.parametrize("order, strides", [
    ((0, 1, 2), (12, 4, 1)), ((1, 0, 2), (4, 8, 1)), ((0, 2, 1), (12, 1, 3)),
])
def test_dense_strides(order, strides):
    assert dense_strides((2, 3, 4), order) == strides


def test_broadcast_sizes():
    r = region("modulate", 8, "f32")
    assert broadcast_sizes(r, [(2, 5, 8), (2, 1, 8), (2, 1, 8), (2, 1, 1)]) == (2, 5, 8)
    # A "*" dim of size 1 broadcasts too.
    assert broadcast_sizes(r, [(1, 5, 8), (3, 1, 8), (1, 1, 8), (1, 1, 1)]) == (3, 5, 8)
    assert broadcast_sizes(r, [(0, 5, 8), (0, 1, 8), (0, 1, 8), (0, 1, 1)]) == (0, 5, 8)
