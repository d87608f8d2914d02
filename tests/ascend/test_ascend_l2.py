"""l2 norms as Ascend's compilers make them, run by the interpreter; and mistakes in them that are found."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.backends.ascend", reason="needs triton-ascend")
pytest.importorskip("ascendnpuir", reason="needs ascendnpu-ir")
from grid import SOC, compiled, shape_of  # noqa: E402
from norm_cases import region  # noqa: E402

from ascend_ln_fuse.kernels.ascend.evidence import compile_kernel  # noqa: E402
from ascend_ln_fuse.kernels.ascend.lint import errors, lint  # noqa: E402
from ascend_ln_fuse.kernels.ascend.verify import verify  # noqa: E402
from ascend_ln_fuse.kernels.call import Call  # noqa: E402

#: D -> how a kernel walks its rows
LANES = {80: "rows", 128: "rows", 513: "rows", 8192: "row", 12288: "columns"}


def kernel_of(name, dtype, lane):
    """The first kernel that a launch over [4, 4096, D] takes."""
    r = region(name, lane, dtype)
    shapes = [(4, 4096, lane) if len(x.dims) == 3 else (lane,) for x in r.inputs]
    strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
    return next(Call(r, tuple(shapes), tuple(strides), torch.device("cpu"), SOC).candidates(SOC))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name, eps", [("normalize", 1e-12), ("normalize", 0.5), ("l2_norm", 1e-6),
                                       ("wan", 1e-12)])
def test_proven(name, eps, dtype, lane, kernel_cache):
    kernel = kernel_of(name, dtype, lane)
    assert name == "wan" or shape_of(kernel) == LANES[lane]
    planned = compiled(kernel, kernel_cache)
    assert planned.ok, planned.message
    assert not errors(lint(planned))
    found = verify(kernel, planned, scalars=(eps,))
    assert found.right, found.problem


#: `max(length, eps)`, of the length
BOUND = r"tl\.maximum\((.*), (EPS_v0|eps), (propagate_nan=.*?ALL)\)"

#: op -> name -> (pattern, replacement) in a kernel's source
MISTAKES = {
    "normalize": {"eps added": (BOUND, r"(\1 + eps)"),
                  "no eps": (BOUND, r"(\1)"),
                  "eps ten times too large": (BOUND, r"tl.maximum(\1, 10.0 * \2, \3)"),
                  "eps ten times too small": (BOUND, r"tl.maximum(\1, 0.1 * \2, \3)"),
                  "NaN lost": (BOUND, r"tl.maximum(\1, \2)"),
                  "no root": (r"tl\.sqrt\((.*?)\)", r"(\1)"),
                  "the mean": (r"tl\.sqrt\((.*?)\)", r"tl.sqrt(\1 * 0.0078125)"),
                  "a weight left out": (r" \* w\b", "")},
    "l2_norm": {"eps ten times too large": (r"\+ eps", "+ 10.0 * eps"), "no eps": (r" \+ eps", ""),
                "the mean": (r"SQUARES_v0 \+", "SQUARES_v0 * 0.0078125 +"),
                "a weight left out": (r" \* w\b", "")},
}


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("op, name", [(op, name) for op, found in MISTAKES.items() for name in found])
def test_mistakes_are_found(op, name, dtype):
    kernel = kernel_of(op, dtype, 128)
    source, old = kernel.kernel.source, kernel.kernel.name
    source, count = re.subn(*MISTAKES[op][name], source)
    assert count, source
    wrong = replace(kernel, kernel=replace(kernel.kernel, name=f"{old}_wrong",
                                           source=source.replace(old, f"{old}_wrong")))
    planned = compile_kernel(wrong, SOC)
    assert planned.ok, planned.message
    found = verify(wrong, planned, scalars=(1e-3,))
    assert not found.right and found.problem
