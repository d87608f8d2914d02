"""Models whose residual stream lies across memory, and their graphs with it laid out."""

import torch
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse.draft import Draft
from ascend_ln_fuse.effects import tensors_of, value_of
from ascend_ln_fuse.streams import lay_out_streams

BATCH, WIDTH = 2, 16
NOTE = "1 stream that lies across memory is copied where it begins: {} norms read rows"
NOISE = torch.Generator()
CONV = nn.Conv2d(WIDTH, WIDTH, 3, padding=1).requires_grad_(False)


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=NOISE.manual_seed(sum(shape))).to(dtype)


def video(dtype=torch.float32, frames=4, size=8):
    return randn(BATCH, 3, frames, size, size, dtype=dtype)


POSITIONS = randn(1, 64, WIDTH)


class Block(nn.Module):
    """A block of diffusers' HunyuanVideo with an image stream alone (transformer_hunyuan_video.py)."""

    def __init__(self, norm=F.layer_norm):
        super().__init__()
        self.norm = norm
        self.emb, self.attn, self.ff = (nn.Linear(WIDTH, n * WIDTH) for n in (6, 1, 1))

    def forward(self, hidden, temb):
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.emb(temb)[:, None].chunk(6, dim=-1)
        attn = self.attn(self.norm(hidden, (WIDTH,)) * (1 + scale) + shift)
        hidden = hidden + attn * gate
        ff = self.ff(F.silu(self.norm(hidden, (WIDTH,)) * (1 + scale_mlp) + shift_mlp))
        return hidden + gate_mlp * ff


class Video(nn.Module):
    """`between` is done with the tokens in front of the blocks, `behind` with what the blocks yield."""

    def __init__(self, between=lambda x: x, behind=lambda x: F.layer_norm(x, (WIDTH,)), norm=F.layer_norm):
        super().__init__()
        self.between, self.behind = between, behind
        self.patch = nn.Conv3d(3, WIDTH, (1, 2, 2), stride=(1, 2, 2))
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.temb = nn.Parameter(randn(BATCH, WIDTH))

    def forward(self, x):
        hidden = self.between(self.patch(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            hidden = block(hidden, self.temb)
        return self.behind(hidden)


def model(*args, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    return Video(*args, **kwargs).to(dtype).eval()


class Honest(torch.fx.Interpreter):
    """Runs a graph; what nodes yield must lie in memory as their fakes say."""

    def run_node(self, node):
        result = super().run_node(node)
        if node.op == "output":
            return result
        for real, fake in zip(tensors_of(result), tensors_of(value_of(node)), strict=True):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype), node
            assert real.storage_offset() == fake.storage_offset(), node
        return result


def graph_of(f, *inputs, grad=False):
    found = []
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(f, backend=lambda gm, _: found.append(gm.graph) or gm.forward)(*inputs)
    graph, = found
    return graph


def without_streams_across(graph):
    """(the graph with its streams laid out, the notes on them)"""
    draft = Draft(graph)
    notes = lay_out_streams(draft)
    return draft.graph, notes


# -- what may see how a stream lies


@torch.library.custom_op("stream_cases::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@torch._dynamo.allow_in_graph
def unknown(x):
    return x * 2


def image(x):
    return x + CONV(x.transpose(1, 2).unflatten(2, (8, 8))).flatten(2).transpose(1, 2)


# -- the pass on them


def notes_of(f, *inputs, grad=False):
    """The notes on the streams of the one graph of a function."""
    graph = graph_of(f, *inputs, grad=grad)
    return without_streams_across(graph)[1]


def close(a, b):
    torch.testing.assert_close(a, b)
    return True


def laid_out(f, *inputs, same=torch.equal, grad=False):
    """The note on what is laid out of a function whose graph, streams laid out, yields what eager does; ""
    where nothing is."""
    said = []

    def lay_out(gm, _):
        graph, notes = without_streams_across(gm.graph)
        said.append("" if graph is gm.graph else notes[0])
        return Honest(torch.fx.GraphModule(gm, graph)).run

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        ours, eager = (call(*map(torch.clone, inputs)) for call in (torch.compile(f, backend=lay_out), f))
    for a, b in zip(tensors_of(ours), tensors_of(eager), strict=True):
        assert same(a, b) and a.stride() == b.stride()
    note, = said
    return note
