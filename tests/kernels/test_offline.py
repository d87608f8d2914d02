"""Generated kernels through the official Ascend compilers, without an NPU: every kernel shape compiles
with double buffering, is clean of the known miscompilations, and its final module computes right."""

import pytest
import torch
from norm_cases import TEXTS, assert_right, inputs_for, region, scalars_for

from ascend_ln_fuse.kernels.offline import offline
from ascend_ln_fuse.kernels.source import Tile

pytest.importorskip("triton.backends.ascend", reason="needs triton-ascend")
pytest.importorskip("ascendnpuir", reason="needs ascendnpu-ir")
from ascend_ln_fuse.kernels.ascend.interpreter import interpret  # noqa: E402
from ascend_ln_fuse.kernels.ascend.lint import lint  # noqa: E402
from ascend_ln_fuse.kernels.ascend.toolchain import compile_planned, lower  # noqa: E402
from ascend_ln_fuse.kernels.ascend.tools import Outcome  # noqa: E402

DTYPES = ["bf16", "f16", "f32"]
#: D, rows, columns of a tile: many rows; one row; column passes without and with a ragged end.
SHAPES = {"many rows": (128, 16, 128), "odd D": (17, 8, 17), "one row": (3072, 1, 3072),
          "columns": (1024, 2, 512), "ragged columns": (1000, 2, 384)}


def compiled(kernel):
    planned = compile_planned(lower(kernel.function(), kernel.signature))
    assert planned.outcome is Outcome.PASSED, planned.message
    assert planned.double_buffered
    assert planned.peak_bytes["ub"] <= 192 * 1024
    return planned


def check(r, inputs, tile=None):
    """Tensors end where their storage ends, so that a read or write past a view is an error."""
    kernel = offline(r, [x.shape for x in inputs], [x.stride() for x in inputs], tile=tile, cores=3)
    planned = compiled(kernel)
    assert lint(planned) == []
    arguments, outputs = kernel.arguments(inputs, scalars_for(r))
    interpret(planned, None, arguments, (kernel.grid,))
    assert_right(r, inputs, scalars_for(r), outputs)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["layer_norm", "llama", "sandwich"])
def test_kernel_shapes(name, dtype, shape):
    lane, rows, cols = SHAPES[shape]
    r = region(name, lane, dtype)
    check(r, inputs_for(r, (2, 5) if lane > 200 else (2, 21), ratio=2.0), Tile(rows, cols))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"layer_norm", "llama", "sandwich"}))
def test_regions(name, dtype):
    r = region(name, 96, dtype)
    check(r, inputs_for(r, (2, 21)), Tile(8, 96))


def test_mean_1000():
    r = region("layer_norm", 96, "f32")
    check(r, inputs_for(r, (2, 9), ratio=1000.0), Tile(4, 96))


@pytest.mark.parametrize("shape, strides", [
    ((5, 3, 128), (1152, 128, 1)),            # q of a packed qkv, article
    ((3, 21, 128), (128, 1152, 1)),           # B H L D
    ((1, 1, 128), (128, 128, 1)),
])
def test_views(shape, strides):
    r = region("layer_norm", 128, "bf16")
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    x = torch.randn(size).bfloat16().as_strided(shape, strides)
    check(r, [x, *torch.randn(2, 128).bfloat16().unbind(0)])


@pytest.mark.parametrize("lane", [3, 64, 128, 513, 1024, 3072, 4096, 8192, 12288, 30000])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["layer_norm", "add_norm", "modulate"])
def test_chosen_tiles_keep_double_buffering(name, dtype, lane):
    r = region(name, lane, dtype)
    inputs = [torch.empty(1, dtype=x.dtype).expand([4000 if n == 7 else n for n in x.shape])
              for x in inputs_for(r, (3, 7), strided=False)]
    shapes = [x.shape for x in inputs]
    compiled(offline(r, shapes, [torch.empty(s, device="meta").stride() for s in shapes]))
