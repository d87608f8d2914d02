"""Chains on an NVIDIA GPU: the way is measured once, the numbers hold, memory is what was promised."""

import pytest
import torch
from checks import check
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.kernels import chain_choice, chain_ops
from ascend_ln_fuse.kernels.chain_choice import ACTIVATED, LIBRARY, ONE_KERNEL, Choice, Way, agree
from ascend_ln_fuse.kernels.chain_ways import ChainRunner
from ascend_ln_fuse.kernels.fused_linear_plan import Plan

pytestmark = pytest.mark.real_gpu

C = 512


@pytest.fixture(autouse=True)
def own_store(monkeypatch, tmp_path):
    from ascend_ln_fuse.kernels.store import Store

    monkeypatch.setenv("ASCEND_LN_FUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(chain_choice, "_store", Store("chains"))


class Ffn(nn.Module):
    def __init__(self, act=F.gelu, gated=False, residual=True):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.up = nn.Linear(C, 4 * C) if gated else None
        self.act, self.residual = act, residual

    def forward(self, x):
        h = self.norm(x)
        z = self.act(self.fc1(h))
        y = self.fc2(z if self.up is None else z * self.up(h))
        return x + y if self.residual else y


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.q, self.k, self.v = nn.Linear(C, C), nn.Linear(C, C // 2), nn.Linear(C, C // 2)

    def forward(self, x, y):
        x = x + y
        h = self.norm(x)
        return x, self.q(h), self.k(h), self.v(h)


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0, 1000.0])
@pytest.mark.parametrize("tokens", [1, 5, 16, 100, 256, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("make", [Ffn, lambda: Ffn(F.silu, gated=True), lambda: Ffn(F.relu, residual=False)],
                         ids=["gelu", "gated", "relu"])
def test_numbers(make, dtype, tokens, mean, device):
    model = make().to(device, dtype)
    check(model, (torch.randn(1, tokens, C, device=device) + mean).to(dtype), fused=1)
    ways = last_reports()[-1].sites[0].chain_ways()
    alone = model.act is F.relu  # which the library applies in the product, for any number of rows
    assert len(ways) == (2 if tokens <= 256 else 1 if alone else 0)
    assert all(("us" in way) for way in ways), ways


def test_add_norm_and_projections_of_unequal_width(device):
    inputs = [torch.randn(2, 9, C, device=device).bfloat16() for _ in range(2)]
    check(Attention().to(device).bfloat16(), *inputs, fused=1)


def test_every_tile_of_the_tuning_set_is_right(device):
    """A tile that gives other results than the library is dropped, with a note: there must be none."""
    for tokens in (1, 16, 128):
        torch._dynamo.reset()  # which would take the code of an equal module
        check(Ffn().to(device).bfloat16(), torch.randn(1, tokens, C, device=device).bfloat16(), fused=1)
        for choice in last_reports()[-1].sites[0].chain_runner.choices.values():
            assert "other results" not in choice.reason, choice.reason


def test_first_call_inside_a_capture_measures_nothing_and_the_next_does(device):
    model = Ffn().to(device).bfloat16().eval()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"}, dynamic=False)
    x = torch.randn(1, 16, C, device=device).bfloat16()
    with torch.no_grad():
        compiled(torch.randn(1, 300, C, device=device).bfloat16())  # compiles, and loads what many rows need
        wanted = model(x)
        runner = last_reports()[-1].sites[0].chain_runner
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = runner([x, *[p.detach() for p in runner_inputs(runner, model)]], (1e-5,))[0]
        graph.replay()
        torch.cuda.synchronize()
        assert not runner.choices
        torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
        compiled(x)
        assert runner.choices or last_reports()[-1].sites[0].chain_runner.choices


def runner_inputs(runner, model):
    """The model's parameters in the order of the chain's inputs, behind x."""
    by_shape = {tuple(p.shape): p for p in model.parameters()}
    order = [model.norm.weight, model.norm.bias, model.fc1.weight, model.fc1.bias, model.fc2.weight,
             model.fc2.bias]
    assert len(by_shape) and len(runner.chain.inputs) == len(order) + 1
    return order


# The activation in the product


def take(monkeypatch, decide):
    """Every chain decides so from here on."""
    chain_ops.chain_runner.cache_clear()
    torch._dynamo.reset()
    original = ChainRunner.__init__
    monkeypatch.setattr(ChainRunner, "__init__", lambda self, chain, self_check="first_call":
                        original(self, chain, self_check, decide))


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("tokens", [1, 5, 300, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("act", [F.relu, gelu_tanh], ids=["relu", "gelu_tanh"])
def test_the_activation_in_the_product(act, dtype, tokens, mean, device, monkeypatch):
    """Within the bound wherever the check lets it through; in bf16 and fp16 it must."""
    found = []

    def decide(question):
        if question.by_activated is None:
            return Choice(LIBRARY)
        results = question.by_activated()
        found.append(agree(results, question.by_library()) and question.within_bound(results))
        return Choice(ACTIVATED if found[-1] else LIBRARY)

    take(monkeypatch, decide)
    model = Ffn(act).to(device, dtype)
    check(model, (torch.randn(1, tokens, C, device=device) + mean).to(dtype), fused=1)
    assert len(found) == 1 and (found[0] or dtype == torch.float32)


@pytest.mark.parametrize("tokens", [16, 300, 4096])
@pytest.mark.parametrize("act", [F.relu, gelu_tanh], ids=["relu", "gelu_tanh"])
def test_it_is_measured_for_any_number_of_rows(act, tokens, device):
    model = Ffn(act).to(device).bfloat16()
    check(model, torch.randn(1, tokens, C, device=device).bfloat16(), fused=1)
    ways = last_reports()[-1].sites[0].chain_ways()
    assert f"{ACTIVATED} " in ways[0] and "other results" not in ways[0], ways


@pytest.mark.parametrize("tokens", [16, 4096])
def test_it_can_be_captured(tokens, device, monkeypatch):
    take(monkeypatch, lambda question: Choice(LIBRARY if question.by_activated is None else ACTIVATED))
    model = Ffn(gelu_tanh).to(device).bfloat16().eval()
    captured_is_right(model, torch.randn(1, tokens, C, device=device).bfloat16())


def captured_is_right(model, x) -> None:
    """Replayed with other inputs, the fused model gives what it gives when called."""
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"}, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            torch.testing.assert_close(result, model(x), rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)


# Two answers


@pytest.mark.parametrize("kernel_in", ["graph", "plain"])
def test_a_capture_takes_its_own_way(kernel_in, device, monkeypatch):
    launched, original = [], Plan.__call__

    def launch(self, *args):
        launched.append(torch.cuda.is_current_stream_capturing())
        return original(self, *args)

    def decide(question):
        kernel = Way(ONE_KERNEL, question.configs()[0])
        if kernel_in == "graph":
            return Choice(LIBRARY, in_graph=kernel)
        return Choice(*kernel, in_graph=Way(LIBRARY))

    take(monkeypatch, decide)
    monkeypatch.setattr(Plan, "__call__", launch)
    captured_is_right(Ffn().to(device).bfloat16().eval(), torch.randn(1, 16, C, device=device).bfloat16())
    assert launched.count(True) == (2 if kernel_in == "graph" else 0)
    assert launched.count(False) >= 2  # in a plain call, or rehearsed by one
    if kernel_in == "graph":
        assert launched.count(False) <= 4  # checked once, and not called again


def test_both_answers_are_measured(device):
    """What the report shows: host times beside those of the device, of all that could matter."""
    check(Ffn().to(device).bfloat16(), torch.randn(1, 16, C, device=device).bfloat16(), fused=1)
    for choice in last_reports()[-1].sites[0].chain_runner.choices.values():
        assert LIBRARY in choice.host_times and all(0 < us < 1e4 for us in choice.host_times.values())
        assert set(choice.host_times) <= set(choice.times) and choice.plain.name in choice.times
        assert choice.captured.name in choice.times


def test_a_choice_is_read_by_another_runner(device):
    x = torch.randn(1, 16, C, device=device).bfloat16()
    check(Ffn().to(device).bfloat16(), x, fused=1)
    first = last_reports()[-1].sites[0].chain_ways()
    from ascend_ln_fuse.kernels.chain_ops import chain_runner

    chain_runner.cache_clear()
    torch._dynamo.reset()
    check(Ffn().to(device).bfloat16(), x, fused=1)
    assert last_reports()[-1].sites[0].chain_ways() == first


@pytest.mark.parametrize("tokens", [64, 2048])
def test_gradients(tokens, device):
    torch.manual_seed(0)
    model = Ffn().to(device)
    x = torch.randn(1, tokens, C, device=device)
    found = []
    for run in (model, torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        run(leaf).square().sum().backward()
        found.append([leaf.grad, *[p.grad.clone() for p in model.parameters()]])
    for ours, eager in zip(found[1], found[0]):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3 * eager.abs().max().item())


def test_peak_memory_is_below_eager(device):
    model = Ffn().to(device).bfloat16().requires_grad_(False)
    eager, ours = peaks(model, torch.randn(1, 8192, C, device=device).bfloat16())
    assert ours <= 0.86 * eager, (ours, eager)


def peaks(model, x):
    """Bytes that a warm call takes at most, eager and compiled."""
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    found = []
    with torch.no_grad():
        for run in (model, compiled):
            run(x)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(x)
            found.append(torch.cuda.max_memory_allocated() - before)
    return found


class Single(nn.Module):
    """FLUX's single block: one product reads attention and the feed-forward layer, which read one norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.mlp = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, 4 * C)
        self.out = nn.Linear(5 * C, C)

    def forward(self, x):
        h = self.norm(x)
        mlp = F.gelu(self.mlp(h), approximate="tanh")
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        attention = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([attention, mlp], 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_a_result_in_its_place_of_a_later_cat(dtype, device):
    model = Single().to(device, dtype).requires_grad_(False)
    x = torch.randn(2, 2048, C, device=device).to(dtype)
    check(model, x, fused=1)
    site, = last_reports()[-1].sites
    assert site.chain == "linear -> gelu_tanh -> linear" and "torch.cat" in site.note
    assert not site.fallback_words()
    eager, ours = peaks(model, x)
    assert ours <= eager, (ours, eager)
