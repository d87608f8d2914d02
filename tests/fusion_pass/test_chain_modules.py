"""LayerNormLinear, LayerNormLinearFusion and FusionChain: what they compute, hold, and refuse."""

import copy
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from checks import assert_within_bound
from torch import nn

from ascend_ln_fuse import (
    FusionChain,
    FusionMode,
    LayerNormLinear,
    LayerNormLinearFusion,
    ShapeRange,
    last_reports,
)
from ascend_ln_fuse.chain_modules import FusedChain
from ascend_ln_fuse.chain_run import callable_of
from ascend_ln_fuse.chain_steps import ACTIVATIONS
from ascend_ln_fuse.kernels import chain_ops
from ascend_ln_fuse.kernels.chain_choice import ONE_KERNEL, Choice
from ascend_ln_fuse.kernels.chain_fused import FusedSegment
from ascend_ln_fuse.kernels.chain_ways import ChainRunner

MODES = [mode.value for mode in FusionMode]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _fresh_callables():
    """Runners remember whether kernels run through the interpreter."""
    callable_of.cache_clear()
    yield
    callable_of.cache_clear()


def block(mode="auto", dtype=torch.float32, **kwargs) -> FusedChain:
    chain = FusionChain().add_layer_norm(32).add_matmul(64).add_activation("gelu").add_matmul(32)
    made = chain.add_residual().build(mode, dtype=dtype, **kwargs)
    with torch.no_grad():
        made.norm1.weight.uniform_(0.5, 2.0)
        made.norm1.bias.normal_()
    return made


@torch.no_grad()
def within_bound(module: FusedChain, x: torch.Tensor) -> None:
    ours = module(x)
    assert module.last_call.way == "chain"
    if x.dtype == torch.float64:  # nothing is there to tell eager's error by
        torch.testing.assert_close(ours, module._one_by_one(x), rtol=1e-12, atol=1e-12)
        return
    wide = copy.deepcopy(module).double()
    assert_within_bound(ours, module._one_by_one(x), wide._one_by_one(x.double()))


