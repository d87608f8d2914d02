"""Folded copies: when they are made, made again, refused and freed. The numbers of folded chains."""

import copy
import gc
import weakref

import pytest
import torch
from checks import assert_within_bound
from torch import nn
from torch.nn.utils import parametrize

from ascend_ln_fuse import FusionChain, FusionMode, LayerNormLinear
from ascend_ln_fuse.kernels import folding


class Owner:
    pass


OWNER = Owner()


def folded(owner=OWNER, dtype=torch.float32, k=16, n=8):
    """(result of fold, its tensors)"""
    tensors = [torch.rand(k, dtype=dtype) + 0.5, torch.randn(k, dtype=dtype), torch.randn(n, k, dtype=dtype),
               torch.randn(n, dtype=dtype)]
    return folding.fold(owner, *tensors), tensors


def layer(dtype=torch.float32, mode="inference", **kwargs):
    """A LayerNormLinear with weights that are not the identity."""
    made = LayerNormLinear(64, 48, mode=mode, dtype=dtype, **kwargs)
    with torch.no_grad():
        made.norm.weight.uniform_(0.5, 2.0)
        made.norm.bias.normal_()
    return made


@torch.no_grad()
def follows(module, x) -> bool:
    """Whether the module, folded, gives what its layers give one after the other."""
    y = module(x)
    assert module.last_call.folded, module.last_call
    return torch.allclose(y, module._one_by_one(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def why_not(module, x=None) -> str:
    """The reason for which a call is not folded; its result is that of the layers."""
    x = torch.randn(5, module.in_features) if x is None else x
    torch.testing.assert_close(module(x), module._one_by_one(x))
    assert not module.last_call.folded
    return module.last_call.reason


# -- what is computed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_copies_are_gamma_in_the_weight_beta_in_the_bias_and_sums_of_the_rounded_weight(dtype):
    found, (gamma, beta, weight, bias) = folded(dtype=dtype)
    exact = weight.double() * gamma.double()
    assert torch.equal(found.weight, exact.to(dtype))
    assert found.weight.dtype == found.bias.dtype == dtype
    torch.testing.assert_close(found.bias.double(), weight.double() @ beta.double() + bias.double(),
                               rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(found.column_sums, found.weight.double().sum(1).float(), rtol=1e-6, atol=1e-6)


def test_large_weights_are_folded_in_pieces(monkeypatch):
    whole, tensors = folded(n=10)
    monkeypatch.setattr(folding, "CHUNK", 3 * 16)
    folding.forget(*tensors)
    pieces = folding.fold(OWNER, *tensors)
    assert pieces is not whole
    for a, b in zip(pieces.tensors, whole.tensors, strict=True):
        assert torch.equal(a, b)


def test_parameters_are_never_touched():
    module = layer()
    before = copy.deepcopy(module.state_dict())
    versions = [p._version for p in module.parameters()]
    assert follows(module, torch.randn(3, 64))
    assert versions == [p._version for p in module.parameters()]
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("offset", [0, 1, 10, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_the_error_is_within_the_bound_at_any_mean(norm, dtype, offset):
    module = FusionChain()
    module = module.add_layer_norm(256) if norm == "layer_norm" else module.add_rms_norm(256)
    module = module.add_matmul(192).add_activation("gelu").add_matmul(64).build("inference", dtype=dtype)
    with torch.no_grad():
        for name, p in module.norm1.named_parameters():
            p.normal_(1.0, 0.5) if name == "weight" else p.normal_()
    x = (torch.randn(96, 256) + offset).to(dtype)
    wide = copy.deepcopy(module).double()
    with torch.no_grad():
        ours = module(x)
        assert module.last_call.folded
        assert_within_bound(ours, module._one_by_one(x), wide._one_by_one(x.double()))


# -- made again


def test_the_copies_of_unchanged_parameters_are_kept():
    found, tensors = folded()
    assert folding.fold(OWNER, *tensors) is found


@pytest.mark.parametrize("which", range(4))
def test_in_place_edit_folds_again(which):
    found, tensors = folded()
    tensors[which].mul_(2)
    again = folding.fold(OWNER, *tensors)
    assert again is not found
    fresh = folding.fold(Owner(), *[t.clone() for t in tensors])
    assert all(torch.equal(a, b) for a, b in zip(again.tensors, fresh.tensors, strict=True))


def test_load_state_dict_folds_again():
    module, x = layer(), torch.randn(3, 64)
    assert follows(module, x)
    module.load_state_dict(layer().state_dict())
    assert follows(module, x)
    module.load_state_dict(layer().state_dict(), assign=True)
    assert follows(module, x)


def test_to_folds_again():
    module, x = layer(), torch.randn(3, 64)
    assert follows(module, x)
    module.to(torch.float64)
    assert follows(module, x.double())
    module.half().float()
    assert follows(module, x)


def test_to_by_swapping_tensors_folds_again(monkeypatch):
    """torch swaps no tensor that has a weak reference to it."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    module, x = layer(), torch.randn(3, 64)
    assert follows(module, x)
    module.to(torch.float64)
    assert follows(module, x.double())
    module.load_state_dict(layer(torch.float64).state_dict())
    assert follows(module, x.double())


def test_data_that_is_replaced_folds_again():
    """Also where the new storage lies at the address of the old one."""
    module, x = layer(), torch.randn(3, 64)
    for _ in range(5):
        module.linear.weight.data = torch.randn(48, 64)
        assert follows(module, x)


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_step_folds_again(fused):
    """A fused step counts no version."""
    module, x = layer(), torch.randn(3, 64)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5, fused=fused)
    assert follows(module, x)
    module(x).square().sum().backward()
    optimizer.step()
    assert follows(module, x)


def test_edit_in_inference_mode_folds_again():
    module, x = layer(), torch.randn(3, 64)
    assert follows(module, x)
    with torch.inference_mode():
        module.norm.weight.mul_(3)
    assert follows(module, x)


def test_write_through_data_needs_refold():
    """The limit that the docs name: nothing counts such a write."""
    module, x = layer(), torch.randn(3, 64)
    assert follows(module, x)
    module.norm.weight.data.mul_(3)
    assert not follows(module, x)
    module.refold()
    assert follows(module, x)


# -- freed


def test_copies_are_freed_with_the_parameters():
    module = layer()
    assert follows(module, torch.randn(3, 64))
    copies = [weakref.ref(t) for t in folding._entries[module.linear.weight.untyped_storage()].result.tensors]
    del module
    gc.collect()
    assert [ref() for ref in copies] == [None, None, None]


def test_copies_without_a_norm_weight_are_freed_too():
    module = layer()
    module.norm.weight = None
    assert follows(module, torch.randn(3, 64))
    found = folding._entries[module.linear.weight.untyped_storage()].result
    assert found.weight is None
    sums = weakref.ref(found.column_sums)
    del module, found
    gc.collect()
    assert sums() is None


# -- traps.md, "Folding": declined, and right


def test_tied_weight_of_two_layers_is_not_folded_twice():
    first, x = layer(), torch.randn(3, 64)
    second = LayerNormLinear.from_modules(nn.LayerNorm(64), first.linear, mode="inference")
    with torch.no_grad():
        second.norm.weight.uniform_(0.5, 2.0)
    assert follows(first, x)
    assert "tied" in why_not(second)
    assert follows(first, x)


def test_tied_lm_head_is_not_folded():
    model = nn.ModuleDict({"embed": nn.Embedding(48, 64), "norm": nn.LayerNorm(64),
                           "head": nn.Linear(64, 48, bias=False)})
    model["head"].weight = model["embed"].weight
    module = LayerNormLinear.from_modules(model["norm"], model["head"], model=model, mode="inference")
    assert "tied" in why_not(module)
    model["head"].weight = nn.Parameter(torch.randn(48, 64))
    module = LayerNormLinear.from_modules(model["norm"], model["head"], model=model, mode="inference")
    assert follows(module, torch.randn(3, 64))


def test_one_weight_twice_in_a_chain_is_not_folded():
    linear = nn.Linear(16, 16)
    module = FusionChain().add_layer_norm(16).add_matmul(module=linear).add_matmul(module=linear)
    assert "tied" in why_not(module.build("inference"))


def test_other_readers_post_norm_is_not_folded():
    chain = FusionChain().add_layer_norm(16).add_matmul(32).add_activation("relu").add_matmul(16)
    module = chain.add_residual("norm").build("inference")
    assert "read by more" in why_not(module)
    assert follows(chain.__class__().add_layer_norm(16).add_matmul(16).add_residual().build("inference"),
                   torch.randn(2, 16))


def test_one_plus_weight_is_not_folded():
    class OnePlus(nn.Module):
        def forward(self, w):
            return 1 + w

    class GemmaNorm(nn.RMSNorm):
        def forward(self, x):
            return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)

    with pytest.raises(TypeError, match="GemmaNorm"):
        LayerNormLinear.from_modules(GemmaNorm(64), nn.Linear(64, 8))
    module = layer()
    parametrize.register_parametrization(module.norm, "weight", OnePlus())
    assert "parametrization" in why_not(module)
    module = layer()
    module.norm = GemmaNorm(64)  # later, in the place of the norm
    assert "forward of its own" in why_not(module)


def test_lora_in_the_place_of_the_layer_is_not_folded():
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(64, 4, False), nn.Linear(4, 48, False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    module, x = layer(), torch.randn(3, 64)
    assert follows(module, x)
    module.linear = Lora(module.linear)
    assert "Lora with a forward of its own" in why_not(module)


def test_lora_as_a_hook_is_not_folded():
    module, x = layer(), torch.randn(3, 64)
    assert follows(module, x)
    handle = module.linear.register_forward_hook(lambda m, args, out: out + 1)
    assert "hooks" in why_not(module)
    handle.remove()
    assert follows(module, x)


def test_quantised_weight_is_not_folded():
    tensors = [None, torch.randn(16), torch.ones(8, 16, dtype=torch.int8), None]
    assert "quantised" in folding.fold(OWNER, *tensors)


def test_subclassed_weight_is_not_folded():
    class Quantised(torch.Tensor):
        pass

    module = layer()
    module.linear.weight = nn.Parameter(module.linear.weight.detach().as_subclass(Quantised),
                                        requires_grad=False)
    assert "subclass" in why_not(module)
    assert "subclass" in folding.unfoldable([module.linear.weight])


def test_sharded_weight_is_not_folded():
    """FSDP fills unsharded weights without counting a version."""
    from torch import distributed

    if not distributed.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        module, x = layer(), torch.randn(3, 64)
        model = nn.Sequential(module)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            with torch.no_grad():
                ours = model(x)
            assert not module.last_call.folded
            assert "sharded" in module.last_call.reason or "subclass" in module.last_call.reason
            plain = copy.deepcopy({k: v.full_tensor() for k, v in module.state_dict().items()})
            wanted = torch.func.functional_call(layer(), plain, x)
            torch.testing.assert_close(ours, wanted)
            model(x).sum().backward()
            optimizer.step()
        del model, module, optimizer
        gc.collect()
    finally:
        distributed.destroy_process_group()


def test_packed_weight_is_not_folded():
    module = layer()
    packed = torch.randn(96, 64)
    module.linear.weight = nn.Parameter(packed[:48], requires_grad=False)
    assert "part of a larger tensor" in why_not(module)


def test_shared_memory_is_not_folded():
    module = layer()
    module.share_memory()
    assert "between processes" in why_not(module)


def test_gradients_on_is_not_folded():
    module, x = layer(), torch.randn(3, 64)
    module(x).sum().backward()
    assert str(module.last_call) == "chain (gradients are recorded)"
    assert all(p.grad is not None for p in module.parameters())
    module.requires_grad_(False)
    module(x.clone().requires_grad_())
    assert not module.last_call.folded
    module(x)
    assert module.last_call.folded


def test_inference_tensors_are_not_folded():
    with torch.inference_mode():
        module = layer()
    assert "inference mode" in why_not(module)


@pytest.mark.parametrize("gamma", [1e5, 1e-6])
def test_fp16_products_that_do_not_fit_are_not_folded(gamma):
    found, (g, *rest) = folded(dtype=torch.float16)
    folding.forget(g)
    scaled = torch.full_like(g, gamma) if gamma < 6e4 else torch.full_like(g, 6e4)
    assert "does not fit f16" in folding.fold(OWNER, scaled, *rest)


# -- modes


def test_training_never_folds():
    assert why_not(layer(mode=FusionMode.TRAINING)) == "TRAINING never folds"


def test_auto_decides_by_grad_mode_and_folds_only_where_it_pays(monkeypatch):
    module, x = layer(mode="auto"), torch.randn(3, 64)
    module(x)
    assert module.last_call.reason == "gradients are recorded"
    assert "only where that is faster" in why_not(module)
    monkeypatch.setattr(folding, "pays", lambda device: True)
    assert follows(module, x)
    module(x)
    assert module.last_call.reason == "gradients are recorded"


# -- warm calls


def test_a_warm_call_looks_at_a_few_attributes(monkeypatch):
    first, tensors = folded()
    monkeypatch.setattr(folding, "_states", None)
    monkeypatch.setattr(folding, "unfoldable", None)
    assert folding.fold(OWNER, *tensors) is first


def other_storage(t):
    """Other values in another storage at the same address, as where memory was freed and given out again. No
    version is counted."""
    array = t.numpy()
    t.data = torch.from_numpy(array)
    array += 1


@pytest.mark.parametrize("number", range(4), ids=["gamma", "beta", "weight", "bias"])
@pytest.mark.parametrize("change", [
    lambda t: t.add_(1), lambda t: setattr(t, "data", torch.randn(t.shape)), other_storage,
    lambda t: t.resize_(t.shape).mul_(2)], ids=["in place", "data", "data at the same address", "resized"])
def test_a_warm_call_sees_every_change(number, change):
    first, tensors = folded()
    assert folding.fold(OWNER, *tensors) is first
    change(tensors[number])
    again = folding.fold(OWNER, *tensors)
    assert again is not first
    torch.testing.assert_close(again.weight, tensors[0] * tensors[2])
    torch.testing.assert_close(again.bias, tensors[2] @ tensors[1] + tensors[3])


def test_a_warm_call_sees_the_same_memory_read_otherwise():
    first, (gamma, beta, weight, bias) = folded(k=8)
    weight.data = weight.data.t()
    again = folding.fold(OWNER, gamma, beta, weight, bias)
    assert again is not first
    torch.testing.assert_close(again.weight, gamma * weight)


def test_a_warm_call_keeps_vectors_in_their_places():
    """gamma as beta, and the other way round, is another fold of the same tensors."""
    first, (gamma, _, weight, bias) = folded()
    with_gamma = folding.fold(OWNER, gamma, None, weight, bias)
    with_beta = folding.fold(OWNER, None, gamma, weight, bias)
    assert with_gamma.bias is None and with_beta.weight is None and first.bias is not None


def test_hints_keep_nothing_alive():
    found, tensors = folded()
    seen = [weakref.ref(t) for t in found.tensors]
    folding.forget(tensors[2])
    del found
    gc.collect()
    assert not any(ref() is not None for ref in seen)
