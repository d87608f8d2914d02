"""The comparison of the self-check: its bound, its sample, what it costs and what it leaves alone.

What follows from a comparison (fallback, warning, file) is in tests/faults.
"""

import random

import numpy as np
import pytest
import torch
from norm_cases import TEXTS, exact, inputs_for, region, scalars_for
from threads import GRAIN, InThreads
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_ln_fuse.kernels import launch, self_check
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.reference import reference
from ascend_ln_fuse.kernels.region import parse
from ascend_ln_fuse.kernels.self_check import compare, row_limit, sample_rows

DTYPES = ["bf16", "f16", "f32", "f64"]


def case(name="layer_norm", dtype="f32", outer=(2, 5), lane=24, **how):
    r = region(name, lane, dtype)
    inputs = inputs_for(r, outer, **how)
    return r, inputs, scalars_for(r)


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outer", [(2, 5), (1, 1), (40, 50)], ids=str)
def test_the_reference_is_within(name, dtype, outer):
    r, inputs, scalars = case(name, dtype, outer)
    found = compare(r, inputs, scalars, reference(r, inputs, scalars))
    assert found.within and found.ratio <= 1 and found.of == outer[0] * outer[1]
    assert found.rows == min(found.of, row_limit(r))


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_exact_than_the_reference_is_within(name, dtype):
    r, inputs, scalars = case(name, dtype)
    outputs = [a.to(b.dtype) for a, b in zip(exact(r, inputs, scalars), reference(r, inputs, scalars))]
    assert compare(r, inputs, scalars, outputs).within


@pytest.mark.parametrize("dtype, step", [("bf16", 2**-5), ("f16", 2**-8), ("f32", 2**-18), ("f64", 2**-40)])
@pytest.mark.parametrize("name", ["layer_norm", "add_norm", "modulate", "sandwich"])
def test_one_wrong_element_is_outside(name, dtype, step):
    r, inputs, scalars = case(name, dtype)
    outputs = reference(r, inputs, scalars)
    for at in ((0, 0, 0), (1, 4, 23), (0, 3, 11)):
        for number in range(len(outputs)):
            spoilt = [x.clone() for x in outputs]
            spoilt[number][at] += 4 * step * spoilt[number].abs().max()
            found = compare(r, inputs, scalars, spoilt)
            assert not found.within and found.output == number, found
            assert "is allowed" in str(found)


def test_the_bound_is_the_projects():
    """Twice the reference's largest error, plus one unit in the last place at the element."""
    r, inputs, scalars = case(dtype="bf16")
    low, true = reference(r, inputs, scalars)[0], exact(r, inputs, scalars)[0]
    own = (low.double() - true).abs().max()
    at = (1, 2, 3)
    unit = 2.0 ** torch.floor(torch.log2(true[at].abs())) * torch.finfo(torch.bfloat16).eps
    assert self_check._worst(low, low, true)[2] == own
    # In bf16 itself the steps are too coarse to meet the bound; `_worst` takes wider results too.
    for excess, within in ((0.99, True), (1.01, False)):
        ours = true.clone()
        ours[at] += excess * (2 * own + unit)
        error, allowed, _ = self_check._worst(ours, low, true)
        assert (error <= allowed) is within
        assert allowed == pytest.approx((2 * own + unit).item())


