"""Norms as models spell them: rows of the project's table of model patterns (those that are not in
test_library_norm.py), from the models' own code or classes, at tiny sizes."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from einops import rearrange
from reasons import check_reasons
from torch import nn
from torch.nn import functional as F

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, L, H, E = 2, 7, 4, 8  # batch, tokens, heads, head size
C = H * E


def shake(module: nn.Module, dtype) -> nn.Module:
    """`module` in `dtype` with random parameters, in eval mode."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return module.to(dtype).eval()


# Spelled here as the models' own files do.


class FluxRMSNorm(nn.Module):
    """2. black-forest-labs FLUX."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x_dtype = x.dtype
        x = x.float()
        rrms = torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-6)
        return (x * rrms).to(dtype=x_dtype) * self.scale


class FluxQKNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)
        self.query_norm, self.key_norm = FluxRMSNorm(E), FluxRMSNorm(E)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "B L (K H D) -> K B H L D", K=3, H=H)
        q, k = self.query_norm(q), self.key_norm(k)
        return q.to(v), k.to(v), v


class WanRMSNorm(nn.Module):
    """9. Wan2.1 (the original repository)."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)


class WanLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class WanOriginal(nn.Module):
    """9. Wan2.1: norm over all heads before the view, modulation in fp32, gated residual."""

    def __init__(self):
        super().__init__()
        self.norm1 = WanLayerNorm(C, eps=1e-6, elementwise_affine=False)
        self.q, self.o = nn.Linear(C, C), nn.Linear(C, C)
        self.norm_q = WanRMSNorm(C)
        self.norm2 = WanLayerNorm(C, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Parameter(torch.randn(1, 6, C) / C**0.5)

    def forward(self, x, e):
        e = (self.modulation + e).chunk(6, dim=1)
        h = (self.norm1(x).float() * (1 + e[1]) + e[0]).type_as(x)
        q = self.norm_q(self.q(h)).view(B, -1, H, E)
        x = x + (self.o(q.flatten(2)) * e[2]).type_as(x)
        return (self.norm2(x).float() * (1 + e[4]) + e[3]).type_as(x), x, q


class WanMLPProj(nn.Module):
    """9. Wan2.1 image embeddings: norm, linear, GELU, linear, norm (affine norms kept in the dtype)."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.GELU(), nn.Linear(C, C),
                                  nn.LayerNorm(C))

    def forward(self, x):
        return self.proj(x)


class WanRope(nn.Module):
    """8. diffusers Wan: norm over all heads, unflatten, rope written into `out[..., 0::2]`."""

    def __init__(self):
        super().__init__()
        from diffusers.models.normalization import RMSNorm

        self.norm_q = RMSNorm(C, eps=1e-6)

    def forward(self, x, cos, sin):
        query = self.norm_q(x).unflatten(2, (H, -1))
        x1, x2 = query.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos[..., 0::2], sin[..., 1::2]
        out = torch.empty_like(query)
        out[..., 0::2] = x1 * cos - x2 * sin
        out[..., 1::2] = x1 * sin + x2 * cos
        return out.type_as(query)


class Modulates(nn.Module):
    """11. Other spellings of a modulate: `(scale + 1).unsqueeze(1)`, `scale[:, None]`, per token."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C, elementwise_affine=False, eps=1e-6)

    def forward(self, x, emb, tokens):
        shift, scale = emb.chunk(2, dim=1)
        a = self.norm(x) * (scale + 1).unsqueeze(1) + shift.unsqueeze(1)
        b = torch.add(shift[:, None], torch.mul(1 + scale[:, None], self.norm(x + 1)))
        c = self.norm(x - 1) * (1 + tokens) + tokens
        return a, b, c


class PreNormBlock(nn.Module):
    """15 and 23. A ViT block: q, k and v from one norm, then the MLP's norm on the sum."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C, eps=1e-6), nn.LayerNorm(C, eps=1e-6)
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (H, E)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.fc2(F.gelu(self.fc1(h)))


class SplitQKNorm(nn.Module):
    """19. qk-norm after a split of the packed projection: to heads, norm, back, to heads for rope."""

    def __init__(self, norm):
        super().__init__()
        self.qkv_proj = nn.Linear(C, 2 * C)
        self.q_norm, self.k_norm = norm(E), norm(E)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv_proj(x).split([C, C // 2, C // 2], dim=-1)
        q_by_head = q.view(*q.shape[:-1], q.shape[-1] // E, E)
        q = self.q_norm(q_by_head).view(q.shape)
        k_by_head = k.view(*k.shape[:-1], k.shape[-1] // E, E)
        k = self.k_norm(k_by_head).view(k.shape)
        heads = q.unflatten(-1, (H, E))
        a, b = heads.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1), k, v


class BertForkLayerNorm(nn.Module):
    """20. The LayerNorm of early BERT ports: "epsilon inside the square root, TF style"."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    def forward(self, x):
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-12)
        return self.weight * x + self.bias


