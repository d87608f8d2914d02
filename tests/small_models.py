"""Models that several tests run."""

from torch import nn


class Projected(nn.Module):
    """Products and norms alone: nothing here makes Inductor compile C++, which takes long."""

    def __init__(self):
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return self.after(self.norm(self.before(x).unbind(1)[1]))