# -- what is computed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
def test_every_activation(activation, mode):
    within_bound(LayerNormLinear(32, 48, activation=activation, mode=mode, dtype=torch.bfloat16),
                 torch.randn(2, 5, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_every_dtype_and_norm(norm, dtype):
    within_bound(LayerNormLinear(32, 48, norm=norm, mode="inference", dtype=dtype),
                 torch.randn(7, 32, dtype=dtype))


@pytest.mark.parametrize("shape", [(32,), (1, 32), (0, 32), (3, 0, 32), (2, 3, 4, 5, 32)])
@pytest.mark.parametrize("mode", MODES)
def test_every_rank_and_empty_batches(mode, shape):
    module = block(mode)
    with torch.no_grad():
        y = module(torch.randn(shape))
    assert y.shape == shape and y.is_contiguous()
    within_bound(module, torch.randn(shape))


@pytest.mark.parametrize("view", [
    lambda x: x[:, ::2], lambda x: x.transpose(0, 1), lambda x: x.permute(2, 1, 0)[..., :32],
    lambda x: x[:1, :1].expand(4, 6, 32)], ids=["steps", "transposed", "lane", "expanded"])
def test_strided_inputs(view):
    within_bound(block(), view(torch.randn(32, 6, 32)))


@pytest.mark.parametrize("kwargs", [{"bias": False}, {"elementwise_affine": False}, {"eps": 0.1},
                                    {"norm": "rms_norm", "eps": None}, {"norm": "rms_norm", "bias": False}])
@pytest.mark.parametrize("mode", MODES)
def test_layers_without_parameters_and_eps(mode, kwargs):
    within_bound(LayerNormLinear(32, 16, mode=mode, **kwargs), torch.randn(4, 32) * 0.1)


def test_eps_is_read_at_the_call():
    module, x = LayerNormLinear(32, 16), torch.randn(4, 32) * 0.01
    before = module(x)
    module.norm.eps = 1.0
    assert not torch.allclose(module(x), before)
    within_bound(module, x)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_layers(mode, checkpoint):
    module = block(mode, torch.float64, checkpoint=checkpoint)
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    grads = [torch.autograd.grad(f(x).square().sum(), [x, *module.parameters()])
             for f in (module, module._one_by_one)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(module, (x,))


def test_some_parameters_frozen():
    module, x = block(), torch.randn(3, 32)
    module.norm1.requires_grad_(False)
    module(x).sum().backward()
    assert module.norm1.weight.grad is None and module.linear1.weight.grad is not None


def test_checkpoint_keeps_only_inputs_and_parameters():
    kept = {}
    for checkpoint in (False, True):
        module = block("training", checkpoint=checkpoint)
        x = torch.randn(100, 32, requires_grad=True)
        own = {t.untyped_storage()._cdata for t in (x, *module.parameters())}
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t, own=own, sizes=sizes: (sizes.append(t.numel()) if
                                                 t.untyped_storage()._cdata not in own else None, t)[1],
                lambda t: t):
            y = module(x)
        kept[checkpoint] = sum(sizes)
        y.sum().backward()
    assert kept[True] == 0 < kept[False]


def test_the_result_may_be_written_in_place():
    module = block()
    module(torch.randn(2, 3, 32)).add_(1).sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", MODES)
def test_without_gradients(context, mode):
    module, x = block(mode), torch.randn(4, 32)
    wanted = module._one_by_one(x).detach()
    with context():
        y = module(x)
    assert not y.requires_grad and y.is_inference() == (context is torch.inference_mode)
    torch.testing.assert_close(y.clone(), wanted)


# -- through Triton's interpreter


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("ASCEND_LN_FUSE_INTERPRET", "1")
    chain_ops.chain_runner.cache_clear()
    yield
    chain_ops.chain_runner.cache_clear()


@pytest.mark.parametrize("mode", MODES)
def test_generated_kernels(interpreted, mode):
    module = block(mode, torch.bfloat16)
    within_bound(module, torch.randn(9, 32, dtype=torch.bfloat16))
    y = module(torch.randn(9, 32, dtype=torch.bfloat16))
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("folded", [False, True])
def test_one_kernel_per_segment(interpreted, monkeypatch, folded):
    """Every segment as one kernel, with and without the norm's parameters."""
    asked = []

    def decide(question):
        config = question.configs()[0]
        asked.append(config)
        return Choice(ONE_KERNEL, config)

    monkeypatch.setattr(FusedSegment, "about", lambda self, values, rows, device: (
        "sizes", None, lambda: self.run.configs(rows, 64, 32, torch.device("cpu")), tuple))
    monkeypatch.setattr("ascend_ln_fuse.chain_run.runner_with",
                        lambda chain, *args: ChainRunner(chain, decide=decide))
    module = block("inference" if folded else "training", torch.bfloat16)
    within_bound(module, torch.randn(9, 32, dtype=torch.bfloat16))
    assert module.last_call.folded == folded and len(asked) == 2


# -- a module like any other


def test_parameters_and_names():
    module = LayerNormLinear(8, 4, activation="relu", dtype=torch.float16)
    assert list(module.state_dict()) == ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float16 for p in module.parameters())
    assert list(block().state_dict()) == ["norm1.weight", "norm1.bias", "linear1.weight", "linear1.bias",
                                          "linear2.weight", "linear2.bias"]
    assert "norm1 -> linear1 -> gelu -> linear2 -> + input, mode=auto" in repr(block())


def test_initial_values_are_torchs_own():
    torch.manual_seed(3)
    ours = LayerNormLinear(8, 4)
    torch.manual_seed(3)
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 4)
    assert torch.equal(ours.linear.weight, linear.weight) and torch.equal(ours.norm.weight, norm.weight)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
                         ids=["deepcopy", "pickle"])
def test_copies(copied):
    module, x = block("inference"), torch.randn(3, 32)
    with torch.no_grad():
        wanted = module(x)
        twin = copied(module)
        assert twin.last_call is None and twin.mode is FusionMode.INFERENCE
        assert torch.equal(twin(x), wanted)
        twin.linear1.weight = nn.Parameter(torch.zeros_like(twin.linear1.weight))
        assert not torch.equal(twin(x), wanted)
        assert torch.equal(module(x), wanted)


def test_state_dict_round_trip():
    module, other, x = block("inference"), block("inference"), torch.randn(3, 32)
    with torch.no_grad():
        other(x)
        other.load_state_dict(module.state_dict())
        assert torch.equal(other(x), module(x))


def test_half_to_and_back_between_calls():
    module, x = block("inference"), torch.randn(3, 32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32):
        module.to(dtype)
        within_bound(module, x.to(dtype))
        with pytest.raises(TypeError, match="norm weight.*x is"):
            module(x.to(torch.float16 if dtype != torch.float16 else torch.float32))