class StdLayerNorm(nn.Module):
    """20. The annotated transformer's: unbiased, eps on the deviation. No LayerNorm."""

    def __init__(self, unbiased):
        super().__init__()
        self.unbiased = unbiased
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True) if self.unbiased else x.std(-1, keepdim=True, unbiased=False)
        return self.weight * (x - mean) / (std + 1e-6) + self.bias


class GatedMLP(nn.Module):
    """22. Both halves of a gated MLP read one norm; `fused` as Phi-3 does it."""

    def __init__(self, norm, fused):
        super().__init__()
        self.norm, self.fused = norm, fused
        self.gate, self.up, self.down = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.gate_up = nn.Linear(C, 2 * C)

    def forward(self, x):
        h = self.norm(x)
        if self.fused:
            gate, up = self.gate_up(h).chunk(2, dim=-1)
            return self.down(up * F.silu(gate))
        return self.down(F.silu(self.gate(h)) * self.up(h))


# Classes of the libraries.


class Call(nn.Module):
    """A module of a library, called as its model calls it: `call(module, *inputs)`."""

    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs):
        return self.call(self.module, *inputs)


def transformers_config(name, **more):
    import transformers

    sizes = {"hidden_size": C, "num_attention_heads": H, "num_hidden_layers": 1, "intermediate_size": 48,
             "vocab_size": 32} | more
    config = getattr(transformers, name)(**sizes)
    config._attn_implementation = "eager"
    return config


def from_transformers(family, name, *args):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, name)(*args)


def with_rope(layer):
    """`layer` on (x, cos, sin)."""
    return Call(layer, lambda m, x, cos, sin: m(x, position_embeddings=(cos, sin), attention_mask=None))


def grouped_query(name, **more):
    return transformers_config(f"{name}Config", num_key_value_heads=2, head_dim=E, **more)


def llama_layer(name="Llama"):
    return with_rope(from_transformers(name.lower(), f"{name}DecoderLayer", grouped_query(name), 0))


def qwen3_attention():
    return with_rope(from_transformers("qwen3", "Qwen3Attention", grouped_query("Qwen3"), 0))


def gpt_oss_layer():
    config = grouped_query("GptOss", num_local_experts=2, num_experts_per_tok=1)
    layer = from_transformers("gpt_oss", "GptOssDecoderLayer", config, 0)
    layer.mlp = TupleMLP()
    return with_rope(layer)


