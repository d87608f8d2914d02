"""Traps that no other file has a test for; tests/traps.py lists all of them, with their tests."""

import copy

import pytest
import torch
from checks import assert_within_bound
from torch import nn
from torch.nn import functional as F
from traps import TRAPS, missing

from ascend_ln_fuse import auto_fusion, last_reports


def compiled(f, **options):
    return torch.compile(f, backend="ascend_ln_fuse", options={"report": "off", **options})


@pytest.fixture(params=["plain", "kernel"])
def path(request, monkeypatch):
    """The fused op as plain torch, and as the generated kernel in Triton's interpreter."""
    if request.param == "kernel":
        pytest.importorskip("triton")
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1" if request.param == "kernel" else "0")
    return request.param


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.text[:40])
def test_every_trap_has_tests_that_exist(trap):
    assert trap.tests and not missing(trap)


def test_no_trap_is_listed_twice():
    assert len({trap.text for trap in TRAPS}) == len(TRAPS)
    assert {trap.section for trap in TRAPS} == {"Graph", "Numbers", "Machinery"}


# Graph


def test_distributed_tensors():
    """A DTensor is a wrapper subclass: it passes through, and plain tensors beside it are fused."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def f(x, y):
        return F.layer_norm(x, (16,)) * 2, F.layer_norm(y, (16,)) * 2

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        x, y = torch.randn(4, 16), torch.randn(4, 16)
        spread = DTensor.from_local(x, DeviceMesh("cpu", [0]), [Replicate()])
        ours, beside = compiled(f)(spread, y)
        assert isinstance(ours, DTensor)
        assert torch.equal(ours.to_local(), f(x, y)[0])
        assert torch.equal(beside, f(x, y)[1])
        assert last_reports()[-1].fused == 1
    finally:
        dist.destroy_process_group()


def test_quantised_tensors():
    def f(q, y):
        return F.layer_norm(q.dequantize() + y, (16,)), q

    q, y = torch.quantize_per_tensor(torch.randn(4, 16), 0.1, 0, torch.qint8), torch.randn(4, 16)
    (ours, same), (eager, _) = compiled(f)(q, y), f(q, y)
    torch.testing.assert_close(ours, eager)
    assert same.is_quantized and torch.equal(same.int_repr(), q.int_repr())


def test_an_input_that_the_norm_is_copied_into():
    def f(x, h):
        s = x + h
        x.copy_(F.layer_norm(s, (16,)))
        return F.layer_norm(x + s, (16,))

    x, h = torch.randn(4, 16), torch.randn(4, 16)
    given = x.clone(), x.clone()
    torch.testing.assert_close(compiled(f)(given[0], h), f(given[1], h))
    torch.testing.assert_close(*given)
    assert not torch.equal(given[0], x)


# Numbers


@pytest.mark.parametrize("ratio", [1000.0, 3000.0])
def test_moments_far_from_zero(ratio, path):
    """E[x^2] - E[x]^2 in fp32 is off by 14% or NaN here; the fused norm takes the squares of what is left."""
    def f(x):
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - mean.pow(2) + 1e-6)

    x = torch.randn(16, 256) + ratio
    ours, exact = compiled(f)(x), f(x.double())
    assert last_reports()[-1].fused == 1
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("call", [
    lambda x: F.layer_norm(x, (16,), eps=-0.5), lambda x: F.rms_norm(x, (16,), eps=-0.5),
    lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 0.5)], ids=["layer", "rms", "handwritten"])
def test_negative_eps(call, path):
    """NaN where the variance is less than it, as in eager."""
    x = torch.randn(8, 16) * torch.linspace(0.1, 2, 8)[:, None]
    ours, eager = compiled(call)(x), call(x)
    assert 0 < eager.isnan().sum() < eager.numel()
    assert_within_bound(ours, eager, call(x.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rms_norm_without_eps_takes_that_of_the_type_it_computes_in(dtype):
    """Rows so small that eps decides."""
    x = (torch.randn(4, 16) * 1e-4).to(dtype)
    ours, eager = compiled(lambda x: F.rms_norm(x, (16,)) * 2)(x), F.rms_norm(x, (16,)) * 2
    assert last_reports()[-1].fused == 1
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + eps) * 2
    assert_within_bound(ours, eager, exact)


# Machinery


def test_hooks_registered_after_compiling_do_what_they_do_without_us():
    """Dynamo may ignore them; whatever it does, this backend does the same."""
    results = []
    for backend in ("eager", "ascend_ln_fuse"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).eval()
        run = torch.compile(model, backend=backend)
        x = torch.ones(2, 16)
        first = run(x)
        model[1].register_forward_hook(lambda module, args, out: out * 3)
        results.append((first, run(x)))
    for eager, ours in zip(*results):
        torch.testing.assert_close(ours, eager)


def test_the_keys_of_a_state_dict_stay():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    keys = list(model.state_dict())
    assert list(auto_fusion(model, report="off").state_dict()) == keys
    assert list(copy.deepcopy(model).state_dict()) == keys


def test_a_graph_for_another_compiler_holds_nothing_of_this_process():
    """Such graphs are cached on disk: an index into a table of ours would mean something else later."""
    from torch.fx import GraphModule

    graphs: list[GraphModule] = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.register_backend(keep, name="keep_graph_of_traps")
    call = compiled(lambda x, h: F.silu(F.layer_norm(x + h, (16,))), inner="keep_graph_of_traps")
    call(torch.randn(4, 16), torch.randn(4, 16))
    op, = (n for n in graphs[0].graph.nodes if n.target == torch.ops.ascend_ln_fuse.region.default)
    text, inputs, scalars = op.args
    assert isinstance(text, str) and "layer_norm" in text
    assert all(isinstance(node, torch.fx.Node) for node in inputs)
    assert all(isinstance(number, float) for number in scalars)


def test_ops_are_defined_without_the_slow_wrapper():
    """A torch.library.custom_op costs 49 us a call, define and impl 8."""
    from torch._library.custom_ops import OPDEFS

    import ascend_ln_fuse.kernels.ops  # noqa: F401

    assert torch.ops.ascend_ln_fuse.region.default is not None
    assert not [name for name in OPDEFS if name.startswith("ascend_ln_fuse::")]
