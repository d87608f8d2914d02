"""Results that a later cat takes: written to their place in it, the parts made later are copied."""

import pytest
import torch
from checks import check
from torch import fx, nn
from torch.nn import functional as F

from ascend_ln_fuse import kernel_info, last_reports
from ascend_ln_fuse import rewrite as rewriting
from ascend_ln_fuse.backend import Options, fuse
from ascend_ln_fuse.cat_site import CatNode
from ascend_ln_fuse.graph import Lens
from ascend_ln_fuse.kernels import ops
from ascend_ln_fuse.kernels.chain_ops import chain_runner
from ascend_ln_fuse.kernels.placed import rest_call
from ascend_ln_fuse.kernels.settings import INTERPRET
from ascend_ln_fuse.patterns import cat_places, cats
from ascend_ln_fuse.select import Taken

C, T = 32, 6
NOTE = "written to its place in the result of a later torch.cat"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cats, "LEAST_BYTES", 1)
    monkeypatch.setattr(cat_places, "LEAST_RUN", 1)
    monkeypatch.setattr(cat_places, "FEW_ROWS", 0)


@pytest.fixture
def kernels(monkeypatch):
    """Regions run as kernels, in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv(INTERPRET, "1")
    caches = ops.runner, chain_runner
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


class Single(nn.Module):
    """FLUX's single block: attention and feed-forward read one norm, one product reads both."""

    def __init__(self, between=None):
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(C, elementwise_affine=False), nn.Linear(C, 3 * C)
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))
        self.mlp, self.act, self.out = nn.Linear(C, 4 * C), nn.GELU(approximate="tanh"), nn.Linear(5 * C, C)

    def attention(self, h):
        return F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))

    def joined(self, h):
        mlp = self.act(self.mlp(h))
        return torch.cat([self.attention(h), mlp], dim=2)

    def forward(self, x, c):
        shift, scale, gate = self.modulation(F.silu(c))[:, None].chunk(3, -1)
        h = self.norm(x) * (1 + scale) + shift
        return x + gate * self.out(self.joined(h))


class Sliced(Single):
    """HunyuanVideo's: attention reads image and text apart."""

    def joined(self, h):
        mlp = self.act(self.mlp(h))
        image, text = self.attention(h[:, :-2]), self.attention(h[:, -2:])
        return torch.cat([torch.cat([image, text], 1), mlp], 2)


class LaterMlp(Single):
    """The feed-forward layer is written down behind attention."""

    def joined(self, h):
        attention = self.attention(h)
        return torch.cat([self.act(self.mlp(h)), attention], -1)


class Gated(Single):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(C, 4 * C)

    def joined(self, h):
        return torch.cat([self.attention(h), F.silu(self.mlp(h)) * self.up(h)], 2)


class Dropped(Single):
    """Dropout in eval mode stands between."""

    def joined(self, h):
        mlp = F.dropout(self.act(self.mlp(h)), 0.1, self.training)
        return torch.cat([self.attention(h), mlp], 2)


class Rows(Single):
    """Along the tokens, where the part is one run of memory."""

    def __init__(self):
        super().__init__()
        self.text = nn.Linear(C, 4 * C)

    def forward(self, x, c):
        mlp = self.act(self.mlp(self.norm(x)))
        return torch.cat([self.text(c)[:, None].expand(-1, 2, -1), mlp], 1)


