"""Norms as models spell them: rows of the project's table of model patterns (those that are not in
test_library_norm.py), from the models' own code or classes, at tiny sizes."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from checks import assert_within_bound, fresh, tensors
from einops import rearrange
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.kernels.region import parse

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, L, H, E = 2, 7, 4, 8  # batch, tokens, heads, head size
C = H * E


class Wide(TorchFunctionMode):
    """Runs a model in float64 whatever dtypes it names: the exact result."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("float", "half", "bfloat16"):
            func = torch.Tensor.double
        args, kwargs = tree_map(
            lambda x: torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x,
            (args, kwargs or {}))
        return func(*args, **kwargs)


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def shake(module: nn.Module, dtype) -> nn.Module:
    """`module` in `dtype` with random parameters, in eval mode."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return module.to(dtype).eval()


def check_row(model, inputs, dynamic, fused, declined):
    """Compare the compiled model with eager and float64, and count the norms: `fused`, and the reasons of
    the others in order."""
    compiled = torch.compile(model, backend="ascend_ln_fuse", fullgraph=True, dynamic=dynamic or None,
                             options={"report": "off"})
    with torch.no_grad():
        eager, ours = tensors(model(*map(fresh, inputs))), tensors(compiled(*map(fresh, inputs)))
        with Wide():
            exact = tensors(copy.deepcopy(model).double()(*tree_map(double, inputs)))
    assert len(ours) == len(eager) == len(exact)
    for a, b, c in zip(ours, eager, exact):
        assert_within_bound(a, b, c)
    report = last_reports()[-1]
    assert report.error is None
    found = [len(parse(site.region).norms) for site in report.sites if site.status == "fused"]
    reasons = [site.reason for site in report.sites if site.status != "fused"]
    assert sum(found) == fused, (found, reasons)
    assert len(reasons) == len(declined), reasons
    assert all(want in reason for want, reason in zip(declined, reasons)), reasons


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


class First(nn.Module):
    """A module of a library, called as its model calls it."""

    def __init__(self, module, *args, **kwargs):
        super().__init__()
        self.module, self.args, self.kwargs = module, args, kwargs

    def forward(self, *inputs):
        return self.module(*inputs, *self.args, **self.kwargs)


def transformers_config(name, **more):
    import transformers

    sizes = {"hidden_size": C, "num_attention_heads": H, "num_hidden_layers": 1, "intermediate_size": 48,
             "vocab_size": 32} | more
    config = getattr(transformers, name)(**sizes)
    config._attn_implementation = "sdpa"
    return config


def from_transformers(module, name, *args, **kwargs):
    import importlib

    return getattr(importlib.import_module(f"transformers.models.{module}"), name)(*args, **kwargs)


def qwen3_attention():
    config = transformers_config("Qwen3Config", num_key_value_heads=2, head_dim=E)
    return First(from_transformers("qwen3.modeling_qwen3", "Qwen3Attention", config, 0))


class Rotary(nn.Module):
    """(x, cos, sin) for attention layers that take the embeddings as a pair."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, cos, sin):
        return self.layer(x, position_embeddings=(cos, sin), attention_mask=None)


def gpt_oss_layer():
    config = transformers_config("GptOssConfig", num_key_value_heads=2, head_dim=E, num_local_experts=2,
                                 num_experts_per_tok=1)
    layer = from_transformers("gpt_oss.modeling_gpt_oss", "GptOssDecoderLayer", config, 0)
    layer.mlp = TupleMLP()
    return Rotary(layer)


