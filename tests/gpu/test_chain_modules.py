"""Chain modules on a GPU: numbers, folding, compiling ahead, kernel_info."""

import copy

import pytest
import torch
from checks import assert_within_bound

from ascend_ln_fuse import FusionChain, LayerNormLinear, ShapeRange, kernel_info
from ascend_ln_fuse.kernels import folding, launch

DEVICE = torch.device("cuda", 0)


def block(mode, dtype=torch.bfloat16, size=256, **kwargs):
    chain = FusionChain().add_layer_norm(size).add_matmul(4 * size).add_activation("gelu").add_matmul(size)
    made = chain.add_residual().build(mode, dtype=dtype, device=DEVICE, **kwargs)
    with torch.no_grad():
        made.norm1.weight.uniform_(0.5, 2.0)
        made.norm1.bias.normal_()
    return made


@pytest.mark.parametrize("offset", [0, 1, 10, 100, 1000])
@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_error_is_within_the_bound(mode, dtype, rows, offset):
    module = block(mode, dtype)
    x = (torch.randn(rows, 256, device=DEVICE) + offset).to(dtype)
    with torch.no_grad():
        ours = module(x)
        assert module.last_call.way == "chain" and module.last_call.folded == (mode == "inference")
        exact = copy.deepcopy(module).double()._one_by_one(x.double())
        assert_within_bound(ours, module._one_by_one(x), exact)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_training(checkpoint):
    module, x = block("training", checkpoint=checkpoint), torch.randn(64, 256, device=DEVICE).bfloat16()
    grads = [torch.autograd.grad(f(x).float().square().mean(), list(module.parameters()))
             for f in (module, module._one_by_one)]
    for ours, eager in zip(*grads, strict=True):
        assert (ours.float() - eager.float()).norm() <= 0.02 * eager.float().norm()


def test_weights_that_change_between_calls_and_streams():
    module, x = block("inference", torch.float32), torch.randn(8, 256, device=DEVICE)
    with torch.no_grad():
        for _ in range(3):
            module.norm1.weight.uniform_(0.5, 2.0)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                y = module(x)
                torch.testing.assert_close(y, module._one_by_one(x), rtol=1e-3, atol=1e-3)
            assert module.last_call.folded


def test_a_captured_graph_sees_edits():
    module, x = block("inference"), torch.randn(8, 256, device=DEVICE).bfloat16()
    with torch.no_grad():
        module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        assert module.last_call.reason == folding.CAPTURING
        module.norm1.weight.mul_(2)
        graph.replay()
        assert (y - module._one_by_one(x)).abs().max() <= 0.05 * y.abs().max()


def test_prepared_kernels_serve_the_whole_range(monkeypatch):
    module, made = block("auto", size=192), []
    generate = launch.generate
    monkeypatch.setattr(launch, "generate", lambda *args: made.append(generate(*args)) or made[-1])
    module.prepare(ShapeRange(batch=[1, 8], seq_len=[1, 500]))
    before = {kernel.source for kernel in made}
    assert before
    with torch.no_grad():
        for rows in (1, 2, 3, 17, 100, 255, 257, 1000, 1999, 3333, 4000):
            module(torch.randn(rows, 192, device=DEVICE).bfloat16())
    assert {kernel.source for kernel in made} == before


def test_kernel_info_has_the_shared_memory_of_the_device():
    module = LayerNormLinear(256, 512, activation="silu", dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        info = kernel_info(module, torch.randn(4096, 256, device=DEVICE).bfloat16())
    assert [k.kind for k in info.kernels] == ["generated", "library", "generated"]
    assert info.kernels[0].target.startswith("sm_") and info.kernels[0].on_chip_bytes is not None
    assert info.kernels[0].on_chip_limit > 48 * 1024


def test_the_tile_hint_is_honoured():
    module = LayerNormLinear(1024, 4096, tile_size=64, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        info = kernel_info(module, torch.randn(8, 1024, device=DEVICE).bfloat16())
    for kernel in info.kernels:
        assert kernel.kind == "library" or "x 64 x" in kernel.block or "fused_linear" not in kernel.name
    with pytest.raises(ValueError, match="tile_size=64.*f32"):
        module.float()(torch.randn(8, 1024, device=DEVICE))
