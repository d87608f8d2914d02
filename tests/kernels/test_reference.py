"""The reference is what PyTorch does with the same ops, in the declared layout."""

from functools import partial

import pytest
import torch
from norm_cases import TEXTS, inputs_for, region, scalars_for
from torch.nn import functional as F

from ascend_ln_fuse.kernels.pointwise import POINTWISE, torch_function
from ascend_ln_fuse.kernels.reference import TORCH_DTYPES, program, reference
from ascend_ln_fuse.kernels.region import parse


def test_llama_rounds_where_llama_does():
    r = region("llama", 64, "bf16")
    x, w = inputs_for(r, (2, 5))
    got, = reference(r, [x, w], [1e-6])
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(got, w * normal.bfloat16())


def test_modulate():
    r = region("modulate", 48, "f16")
    x, scale, shift, gate = inputs_for(r, (2, 5))
    got, = reference(r, [x, scale, shift, gate], [1e-5])
    want = gate * (F.layer_norm(x, (48,), eps=1e-5) * (scale + 1.0) + shift)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["layer_norm", "add_norm", "modulate", "sandwich"])
@pytest.mark.parametrize("ratio", [0.0, 1000.0], ids=["centred", "mean"])
def test_written_out_it_is_the_same(name, ratio):
    r = region(name, 96, "f64")
    inputs, scalars = inputs_for(r, (4, 5), ratio=ratio), scalars_for(r)
    for found, wanted in zip(program(r, written_out=True)(*inputs, *scalars), reference(r, inputs, scalars)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11 * wanted.abs().max().item())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_written_out_no_number_stays_in_its_row(value):
    r = region("layer_norm", 96, "f64")
    inputs, scalars = inputs_for(r, (1, 3)), scalars_for(r)
    inputs[0][0, 1, 7] = value
    found, = program(r, written_out=True)(*inputs, *scalars)
    wanted, = reference(r, inputs, scalars)
    assert found[0, 1].isnan().all() and torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_l2_norms(dtype, weighted):
    """Their definitions in fp32, rounded once; of fp32, `normalize` is F.normalize."""
    equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    x, w = torch.randn(6, 24), torch.rand(24) + 0.5
    x *= torch.tensor([0.0, 1e-8, 1e-3, 1.0, 300.0, 6e4])[:, None]
    x, w = x.to(TORCH_DTYPES[dtype]), w.to(TORCH_DTYPES[dtype])
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = w if weighted else torch.ones(24, dtype=w.dtype)
    divisor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(1e-5)
    want = {"normalize": (wide / divisor * factor).to(x.dtype),
            "l2_norm": (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-5) * factor).to(x.dtype)}
    if not weighted and x.dtype == wide.dtype:
        equal(want["normalize"], F.normalize(x, dim=-1, eps=1e-5))
    for op in want:
        r = parse(f"space [*, 24]\nin x: {dtype}[*, 24]\nin w: {dtype}[24]\n"
                  f"v: {dtype} = {op}(x, {'w' if weighted else 'none'}, 1e-05)\nout v: {dtype} order(0, 1)")
        equal(reference(r, [x, w], [])[0], want[op])


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 2.0**-25, 3e-8, 1e-6])
def test_a_row_of_zeros_is_normalised_as_in_torch(eps, dtype):
    """To NaN where eps is 0 in that dtype."""
    r = parse(f"space [*, 8]\nin x: {dtype}[*, 8]\nscalar eps\nv: {dtype} = normalize(x, none, eps)\n"
              f"out v: {dtype} order(0, 1)")
    x = torch.zeros(2, 8, dtype=TORCH_DTYPES[dtype])
    want = F.normalize(x, dim=-1, eps=eps)
    assert want.isnan().all() == (eps == 0 or (dtype == "f16" and eps <= 2.0**-25))
    torch.testing.assert_close(reference(r, [x], [eps])[0], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["normalize", "l2_norm"])
