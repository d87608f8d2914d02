"""Cats of all slices of a value are left out, where nobody could tell."""

import pytest
import torch
from checks import check
from torch import nn

from ascend_ln_fuse import last_reports
from ascend_ln_fuse.backend import Options, fuse
from ascend_ln_fuse.graph import Lens
from ascend_ln_fuse.slices import without_needless_cats

C, T = 16, 6


class Blocks(nn.Module):
    """FLUX's: text and image are taken apart behind a block, and joined in front of the next."""

    def __init__(self, apart, between=None, dim=1):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(2))
        self.linear = nn.ModuleList(nn.Linear(C, C) for _ in range(2))
        self.apart, self.between, self.dim = apart, between, dim

    def block(self, i, h):
        return h + self.linear[i](self.norms[i](h))

    def forward(self, x, y):
        h = self.block(0, torch.cat([x, y], self.dim))
        parts = self.apart(h)
        joined = torch.cat(parts, self.dim)
        more = () if self.between is None else self.between(h, parts, joined)
        return self.apart(self.block(1, joined)), more


def data(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(2, 2, C).to(dtype), torch.randn(2, T - 2, C).to(dtype)


def left(model, *inputs, dynamic=None) -> int:
    """The cats in the fused graph."""
    found = []

    def backend(gm, _):
        graph = fuse(gm.graph, Options(report="off")).graph
        found.append(sum(getattr(node.target, "__name__", "") == "cat" for node in graph.nodes))
        return gm.forward

    torch.compile(model.eval(), backend=backend, dynamic=dynamic)(*inputs)
    return found[0]


APART = {
    "slices": lambda h: (h[:, :2], h[:, 2:]),
    "from behind": lambda h: (h[:, :-4, :], h[:, -4:, :]),
    "three": lambda h: (h[:, :2], h[:, 2:3], h[:, 3:]),
    "split": lambda h: h.split([2, T - 2], 1),
    "chunk": lambda h: h.chunk(2, 1),
    "narrow": lambda h: (h.narrow(1, 0, 2), h.narrow(1, 2, T - 2)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", APART)
def test_all_slices(name, dtype, grad):
    model = Blocks(APART[name]).to(dtype)
    check(model, *data(dtype), fused=2, grad=grad)
    with torch.set_grad_enabled(grad):
        assert left(model, *data(dtype)) == 1


def test_sites_grow_across():
    check(Blocks(APART["slices"]), *data(), fused=2)
    first, second = last_reports()[-1].sites
    assert first.chain == "linear" and second.pattern == "add -> layer_norm"


def test_varying_sizes():
    model = Blocks(lambda h: (h[:, :2], h[:, 2:])).eval()
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=True, options={"report": "off"})
    with torch.no_grad():
        for tokens in (4, 5, 9):
            x, y = torch.randn(2, 2, C), torch.randn(2, tokens, C)
            torch.testing.assert_close(compiled(x, y), model(x, y), rtol=1e-5, atol=1e-5)


def test_a_cat_of_slices_of_a_cat_of_slices():
    class Twice(Blocks):
        def forward(self, x, y):
            h = self.block(0, torch.cat([x, y], 1))
            for cut in (2, 3):
                h = torch.cat([h[:, :cut], h[:, cut:]], 1)
            return self.block(1, h) + h[:, :1]

    check(Twice(None), *data(), fused=2)
    assert left(Twice(None), *data()) == 1


def test_views_of_the_copy_are_views_of_the_value():
    """Their fakes have the copy's memory."""
    def between(h, parts, joined):
        q, k = joined.unflatten(-1, (2, -1)).unbind(2)
        return torch.softmax(q, -1), joined[:, 1:].sin(), k.t() if k.dim() == 2 else k.mT.cos()

    check(Blocks(APART["slices"], between), *data(), fused=2)
    assert left(Blocks(APART["slices"], between), *data()) == 1


def test_a_view_of_the_copy_is_one_of_the_value():
    """Also where that is such a copy itself."""
    def f(x):
        h = x * 2
        for cut in (2, 3):
            h = torch.cat([h[:, :cut], h[:, cut:]], 1)
        return h.unflatten(-1, (2, -1)).sin()

    found = []
    torch.compile(f, backend=lambda gm, _: (found.append(gm.graph), gm.forward)[1])(torch.randn(2, T, C))
    lens = Lens(*without_needless_cats(*found))
    view = next(node for node in lens.nodes if lens.kind(node) == "unflatten")
    assert lens.kind(view.args[0]) == "mul" and lens.is_view(view)
    assert [node.target for node in lens.nodes if node.op == "call_method"] == ["unflatten", "sin"]


@torch._dynamo.allow_in_graph
def unknown(x):
    """Might write what it gets."""
    return x.mul_(2).sum()


def test_an_op_of_which_nothing_is_known():
    model = Blocks(APART["slices"], lambda h, parts, joined: (unknown(joined), h.sum()))
    check(model, *data(), fused=2)
    assert left(model, *data()) == 2


def test_slices_that_others_read():
    check(Blocks(APART["slices"], lambda h, parts, joined: parts[0].sin()), *data(), fused=2)
    assert left(Blocks(APART["slices"], lambda h, parts, joined: parts[0].sin()), *data()) == 1


STAY = {
    "other order": Blocks(lambda h: (h[:, 2:], h[:, :2])),
    "a gap": Blocks(lambda h: (h[:, :2], h[:, 3:])),
    "an overlap": Blocks(lambda h: (h[:, :3], h[:, 2:])),
    "of two": Blocks(lambda h: (h[:, :2], (h * 2)[:, 2:])),
    "another dim": Blocks(lambda h: (h[:1], h[1:])),
    "cut twice": Blocks(lambda h: (h[:, :2, :8], h[:, 2:, :8]), lambda h, parts, joined: 0),
    "steps": Blocks(lambda h: (h[:, ::2], h[:, 1::2])),
    "the copy is yielded": Blocks(APART["slices"], lambda h, parts, joined: joined),
    "a view of it is yielded": Blocks(APART["slices"], lambda h, parts, joined: joined[:, 0]),
    "the copy is written": Blocks(APART["slices"], lambda h, parts, joined: (
        joined[:, 0].zero_(), h.sum())[1]),
    "the value is written": Blocks(APART["slices"], lambda h, parts, joined: (
        h[:, 0].zero_(), joined.sum())[1]),
    "a slice is written": Blocks(APART["slices"], lambda h, parts, joined: (
        parts[0].zero_(), joined.sum())[1]),
    "the copy is updated": Blocks(APART["slices"], lambda h, parts, joined: joined.mul_(2).sum() + h.sum()),
    "the value is updated": Blocks(APART["slices"], lambda h, parts, joined: h.mul_(2).sum() + joined.sum()),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name):
    model = STAY[name]
    if name in ("cut twice", "another dim"):
        model.linear[1], model.norms[1] = nn.Identity(), nn.Identity()
    check(model, *data(), fused=None)
    with torch.no_grad():
        assert left(model, *data()) == 2


class OfInput(nn.Module):
    """The value may share memory with what the caller has."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x, y):
        return self.norm(torch.cat([x[:, :1], x[:, 1:]], 1)) + y[:, :1]


def test_slices_of_an_input_stay():
    check(OfInput(), *data(), fused=1)
    assert left(OfInput(), *data()) == 1


class PartOfLarger(nn.Module):
    """The value is part of something larger, which would stay in memory."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x, y):
        h = torch.sin(x).repeat(3, 1, 1)[:2]
        return self.norm(torch.cat([h[:, :1], h[:, 1:]], 1))


def test_slices_of_a_part_stay():
    check(PartOfLarger(), *data(), fused=1)
    assert left(PartOfLarger(), *data()) == 1


class GradModeBetween(nn.Module):
    """The value is made without gradients, the copy with."""

    def __init__(self, mode=torch.no_grad):
        super().__init__()
        self.norm, self.mode = nn.LayerNorm(C), mode

    def forward(self, x, y):
        with self.mode():
            h = torch.sin(x)
        return self.norm(torch.cat([h[:, :1], h[:, 1:]], 1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_another_grad_mode_between(mode):
    check(GradModeBetween(mode), *data(), fused=None, declined=None, grad=True)
    assert left(GradModeBetween(mode), *data()) == 1


def test_other_compilers_see_for_themselves():
    model = Blocks(APART["slices"])
    check(model, *data(), fused=2, backend_options={"inner": "inductor"})
    assert "add" not in last_reports()[-1].sites[1].pattern
