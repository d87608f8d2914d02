"""The short forms of activations, through Triton's interpreter, on every value there is."""

import pytest
import torch
from half_precision_cases import assert_every_value_right, every_value, region

from ascend_ln_fuse.kernels.codegen import generate
from ascend_ln_fuse.kernels.half_precision import FORMS
from ascend_ln_fuse.kernels.launch import launch_facts
from ascend_ln_fuse.kernels.layout import layout
from ascend_ln_fuse.kernels.source import load
from ascend_ln_fuse.kernels.targets import cuda, npu
from ascend_ln_fuse.kernels.tiling import ladder

CUDA = cuda.describe("sm_90", 4)


def made(op, dtype, target):
    r, x = region(op, dtype), every_value("f16")
    walk = layout(r, [x.shape], [x.stride()], target.units)
    tile = ladder(r, walk.structure, walk.sizes, target)[0]
    return generate(r, walk.structure, tile, target), walk


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("op", sorted(FORMS))
def test_every_value(op, dtype):
    pytest.importorskip("triton")
    from ascend_ln_fuse.kernels.targets import interpreter

    target = CUDA.interpreted()
    kernel, walk = made(op, dtype, target)
    x = every_value(dtype)
    out = torch.empty_like(x)
    integers, grid = launch_facts(walk, kernel.tile.rows, target)
    interpreter.run(load(kernel), grid, [x, out, *integers])
    assert_every_value_right(op, x, out)


@pytest.mark.parametrize("op", sorted(FORMS))
def test_only_where_rounding_hides_it(op):
    """Full precision, and other targets, keep the table's form."""
    short = "Q_y" if op == "gelu" else "ex2"
    for dtype in ("bf16", "f16"):
        assert short in made(op, dtype, CUDA)[0].source
        assert short not in made(op, dtype, npu.describe("Ascend910B3"))[0].source
    assert short not in made(op, "f32", CUDA)[0].source
