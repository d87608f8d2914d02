"""Attention masks that are the same in every call are not built; all others stay."""

import pytest
import torch
from checks import assert_within_bound
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import FusionReport, backend, last_reports, masks

TOKENS = 6
AOT = {"report": "off", "inner": "aot_eager"}


def rows_and_columns(x):
    index = torch.arange(x.shape[1], device=x.device)
    return index[:, None], index[None, :]


def causal(x):
    row, column = rows_and_columns(x)
    return (column <= row)[None, None].expand(x.shape[0], 1, -1, -1)


def transformers_causal(x):
    """transformers' (masking_utils): ones, a causal comparison at index tensors, packed sequences."""
    size = x.shape[1]
    positions = (torch.arange(size) + 0).unsqueeze(0).expand(x.shape[0], -1)
    batch, rows, columns = (torch.arange(n) for n in (x.shape[0], size, size))
    batch, rows, columns = batch[:, None, None, None], rows[None, None, :, None], columns[None, None, None]
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    earlier = (positions[batch, columns] <= positions[batch, rows]).to(x.device)
    together = (packed[batch, rows] == packed[batch, columns]).to(x.device)
    return rows.new_ones((), dtype=torch.bool) & earlier & together


def bidirectional(x):
    row, _ = rows_and_columns(x)
    return (row >= 0).expand(x.shape[0], 1, -1, x.shape[1])


def additive(x):
    row, column = rows_and_columns(x)
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(column > row, float("-inf"))


def tril(x):
    """Of a tensor, but not of its values."""
    return torch.ones_like(x[0, :, :x.shape[1]], dtype=torch.bool).tril()


NEEDLESS = {causal: "1 causal", transformers_causal: "1 causal", bidirectional: "1 all True",
            additive: "1 causal", tril: "1 causal"}


def sliding_window(x):
    row, column = rows_and_columns(x)
    return (column <= row) & (row - column < 3)


def almost_causal(x):
    mask = causal(x)
    return mask | (rows_and_columns(x)[1] == x.shape[1] - 1)


def of_the_data(x):
    return (x.sum(-1) > -1e9)[:, None, None, :].expand(-1, 1, x.shape[1], -1)


def written(x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask[:, 0] = True
    return mask


def lowest(x):
    """Not -inf: a row of nothing else would be an average."""
    row, column = rows_and_columns(x)
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(column > row, torch.finfo(torch.float32).min)


def bias(x):
    row, column = rows_and_columns(x)
    return -(row - column).abs().to(x.dtype)


KEPT = (sliding_window, almost_causal, of_the_data, written, lowest, bias)


class Attention(nn.Module):
    def __init__(self, mask, **given):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.mask, self.given = mask, given

    def forward(self, x):
        return self.attend(x).transpose(1, 2).flatten(2)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x), **self.given)


@pytest.fixture
def graphs(monkeypatch):
    """What an inner compiler gets, in order."""
    found = []
    monkeypatch.setattr(backend, "inner_compiler", lambda name: lambda gm, _: found.append(gm.graph) or gm)
    return found


def run(model, *inputs, **options):
    torch.manual_seed(0)
    compiled = torch.compile(model, backend="ascend_ln_fuse", options={"report": "off", **options})
    with torch.no_grad():
        return compiled(*inputs)


def attention(graph):
    return next(node for node in graph.nodes if node.target is F.scaled_dot_product_attention)


@pytest.mark.parametrize("mask", NEEDLESS, ids=lambda mask: mask.__name__)
def test_needless(mask, graphs):
    model, x = Attention(mask), torch.randn(2, TOKENS, 32)
    with torch.no_grad():
        assert_within_bound(run(model, x, inner="aot_eager"), model(x), model.double()(x.double()))
    call, = (node for node in graphs[0].nodes if node.target is F.scaled_dot_product_attention)
    assert call.kwargs.get("attn_mask") is None and len(call.args) == 3
    assert call.kwargs.get("is_causal", False) is ("causal" in NEEDLESS[mask])
    # Nothing is built that nobody reads.
    assert all(node.users for node in graphs[0].nodes if node.op in ("call_function", "call_method"))
    assert not any(node.target in (torch.arange, torch.ones, torch.zeros) for node in graphs[0].nodes)
    assert last_reports()[-1].notes == (
        f"1 attention runs without a mask, which is the same in every call ({NEEDLESS[mask]})",)