class NoProduct(Single):
    """A norm's site without a chain."""

    def __init__(self):
        super().__init__()
        self.out, self.plain = nn.Linear(C + C // 2, C), nn.Linear(C, C // 2)

    def forward(self, x, c):
        h = F.silu(self.norm(x)) * 0.5
        return self.out(torch.cat([self.plain(c)[:, None].expand(-1, x.shape[1], -1), h], 2))


class TwoResults(Single):
    """One kernel writes the sum that others read, and a norm that the cat takes."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(C, C // 2)

    def forward(self, x, c):
        x = x + self.modulation(c)[:, None, :C]
        return x, torch.cat([torch.sin(self.narrow(x)), self.norm(x)], 2)


class WrittenAfter(Single):
    """What the cat yields is written in place: nobody else has that memory."""

    def forward(self, x, c):
        h = self.norm(x)
        both = self.joined(h)
        both[:, 0] = 0
        return both.mul_(2), h


MODELS = {"flux": Single, "hunyuan": Sliced, "later": LaterMlp, "gated": Gated, "dropped": Dropped,
          "rows": Rows, "no product": NoProduct, "two results": TwoResults, "written after": WrittenAfter}


def data(dtype=torch.float32, batch=2):
    torch.manual_seed(0)
    return torch.randn(batch, T, C, dtype=dtype), torch.randn(batch, C, dtype=dtype)


def placed() -> int:
    """How many sites of the last graph write to their place in a cat."""
    return sum(NOTE in site.note for site in last_reports()[-1].sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype):
    check(MODELS[name]().to(dtype), *data(dtype), fused=1)
    assert placed() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_kernels(name, dtype, kernels):
    check(MODELS[name]().to(dtype), *data(dtype), fused=1)
    assert placed() == 1
    assert not [site.fallback_words() for site in last_reports()[-1].sites if site.fallback_words()]


@pytest.mark.parametrize("name", MODELS)
def test_dynamic_sizes(name, kernels):
    """Sizes may vary but along the cat; later calls bring others."""
    model = MODELS[name]().eval()
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=True, options={"report": "off"})
    with torch.no_grad():
        for batch, tokens in ((2, 6), (3, 6), (2, 7), (2, 6)):
            x, c = torch.randn(batch, tokens, C), torch.randn(batch, C)
            ours, eager = compiled(x, c), model(x, c)
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert placed() == (name != "rows")  # along which sizes vary


def test_warm_calls_share_no_memory(kernels):
    """Each call has a result of its own, complete, in a tensor as large as itself."""
    class Joined(Single):
        def forward(self, x, c):
            return self.joined(self.norm(x))

    model = Joined().eval()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    xs = [torch.randn(2, T, C) for _ in range(4)]
    with torch.no_grad():
        ours = [compiled(x, None) for x in xs]
        eager = [model(x, None) for x in xs]
    assert placed() == 1
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert len({y.data_ptr() for y in ours}) == len(ours)
    for y in ours:
        assert y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes


def test_the_product_comes_first():
    """What is written in its place is made before other products, whose results would be there besides."""
    check(Single(), *data(), fused=1)
    assert [site.chain for site in last_reports()[-1].sites] == ["linear -> gelu_tanh -> linear x3"]


def test_gradients(kernels):
    """Compiled without gradients, called with them, and the other way round."""
    model = Single()
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})
    with torch.no_grad():
        compiled(*data())
    assert placed() == 1
    found = []
    for call in (model, compiled):
        found.append(torch.autograd.grad(call(*data()).square().sum(), list(model.parameters())))
    assert placed() == 0
    for ours, eager in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{"inner": "aot_eager"}, {"inner": "inductor"}], ids=str)
def test_other_compilers(options):
    check(Single(), *data(), fused=1, backend_options=options)
    assert placed() == 0


# What stays


class ReadTwice(Single):
    def joined(self, h):
        mlp = self.act(self.mlp(h))
        return torch.cat([self.attention(h), mlp], 2) * (1 + mlp.mean())


class Yielded(Single):
    def forward(self, x, c):
        h = self.norm(x)
        mlp = self.act(self.mlp(h))
        return torch.cat([self.attention(h), mlp], 2), mlp


class InTwoCats(Single):
    def joined(self, h):
        mlp = self.act(self.mlp(h))
        attention = self.attention(h)
        return torch.cat([attention, mlp], 2) + torch.cat([mlp, attention], 2)


class TwiceInOne(Single):
    def forward(self, x, c):
        mlp = self.act(self.mlp(self.norm(x)))
        return torch.cat([mlp, mlp], 2)


class SmallShare(Single):
    def __init__(self):
        super().__init__()
        self.mlp, self.out = nn.Linear(C, C // 2), nn.Linear(C + C // 2, C)


class OfTwoDtypes(Single):
    def forward(self, x, c):
        h = self.norm(x)
        return torch.cat([self.attention(h).double(), self.act(self.mlp(h))], 2)


class NotContiguous(Single):
    """Eager's result lies in memory as its parts do."""

    def forward(self, x, c):
        pixels = x.view(2, 2, 3, C)
        return torch.cat([t.permute(0, 3, 1, 2) for t in (pixels, F.silu(self.norm(pixels)))], 1)


class Reshaped(Single):
    """A view of the result is what the cat takes."""

    def forward(self, x, c):
        h = self.norm(x)
        return torch.cat([t.unflatten(2, (2, -1)) for t in (self.attention(h), self.act(self.mlp(h)))], 3)


class GradModeBetween(Single):
    def joined(self, h):
        mlp = self.act(self.mlp(h))
        attention = self.attention(h)
        with torch.enable_grad():
            return torch.cat([attention, mlp], 2)


STAY = {"read twice": ReadTwice, "yielded": Yielded, "in two cats": InTwoCats, "twice in one": TwiceInOne,
        "small share": SmallShare, "two dtypes": OfTwoDtypes, "not contiguous": NotContiguous,
        "reshaped": Reshaped}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name, kernels):
    check(STAY[name](), *data(), fused=1)
    assert placed() == 0


