"""Chains in front of another compiler, and mode="reduce-overhead"."""

import warnings

import pytest
import torch
from checks import assert_within_bound
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import backend, last_reports

OFF = {"report": "off"}
CHAIN, REGION = torch.ops.ascend_ln_fuse.chain.default, torch.ops.ascend_ln_fuse.region.default


class Ffn(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def targets(monkeypatch) -> list:
    """The ops of the graphs that an inner compiler gets, in order."""
    found = []

    def compiler(gm, inputs):
        found.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return aot(gm, inputs)

    aot = backend.inner_compiler("aot_eager")
    monkeypatch.setattr(backend, "inner_compiler", lambda name: compiler)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inner", ["aot_eager", "cudagraphs", "npugraphs"])
def test_a_chain_is_one_op(inner, dynamic, monkeypatch):
    found, model = targets(monkeypatch), Ffn()
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=dynamic,
                             options={**OFF, "inner": inner})
    with torch.no_grad():
        for rows in (2, 3):
            x = torch.randn(rows, 5, 16)
            assert_within_bound(compiled(x), model(x), model.double()(x.double()))
            model.float()
    assert CHAIN in found and F.linear not in found
    assert last_reports()[-1].sites[0].chain == "linear -> gelu -> linear -> add"


def test_no_chain_where_gradients_are_recorded(monkeypatch):
    found, model = targets(monkeypatch), Ffn()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={**OFF, "inner": "aot_eager"})
    x = torch.randn(2, 5, 16)
    ours = torch.autograd.grad(compiled(x).sum(), model.norm.weight)
    eager = torch.autograd.grad(model(x).sum(), model.norm.weight)
    torch.testing.assert_close(ours, eager)
    assert REGION in found and CHAIN not in found


def test_inductor_keeps_its_products(monkeypatch):
    found, model = targets(monkeypatch), Ffn()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={**OFF, "inner": "inductor"})
    with torch.no_grad():
        compiled(torch.randn(2, 5, 16))
    assert REGION in found and CHAIN not in found


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_an_op_is_one_line_of_a_printed_graph(inner, monkeypatch):
    """Inductor writes the calls into the comments of its Triton kernels: a second line would be code."""
    graphs = []
    monkeypatch.setattr(backend, "inner_compiler", lambda name: lambda gm, _: graphs.append(gm.graph) or gm)
    with torch.no_grad():
        torch.compile(Ffn(), backend="ascend_ln_fuse", options={**OFF, "inner": inner})(torch.randn(2, 5, 16))
    ops = [node for node in graphs[0].nodes if node.target in (CHAIN, REGION)]
    assert ops and not any("\n" in node.format_node() for node in ops)


def test_no_guard_is_added():
    """As many graphs as the inner compiler alone has."""
    aot, compiled_alone = backend.inner_compiler("aot_eager"), []

    def alone(gm, inputs):
        compiled_alone.append(aot(gm, inputs))  # not where it has Dynamo trace anew
        return compiled_alone[-1]

    with torch.no_grad():
        for given in ({"backend": alone},
                      {"backend": "ascend_ln_fuse", "options": {**OFF, "inner": "aot_eager"}}):
            torch._dynamo.reset()
            compiled = torch.compile(Ffn(), dynamic=True, **given)
            for rows in (2, 3, 7, 64):
                compiled(torch.randn(rows, rows + 1, 16))
    assert len(last_reports()) == len(compiled_alone)


def test_reduce_overhead_on_a_cpu_is_eager():
    model, x = Ffn(), torch.randn(2, 5, 16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        compiled = torch.compile(model, backend="ascend_ln_fuse", mode="reduce-overhead")
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("device, compiler", [("cuda", "cudagraphs"), ("npu", "npugraphs"), ("cpu", "eager")])
def test_reduce_overhead_replays_graphs(device, compiler, monkeypatch):
    names = []
    monkeypatch.setattr(backend, "device_type", lambda inputs: device)
    monkeypatch.setattr(backend, "inner_compiler", lambda name: names.append(name))
    torch.compile(Ffn(), backend="ascend_ln_fuse", mode="reduce-overhead")(torch.randn(2, 5, 16))
    assert names == [compiler]


def test_the_device_type_is_the_accelerators():
    assert backend.device_type([torch.ones(1), 3, torch.ones(1, device="meta")]) == "meta"
    assert backend.device_type([torch.ones(1)]) == backend.device_type([]) == "cpu"
