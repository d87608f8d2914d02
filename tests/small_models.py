"""Models that several tests run."""

from torch import nn
from torch.nn import functional as F


class Projected(nn.Module):
    """Products and norms alone: nothing here makes Inductor compile C++, which takes long."""

    def __init__(self):
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return self.after(self.norm(self.before(x).unbind(1)[1]))


class Attention(nn.Module):
    """Packed qkv, norms on q and k."""

    def __init__(self, heads=4, dim=16):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.qkv = nn.Linear(heads * dim, 3 * heads * dim)
        self.norm_q, self.norm_k = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.dim)).unbind(-3)
        q, k, v = self.norm_q(q).transpose(-2, -3), self.norm_k(k).transpose(-2, -3), v.transpose(-2, -3)
        return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(self.norm(x))