class TupleMLP(nn.Module):
    """In the place of a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x):
        return self.linear(x), None


def llama_layer(family="Llama", **more):
    config = transformers_config(f"{family}Config", num_key_value_heads=2, head_dim=E, **more)
    module = family.lower()
    return Rotary(from_transformers(f"{module}.modeling_{module}", f"{family}DecoderLayer", config, 0))


def bert_layer():
    return from_transformers("bert.modeling_bert", "BertLayer", transformers_config("BertConfig"))


def gpt2_block():
    config = transformers_config("GPT2Config", n_embd=C, n_head=H, n_layer=1)
    return from_transformers("gpt2.modeling_gpt2", "GPT2Block", config)


def norm_of(module, name, *args, **kwargs):
    return lambda: from_transformers(module, name, *args, **kwargs)


def diffusers_norm(name, *args, **kwargs):
    def make():
        from diffusers.models import normalization

        return getattr(normalization, name)(*args, **kwargs)
    return make


def wan_block():
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    block = WanTransformerBlock(C, 48, H, cross_attn_norm=True)

    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x, text, temb, cos, sin):
            return self.block(x, text, temb, (cos, sin))

    return Call()


def cogvideox_block():
    from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock

    return CogVideoXBlock(C, H, E, time_embed_dim=16)


def sd35_block():
    from diffusers.models.attention import JointTransformerBlock

    return JointTransformerBlock(C, H, E, qk_norm="rms_norm", use_dual_attention=True)


def flux_block():
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    return FluxTransformerBlock(C, H, E)


def token_replace():
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTokenReplaceAdaLayerNormZero

    return First(HunyuanVideoTokenReplaceAdaLayerNormZero(C), 3)


X, EMB, TEXT = (B, L, C), (B, C), (B, 5, C)
ROPE = (1, L, 1, E)
UNBIASED, ON_STD = "unbiased", "added to the standard deviation"


@dataclass(frozen=True)
class Row:
    """`inputs` are shapes; `fused` norms, and a word of the reason for each that is declined."""

    make: object
    inputs: tuple = (X,)
    fused: int = 1
    declined: tuple = field(default=())


ROWS = {
    "2 FLUX": Row(FluxQKNorm, fused=2),
    "7 diffusers RMSNorm": Row(diffusers_norm("RMSNorm", C, eps=1e-6)),
    "7 without weight": Row(diffusers_norm("RMSNorm", C, eps=1e-6, elementwise_affine=False)),
    "8 Wan rope": Row(WanRope, (X, ROPE, ROPE)),
    "8 Wan block": Row(wan_block, (X, TEXT, (B, 6, C), ROPE, ROPE), 7),
    "9 Wan2.1 block": Row(WanOriginal, (X, (B, 6, C)), 3),
    "9 Wan2.1 MLPProj": Row(WanMLPProj, fused=2),
    "10 FP32LayerNorm": Row(diffusers_norm("FP32LayerNorm", C)),
    "11 AdaLayerNormZero": Row(lambda: First(diffusers_norm("AdaLayerNormZero", C)(), None, None, None),
                               (X, EMB)),
    "11 AdaLayerNormContinuous": Row(
        diffusers_norm("AdaLayerNormContinuous", C, C, elementwise_affine=False), (X, EMB)),
    "11 SD3.5 two modulates": Row(diffusers_norm("SD35AdaLayerNormZeroX", C), (X, EMB)),
    "11 spellings": Row(Modulates, (X, (B, 2 * C), X), 3),
    "11 SD3.5 block": Row(sd35_block, (X, TEXT, EMB), 10),
    "11 FLUX block": Row(flux_block, (X, TEXT, EMB), 8),
    "12 CogVideoX block": Row(cogvideox_block, (X, TEXT, (B, 16)), 6),
    "12 token replace": Row(token_replace, (X, EMB, EMB)),
    "15, 23 pre-norm block": Row(PreNormBlock, fused=2),
    "16 LlamaRMSNorm": Row(norm_of("llama.modeling_llama", "LlamaRMSNorm", C)),
    "16 Llama layer": Row(llama_layer, (X, (1, L, E), (1, L, E)), 2),
    "16 Qwen3 attention": Row(lambda: Rotary(qwen3_attention().module), (X, (1, L, E), (1, L, E)), 2),
    "17 GemmaRMSNorm": Row(norm_of("gemma.modeling_gemma", "GemmaRMSNorm", C)),
    "17 Gemma2 layer": Row(lambda: llama_layer("Gemma2"), (X, (1, L, E), (1, L, E)), 4),
    "18 GPT-OSS layer": Row(gpt_oss_layer, (X, (1, L, E // 2), (1, L, E // 2)), 2),
    "18 T5LayerNorm": Row(norm_of("t5.modeling_t5", "T5LayerNorm", C)),
    "19 split, RMS": Row(lambda: SplitQKNorm(norm_of("qwen3.modeling_qwen3", "Qwen3RMSNorm", E)),
                         (X, (L, 1, E // 2), (L, 1, E // 2)), 2),
    "19 split, LN": Row(lambda: SplitQKNorm(nn.LayerNorm), (X, (L, 1, E // 2), (L, 1, E // 2)), 2),
    "20 BERT fork": Row(BertForkLayerNorm),
    "20 DeBERTa": Row(norm_of("deberta.modeling_deberta", "DebertaLayerNorm", C)),
    "20 BERT layer": Row(bert_layer, fused=2),
    "20 std, unbiased": Row(lambda: StdLayerNorm(True), fused=0, declined=(UNBIASED,)),
    "20 std, biased": Row(lambda: StdLayerNorm(False), fused=0, declined=(ON_STD,)),
    "21 GPT-2 block": Row(gpt2_block, fused=2),
    "22 gated MLP": Row(lambda: GatedMLP(norm_of("llama.modeling_llama", "LlamaRMSNorm", C)(), False)),
    "22 fused gate_up": Row(lambda: GatedMLP(nn.LayerNorm(C), True)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_model_rows(name, dtype, dynamic):
    row = ROWS[name]
    model = shake(row.make(), dtype)
    check_row(model, [torch.randn(shape).to(dtype) for shape in row.inputs], dynamic, row.fused, row.declined)
