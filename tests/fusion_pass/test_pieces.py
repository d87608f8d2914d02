"""A cat of all pieces of one tensor is not made; every other one is."""

import pytest
import torch
from cat_pieces import (
    BATCH,
    NOTE,
    TEXT,
    TOKENS,
    WIDTH,
    assert_as_eager,
    cats,
    check,
    compiled,
    example,
    slices,
)
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import Options, backend, last_reports
from ascend_ln_fuse.graph import Lens
from ascend_ln_fuse.simplify import simplified

SCALE = nn.Parameter(torch.ones(1))


@pytest.fixture
def graphs(monkeypatch):
    """Those that sites are looked for in, where none is found."""
    found = []
    monkeypatch.setattr(backend, "fuse", lambda graph, *_, **__: found.append(graph) or backend.Fused(None))
    return found


@torch.library.custom_op("test_pieces::sum", mutates_args=())
def schema_op(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


@schema_op.register_fake
def _(x):
    return x.new_empty(x.shape[:-1])


@torch._dynamo.allow_in_graph
def unknown(x):
    return x + 1


def from_the_end(h):
    return torch.concat((h[:, :-TEXT, :], h[:, -TEXT:]), 1)


def narrow(h):
    return torch.concatenate([h.narrow(1, 0, TEXT), torch.narrow(h, 1, TEXT, TOKENS - TEXT)], axis=1)


def split(h):
    return torch.cat(h.split(TEXT, 1), 1)


def split_with_sizes(h):
    return torch.cat(torch.split_with_sizes(h, [1, 4, 3], dim=-2), -2)


def chunk(h):
    a, b, c = torch.chunk(h, 3, dim=1)
    return torch.cat([a, b, c], dim=1)


def tensor_split(h):
    return torch.cat(torch.tensor_split(h, 3, dim=2), 2)


def unbind(h):
    return torch.cat([one.unsqueeze(1) for one in h.unbind(1)], 1)


def batch(h):
    return torch.cat([h[:1], h[1:]])


def channels(h):
    return torch.cat(h.chunk(4, -1), -1)


def pieces_of_pieces(h):
    first, last = h.chunk(2, 1)
    return torch.cat([*first.split(3, 1), last[:, :TEXT], last[:, TEXT:]], 1)


def with_an_empty_piece(h):
    return torch.cat([h[:, :0], h[:, :TEXT], h[:, TEXT:]], 1)


def of_a_view(h):
    h = h.unflatten(-1, (4, 4))
    return torch.cat([h[:, :, :1], h[:, :, 1:]], 2).flatten(2)


def of_one(h):
    return torch.cat([h])


WHOLE = (slices, from_the_end, narrow, split, split_with_sizes, chunk, tensor_split, unbind, batch, channels,
         pieces_of_pieces, with_an_empty_piece, of_a_view, of_one)


@pytest.mark.parametrize("joined", WHOLE, ids=lambda f: f.__name__)
def test_left_out(joined, graphs):
    def f(x):
        h = x * 2
        return joined(h) + 1, h.sum()

    x = example()
    assert_as_eager(compiled(f)(x), f(x))
    graph, = graphs
    assert not cats(graph) and last_reports()[-1].notes == (NOTE,)
    assert all(node.users for node in graph.nodes if node.op in ("call_function", "call_method"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_its_views_are_known_as_views_of_the_tensor(dynamic, graphs):
    """By their fakes, from which all that follows tells what is a view, and of what."""
    def f(x):
        h = x * 2
        r = slices(h)
        return r[:, 1:].transpose(1, 2).split(4, 1)[2] + r.unsqueeze(0).sum()

    x = example()
    call = torch.compile(f, backend="ascend_ln_fuse", options={"report": "off"}, dynamic=dynamic)
    assert_as_eager([call(x)], [f(x)])
    lens = Lens(graphs[0])
    made, = (node for node in lens.nodes if lens.kind(node) == "mul")
    views = [node for node in lens.nodes if lens.is_view(node)]
    assert [lens.kind(node) for node in views] == ["getitem", "transpose", "split", "getitem", "unsqueeze"]
    assert all(lens.storages(node) == lens.storages(made) for node in views)
    first, *_, fourth = lens.tensor(views[0]), lens.tensor(views[3])
    assert first.storage_offset() == WIDTH and fourth.storage_offset() == WIDTH + 8
    assert tuple(fourth.stride()[1:]) == (1, WIDTH)


def swapped(h):
    return torch.cat([h[:, TEXT:], h[:, :TEXT]], 1)


def twice(h):
    return torch.cat([h[:, :4], h[:, :4]], 1)


def overlapping(h):
    return torch.cat([h[:, :5], h[:, 3:6]], 1)


def a_part(h):
    return torch.cat([h[:, :2], h[:, 2:5]], 1)


def a_gap(h):
    return torch.cat([h[:, :2], h[:, 3:]], 1)


def every_other(h):
    return torch.cat([h[:, ::2], h[:, 1::2]], 1)


def along_another_dim(h):
    return torch.cat([h[:, :4], h[:, 4:]], 2)


def of_two_tensors(h):
    return torch.cat([h[:, :TEXT], h.sin()[:, TEXT:]], 1)


def narrower(h):
    return torch.cat([h[:, :4, :8], h[:, 4:, :8]], 1)


def of_the_first_in_the_batch(h):
    """The strides are those of all."""
    return torch.cat([h[:1, :TEXT], h[:1, TEXT:]], 1)


def with_a_flat_empty_piece(h):
    """torch.cat passes over it, whatever the others look like."""
    return torch.cat([h.flatten()[:0], h[:, :TEXT], h[:, TEXT:]], 1)


def one_of_them_transposed(h):
    h = h.unflatten(-1, (4, 4))
    return torch.cat([h[:, :TEXT].mT, h[:, TEXT:]], 1)


def transposed(h):
    """The cat is contiguous, what it is made of is not."""
    h = h.transpose(0, 1)
    return torch.cat([h[:TEXT], h[TEXT:]])


def channels_last(h):
    h = h.unflatten(-1, (4, 4)).contiguous(memory_format=torch.channels_last).transpose(1, 2)
    return torch.cat(h.chunk(2, 1), 1)


def expanded(h):
    h = h[:, :1].expand(-1, TOKENS, -1)
    return torch.cat([h[:, :TEXT], h[:, TEXT:]], 1)


def with_an_offset(h):
    return batch(h.repeat(2, 1, 1)[1:3])


def of_mixed_dtypes(h):
    return torch.cat([h[:, :4], h.view(torch.int32)[:, 4:]], 1)


def promoted(h):
    return torch.cat([h[:, :TEXT], h[:, TEXT:].double()], 1)


def conjugated(h):
    h = torch.complex(h, h).conj()
    return torch.cat([h[:, :TEXT], h[:, TEXT:]], 1).real


def negated(h):
    h = torch.complex(h, h).conj().imag
    return torch.cat([h[:, :TEXT], h[:, TEXT:]], 1)


def dropped(h):
    """An identity whose fake has memory of its own, and lies at its beginning."""
    return torch.cat([F.dropout(h[1:], 0.5, False), h[1:]])


def looked_at_conjugated(h):
    """A view of the cat that is none of memory alone."""
    h = torch.complex(h, h)
    return slices(h).conj() * 2


def looked_at_negated(h):
    return torch._neg_view(slices(h)) * 2


def looked_at_as_another_dtype(h):
    return slices(h).view(torch.int32)[..., 0] + 1


def in_memory_of_another(h):
    return torch.cat([h[:, :TEXT], h[:, TEXT:]], 1, out=torch.empty(BATCH, TOKENS, WIDTH))


def by_vmap(h):
    return torch.vmap(lambda row: torch.cat([row[:TEXT], row[TEXT:]]) * 2)(h)


def with_tangents(h):
    with torch.autograd.forward_ad.dual_level():
        h = torch.autograd.forward_ad.make_dual(h, h.sin())
        return torch.autograd.forward_ad.unpack_dual(slices(h) * 2).tangent * 1


def of_another_mode(h):
    """Nothing that was made in inference mode can be kept for a backward, but copies can."""
    with torch.inference_mode():
        h = h * 2
    return slices(h) * SCALE


KEPT = (swapped, twice, overlapping, a_part, a_gap, every_other, along_another_dim, of_two_tensors,
        narrower, of_the_first_in_the_batch, with_a_flat_empty_piece, one_of_them_transposed, transposed,
        channels_last, expanded, with_an_offset, of_mixed_dtypes, promoted, conjugated, negated, dropped,
        looked_at_conjugated, looked_at_negated, looked_at_as_another_dtype, in_memory_of_another, by_vmap,
        with_tangents, of_another_mode)


@pytest.mark.parametrize("joined", KEPT, ids=lambda f: f.__name__)
def test_kept(joined, graphs):
    def f(x):
        h = x * 2
        return joined(h) + 1, h.sum()

    x = example()
    assert_as_eager(compiled(f)(x), f(x))
    assert cats(graphs[0]) and not last_reports()[-1].notes


def test_the_one_of_two_that_may_be_left_out(graphs):
    """The pieces of the other are seen as another dtype, its result is not."""
    def f(x):
        h = x * 2
        seen, other = h.view(torch.int32), slices(h).view(torch.int32)
        return torch.cat([seen[:, :4], h[:, 4:].view(torch.int32)], 1) + other

    x = example()
    assert torch.equal(compiled(f)(x), f(x))
    assert len(cats(graphs[0])) == 1 and last_reports()[-1].notes == (NOTE,)


# -- who could tell


def returned(h, x, other):
    return slices(h)


def view_returned(h, x, other):
    return slices(h)[:, 2:].transpose(1, 2)


def identity_returned(h, x, other):
    return F.dropout(slices(h).contiguous().float(), 0.5, False)


def returned_in_a_tuple(h, x, other):
    return slices(h).split(2, 1)


def written(h, x, other):
    return slices(h).mul_(2) * 2, h * 1


def view_written(h, x, other):
    r = slices(h)
    r[:, 2:4].zero_()
    return r * 2, h * 1


def source_written(h, x, other):
    r = slices(h)
    h.mul_(3)
    return r * 2, h


def piece_written(h, x, other):
    r = slices(h)
    h[:, :2] += 1
    return r * 2


def written_by_an_op_that_has_it(h, x, other):
    """Whoever got a tensor may have kept it."""
    y = unknown(h)
    r = slices(h)
    return r * y


def written_since_by_an_op_that_is_known(h, x, other):
    y = unknown(h)
    h.add_(1)
    r = slices(h)
    return r * y


def seen_by_an_unknown_op(h, x, other):
    return unknown(slices(h))


def input_written(h, x, other):
    r = slices(x)
    x.add_(1)
    return r * 2


def another_input_written(h, x, other):
    """Two inputs may be one tensor."""
    r = slices(x)
    other.add_(1)
    return r * 2


def input_that_an_unknown_op_may_write(h, x, other):
    r = slices(x)
    return unknown(h) + r


def made_by_an_unknown_op(h, x, other):
    return slices(unknown(x)) * 2


TOLD = (returned, view_returned, identity_returned, returned_in_a_tuple, written, view_written,
        source_written, piece_written, written_by_an_op_that_has_it,
        written_since_by_an_op_that_is_known, seen_by_an_unknown_op, input_written,
        another_input_written, input_that_an_unknown_op_may_write, made_by_an_unknown_op)


def written_before(h, x, other):
    h.add_(x)
    return slices(h) * 2, h


def piece_written_before(h, x, other):
    text, image = h[:, :TEXT], h[:, TEXT:]
    text = text.mul_(3)
    return torch.cat([text, image], 1) * 2, h


def all_written_between(h, x, other):
    text, image = h[:, :TEXT], h[:, TEXT:]
    h.mul_(3)
    return torch.cat([text, image], 1) * 2


def source_returned(h, x, other):
    return slices(h) * 2, h


def of_an_input(h, x, other):
    other.add_(1)
    return slices(x) * 2, x


def of_an_input_with_a_mode_behind(h, x, other):
    r = slices(x)
    with torch.autocast("cpu", enabled=False):
        return r * 2


def unknown_op_elsewhere(h, x, other):
    return slices(h) * 2, unknown(other)


def known_op(h, x, other):
    return schema_op(slices(h))


def cat_of_cats(h, x, other):
    r = slices(h)
    r = torch.cat([r[:, :5], r[:, 5:]], 1)
    return F.layer_norm(r, (WIDTH,)), h


def cat_of_a_view_of_a_cat(h, x, other):
    r = slices(h).unflatten(-1, (4, 4))
    r = torch.cat(r.split(2, 2), 2)
    return F.layer_norm(r[:, 1:], (4,)) + r[:, 1:].unsqueeze(0).sum(), h


def with_a_clone_returned(h, x, other):
    return slices(h).clone(), h


SECRET = (written_before, piece_written_before, all_written_between, source_returned, of_an_input,
          of_an_input_with_a_mode_behind, unknown_op_elsewhere, known_op, cat_of_cats, cat_of_a_view_of_a_cat,
          with_a_clone_returned)


def on_fresh(f):
    def call(x, other):
        return f(x * 2, x, other)

    return call


@pytest.mark.parametrize("f", TOLD, ids=lambda f: f.__name__)
def test_kept_where_somebody_could_tell(f, graphs):
    check(on_fresh(f), example(), example(1))
    assert len(cats(graphs[0])) == 1 and not last_reports()[-1].notes


@pytest.mark.parametrize("f", SECRET, ids=lambda f: f.__name__)
def test_left_out_where_nobody_can_tell(f, graphs):
    check(on_fresh(f), example(), example(1))
    assert not cats(graphs[0]) and last_reports()[-1].notes


def test_inputs_that_are_one_tensor(graphs):
    """Dynamo compiles for two that differ, but an alias of a part is no reason to compile again."""
    def f(x, other):
        r = slices(x)
        other.add_(1)
        return r * 2

    call = compiled(f)
    x = example()
    with torch.no_grad():
        call(x.clone(), example(1))
        ours, eager = x.clone(), x.clone()
        assert torch.equal(call(ours, ours[:]), f(eager, eager[:]))
    assert cats(graphs[0])


# -- gradients, modes, sizes


@pytest.mark.parametrize("training", [False, True])
def test_gradients_keep_it(training, graphs):
    """They would be summed in another order."""
    linear = nn.Linear(WIDTH, WIDTH)

    def f(x):
        h = linear(x)
        return slices(h).sin() + h[:, :1]

    with torch.set_grad_enabled(training):
        compiled(f)(example())
    assert bool(cats(graphs[0])) is training


def test_a_parameter_without_recording(graphs):
    """Read in the place of the cat, it would have its gradient recorded later."""
    weight = nn.Parameter(example(0, (TOKENS, WIDTH)))

    def f(x):
        with torch.no_grad():
            r = torch.cat([weight[:TEXT], weight[TEXT:]])
        return r * x

    result = compiled(f)(example())
    assert not result.requires_grad and cats(graphs[0])


@pytest.mark.parametrize("f, left_out", [
    (lambda x, h: slices(x), False),
    (lambda x, h: slices(x.detach()).transpose(1, 2).transpose(1, 2), False),
    (lambda x, h: slices(slices(x)), False),  # the inner one is left out
    (lambda x, h: slices(h), False),
    (lambda x, h: slices(x * 3), True),
    (lambda x, h: slices(x).sin(), True)])
def test_what_backward_reads_is_not_the_users(f, left_out, graphs):
    """Who writes an input or a result before backward runs would change the gradient of a weight."""
    weight = nn.Parameter(torch.ones(WIDTH))

    def scaled(x):
        h = x * 2
        return f(x, h) * weight, h

    found = []
    for call in (scaled, compiled(scaled)):
        x = example()
        result, h = call(x)
        x.zero_()
        h.zero_()
        found += torch.autograd.grad(result.sum(), weight)
    assert torch.equal(*found)
    assert bool(cats(graphs[0])) is not left_out


@pytest.mark.parametrize("joined", [slices, from_the_end, lambda h: torch.cat(h.chunk(2, 1), 1)])
def test_sizes_that_vary(joined, graphs):
    def f(x):
        return F.layer_norm(joined(x * 2) + 1, (WIDTH,))

    call = torch.compile(f, backend="ascend_ln_fuse", options={"report": "off"}, dynamic=True)
    for tokens in (8, 20, 5):
        x = example(tokens, (BATCH, tokens, WIDTH))
        torch.testing.assert_close(call(x), f(x))
    assert len(graphs) == 1


def test_pieces_of_two_sizes_that_vary(graphs):
    """As in a model: text and image are joined, and come apart again where the text ends."""
    def f(text, image):
        h = torch.cat([text, image], 1) * 2
        n = text.shape[1]
        for _ in range(2):
            text, image = h[:, :n], h[:, n:]
            h = torch.cat([text, image], 1) + 1
        return h

    call = torch.compile(f, backend="ascend_ln_fuse", options={"report": "off"}, dynamic=True)
    for text, image in ((3, 8), (20, 5)):
        inputs = example(text, (BATCH, text, WIDTH)), example(image, (BATCH, image, WIDTH))
        assert torch.equal(call(*inputs), f(*inputs))
    assert len(graphs) == 1 and len(cats(graphs[0])) == 1


def test_the_option_keeps_them(graphs):
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(lambda x: slices(x) * 2, cats="keep")(example())
    assert cats(graphs[0]) and not last_reports()[-1].notes


def test_aten_graphs():
    """Those that npugraph_ex hands over."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x):
        return slices(x * 2) + 1

    gm = make_fx(f, tracing_mode="fake")(example())
    plain = simplified(gm.graph, Options())
    assert plain.notes == (NOTE,) and not cats(plain.graph)
    assert torch.equal(torch.fx.GraphModule(gm, plain.graph)(example()), f(example()))