def test_functional_call_and_transforms():
    module, x = block("inference"), torch.randn(5, 32)
    other = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    with torch.no_grad():
        module(x)
        swapped = torch.func.functional_call(module, other, x)
        wanted = block()
        wanted.load_state_dict(other)
        torch.testing.assert_close(swapped, wanted._one_by_one(x), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(torch.vmap(module)(x), module._one_by_one(x))
        assert "transform" in module.last_call.reason
    jac = torch.func.jacrev(module)(x[0])
    torch.testing.assert_close(jac, torch.func.jacfwd(module)(x[0]))


def test_autocast_does_as_the_layers():
    module, x = block(), torch.randn(3, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, wanted = module(x), module._one_by_one(x)
    assert y.dtype == wanted.dtype and torch.equal(y, wanted)
    assert module.last_call.reason == "autocast chooses the dtypes"


def test_fake_tensors_and_meta():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert block()(torch.randn(3, 32)).shape == (3, 32)
    assert block(device="meta")(torch.randn(3, 32, device="meta")).device.type == "meta"


def test_hooks_on_the_module_itself_run():
    module, seen = block(), []
    module.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    module(torch.randn(3, 32))
    assert seen == [(3, 32)] and module.last_call.way == "chain"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["ascend_ln_fuse", "eager", "aot_eager"])
def test_inside_torch_compile_the_layers_are_traced(backend, dynamic):
    module = block("inference")
    options = {"options": {"report": "off"}} if backend == "ascend_ln_fuse" else {}
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic, **options)
    with torch.no_grad():
        for rows in (3, 5):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(compiled(x), module._one_by_one(x))
    assert module.last_call is None
    if backend == "ascend_ln_fuse":
        assert last_reports()[-1].sites[0].chain == "linear -> gelu -> linear -> add"


def test_torch_export_and_jit_trace():
    module, x = block(), torch.randn(3, 32)
    traced = torch.jit.trace(module, x)
    torch.testing.assert_close(traced(x[:2]), module._one_by_one(x[:2]))
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module._one_by_one(x))


def test_threads():
    module, x = block("inference"), torch.randn(64, 32)
    wanted, failures = module._one_by_one(x).detach(), []

    def work():
        with torch.no_grad():
            for _ in range(20):
                module.linear1.weight.add_(0)  # the same values, another version
                if not torch.allclose(module(x), wanted, rtol=1e-4, atol=1e-4):
                    failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- existing models


def test_from_modules_shares():
    norm, linear, x = nn.LayerNorm(8), nn.Linear(8, 4), torch.randn(3, 8)
    module = LayerNormLinear.from_modules(norm, linear, nn.GELU(approximate="tanh"))
    assert module.norm.weight is norm.weight and module.linear.weight is linear.weight
    with torch.no_grad():
        linear.weight.mul_(2)
        wanted = nn.functional.gelu(linear(norm(x)), approximate="tanh")
        torch.testing.assert_close(module(x), wanted)


def test_chain_from_modules_shares_and_load_from_copies():
    layers = [nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)]
    x = torch.randn(3, 8)
    shared = FusionChain.from_modules(*layers).build("inference")
    assert shared.linear2.weight is layers[3].weight
    own = FusionChain().add_layer_norm(8).add_matmul(16).add_activation("silu").add_matmul(8).build()
    for given in (layers, [layers[0], layers[1], layers[3]]):
        own.load_from(*given)
        assert own.linear2.weight is not layers[3].weight
        assert torch.equal(own.linear2.weight, layers[3].weight)
    with torch.no_grad():
        wanted = nn.Sequential(*layers)(x)
        torch.testing.assert_close(shared(x), wanted)
        torch.testing.assert_close(own(x), wanted)


def test_building_twice_gives_separate_parameters_but_shared_ones():
    linear = nn.Linear(8, 8)
    chain = FusionChain().add_layer_norm(8).add_matmul(module=linear)
    one, two = chain.build(), chain.build("inference")
    assert one.norm1.weight is not two.norm1.weight and one.linear1 is two.linear1 is linear


