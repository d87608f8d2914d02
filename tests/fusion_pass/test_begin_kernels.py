"""The pass begins to compile the kernels that the graph's first call waits for."""

import pytest
import torch
from small_models import Attention, Block
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import backend as backends
from ascend_ln_fuse import last_reports
from ascend_ln_fuse.backend import Options, fuse
from ascend_ln_fuse.kernels import compiling, fused_linear_plan, launch, settings
from ascend_ln_fuse.kernels.chain_ops import chain_runner
from ascend_ln_fuse.kernels.ops import runner
from ascend_ln_fuse.loading import Example
from ascend_ln_fuse.patterns import cat_places, cats
from ascend_ln_fuse.trace import trace

OFF = {"report": "off"}


@pytest.fixture
def asked(monkeypatch):
    """(keys of work ahead, keys of what calls waited for); runners that have seen nothing."""
    pytest.importorskip("triton")
    monkeypatch.setenv(settings.INTERPRET, "1")
    begun, waited = [], []
    for module in (launch, fused_linear_plan):
        monkeypatch.setattr(module, "ahead", lambda key, work: begun.append(key))
        monkeypatch.setattr(module, "within_limit", lambda key, work: (waited.append(key), work())[1])
    runner.cache_clear()
    chain_runner.cache_clear()
    yield begun, waited
    runner.cache_clear()
    chain_runner.cache_clear()


class Odd(nn.Module):
    """Norms of views that begin at odd addresses, and of an input that is one."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(n) for n in (7, 24))

    def forward(self, x):
        y = (x + 1)[:, :, 3:10]
        return self.norms[0](y), self.norms[1](F.silu(x)), x


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x):
        shift, scale, gate = x.mean(1).repeat(1, 3).chunk(3, -1)
        h = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x + gate[:, None] * self.down(F.gelu(self.up(h), approximate="tanh"))


class Joined(nn.Module):
    """Norms whose results a cat joins."""

    def __init__(self):
        super().__init__()
        self.norm_q, self.norm_c = nn.LayerNorm(16), nn.RMSNorm(16)

    def forward(self, x):
        q, c = x.unflatten(-1, (2, 2, 16)).unbind(2)
        return torch.cat([self.norm_c(c[:, :3]), self.norm_q(q)], 1)


class Placed(nn.Module):
    """One of two products on a norm, whose gelu a cat takes; its place begins at an odd address."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.side = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(24, 5)

    def forward(self, x):
        h = self.norm(x)
        return torch.cat([torch.sin(self.side(h)), F.gelu(self.up(h))], 2)


CASES = {"attention": (Attention, (2, 6, 64)), "block": (Block, (2, 6, 64)), "odd": (Odd, (2, 6, 24)),
         "modulated": (Modulated, (2, 6, 24)), "joined": (Joined, (2, 6, 64)),
         "placed": (Placed, (2, 6, 24))}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_calls_wait_for_what_the_pass_has_begun(name, grad, dynamic, asked, monkeypatch):
    begun, waited = asked
    for module, limit, value in ((cats, "LEAST_BYTES", 1), (cat_places, "LEAST_RUN", 1),
                                 (cat_places, "FEW_ROWS", 0)):
        monkeypatch.setattr(module, limit, value)
    make, shape = CASES[name]
    model = make().bfloat16()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options=OFF, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        compiled(torch.randn(shape).bfloat16())
    assert waited and set(waited) == set(begun)
    if not grad and (name == "joined" and not dynamic or name == "placed"):
        assert all("torch.cat" in site.note for site in last_reports()[-1].sites)


def test_a_graph_that_is_compiled_again_begins_nothing(asked):
    begun, _ = asked
    model, x = Block().bfloat16(), torch.randn(2, 6, 64).bfloat16()
    for again in (False, True):
        torch._dynamo.reset()
        begun.clear()
        with torch.no_grad():
            torch.compile(model, backend="ascend_ln_fuse", options=OFF)(x)
        assert bool(begun) is not again


def test_plain_pytorch_begins_nothing(asked, monkeypatch):
    monkeypatch.delenv(settings.INTERPRET)
    torch.compile(Block(), backend="ascend_ln_fuse", options=OFF)(torch.randn(2, 6, 64))
    assert asked == ([], []) and last_reports()[-1].fused


def test_to_explain_begins_nothing(asked):
    reports = trace(Example(Block(), (torch.randn(2, 6, 64),), {}))
    assert reports[0].fused and not asked[0]


@pytest.mark.parametrize("strict", [False, True])
def test_a_failure_costs_time_alone(strict, monkeypatch):
    """But in strict mode it is raised, as all are."""
    monkeypatch.setenv(settings.STRICT, str(int(strict)))
    monkeypatch.setattr(backends, "begin_kernels", lambda *args: 1 / 0)
    compiled = torch.compile(Block(), backend="ascend_ln_fuse", options=OFF)
    if strict:
        with pytest.raises(Exception, match="division by zero"):
            compiled(torch.randn(2, 6, 64))
        return
    compiled(torch.randn(2, 6, 64))
    assert last_reports()[-1].fused and not last_reports()[-1].error


def test_no_tensor_is_kept_alive(monkeypatch):
    """Neither by work that waits nor by results that nobody asks for."""
    import gc
    import weakref

    pytest.importorskip("triton")
    monkeypatch.setenv(settings.INTERPRET, "1")
    monkeypatch.setattr(compiling, "_jobs", {})
    runner.cache_clear()
    monkeypatch.setattr(compiling, "_hire", lambda: None)
    model, fused = Block().bfloat16(), []

    def begin(gm, inputs):
        fused.append(fuse(gm.graph, Options(), begin=True).graph is not None)
        return gm.forward

    torch.compile(model, backend=begin)(torch.randn(2, 6, 64).bfloat16())
    assert compiling._jobs and fused == [True]
    weights = [weakref.ref(p) for p in model.parameters()]
    del model
    torch._dynamo.reset()
    gc.collect()
    assert compiling._jobs and not any(w() is not None for w in weights)
    compiling._waiting.clear()
