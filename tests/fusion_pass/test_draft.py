"""Simplifying on one draft: what comes of it, how often it copies, and who reads which lens."""

import pytest
import torch
from cat_pieces import TEXT
from stream_cases import BATCH, WIDTH, graph_of, model, randn, video
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

from ascend_ln_fuse import Options, backend, draft, graph, last_reports
from ascend_ln_fuse.draft import Draft
from ascend_ln_fuse.effects import tensors_of, value_of
from ascend_ln_fuse.masks import drop_needless_masks
from ascend_ln_fuse.pieces import drop_needless_cats
from ascend_ln_fuse.simplify import simplified
from ascend_ln_fuse.streams import lay_out_streams

STEPS = (drop_needless_masks, drop_needless_cats, lay_out_streams)


def joined(hidden):
    """A cat of all pieces of a tensor that does not lie across memory itself."""
    whole = F.linear(hidden, torch.eye(WIDTH))
    return torch.cat([whole[:, :TEXT], whole[:, TEXT:]], dim=1)


def masked(hidden):
    """An attention whose mask is causal; its result lies as `hidden` does not."""
    heads = F.linear(hidden, torch.eye(WIDTH))[:, None]
    causal = torch.ones(heads.shape[2], heads.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(heads, heads, heads, causal)[:, 0]


def mask(x):
    return masked(x * 2)


def cat(x):
    return joined(x * 2) + 1


def both(x):
    return masked(joined(x * 2)) + joined(x + 1)


MODEL = model(behind=lambda x: F.layer_norm(x + joined(x) + masked(x), (WIDTH,)))
#: a function, its inputs, and the steps that have something to do
CASES = {
    "none": (lambda x: F.layer_norm(x, (WIDTH,)), randn(BATCH, 8, WIDTH), ()),
    "mask": (mask, randn(BATCH, 8, WIDTH), STEPS[:1]),
    "cat": (cat, randn(BATCH, 8, WIDTH), STEPS[1:2]),
    "mask and cats": (both, randn(BATCH, 8, WIDTH), STEPS[:2]),
    "stream": (model(), video(), STEPS[2:]),
    "all": (MODEL, video(), STEPS),
}


@pytest.fixture(params=CASES)
def case(request):
    function, x, steps = CASES[request.param]
    return graph_of(function, x), x, steps


def text(graph: Graph) -> list:
    """All that tells a graph from another: nodes, how their fakes lie, and in which memory."""
    memory: dict = {}
    return [(node.op, node.name, node.target, str(node.args), str(node.kwargs), [
        (fake.dtype, fake.shape, fake.stride(), fake.storage_offset(),
         memory.setdefault(fake.untyped_storage()._cdata, len(memory)))
        for fake in tensors_of(value_of(node))])
        for node in graph.nodes]


@pytest.fixture
def made(monkeypatch):
    """The graphs of which lenses were made, and those of which copies were."""
    lenses, copies = [], []
    init, copy = graph.Lens.__init__, draft.copy_graph
    monkeypatch.setattr(graph.Lens, "__init__", lambda lens, of: lenses.append(of) or init(lens, of))
    monkeypatch.setattr(draft, "copy_graph", lambda of: copies.append(of) or copy(of))
    return lenses, copies


def test_as_by_a_copy_for_each_step(case):
    original, x, steps = case
    before, apart = text(original), original
    for step in STEPS:
        one = Draft(apart)
        assert bool(step(one)) == (step in steps) == (one.graph is not apart)
        apart = one.graph
    assert text(original) == before
    found = simplified(original, Options())
    assert text(found.graph) == text(apart) and text(original) == before
    assert len(found.notes) == len(steps) and (found.graph is original) == (not steps)
    found.graph.lint()


def test_one_copy_and_a_lens_for_each_change(case, made):
    original, _, steps = case
    lenses, copies = made
    found = simplified(original, Options())
    assert copies == [original] * bool(steps)
    assert len(lenses) <= 1 + len(steps)
    assert found.lens is None or found.lens.graph is found.graph


def test_the_lens_is_handed_on(made):
    """The last step finds nothing to do, so its lens is that of the graph in which sites are looked for."""
    original = graph_of(lambda x: F.layer_norm(torch.cat([x[:, :TEXT], x[:, :TEXT]], 1), (WIDTH,)),
                        randn(BATCH, 8, WIDTH))
    lenses, copies = made
    report = backend.fuse_module(GraphModule({}, original), Options(report="off"))
    assert (report.fused, lenses, copies) == (1, [original], [])


def test_a_graph_that_reads_what_was_written_has_a_lens_of_its_own(made):
    """(`read_by_result` copies it.)"""
    def f(x):
        y = x * 2
        z = torch.cat([y[:, :TEXT], y[:, :TEXT]], 1)
        z.mul_(3)
        return F.layer_norm(z, (WIDTH,))

    x = randn(BATCH, 8, WIDTH)
    module = GraphModule({}, graph_of(f, x))
    before = text(module.graph)
    original = module.graph
    report = backend.fuse_module(module, Options(report="off"))
    lenses, _ = made
    assert report.fused == 1 and lenses[0] is original and lenses[1] is not original
    assert text(original) == before
    torch.testing.assert_close(module(x)[0], f(x))


def test_a_change():
    original = graph_of(cat, randn(BATCH, 8, WIDTH))
    one = Draft(original)
    assert one.known_lens is None and one.lens is one.lens is one.known_lens
    copies = one.change()
    assert one.known_lens is None and one.graph is not original
    assert [*copies] == [*original.nodes] and [*copies.values()] == [*one.graph.nodes]
    lens, changed = one.lens, one.graph
    again = one.change()
    assert one.graph is changed and one.lens is not lens
    assert [*again] == [*again.values()] == [*changed.nodes]


def test_all_of_it_through_the_backend():
    module, x = MODEL, video()
    torch._dynamo.reset()
    with torch.no_grad():
        ours = torch.compile(module, backend="ascend_ln_fuse", options={"report": "off"})(x)
        torch.testing.assert_close(ours, module(x))
    assert len(last_reports()[-1].notes) == len(STEPS)