@pytest.mark.parametrize("mask", KEPT, ids=lambda mask: mask.__name__)
def test_kept(mask, graphs):
    model, x = Attention(mask), torch.randn(2, TOKENS, 32)
    with torch.no_grad():
        assert_within_bound(run(model, x, inner="aot_eager"), model(x), model.double()(x.double()))
    assert attention(graphs[0]).kwargs["attn_mask"] is not None
    assert not last_reports()[-1].notes


def test_an_option_keeps_them(graphs):
    run(Attention(causal), torch.randn(2, TOKENS, 32), inner="aot_eager", masks="keep")
    assert attention(graphs[0]).kwargs["attn_mask"] is not None


def test_dynamic_sizes_are_kept():
    model = Attention(causal)
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=True, options={"report": "off"})
    with torch.no_grad():
        for tokens in (5, 6, 9):
            x = torch.randn(2, tokens, 32)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(last_reports()) == 1 and not last_reports()[-1].notes


def test_a_new_size_is_a_new_mask():
    model = Attention(causal)
    compiled = torch.compile(model, backend="ascend_ln_fuse", dynamic=False, options={"report": "off"})
    with torch.no_grad():
        for tokens in (5, 6, 1):
            x = torch.randn(2, tokens, 32)
            torch.testing.assert_close(compiled(x), model(x))
    assert [report.notes[0].split("(")[1] for report in last_reports()] == ["1 causal)", "1 causal)",
                                                                            "1 all True)"]


def test_what_else_reads_the_mask_has_it():
    class Returns(Attention):
        def forward(self, x):
            return super().forward(x), causal(x), causal(x).float()

    model, x = Returns(causal), torch.randn(2, TOKENS, 32)
    with torch.no_grad():
        for ours, eager in zip(run(model, x), model(x), strict=True):
            torch.testing.assert_close(ours, eager)


def test_rectangular_causal_is_kept(graphs):
    """`is_causal` has its diagonal in the upper left corner, where the mask is; but not every kernel."""
    def attend(q, k):
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    q, k = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    compiled = torch.compile(attend, backend="ascend_ln_fuse", options=AOT)
    torch.testing.assert_close(compiled(q, k), attend(q, k))
    assert attention(graphs[0]).kwargs["attn_mask"] is not None


def test_positional_arguments_and_a_graph_without_norms(graphs):
    def attend(q, k, v):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.3)

    inputs = torch.randn(3, 2, 4, 8)
    compiled = torch.compile(attend, backend="ascend_ln_fuse", options=AOT)
    torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    call = attention(graphs[0])
    assert len(call.args) == 3
    assert dict(call.kwargs) == {"dropout_p": 0.0, "is_causal": True, "scale": 0.3}


def test_training():
    model, x = Attention(causal), torch.randn(2, TOKENS, 32)
    found = []
    for call in (model, torch.compile(model, backend="ascend_ln_fuse", options={"report": "off"})):
        found.append(torch.autograd.grad(call(x).square().sum(), list(model.parameters())))
    for ours, eager in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    assert last_reports()[-1].notes


@pytest.fixture
def other_strides(monkeypatch):
    """Attention without a mask yields its result in another order, as some kernels do."""
    attention = masks.on_fakes

    def on_fakes(node, args, kwargs, like):
        result = attention(node, args, kwargs, like)
        if node.target is F.scaled_dot_product_attention:
            with like.fake_mode:
                result = torch.empty_strided(result.shape, (192, 16, 32, 1) if result.stride(1) != 16 else
                                             (192, 96, 16, 1), dtype=result.dtype)
        return result

    monkeypatch.setattr(masks, "on_fakes", on_fakes)