@pytest.mark.parametrize("weight", ["w", "none"])
def test_l2_norms_are_differentiable(op, weight):
    r = parse(f"space [*, 8]\nin x: f64[*, 8]\nin w: f64[8]\nv: f64 = {op}(x, {weight}, 0.5)\n"
              "out v: f64 order(0, 1)")
    x = (torch.randn(4, 8, dtype=torch.float64) * torch.tensor([0.01, 0.1, 1, 10])[:, None]).requires_grad_()
    w = torch.rand(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *xs: reference(r, xs, []), (x, w), check_forward_ad=True)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_layout_and_ownership(name):
    """Fresh tensors of the declared order, also for an output that is an input or comes twice."""
    r = region(name, 16, "f32")
    inputs = inputs_for(r, (3, 4))
    outputs = reference(r, inputs, scalars_for(r))
    owners = {t.untyped_storage().data_ptr() for t in (*inputs, *outputs)}
    assert len(owners) == len(inputs) + len(outputs)
    if name == "qk":
        assert outputs[0].stride() == (16, 48, 1)


def test_an_input_as_output():
    r = parse("space [*, 4]\nin x: f32[*, 4]\nout x: f32 order(0, 1)\nout x: f32 order(1, 0)")
    x = torch.randn(3, 4)
    first, second = reference(r, [x], [])
    assert torch.equal(first, x) and torch.equal(second, x)
    assert len({x.data_ptr(), first.data_ptr(), second.data_ptr()}) == 3
    assert second.stride() == (1, 3)


@pytest.mark.parametrize("name", sorted(POINTWISE))
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_pointwise_lines(name, dtype):
    op, torch_dtype = POINTWISE[name], TORCH_DTYPES[dtype]
    args = ["x", "y"][:op.arity]
    r = parse("space [*, 8]\nin x: {0}[*, 8]\nin y: {0}[8]\nz: {0} = {1}({2})\nout z: {0} order(0, 1)"
              .format(dtype, name, ", ".join(args)))
    x, y = torch.rand(3, 8).to(torch_dtype) + 0.5, torch.rand(8).to(torch_dtype) + 0.5
    want = torch_function(name)(*(x, y)[:op.arity])
    assert torch.equal(reference(r, [x, y], [])[0], want)


@pytest.mark.parametrize("line", ["sub(2.0, x)", "maximum(x, 0.25)", "minimum(0.25, x)", "div(x, s)"])
def test_scalars_on_either_side(line):
    r = parse(f"space [*, 8]\nin x: f32[*, 8]\nscalar s\nz: f32 = {line}\nout z: f32 order(0, 1)")
    x = torch.randn(3, 8)
    want = {"sub(2.0, x)": 2.0 - x, "maximum(x, 0.25)": x.clamp(min=0.25),
            "minimum(0.25, x)": x.clamp(max=0.25), "div(x, s)": x / 3.0}[line]
    assert torch.equal(reference(r, [x], [3.0])[0], want)


def test_differentiable():
    r = region("add_norm", 8, "f64")
    inputs = [x.clone().requires_grad_() for x in inputs_for(r, (2, 3))]
    assert torch.autograd.gradcheck(lambda *xs: reference(r, xs, [1e-5]), inputs)


def test_ambient_autocast_does_not_touch_it():
    r = region("layer_norm", 16, "bf16")
    inputs = inputs_for(r, (2, 3))
    want, = reference(r, inputs, [1e-5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, = reference(r, inputs, [1e-5])
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("op, python", [
    ("add", lambda x: 0.1 + x), ("mul", lambda x: 1.702 * x), ("sub", lambda x: 1.702 - x),
    ("div", lambda x: 1.702 / x)], ids=["add", "mul", "sub", "div"])
def test_a_number_on_the_left_is_not_rounded(op, python, dtype):
    """1.702 is 1.703125 in bfloat16: as Python's operators have it, the number stays what it is."""
    number = 0.1 if op == "add" else 1.702
    r = parse(f"space [*, 64]\nin x0: {dtype}[*, 64]\nv0: {dtype} = layer_norm(x0, none, none, 1e-05)\n"
              f"v1: {dtype} = {op}({number}, v0)\nout v1: {dtype} order(0, 1)")
    x = torch.randn(32, 64).to(TORCH_DTYPES[dtype])
    got, = reference(r, [x], [])
    assert torch.equal(got, python(F.layer_norm(x, (64,))))
