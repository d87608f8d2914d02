"""kernel_info: what is listed, counted and said to be unknown."""

import copy
import json
import sys

import pytest
import torch
from torch import nn

from ascend_ln_fuse import FusionChain, LayerNormLinear, LayerNormLinearFusion, auto_fusion, kernel_info
from ascend_ln_fuse.kernels.ascend import evidence, tools


class Block(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.fc1, self.fc2 = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


@pytest.fixture
def no_compiler(monkeypatch):
    def missing(*args):
        raise tools.MissingTool("bishengir-compile not found")

    monkeypatch.setattr(evidence, "check_calls", missing)


def module(**kwargs) -> LayerNormLinear:
    return LayerNormLinear(64, 128, activation="gelu", dtype=torch.bfloat16, **kwargs)


def test_a_chain_module(no_compiler):
    with torch.no_grad():
        info = kernel_info(module(), torch.randn(4, 8, 64, dtype=torch.bfloat16))
    norm, product, gelu = info.kernels
    assert (info.count, info.generated) == (3, 2)
    assert [k.kind for k in info.kernels] == ["generated", "library", "generated"]
    assert "layer_norm(x0, x1, x2, eps0)" in norm.region and norm.name.startswith("aln_layer_norm_")
    assert norm.target == "Ascend910B3" and "rows x 64 columns" in norm.block
    # 32 rows of bf16; the norm reads its two vectors, the product its weight and bias.
    assert (norm.bytes_in, norm.bytes_out) == (32 * 64 * 2 + 2 * 64 * 2, 32 * 64 * 2)
    assert (product.bytes_in, product.bytes_out) == (32 * 64 * 2 + 128 * 64 * 2 + 128 * 2, 32 * 128 * 2)
    assert (gelu.bytes_in, gelu.bytes_out) == (32 * 128 * 2, 32 * 128 * 2)
    assert product.name == product.block == "" and product.on_chip_bytes is None


def test_folding_shows(no_compiler):
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        folded, plain = kernel_info(module(mode="inference"), x), kernel_info(module(), x)
    assert folded.note == "folded" and "not folded: AUTO folds only where" in plain.note
    assert "layer_norm(x0, none, none, eps0)" in folded.kernels[0].region
    assert folded.kernels[0].bytes_in == plain.kernels[0].bytes_in - 2 * 64 * 2


def test_what_the_backend_leaves_out_is_left_out(no_compiler):
    """A cat of a tensor's own pieces: behind it, the add would not join the norm."""
    block = Block()

    def call(x, h):
        x = x + h
        return block(torch.cat([x[:3], x[3:]]))

    with torch.no_grad():
        info = kernel_info(call, (torch.randn(8, 32), torch.randn(8, 32)))
    assert "add(" in info.kernels[0].region.split("layer_norm")[0]


def test_memory_is_unknown_without_a_compiler(no_compiler):
    info = kernel_info(module())
    assert info.kernels[0].on_chip_bytes is None and info.kernels[0].on_chip_share is None
    assert "bishengir-compile not found" in info.kernels[0].note
    assert "unknown" in str(info) and "%" not in str(info)


def test_memory_is_what_the_official_compiler_says():
    try:
        tools.require_triton_ascend()
        tools.find_tool("bishengir-compile")
    except tools.MissingTool as why:
        pytest.skip(str(why))
    info = kernel_info(module(), torch.randn(512, 64, dtype=torch.bfloat16), soc="A2")
    norm = info.kernels[0]
    found, = evidence.check_calls([_call(norm, 512)], "Ascend910B3")
    assert norm.on_chip_bytes == found.ub_bytes > 0 and norm.on_chip_limit == 192 * 1024
    assert 0 < norm.on_chip_share <= 1 and f"{norm.on_chip_share:.0%}" in str(info)


def _call(entry, rows):
    from ascend_ln_fuse.kernels.call import Call
    from ascend_ln_fuse.kernels.region import parse

    region = parse(entry.region)
    return Call(region, ((rows, 64), (64,), (64,)), ((64, 1), (1,), (1,)), torch.device("cpu"), "Ascend910B3")


def test_a_model(no_compiler):
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(32))
    with torch.no_grad():
        info = kernel_info(model, torch.randn(2, 5, 32))
    kinds = [(k.kind, k.launches) for k in info.kernels]
    # Both blocks: norm, product, gelu, product, and the residual with the norm behind it.
    assert kinds.count(("library", 2)) == 2
    assert info.count - info.generated == 4
    assert sum(k.launches for k in info.kernels if "layer_norm" in k.region) == 3
    assert "other operations are not listed" in info.note
    assert not hasattr(model, "_orig_mod") and model._compiled_call_impl is None