class Heads(Attention):
    """What becomes of the result of attention: `after`."""

    def __init__(self, after):
        super().__init__(causal)
        self.after = after

    def forward(self, x):
        return self.after(self.attend(x))


@pytest.mark.parametrize("after, dropped", [
    (lambda out: out.transpose(1, 2).reshape(2, TOKENS, 32) * 2, True),
    (lambda out: out.transpose(1, 2).contiguous().view(2, TOKENS, 32), True),
    (lambda out: F.linear(out, torch.eye(16)), True),
    (lambda out: out, False), (lambda out: out * 2, False),
    (lambda out: (out.transpose(1, 2).contiguous(), out.sum()), False),
    (lambda out: out.mul_(2).transpose(1, 2).contiguous(), False)])
def test_strides_that_the_graph_depends_on(after, dropped, other_strides):
    run(Heads(after), torch.randn(2, TOKENS, 32))
    assert bool(last_reports()[-1].notes) is dropped


@pytest.mark.parametrize("name", ["__eq__", "__le__", "__and__", "__iand__"])
def test_methods_of_operators(name):
    """How Dynamo of torch 2.11 writes `a == b`."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert masks._is_pure(graph.call_method(name, (x, x))) is (name != "__iand__")


def test_dropout_keeps_its_mask(graphs):
    """Which random numbers fall on which scores is the kernel's matter, and so the mask's."""
    model, x = Attention(causal, dropout_p=0.5), torch.randn(2, TOKENS, 32)
    run(model, x, inner="aot_eager")
    assert attention(graphs[0]).kwargs["attn_mask"] is not None


def test_what_a_needless_mask_was_shaped_like_is_written_all_the_same():
    """Only the shape of `torch.add(x, 1, out=buffer)` is read, but it writes."""
    def attend(q, x, buffer):
        mask = torch.ones_like(torch.add(x, 1, out=buffer), dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q, x, buffer = torch.randn(2, 2, TOKENS, 8), torch.randn(TOKENS, TOKENS), torch.zeros(TOKENS, TOKENS)
    run(attend, q, x, buffer)
    assert last_reports()[-1].notes
    torch.testing.assert_close(buffer, x + 1)


def test_second_derivatives_are_those_of_the_mask_s_kernel():
    """The CPU's flash attention has none; with a mask of three dims eager does not take it."""
    def attend(x):
        mask = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x * 2, x, x.sin(), attn_mask=mask)

    x, found = torch.randn(2, 2, TOKENS, 8), []
    for call in (attend, torch.compile(attend, backend="ascend_ln_fuse", options={"report": "off"})):
        leaf = x.clone().requires_grad_()
        grad, = torch.autograd.grad(call(leaf).sin().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), leaf)[0])
    torch.testing.assert_close(*found)


def test_a_model_on_meta(monkeypatch):
    monkeypatch.setenv("ASCEND_LN_FUSE_STRICT", "1")
    result = run(Attention(tril).to("meta"), torch.empty(2, TOKENS, 32, device="meta"))
    assert result.shape == (2, TOKENS, 32) and not last_reports()[-1].notes


def test_a_mask_that_is_too_large_is_not_computed(monkeypatch):
    monkeypatch.setattr(masks, "MAX_ELEMENTS", TOKENS * TOKENS - 1)
    run(Attention(causal), torch.randn(2, TOKENS, 32))
    assert not last_reports()[-1].notes


def test_nothing_is_computed_while_cuda_captures(monkeypatch):
    monkeypatch.setattr(masks, "_capturing", lambda: True)
    run(Attention(causal), torch.randn(2, TOKENS, 32))
    assert not last_reports()[-1].notes


def test_the_note_is_printed_and_kept(capsys):
    run(Attention(causal), torch.randn(2, TOKENS, 32), report="table")
    assert "1 attention runs without a mask" in capsys.readouterr().err
    report = last_reports()[-1]
    assert FusionReport.from_dict(report.to_dict()).notes == report.notes