def test_grad_mode_switched_between():
    model = GradModeBetween()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    check(model, *data(), fused=1)
    assert placed() == 0


@pytest.mark.parametrize("name, just, beyond", [("LEAST_RUN", 4 * C * 4, 4 * C * 4 + 1),
                                                ("FEW_ROWS", 2 * T - 1, 2 * T), ("LEAST_SHARE", 0.8, 0.81)])
def test_limits(name, just, beyond, monkeypatch):
    for value, count in ((just, 1), (beyond, 0)):
        torch._dynamo.reset()
        monkeypatch.setattr(cat_places, name, value)
        check(Single(), *data(), fused=1)
        assert placed() == count


def test_few_rows_without_a_product(monkeypatch):
    monkeypatch.setattr(cat_places, "FEW_ROWS", 1 << 20)
    check(NoProduct(), *data(), fused=1)
    assert placed() == 1


def test_small_cats_stay(monkeypatch):
    monkeypatch.setattr(cats, "LEAST_BYTES", 1 << 20)
    check(Single(), *data(), fused=1)
    assert placed() == 0


class Peak(Single):
    """Attention written out, whose scores are the peak: with the whole result there it would be higher."""

    def attention(self, h):
        scores = torch.softmax(self.q(h).repeat(1, 9, 1) @ self.k(h).repeat(1, 9, 1).transpose(1, 2), -1)
        return scores[:, :T] @ self.v(h).repeat(1, 9, 1)


def test_a_higher_peak_stays():
    check(Peak(), *data(), fused=1)
    assert placed() == 0


def test_what_is_allocated_early_counts_for_the_next():
    """Half of x more fits below the peak of 4 x, which is at the end, but not twice."""
    def f(x):
        a, b = x.sin(), x.cos()
        high = torch.cat([x, x[:16]]).sum()
        return torch.cat([a, x[:32]]), torch.cat([b, x[:32]]), high

    found = []
    torch.compile(f, backend=lambda gm, _: (found.append(gm.graph), gm.forward)[1])(torch.randn(64))
    lens = Lens(*found)
    sin, cos = (next(node for node in lens.nodes if node.target == name) for name in ("sin", "cos"))
    parts = [cat_places._Part(CatNode(*node.users, (), 0), 0, node, (), None) for node in (sin, cos)]
    memory = cat_places._Memory(lens, Taken(lens))
    assert all(map(memory.takes, parts))
    memory.note(parts[0])
    assert not memory.takes(parts[1])


def test_the_fused_graph_says_what_its_nodes_yield(kernels):
    """The chain yields the whole, and its node's fake is as large."""
    seen = []

    class Checked(fx.Interpreter):
        def run_node(self, node):
            result, fake = super().run_node(node), node.meta.get("example_value")
            if isinstance(result, torch.Tensor) and fake is not None:
                seen.append(node.name)
                assert result.shape == fake.shape and result.stride() == fake.stride(), node
            return result

    def backend(gm, _):
        return Checked(fx.GraphModule(gm, fuse(gm.graph, Options(report="off")).graph)).run

    with torch.no_grad():
        torch.compile(Single().eval(), backend=backend)(*data())
    assert len(seen) > 10


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Single(), Sliced()])

    def forward(self, x, c):
        for block in self.blocks:
            x = block(x, c)
        return x


def test_two_blocks(kernels):
    check(TwoBlocks().bfloat16(), *data(torch.bfloat16), fused=2)
    assert placed() == 2


def test_kernel_info_knows_the_strides(kernels):
    """The kernel that is listed is the one that runs: its rows lie apart."""
    with torch.no_grad():
        sources = {entry.name for entry in kernel_info(Single(), data()).kernels if "gelu" in entry.region}
    check(Single(), *data(), fused=1)
    site, = last_reports()[-1].sites
    assert sources == {call.kernel().name for call in site.calls_behind}
    assert [call.places for call in site.calls_behind] == [((T * 5 * C, 5 * C, 1),)]


