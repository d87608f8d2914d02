"""What a node writes, draws and reads: by graphs of Dynamo's and by schemas."""

import operator

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.nn import functional as F

from ascend_ln_fuse.effects import RANDOM, WORLD, effects_of, storage_key, storages, value_of

aten = torch.ops.aten


class Build:
    """A graph written by hand, with fakes."""

    def __init__(self):
        self.graph, self.mode = Graph(), FakeTensorMode()

    def input(self, *shape, dtype=torch.float32):
        node = self.graph.placeholder("x")
        with self.mode:
            node.meta["example_value"] = torch.empty(shape or (4, 4), dtype=dtype)
        return node

    def call(self, target, *args, **kwargs):
        op = "call_method" if isinstance(target, str) else "call_function"
        return self.graph.create_node(op, target, args, kwargs)


def written_inputs(target, *args, **kwargs):
    """Positions and names of the tensor arguments that a call writes; "t" stands for a tensor."""
    build = Build()
    nodes = {}

    def fill(key, arg):
        if arg == "t":
            return nodes.setdefault(key, build.input())
        if isinstance(arg, (tuple, list)):
            return type(arg)(fill((key, i), item) for i, item in enumerate(arg))
        return arg

    node = build.call(target, *(fill(i, a) for i, a in enumerate(args)),
                      **{k: fill(k, a) for k, a in kwargs.items()})
    effects = effects_of(node)
    assert WORLD not in effects.writes
    return {key for key, arg in nodes.items() if storages(value_of(arg)) & effects.writes}


WRITES = [
    # in-place methods and functions
    (("add_", "t", "t"), {}, {0}),
    (("copy_", "t", "t"), {}, {0}),
    (("__iadd__", "t", "t"), {}, {0}),
    (("__setitem__", "t", 0, "t"), {}, {0}),
    (("masked_fill_", "t", "t", 0.0), {}, {0}),
    ((torch.relu_, "t"), {}, {0}),
    ((torch.relu_,), {"input": "t"}, {"input"}),
    ((torch._foreach_add_, ["t", "t"], ["t", "t"]), {}, {(0, 0), (0, 1)}),
    # operators
    ((operator.iadd, "t", "t"), {}, {0}),
    ((operator.imul, "t", 2), {}, {0}),
    ((operator.itruediv, "t", "t"), {}, {0}),
    ((operator.setitem, "t", 0, "t"), {}, {0}),
    ((torch.Tensor.__setitem__, "t", 0, "t"), {}, {0}),
    ((torch.Tensor.__iadd__, "t", "t"), {}, {0}),
    # out=
    ((torch.add, "t", "t"), {"out": "t"}, {"out"}),
    ((torch.var_mean, "t"), {"out": ("t", "t")}, {("out", 0), ("out", 1)}),
    # inplace=True
    ((F.relu, "t"), {"inplace": True}, {0}),
    ((F.relu, "t", True), {}, {0}),
    ((F.relu,), {"input": "t", "inplace": True}, {"input"}),
    ((F.silu, "t", True), {}, {0}),
    ((F.dropout, "t", 0.5, True, True), {}, {0}),
    ((F.leaky_relu, "t", 0.1, True), {}, {0}),
    # schemas
    ((aten.add_.Tensor, "t", "t"), {}, {0}),
    ((aten.add_, "t", "t"), {}, {0}),
    ((aten.add.out, "t", "t"), {"out": "t"}, {"out"}),
    ((aten.native_layer_norm.out, "t", [4], "t", "t", 1e-5),
     {"out0": "t", "out1": "t", "out2": "t"}, {"out0", "out1", "out2"}),
    ((aten.index_put_.default, "t", ["t"], "t"), {}, {0}),
    ((aten._foreach_mul_.Scalar, ["t", "t"], 2.0), {}, {(0, 0), (0, 1)}),
    ((aten._native_batch_norm_legit.default, "t", "t", "t", "t", "t", True, 0.1, 1e-5), {}, {3, 4}),
    # running statistics: at least these; the weights count too, the input does not
    ((F.batch_norm, "t", "t", "t", "t", "t", True), {}, {1, 2, 3, 4}),
    ((F.batch_norm, "t"), {"running_mean": "t", "running_var": "t"}, {"running_mean", "running_var"}),
    ((torch.batch_norm, "t", "t", "t", "t", "t", True, 0.1, 1e-5, False), {}, {1, 2, 3, 4}),
    ((aten.batch_norm.default, "t", "t", "t", "t", "t", True, 0.1, 1e-5, False), {}, {1, 2, 3, 4}),
    ((aten.native_batch_norm.default, "t", "t", "t", "t", "t", True, 0.1, 1e-5), {}, {1, 2, 3, 4}),
    ((F.instance_norm, "t", "t", "t"), {}, {1, 2}),
    # embedding(max_norm=) renormalises its weight
    ((F.embedding, "t", "t"), {"max_norm": 1.0}, {1}),
    ((F.embedding, "t", "t", None, 1.0), {}, {1}),
    ((F.embedding,), {"input": "t", "weight": "t", "max_norm": 1.0}, {"weight"}),
    ((F.embedding_bag, "t", "t"), {"max_norm": 1.0}, {1}),
    # and what writes nothing
    (("add", "t", "t"), {}, set()),
    (("__add__", "t", "t"), {}, set()),
    (("__invert__", "t"), {}, set()),
    ((operator.add, "t", "t"), {}, set()),
    ((operator.and_, "t", "t"), {}, set()),
    ((operator.not_, "t"), {}, set()),
    ((operator.getitem, "t", 0), {}, set()),
    ((operator.index, "t"), {}, set()),
    ((F.relu, "t"), {}, set()),
    ((F.relu, "t", False), {}, set()),
    ((F.dropout, "t", 0.5, True, False), {}, set()),
    ((F.layer_norm, "t", (4,), "t", "t"), {}, set()),
    ((F.embedding, "t", "t"), {}, set()),
    ((F.embedding, "t", "t", 0, None, 2.0, False, False), {}, set()),
    ((aten.add, "t", "t"), {}, set()),
    ((aten.native_layer_norm, "t", [4], "t", "t", 1e-5), {}, set()),
    ((aten.native_layer_norm.default, "t", [4], "t", "t", 1e-5), {}, set()),
]


