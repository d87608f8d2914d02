"""What test_ascend_npu_path.py runs, a check a process: `python npu_checks.py NAME`.

A process of its own, because a device's name stays. Models run on the device "npu" of npu_device.py, fused
by the backend, and are held against eager PyTorch on the CPU.
"""

from __future__ import annotations

import os
import sys
from unittest import mock

import torch

os.environ["ASCEND_LN_FUSE_STRICT"] = "1"
torch.set_num_threads(1)

from npu_device import LAUNCHES, SOC, cpu_view, install  # noqa: E402

install()

from torch import nn  # noqa: E402

from ascend_ln_fuse import inplace_layer_norm_, last_reports  # noqa: E402
from ascend_ln_fuse.kernels import launch, ops, tiling  # noqa: E402
from ascend_ln_fuse.kernels.launch import Runner  # noqa: E402
from ascend_ln_fuse.kernels.offline import offline  # noqa: E402
from ascend_ln_fuse.kernels.region import parse  # noqa: E402
from ascend_ln_fuse.kernels.source import Tile  # noqa: E402

LAYER_NORM = """\
space [*, {D}]
in x: bf16[*, {D}]
in w: bf16[{D}]
in b: bf16[{D}]
scalar eps
v0: bf16 = layer_norm(x, w, b, eps)
out v0: bf16 order(0, 1)"""


class Attention(nn.Module):
    """q and k out of a packed qkv, normalised."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.qkv = nn.Linear(384, 1152)
        self.norm_q, self.norm_k = norm(128), norm(128)

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, 3, 3, 128).unbind(1)
        return self.norm_q(q), self.norm_k(k).relu(), v


class Block(nn.Module):
    """A residual stream with a modulated norm."""

    def __init__(self, dim=256):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(dim, elementwise_affine=False), nn.RMSNorm(dim)

    def forward(self, x, y, scale, shift):
        h = x + y
        return h, self.norm(h) * (1 + scale[:, None]) + shift[:, None], self.out(h.float()).to(x.dtype)


def same(ours, theirs):
    """Results on npu, with the strides of eager's, and within two units in the last place of bf16."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.device == torch.device("npu:0") and a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(cpu_view(a.detach()), b.detach(), rtol=2**-7, atol=2**-8)


def on_npu(*tensors):
    return [t.to("npu") for t in tensors]


def compiled(model):
    return torch.compile(model.to("npu"), backend="ascend_ln_fuse", options={"report": "off"})


def models():
    """Device checks, dispatch and launches of compiled models; one binary for every batch."""
    model, inputs = Attention().bfloat16(), [torch.randn(n, 384).bfloat16() for n in (50, 50, 7)]
    with torch.no_grad():
        theirs = [model(x) for x in inputs]
        fused = compiled(model)
        for x, want in zip(inputs, theirs):
            same(fused(*on_npu(x)), want)
    assert last_reports()[0].fused == 2 and {s.device for s in last_reports()[0].sites} == {"npu:0"}
    name = last_reports()[0].sites[0].kernel_name()
    assert LAUNCHES.names[:2] == [name, name] and name.startswith("aln_layer_norm_")
    x, y, scale, shift = torch.randn(2, 40, 256), torch.randn(2, 40, 256), *torch.randn(2, 2, 256).unbind(0)
    inputs = [t.bfloat16() for t in (x, y, scale, shift)]
    block = Block().bfloat16()
    block.out.float()
    with torch.no_grad():
        want = block(*inputs)
        same(compiled(block)(*on_npu(*inputs)), want)
    assert last_reports()[-1].declined == 0 and len(LAUNCHES.options) >= 2


def arguments():
    """What reaches the driver: tensors, sizes and strides of the offline kernel, eps; a persistent grid."""
    region = parse(LAYER_NORM.format(D=128))
    packed = torch.randn(5000, 9, 128).bfloat16().to("npu")
    w, b = on_npu(*torch.randn(2, 128).bfloat16().unbind(0))
    x = packed[:, 3]
    runner = Runner(region)
    with torch.no_grad():
        (out,) = runner([x, w, b], [1e-5])
    same([out], [torch.nn.functional.layer_norm(x.cpu(), (128,), w.cpu(), b.cpu())])
    want = offline(region, [x.shape, w.shape, b.shape], [x.stride(), w.stride(), b.stride()], SOC)
    ((name, grid, args),) = LAUNCHES.kernels
    assert (name, grid) == (want.kernel.name, want.grid) and grid <= 40
    assert args[0].data_ptr() == x.data_ptr() and args[0].storage_offset() == x.storage_offset()
    assert tuple(args[4:-1]) == want.integers and args[-1] == 1e-5
    assert {5000, 9 * 128} <= set(args[4:-1])
    # Only what Ascend knows, and nothing of CUDA's: Triton's defaults.
    assert LAUNCHES.options == [{"multibuffer": True, "num_warps": 4, "compile_mode": "simd"}]
    # The second launch goes past Triton's dispatch.
    with mock.patch.object(launch, "_jit", side_effect=AssertionError):
        runner([x, w, b], [0.5])
    assert LAUNCHES.kernels[1][2][-1] == 0.5


