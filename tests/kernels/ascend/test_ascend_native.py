"""Native runs of the Linalg form."""

import pytest
import torch
from ascend_kernels import (
    DTYPES,
    LayerNormCase,
    assert_one_ulp,
    layer_norm_pointers,
    make,
    signature,
)

from ascend_ln_fuse.kernels.ascend import native, tools
from ascend_ln_fuse.kernels.ascend.toolchain import lower


@pytest.fixture(scope="module", autouse=True)
def llvm():
    try:
        for tool in ("mlir-translate", "opt", "llc", "gcc"):
            tools.find_llvm_tool(tool)
    except tools.MissingTool as error:
        pytest.skip(str(error))


def build_layer_norm(dtype):
    return native.build(
        lower(
            make("layer_norm", BS=64, LANES=128),
            signature("layer_norm", **layer_norm_pointers(dtype)),
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_layer_norm(dtype):
    kernel = build_layer_norm(dtype)
    for S, H, index, programs in [(300, 3, 0, 4), (1, 1, 2, 1), (65, 2, 1, 7)]:
        case = LayerNormCase(dtype, S, H, index=index)
        packed = case.packed.clone()
        kernel(case.args, (programs,))
        assert_one_ulp(case.out, case.reference)
        assert torch.equal(case.packed, packed)


def test_every_program_of_a_grid_runs():
    x = torch.randn(1500, generator=torch.Generator().manual_seed(0))
    out = torch.full_like(x, float("nan"))
    fn = make("activation", BS=256, EXPRESSION="x * tl.sigmoid(x)")
    native.build(lower(fn, signature("activation", x_ptr="*fp32", o_ptr="*fp32")))([x, out, 1500], (6,))
    assert_one_ulp(out, torch.nn.functional.silu(x.double()))


def test_bad_calls_are_refused():
    kernel = build_layer_norm("fp32")
    with pytest.raises(TypeError, match="takes 11 arguments, got 1"):
        kernel([1], (1,))
    with pytest.raises(ValueError, match="grid"):
        kernel(LayerNormCase("fp32").args, (0,))


def test_missing_llvm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tools.shutil, "which", lambda name: None)
    tools.find_llvm_tool.cache_clear()
    try:
        with pytest.raises(tools.MissingTool, match="apt-get install mlir-19-tools llvm-19"):
            tools.find_llvm_tool("llc")
    finally:
        tools.find_llvm_tool.cache_clear()