@pytest.mark.parametrize("compiled", [
    lambda m: torch.compile(m, backend="eager"), lambda m: auto_fusion(m, report="off")])
def test_a_model_that_is_compiled_already(no_compiler, compiled):
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        wanted = kernel_info(Block(), x)
        model = compiled(Block())
        model(x)
        assert kernel_info(model, x) == wanted


class Patches(nn.Module):
    """Of features that lie across memory, a norm, and another behind a residual sum."""

    def __init__(self, size=64):
        super().__init__()
        self.patches = nn.Conv2d(3, size, 4, 4)
        self.norm, self.last = nn.LayerNorm(size), nn.LayerNorm(size)
        self.up = nn.Linear(size, size)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.last(x + self.up(self.norm(x)))


class Rotated(nn.Module):
    """A norm, and a rotary embedding below a linear layer, declined on Ascend."""

    def __init__(self, size=32):
        super().__init__()
        self.norm, self.q = nn.LayerNorm(size), nn.Linear(size, size)

    def forward(self, x, cos, sin):
        q = self.q(self.norm(x))
        first, second = q.chunk(2, -1)
        return q * cos + torch.cat((-second, first), -1) * sin


class Channels(nn.Module):
    """A norm over the channels of contiguous NCHW: fused on a CPU, declined on Ascend."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        return (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("model, inputs", [
    (Patches(), (torch.randn(2, 3, 32, 32),)), (Rotated(), [torch.randn(2, 8, 32) for _ in range(3)]),
    (Channels(), (torch.randn(2, 16, 8, 8),)), (Block(), (torch.randn(2, 5, 32),)),
    (Block().double(), (torch.randn(2, 5, 32).double(),))])
@pytest.mark.parametrize("grad", [False, True])
def test_a_models_kernels_are_those_of_explain(no_compiler, model, inputs, grad):
    """On a CPU: what is fused there may be declined on Ascend, and the other way round."""
    from ascend_ln_fuse.loading import Example
    from ascend_ln_fuse.trace import trace

    with torch.set_grad_enabled(grad):
        info = kernel_info(model, tuple(inputs))
    assert info.plain == 0 and {k.target for k in info.kernels} <= {"Ascend910B3"}
    report, = trace(Example(copy.deepcopy(model), tuple(inputs), {}), grad=grad)
    fused = [site for site in report.entries if site.status == "fused"]
    wanted = sorted(call.kernel().name for site in fused for call in (site.call, *site.calls_behind))
    assert sorted(k.name for k in info.kernels if k.kind == "generated" for _ in range(k.launches)) == wanted


def test_sites_without_a_kernel_are_counted(no_compiler, monkeypatch):
    from ascend_ln_fuse.kernels.call import Call
    from ascend_ln_fuse.kernels.layout import Unsupported

    def none(self):
        raise Unsupported("no tile holds it")

    monkeypatch.setattr(Call, "first_kernel", none)
    info = kernel_info(nn.Sequential(nn.LayerNorm(32), nn.Sigmoid(), nn.LayerNorm(32)), torch.randn(4, 32))
    assert (info.count, info.plain) == (0, 2) == (0, info.to_dict()["plain"])
    assert "0 of the library; 2 more as plain PyTorch" in str(info)
    assert "plain PyTorch runs: no tile holds it" in info.kernels[0].note


def unpack(x):
    batch, length, size = x.shape
    return torch.nn.functional.layer_norm(x, (size,))


@pytest.mark.parametrize("model, inputs, words", [
    (unpack, torch.randn(2, 8), r"not enough values to unpack.*\(test_kernel_info\.py:\d+\)"),
    (Block(), torch.randn(2, 8), r"\(test_kernel_info\.py:\d+\)"),
    (Block(), {"y": torch.randn(2, 32)}, "unexpected keyword argument 'y'"),
    (Block(), (), "missing 1 required positional argument"),
    (Block(), "words", "must be Tensor, not str")])
def test_a_model_that_does_not_run_on_the_inputs(no_compiler, model, inputs, words):
    with pytest.raises(ValueError, match=f"the model does not run on example_inputs: .*{words}"):
        kernel_info(model, inputs)


def test_a_failure_of_the_pass_is_not_laid_at_the_models_door(no_compiler, monkeypatch):
    def fails(*args):
        raise RuntimeError("the pass is at fault")

    monkeypatch.setattr(sys.modules[kernel_info.__module__], "fuse_graph", fails)
    with pytest.raises(Exception, match="the pass is at fault") as caught:
        kernel_info(Block(), torch.randn(2, 32))
    assert "example_inputs" not in str(caught.value)


def test_any_number_of_models(no_compiler):
    """Dynamo compiles one code object eight times at most."""
    for size in range(8, 104, 8):
        assert kernel_info(nn.Sequential(nn.LayerNorm(size)), torch.randn(2, size)).count == 1


def test_a_function_and_keyword_arguments(no_compiler):
    def f(x, weight):
        return torch.nn.functional.layer_norm(x, (16,), weight)

    info = kernel_info(f, {"x": torch.randn(3, 16), "weight": torch.randn(16)})
    assert info.count == info.generated == 1
    op = LayerNormLinearFusion()
    args = torch.randn(3, 16), torch.ones(16), torch.zeros(16), torch.randn(8, 16)
    assert [k.kind for k in kernel_info(op, args).kernels] == ["generated", "library"]


def test_layers_one_by_one_have_no_kernel_of_ours(no_compiler):
    made = module()
    made.linear.register_forward_hook(lambda *args: None)
    info = kernel_info(made)
    assert info.count == 0 and "linear has hooks" in info.note


def test_the_one_kernel_way(no_compiler, monkeypatch):
    from ascend_ln_fuse import chain_run
    from ascend_ln_fuse.kernels.chain_choice import ONE_KERNEL, Choice
    from ascend_ln_fuse.kernels.chain_ways import ChainRunner
    from ascend_ln_fuse.kernels.fused_linear import GemmTile

    chain_run.callable_of.cache_clear()
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    tile = GemmTile(16, 64, 64)
    monkeypatch.setattr(chain_run, "runner_with", lambda chain, *args: ChainRunner(
        chain, decide=lambda question: Choice(ONE_KERNEL, tile)))
    with torch.no_grad():
        info = kernel_info(module(), torch.randn(8, 64, dtype=torch.bfloat16))
    chain_run.callable_of.cache_clear()
    entry, = info.kernels
    assert (info.count, info.generated) == (1, 1) and entry.block == str(tile)
    for word in ("layer_norm", "linear(", "gelu"):
        assert word in entry.region
    assert entry.bytes_out == 8 * 128 * 2
    assert entry.bytes_in == 8 * 64 * 2 + 2 * 64 * 2 + 128 * 64 * 2 + 128 * 2


def test_the_activation_in_the_product(no_compiler, monkeypatch):
    """One kernel of the library less: what was two is one, which writes the activation's result."""
    from ascend_ln_fuse import chain_run
    from ascend_ln_fuse.kernels import chain_ways
    from ascend_ln_fuse.kernels.chain_choice import ACTIVATED, LIBRARY, Choice
    from ascend_ln_fuse.kernels.chain_ways import ChainRunner

    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    monkeypatch.setattr(chain_ways, "serves", lambda device: True)
    infos = []
    for way in (LIBRARY, ACTIVATED):
        chain_run.callable_of.cache_clear()
        monkeypatch.setattr(chain_run, "runner_with", lambda chain, *args, way=way: ChainRunner(
            chain, decide=lambda question: Choice(way)))
        with torch.no_grad():
            layer = LayerNormLinear(64, 128, activation="relu", dtype=torch.bfloat16)
            infos.append(kernel_info(layer, torch.randn(8, 64, dtype=torch.bfloat16)))
    chain_run.callable_of.cache_clear()
    apart, inside = infos
    assert [k.kind for k in apart.kernels] == ["generated", "library", "generated"]
    assert [k.kind for k in inside.kernels] == ["generated", "library"]
    product, entry = apart.kernels[1], inside.kernels[1]
    assert "linear(" in entry.region and "relu" in entry.region and "activation inside" in entry.note
    assert (entry.bytes_in, entry.bytes_out) == (product.bytes_in, 8 * 128 * 2)


def test_table_and_json(no_compiler):
    info = kernel_info(FusionChain().add_layer_norm(64).add_matmul(64).add_activation("mish").build())
    text = str(info)
    assert max(map(len, text.split("\n"))) <= 80
    assert text.startswith("3 kernels a call: 2 generated, 1 of the library")
    for word in ("launches", "block", "on chip", "in / out", "mish(x0)", "Ascend910B3", "torch's product"):
        assert word in text
    data = json.loads(info.to_json())
    assert data["count"] == 3 and data["generated"] == 2
    assert set(data["kernels"][0]) == {
        "name", "kind", "region", "target", "block", "on_chip_bytes", "on_chip_limit", "on_chip_share",
        "bytes_in", "bytes_out", "launches", "note"}


@pytest.mark.parametrize("args, kwargs, error, words", [
    ((3,), {}, TypeError, "op_or_model"), ((nn.LayerNorm(8),), {}, TypeError, "example_inputs"),
    ((module(),), {"soc": "Ascend310"}, ValueError, "unknown SoC")])
def test_bad_arguments(args, kwargs, error, words):
    with pytest.raises(error, match=words):
        kernel_info(*args, **kwargs)
