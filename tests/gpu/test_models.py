"""Whole models through the backend on an NVIDIA GPU: the sites run as kernels and the numbers hold."""

import pytest
import torch
from checks import assert_within_bound, check, exact_copy, tensors
from torch import nn
from torch._inductor import config as inductor
from torch.nn import functional as F

from ascend_ln_fuse import auto_fusion, inner_choice, last_reports
from ascend_ln_fuse.kernels import ops
from ascend_ln_fuse.kernels.store import Store

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16],
                                 ids=["f32", "bf16", "f16"])


@pytest.fixture(autouse=True)
def kernels_ran():
    """No site may fall back to the reference without saying so."""
    ops.runner.cache_clear()
    made = []
    original = ops.Runner

    class Kept(original):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    ops.Runner = Kept
    yield
    ops.Runner = original
    ops.runner.cache_clear()
    assert not [run.reasons for run in made if run.reasons]


class Attention(nn.Module):
    """SeedVR's: q and k of a packed qkv, each through a LayerNorm over the head."""

    def __init__(self, heads=3, dim=128):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.qkv = nn.Linear(heads * dim, 3 * heads * dim)
        self.norm_q, self.norm_k = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.out = nn.Linear(heads * dim, heads * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, 3, self.heads, self.dim).unbind(1)
        q, k = self.norm_q(q), self.norm_k(k)
        mixed = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)))
        return self.out(mixed.transpose(0, 1).flatten(1))


class Block(nn.Module):
    """adaLN, attention, residual, norm, MLP: a block of a video transformer."""

    def __init__(self, width=384):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(3, width // 3)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, scale, shift):
        x = x + self.attention(self.norm1(x) * (1 + scale) + shift)
        return x + self.mlp(self.norm2(x))


@DTYPES
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_attention(dtype, dynamic, device):
    model = Attention().to(device, dtype)
    check(model, torch.randn(257, 384, device=device).to(dtype), fused=2, dynamic=dynamic)


@DTYPES
def test_block(dtype, device):
    model = Block().to(device, dtype)
    scale, shift = (torch.randn(1, 384, device=device).to(dtype) for _ in range(2))
    check(model, torch.randn(257, 384, device=device).to(dtype), scale, shift, fused=4)


@DTYPES
def test_training_step(dtype, device):
    model = Block().to(device, dtype)
    inputs = [torch.randn(*shape, device=device).to(dtype)
              for shape in ((257, 384), (1, 384), (1, 384))]
    check(model, *inputs, fused=4, grad=True)

    def gradients(model, inputs):
        model.zero_grad()
        model(*inputs).to(torch.promote_types(inputs[0].dtype, torch.float32)).square().mean().backward()
        return [p.grad.double() for p in model.parameters()]

    low, exact = gradients(model, inputs), gradients(*exact_copy(model, inputs))
    ours = gradients(torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"}), inputs)
    # Some gradients are zero but for rounding (that of k's bias), so the bound is not tensor by tensor.
    slack = torch.finfo(dtype).eps * max(g.abs().max() for g in exact)
    for a, b, c in zip(ours, low, exact):
        assert (a - c).abs().max() <= 3 * (b - c).abs().max() + slack


@pytest.mark.real_gpu
def test_with_inductor(device):
    inputs = [torch.randn(*shape, device=device).bfloat16() for shape in ((257, 384), (1, 384), (1, 384))]
    check(Block().to(device, torch.bfloat16), *inputs, fused=4,
          backend_options={"inner": "inductor", "inner_choice": "fuse"})


@pytest.mark.real_gpu
@pytest.mark.parametrize("cudagraphs", [False, True], ids=["launched", "cudagraphs"])
def test_the_faster_form_with_inductor(device, cudagraphs, monkeypatch):
    """Measured, right, and chosen again without a clock."""
    model = Block().to(device, torch.bfloat16).eval()
    inputs = [torch.randn(*shape, device=device).bfloat16() for shape in ((4096, 384), (1, 384), (1, 384))]
    choices = []
    for _ in range(2):
        monkeypatch.setattr(inner_choice, "_store", Store("inner"))  # the second time it is on disk
        torch._dynamo.reset()
        with inductor.patch({"triton.cudagraphs": cudagraphs}), torch.no_grad():
            compiled = torch.compile(model, backend="ascend_ln_fuse",
                                     options={"report": "off", "inner": "inductor"})
            for _ in range(3):
                ours = compiled(*inputs).clone()
            exact, given = exact_copy(model, inputs)
            assert_within_bound(ours, model(*inputs), exact(*given))
        choices.append(last_reports()[-1].choice)
    assert choices[0] == choices[1] and "plain" in choices[0] and "fused" in choices[0]


@pytest.mark.real_gpu
def test_autocast(device):
    model = Block().to(device)
    inputs = [torch.randn(*shape, device=device) for shape in ((257, 384), (1, 384), (1, 384))]
    with torch.autocast(device.type, torch.bfloat16):
        check(model, *inputs, fused=4)  # the float64 reference is left alone by autocast


@pytest.mark.real_gpu
def test_reduce_overhead_around(device):
    """A CUDA graph of the compiled model replays on new data."""
    model = auto_fusion(Attention().to(device, torch.bfloat16).eval(), report="off")
    x = torch.randn(257, 384, device=device).bfloat16()
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours = model(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(ours, model(x))


def test_lengths_share_a_kernel(device):
    model = Attention().to(device, torch.bfloat16).eval()
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=True, options={"report": "off"})
    with torch.no_grad():
        for length in (100, 257, 64, 1000):
            x = torch.randn(length, 384, device=device).bfloat16()
            ours, eager = compiled(x), model(x)
            assert (ours - eager).abs().max() < 0.1
    assert len(last_reports()) == 1


# -- models of libraries


def sites_of(model, inputs, device, dtype):
    """Compile, compare with eager and float64, and return the reports' sites."""
    model = model.to(device, dtype).eval()
    before = len(last_reports())
    check(model, *inputs, fused=None, declined=None)
    sites = [site for report in last_reports()[before:] for site in report.sites]
    assert any(site.status == "fused" for site in sites), [site.reason for site in sites]
    return sites


class Output(nn.Module):
    """The tensors of a library model's output object."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return tuple(tensors(dict(self.model(x).items())))


@DTYPES
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_transformers(name, dtype, device):
    transformers = pytest.importorskip("transformers")
    small = {"llama": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, vocab_size=300),
             "bert": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                          num_attention_heads=4, vocab_size=300),
             "gpt2": dict(n_embd=256, n_layer=2, n_head=4, vocab_size=300)}[name]
    config = transformers.AutoConfig.for_model(name, **small, use_cache=False)
    model = transformers.AutoModel.from_config(config)
    sites_of(Output(model), [torch.arange(40, device=device)[None] * 7 % 300], device, dtype)


@DTYPES
def test_timm(dtype, device):
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", qk_norm=True, depth=2, num_classes=10)
    image = torch.randn(2, 3, 224, 224, device=device).to(dtype)
    sites_of(model, [image], device, dtype)


@DTYPES
def test_diffusers(dtype, device):
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=64, caption_projection_dim=128,
        pooled_projection_dim=32, out_channels=4, qk_norm="rms_norm")

    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, latent, text, pooled, step):
            return self.model(latent, text, pooled, step, return_dict=False)[0]

    latent, text, pooled = (torch.randn(*shape, device=device).to(dtype)
                            for shape in ((1, 4, 16, 16), (1, 8, 64), (1, 32)))
    sites_of(Call(), [latent, text, pooled, torch.tensor([500], device=device)], device, dtype)