def test_residual_of_the_norm():
    chain = FusionChain().add_rms_norm(8).add_activation("silu").add_matmul(8).add_residual("norm")
    module, x = chain.add_layer_norm(8).add_matmul(3).build(), torch.randn(4, 8)
    within_bound(module, x)
    n = module.norm1(x)
    wanted = module.linear2(module.norm2(module.linear1(nn.functional.silu(n)) + n))
    torch.testing.assert_close(module(x), wanted)


def test_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "chains.md").read_text(encoding="utf-8")
    scope = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for code in blocks:
        exec(code, scope)
    printed = capsys.readouterr().out
    assert len(blocks) >= 8 and "chain, folded\n" in printed and "nothing to prepare" in printed
    assert "2 kernels a call: 1 generated, 1 of the library" in printed


# -- as a function


@pytest.mark.parametrize("mode", MODES)
def test_function_of_its_weights(mode):
    op = LayerNormLinearFusion(activation="relu", mode=mode)
    norm, linear = nn.LayerNorm(16), nn.Linear(16, 8)
    x = torch.randn(5, 16)
    wanted = torch.relu(linear(norm(x)))
    torch.testing.assert_close(op(x, norm.weight, norm.bias, linear.weight, linear.bias), wanted)
    assert op.last_call.reason == ("TRAINING never folds" if mode == "training" else "gradients are recorded")
    with torch.no_grad():
        torch.testing.assert_close(op(x, norm.weight, norm.bias, linear.weight, linear.bias), wanted)
        assert op.last_call.folded == (mode == "inference")
        torch.testing.assert_close(op(x, None, None, linear.weight),
                                   torch.relu(nn.functional.layer_norm(x, (16,)) @ linear.weight.t()))
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, norm.weight, norm.bias, linear.weight, linear.bias), wanted)


# -- bad input: an error that names the argument, before anything is compiled


@pytest.mark.parametrize("kwargs, error, words", [
    ({"normalized_shape": -1}, ValueError, "normalized_shape must be positive"),
    ({"normalized_shape": (4, 8)}, ValueError, "normalized_shape=.*one dim"),
    ({"normalized_shape": 2.0}, TypeError, "normalized_shape must be an int"),
    ({"out_features": 0}, ValueError, "out_features must be positive"),
    ({"out_features": True}, TypeError, "out_features"),
    ({"activation": "swish"}, ValueError, "activation.*relu, gelu, gelu_tanh, silu, quick_gelu, tanh"),
    ({"activation": 3}, TypeError, "activation"),
    ({"activation": nn.PReLU()}, ValueError, "activation.*PReLU"),
    ({"norm": "batch_norm"}, ValueError, "norm must be one of layer_norm, rms_norm"),
    ({"eps": "small"}, TypeError, "eps"),
    ({"bias": 1}, TypeError, "bias must be a bool"),
    ({"elementwise_affine": None}, TypeError, "elementwise_affine"),
    ({"mode": "fast"}, ValueError, "mode.*auto, training, inference"),
    ({"mode": 1}, TypeError, "mode"),
    ({"checkpoint": "yes"}, TypeError, "checkpoint"),
    ({"dtype": torch.int32}, ValueError, "dtype must be one of"),
    ({"dtype": "bf16"}, TypeError, "dtype"),
    ({"tile_size": 7}, ValueError, "tile_size must be a power of two"),
    ({"tile_size": 4096}, ValueError, "tile_size=4096.*possible: .*64"),
    ({"tile_size": "big"}, TypeError, "tile_size"),
    ({"normalized_shape": 100, "alignment": 128}, ValueError,
     "alignment=128: rows of 100.*possible: 1, 2, 4, 8, 16$"),
    ({"alignment": 0}, ValueError, "alignment"),
])
def test_bad_arguments(kwargs, error, words):
    with pytest.raises(error, match=words):
        LayerNormLinear(**{"normalized_shape": 256, "out_features": 256, **kwargs})


def test_good_hints():
    module = LayerNormLinear(256, 1024, tile_size=64, alignment=128, dtype=torch.bfloat16)
    within_bound(module, torch.randn(3, 256, dtype=torch.bfloat16))


