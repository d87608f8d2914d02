"""A residual stream that lies across memory is laid out once; whatever could be told from outside is left."""

import pytest
import torch
from cat_pieces import compiled
from checks import check
from stream_cases import (
    BATCH,
    CONV,
    NOTE,
    POSITIONS,
    WIDTH,
    close,
    graph_of,
    image,
    laid_out,
    model,
    randn,
    twice,
    unknown,
    video,
    without_streams_across,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_ln_fuse import Options, across, backend, last_reports
from ascend_ln_fuse.draft import Draft
from ascend_ln_fuse.graph import Lens
from ascend_ln_fuse.loading import Example
from ascend_ln_fuse.memory import live_bytes
from ascend_ln_fuse.streams import streams_across
from ascend_ln_fuse.trace import trace


def test_a_video_transformer():
    """(With 16-bit floats the convolution may lay the stream out: test_channels_last.py.)"""
    assert laid_out(model(), video()) == NOTE.format(5)


@pytest.mark.parametrize("between", [
    lambda x: x + POSITIONS,
    lambda x: (x + POSITIONS).to(torch.float64).float(),
    lambda x: F.dropout(x * 0.5, 0.1, False)[:, 3:],
    lambda x: F.dropout(x[:, 3:], 0.1, False),
    lambda x: x.unflatten(1, (4, 16)).flatten(1, 2),
    lambda x: x[:, 3:] + POSITIONS[0, 3:],
    lambda x: x * torch.cat(x.split(8, 1), 1),
    lambda x: x.view(x.shape[0], -1, WIDTH) + torch.reshape(input=x * 2, shape=x.shape),
    lambda x: x - x.mean(1, keepdim=True),
], ids=["position", "casts", "dropout", "dropout of a slice", "views", "slice", "pieces", "shape", "mean"])
def test_in_front_of_the_blocks(between):
    assert laid_out(model(between), video(), same=close) == NOTE.format(5)


def test_two_streams():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = model(), model(norm=F.rms_norm)
            self.text.patch = nn.Conv1d(3, WIDTH, 1)

        def forward(self, x, y):
            return self.image(x), self.text(y)

    assert laid_out(Both(), video(), randn(BATCH, 3, 32), same=close) == \
        "2 streams that lie across memory are copied where they begin: 10 norms read rows"


def written(x, shape):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("norm", [F.rms_norm, written], ids=["rms_norm", "written"])
def test_other_norms(norm):
    assert laid_out(model(norm=norm), video(), same=close) == NOTE.format(5)


@pytest.mark.parametrize("most", [2048, 8], ids=["short rows", "long rows"])
def test_sites_grow_over_the_sums(most, monkeypatch):
    """Long rows that lie across are not walked by kernels; the short ones here would be."""
    monkeypatch.setattr(across, "MAX_ACROSS", most)
    found = {}
    for choice in ("keep", "simplify"):
        torch._dynamo.reset()
        report = check(model(), video(), fused=5, backend_options={"streams": choice})
        found[choice] = [site.pattern.startswith("modulate -> layer_norm") for site in report.sites]
        assert report.notes == ((NOTE.format(5),) if choice == "simplify" else ())
    assert found["simplify"] == [False, True, True, True, True]
    assert any(found["keep"]) == (most == 2048)


# -- what is left as it was


def pixel(tokens):
    return tokens.transpose(1, 2).unsqueeze(2)


@pytest.mark.parametrize("behind", [
    lambda x: x * 2, lambda x: F.gelu(x), lambda x: F.interpolate(pixel(x * 2), size=(4, 4)),
    lambda x: F.conv_transpose2d(pixel(x * 2), torch.ones(WIDTH, 4, 4, 4, dtype=x.dtype) / 8),
], ids=["returned", "gelu", "interpolated", "convolution"])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_token(behind, batch):
    """Fakes are wrong about the strides of dims of one element, from which others take an order in memory."""
    weight, linear = randn(WIDTH, 8, 1, dtype=torch.bfloat16), randn(WIDTH, WIDTH, dtype=torch.bfloat16)

    def f(x):
        hidden = F.conv1d(x, weight).transpose(1, 2)
        for _ in range(4):
            hidden = hidden + F.linear(F.layer_norm(hidden, (WIDTH,)), linear)
        return behind(hidden[:, :1]), F.layer_norm(hidden, (WIDTH,))

    x = randn(batch, 8, 7, dtype=torch.bfloat16)
    with torch.no_grad():
        ours, eager = (call(x)[0] for call in (torch.compile(f, backend="ascend_ln_fuse"), f))
    assert ours.stride() == eager.stride() and close(ours, eager)


def transposed_back(x):
    x = x * 2
    return x + x.transpose(1, 2).reshape(BATCH, -1).view(BATCH, WIDTH, -1).transpose(1, 2)


def by_index(x):
    return x + x[:, torch.arange(64)]


def by_strides(x):
    return x + x.as_strided((WIDTH,), (1,))


def in_place(x):
    x = x * 2
    x += 1
    return x


def first_kept(x):
    return x + x[:1, 0].contiguous()


@pytest.fixture
def long_rows(monkeypatch):
    """Rows are too long to be walked across memory, so a copy saves most."""
    monkeypatch.setattr(across, "MAX_ACROSS", 8)


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize("between", [
    image, transposed_back, by_index, by_strides, in_place, first_kept, twice, unknown,
    lambda x: x + x[True][0],
    lambda x: x + (x * 2).transpose(1, 2).view(BATCH, -1)[:, :1, None],
    lambda x: x + F.normalize(x, dim=1),
    lambda x: x.relu_(),
    lambda x: x * torch.zeros_like(x),
    lambda x: x * x.softmax(1),
    lambda x: x + F.scaled_dot_product_attention(x, x, x),
    lambda x: x + checkpoint(torch.sin, x, use_reentrant=False),
    lambda x: torch.cat([x[:, :1], x], 1),
    lambda x: x.contiguous(),
])
def test_left_for_what_is_done_between(between):
    assert not laid_out(model(between), video())


def test_left_where_dropout_draws():
    """Which element gets which number depends on memory."""
    def f(x, weight):
        hidden = F.conv1d(x, weight).transpose(1, 2)
        for _ in range(3):
            hidden = hidden + F.layer_norm(F.dropout(hidden, 0.5), (WIDTH,))
        return F.layer_norm(hidden, (WIDTH,))

    laid, _ = streams_across(Draft(graph_of(f, randn(BATCH, 3, 8), randn(WIDTH, 3, 1))))
    assert not laid


def copy_in_eager(x):
    """Dropout yields its input, which is a copy in eager, and then would be the stream."""
    y = F.dropout(x.contiguous(), 0.1, False)
    y.mul_(2)
    return y + F.layer_norm(x, (WIDTH,))


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize("behind", [
    copy_in_eager,
    lambda x: x,
    lambda x: (F.layer_norm(x, (WIDTH,)), x[:, :1]),
    lambda x: x.transpose(1, 2) * 2,
    lambda x: x.reshape(BATCH, -1),
], ids=["written", "stream", "piece", "transposed", "reshaped"])
def test_left_where_it_is_returned(behind):
    """Strides are part of what a graph returns."""
    assert not laid_out(model(behind=behind), video())


class Owned(nn.Module):
    """A stream that begins as a view of `base`. Something is done with the base `before` that view is taken
    and `after`; `use` has what is returned."""

    def __init__(self, base=lambda x: x * 2, before=lambda base: None, after=lambda base: None,
                 use=lambda base, last: last):
        super().__init__()
        self.base, self.before, self.after, self.use = base, before, after, use
        self.blocks = model().blocks

    def forward(self, x):
        base = self.base(x)
        self.before(base)
        hidden = base.transpose(1, 2)
        self.after(base)
        for block in self.blocks:
            hidden = block(hidden, hidden.new_ones(BATCH, WIDTH))
        return self.use(base, F.layer_norm(hidden, (WIDTH,)))


@pytest.mark.parametrize("before", [lambda base: None, lambda base: base[:, 0].mul_(2)], ids=["", "written"])
def test_a_stream_of_its_own(before):
    assert laid_out(Owned(before=before), randn(BATCH, WIDTH, 64)) == NOTE.format(5)


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize("options", [
    dict(base=lambda x: x),
    dict(base=lambda x: x[:1].expand(BATCH, -1, -1)),
    dict(use=lambda base, last: (last, base)),
    dict(use=lambda base, last: (last, base[0])),
    dict(use=lambda base, last: last + base.transpose(1, 2)),
    dict(after=lambda base: base.mul_(2)),
    dict(after=lambda base: base[:, 0].zero_()),
    dict(before=unknown),
], ids=["input", "expanded", "returned", "a piece returned", "read later", "written", "a piece written",
        "unknown"])
def test_left_where_the_memory_is_not_its_own(options):
    assert not laid_out(Owned(**options), randn(BATCH, WIDTH, 64))


def test_left_where_gradients_are_recorded():
    video_model = model().requires_grad_(False)
    assert laid_out(video_model, video(), grad=True)
    video_model.blocks[1].requires_grad_()  # the first block may not be told apart
    assert not laid_out(video_model, video(), grad=True)


@pytest.mark.usefixtures("long_rows")
def test_left_in_a_transform():
    def f(x):
        hidden = (x * 2).transpose(0, 1)
        for _ in range(3):
            hidden = hidden + F.layer_norm(hidden, (WIDTH,))
        return F.layer_norm(hidden, (WIDTH,))

    assert laid_out(f, randn(WIDTH, 64))
    assert not laid_out(lambda x: torch.vmap(f)(x), randn(3, WIDTH, 64))


def few(count):
    """A view and a norm of it, and `count` sums with a norm behind each."""
    def f(x):
        hidden = (x * 2).transpose(1, 2)
        out = F.layer_norm(hidden, (WIDTH,))
        for _ in range(count):
            hidden = hidden + out.type_as(hidden)
            out = F.layer_norm(hidden, (WIDTH,))
        return out

    return f


@pytest.mark.parametrize("most, least", [(2048, 3), (8, 1)], ids=["short rows", "long rows"])
def test_costs_decide(most, least, monkeypatch):
    """Short rows are read as they lie; for long ones eager's copies are made."""
    monkeypatch.setattr(across, "MAX_ACROSS", most)
    notes = [bool(laid_out(few(count), randn(BATCH, WIDTH, 64))) for count in range(5)]
    assert notes == [count >= least for count in range(5)]


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.dw, self.fc1, self.fc2 = CONV, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for _ in range(3):
            hidden = F.layer_norm(self.dw(x).permute(0, 2, 3, 1), (WIDTH,))
            x = x + self.fc2(F.gelu(self.fc1(hidden))).permute(0, 3, 1, 2)
        return x


class ClassToken(nn.Module):
    """How a ViT begins: its stream is the result of a cat."""

    def __init__(self):
        super().__init__()
        self.video = model()

    def forward(self, x):
        hidden = self.video.patch(x).flatten(2).transpose(1, 2)
        hidden = torch.cat([hidden.new_zeros(BATCH, 1, WIDTH), hidden], 1)
        for block in self.video.blocks:
            hidden = block(hidden, self.video.temb)
        return hidden


class Decoder(nn.Module):
    """As in a VAE: norms over channels, convolutions, and attention over pixels between them."""

    def forward(self, x):
        for _ in range(3):
            x = x + CONV(F.silu(F.group_norm(x, 4)))
            tokens = F.group_norm(x, 4).flatten(2).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(tokens, tokens, tokens).transpose(1, 2).view(x.shape)
            x = F.normalize(x, dim=1)
        return x


@pytest.mark.parametrize("f, shape", [(ConvNeXt(), (BATCH, WIDTH, 8, 8)), (Decoder(), (BATCH, WIDTH, 8, 8)),
                                      (ClassToken(), (BATCH, 3, 4, 8, 8))], ids=["ConvNeXt", "VAE", "ViT"])
def test_models_that_have_no_such_stream(f, shape):
    assert not laid_out(f.requires_grad_(False), randn(*shape))


# -- sizes that vary, autocast, memory, compilers


@pytest.mark.parametrize("streams", ["simplify", "keep"])
def test_sizes_that_vary(streams, monkeypatch):
    """No guard more: the same graph serves all sizes, as without."""
    graphs = []
    fuse = backend.fuse
    monkeypatch.setattr(backend, "fuse", lambda graph, *a, **k: graphs.append(graph) or fuse(graph, *a, **k))
    video_model = model(lambda x: F.dropout(x * 2, 0.1, False).unflatten(2, (4, -1)).flatten(2)[:, 1:])
    call = torch.compile(video_model, backend="ascend_ln_fuse", dynamic=True,
                         options={"report": "off", "streams": streams})
    torch._dynamo.reset()
    with torch.no_grad():
        for frames, size in ((4, 8), (1, 8), (3, 6), (9, 4), (5, 12)):
            x = video(frames=frames, size=size)
            ours, eager = call(x), video_model(x)
            torch.testing.assert_close(ours, eager)
            assert ours.stride() == eager.stride()
            if len(graphs) == 1:
                assert last_reports()[-1].notes == ((NOTE.format(5),) if streams == "simplify" else ())
    assert len(graphs) == 2  # one frame is a graph of its own


def test_ambient_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert laid_out(model(), video()) == NOTE.format(5)


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize("product, dtype, left", [
    (False, torch.float32, False), (True, torch.bfloat16, False), (True, torch.float32, True)],
    ids=["sums", "product", "casting product"])
def test_autocast_in_the_graph(product, dtype, left):
    """Fakes are made anew outside of the region, where a product that it casts yields another dtype."""
    blocks, weight = model().blocks, randn(WIDTH, WIDTH)

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = (x * 2).transpose(1, 2)
            if product:
                hidden = hidden + F.linear(hidden, weight)
            for block in blocks:
                hidden = block(hidden, hidden.new_ones(BATCH, WIDTH))
            return F.layer_norm(hidden, (WIDTH,))

    assert bool(laid_out(f, randn(BATCH, WIDTH, 64, dtype=dtype))) != left


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_compilers_that_run_what_is_written(inner):
    video_model = model()
    with torch.no_grad():
        ours, eager = compiled(video_model, inner=inner)(video()), video_model(video())
    torch.testing.assert_close(ours, eager)
    assert last_reports()[-1].notes == (NOTE.format(5),)


def test_other_compilers_choose_layouts_themselves():
    with torch.no_grad():
        compiled(model(), inner="inductor")(video())
    assert not last_reports()[-1].notes


def test_explain():
    """On an NPU no kernel walks rows that lie across, long or short."""
    report, = trace(Example(model(), (video(),), {}))
    assert report.notes == (NOTE.format(5),) and report.fused == 5
    report, = trace(Example(model(), (video(),), {}), Options(streams="keep"))
    assert not report.notes


def test_no_more_memory():
    """From the copy on, nothing takes more than it did; at the copy, what the first norm took in eager."""
    graph = graph_of(model(), video())
    laid, _ = without_streams_across(graph)
    used = [dict(zip([node.name for node in lens.nodes], live_bytes(lens, lens.nodes)))
            for lens in map(Lens, (graph, laid))]
    stream = BATCH * 64 * WIDTH * 4
    assert used[1]["clone"] <= used[0]["layer_norm"]
    assert all(used[1][name] <= taken for name, taken in used[0].items() if name != "hidden")
    assert used[0]["hidden"] >= stream