@pytest.mark.parametrize("args, kwargs, expected", WRITES,
                         ids=[f"{i} {getattr(a[0], '__name__', a[0])}"
                              for i, (a, _, _) in enumerate(WRITES)])
def test_writes(args, kwargs, expected):
    assert written_inputs(*args, **kwargs) == expected


def reaches(op):
    build = Build()
    x, y = build.input(), build.input()
    effects = effects_of(build.call(op, x, y))
    return effects.writes, storages(value_of(x)) | storages(value_of(y))


@pytest.mark.parametrize("op", [lambda x, y: x, torch.ops.higher_order.cond],
                         ids=["user's function", "higher-order op"])
def test_an_unknown_function_may_touch_everything(op):
    writes, both = reaches(op)
    assert writes == both | {WORLD, RANDOM}


def test_custom_ops_write_what_their_schema_says_and_keep_their_order():
    library = torch.library.Library("aln_effects", "DEF")
    library.define("update(Tensor(a!) x, Tensor y) -> ()")
    library.define("compute(Tensor x, Tensor y) -> Tensor")
    ops = torch.ops.aln_effects
    for update, compute in [(ops.update, ops.compute), (ops.update.default, ops.compute.default)]:
        writes, both = reaches(update)
        assert RANDOM in writes and len(writes & both) == 1
        assert reaches(compute)[0] == {RANDOM}
    library._destroy()


DRAWS = {
    True: [F.dropout, torch.rand, torch.randn_like, torch.bernoulli, "normal_", "uniform_", torch.normal,
           F.scaled_dot_product_attention, F.rrelu, F.gumbel_softmax, torch.lstm, torch.manual_seed,
           "random_", "exponential_", torch.multinomial, aten.native_dropout.default,
           aten.bernoulli_.float, aten.rand.default, aten.rand_like, F.fractional_max_pool2d],
    False: [F.layer_norm, torch.add, "mul", F.gelu, F.normalize, torch.linalg.norm, aten.mul.Tensor,
            aten.native_layer_norm.default, torch.ones, F.linear],
}


@pytest.mark.parametrize("draws", DRAWS)
def test_random_draws(draws):
    for target in DRAWS[draws]:
        build = Build()
        assert (RANDOM in effects_of(build.call(target, build.input())).writes) is draws, target


def test_storage_keys():
    build = Build()
    x = value_of(build.input())
    assert storage_key(x) == storage_key(x[1:].mT) == storage_key(x.view(16))
    assert storage_key(x) != storage_key(x.clone())
    with build.mode:
        sparse = torch.empty(3, 3, layout=torch.sparse_coo)
    assert storage_key(sparse) is None
    assert storages((x, [x, None, 3], sparse)) == {storage_key(x), WORLD}


def test_wrapper_subclasses_have_no_memory_of_their_own():
    from torch.testing._internal.two_tensor import TwoTensor

    inner = torch.ones(3)
    assert storage_key(TwoTensor(inner, inner)) is None
    assert storage_key(nn.Parameter(inner)) is not None
