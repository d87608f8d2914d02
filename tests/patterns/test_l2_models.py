"""l2 norms as models spell them, from the models' own classes or code, at tiny sizes."""

import pytest
import torch
from reasons import check_reasons
from torch import nn
from torch.nn import functional as F

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
C = 16
STRIDED = "not the innermost in memory"


def shake(module: nn.Module, dtype) -> nn.Module:
    """`module` in `dtype` with random parameters, in eval mode."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return module.to(dtype).eval()


def wan(**options):
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

    return WanRMS_norm(C, **options)


def hunyuan(**options):
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15RMS_norm

    return HunyuanVideo15RMS_norm(C, **options)


def qwen(**options):
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageRMS_norm

    return QwenImageRMS_norm(C, **options)


def kandinsky(**options):
    from diffusers.models.autoencoders.autoencoder_kandinsky6_sr import Kandinsky6VAERMSNorm

    return Kandinsky6VAERMSNorm(C)


class ThenSiLU(nn.Module):
    """As in the VAEs' residual blocks."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.act = norm, nn.SiLU()

    def forward(self, x):
        return self.act(self.norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [wan, hunyuan, qwen, kandinsky], ids=lambda make: make.__name__)
def test_vae_norms_of_videos(make, dtype):
    """Channels first: fused where the channels are innermost in memory, and where they lie across it."""
    model = shake(ThenSiLU(make(images=False, bias=True)), dtype)
    x = torch.randn(2, C, 3, 4, 5).to(dtype)
    report = check_reasons(model, x.to(memory_format=torch.channels_last_3d))
    assert report.sites[0].pattern.endswith("modulate -> silu" if make is not kandinsky else "scale -> silu")
    assert report.sites[0].region.startswith(f"space [*, *, *, *, {C}]")
    check_reasons(model, x)
    narrow = torch.randn(2, C, 1, 1, 7).to(dtype)[..., ::2]
    check_reasons(model, narrow, fused=0, declined=(STRIDED,))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"channel_first": False}], ids=str)
def test_vae_norms_of_images_and_tokens(options, dynamic):
    model = shake(ThenSiLU(wan(**options)), torch.bfloat16)
    if options.get("channel_first", True):
        x = torch.randn(2, C, 6, 5).bfloat16()
        check_reasons(model, x.to(memory_format=torch.channels_last), dynamic=dynamic)
        check_reasons(model, x, dynamic=dynamic)
    else:
        check_reasons(model, torch.randn(2, 7, C).bfloat16(), dynamic=dynamic)


class RMSNorm(nn.Module):
    """lucidrains: x-transformers and others."""

    def __init__(self, dim):
        super().__init__()
        self.scale, self.g = dim**0.5, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


class ChannelRMSNorm(nn.Module):
    """lucidrains: denoising-diffusion-pytorch."""

    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, dim, 1, 1))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.g * (x.shape[1] ** 0.5)