def test_the_tile_hint_restricts_what_is_measured(monkeypatch):
    from ascend_ln_fuse import chain_hints
    from ascend_ln_fuse.chain_steps import MatmulStep, NormStep, chain_of
    from ascend_ln_fuse.kernels.fused_linear import GemmTile

    asked = []
    monkeypatch.setattr(chain_hints, "choose", lambda question: asked.append(question))
    chain = chain_of((NormStep("layer_norm", 256), MatmulStep(256)), 2, "bf16")
    runner = chain_hints.runner_with(chain, 64, "cuda")
    tiles = (GemmTile(16, 64, 64), GemmTile(16, 128, 64), GemmTile(16, 64, 128))
    question = chain_hints.Question("text", torch.device("cuda"), 16, None, None, None, lambda: tiles,
                                    unsplit=lambda: (GemmTile(16, 16, 256), GemmTile(64, 64, 64)))
    runner._decide(question)
    assert asked[0].configs() == [tiles[0], tiles[2]] and asked[0].text != question.text
    assert asked[0].unsplit() == [GemmTile(64, 64, 64)]
    with pytest.raises(ValueError, match="tile_size=64: on npu products run in the library"):
        chain_hints.runner_with(chain, 64, "npu")
    with pytest.raises(ValueError, match="tile_size=64: .*bf16, f16, not f32"):
        chain_hints.runner_with(chain_of((NormStep("layer_norm", 8), MatmulStep(8)), 2, "f32"), 64, "cuda")


