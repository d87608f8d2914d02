"""The lens: values, views, memory and order, on Dynamo's graphs and on ATen graphs."""

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ascend_ln_fuse.graph import Lens, hint, module_path, same, source_line


def dynamo_graphs(f, *args, dynamic=None) -> list[GraphModule]:
    """The graphs that Dynamo makes of a call."""
    found = []

    def backend(gm, example_inputs):
        found.append(gm)
        return gm.forward

    torch.compile(f, backend=backend, dynamic=dynamic)(*args)
    return found


def aten_graph(f, *args, mode="fake") -> GraphModule:
    return make_fx(f, tracing_mode=mode)(*args)


def lens_of(f, *args, dynamic=None) -> Lens:
    (gm,) = dynamo_graphs(f, *args, dynamic=dynamic)
    return Lens(gm.graph)


def find(lens, what):
    """The one node of that name or target."""
    (node,) = [n for n in lens.nodes if what in (n.target, n.name, lens.kind(n))]
    return node


def ordered(lens, first, second):
    """Whether `second` must come after `first`."""
    import networkx as nx

    order = nx.DiGraph(dict(enumerate(lens.order)))
    return nx.has_path(order, lens.position[find(lens, first)], lens.position[find(lens, second)])


VIEWS = {
    "view": lambda x: x.view(2, 24),
    "reshape": lambda x: x.reshape(24, 2),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(-1, (2, 3)),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: torch.transpose(x, 0, 1),
    "T": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, 2),
    "expand": lambda x: x[:, :1].expand(2, 4, 6),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "select": lambda x: x.select(1, 2),
    "index": lambda x: x[:, 1],
    "slice": lambda x: x[..., 1:5:2],
    "new axis": lambda x: x[:, None],
    "unbind": lambda x: x.unbind(1)[2],
    "chunk": lambda x: torch.chunk(x, 2, -1)[1],
    "split": lambda x: x.split([1, 3], 1)[0],
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "identity cast": lambda x: x.float(),
    "identity copy": lambda x: x.contiguous(),
    "chain": lambda x: x.view(2, 2, 2, 6).unbind(1)[0].permute(2, 0, 1)[1:],
}


@pytest.mark.parametrize("how", ["static", "dynamic", "aten", "aten symbolic"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_share_the_storage_of_their_base(name, how):
    def f(x):
        return VIEWS[name](x) * 2

    x = torch.randn(2, 4, 6)
    if how.startswith("aten"):
        lens = Lens(aten_graph(f, x, mode="symbolic" if "symbolic" in how else "fake").graph)
    else:
        lens = lens_of(f, x, dynamic=how == "dynamic")
    mul = [node for node in lens.nodes if lens.kind(node) == "mul" and lens.tensor(node) is not None][0]
    node = mul.args[0]
    if name.startswith("identity") and node.op != "placeholder":
        assert lens.is_identity(node)
    while node.op != "placeholder":
        assert lens.is_view(node) or node.target is getattr, node.format_node()
        node = node.args[0]
    assert not lens.is_view(mul)


@pytest.mark.parametrize("copy", [
    lambda x: x.double(), lambda x: x.clone(), lambda x: x.mT.contiguous(), lambda x: x.mT.reshape(-1),
    lambda x: x[[0, 1]], lambda x: torch.cat([x, x]),
], ids=["cast", "clone", "contiguous", "reshape", "index", "cat"])
def test_copies_are_no_views(copy):
    lens = lens_of(lambda x: copy(x) * 2, torch.randn(2, 4, 6))
    assert not lens.is_view(find(lens, "mul").args[0])


def writes_view_of_x(x):
    a = x.exp()
    x[0].mul_(2)
    b = x.tanh()
    return a, b


def writes_alias_of_intermediate(x):
    y = x * 2
    a = y.exp()
    y.view(-1).add_(1)
    return a, y.tanh()


def out_argument(x):
    y = x * 2
    a = y.exp()
    torch.add(x, 1, out=y)
    return a, y.tanh()


def in_place_function(x):
    y = x * 2
    a = y.exp()
    F.relu(y, inplace=True)
    return a, y.tanh()


def setitem(x):
    y = x * 2
    a = y.exp()
    y[1:] = 0
    return a, y.tanh()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", [writes_view_of_x, writes_alias_of_intermediate, out_argument,
                               in_place_function, setitem], ids=lambda f: f.__name__)
def test_a_write_stays_between_its_readers(f, dynamic):
    lens = lens_of(f, torch.randn(4, 4), dynamic=dynamic)
    write = [n for n in lens.nodes if lens.position[find(lens, "exp")] < lens.position[n]][:-2]
    written = write[-1].name
    assert ordered(lens, "exp", written) and ordered(lens, written, "tanh")
    assert lens.is_mutated(find(lens, "exp").args[0])
    assert not lens.is_mutated(find(lens, "exp"))


def test_unrelated_nodes_are_not_ordered():
    def f(x, y):
        return x.exp(), y.tanh()

    lens = lens_of(f, torch.randn(4), torch.randn(5))
    assert not ordered(lens, "exp", "tanh")


@pytest.mark.parametrize("first, second", [
    (F.dropout, torch.rand_like), (torch.randn_like, lambda t: t.clone().bernoulli_(0.5)),
    (lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None]), F.dropout)])