def overflow():
    """The ladder, with the compiler's own overflows: fewer rows, then the kernel runs and is right."""
    region = parse(LAYER_NORM.format(D=128))
    inputs = [torch.randn(n, 128).bfloat16() if n > 1 else torch.randn(128).bfloat16() for n in (20000, 1, 1)]
    tiles = tuple(Tile(rows, 128) for rows in (1024, 512, 64))
    with mock.patch.object(launch, "ladder", lambda *args: tiles), torch.no_grad():
        runner = Runner(region)
        ours = runner(on_npu(*inputs), [1e-5])
    same(ours, [torch.nn.functional.layer_norm(inputs[0], (128,), *inputs[1:])])
    assert len(LAUNCHES.refused) == 2 and all("ub overflow" in text for text in LAUNCHES.refused)
    assert [o["multibuffer"] for o in LAUNCHES.options] == [True] * 3 and not runner.reasons


def columns():
    """A row that does not fit falls to column pieces."""
    region = parse(LAYER_NORM.format(D=16384))
    inputs = [torch.randn(3, 16384).bfloat16(), *torch.randn(2, 16384).bfloat16().unbind(0)]
    with mock.patch.object(launch, "ladder", lambda *args: (Tile(1, 16384), Tile(1, 2048))), torch.no_grad():
        ours = Runner(region)(on_npu(*inputs), [1e-5])
    same(ours, [torch.nn.functional.layer_norm(inputs[0], (16384,), *inputs[1:])])
    assert len(LAUNCHES.refused) == 1


def last_resort():
    """No tile fits: without double buffering; where that does not help either, the reference runs."""
    region = parse(LAYER_NORM.format(D=128))
    inputs = [torch.randn(3000, 128).bfloat16(), *torch.randn(2, 128).bfloat16().unbind(0)]
    with mock.patch.object(launch, "ladder", lambda *args: (Tile(1024, 128), Tile(512, 128))), \
            torch.no_grad():
        runner = Runner(region)
        ours = runner(on_npu(*inputs), [1e-5])
    same(ours, [torch.nn.functional.layer_norm(inputs[0], (128,), *inputs[1:])])
    assert [o["multibuffer"] for o in LAUNCHES.options] == [True, True, False]
    assert list(runner.reasons) == [f"no tile fits the Unified Buffer of {SOC}"] and not LAUNCHES.kernels
    LAUNCHES.options.clear()
    # The planner itself gives nothing that fits no memory.
    huge = mock.patch.object(tiling, "UB_SHARE", 0.001)
    tiling._largest.cache_clear()
    with huge, torch.no_grad():
        runner = Runner(parse(LAYER_NORM.format(D=4096)))
        wide = [torch.randn(3, 4096).bfloat16(), *torch.randn(2, 4096).bfloat16().unbind(0)]
        same(runner(on_npu(*wide), [1e-5]), [torch.nn.functional.layer_norm(wide[0], (4096,), *wide[1:])])
    assert "no tile of 4096 columns fits" in list(runner.reasons)[0] and not LAUNCHES.options


def around():
    """Training, in-place, float64, empty inputs, views that no kernel walks."""
    model, x = Attention().bfloat16(), torch.randn(20, 384).bfloat16()
    want = model(x)
    sum(t.float().sum() for t in want).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    ours = compiled(model)(*on_npu(x))
    same(ours, want)
    sum(t.float().sum() for t in ours).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(cpu_view(p.grad), grads[n], rtol=2**-5, atol=2**-4)
    launched = len(LAUNCHES.kernels)

    packed = torch.randn(30, 9, 128).bfloat16()
    moved, (w, b) = packed.to("npu"), torch.randn(2, 128).bfloat16().unbind(0)
    with torch.no_grad():
        inplace_layer_norm_(moved[:, :3], w.to("npu"), b.to("npu"), eps=1e-5)
    packed[:, :3] = torch.nn.functional.layer_norm(packed[:, :3], (128,), w, b)
    same([moved], [packed])
    assert len(LAUNCHES.kernels) == launched + 1

    norm, x = nn.LayerNorm(16), torch.randn(4, 16)
    with torch.no_grad():
        want = norm.double()(x.double())
        same([compiled(norm)(x.double().to("npu"))], [want])
        assert compiled(norm.float())(torch.empty(0, 16).to("npu")).shape == (0, 16)
    assert len(LAUNCHES.kernels) == launched + 1, "neither fp64 nor an empty tensor has a kernel"
    text = parse(LAYER_NORM.format(D=64))
    view, vectors = torch.randn(4, 128).bfloat16(), [torch.ones(64).bfloat16(), torch.zeros(64).bfloat16()]
    (out,) = ops.runner(text.text)([view.to("npu")[:, ::2], *on_npu(*vectors)], [1e-5])
    same([out], [torch.nn.functional.layer_norm(view[:, ::2], (64,), *vectors)])
    assert list(ops.runner(text.text).reasons) == ["lane stride of x is 2, not 1"]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done")