class MultiheadRMSNorm(nn.Module):
    """lucidrains: q and k of heads, gamma per head."""

    def __init__(self, dim, heads):
        super().__init__()
        self.scale, self.gamma = dim**0.5, nn.Parameter(torch.ones(heads, 1, dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.gamma * self.scale


class CosineAttention(nn.Module):
    """Packed q, k and v; q and k normalised before they are rotated, scaled and multiplied."""

    def __init__(self, heads=2, dim=C):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(C, 3 * heads * dim)
        self.q_norm, self.k_norm = MultiheadRMSNorm(dim, heads), MultiheadRMSNorm(dim, heads)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_lucidrains(dtype, dynamic):
    x = torch.randn(2, 7, C).to(dtype)
    report = check_reasons(shake(RMSNorm(C), dtype), x, dynamic=dynamic)
    if not dynamic:  # F.normalize reads x twice; two products read and write what is between
        size, gamma = x.numel() * x.element_size(), C * x.element_size()
        site = report.sites[0]
        assert (site.bytes_before, site.bytes_after) == (7 * size + gamma, 2 * size + gamma)
        assert site.kernels_removed == ("normalize", "mul", "mul")
        assert not site.hidden_kernels  # nothing is known of what CANN launches for it
    report = check_reasons(shake(CosineAttention(), dtype), x, fused=2, dynamic=dynamic)
    assert [site.pattern for site in report.sites] == ["normalize -> scale"] * 2
    assert all("shares one kernel launch with" in site.note for site in report.sites)
    image = torch.randn(2, C, 6, 5).to(dtype).to(memory_format=torch.channels_last)
    check_reasons(shake(ChannelRMSNorm(C), dtype), image, dynamic=dynamic)


def test_a_residual_before_and_a_modulate_behind():
    class Block(RMSNorm):
        def forward(self, x, h, scale, shift):
            x = x + h
            return x, super().forward(x) * (1 + scale[:, None]) + shift[:, None]

    inputs = [torch.randn(2, 7, C), torch.randn(2, 7, C), torch.randn(2, C), torch.randn(2, C)]
    report = check_reasons(shake(Block(C), torch.bfloat16), *(x.bfloat16() for x in inputs))
    assert report.sites[0].pattern == "add -> normalize -> modulate"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_qwen3_next_gated_delta_net(dtype):
    """Its l2norm of q and k, in fp32 as the reference implementation has it, and the gated RMSNorm behind."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    config = qwen3_next.Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=2, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=C, linear_value_head_dim=C, layer_types=["linear_attention", "full_attention"])
    model = shake(qwen3_next.Qwen3NextGatedDeltaNet(config, 0), dtype)
    report = check_reasons(model, torch.randn(2, 9, 32).to(dtype), fused=3, exact=False)
    patterns = [site.pattern for site in report.sites]
    assert sum("l2_norm" in pattern for pattern in patterns) == 2, patterns


def test_swin_v2_attention():
    from transformers.models.swinv2 import modeling_swinv2 as swin

    config = swin.Swinv2Config(image_size=16, patch_size=2, embed_dim=32, depths=[1], num_heads=[2],
                               window_size=4)
    model = shake(swin.Swinv2SelfAttention(config, dim=32, num_heads=2, window_size=4), torch.float32)
    report = check_reasons(model, torch.randn(3, 16, 32), fused=2)
    assert [site.pattern for site in report.sites] == ["normalize"] * 2


class Embeddings(nn.Module):
    """The end of CLIP and its like."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(C, C, bias=False)

    def forward(self, image, text):
        image, text = self.projection(image), self.projection(text)
        image = image / image.norm(p=2, dim=-1, keepdim=True)
        return image @ (text / text.norm(p=2, dim=-1, keepdim=True)).t()


class Detector(nn.Module):
    """OWL-ViT's class head: eps is added to the length."""

    def forward(self, x):
        return x / (torch.linalg.norm(x, dim=-1, keepdim=True) + 1e-6)


def test_embeddings():
    check_reasons(shake(Embeddings(), torch.float32), torch.randn(3, C), torch.randn(5, C), fused=2)
    check_reasons(Detector(), torch.randn(3, C), fused=0, declined=("added to the length",))


@pytest.mark.parametrize("grad", [False, True])
def test_a_feed_forward_block_is_one_chain(grad):
    model = nn.Sequential(RMSNorm(C), nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))
    report = check_reasons(shake(model, torch.float32), torch.randn(2, 7, C, requires_grad=grad), grad=grad)
    assert report.sites[0].chain == "linear -> gelu -> linear"


@pytest.mark.parametrize("model", [RMSNorm(C), CosineAttention()], ids=["norm", "attention"])
def test_training(model):
    check_reasons(shake(model, torch.float32), torch.randn(2, 7, C, requires_grad=True), grad=True,
                  fused=2 if isinstance(model, CosineAttention) else 1)