def test_random_draws_stay_in_order(first, second):
    lens = lens_of(lambda x, y: (first(x).exp(), second(y).tanh()), torch.randn(4, 4), torch.randn(5, 5))
    exp, tanh = find(lens, "exp").args[0], find(lens, "tanh").args[0]
    assert ordered(lens, exp.name, tanh.name)


def test_inputs_count_as_one_storage_once_one_is_written():
    """Two inputs may be the same memory, which their fakes do not say."""
    def f(x, y):
        a = y.exp()
        x.add_(1)
        return a, y.tanh()

    lens = lens_of(f, torch.randn(4, 4), torch.randn(4, 4))
    assert ordered(lens, "exp", "add_") and ordered(lens, "add_", "tanh")
    base = torch.randn(4, 4)
    compiled = torch.compile(f, backend="ascend_ln_fuse", options={"report": "off"})
    ours, eager = base.clone(), base.clone()
    for a, b in zip(compiled(ours, ours.T), f(eager, eager.T)):
        torch.testing.assert_close(a, b)


FENCES = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("fence", FENCES)
def test_nothing_moves_across_a_fence(fence):
    def f(x):
        a = x.exp()
        with FENCES[fence]():
            b = x.tanh()
        return a, b, x.sin()

    lens = lens_of(f, torch.randn(4))
    assert ordered(lens, "exp", "tanh") and ordered(lens, "tanh", "sin")
    assert len({lens.segment[find(lens, name)] for name in ("exp", "tanh", "sin")}) == 3
    assert not lens.transformed


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_functorch_levels(transform):
    def f(x):
        return x.exp(), transform(lambda row: row.tanh().sum())(x), x.sin()

    lens = lens_of(f, torch.randn(4, 4) if transform is torch.vmap else torch.randn(4))
    assert find(lens, "tanh") in lens.transformed
    assert not {find(lens, "exp"), find(lens, "sin")} & lens.transformed


def test_a_higher_order_op_is_a_barrier():
    def f(x):
        y = x * 2
        a = y.exp()
        c = torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (y,))
        return a, c, y.tanh(), x.sin()

    lens = lens_of(f, torch.randn(4))
    cond = torch.ops.higher_order.cond
    assert ordered(lens, "exp", cond) and ordered(lens, cond, "tanh") and ordered(lens, cond, "sin")


def test_reads_of_a_subclass_stay_between_writes_but_do_not_bind_other_reads():
    from torch.testing._internal.two_tensor import TwoTensor

    def f(x, two):
        a = x * 2
        b = a.exp()
        c = (two + 1).sin()
        a.add_(1)
        d = a.tanh()
        return b, c, d

    inner = torch.randn(4)
    lens = lens_of(f, torch.randn(4), TwoTensor(inner, inner))
    assert lens.tensor(find(lens, "sin")) is None
    assert not ordered(lens, "exp", "sin")
    assert ordered(lens, "sin", "add_") and ordered(lens, "add_", "tanh")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_q = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm_q(x)


class Outer(nn.Module):
    def __init__(self, container):
        super().__init__()
        self.blocks = container

    def forward(self, x):
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return x.relu()


@pytest.mark.parametrize("container, path", [
    (nn.ModuleList([nn.Identity(), Inner()]), "blocks.1.norm_q"),
    (nn.ModuleDict({"odd name": Inner()}), "blocks.odd name.norm_q"),
    (nn.Sequential(nn.Linear(4, 4), nn.Sequential(Inner())), "blocks.1.0.norm_q"),
], ids=["list", "dict", "sequential"])
def test_where(container, path):
    lens = lens_of(Outer(container), torch.randn(2, 4))
    norm, relu = find(lens, "layer_norm"), find(lens, "relu")
    assert module_path(norm) == path
    assert module_path(relu) == ""
    assert lens.where(norm).startswith(path + ", ")
    line = next(i for i, text in enumerate(open(__file__), 1) if "return x.relu()" in text)
    assert source_line(relu) == lens.where(relu) == f"test_graph.py:{line}"


def test_where_without_metadata():
    (gm,) = dynamo_graphs(lambda x: x.exp(), torch.randn(2))
    for node in gm.graph.nodes:
        node.meta.clear()
    lens = Lens(gm.graph)
    assert lens.where(find(lens, "exp")) == "exp"
    assert lens.tensor(find(lens, "exp")) is None


def test_sizes_are_compared_without_guards():
    lens = lens_of(lambda x, y: x.exp() + y.sum(), torch.randn(5, 7), torch.randn(6), dynamic=True)
    (x, y) = (n for n in lens.nodes if n.op == "placeholder" and lens.tensor(n) is not None)
    a, b = lens.tensor(x).shape
    (c,) = lens.tensor(y).shape
    env = a.node.shape_env
    before = len(env.guards), env.replacements.copy()
    assert same(a, a) and same(a * b, b * a) and same(4, 4)
    assert not (same(a, b) or same(a, c) or same(a, 5) or same(4, 5))
    assert (hint(a), hint(b), hint(3)) == (5, 7, 3)
    assert (len(env.guards), env.replacements) == before
