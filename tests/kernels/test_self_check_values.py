"""What the self-check makes of values that hide a wrong kernel: zeros, constant rows.

What the guard does then is in tests/faults.
"""

import pytest
import torch
from norm_cases import inputs_for, reference, region, scalars_for

from ascend_ln_fuse.kernels import launch, self_check
from ascend_ln_fuse.kernels.launch import Runner
from ascend_ln_fuse.kernels.reference import program
from ascend_ln_fuse.kernels.region import parse
from ascend_ln_fuse.kernels.self_check import compare

LOW = ["bf16", "f16"]


def ones(x):
    return torch.ones_like(x)


def zeros(x):
    return torch.zeros_like(x)


def constant_rows(x):
    return x[..., :1].expand_as(x).clone()


def to_an_ulp(x):
    steps = torch.arange(x.shape[-1]).remainder(3) * torch.finfo(x.dtype).eps
    return (constant_rows(x).double() * (1 + steps)).to(x.dtype)


def half_constant(x):
    y = x.clone()
    y[:, ::2] = constant_rows(x)[:, ::2]
    return y


def one_constant_row(x):
    y = x.clone()
    y[0, 0] = constant_rows(x)[0, 0]
    return y


HIDING = [ones, zeros, constant_rows]
MIXED = [half_constant, one_constant_row]


def case(name, dtype, values, outer=(4, 16), lane=64, seed=0):
    r = region(name, lane, dtype)
    inputs = inputs_for(r, outer, strided=False, seed=seed)
    inputs = [values(x) if operand.dims == r.full else x for operand, x in zip(r.inputs, inputs)]
    return r, inputs, scalars_for(r)


def off(r, inputs, scalars):
    """The results of a kernel whose norms are off by an eighth."""
    return program(self_check._off(r))(*inputs, *scalars)


@pytest.mark.parametrize("name", ["layer_norm", "add_norm", "sandwich"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("values", HIDING, ids=lambda f: f.__name__)
def test_values_that_hide_a_wrong_kernel_tell_nothing(name, dtype, values):
    r, inputs, scalars = case(name, dtype, values)
    for outputs in (reference(r, inputs, scalars), off(r, inputs, scalars)):
        found = compare(r, inputs, scalars, outputs)
        assert found.within and not found.tells


@pytest.mark.parametrize("name", ["layer_norm", "add_norm", "rms_norm", "modulate", "qk", "sandwich"])
@pytest.mark.parametrize("dtype", [*LOW, "f32", "f64"])
def test_random_values_tell(name, dtype):
    r, inputs, scalars = case(name, dtype, torch.Tensor.clone)
    found = compare(r, inputs, scalars, reference(r, inputs, scalars))
    assert found.within and found.tells
    assert not compare(r, inputs, scalars, off(r, inputs, scalars)).within


@pytest.mark.parametrize("name", ["add_norm", "sandwich"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("values", MIXED, ids=lambda f: f.__name__)
def test_rows_that_tell_nothing_do_not_excuse_the_others(name, dtype, values):
    r, inputs, scalars = case(name, dtype, values)
    found = compare(r, inputs, scalars, reference(r, inputs, scalars))
    assert found.within and found.tells and found.rows == 64
    assert not compare(r, inputs, scalars, off(r, inputs, scalars)).within


@pytest.mark.parametrize("parameter", ["w", "b"])
def test_parameters_of_zeros(parameter):
    """A weight of zeros hides the norm, whatever is added behind it; a bias of zeros hides nothing."""
    r, (x, w, b), scalars = case("layer_norm", "bf16", torch.Tensor.clone)
    inputs = [x, zeros(w), b] if parameter == "w" else [x, w, zeros(b)]
    assert compare(r, inputs, scalars, reference(r, inputs, scalars)).tells is (parameter == "b")


def test_every_output_behind_a_norm_has_to_tell():
    r, (q, k, *weights), scalars = case("qk", "bf16", torch.Tensor.clone)
    for inputs in ([zeros(q), k, *weights], [q, zeros(k), *weights]):
        assert not compare(r, inputs, scalars, reference(r, inputs, scalars)).tells


def test_without_a_norm_all_values_tell():
    r = parse("space [*, 8]\nin x: f32[*, 8]\ny: f32 = mul(x, 2.0)\nout y: f32 order(0, 1)")
    x = torch.zeros(3, 8)
    assert compare(r, [x], [], [x * 2]).tells


@pytest.mark.parametrize("values", [*HIDING, to_an_ulp, *MIXED], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["layer_norm", "add_norm", "modulate", "sandwich"])
@pytest.mark.parametrize("dtype", [*LOW, "f32"])
def test_right_kernels_are_within(values, name, dtype):
    pytest.importorskip("triton")
    for outer, lane in (((1, 3), 8), ((4, 16), 64)):
        run = Runner(region(name, lane, dtype), launch.target_for(torch.device("cpu")), self_check="off")
        for seed in range(3):
            r, inputs, scalars = case(name, dtype, values, outer, lane, seed)
            assert compare(r, inputs, scalars, run(inputs, scalars)).within, (outer, seed)
