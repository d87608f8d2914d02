"""A block like SeedVR's: a video transformer of two streams, video and text, with window attention.

Written after the published description. As there, q, k and v of a stream come packed from one linear layer,
q and k are normalised over the head, and the modulation writes in place. Windows are consecutive runs of
tokens here, and the embedding of the time step is an input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, dim] in fp32, neighbours paired; cos, sin: [tokens, 1, dim]."""
    wide = x.float()
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
    return (wide * cos + torch.stack((-b, a), -1).flatten(-2) * sin).to(x.dtype)


class Stream(nn.Module):
    """The weights of one stream, and what it does with them outside of attention."""

    def __init__(self, width: int, heads: int, head_dim: int, mlp: int):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.norm_q, self.norm_k = nn.LayerNorm(head_dim), nn.LayerNorm(head_dim)
        self.out = nn.Linear(heads * head_dim, width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp), nn.GELU(approximate="tanh"), nn.Linear(mlp, width))
        for name in ("attn", "mlp"):
            for part, mean in (("shift", 0.0), ("scale", 1.0), ("gate", 0.0)):
                value = torch.randn(width) / width ** 0.5 + mean
                self.register_parameter(f"{name}_{part}", nn.Parameter(value))

    def modulated(self, x: torch.Tensor, emb: torch.Tensor, name: str) -> torch.Tensor:
        """Norm, scale and shift of x [tokens, width]; emb is [3, width]."""
        shift, scale, _ = emb
        scale, shift = scale + getattr(self, f"{name}_scale"), shift + getattr(self, f"{name}_shift")
        return getattr(self, f"{name}_norm")(x).mul_(scale).add_(shift)

    def gated(self, x: torch.Tensor, emb: torch.Tensor, name: str) -> torch.Tensor:
        return x.mul_(emb[2] + getattr(self, f"{name}_gate"))

    def packed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, each [tokens, heads, dim], q and k normalised."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return self.norm_q(q), self.norm_k(k), v


class Block(nn.Module):
    def __init__(self, windows: int, **sizes: int):
        super().__init__()
        self.windows = windows
        self.vid, self.txt = Stream(**sizes), Stream(**sizes)

    def attention(self, vid, txt, cos, sin):
        """Each window attends to itself and the text; the text's result is the mean over the windows."""
        q, k, v = self.vid.packed(vid)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        joint = [torch.cat((a.unflatten(0, (self.windows, -1)), b.expand(self.windows, -1, -1, -1)), 1)
                 for a, b in zip((q, k, v), self.txt.packed(txt))]
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in joint)).transpose(1, 2).flatten(2)
        vid, txt = mixed.split((mixed.shape[1] - txt.shape[0], txt.shape[0]), 1)
        return self.vid.out(vid.flatten(0, 1)), self.txt.out(txt.mean(0))

    def forward(self, vid, txt, emb, cos, sin):
        mixed = self.attention(self.vid.modulated(vid, emb[0], "attn"),
                               self.txt.modulated(txt, emb[0], "attn"), cos, sin)
        vid = self.vid.gated(mixed[0], emb[0], "attn") + vid
        txt = self.txt.gated(mixed[1], emb[0], "attn") + txt
        vid = self.vid.gated(self.vid.mlp(self.vid.modulated(vid, emb[1], "mlp")), emb[1], "mlp") + vid
        txt = self.txt.gated(self.txt.mlp(self.txt.modulated(txt, emb[1], "mlp")), emb[1], "mlp") + txt
        return vid, txt


class SeedVR(nn.Module):
    """`layers` blocks. forward(vid [tokens, width], txt [tokens, width], emb [2, 3, width], angles
    [tokens, 1, head_dim] in fp32) -> vid, txt."""

    def __init__(self, layers: int, windows: int, **sizes: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(windows, **sizes) for _ in range(layers))

    def forward(self, vid, txt, emb, angles):
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            vid, txt = block(vid, txt, emb, cos, sin)
        return vid, txt