@pytest.mark.parametrize("make, error, words", [
    (lambda: FusionChain().build(), ValueError, "the chain is empty"),
    (lambda: FusionChain().add_activation("relu"), ValueError, "activation: .*no known input features"),
    (lambda: FusionChain().add_matmul(8), ValueError, "out_features: .*no known input features"),
    (lambda: FusionChain().add_residual(), ValueError, "source: .*no known input features"),
    (lambda: FusionChain().add_layer_norm(8).add_activation("selu"), ValueError, "activation.*known: relu"),
    (lambda: FusionChain().add_layer_norm(8).add_activation(None), ValueError, "activation"),
    (lambda: FusionChain().add_layer_norm(8).add_matmul(-4), ValueError, "out_features must be positive"),
    (lambda: FusionChain().add_layer_norm(8).add_matmul(4).add_layer_norm(8), ValueError,
     "normalized_shape=8: the chain gives 4"),
    (lambda: FusionChain().add_layer_norm(8).add_matmul(4).add_residual(), ValueError,
     "source='input' has 8"),
    (lambda: FusionChain().add_layer_norm(8).add_residual("output"), ValueError, "source must be one of"),
    (lambda: FusionChain().add_layer_norm(8).add_matmul(module=nn.Linear(4, 4)), ValueError,
     "module: takes 4 features, the chain gives 8"),
    (lambda: FusionChain().add_layer_norm(8).add_matmul(module=nn.LayerNorm(8)), TypeError,
     "module must be an nn.Linear"),
    (lambda: FusionChain().add_layer_norm(8, module=nn.LayerNorm(8)), TypeError, "not both"),
    (lambda: FusionChain().add_layer_norm(), TypeError, "normalized_shape or module"),
    (lambda: FusionChain().add_layer_norm(module=nn.LayerNorm((2, 8))), ValueError, "one dim"),
    (lambda: FusionChain().add_layer_norm(8).add_matmul(module=nn.Linear(8, 4, device="meta")).build(
        device="cpu"), ValueError, "linear1.weight is on meta, norm1.weight on cpu"),
    (lambda: FusionChain().add_layer_norm(8).add_matmul(module=nn.Linear(8, 4).half()).build(
        dtype=torch.float32), TypeError, "linear1.weight is torch.float16"),
    (lambda: FusionChain.from_modules(nn.LayerNorm(8), "linear"), TypeError, r"modules\[1\]"),
    (lambda: LayerNormLinear.from_modules(nn.LayerNorm(8), nn.Linear(4, 4)), ValueError,
     "linear takes 4 features, norm gives 8"),
    (lambda: LayerNormLinear.from_modules(nn.Linear(8, 8), nn.Linear(8, 4)), TypeError,
     "norm must be an nn.LayerNorm or nn.RMSNorm, not Linear"),
    (lambda: LayerNormLinear.from_modules(nn.LayerNorm(8).half(), nn.Linear(8, 4)), TypeError,
     "linear.weight is"),
    (lambda: LayerNormLinear.from_modules(nn.LayerNorm(8), nn.Linear(8, 4), model=3), TypeError, "model"),
    (lambda: block().load_from(nn.LayerNorm(32)), ValueError, "has 3 layers to load, 1 were given"),
    (lambda: block().load_from(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)),
     ValueError, r"modules\[2\]: the chain has gelu here, not relu"),
    (lambda: block().load_from(nn.LayerNorm(32), nn.Linear(32, 60), nn.Linear(64, 32)), ValueError,
     r"modules\[1\].*linear1 needs"),
    (lambda: block().load_from(nn.LayerNorm(32, eps=1), nn.Linear(32, 64), nn.Linear(64, 32)), ValueError,
     r"modules\[0\]: has eps=1"),
])
def test_bad_chains(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("x, error, words", [
    (torch.randn(3, 31), ValueError, r"x: the norm is over 32 features, x has shape \[3, 31\]"),
    (torch.tensor(1.0), ValueError, "x: "),
    (torch.randn(3, 32).half(), TypeError, "norm weight.*x is torch.float16"),
    (torch.ones(3, 32, dtype=torch.int64), TypeError, "x: "),
    ([1.0] * 32, TypeError, "x must be a torch.Tensor, not list"),
])
@pytest.mark.parametrize("mode", MODES)
def test_bad_inputs(mode, x, error, words):
    with pytest.raises(error, match=words):
        block(mode)(x)


def test_parameters_that_were_replaced_badly():
    module = block()
    module.linear1.weight = nn.Parameter(torch.randn(64, 31))
    with pytest.raises(ValueError, match=r"matmul weight \(step 1\): must be of shape \[64, 32\]"):
        module(torch.randn(3, 32))


@pytest.mark.parametrize("change, error, words", [
    ({"ln_weight": torch.randn(15)}, ValueError, "norm weight"),
    ({"linear_weight": None}, TypeError, "linear_weight"),
    ({"linear_weight": torch.randn(16)}, ValueError, "linear_weight must have two dims"),
    ({"linear_bias": torch.randn(9)}, ValueError, "matmul bias"), ({"x": 1}, TypeError, "x must be"),
    ({"ln_bias": torch.randn(16).double()}, TypeError, "norm bias"),
    ({"x": torch.randn(3, 16, device="meta"), "ln_weight": None}, ValueError, "expected|meta")])
def test_bad_arguments_of_the_function(change, error, words):
    given = {"x": torch.randn(3, 16), "ln_weight": torch.randn(16), "ln_bias": torch.randn(16),
             "linear_weight": torch.randn(8, 16), "linear_bias": torch.randn(8), **change}
    with pytest.raises((error, RuntimeError) if "meta" in words else error, match=words):
        LayerNormLinearFusion()(**given)


# -- compiling ahead


def test_prepare_says_so_on_a_cpu():
    done = block().prepare(ShapeRange(batch=[1, 8], seq_len=[128, 512], hidden=[32]))
    assert done.rows == ()
    assert str(done).startswith("nothing to prepare: on cpu a chain runs as plain PyTorch")


@pytest.mark.parametrize("kwargs, error, words", [
    ({"batch": []}, ValueError, "batch"), ({"batch": [0]}, ValueError, "batch"),
    ({"batch": 3}, TypeError, "batch"), ({"batch": [1], "seq_len": [2.0]}, TypeError, "seq_len"),
    ({"batch": [1], "hidden": "a"}, TypeError, "hidden"),
])
def test_bad_ranges(kwargs, error, words):
    with pytest.raises(error, match=words):
        ShapeRange(**kwargs)


def test_bad_prepare():
    with pytest.raises(ValueError, match="hidden=.*takes 32"):
        block().prepare(ShapeRange([1], hidden=[64]))
    with pytest.raises(TypeError, match="shapes must be a ShapeRange"):
        block().prepare([1])


def test_prepared_kernels_serve_the_whole_range(interpreted, monkeypatch):
    """After `prepare` no call within the range generates another kernel."""
    from ascend_ln_fuse.kernels import launch

    made = []
    generate = launch.generate
    module = block("training", torch.bfloat16)
    monkeypatch.setattr(launch, "generate", lambda *args: made.append(generate(*args)) or made[-1])
    done = module.prepare(ShapeRange(batch=[1, 4], seq_len=[1, 10]))
    assert {1, 4, 10, 40} <= set(done.rows) and "rows" in str(done)
    before = {kernel.source for kernel in made}
    assert before
    with torch.no_grad():
        for rows in range(1, 41, 5):
            module(torch.randn(rows, 32, dtype=torch.bfloat16))
    assert {kernel.source for kernel in made} == before