class TupleMLP(nn.Module):
    """In the place of a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x):
        return self.linear(x), None


def transformers_norm(family, name):
    return from_transformers(family, name, C)


def bert_layer():
    return from_transformers("bert", "BertLayer", transformers_config("BertConfig"))


def gpt2_block():
    config = transformers_config("GPT2Config", n_embd=C, n_head=H, n_layer=1)
    return from_transformers("gpt2", "GPT2Block", config)


def diffusers(module, name, *args, **kwargs):
    return getattr(importlib.import_module(f"diffusers.models.{module}"), name)(*args, **kwargs)


def diffusers_norm(name, *args, **kwargs):
    return diffusers("normalization", name, *args, **kwargs)


def wan_block():
    block = diffusers("transformers.transformer_wan", "WanTransformerBlock", C, 48, H, cross_attn_norm=True)
    return Call(block, lambda m, x, text, temb, cos, sin: m(x, text, temb, (cos, sin)))


def token_replace():
    norm = diffusers("transformers.transformer_hunyuan_video", "HunyuanVideoTokenReplaceAdaLayerNormZero", C)
    return Call(norm, lambda m, x, emb, first: m(x, emb, first, 3))


X, EMB, TEXT = (B, L, C), (B, C), (B, 5, C)
ROPE, HALF = (1, L, 1, E), (L, 1, E // 2)
ROTATED = (X, (1, L, E), (1, L, E))
ON_STD = "added to the standard deviation"
BOTH = f"{ON_STD}, not to the variance; also: the variance is unbiased"


@dataclass(frozen=True)
class Row:
    """`inputs` are shapes; `fused` norms, and a word of the reason for each that is declined (with
    `dynamic=True`: `dynamic`, where that differs)."""

    make: Callable[[], nn.Module]
    inputs: tuple = (X,)
    fused: int = 1
    declined: tuple = ()
    dynamic: tuple | None = None


ROWS = {
    "2 FLUX": Row(FluxQKNorm, fused=2),
    "7 diffusers RMSNorm": Row(lambda: diffusers_norm("RMSNorm", C, eps=1e-6)),
    "7 without weight": Row(lambda: diffusers_norm("RMSNorm", C, eps=1e-6, elementwise_affine=False),
                            dynamic=("symbolic",)),
    "8 Wan rope": Row(WanRope, (X, ROPE, ROPE)),
    "8 Wan block": Row(wan_block, (X, TEXT, (B, 6, C), ROPE, ROPE), 7),
    "9 Wan2.1 block": Row(WanOriginal, (X, (B, 6, C)), 3),
    "9 Wan2.1 MLPProj": Row(WanMLPProj, fused=2),
    "10 FP32LayerNorm": Row(lambda: diffusers_norm("FP32LayerNorm", C)),
    "11 AdaLayerNormZero": Row(lambda: Call(diffusers_norm("AdaLayerNormZero", C),
                                            lambda m, x, emb: m(x, emb=emb)), (X, EMB)),
    "11 AdaLayerNormContinuous": Row(
        lambda: diffusers_norm("AdaLayerNormContinuous", C, C, elementwise_affine=False), (X, EMB)),
    "11 SD3.5 two modulates": Row(lambda: diffusers_norm("SD35AdaLayerNormZeroX", C), (X, EMB)),
    "11 spellings": Row(Modulates, (X, (B, 2 * C), X), 3),
    "11 SD3.5 block": Row(lambda: diffusers("attention", "JointTransformerBlock", C, H, E, qk_norm="rms_norm",
                                            use_dual_attention=True), (X, TEXT, EMB), 10),
    "11 FLUX block": Row(lambda: diffusers("transformers.transformer_flux", "FluxTransformerBlock", C, H, E),
                         (X, TEXT, EMB), 8),
    "12 CogVideoX block": Row(lambda: diffusers("transformers.cogvideox_transformer_3d", "CogVideoXBlock",
                                                C, H, E, time_embed_dim=16), (X, TEXT, (B, 16)), 6),
    "12 token replace": Row(token_replace, (X, EMB, EMB)),
    "15, 23 pre-norm block": Row(PreNormBlock, fused=2),
    "16 LlamaRMSNorm": Row(lambda: transformers_norm("llama", "LlamaRMSNorm")),
    "16 Llama layer": Row(llama_layer, ROTATED, 2),
    "16 Qwen3 attention": Row(qwen3_attention, ROTATED, 2),
    "17 GemmaRMSNorm": Row(lambda: transformers_norm("gemma", "GemmaRMSNorm")),
    "17 Gemma2 layer": Row(lambda: llama_layer("Gemma2"), ROTATED, 4),
    "18 GPT-OSS layer": Row(gpt_oss_layer, (X, (1, L, E // 2), (1, L, E // 2)), 2),
    "18 T5LayerNorm": Row(lambda: transformers_norm("t5", "T5LayerNorm")),
    "19 split, RMS": Row(lambda: SplitQKNorm(lambda dim: from_transformers("qwen3", "Qwen3RMSNorm", dim)),
                         (X, HALF, HALF), 2),
    "19 split, LN": Row(lambda: SplitQKNorm(nn.LayerNorm), (X, HALF, HALF), 2),
    "20 BERT fork": Row(BertForkLayerNorm),
    "20 DeBERTa": Row(lambda: transformers_norm("deberta", "DebertaLayerNorm")),
    "20 BERT layer": Row(bert_layer, fused=2),
    "20 std, unbiased": Row(lambda: StdLayerNorm(True), fused=0, declined=(BOTH,)),
    "20 std, biased": Row(lambda: StdLayerNorm(False), fused=0, declined=(ON_STD,)),
    "21 GPT-2 block": Row(gpt2_block, fused=2),
    "22 gated MLP": Row(lambda: GatedMLP(transformers_norm("llama", "LlamaRMSNorm"), False)),
    "22 fused gate_up": Row(lambda: GatedMLP(nn.LayerNorm(C), True)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_model_rows(name, dtype, dynamic):
    row = ROWS[name]
    declined = row.dynamic if dynamic and row.dynamic is not None else row.declined
    fused = row.fused + len(row.declined) - len(declined)
    model = shake(row.make(), dtype)
    inputs = [torch.randn(shape).to(dtype) for shape in row.inputs]
    check_reasons(model, *inputs, fused=fused, declined=declined, dynamic=dynamic)