@pytest.mark.parametrize("at", [0, self_check.PIECE, 3 * self_check.PIECE - 7])
def test_the_reference_error_is_that_of_all_pieces(at):
    true = torch.linspace(1, 1.9, 3 * self_check.PIECE - 5, dtype=torch.float64)
    low, step = true.float(), 2**-10
    low[-1] += step
    for excess, within in ((1.9, True), (2.1, False)):
        ours = true.clone()
        ours[at] += excess * step
        error, allowed, own = self_check._worst(ours, low, true)
        assert (error <= allowed) is within and error == pytest.approx(excess * step)
        assert own == pytest.approx(step, rel=1e-3) and allowed == pytest.approx(2 * step, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_unit_in_the_last_place(dtype):
    info = torch.finfo(dtype)
    for x, unit in ((1.0, 1.0), (1.99, 1.0), (-2.0, 2.0), (0.75, 0.5), (0.0, info.smallest_normal)):
        assert self_check._ulp(torch.tensor([x], dtype=torch.float64), info).item() == unit * info.eps


# -- not a number, and infinities


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_inputs_that_are_no_numbers(dtype, value):
    """They stay in their row, and there the kernel must do what the reference does."""
    r, inputs, scalars = case("add_norm", dtype)
    inputs[0][1, 2, 3] = value
    outputs = reference(r, inputs, scalars)
    assert compare(r, inputs, scalars, outputs).within
    for at in ((1, 2, 3), (0, 0, 0)):
        spoilt = [x.clone() for x in outputs]
        spoilt[1][at] = 0.0 if spoilt[1][at].isnan() else float("nan")
        found = compare(r, inputs, scalars, spoilt)
        assert not found.within and "NaN or infinity" in str(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinity_where_the_reference_has_none(dtype):
    r, inputs, scalars = case(dtype=dtype)
    for value in (float("inf"), float("-inf")):
        outputs = [x.clone() for x in reference(r, inputs, scalars)]
        outputs[0][1, 2, 3] = value
        assert not compare(r, inputs, scalars, outputs).within


def test_rounding_may_decide_over_infinity():
    """65519 rounds to 65504 and 65520 to infinity: next to the limit of fp16, either is right; far from it,
    neither sign nor size is free."""
    low = torch.tensor([65504.0, float("inf"), 1.0, float("inf")], dtype=torch.float16)
    true = torch.tensor([65519.0, 65521.0, 1.0, 1e6], dtype=torch.float64)

    def within(*values):
        error, allowed, _ = self_check._worst(torch.tensor(values, dtype=torch.float16), low, true)
        return error <= allowed

    inf = float("inf")
    assert within(65504.0, inf, 1.0, inf) and within(inf, 65504.0, 1.0, inf)
    assert not within(65504.0, inf, inf, inf)
    assert not within(65504.0, inf, 1.0, -inf) and not within(65504.0, inf, 1.0, 1.0)


# -- luck


def test_a_reference_that_is_right_by_luck():
    """On tensors of one short row the reference's own error may be next to nothing; a right kernel, whose
    sums are made in another order, is then outside twice that, and must not be rejected."""
    pytest.importorskip("triton")
    outside = 0
    for name in ("rms_norm", "sandwich"):
        for lane in (2, 8):
            r = region(name, lane, "f32")
            run = Runner(r, launch.target_for(torch.device("cpu")), self_check="off")
            for seed in range(40):
                inputs = inputs_for(r, (1, 1), ratio=(0.0, 1.0, 30.0)[seed % 3], seed=seed)
                scalars = scalars_for(r)
                ours = run(inputs, scalars)
                plain = map(self_check._worst, ours, reference(r, inputs, scalars), exact(r, inputs, scalars))
                outside += any(error > allowed for error, allowed, _ in plain)
                assert compare(r, inputs, scalars, ours).within, (name, lane, seed)
    assert outside, "the case that this is about did not come up"


@pytest.mark.parametrize("norm", ["rms_norm(x, none, eps)", "layer_norm(x, none, none, eps)"])
def test_luck_of_a_vector(norm):
    """The same where what is normalised has no rows: a vector, or what broadcasts over the rows of others."""
    pytest.importorskip("triton")
    for dims, order in (("24", "0"), ("1, 24", "0, 1")):
        space = "24" if dims == "24" else "*, 24"
        r = parse(f"space [{space}]\nin x: f32[{dims}]\nscalar eps\nv: f32 = {norm}\n"
                  f"out v: f32 order({order})")
        run = Runner(r, launch.target_for(torch.device("cpu")), self_check="off")
        for seed in range(90, 150):
            x = torch.randn([int(n) for n in dims.split(", ")], generator=torch.Generator().manual_seed(seed))
            assert compare(r, [x], [1e-5], run([x], [1e-5])).within, (dims, seed)


@pytest.mark.parametrize("lane", [2, 3, 8])
def test_luck_excuses_no_wrong_kernel(lane):
    for seed in range(20):
        r, inputs, scalars = case("rms_norm", "f32", (1, 1), lane, seed=seed)
        outputs = [x * (1 + 2**-15) for x in reference(r, inputs, scalars)]
        assert not compare(r, inputs, scalars, outputs).within


# -- the sample


@pytest.mark.parametrize("outer", [(100_000,), (300, 500), (7, 11, 2000), (1, 1, 4096, 3)], ids=str)
@pytest.mark.parametrize("tile", [1, 16, 96])
def test_the_sample_has_the_edges(outer, tile):
    rows = sample_rows(outer, 512, tile)
    assert len(rows) == len(set(rows)) == 512 and rows == sorted(rows) == sample_rows(outer, 512, tile)
    assert all(0 <= i < n for row in rows for i, n in zip(row, outer, strict=True))
    first, last = tuple(0 for _ in outer), tuple(n - 1 for n in outer)
    assert {first, last} <= set(rows)
    for dim, size in enumerate(outer):
        for at in (tile - 1, tile, (size - 1) // tile * tile):
            if 0 <= at < size:
                assert {(*edge[:dim], at, *edge[dim + 1:]) for edge in (first, last)} <= set(rows)


def test_a_small_call_is_compared_whole():
    assert sample_rows((3, 4), 12) == [(i, j) for i in range(3) for j in range(4)]
    assert len(sample_rows((3, 4), 11)) == 11 and sample_rows((), 5) == [()]


def test_rank_one():
    r = parse("space [8]\nin x: f32[8]\ny: f32 = rms_norm(x, none, 1e-06)\nout y: f32 order(0)")
    x = torch.randn(8)
    (y,) = reference(r, [x], [])
    assert compare(r, [x], [], [y]).within and not compare(r, [x], [], [y + 1e-4]).within


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_sample_sees_the_right_rows(name):
    """Large enough for a sample, with views, broadcast operands and permuted outputs."""
    r, inputs, scalars = case(name, "bf16", (60, 50), 32)
    outputs = reference(r, inputs, scalars)
    found = compare(r, inputs, scalars, outputs, tile_rows=16)
    assert found.within and found.rows == row_limit(r) < found.of == 3000
    for at in ((0, 0), (59, 49), (0, 15), (16, 0)):
        spoilt = [x.clone() for x in outputs]
        spoilt[-1][at] += 1
        assert not compare(r, inputs, scalars, spoilt, tile_rows=16).within


class _Largest(TorchDispatchMode):
    """The most bytes of a storage that an operation made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("lane", [128, 4096])
def test_memory_does_not_grow_with_the_call(lane):
    """16 GB of rows, all in one place of memory."""
    r = region("layer_norm", lane, "bf16")
    x, w, b = torch.randn(1, 1, lane).bfloat16(), *torch.randn(2, lane).bfloat16().unbind(0)
    (y,) = reference(r, [x, w, b], [1e-5])
    outer = (2**33 // lane // 64, 64)
    with _Largest() as seen:
        found = compare(r, [x.expand(*outer, lane), w, b], [1e-5], [y.expand(*outer, lane)])
    assert found.within and found.of == outer[0] * 64
    assert 0 < seen.bytes <= self_check.BUDGET


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_it_takes_no_threads(name, dtype, monkeypatch):
    """While kernels compile, waiting for a thread of every core takes longer than all that is computed."""
    monkeypatch.setattr(self_check, "BUDGET", 2**24)
    r, inputs, scalars = case(name, dtype, (60, 50), 400)
    outputs = reference(r, inputs, scalars)
    with InThreads() as threads:
        found = compare(r, inputs, scalars, outputs)
    assert found.within and found.rows * 400 > GRAIN
    assert threads.seen > 20 and not threads.found


def test_two_rows_at_least():
    assert row_limit(region("layer_norm", 2**22, "bf16")) == 2


def test_nothing_random_is_drawn():
    r, inputs, scalars = case("rms_norm", "f32", (60, 50), 32)
    outputs = [x + 1 for x in reference(r, inputs, scalars)]  # outside: the second look draws numbers too
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert not compare(r, inputs, scalars, outputs).within
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("mode", ["grad", "inference", "autocast", "double by default"])
def test_modes_of_the_caller(mode):
    r, inputs, scalars = case("cast_chain", "bf16")
    inputs = [x.clone().requires_grad_(mode == "grad") for x in inputs]
    with torch.inference_mode(mode == "inference"), torch.autocast("cpu", torch.bfloat16, mode == "autocast"):
        torch.set_default_dtype(torch.float64 if mode.startswith("double") else torch.float32)
        try:
            outputs = [x.detach() for x in reference(r, inputs, scalars)]
            assert compare(r, inputs, scalars, outputs).within
            assert not compare(r, inputs, scalars, [x * 1.25 for x in outputs]).within
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(x.grad is None for x in inputs)