# Parts that are copies themselves


class Heads(Single):
    """Attention over heads: what it yields is copied to make one lane of them."""

    def merged(self, x):
        return x.transpose(1, 2).flatten(2)

    def attention(self, h):
        q, k, v = (p(h).unflatten(2, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.merged((q.softmax(-1) @ k.transpose(2, 3).softmax(-1)) @ v)


class CopiedAndViewed(Heads):
    def merged(self, x):
        batch, _, tokens, _ = x.shape
        return x.transpose(1, 2).contiguous().view(batch, tokens, -1)


class Slices(Heads):
    """HunyuanVideo's: image and text are taken apart, and put together again."""

    def merged(self, x):
        merged = x.transpose(1, 2).flatten(2).to(x.dtype)
        return torch.cat([merged[:, :-2], merged[:, -2:]], 1)


class SlicesExchanged(Heads):
    def merged(self, x):
        merged = x.transpose(1, 2).flatten(2)
        return torch.cat([merged[:, 2:], merged[:, :2]], 1)


class NotAllSlices(Heads):
    def merged(self, x):
        merged = x.transpose(1, 2).flatten(2)
        return torch.cat([merged[:, :2], merged[:, 1:-1]], 1)


class MergedReadTwice(Heads):
    def joined(self, h):
        mlp = self.act(self.mlp(h))
        attention = self.attention(h)
        return torch.cat([attention, mlp], 2) + attention.mean()


class WrittenBetween(Heads):
    """What was copied is written before the cat."""

    def merged(self, x):
        merged = x.transpose(1, 2).flatten(2)
        x[:, 0] = 0
        return merged + 0 * x.mean()


class WrittenBehind(Heads):
    """The same, and the copy is what the cat takes."""

    def joined(self, h):
        mlp = self.act(self.mlp(h))
        q, k, v = (p(h).unflatten(2, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        merged = x.transpose(1, 2).flatten(2)
        x[:, 0] = 0
        return torch.cat([merged, mlp], 2) + x.mean()


class PartOfLarger(Heads):
    """A copy of a few elements of something large, which need not stay."""

    def merged(self, x):
        return x.repeat(1, 1, 2, 1)[:, :, :x.shape[2]].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("make, dims", [
    (Heads, 4), (CopiedAndViewed, 4), (Slices, 4), (SlicesExchanged, 3), (NotAllSlices, 3),
    (MergedReadTwice, 3), (WrittenBetween, 3), (WrittenBehind, 4), (PartOfLarger, 3)])
def test_a_copy_of_a_copy(make, dims, kernels, monkeypatch):
    """dims: of what is read for the other part: 4 where heads are copied to their place at once."""
    read = []
    monkeypatch.setattr(rewriting, "rest_call", lambda rest: lambda *parts: (
        read.append([x.dim() for x in parts]), rest_call(rest)(*parts))[1])
    check(make(), *data(), fused=1)
    assert placed() == 1
    assert read == [[dims, 3]]


# Models of diffusers


def flux():
    """(block, its inputs): FLUX's own single block."""
    from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

    angles = torch.randn(T + 3, 16)
    inputs = torch.randn(1, T, C), torch.randn(1, 3, C), torch.randn(1, C), (angles.cos(), angles.sin())
    return FluxSingleTransformerBlock(C, 2, 16), inputs


def hunyuan():
    """HunyuanVideo's own single block."""
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoSingleTransformerBlock

    angles = torch.randn(T, 16)
    inputs = torch.randn(1, T, C), torch.randn(1, 3, C), torch.randn(1, C), None, (angles.cos(), angles.sin())
    return HunyuanVideoSingleTransformerBlock(2, 16), inputs


@pytest.mark.parametrize("interpreted", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("make", [flux, hunyuan])
def test_single_blocks_of_diffusers(make, interpreted, request):
    pytest.importorskip("diffusers")
    if interpreted:
        request.getfixturevalue("kernels")
    torch.manual_seed(0)
    block, inputs = make()
    inputs = [x.bfloat16() if isinstance(x, torch.Tensor) else x for x in inputs]
    check(block.bfloat16(), *inputs, fused=3, exact=False)
    assert placed() == 1
    assert not [site.fallback_words() for site in last_reports()[-1].sites if site.fallback_words()]
